"""Rounds pair, terminate whatever the timing, carry everything once, and keep to what their certificate says."""

from __future__ import annotations

import random
from collections import Counter, deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.vps import schedule as module
from rlinf.vps.layout import DTYPES, WIDTHS
from rlinf.vps.plan import Moves, plan
from rlinf.vps.schedule import Links, Schedule, schedule, split
from rlinf.vps.space import LayoutError
from tests.vps.labelled import World, _read, _write, buffers, layouts, same, spaces
from tests.vps.test_plan import MANY, whole


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    space = draw(spaces())
    src, dst = (draw(layouts(space, draw(st.integers(1, 5)))) for _ in range(2))
    return schedule(
        plan(src, dst),
        Links(in_host=draw(st.sampled_from([1.0, 10.0])), cross_host=1.0),
        low_memory=draw(st.booleans()),
        chunk_bytes=draw(st.sampled_from([4, 40, 4000])),
    )


def carried(made: Schedule) -> World:
    """Every rank's messages, and what it keeps, box by box; in each round what is sent is what is received."""
    have, get = buffers(made.plan.src, True), buffers(made.plan.dst, False)

    def put(moves: Moves) -> None:
        for row in range(len(moves)):
            one = moves.take(slice(row, row + 1))
            source, target = int(one.src[0]), int(one.dst[0])
            values = _read(have[source], made.plan.src.of(source).pieces, one)
            _write(get[target], made.plan.dst.of(target).pieces, one, values)

    for wave in range(len(made.waves)):
        sent: dict[tuple[int, int, int], Moves] = {}
        taken: dict[tuple[int, int, int], Moves] = {}
        for rank in range(made.plan.world):
            put(made.plan.part(rank, made.wave(wave)).local)
            for step in made.exchanges(rank, wave):
                if step.to is not None and step.sends is not None:
                    sent[step.round, rank, step.to] = step.sends
                if step.source is not None and step.receives is not None:
                    taken[step.round, step.source, rank] = step.receives
        assert sent.keys() == taken.keys()
        for key, moves in sent.items():
            for column in ("tensor", "kind", "start", "size"):
                assert np.array_equal(getattr(moves, column), getattr(taken[key], column))
            put(moves)
    return get


@given(schedules())
@settings(max_examples=150, deadline=None)
def test_a_schedule_carries_every_element_to_its_place(made: Schedule) -> None:
    assert same(carried(made), buffers(made.plan.dst, True))


@given(schedules())
@settings(max_examples=100, deadline=None)
def test_a_rank_sends_once_and_receives_once_in_a_round_and_pairs_go_through_all_their_chunks(made: Schedule) -> None:
    for table in made.waves:
        for ranks in (table.src, table.dst):
            assert max(Counter(zip(table.round.tolist(), ranks.tolist(), strict=True)).values(), default=1) == 1
        pairs: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for row in range(len(table)):
            key = int(table.src[row]), int(table.dst[row])
            pairs.setdefault(key, []).append((int(table.chunk[row]), int(table.chunks[row])))
        for chunks in pairs.values():
            assert chunks == [(i, len(chunks)) for i in range(len(chunks))]


