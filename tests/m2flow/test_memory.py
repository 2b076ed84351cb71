"""Peak memory of devices, from time lines that are short enough to count by hand."""

from __future__ import annotations

from rlinf.m2flow.compiler import compile_plan
from rlinf.m2flow.graph import TRAIN
from rlinf.m2flow.memory import Sizes, peak_bytes
from rlinf.m2flow.plan import Plan, Shared, Stage
from rlinf.m2flow.simulate import Cost, Costs, simulate
from tests.m2flow.test_plans import ppo_like

SIZES = Sizes(
    resident={"maker": 10, "critic": 30, "actor": 50},
    transient={"maker.make": 7, "critic.values": 5, "critic.train": 20, "actor.train": 1},
)


def peak(plan: Plan, onload: float = 1.0) -> dict[int, int]:
    graph = ppo_like()
    compiled = compile_plan(graph, plan)
    names = [node.name for node in graph.nodes]
    assert set(SIZES.transient) <= set(names)
    every = dict.fromkeys(compiled.layout, onload)
    costs = Costs({name: Cost(1.0) for name in names}, onload=every, offload=every, rows={names[0]: 4})
    return peak_bytes(compiled, simulate(graph, compiled, TRAIN, costs), SIZES)


def plan_of(swap: bool, actor: tuple[int, ...] = (0,)) -> Plan:
    graph = ppo_like()
    devices = {"actor": actor}
    parts = [
        Stage(name, devices.get(name, (0,)) if spec.cls.uses_device else (), spans=spec.cls.spans_tp)
        for name, spec in graph.workers.items()
    ]
    return Shared(tuple(parts), swap)


def test_all_that_stays_and_the_largest_of_what_runs() -> None:
    assert peak(plan_of(swap=False)) == {0: 10 + 30 + 50 + 20}


def test_what_is_swapped_is_there_alone() -> None:
    assert peak(plan_of(swap=True)) == {0: 51}  # the actor in training; the critic comes to 50


def test_swaps_that_take_no_time_are_swaps_too() -> None:
    assert peak(plan_of(swap=True), onload=0.0) == {0: 51}


def test_each_device_counts_for_itself() -> None:
    assert peak(plan_of(swap=False, actor=(1,))) == {0: 10 + 30 + 20, 1: 51}
