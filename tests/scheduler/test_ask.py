"""What the planner is asked: stages that wait and those that stream, layouts that can be used, pieces, by hand."""

from __future__ import annotations

import pytest

from rlinf.errors import PlacementError
from rlinf.scheduler.ask import problem, sizes
from rlinf.scheduler.cost import CostModel
from rlinf.scheduler.problem import Option, Problem
from tests.m2flow.test_plans import ppo_like
from tests.scheduler.test_cost import GRAPH, PROFILE

PLACES = {"big": (0, 1, 2, 3)}
MODEL = CostModel(PROFILE, GRAPH, dict.fromkeys(range(4), "big"))


def asked(granularities: tuple[int, ...] = (0, 16), places: dict[str, tuple[int, ...]] = PLACES) -> Problem:
    return problem(GRAPH, MODEL, places, {"big": 80_000_000_000}, 0, granularities)


def option(of: Problem, name: str, dp: int, tp: int = 1, kind: str = "big") -> Option:
    (part,) = [part for part in of.parts if part.name == name]
    (found,) = [one for one in part.options if (one.kind, one.dp, one.tp) == (kind, dp, tp)]
    return found


def test_groups_come_in_the_order_of_the_workflow_with_what_they_read() -> None:
    found = asked()
    assert [part.name for part in found.parts] == ["maker", "reward", "reference", "critic", "actor"]
    after_maker = {("maker", name) for name in ("reward", "reference", "critic", "actor")}
    assert found.reads == after_maker | {("reward", "critic"), ("reward", "actor"), ("reference", "actor")}
    assert found.rest_reads == {("actor", "maker")}


def test_rows_in_pieces_cost_what_their_calls_do() -> None:
    found = asked()
    logprobs = option(found, "reference", 1).stream
    fixed, row = 0.2, 4.5 / 240
    assert logprobs[0] == pytest.approx(5.0)
    assert logprobs[16] == pytest.approx(16 * (fixed + 16 * row))
    assert option(found, "reference", 4).stream[16] == pytest.approx(4 * (fixed + 16 * row))
    make = option(found, "maker", 1).stream
    assert make[0] == make[16] == pytest.approx(20.0)  # it gets its rows from the data, all at once
    assert option(found, "reward", 1, kind="").stream[16] == pytest.approx(16 * (0.02 + 12 * 0.98 / 252))


def test_rest_is_weights_and_what_waits_for_all_rows() -> None:
    found = asked()
    assert option(found, "maker", 1).rest == pytest.approx(0.25)
    assert option(found, "reference", 1).rest == 0


def test_layouts_are_those_that_leave_fewer_rows_to_each_and_were_profiled() -> None:
    found = asked()
    layouts = {part.name: [(one.dp, one.tp) for one in part.options] for part in found.parts}
    assert layouts["maker"] == [(1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (2, 2)]
    assert layouts["actor"] == [(1, 1), (2, 1), (3, 1), (4, 1)]
    assert layouts["reward"] == [(1, 1)]
    two = problem(ppo_like(actor_dp=2), MODEL, PLACES, {}, 0, (0,))
    assert [(one.dp, one.tp) for one in two.parts[-1].options] == [(2, 1)]


def test_of_many_layouts_those_that_part_rows_evenly_stay() -> None:
    found = asked(places={"big": tuple(range(1024))})
    replicas = {part.name: [one.dp for one in part.options if one.tp == 1] for part in found.parts}
    assert replicas["maker"] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 13, 16, 22, 32, 64]  # 64 prompts
    assert replicas["reference"] == [1, 2, 4, 8, 16, 32, 64, 128, 256]


def test_memory_and_swaps_are_those_of_the_layout() -> None:
    actor = option(asked(), "actor", 4)
    assert (actor.resident, actor.transient) == (11_000_000_000, 4_000_000_000)
    assert actor.swap == pytest.approx(2 * 1.7)  # trains, and sends its weights


def test_granularities_are_halves_down_to_a_group() -> None:
    assert sizes(GRAPH, MODEL) == (0, 4, 8, 16, 32, 64, 128)
    assert asked((0, 4, 64)).pieces == {0: 1, 4: 32, 64: 2}


def test_a_group_that_can_be_nowhere_is_named() -> None:
    with pytest.raises(PlacementError, match=r"actor \(dp=9, tp=1\) can run on none of 4 x big"):
        problem(ppo_like(actor_dp=9), MODEL, PLACES, {}, 0, (0,))