@given(schedules(), st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_rounds_end_under_any_timing_even_where_a_send_waits_for_its_receive(made: Schedule, seed: int) -> None:
    """Blocking exchanges: each rank is at its next round, and an exchange needs both of its ranks there."""
    chance = random.Random(seed)
    for wave in range(len(made.waves)):
        # A rank's round is one step: its send and its receive, in any order, both blocking.
        todo = {rank: deque(made.exchanges(rank, wave)) for rank in range(made.plan.world)}
        open_: dict[int, set[tuple[str, int, int]]] = {}
        while any(todo.values()):
            for rank, steps in todo.items():
                if rank not in open_ and steps:
                    step = steps[0]
                    open_[rank] = {("out", step.round, step.to)} if step.to is not None else set()
                    open_[rank] |= {("in", step.round, step.source)} if step.source is not None else set()
            able = [
                (rank, what)
                for rank, waits in open_.items()
                for what in waits
                if what[0] == "out" and ("in", what[1], rank) in open_.get(what[2], set())
            ]
            assert able, "every rank waits for another"
            rank, what = chance.choice(sorted(able))
            open_[rank].discard(what)
            open_[what[2]].discard(("in", what[1], rank))
            for done in (rank, what[2]):
                if not open_[done]:
                    del open_[done]
                    todo[done].popleft()


@given(schedules())
@settings(max_examples=100, deadline=None)
def test_messages_are_no_larger_than_promised(made: Schedule) -> None:
    widest = max((int(flow.size.prod(axis=1).max(initial=0)) for flow in made.plan.flows), default=0)
    for wave in range(len(made.waves)):
        for rank in range(made.plan.world):
            for step in made.exchanges(rank, wave):
                for moves in (step.sends, step.receives):
                    if moves is not None and made.chunk_bytes >= 4 * 5:  # else a single element is larger than a part
                        assert int(moves.nbytes.sum()) <= made.chunk_bytes, widest


@given(schedules())
@settings(max_examples=100, deadline=None)
def test_messages_are_as_large_as_the_certificate_takes_them_to_be(made: Schedule) -> None:
    """Up to a quarter, and to the elements that cannot be cut."""
    for wave, table in enumerate(made.waves):
        told = {
            (int(t.round[0]), int(t.src[0]), int(t.dst[0])): t for t in map(table.take, np.arange(len(table))[:, None])
        }
        for rank in range(made.plan.world):
            for step in made.exchanges(rank, wave):
                if step.to is not None and step.sends is not None:
                    row = told.pop((step.round, rank, step.to))
                    assert abs(int(step.sends.nbytes.sum()) - int(row.nbytes[0])) <= row.nbytes[0] / 4 + 2 * 4
        assert not told


def held_at_most(made: Schedule, rank: int) -> int:
    """Bytes of a rank, by brute force: state after state is begun and freed as the waves go; gaps in buffers stay."""

    def bytes_of(layout, tensor: int, kind: int) -> int:
        if rank >= layout.world:
            return 0
        held, width = layout.of(rank), 0
        boxes = set()
        for row in np.flatnonzero((held.pieces.tensor == tensor) & (held.pieces.kind == kind)):
            boxes.add((*held.pieces.start[row], *held.pieces.size[row]))
            width = int(WIDTHS[DTYPES.index(held.buffers[held.pieces.buffer[row]].dtype)])
        ndim = layout.space.ndim
        return sum(int(np.prod(box[ndim:])) for box in boxes) * width

    states = [(t, int(k)) for k in made.plan.src.space.kinds for t in range(len(made.plan.src.space.tensors))]
    gaps = sum(
        layout.of(rank).nbytes - sum(bytes_of(layout, *state) for state in states)
        for layout in (made.plan.src, made.plan.dst)
        if rank < layout.world
    )
    now = peak = gaps + sum(bytes_of(made.plan.src, *state) for state in states)
    for wave in range(len(made.waves)):
        mine = [
            (int(flow.tensor[i]), int(flow.kind[i]))
            for flow in made.plan.flows
            for i in range(*flow.wave(made.wave(wave)))
        ]
        now += sum(bytes_of(made.plan.dst, *state) for state in mine)
        peak = max(peak, now)
        now -= sum(bytes_of(made.plan.src, *state) for state in mine)
    return peak


@given(schedules())
@settings(max_examples=60, deadline=None)
def test_the_certificate_counts_what_is_held_at_once(made: Schedule) -> None:
    for rank in range(made.plan.world):
        assert made.certificate.peak_bytes[rank] == held_at_most(made, rank) + 2 * made.chunk_bytes
    assert made.certificate.makespan >= made.certificate.bound * (1 - 1e-9)


def test_a_cap_is_kept_by_smaller_messages_or_refused_with_the_smallest_that_can_be_met(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "LEAST_CHUNK", 16)
    made = plan(whole(MANY, [0], 2), whole(MANY, [1], 2))
    size = 12 * 24 * 4
    assert schedule(made, memory_cap=size + 2 * 100).chunk_bytes == 100
    with pytest.raises(LayoutError, match=rf"rank 0 must hold {size} .*smallest cap .* met is {size + 32} \(low"):
        schedule(made, memory_cap=size + 31)
    assert int(schedule(made, memory_cap=size + 32).certificate.peak_bytes.max()) <= size + 32


def test_low_memory_frees_as_it_goes_and_still_refuses_what_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_CHUNK", 16)
    made = plan(whole(MANY, [0, 1], 2), whole(MANY, [0, 1], 2))
    size = 12 * 24 * 4
    assert int(schedule(made).certificate.peak_bytes.max()) >= 2 * size
    one = 24 * 4
    tight = schedule(made, memory_cap=size + one + 64, low_memory=True)
    assert int(tight.certificate.peak_bytes.max()) <= size + one + 64
    assert len(tight.waves) > 1
    with pytest.raises(LayoutError, match="smallest cap that can be met is"):
        schedule(made, memory_cap=size, low_memory=True)


@given(schedules(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_the_cap_that_a_refusal_names_can_be_met_and_none_below_it(made: Schedule, low_memory: bool) -> None:
    with pytest.raises(LayoutError, match="the smallest cap that can be met is") as refused:
        schedule(made.plan, memory_cap=1, low_memory=low_memory)
    least = int(str(refused.value).split("can be met is ")[1].split()[0])
    found = schedule(made.plan, memory_cap=least, low_memory=low_memory)
    assert int(found.certificate.peak_bytes.max()) <= least
    with pytest.raises(LayoutError, match="smallest cap"):
        schedule(made.plan, memory_cap=least - 1, low_memory=low_memory)


def test_one_to_many_is_bound_by_the_sender_and_reaches_the_bound() -> None:
    made = schedule(plan(whole(MANY, [0], 5), whole(MANY, [1, 2, 3, 4], 5)), Links(1.0, 1.0))
    assert made.certificate.bound == 4 * 12 * 24 * 4
    assert made.certificate.ratio == pytest.approx(1.0)


def test_a_slower_link_between_hosts_lengthens_the_bound() -> None:
    from dataclasses import replace

    src, dst = whole(MANY, [0], 2), whole(MANY, [1], 2)
    apart = replace(src, hosts=(0, 1)), replace(dst, hosts=(0, 1))
    near = schedule(plan(src, dst), Links(10.0, 1.0)).certificate
    far = schedule(plan(*apart), Links(10.0, 1.0)).certificate
    assert far.bound == pytest.approx(10 * near.bound)


def test_boxes_are_cut_to_the_limit_and_cover_the_same() -> None:
    moves = plan(whole(MANY, [0], 2), whole(MANY, [1], 2)).part(0).sends
    for limit in (1, 4, 8, 20, 24, 50, 1000):
        cut, origin = split(moves, limit)
        assert int(cut.nbytes.max()) <= max(limit, 4)
        for move in range(len(moves)):
            boxes = cut.take(np.flatnonzero(origin == move))
            cells: Counter[tuple[int, int]] = Counter()
            for start, size in zip(boxes.start.tolist(), boxes.size.tolist(), strict=True):
                cells.update(
                    (i, j) for i in range(start[0], start[0] + size[0]) for j in range(start[1], start[1] + size[1])
                )
            assert cells == Counter((i, j) for i in range(4) for j in range(6))
