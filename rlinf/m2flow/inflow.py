"""Rows on their way into a stage: kept until a piece of them is whole, then handed over joined and in order. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlinf.batch import ROW, Batch
from rlinf.errors import WorkflowError
from rlinf.m2flow.rows import Ints


class Inflow:
    """Pieces of a stage's input, from several sources that each bring some fields of every row.

    Args:
        name: of the stage, for messages.
        sources: how many there are.
        expected: row ids of each piece, in order; ``None``: one piece with whatever comes.
        in_order: hand the pieces over in their order; otherwise whichever is whole first.
        merge: hand over all that are whole together.
    """

    def __init__(
        self, name: str, sources: int, expected: Sequence[Ints] | None, *, in_order: bool = False, merge: bool = False
    ) -> None:
        self.name = name
        self.in_order = in_order
        self.merge = merge
        self._open = sources
        self._batches: list[list[Batch]] = [[] for _ in range(sources)]
        self._places: list[dict[int, tuple[int, int]]] = [{} for _ in range(sources)]  # row -> (batch, position)
        self._everything = expected is None
        self._pieces = [piece.tolist() for piece in expected or ()]
        self._piece_of = {row: i for i, piece in enumerate(self._pieces) for row in piece}
        self._lacks = [len(piece) * sources for piece in self._pieces]
        self._left = dict.fromkeys(range(1 if self._everything else len(self._pieces)))

    @property
    def over(self) -> bool:
        """Nothing is left to hand over."""
        return not self._left

    def add(self, source: int, batch: Batch) -> None:
        """Take in rows of a source.

        Raises:
            WorkflowError: a row that is none of those expected, or that came before.
        """
        if not batch.n and self._batches[source]:
            return
        number = len(self._batches[source])
        self._batches[source].append(batch)
        if self._everything or not batch.n:
            return
        places = self._places[source]
        for position, row in enumerate(batch[ROW].tolist()):
            if row not in self._piece_of or row in places:
                why = "came twice" if row in places else "does not follow from the rows that its source made"
                raise WorkflowError(f"{self.name}: row {row} {why}; a stage returns each row that it is given once")
            places[row] = number, position
            self._lacks[self._piece_of[row]] -= 1

    def close(self, source: int) -> None:
        """A source has nothing more."""
        self._open -= 1

    def take(self) -> Batch | None:
        """The next piece, or ``None``: it is not whole yet.

        Raises:
            WorkflowError: the sources have ended, and did not bring the same rows.
        """
        if self.over or (self._everything and self._open):
            return None
        if self._everything:
            self._left.clear()
            return self._join([_sorted(Batch.concat(batches)) for batches in self._batches])
        whole = []
        for piece in self._left:
            if self._open and self._lacks[piece]:
                if self.in_order:
                    break
                continue
            whole.append(piece)
            if not self.merge:
                break
        if not whole:
            return None
        rows = sorted(row for piece in whole for row in self._pieces[piece])
        for piece in whole:
            del self._left[piece]
        return self._join([self._select(source, rows) for source in range(len(self._batches))])

    def _select(self, source: int, rows: Sequence[int]) -> Batch:
        """These rows of a source, those that came (a stage may leave rows out), by id."""
        places = self._places[source]
        at = sorted(places.pop(row) for row in rows if row in places)
        if not at:
            template = next(iter(self._batches[source]), Batch({}))
            return template.select([])
        parts, batches = [], self._batches[source]
        for number in dict.fromkeys(number for number, _ in at):
            parts.append(batches[number].select([position for owner, position in at if owner == number]))
        return _sorted(Batch.concat(parts))

    def _join(self, parts: Sequence[Batch]) -> Batch:
        joined = parts[0]
        for part in parts[1:]:
            try:
                joined = joined.join(part) if joined.n or part.n else Batch({**joined, **part}, rows=0)
            except (KeyError, ValueError) as error:
                raise WorkflowError(f"{self.name}: {error}") from None
        return joined


def _sorted(batch: Batch) -> Batch:
    if batch.n < 2:
        return batch
    rows = batch[ROW]
    return batch if bool(torch.all(rows[1:] > rows[:-1])) else batch.sorted()
