"""Which process takes which rank of the new layout: as many bytes as possible stay where they are. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rlinf.vps.geometry import overlap
from rlinf.vps.layout import Ints, Layout, Pattern, RankLayout
from rlinf.vps.plan import alike
from rlinf.vps.space import Kind, LayoutError, Space


@dataclass(frozen=True)
class Permuted:
    """A layout whose rank ``r`` is the process ``order[r]``."""

    layout: Layout
    order: tuple[int, ...]

    def __post_init__(self) -> None:
        if sorted(self.order) != list(range(self.layout.world)):
            raise LayoutError(f"{self.order} is not an order of {self.layout.world} ranks: each comes once")

    @property
    def space(self) -> Space:
        return self.layout.space

    @property
    def world(self) -> int:
        return self.layout.world

    @property
    def hosts(self) -> Sequence[int]:
        return self.layout.hosts  # of processes, which stay where they are

    @cached_property
    def patterns(self) -> Sequence[Pattern]:
        order = np.array(self.order, np.int32)
        found = []
        for pattern in self.layout.patterns:
            rank = order[pattern.rank]
            by_rank = np.argsort(rank, kind="stable")
            found.append(Pattern(rank[by_rank], pattern.start[by_rank], pattern.size[by_rank]))
        return tuple(found)

    @property
    def spread(self) -> Mapping[Kind, NDArray[np.int32]]:
        return self.layout.spread

    @property
    def nbytes(self) -> Ints:
        found = np.empty(self.world, np.int64)
        found[list(self.order)] = self.layout.nbytes
        return found

    def dtypes(self, kind: Kind) -> NDArray[np.int8]:
        return self.layout.dtypes(kind)

    def of(self, rank: int) -> RankLayout:
        return self.layout.of(self.order.index(rank))

    @property
    def hash(self) -> str:
        return hashlib.blake2b(f"{self.layout.hash} {self.order}".encode(), digest_size=16).hexdigest()


def held_in_common(src: Layout, dst: Layout) -> Ints:
    """int64 ``[world, world]``: bytes (as they travel) that process ``p`` has of what rank ``r`` wants."""
    world = max(src.world, dst.world)
    total = np.zeros(world * world, np.int64)
    for rows in alike(src, dst):
        source, target = rows[0, :2].tolist()
        found = overlap(src.patterns[source], dst.patterns[target])
        count = found.count[found.box]
        row = np.repeat(np.arange(len(found.dst)), count)
        nth = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
        process = found.holder[found.first[found.box[row]] + nth].astype(np.int64)
        nbytes = found.size.prod(axis=1)[row] * len(rows) * int(rows[0, 2:4].min())
        np.add.at(total, process * world + found.dst[row], nbytes)
    return total.reshape(world, world)


def stay(src: Layout, dst: Layout) -> Permuted:
    """Number the processes of ``dst`` anew so that most bytes stay (an assignment problem, solved exactly).

    Raises:
        LayoutError: the sides have different numbers of processes, or do not fit.
    """
    from scipy.optimize import linear_sum_assignment

    if src.world != dst.world:
        raise LayoutError(f"{src.world} processes cannot take the ranks of {dst.world}: give both layouts one world")
    process, rank = linear_sum_assignment(held_in_common(src, dst), maximize=True)
    order = np.empty(dst.world, np.int64)
    order[rank] = process
    return Permuted(dst, tuple(order.tolist()))
