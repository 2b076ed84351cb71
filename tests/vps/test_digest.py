"""The digest is of the state, not of its layout; and of all of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.vps.digest import digest, owned, total
from rlinf.vps.layout import Buffer, ExplicitLayout, Pieces, RankLayout
from rlinf.vps.mesh import Mesh, MeshLayout
from rlinf.vps.space import Kind, Space, Tensor
from tests.vps.labelled import buffers, layouts, spaces
from tests.vps.test_mesh import config

P = Kind.PARAMETER


def of(layout) -> dict[Kind, int]:
    world = buffers(layout, True)
    return total([digest(layout, r, [torch.from_numpy(b) for b in mine]) for r, mine in enumerate(world)])


@given(spaces().flatmap(lambda s: st.tuples(layouts(s, 3), layouts(s, 4))))
@settings(max_examples=60, deadline=None)
def test_any_two_layouts_of_a_state_have_one_digest(sides) -> None:
    assert of(sides[0]) == of(sides[1])


@pytest.mark.parametrize(
    "mesh", [Mesh(tp=4), Mesh(tp=2, pp=3, dp=2, ep=2), Mesh(dp=5, fsdp=True), Mesh(dp=3, zero1=True)]
)
def test_replicas_repeated_heads_and_flat_ranges_count_once(mesh: Mesh) -> None:
    kinds = {Kind.PARAMETER: "bfloat16", Kind.EXP_AVG: "float32"}
    assert of(MeshLayout(config(), mesh, kinds)) == of(MeshLayout(config(), Mesh(), kinds))


@given(spaces().flatmap(lambda s: layouts(s, 4)))
@settings(max_examples=60, deadline=None)
def test_every_coordinate_is_counted_by_one_rank(layout) -> None:
    seen = {
        (t, int(k)): np.zeros(layout.space.shape(t), int)
        for t in range(len(layout.space.tensors))
        for k in layout.space.kinds
    }
    for rank in range(layout.world):
        pieces = owned(layout, rank)
        for row in range(len(pieces)):
            box = tuple(slice(a, b) for a, b in zip(pieces.start[row], pieces.end[row], strict=True))
            seen[int(pieces.tensor[row]), int(pieces.kind[row])][box] += 1
    assert all((counts == 1).all() for counts in seen.values())


def alone(values: torch.Tensor, name: str = "w") -> int:
    space = Space((Tensor(name, tuple(values.shape)),))
    strides = values.contiguous().stride()
    pieces = Pieces.of([(0, int(P), (0,) * values.ndim, values.shape, 0, 0, strides)], space.ndim)
    dtype = str(values.dtype).removeprefix("torch.")
    layout = ExplicitLayout(space, (RankLayout(pieces, (Buffer(name, values.numel(), dtype),)),), (0,))
    return total([digest(layout, 0, [values.contiguous().view(-1)])])[P]


SOME = torch.randn(6, 6, generator=torch.Generator().manual_seed(1))


def test_swaps_transposition_shifts_and_other_names_show() -> None:
    rows = SOME[[1, 0, 2, 3, 4, 5]]
    columns = SOME[:, [0, 1, 2, 3, 5, 4]]
    diagonal = SOME.clone()
    diagonal[0, 0], diagonal[1, 1] = SOME[1, 1], SOME[0, 0]
    changed = [
        SOME,
        rows,
        columns,
        diagonal,
        SOME.T,
        SOME.roll(1, 0),
        SOME.roll(1, 1),
        SOME.flip(0),
        -SOME,
        SOME.view(36),
    ]
    found = [alone(values) for values in changed] + [alone(SOME, "v")]
    assert len(set(found)) == len(found)


@given(st.integers(0, 35), st.integers(0, 31))
@settings(max_examples=80, deadline=None)
def test_a_single_bit_shows(place: int, bit: int) -> None:
    changed = SOME.clone().view(torch.int32)
    changed.view(-1)[place] ^= -(2**31) if bit == 31 else 1 << bit
    assert alone(changed.view(torch.float32)) != alone(SOME)


def test_values_that_move_from_one_element_to_another_show_though_their_sum_is_the_same() -> None:
    values = torch.zeros(4, 4, dtype=torch.int32)
    for a in range(16):
        for b in range(a):
            changed = values.clone().view(-1)
            changed[a] += 5
            changed[b] -= 5
            assert alone(changed.view(4, 4)) != alone(values)


def test_zeros_of_another_shape_show() -> None:
    assert len({alone(torch.zeros(shape)) for shape in [(4, 3), (3, 4), (12,), (2, 6)]}) == 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.float32, torch.bfloat16, torch.uint8])
def test_what_is_digested_stays_as_it_is(dtype: torch.dtype) -> None:
    values = torch.arange(12).view(3, 4).to(dtype)
    assert alone(values) == alone(values)
    assert torch.equal(values, torch.arange(12).view(3, 4).to(dtype))
    values.untyped_storage().resize_(0)  # it can still be freed
