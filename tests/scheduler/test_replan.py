"""Whether another plan is worth changing to, by seconds that are counted by hand (as in test_judge)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from rlinf.m2flow.compiler import Compiled
from rlinf.m2flow.costs import RECEIVE, SEND
from rlinf.m2flow.memory import Sizes
from rlinf.m2flow.plan import Plan
from rlinf.m2flow.simulate import Cost, Costs
from rlinf.scheduler.replan import Decision, corrected, replan
from tests.m2flow.test_plans import ppo_like
from tests.scheduler.test_judge import APART, HALF, IN_TURNS, ROW, Known

GRAPH = ppo_like()


def decided(
    plan: Plan,
    others: Sequence[Plan],
    ratios: dict[str, float] | None = None,
    switching_s: float = 1.0,
    left: int = 10,
    model: Known | None = None,
    memory: int | None = None,
) -> Decision:
    return replan(GRAPH, plan, model or Known(), ratios or {}, others, lambda device: memory, 0, switching_s, left)


def test_the_fastest_plan_is_taken_when_all_that_is_left_gains_more_than_changing_takes() -> None:
    found = decided(APART, [HALF, IN_TURNS])
    assert (found.plan, found.before, found.after) == (IN_TURNS, 50.0, 28.0)
    assert found.judged.plan == IN_TURNS
    assert "28 s an iteration instead of 50 s (44% less), with 10 to go" in found.reason


@pytest.mark.parametrize(("left", "changes"), [(4, False), (5, True)])
def test_few_iterations_do_not_gain_a_change_back(left: int, changes: bool) -> None:
    found = decided(APART, [IN_TURNS], switching_s=100.0, left=left)  # 22 s an iteration
    assert (found.plan is not None) == changes
    assert (found.judged.plan == IN_TURNS) == changes
    if not changes:
        assert "changing takes 100 s, and 4 iterations are left" in found.reason


def test_a_plan_stays_when_none_is_faster_or_by_too_little() -> None:
    found = decided(IN_TURNS, [APART, HALF])
    assert found.plan is None
    assert "none of 2 others is faster (42 s an iteration instead of 28 s)" in found.reason
    assert decided(IN_TURNS, [IN_TURNS]).reason.endswith("can take over no other")
    # with an actor 40 times as slow, 340 s instead of 354 s
    found = decided(HALF, [IN_TURNS], {"actor.train": 40.0})
    assert found.plan is None
    assert "the best of 1 others gains too little (340 s an iteration instead of 354 s, 4%)" in found.reason


def test_a_plan_that_does_not_fit_is_not_taken() -> None:
    found = decided(APART, [IN_TURNS], model=Known({"maker": 70, "actor": 70}), memory=100)
    assert found.plan is None
    assert "can take over no other; the first of 1: device 0 would hold" in found.reason


def test_plans_are_judged_by_what_stages_turned_out_to_take() -> None:
    # the maker a quarter: 1 + 4 + 4 + 8 + 8; the actor three times: 4 + 4 + 4 + 24 + 8
    assert decided(IN_TURNS, [], {"maker.make": 0.25}).before == 25.0
    assert decided(IN_TURNS, [], {"actor.train": 3.0}).before == 44.0
    # in turns the actor has 8 rows a device, apart 16 on one: 4 + 4 + 4 + 80 + 8 against 2 + 8 + 8 + 160 + 16 or less
    assert decided(APART, [IN_TURNS], {"actor.train": 10.0}).after == 100.0


def test_a_model_that_was_corrected_before_is_corrected_further() -> None:
    once = corrected(Known(), {"maker.make": 2.0, "actor.train": 3.0})
    twice = corrected(once, {"maker.make": 5.0, "critic.train": 7.0})
    assert twice.model == Known()
    assert twice.ratios == {"maker.make": 10.0, "actor.train": 3.0, "critic.train": 7.0}


@dataclass(frozen=True)
class Everything:
    """A model with all that can be corrected."""

    def costs(self, plan: Plan, compiled: Compiled) -> Costs:
        nodes = {name: Cost(0.0, took) for name, took in ROW.items()}
        return replace(
            Costs(nodes),
            onload={"critic": 1.0, "actor": 1.0},
            offload={"critic": 2.0, "actor": 2.0},
            sync={("actor", "maker"): 3.0},
            receive={("actor", "maker"): 4.0},
        )

    def sizes(self, compiled: Compiled) -> Sizes:
        return Sizes()


def test_switches_and_syncs_are_corrected_each_by_its_own_name() -> None:
    ratios = {
        "critic: onload": 2.0,
        "actor: offload": 3.0,
        f"actor: {SEND}maker": 5.0,
        f"maker: {RECEIVE}actor": 7.0,
        "maker.make": 11.0,
    }
    found = corrected(Everything(), ratios).costs(IN_TURNS, decided(IN_TURNS, []).judged.compiled)
    assert found.onload == {"critic": 2.0, "actor": 1.0}
    assert found.offload == {"critic": 2.0, "actor": 6.0}
    assert found.sync == {("actor", "maker"): 15.0}
    assert found.receive == {("actor", "maker"): 28.0}
    assert {name: cost.seconds(1) for name, cost in found.nodes.items()} == {**ROW, "maker.make": 22.0}
