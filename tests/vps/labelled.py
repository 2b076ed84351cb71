"""The reference for every relayout: each element is the label of its logical coordinate, moved one by one."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
from hypothesis import strategies as st

from rlinf.vps.layout import Buffer, ExplicitLayout, Layout, Pieces, RankLayout, dense
from rlinf.vps.plan import Moves, Plan, locate
from rlinf.vps.space import Kind, Space, Tensor

EMPTY = -1
World = list[list[np.ndarray]]


def label(space: Space, tensor: int, kind: int, coordinate: tuple[int, ...]) -> int:
    """A number that no other element of the state has."""
    shape = space.shape(tensor)
    return (kind * len(space.tensors) + tensor) * 10**6 + int(np.ravel_multi_index(coordinate, shape))


def elements(pieces: Pieces, row: int):
    """(logical coordinate, place in the buffer) of each element of a piece."""
    for step in product(*(range(size) for size in pieces.size[row].tolist())):
        at = tuple(int(s) + i for s, i in zip(pieces.start[row], step, strict=True))
        yield at, int(pieces.offset[row] + np.dot(step, pieces.stride[row]))


def buffers(layout: Layout, filled: bool) -> World:
    """Every rank's buffers, with labels where a piece lies, and elsewhere empty."""
    world = []
    for rank in range(layout.world):
        held = layout.of(rank)
        mine = [np.full(buffer.numel, EMPTY, np.int64) for buffer in held.buffers]
        for row in range(len(held.pieces) if filled else 0):
            tensor, kind = int(held.pieces.tensor[row]), int(held.pieces.kind[row])
            for coordinate, place in elements(held.pieces, row):
                mine[held.pieces.buffer[row]][place] = label(layout.space, tensor, kind, coordinate)
        world.append(mine)
    return world


def carry(plan: Plan) -> World:
    """Run a plan on labels: what each rank sends, and keeps, is taken from its pieces and put where the plan says."""
    have, get = buffers(plan.src, True), buffers(plan.dst, False)
    for rank in range(max(plan.src.world, plan.dst.world)):
        part = plan.part(rank)
        for moves in (part.sends, part.local):
            for row in range(len(moves)):
                one = moves.take(slice(row, row + 1))
                source, target = int(one.src[0]), int(one.dst[0])
                assert source == rank
                values = _read(have[rank], plan.src.of(rank).pieces, one)
                _write(get[target], plan.dst.of(target).pieces, one, values)
    return get


def _read(have: list[np.ndarray], pieces: Pieces, one: Moves) -> list[int]:
    at = locate(pieces, one)
    return [int(have[at.buffer[0]][at.offset[0] + np.dot(step, at.stride[0])]) for step in _steps(one)]


def _write(get: list[np.ndarray], pieces: Pieces, one: Moves, values: list[int]) -> None:
    at = locate(pieces, one)
    for buffer, offset, stride in zip(at.buffer, at.offset, at.stride, strict=True):
        for step, value in zip(_steps(one), values, strict=True):
            place = offset + np.dot(step, stride)
            assert get[buffer][place] in (EMPTY, value), "an element came twice, and differs"
            get[buffer][place] = value


def _steps(one: Moves):
    return product(*(range(size) for size in one.size[0].tolist()))


def same(found: World, expected: World) -> bool:
    return all(
        np.array_equal(f, e) for fs, es in zip(found, expected, strict=True) for f, e in zip(fs, es, strict=True)
    )


# Random spaces and layouts


@st.composite
def spaces(draw: st.DrawFn, most: int = 3) -> Space:
    """Scalars, odd sizes, dimensions of 1; up to three dimensions."""
    shapes = draw(st.lists(st.lists(st.integers(1, 5), max_size=3), min_size=1, max_size=most))
    kinds = draw(st.sampled_from([{Kind.PARAMETER: ""}, {Kind.PARAMETER: "", Kind.EXP_AVG: "float32"}]))
    return Space(tuple(Tensor(f"t{i}", tuple(shape)) for i, shape in enumerate(shapes)), kinds)


def _partition(draw: st.DrawFn, shape: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Boxes (start, size) that make up a tensor: a grid with uneven cuts, or runs of its flat order."""
    numel = int(np.prod(shape, dtype=np.int64))
    if draw(st.booleans()):
        cuts = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=3))}) for n in shape]
        cells = product(*(list(pairwise(cut)) for cut in cuts))
        return [([low for low, _ in cell], [high - low for low, high in cell]) for cell in cells]
    edges = sorted({0, numel, *draw(st.lists(st.integers(0, numel), max_size=3))})
    return [box for low, high in pairwise(edges) for box in runs(low, high, shape)]


def runs(low: int, high: int, shape: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """The flat range ``[low, high)`` as boxes, one for each row of the last dimension that it meets."""
    if not shape:
        return [([], [])]
    last, found = shape[-1], []
    for row in range(low // last, (high - 1) // last + 1):
        first, end = max(low, row * last), min(high, (row + 1) * last)
        lead = list(np.unravel_index(row, shape[:-1])) if shape[:-1] else []
        found.append(([*map(int, lead), first - row * last], [*[1] * len(lead), end - first]))
    return found


@st.composite
def layouts(draw: st.DrawFn, space: Space, world: int) -> ExplicitLayout:
    """Each box on one rank or on several; a rank's boxes fused into one buffer or apart, in rows or transposed."""
    rows: list[list] = [[] for _ in range(world)]
    sizes: list[list[int]] = [[] for _ in range(world)]
    for tensor, kind in product(range(len(space.tensors)), space.kinds):
        for start, size in _partition(draw, space.tensors[tensor].shape):
            for rank in draw(st.sets(st.integers(0, world - 1), min_size=1, max_size=2)):
                numel = int(np.prod(size, dtype=np.int64))
                gap = draw(st.integers(0, 2))
                if not sizes[rank] or draw(st.booleans()):
                    sizes[rank].append(0)
                offset = sizes[rank][-1] + gap
                stride = dense(size) if draw(st.booleans()) else dense(size[::-1])[::-1]
                rows[rank].append((tensor, int(kind), start, size, len(sizes[rank]) - 1, offset, stride))
                sizes[rank][-1] = offset + numel
    ranks = [
        RankLayout(
            Pieces.of(rows[rank], space.ndim), tuple(Buffer(f"b{i}", n, "float32") for i, n in enumerate(sizes[rank]))
        )
        for rank in range(world)
    ]
    return ExplicitLayout(space, tuple(ranks), tuple(draw(st.integers(0, 1)) for _ in range(world)))
