"""What counts as drift, and how it is said."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf.m2flow.timeline import Doing, RankId, Span
from rlinf.scheduler.drift import Drift, work

Times = dict[str, tuple[float, ...]]  # stage -> seconds of each rank of its group


def spans(times: Times) -> dict[RankId, list[Span]]:
    found: dict[RankId, list[Span]] = {}
    for stage, ranks in times.items():
        for rank, seconds in enumerate(ranks):
            found.setdefault((stage.split(".")[0], rank), []).append(Span(Doing.RUN, stage, 5.0, 5.0 + seconds, 4))
    return found


def drift(predicted: Times, *measured: Times, seconds: float = 4.0, **options: float) -> Drift:
    """After these iterations, behind one that warms up."""
    found = Drift(spans(predicted), **options)  # type: ignore[arg-type]
    found.add(spans({name: (100.0,) * len(own) for name, own in predicted.items()}), 300.0)
    for one in measured:
        found.add(spans(one), seconds)
    return found


AS_PLANNED: Times = {"rollout.generate": (1.1, 1.0), "actor.train": (2.0,)}
SLOW: Times = {"rollout.generate": (2.1, 2.0), "actor.train": (2.0,)}


def test_nothing_has_drifted_while_times_are_as_planned() -> None:
    assert drift(AS_PLANNED, *[AS_PLANNED] * 5).found() == []


def test_a_stage_that_became_slower_is_named_with_both_times() -> None:
    (found,) = drift(AS_PLANNED, *[SLOW] * 3).found()
    assert (found.name, found.measured, found.predicted, found.slow) == (
        "rollout.generate",
        pytest.approx(2.1),
        pytest.approx(1.1),
        None,
    )
    assert found.ratio == pytest.approx(2.1 / 1.1)
    assert str(found) == "rollout.generate took 1.9 times what was predicted (2.1 s of 1.1 s)"


def test_a_stage_that_became_faster_has_drifted_too_and_what_matters_most_comes_first() -> None:
    measured: Times = {"rollout.generate": (1.6, 1.6), "actor.train": (0.5,)}
    first, second = drift(AS_PLANNED, *[measured] * 3).found()
    assert str(first) == "actor.train took 0.25 times what was predicted (0.5 s of 2 s)"
    assert second.name == "rollout.generate"


@pytest.mark.parametrize("count", [0, 1, 2])
def test_nothing_is_said_before_enough_was_seen(count: int) -> None:
    assert drift(AS_PLANNED, *[SLOW] * count).found() == []


def test_one_slow_iteration_is_no_drift() -> None:
    assert drift(AS_PLANNED, AS_PLANNED, SLOW, AS_PLANNED).found() == []
    assert drift(AS_PLANNED, AS_PLANNED, SLOW, SLOW).found() != []


def test_old_iterations_are_forgotten() -> None:
    assert drift(AS_PLANNED, SLOW, SLOW, SLOW, AS_PLANNED, AS_PLANNED).found() == []


def test_a_small_part_of_an_iteration_is_ignored() -> None:
    predicted: Times = {"a.big": (4.0,), "a.small": (0.01,)}
    measured: Times = {"a.big": (4.0,), "a.small": (0.07,)}
    assert drift(predicted, *[measured] * 3).found() == []
    grown: Times = {"a.big": (4.0,), "a.small": (0.09,)}  # more than 2% of 4 s
    assert [one.name for one in drift(predicted, *[grown] * 3).found()] == ["a.small"]


def test_a_stage_that_does_not_run_yet_or_has_no_prediction_is_not_compared() -> None:
    assert drift(AS_PLANNED, *[{"rollout.generate": (1.1, 1.0)}] * 3).found() == []  # the actor waits
    assert drift({"a.known": (1.0,), "a.free": (0.0,)}, *[{"a.known": (1.0,), "a.free": (2.0,)}] * 3).found() == []


def test_a_rank_that_is_slower_than_the_others_is_named() -> None:
    predicted: Times = {"rollout.generate": (1.0, 1.0, 1.0)}
    (found,) = drift(predicted, *[{"rollout.generate": (1.0, 3.0, 1.1)}] * 3).found()
    assert found.slow == (1, 3.0, pytest.approx(1.05))
    assert str(found).endswith("; its rank 1 is slower than the others (3 s, they 1.05 s)")


def test_a_rank_that_has_more_to_do_is_not_a_slow_one() -> None:
    predicted: Times = {"rollout.generate": (1.0, 2.0)}
    (found,) = drift(predicted, *[{"rollout.generate": (1.5, 3.0)}] * 3).found()
    assert found.slow is None


def test_the_threshold_is_a_part_of_what_was_predicted() -> None:
    measured: Times = {"a.x": (1.3,)}
    assert drift({"a.x": (1.0,)}, *[measured] * 3, threshold=0.25).found() != []
    assert drift({"a.x": (1.0,)}, *[measured] * 3, threshold=0.35).found() == []


def test_work_is_what_ranks_do_without_their_waits() -> None:
    own = [
        Span(Doing.ROWS, "a.x", 0.0, 1.0),
        Span(Doing.RUN, "a.x", 1.0, 2.0, 3),
        Span(Doing.LEASE, "a", 2.0, 5.0),
        Span(Doing.ONLOAD, "a", 5.0, 5.5),
        Span(Doing.RUN, "a.x", 6.0, 9.0, 3),
        Span(Doing.WEIGHTS, "b", 6.5, 7.0),  # taken over in flight, within the stage
        Span(Doing.SYNC, "receive weights from b", 7.0, 7.25),
        Span(Doing.OFFLOAD, "a", 9.0, 9.125),
    ]
    assert work({("a", 2): own, ("b", 0): [Span(Doing.SYNC, "send weights to a", 0.0, 2.0)]}) == {
        "a.x": {2: 1.0 + 3.0 - 0.5 - 0.25},
        "a: onload": {2: 0.5},
        "a: offload": {2: 0.125},
        "a: receive weights from b": {2: 0.25},
        "b: send weights to a": {0: 2.0},
    }


seconds = st.floats(0.1, 10)


@given(st.lists(seconds, min_size=1, max_size=4), st.floats(0.05, 20), st.floats(0.1, 1.0))
def test_the_same_factor_on_all_ranks_has_drifted_if_it_is_beyond_the_threshold(
    ranks: list[float], factor: float, threshold: float
) -> None:
    if abs(abs(factor - 1) - threshold) < 1e-6:
        return  # rounding decides
    measured: Times = {"a.x": tuple(factor * one for one in ranks)}
    found = drift({"a.x": tuple(ranks)}, *[measured] * 3, seconds=1.0, threshold=threshold).found()
    assert bool(found) == (abs(factor - 1) > threshold)
    assert all(one.ratio == pytest.approx(factor) and one.slow is None for one in found)
