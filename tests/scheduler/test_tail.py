"""Generation's tail, against an engine that is simulated token by token with lengths that are drawn."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf.scheduler.profile import Tail
from rlinf.scheduler.tail import Pace, expected, fit, mean, steps

FLAT = Tail(lengths=tuple(np.linspace(10, 100, 21)), slots=8)
LONG = Tail(lengths=tuple(10 * 1.15**i for i in range(21)), slots=8)  # the longest is four times the median
TAILS = [FLAT, LONG]


def engine(lengths: list[int], slots: int, a: float, b: float) -> tuple[float, list[float]]:
    """Seconds of all, and when each is done, ascending: a step at a time."""
    waiting, active, now, ends = list(lengths), list[int](), 0.0, list[float]()
    while waiting or active:
        while waiting and len(active) < slots:
            active.append(waiting.pop(0))
        now += a + b * len(active)
        active = [left - 1 for left in active]
        ends += [now] * active.count(0)
        active = [left for left in active if left]
    return now, ends


def drawn(tail: Tail, count: int, rng: np.random.Generator) -> list[int]:
    at = rng.random(count)
    return [max(round(x), 1) for x in np.interp(at, np.linspace(0, 1, len(tail.lengths)), tail.lengths)]


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("count", [1, 3, 8, 12, 16, 40])
def test_expected_seconds_are_those_of_an_engine(tail: Tail, count: int) -> None:
    rng = np.random.default_rng(0)
    took = np.mean([engine(drawn(tail, count, rng), tail.slots, 1.0, 0.1)[0] for _ in range(500)])
    assert Pace(0.0, 1.0, 0.1).seconds(tail, count) == pytest.approx(took, rel=0.1)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("count", [4, 8, 24])
def test_sequences_are_done_when_an_engine_has_them_done(tail: Tail, count: int) -> None:
    rng = np.random.default_rng(0)
    runs = [engine(drawn(tail, count, rng), tail.slots, 1.0, 0.1) for _ in range(500)]
    wanted = np.mean([np.asarray(ends) / took for took, ends in runs], axis=0)
    found = Pace(0.0, 1.0, 0.1).ready(tail, count)
    assert found[-1] == 1
    assert all(np.diff(found) >= 0)
    assert np.abs(found - wanted).max() < 0.12


@given(st.sampled_from(TAILS), st.integers(1, 200))
def test_more_sequences_never_take_fewer_steps(tail: Tail, count: int) -> None:
    assert steps(tail, count + 1) >= steps(tail, count)


def test_a_pace_is_found_again_from_calls() -> None:
    true = Pace(0.2, 0.03, 0.002)
    calls = [(n, true.seconds(LONG, n)) for n in (2, 8, 16, 64)]
    found = fit(LONG, calls)
    assert [found.seconds(LONG, n) for n in (1, 4, 32, 200)] == pytest.approx(
        [true.seconds(LONG, n) for n in (1, 4, 32, 200)], rel=1e-3
    )


def test_of_one_call_every_step_costs_the_same() -> None:
    found = fit(FLAT, [(8, 9.0)])
    assert found.seconds(FLAT, 8) == pytest.approx(9.0)
    assert (found.fixed, found.per_token) == (0.0, 0.0)


def test_lengths_counted_by_hand() -> None:
    tail = Tail(lengths=(0.5, 10.0, 20.0), slots=2)
    assert mean(tail) == pytest.approx((0.5 / 2 + 10 + 20 / 2) / 2)
    even = Tail(
        lengths=(0.001, 12.0), slots=2
    )  # the larger of two is expected at two thirds, of three at three quarters
    assert expected(even, 2).tolist() == pytest.approx([4.0, 8.0], abs=0.01)
    assert expected(even, 3).tolist() == pytest.approx([3.0, 6.0, 9.0], abs=0.01)
    assert [steps(even, n) for n in (1, 2, 4)] == pytest.approx([6.0, 8.0, 8.0 + 6.0], abs=0.01)
