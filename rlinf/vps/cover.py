"""Whether a layout holds its space exactly: no hole, no owner that nobody knows of. Apart from any digest.

A digest alone agrees on the wrong tensor where names collide, and on a half where both sides lack the other one.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from rlinf.vps.geometry import overlapping
from rlinf.vps.layout import Layout, Pattern
from rlinf.vps.space import OPTIMISER, Kind, LayoutError, Space, few


def check_cover(layout: Layout, copies: int | None = None) -> None:
    """Make sure that every coordinate of every state is held, and by as many ranks as is declared.

    Args:
        copies: ranks that hold each coordinate; ``None``: as many as like, but all coordinates of a tensor alike,
            unless its boxes meet in part (three key-value heads over five ranks): then one at least.

    Raises:
        LayoutError: names the tensor, a box, and the ranks.
    """
    space = layout.space
    nobody = np.full(len(space.tensors), -1, np.int32)
    held = {kind: layout.spread.get(kind, nobody) >= 0 for kind in space.kinds}
    _check_kinds(space, held)
    for kind in space.kinds:
        spread = layout.spread[kind]
        used, first = np.unique(spread, return_index=True)
        for pattern, tensor in zip(used.tolist(), first.tolist(), strict=True):
            if pattern < 0:
                continue
            _check(space, tensor, kind, layout.patterns[pattern], copies)
        shapes = np.array([space.shape(i) for i in range(len(space.tensors))])
        for pattern in used[used >= 0].tolist():
            alike = shapes[spread == pattern]
            if (alike != alike[0]).any():
                odd = int(np.flatnonzero(spread == pattern)[(alike != alike[0]).any(axis=1).argmax()])
                _check(space, odd, kind, layout.patterns[pattern], copies)
    strange = sorted(set(layout.spread) - set(space.kinds))
    if strange:
        raise LayoutError(
            f"the layout holds {few(kind.name.lower() for kind in strange)}, which its space does not have"
        )


def _check_kinds(space: Space, held: Mapping[Kind, NDArray[np.bool_]]) -> None:
    """Every tensor is a parameter or a buffer; a parameter that is trained has all states that any other has."""
    weights = [has for kind, has in held.items() if kind in (Kind.PARAMETER, Kind.BUFFER)]
    if weights:
        lost = [space.tensors[at].name for at in np.flatnonzero(~np.logical_or.reduce(weights))]
        if lost:
            raise LayoutError(f"no rank holds the parameter of {few(lost)}")
    optimiser = {kind: held[kind] for kind in OPTIMISER if kind in held}
    trained = np.logical_or.reduce(list(optimiser.values())) if optimiser else np.zeros(0, bool)
    for kind, has in optimiser.items():
        lost = [space.tensors[at].name for at in np.flatnonzero(trained & ~has)]
        if lost or not has.any():
            raise LayoutError(f"no rank holds the {kind.name.lower()} of {few(lost or ['any tensor'])}")


def _check(space: Space, tensor: int, kind: Kind, pattern: Pattern, copies: int | None) -> None:
    what = f"{space.tensors[tensor].name} ({kind.name.lower()})"
    shape = np.array(space.shape(tensor))
    end = pattern.start + pattern.size
    outside = np.flatnonzero(((pattern.start < 0) | (end > shape)).any(axis=1))
    if len(outside):
        at = int(outside[0])
        raise LayoutError(
            f"{what}: rank {pattern.rank[at]} holds box from {pattern.start[at].tolist()} of "
            f"{pattern.size[at].tolist()}, outside of shape {shape.tolist()}"
        )
    # Cells between all edges: within one, every coordinate has the same owners.
    edges = [np.unique(np.concatenate([[0, n], pattern.start[:, d], end[:, d]])) for d, n in enumerate(shape)]
    counts = np.zeros([len(edge) - 1 for edge in edges], np.int32)
    lows = [np.searchsorted(edge, pattern.start[:, d]) for d, edge in enumerate(edges)]
    highs = [np.searchsorted(edge, end[:, d]) for d, edge in enumerate(edges)]
    for row in range(len(pattern)):
        counts[tuple(slice(low[row], high[row]) for low, high in zip(lows, highs, strict=True))] += 1
    expected = int(counts.max(initial=0)) if copies is None else copies
    uneven = copies is None and overlapping(pattern)
    wrong = np.argwhere(counts < 1 if uneven else counts != expected)
    if len(wrong):
        cell = wrong[0]
        start = [int(edge[i]) for edge, i in zip(edges, cell, strict=True)]
        size = [int(edge[i + 1] - edge[i]) for edge, i in zip(edges, cell, strict=True)]
        inside = ((pattern.start <= start) & (end >= np.add(start, size))).all(axis=1)
        owners = pattern.rank[inside].tolist()
        asked = "1 or more" if uneven else expected
        held = f"is held by ranks {few(map(str, owners))}" if owners else "is held by no rank (a hole)"
        raise LayoutError(
            f"{what}: box from {start} of {size} {held}, {asked} expected: ranks must use global names, and every "
            "shard must have its owners"
        )
