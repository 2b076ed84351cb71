"""Plans judged by simulation, against time lines that are short enough to count by hand."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from rlinf.m2flow.compiler import Compiled
from rlinf.m2flow.memory import Sizes
from rlinf.m2flow.plan import Piped, Plan, Shared, Stage
from rlinf.m2flow.simulate import Cost, Costs
from rlinf.scheduler.judge import COLLOCATED, DISAGGREGATED, HYBRID, family, judge, judge_all
from tests.m2flow.test_plans import ppo_like

# Seconds for each row that comes into a stage; 4 prompts come in, and 4 rows are made of each.
ROW = {"maker.make": 2.0, "reference.logprobs": 0.5, "critic.values": 0.5, "actor.train": 1.0, "critic.train": 1.0}


@dataclass(frozen=True)
class Known:
    """A `Model` of known times."""

    resident: dict[str, int] = field(default_factory=dict)

    def costs(self, plan: Plan, compiled: Compiled) -> Costs:
        return Costs({name: Cost(0.0, took) for name, took in ROW.items()}, rows={"host.source0": 4})

    def sizes(self, compiled: Compiled) -> Sizes:
        return Sizes(resident=self.resident)


def on(worker: str, *devices: int) -> Stage:
    return Stage(worker, devices, dp=max(len(devices), 1))


IN_TURNS = Shared((*(on(name, 0, 1) for name in ("maker", "reference", "critic", "actor")), on("reward")))
APART = Piped((on("maker", 0), Shared((on("reference", 1), on("critic", 1), on("actor", 1))), on("reward")), 2)
HALF = Shared(
    (Piped((on("maker", 0), Shared((on("reference", 1), on("critic", 1)))), 2), on("actor", 0, 1), on("reward"))
)


@pytest.mark.parametrize(
    ("plan", "seconds", "kind"),
    [
        # 2 prompts, then 8 rows on each device: 4 + 4 + 4 + 8 + 8
        (IN_TURNS, 28.0, COLLOCATED),
        # the first rows are there after 2 s; all that follows is on one device: 8 + 8 + 16 + 16
        (APART, 50.0, DISAGGREGATED),
        # likewise until the actor, which has 8 rows on each device, and the critic's 16 on one
        (HALF, 42.0, HYBRID),
    ],
)
def test_seconds_and_family_of_plans_that_are_counted_by_hand(plan: Plan, seconds: float, kind: str) -> None:
    judged = judge(ppo_like(), plan, Known())
    assert judged.seconds == pytest.approx(seconds)
    assert judged.family == family(plan) == kind


def test_stages_and_idle_devices_are_told() -> None:
    judged = judge(ppo_like(), APART, Known())
    assert judged.stages == pytest.approx(
        {
            "maker.make": 8,
            "reference.logprobs": 8,
            "critic.values": 8,
            "actor.train": 16,
            "critic.train": 16,
        }
    )
    assert [time.idle_share for time in judged.times] == pytest.approx([42 / 50, 2 / 50])
    assert judged.idle_share == pytest.approx(22 / 50)


def test_with_staleness_the_busiest_device_sets_the_pace() -> None:
    assert judge(ppo_like(), APART, Known(), staleness=1).seconds == pytest.approx(48.0)


def test_the_fastest_comes_first_and_each_plan_once() -> None:
    found, refused = judge_all(ppo_like(), [APART, IN_TURNS, HALF, APART], Known(), lambda device: None)
    assert [one.plan for one in found] == [IN_TURNS, HALF, APART]
    assert not refused


def test_plans_that_do_not_fit_or_compile_are_refused_with_the_reason() -> None:
    wrong = Piped((on("maker", 0), on("reference", 0)), 2)
    model = Known({"maker": 3 * 2**30, "actor": 2 * 2**30})
    found, refused = judge_all(ppo_like(), [IN_TURNS, APART, wrong], model, lambda device: 4 * 2**30)
    assert [one.plan for one in found] == [APART]
    assert [plan for plan, _ in refused] == [IN_TURNS, wrong]
    assert refused[0][1] == "device 0 would hold 5.00 GiB at its fullest, of 4.00"
    assert "name different workers" in refused[1][1]


def test_a_group_without_a_device_makes_no_family() -> None:
    beside = Piped((Shared((on("maker", 0), on("actor", 0))), on("reward")), 2)
    assert family(beside) == COLLOCATED
    assert family(Shared((Piped((on("maker", 0), on("reward")), 2), on("actor", 0)))) == COLLOCATED
    assert family(Shared((Piped((on("maker", 0), on("critic", 1)), 2), on("reward")))) == DISAGGREGATED
