"""What a reader holds after a sync, against what was published: digests of the same boxes of logical coordinates.

Where a box lies, at the source and here, is looked up in the two layouts and not in the plan by which its bytes came.
So a plan that took them from a wrong place shows, as bytes that were lost or changed do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from rlinf.vps.digest import digest_of_box, owned
from rlinf.vps.layout import ExplicitLayout, Pieces, RankLayout
from rlinf.vps.space import Space

_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class _Box:
    """A box of a tensor in a flat buffer of a rank; in the tensor's own dimensions."""

    rank: int
    buffer: int
    start: tuple[int, ...]
    size: tuple[int, ...]
    offset: int
    stride: tuple[int, ...]

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.as_strided(self.size, self.stride, int(flat.storage_offset()) + self.offset)

    def common(self, other: _Box) -> _Box | None:
        """What it has in common with another box of the tensor, as it lies in this one."""
        low = tuple(max(a, b) for a, b in zip(self.start, other.start, strict=True))
        ends = zip(self.start, self.size, other.start, other.size, strict=True)
        size = tuple(min(a + n, b + m) - at for at, (a, n, b, m) in zip(low, ends, strict=True))
        if any(n <= 0 for n in size):
            return None
        shift = sum((at - a) * s for at, a, s in zip(low, self.start, self.stride, strict=True))
        return _Box(self.rank, self.buffer, low, size, self.offset + shift, self.stride)


class Published:
    """Where each coordinate lies at its source, once. Worked out once for a source."""

    def __init__(self, source: ExplicitLayout) -> None:
        self.space = source.space
        self._boxes: dict[int, list[_Box]] = {}
        for rank in range(source.world):
            for tensor, boxes in _by_tensor(source.space, owned(source, rank), rank).items():
                self._boxes.setdefault(tensor, []).extend(boxes)

    def digest(
        self, sources: Sequence[Sequence[torch.Tensor]], tensor: int, box: _Box, dtype: torch.dtype
    ) -> tuple[int, list[int]]:
        """(the digest of a box as it was published, in the dtype that it is held in; the ranks that published it)."""
        found, ranks = 0, []
        for there in self._boxes.get(tensor, ()):
            if (common := there.common(box)) is not None:
                values = common.of(sources[there.rank][there.buffer]).to(dtype)
                found += digest_of_box(values, self.space.tensors[tensor].name, common.start)
                ranks.append(there.rank)
        return found & _MASK, sorted(set(ranks))


class Check:
    """What a reader holds of a source.

    Args:
        published: the source.
        held: the reader's layout; every place of a tensor is checked, so that tied ones are equal too.
    """

    def __init__(self, published: Published, held: RankLayout) -> None:
        self._published = published
        self._names = [buffer.name for buffer in held.buffers]
        self._boxes = _by_tensor(published.space, held.pieces, 0)

    @torch.no_grad()
    def wrong(
        self,
        sources: Sequence[Sequence[torch.Tensor]],
        targets: Mapping[int, torch.Tensor],
        tensors: Sequence[int] | None = None,
    ) -> list[str]:
        """Which boxes are not what was published; each with its tensor, its place and the source ranks.

        Args:
            sources: what source ranks publish, by rank and buffer, flat.
            targets: by buffer of the reader's layout, flat; others are left out.
            tensors: indices into the space; all by default.
        """
        found = []
        for tensor in self._boxes if tensors is None else tensors:
            name = self._published.space.tensors[tensor].name
            for box in self._boxes.get(tensor, ()):
                if (target := targets.get(box.buffer)) is None:
                    continue
                expected, ranks = self._published.digest(sources, tensor, box, target.dtype)
                if digest_of_box(box.of(target), name, box.start) != expected:
                    place = self._names[box.buffer]
                    found.append(
                        f"{name}{f' (in {place})' if place != name else ''}: box from {list(box.start)} of "
                        f"{list(box.size)} is not what source ranks {ranks} published (its digest differs)"
                    )
        return found


def _by_tensor(space: Space, pieces: Pieces, rank: int) -> dict[int, list[_Box]]:
    found: dict[int, list[_Box]] = {}
    for row, tensor in enumerate(pieces.tensor.tolist()):
        ndim = len(space.tensors[tensor].shape)
        start, size, stride = (tuple(each[row, :ndim].tolist()) for each in (pieces.start, pieces.size, pieces.stride))
        box = _Box(rank, int(pieces.buffer[row]), start, size, int(pieces.offset[row]), stride)
        found.setdefault(tensor, []).append(box)
    return found
