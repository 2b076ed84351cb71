"""Intersections of boxes, vectorised. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from rlinf.vps.layout import Ints, Pattern
from rlinf.vps.space import LayoutError


@dataclass(frozen=True)
class Overlaps:
    """What each rank of a destination takes of a source's boxes, and who has these.

    Attributes:
        dst: int32 ``[A]``, who takes it.
        start, size: int64 ``[A, D]``, what it takes.
        box: int64 ``[A]``, the source's box that it is in.
        first, count: int64 ``[boxes]``: box ``b`` is held by ``holder[first[b] : first[b] + count[b]]``.
        holder: int32, ranks.
    """

    dst: NDArray[np.int32]
    start: Ints
    size: Ints
    box: Ints
    first: Ints
    count: Ints
    holder: NDArray[np.int32]


def overlap(src: Pattern, dst: Pattern) -> Overlaps:
    """Intersect.

    Raises:
        LayoutError: a box of the destination is not covered by the source.
    """
    boxes, which = _distinct(src.start, src.size)
    wanted, whose = _distinct(dst.start, dst.size)
    if _overlapping(boxes):  # cut them where any of them begins or ends; else one could hide a hole behind another
        src, boxes, which = _cut(src)
    start, size, box, want = _intersect(boxes, wanted)
    got = np.zeros(len(wanted[0]), np.int64)
    np.add.at(got, want, size.prod(axis=1))
    asked = wanted[1].prod(axis=1)
    if (got < asked).any():
        hole = int(np.flatnonzero(got < asked)[0])
        ranks = dst.rank[whose == hole]
        raise LayoutError(
            f"box from {wanted[0][hole].tolist()} of {wanted[1][hole].tolist()}, wanted by rank {int(ranks[0])}, has a "
            f"hole: the ranks {np.unique(src.rank)[:8].tolist()} of the source hold {int(got[hole])} of its "
            f"{int(asked[hole])} elements"
        )
    # One row for every rank that wants the box.
    by_box = np.argsort(whose, kind="stable")
    times = np.bincount(whose, minlength=len(wanted[0]))
    begins = np.cumsum(times) - times
    row = np.repeat(np.arange(len(want)), times[want])
    nth = np.arange(len(row)) - np.repeat(np.cumsum(times[want]) - times[want], times[want])
    taker = dst.rank[by_box[begins[want[row]] + nth]]
    held = np.bincount(which, minlength=len(boxes[0]))
    holder = src.rank[np.argsort(which, kind="stable")]
    return Overlaps(taker, start[row], size[row], box[row], np.cumsum(held) - held, held, holder)


def nearest(found: Overlaps, hosts: Ints) -> tuple[Ints, Ints, NDArray[np.int32]]:
    """(first, count, source) of each overlap: the holders of its box that are nearest to who takes it.

    The rank itself, else those of its host, else all.
    """
    count = found.count[found.box]
    row = np.repeat(np.arange(len(found.dst)), count)
    nth = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    source = found.holder[found.first[found.box[row]] + nth]
    taker = found.dst[row]
    distance = np.where(source == taker, 0, np.where(hosts[source] == hosts[taker], 1, 2))
    least = np.minimum.reduceat(distance, np.cumsum(count) - count) if len(row) else distance
    near = distance == least[row]
    kept = np.bincount(row[near], minlength=len(found.dst))
    return np.cumsum(kept) - kept, kept, source[near]


def _distinct(start: Ints, size: Ints) -> tuple[tuple[Ints, Ints], Ints]:
    """Boxes that differ, and which of them each one is."""
    rows, which = np.unique(np.concatenate([start, size], axis=1), axis=0, return_inverse=True)
    ndim = start.shape[1]
    return (rows[:, :ndim], rows[:, ndim:]), which.reshape(-1)


def _intersect(boxes: tuple[Ints, Ints], wanted: tuple[Ints, Ints]) -> tuple[Ints, Ints, Ints, Ints]:
    """(start, size, box, wanted box) of each intersection that is not empty, by wanted box.

    Boxes are swept along the dimension in which they begin at most places.
    """
    start, size = boxes
    along = int(np.argmax([len(np.unique(start[:, d])) for d in range(start.shape[1])]))
    order = np.argsort(start[:, along], kind="stable")
    ends = np.maximum.accumulate((start + size)[order, along])
    low = np.searchsorted(ends, wanted[0][:, along], "right")
    high = np.searchsorted(start[order, along], wanted[0][:, along] + wanted[1][:, along], "left")
    times = np.maximum(high - low, 0)
    want = np.repeat(np.arange(len(times)), times)
    box = order[np.arange(len(want)) - np.repeat(np.cumsum(times) - times, times) + np.repeat(low, times)]
    begin = np.maximum(start[box], wanted[0][want])
    extent = np.minimum((start + size)[box], (wanted[0] + wanted[1])[want]) - begin
    some = (extent > 0).all(axis=1)
    return begin[some], extent[some], box[some], want[some]


def disjoint(pattern: Pattern) -> Pattern:
    """The same with boxes that are equal or disjoint."""
    return _cut(pattern)[0] if overlapping(pattern) else pattern


def overlapping(pattern: Pattern) -> bool:
    """Whether boxes of it meet that are not equal."""
    return _overlapping(_distinct(pattern.start, pattern.size)[0])


def _overlapping(boxes: tuple[Ints, Ints]) -> bool:
    """Whether any of these boxes, which all differ, meets another."""
    return len(boxes[0]) > 0 and len(_intersect(boxes, boxes)[2]) > len(boxes[0])


def _cut(src: Pattern) -> tuple[Pattern, tuple[Ints, Ints], Ints]:
    """A pattern whose boxes are equal or disjoint: each is cut where any other begins or ends."""
    ndim = src.start.shape[1]
    cuts = [np.unique(np.concatenate([src.start[:, d], (src.start + src.size)[:, d]])) for d in range(ndim)]
    rank, start, size = [], [], []
    for owner, begin, end in zip(src.rank, src.start, src.start + src.size, strict=True):
        edges = [
            cuts[d][np.searchsorted(cuts[d], begin[d]) : np.searchsorted(cuts[d], end[d]) + 1] for d in range(ndim)
        ]
        for cell in product(*(range(len(edge) - 1) for edge in edges)):
            rank.append(owner)
            start.append([edges[d][i] for d, i in enumerate(cell)])
            size.append([edges[d][i + 1] - edges[d][i] for d, i in enumerate(cell)])
    cells = Pattern(np.array(rank, np.int32), np.array(start, np.int64), np.array(size, np.int64))
    return cells, *_distinct(cells.start, cells.size)
