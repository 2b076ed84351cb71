"""Rounds carry all traffic, each rank once at a time, and end near their bound whatever the traffic is like."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.vps import rounds as module
from rlinf.vps.plan import Traffic
from rlinf.vps.rounds import Links, Rounds, Speed, makespan, rounds

HOST = 4  # ranks


def table(cells: dict[tuple[int, int], int]) -> Traffic:
    pairs = sorted(cells)
    src, dst = (np.array([pair[i] for pair in pairs], np.int32) for i in (0, 1))
    return Traffic(src, dst, np.array([cells[pair] for pair in pairs], np.int64))


def speed(world: int, links: Links | None = None) -> Speed:
    plan = SimpleNamespace(world=world, hosts=np.arange(world) // HOST)
    return Speed(plan, links or Links(1.0, 1.0))  # type: ignore[arg-type]


@st.composite
def traffics(draw: st.DrawFn) -> tuple[int, Traffic]:
    """From a few pairs to all of them; sizes of one byte to a million."""
    world = draw(st.integers(2, 9))
    pairs = st.tuples(st.integers(0, world - 1), st.integers(0, world - 1)).filter(lambda pair: pair[0] != pair[1])
    sizes = st.one_of(st.integers(1, 20), st.integers(1, 10**6), st.just(1000))
    return world, table(draw(st.dictionaries(pairs, sizes, max_size=world * world)))


def check(found: Rounds, traffic: Traffic) -> None:
    """Every pair's chunks come once each and in order, and make up what it exchanges; no rank does two at once."""
    for ranks in (found.src, found.dst):
        at_once = np.stack([found.round, ranks], 1)
        assert len(np.unique(at_once, axis=0)) == len(at_once)
    assert (np.diff(found.round) >= 0).all()
    carried: dict[tuple[int, int], list[int]] = {}
    for row in range(len(found)):
        sizes = carried.setdefault((int(found.src[row]), int(found.dst[row])), [])
        assert found.chunk[row] == len(sizes)
        sizes.append(int(found.nbytes[row]))
        assert found.chunks[row] >= len(sizes)
    asked = dict(zip(zip(traffic.src.tolist(), traffic.dst.tolist(), strict=True), traffic.nbytes, strict=True))
    assert {pair: sum(sizes) for pair, sizes in carried.items()} == asked


@given(traffics(), st.sampled_from([1, 50, 10**4, 10**9]))
@settings(max_examples=200, deadline=None)
def test_both_constructions_carry_all_traffic_once(traffic, limit: int) -> None:
    world, asked = traffic
    if len(asked.src):
        limit = max(limit, int(asked.nbytes.max()) // 20)
        chunks = -(-asked.nbytes // limit)
        for rows in (module._shifts(asked, chunks, world), module._matchings(asked, speed(world), chunks)):
            found = module._table(asked, chunks, rows)
            check(found, asked)
            assert int(found.nbytes.max()) <= limit
    found = rounds(asked, speed(world), limit)
    check(found, asked)
    assert int(found.nbytes.max(initial=0)) <= limit


@given(traffics())
@settings(max_examples=100, deadline=None)
def test_nobody_idles_where_two_ranks_that_want_each_other_are_free(traffic) -> None:
    """A round leaves out no pair of the busiest one's length whose two ranks have nothing to do in it."""
    world, asked = traffic
    if not len(asked.src):
        return
    chunks = np.ones(len(asked.src), np.int64)
    pending = module._Pending(asked, speed(world), chunks)
    row, column = pending.matching()
    used = set(row.tolist()), set(pending.dst[row, column].tolist())
    longest = int(pending.length[row, column].max())
    for r in range(world):
        for c in range(pending.dst.shape[1]):
            if pending.left[r, c] and pending.length[r, c] <= longest:
                assert r in used[0] or int(pending.dst[r, c]) in used[1]


@given(traffics(), st.booleans())
@settings(max_examples=100, deadline=None)
def test_the_makespan_is_when_ranks_that_wait_for_each_other_round_by_round_are_through(traffic, far: bool) -> None:
    """Ranks one by one: each does its rounds in order, a send and a receive at once, and goes on when both ended."""
    world, asked = traffic
    links = Links(4.0, 1.0) if far else Links(1.0, 1.0)
    found = rounds(asked, speed(world, links), 10**9)
    todo: dict[int, list[tuple[int, list[int]]]] = {rank: [] for rank in range(world)}
    for number in sorted(set(found.round.tolist())):
        for rank in range(world):
            rows = np.flatnonzero((found.round == number) & ((found.src == rank) | (found.dst == rank))).tolist()
            if rows:
                todo[rank].append((number, rows))
    began: dict[int, dict[int, float]] = {}  # exchange -> rank -> when it was ready for it
    ended: dict[int, float] = {}
    now = dict.fromkeys(range(world), 0.0)
    while any(todo.values()):
        before = len(ended), sum(map(len, todo.values()))
        for rank, steps in todo.items():
            if not steps:
                continue
            for row in steps[0][1]:
                began.setdefault(row, {})[rank] = now[rank]
                if len(began[row]) == 2 and row not in ended:
                    near = found.src[row] // HOST == found.dst[row] // HOST
                    took = found.nbytes[row] / (links.in_host if near else links.cross_host)
                    ended[row] = max(began[row].values()) + took
            if all(row in ended for row in steps[0][1]):
                now[rank] = max(now[rank], *(ended[row] for row in steps[0][1]))
                steps.pop(0)
        assert before != (len(ended), sum(map(len, todo.values()))), "every rank waits for another"
    assert makespan([found], speed(world, links), world) == pytest.approx(max(now.values()))


def all_pairs(world: int) -> dict[tuple[int, int], int]:
    return {(i, j): 10**6 for i in range(world) for j in range(world) if i != j}


def a_few(world: int) -> dict[tuple[int, int], int]:
    return {(i, (i + step) % world): step * 10**6 for i in range(world) for step in (1, 5, 11)}


def long_and_short(world: int) -> dict[tuple[int, int], int]:
    """Much with few of another half, and little with many: exchanges of a thousandfold length."""
    sizes = np.random.default_rng(7).integers(10**3, 10**4, (world, world))
    sizes[np.arange(world), (np.arange(world) * 7 + 3) % world] *= 1000
    return {(i, j): int(sizes[i, j]) for i in range(world) for j in range(world) if i != j}


def one_to_all(world: int) -> dict[tuple[int, int], int]:
    return {(0, j): j * 10**5 for j in range(1, world)}


@pytest.mark.parametrize("world", [33, 64])
@pytest.mark.parametrize("cells", [all_pairs, a_few, long_and_short, one_to_all])
def test_rounds_end_near_the_bound(cells, world: int) -> None:
    asked = table(cells(world))
    found = rounds(asked, speed(world), 10**9)
    check(found, asked)
    assert makespan([found], speed(world), world) <= 1.1 * speed(world).bound(asked)


def test_what_is_even_over_all_pairs_goes_by_shifts_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a search of pairs times rounds")

    monkeypatch.setattr(module, "_matchings", refuse)
    found = rounds(table(all_pairs(32)), speed(32), 10**9)
    assert int(found.round.max()) + 1 == 31


def test_no_search_is_made_that_takes_longer_than_the_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_WORK", 0)
    asked = table(long_and_short(16))
    check(rounds(asked, speed(16), 10**9), asked)
