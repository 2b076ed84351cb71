"""Holes, strangers and unknown owners are named, by tensor, box and ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from rlinf.vps.cover import check_cover
from rlinf.vps.layout import Buffer, ExplicitLayout, Pieces, RankLayout
from rlinf.vps.space import Kind, LayoutError, Space, Tensor
from tests.vps.labelled import layouts, spaces
from tests.vps.test_plan import MANY, P, whole


def of_boxes(*boxes: tuple[int, list[int], list[int]]) -> ExplicitLayout:
    """A tensor ``w`` of 4 x 6, of which (rank, start, size) are held."""
    space = Space((Tensor("w", (4, 6)),))
    world = 1 + max(rank for rank, _, _ in boxes)
    ranks = []
    for rank in range(world):
        rows = [(0, P, start, size, 0, 0, (6, 1)) for owner, start, size in boxes if owner == rank]
        ranks.append(RankLayout(Pieces.of(rows, 2), (Buffer("w", 24, "float32"),)))
    return ExplicitLayout(space, tuple(ranks), (0,) * world)


@given(spaces().flatmap(lambda space: layouts(space, 3)))
@settings(max_examples=60, deadline=None)
def test_it_counts_owners_as_one_does_coordinate_by_coordinate(layout: ExplicitLayout) -> None:
    owners: dict[tuple[int, int], np.ndarray] = {}
    for state in ((t, int(k)) for k in layout.space.kinds for t in range(len(layout.space.tensors))):
        owners[state] = np.zeros(layout.space.shape(state[0]), int)
    for rank in layout.ranks:
        for row in range(len(rank.pieces)):
            at = tuple(slice(a, b) for a, b in zip(rank.pieces.start[row], rank.pieces.end[row], strict=True))
            owners[int(rank.pieces.tensor[row]), int(rank.pieces.kind[row])][at] += 1
    even = all(counts.min() == counts.max() for counts in owners.values())
    if even:
        check_cover(layout)
    else:
        with pytest.raises(LayoutError, match="expected"):
            check_cover(layout)


def test_a_hole_is_named() -> None:
    gap = of_boxes((0, [0, 0], [2, 6]), (1, [2, 0], [2, 3]))
    with pytest.raises(LayoutError, match=r"w \(parameter\): box from \[2, 3\] of \[2, 3\] is held by no rank"):
        check_cover(gap)


def test_two_owners_where_one_is_declared_are_named() -> None:
    """As where pipeline stages use local layer numbers: two tensors meet under one name."""
    twice = of_boxes((0, [0, 0], [4, 6]), (1, [0, 0], [4, 6]))
    check_cover(twice)
    check_cover(twice, copies=2)
    with pytest.raises(LayoutError, match=r"w \(parameter\): box from \[0, 0\] of \[4, 6\] is held by ranks 0, 1, 1"):
        check_cover(twice, copies=1)


def test_a_rank_that_is_missing_from_a_mesh_leaves_a_replica_short() -> None:
    short = of_boxes((0, [0, 0], [2, 6]), (1, [2, 0], [2, 6]), (2, [0, 0], [2, 6]))
    with pytest.raises(LayoutError, match=r"box from \[2, 0\] of \[2, 6\] is held by ranks 1, 2 expected"):
        check_cover(short)


def test_heads_that_are_dealt_unevenly_have_one_owner_at_least() -> None:
    heads = [(0, [0, 0], [1, 6]), (1, [0, 0], [2, 6]), (2, [1, 0], [1, 6]), (3, [1, 0], [2, 6]), (4, [2, 0], [2, 6])]
    check_cover(of_boxes(*heads))
    with pytest.raises(LayoutError, match=r"\[2, 0\] of \[1, 6\] is held by no rank \(a hole\), 1 or more expected"):
        check_cover(of_boxes(*heads[:3], (3, [3, 0], [1, 6])))
    with pytest.raises(LayoutError, match=r"is held by ranks 0, 1, 1 expected"):
        check_cover(of_boxes(*heads), copies=1)


def test_a_box_outside_of_the_tensor_is_named() -> None:
    with pytest.raises(LayoutError, match=r"rank 1 holds box from \[2, 0\] of \[3, 6\], outside of shape \[4, 6\]"):
        check_cover(of_boxes((0, [0, 0], [2, 6]), (1, [2, 0], [3, 6])))


def test_missing_and_strange_states_are_named() -> None:
    layout = whole(MANY, [0], 1)
    more = replace(layout, space=Space(MANY.tensors, {Kind.PARAMETER: "", Kind.EXP_AVG: ""}))
    with pytest.raises(LayoutError, match="no rank holds the exp_avg of any tensor"):
        check_cover(more)
    fewer = replace(layout, space=Space(MANY.tensors, {}))
    with pytest.raises(LayoutError, match="holds parameter, which its space does not have"):
        check_cover(fewer)
    lost = layout.ranks[0].pieces
    with pytest.raises(LayoutError, match="no rank holds the parameter of w0"):
        check_cover(replace(layout, ranks=(replace(layout.ranks[0], pieces=lost.take(lost.tensor != 0)),)))


def test_a_trained_parameter_without_one_of_its_moments_is_named() -> None:
    space = Space(MANY.tensors, {Kind.PARAMETER: "", Kind.EXP_AVG: "", Kind.EXP_AVG_SQ: ""})
    first = whole(MANY, [0], 1).ranks[0].pieces
    parts = [replace(first, kind=np.full(len(first), int(kind), np.int8)) for kind in space.kinds]
    full = ExplicitLayout(space, (RankLayout(Pieces.concat(parts), whole(MANY, [0], 1).ranks[0].buffers),), (0,))
    check_cover(full)

    def having(*parts: Pieces) -> ExplicitLayout:
        return replace(full, ranks=(replace(full.ranks[0], pieces=Pieces.concat(parts)),))

    check_cover(having(parts[0], *(moments.take(moments.tensor > 1) for moments in parts[1:])))  # two are frozen
    with pytest.raises(LayoutError, match=f"no rank holds the exp_avg_sq of {MANY.tensors[5].name}"):
        check_cover(having(*parts[:2], parts[2].take(parts[2].tensor != 5)))
