"""Every element ends where its label says, whatever the two layouts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.vps.layout import Buffer, ExplicitLayout, Pieces, RankLayout
from rlinf.vps.plan import locate, plan
from rlinf.vps.space import Kind, LayoutError, Space, Tensor
from tests.vps.labelled import buffers, carry, layouts, same, spaces

P = int(Kind.PARAMETER)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[ExplicitLayout, ExplicitLayout]:
    space = draw(spaces())
    src, dst = (draw(layouts(space, draw(st.integers(1, 4)))) for _ in range(2))
    return src, dst


@given(pairs())
@settings(max_examples=200, deadline=None)
def test_every_element_ends_where_its_label_says(sides) -> None:
    src, dst = sides
    assert same(carry(plan(src, dst)), buffers(dst, True))


@given(pairs())
@settings(max_examples=100, deadline=None)
def test_both_sides_of_a_pair_have_the_same_moves_and_the_traffic_counts_them(sides) -> None:
    made = plan(*sides)
    world = max(made.src.world, made.dst.world)
    parts = [made.part(rank) for rank in range(world)]
    counted: dict[tuple[int, int], int] = {}
    for rank in range(world):
        for peer in range(world):
            sent = parts[rank].sends.take(parts[rank].sends.dst == peer)
            got = parts[peer].receives.take(parts[peer].receives.src == rank)
            assert len(sent) == len(got)
            for column in ("tensor", "kind", "start", "size", "width"):
                assert np.array_equal(getattr(sent, column), getattr(got, column))
            if len(sent):
                counted[rank, peer] = int(sent.nbytes.sum())
    found = made.traffic().between()
    assert counted == dict(zip(zip(found.src.tolist(), found.dst.tolist(), strict=True), found.nbytes, strict=True))


@given(pairs())
@settings(max_examples=100, deadline=None)
def test_what_is_there_already_stays_and_what_is_on_the_host_is_taken_from_it(sides) -> None:
    src, dst = sides
    made = plan(src, dst)
    hosts = src.hosts if src.world >= dst.world else dst.hosts
    held = [
        {(int(p.tensor[i]), int(p.kind[i]), *p.start[i], *p.size[i]) for i in range(len(p))}
        for p in (rank.pieces for rank in src.ranks)
    ]

    def holders(moves, row) -> set[int]:
        """Ranks that hold the whole box in one piece, by brute force."""
        begin, end = moves.start[row], moves.start[row] + moves.size[row]
        ndim = src.space.ndim
        return {
            rank
            for rank, boxes in enumerate(held)
            for box in boxes
            if box[:2] == (int(moves.tensor[row]), int(moves.kind[row]))
            and all(np.array(box[2 : 2 + ndim]) <= begin)
            and all(np.array(box[2 : 2 + ndim]) + np.array(box[2 + ndim :]) >= end)
        }

    for rank in range(dst.world):
        got = made.part(rank).receives
        for row in range(len(got)):
            able = holders(got, row)
            assert int(got.src[row]) in able
            assert rank not in able
            if any(hosts[other] == hosts[rank] for other in able):
                assert hosts[got.src[row]] == hosts[rank]


def whole(space: Space, ranks: list[int], world: int, dtype: str = "float32") -> ExplicitLayout:
    """Every tensor whole on each of these ranks, in a buffer of its own."""
    from rlinf.vps.layout import dense

    rows = [(t, P, [0] * len(x.shape), x.shape, t, 0, dense(x.shape)) for t, x in enumerate(space.tensors)]
    held = RankLayout(
        Pieces.of(rows, space.ndim), tuple(Buffer(tensor.name, tensor.numel, dtype) for tensor in space.tensors)
    )
    nothing = RankLayout(Pieces.empty(space.ndim), ())
    return ExplicitLayout(space, tuple(held if r in ranks else nothing for r in range(world)), (0,) * world)


MANY = Space(tuple(Tensor(f"w{i}", (4, 6)) for i in range(12)))


def test_replicas_share_the_load() -> None:
    made = plan(whole(MANY, [0, 1, 2], 6), whole(MANY, [3, 4, 5], 6))
    sent = [int(made.part(rank).sends.nbytes.sum()) for rank in range(3)]
    assert sent == [12 * 24 * 4] * 3


def test_the_narrower_dtype_goes_over_the_wire() -> None:
    made = plan(whole(MANY, [0], 2), whole(MANY, [1], 2, "bfloat16"))
    assert int(made.part(0).sends.nbytes.sum()) == 12 * 24 * 2


def test_equal_layouts_agree_by_hash_and_others_do_not() -> None:
    one = plan(whole(MANY, [0], 2), whole(MANY, [1], 2))
    assert one.hash == plan(whole(MANY, [0], 2), whole(MANY, [1], 2)).hash
    assert one.hash != plan(whole(MANY, [0], 2), whole(MANY, [0], 2)).hash


def test_a_tensor_that_is_held_twice_under_two_names_is_sent_once_and_put_in_both_places() -> None:
    space = Space((Tensor("embed", (4, 2)),), aliases={"head": "embed"})
    src = whole(space, [0], 2)
    both = [(space.find(name), P, (0, 0), (4, 2), i, 0, (2, 1)) for i, name in enumerate(("embed", "head"))]
    held = RankLayout(Pieces.of(both, 2), (Buffer("embed", 8, "float32"), Buffer("head", 8, "float32")))
    dst = ExplicitLayout(space, (RankLayout(Pieces.empty(2), ()), held), (0, 0))
    made = plan(src, dst)
    assert len(made.part(1).receives) == 1
    assert same(carry(made), buffers(dst, True))


def test_ranks_that_hold_nothing_are_ranks_like_others() -> None:
    nothing = ExplicitLayout(MANY, (RankLayout(Pieces.empty(2), ()),) * 4, (0,) * 4)
    assert list(nothing.nbytes) == [0] * 4
    assert not nothing.patterns
    for src, dst in ((whole(MANY, [3], 4), whole(MANY, [1], 4)), (whole(MANY, [0], 4), nothing), (nothing, nothing)):
        assert same(carry(plan(src, dst)), buffers(dst, True))
    with pytest.raises(LayoutError, match="the source does not hold the parameter of w0"):
        plan(nothing, whole(MANY, [1], 4))


def test_other_models_are_refused_by_name() -> None:
    other = Space((*MANY.tensors, Tensor("extra", (2,))))
    with pytest.raises(LayoutError, match="the destination alone has extra"):
        plan(whole(MANY, [0], 1), whole(other, [0], 1))
    with pytest.raises(LayoutError, match="the source alone has extra"):
        plan(whole(other, [0], 1), whole(MANY, [0], 1))
    reshaped = Space((Tensor("w0", (6, 4)), *MANY.tensors[1:]))
    with pytest.raises(LayoutError, match=r"w0 has shape \(4, 6\) at the source, \(6, 4\) at the destination"):
        plan(whole(MANY, [0], 1), whole(reshaped, [0], 1))


def test_a_hole_at_the_source_names_tensor_box_and_ranks() -> None:
    src = whole(MANY, [0], 2)
    pieces = src.ranks[0].pieces
    short = replace(pieces, size=np.where(pieces.tensor[:, None] == 3, pieces.size - [[1, 0]], pieces.size))
    src = replace(src, ranks=(replace(src.ranks[0], pieces=short), src.ranks[1]))
    name = src.space.tensors[3].name
    expected = (
        rf"{name} \(parameter\): box from \[0, 0\] of \[4, 6\], wanted by rank 1, has a hole.*\[0\].* 18 of its 24"
    )
    with pytest.raises(LayoutError, match=expected):
        plan(src, whole(MANY, [1], 2))


def test_a_state_that_the_source_lacks_is_named() -> None:
    src = whole(MANY, [0], 2)
    lacking = replace(src.ranks[0], pieces=src.ranks[0].pieces.take(src.ranks[0].pieces.tensor != 2))
    with pytest.raises(LayoutError, match=f"does not hold the parameter of {MANY.tensors[2].name}"):
        plan(replace(src, ranks=(lacking, src.ranks[1])), whole(MANY, [1], 2))


def test_a_dtype_that_cannot_be_cast_is_named() -> None:
    with pytest.raises(LayoutError, match=r"w0 \(parameter\) is float32 at the source and int8"):
        plan(whole(MANY, [0], 2), whole(MANY, [1], 2, "int8"))


def test_moves_of_another_layout_are_refused() -> None:
    made = plan(whole(MANY, [0], 2), whole(MANY, [1], 2))
    with pytest.raises(LayoutError, match="is not held by the rank"):
        locate(Pieces.empty(2), made.part(0).sends)


def of_ranges(numel: int, *ranks: list[tuple[int, int]]) -> ExplicitLayout:
    """A tensor of one dimension, of which each rank holds some ranges ``[low, high)``, one after the other."""
    space, held = Space((Tensor("w", (numel,)),)), []
    for ranges in ranks:
        ends = np.cumsum([0, *(high - low for low, high in ranges)]).tolist()
        rows = [(0, P, [low], [high - low], 0, at, (1,)) for (low, high), at in zip(ranges, ends, strict=False)]
        held.append(RankLayout(Pieces.of(rows, 1), (Buffer("w", ends[-1], "float32"),)))
    return ExplicitLayout(space, tuple(held), (0,) * len(ranks))


def test_a_hole_is_seen_where_boxes_that_overlap_hold_as_many_elements_as_are_wanted() -> None:
    src, dst = of_ranges(6, [(0, 4)], [(2, 4)], []), of_ranges(6, [], [], [(0, 6)])
    with pytest.raises(LayoutError, match=r"w \(parameter\): .*wanted by rank 2, has a hole: .* hold 4 of its 6"):
        plan(src, dst)


ranges = st.tuples(st.integers(0, 6), st.integers(0, 6)).filter(lambda r: r[0] < r[1])


@given(st.lists(st.lists(ranges, max_size=2), min_size=1, max_size=4), st.lists(ranges, min_size=1, max_size=2))
@settings(max_examples=200, deadline=None)
def test_any_ranges_that_may_overlap_are_carried_or_their_hole_is_named(held, wanted) -> None:
    src, dst = of_ranges(6, *held), of_ranges(6, *[[] for _ in held], wanted)
    have = {i for ranges in held for low, high in ranges for i in range(low, high)}
    if have >= {i for low, high in wanted for i in range(low, high)}:
        assert same(carry(plan(src, dst)), buffers(dst, True))
    else:
        with pytest.raises(LayoutError, match=r"has a hole|does not hold"):
            plan(src, dst)
