"""Which bytes of a memory are free. Pure arithmetic."""

from __future__ import annotations

from bisect import bisect_left

ALIGNED = 64  # bytes; where tensors begin


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNED) * ALIGNED


class Ranges:
    """Ranges of a memory of ``size`` bytes: first fit, neighbours that are free become one again."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._starts = [0]
        self._ends = [size]
        self._taken: dict[int, int] = {}

    def take(self, nbytes: int) -> int | None:
        """The start of a range, or ``None`` where none is large enough."""
        nbytes = max(aligned(nbytes), ALIGNED)
        for i, (start, end) in enumerate(zip(self._starts, self._ends, strict=True)):
            if end - start >= nbytes:
                self._starts[i] += nbytes
                if self._starts[i] == end:
                    del self._starts[i], self._ends[i]
                self._taken[start] = nbytes
                return start
        return None

    def give(self, start: int) -> None:
        """A range is free again."""
        end = start + self._taken.pop(start)
        i = bisect_left(self._starts, start)
        if i < len(self._starts) and self._starts[i] == end:
            end = self._ends[i]
            del self._starts[i], self._ends[i]
        if i and self._ends[i - 1] == start:
            self._ends[i - 1] = end
        else:
            self._starts.insert(i, start)
            self._ends.insert(i, end)

    @property
    def empty(self) -> bool:
        return not self._taken

    @property
    def free(self) -> int:
        return sum(self._ends) - sum(self._starts)
