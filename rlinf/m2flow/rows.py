"""Which rows a rank gets, and in which pieces: known from a source's row ids before any row is made. Pure.

Ids are the ground: a stage that makes ``n`` rows of each gives them ids that follow from the row's own, so that every
rank can tell which rows will come to it, in which order, and how many times each rank of its group will be called.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlinf.m2flow.stage import Unit

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Lineage:
    """Where rows come from.

    Attributes:
        source: index of the source node.
        factors: by how many each row was multiplied on the way, in order; ``None`` where that is not known before.
    """

    source: int
    factors: tuple[int, ...] | None

    @property
    def group(self) -> int:
        """Rows that belong together, the samples of one row; 0: there are no groups, or their size is not known."""
        return self.factors[-1] if self.factors else 0


def grouped(unit: Unit) -> bool:
    """Whether a unit keeps the rows of a group together."""
    return unit in (Unit.GROUP, Unit.TRAJECTORY)


def descend(ids: Ints, factors: Sequence[int]) -> Ints:
    """Ids of the rows that a source's rows become: row ``p`` of ``n`` becomes ``p * n .. p * n + n - 1``."""
    for n in factors:
        ids = (ids[:, None] * n + np.arange(n)).reshape(-1)
    return ids


def share(ids: Ints, group: int, unit: Unit, dp: int, rank: int) -> Ints:
    """Those that go to a data-parallel rank, ascending: round-robin by row, or by group where groups stay whole."""
    place = ids // group if grouped(unit) and group else ids
    return np.sort(ids[place % dp == rank])


def cut(ids: Ints, group: int, unit: Unit, granularity: int) -> list[Ints]:
    """A rank's rows in pieces of ``granularity`` (0: all in one), at least one group where groups stay whole."""
    if not granularity:
        return [ids]
    size = max(granularity // group, 1) * group if grouped(unit) and group else granularity
    return [ids[start : start + size] for start in range(0, len(ids), size)]


def pieces(ids: Ints, group: int, unit: Unit, dp: int, rank: int, granularity: int, even: bool) -> list[Ints]:
    """Pieces of a rank, in order.

    Args:
        ids: of all rows of the stage's input.
        group: rows of a group, 0 without groups.
        unit: what may not be cut.
        dp: data-parallel size.
        rank: data-parallel rank.
        granularity: rows of a piece; 0: all.
        even: every rank gets as many pieces as the one with the most, empty ones at the end: its calls are collective.
    """
    mine = cut(share(ids, group, unit, dp, rank), group, unit, granularity)
    if even:
        most = max(len(cut(share(ids, group, unit, dp, other), group, unit, granularity)) for other in range(dp))
        mine += [ids[:0]] * (most - len(mine))
    return mine
