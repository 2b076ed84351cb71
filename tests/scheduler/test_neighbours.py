"""Plans for the ranks that run: the same groups in the same layouts, each of them valid, the nearest first."""

from __future__ import annotations

import pytest

from rlinf.m2flow.compiler import compile_plan
from rlinf.m2flow.graph import Graph
from rlinf.m2flow.plan import Piped, Plan, Shared, Stage, nodes, stages
from rlinf.scheduler.neighbours import neighbours
from tests.e2e.slowing import graph_of
from tests.m2flow.test_plans import ppo_like

M, R, L = (Stage(name, (device,)) for name, device in (("maker", 0), ("rater", 1), ("learner", 1)))


def layouts(plan: Plan) -> dict[str, tuple[int, int, int]]:
    return {stage.worker: (stage.dp, stage.tp, len(stage.devices)) for stage in stages(plan)}


def split(plan: Plan) -> frozenset[frozenset[str]]:
    """Groups that have devices in common."""
    on: dict[tuple[int, ...], set[str]] = {}
    for stage in stages(plan):
        on.setdefault(stage.devices, set()).add(stage.worker)
    return frozenset(map(frozenset, on.values()))


WIDE = Piped(
    (
        Stage("maker", (0, 1), dp=2),
        Shared((Stage("reference", (2, 3), dp=2), Stage("critic", (2, 3), dp=2), Stage("actor", (2, 3), dp=2))),
        Stage("reward", ()),
    ),
    4,
)
TURNS = Shared(tuple(Stage(name, (0, 1), dp=2) for name in ("maker", "reference", "critic", "actor")))
TURNS = Shared((*TURNS.parts, Stage("reward", ())), True)


@pytest.mark.parametrize(
    ("graph", "plan"), [(graph_of(0), Piped((M, Shared((R, L))), 2)), (ppo_like(), WIDE), (ppo_like(), TURNS)]
)
@pytest.mark.parametrize("devices", [(), (0, 1, 2, 3, 4, 5)])
def test_each_is_for_the_same_ranks_and_can_be_compiled(graph: Graph, plan: Plan, devices: tuple[int, ...]) -> None:
    found = neighbours(graph, plan, (0, 4), (False, True), devices)
    allowed = set(devices) or {device for stage in stages(plan) for device in stage.devices}
    assert found
    assert len(set(found)) == len(found) <= 400
    assert plan not in found
    for other in found:
        assert layouts(other) == layouts(plan)
        assert {device for stage in stages(other) for device in stage.devices} <= allowed
        compile_plan(graph, other)  # it refuses what overlaps, or comes before what it depends on


def test_two_devices_are_split_in_every_way() -> None:
    plan = Piped((M, Shared((R, L))), 2)
    found = neighbours(graph_of(0), plan, (0, 2))
    wanted = [{"maker"}, {"rater"}, {"learner"}]
    pairs = {frozenset(map(frozenset, (one, {"maker", "rater", "learner"} - one))) for one in wanted}
    assert {split(other) for other in found} >= pairs | {frozenset([frozenset({"maker", "rater", "learner"})])}
    sizes = {node.granularity for other in found for node in nodes(other) if isinstance(node, Piped)}
    assert sizes == {0, 2}
    assert Piped((M, Shared((R, L))), 0) in found
    assert not any(node.swap for other in found for node in nodes(other) if isinstance(node, Shared))


def test_the_nearest_come_first_and_groups_stay_where_they_can() -> None:
    plan = Piped((M, Shared((R, L))), 2)
    assert neighbours(graph_of(0), plan, (0, 2), most=1) == [Piped((M, Shared((R, L))), 0)]
    other = next(
        p
        for p in neighbours(graph_of(0), plan, (2,))
        if split(p) == {frozenset({"maker", "learner"}), frozenset({"rater"})}
    )
    assert {stage.worker: stage.devices for stage in stages(other)}["rater"] == (1,)


def test_turns_are_tried_in_other_orders_that_the_workflow_allows() -> None:
    found = neighbours(ppo_like(), TURNS, (0,))
    orders = {node.order for other in found for node in nodes(other) if isinstance(node, Shared) and node.order}
    assert any(order.index("critic.train") < order.index("actor.train") for order in orders)
    assert any(order.index("critic.values") < order.index("reference.logprobs") for order in orders)
    assert all(order.index("maker.make") == 0 for order in orders if "maker.make" in order)
