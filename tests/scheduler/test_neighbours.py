"""Plans for the ranks that run: the same groups in the same layouts, each of them valid, the nearest first."""

from __future__ import annotations

from itertools import combinations

import pytest

from rlinf.errors import PlacementError
from rlinf.m2flow.compiler import compile_plan
from rlinf.m2flow.graph import Graph
from rlinf.m2flow.plan import Piped, Plan, Shared, Stage, nodes, stages
from rlinf.scheduler.neighbours import neighbours
from tests.e2e.slowing import graph_of
from tests.m2flow.test_plans import ppo_like

M, J, R, L = (Stage(name, (d,)) for name, d in (("maker", 0), ("judge", 1), ("rater", 1), ("learner", 1)))


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
    ("graph", "plan"), [(graph_of(0), Piped((M, Shared((J, R, L))), 2)), (ppo_like(), WIDE), (ppo_like(), TURNS)]
)
@pytest.mark.parametrize("devices", [(), (0, 1, 2, 3, 4, 5)])
def test_each_is_for_the_same_ranks_and_most_can_be_compiled(
    graph: Graph, plan: Plan, devices: tuple[int, ...]
) -> None:
    found = neighbours(graph, plan, (0, 4), (False, True), devices)
    allowed = set(devices) or {device for stage in stages(plan) for device in stage.devices}
    assert found
    assert len(set(found)) == len(found) <= 400
    assert plan not in found
    endless = 0
    for other in found:
        assert layouts(other) == layouts(plan)
        assert {device for stage in stages(other) for device in stage.devices} <= allowed
        endless += not ends(graph, other)
    assert endless < len(found) / 2


def ends(graph: Graph, plan: Plan) -> bool:
    """Whether it can be compiled: turns that wait for one another are found out by running them on paper."""
    try:
        compile_plan(graph, plan)
    except PlacementError as error:
        if "never ends" in str(error):
            return False
        raise
    return True


def test_two_devices_are_split_in_every_way() -> None:
    plan = Piped((M, Shared((J, R, L))), 2)
    found = neighbours(graph_of(0), plan, (0, 2))
    every = {"maker", "judge", "rater", "learner"}
    halves = [set(some) for n in (1, 2) for some in combinations(sorted(every), n)]
    pairs = {frozenset(map(frozenset, (one, every - one))) for one in halves}
    assert {split(other) for other in found} >= pairs | {frozenset([frozenset(every)])}
    sizes = {node.granularity for other in found for node in nodes(other) if isinstance(node, Piped)}
    assert sizes == {0, 2}
    assert Piped((M, Shared((J, R, L))), 0) in found
    assert not any(node.swap for other in found for node in nodes(other) if isinstance(node, Shared))


def test_the_nearest_come_first_and_groups_stay_where_they_can() -> None:
    plan = Piped((M, Shared((J, R, L))), 2)
    assert neighbours(graph_of(0), plan, (0, 2), most=1) == [Piped((M, Shared((J, R, L))), 0)]
    wanted = frozenset({frozenset({"maker", "judge", "learner"}), frozenset({"rater"})})
    other = next(near for near in neighbours(graph_of(0), plan, (2,)) if split(near) == wanted)
    assert {stage.worker: stage.devices for stage in stages(other)}["rater"] == (1,)


def test_turns_are_tried_in_other_orders_that_the_workflow_allows() -> None:
    found = neighbours(ppo_like(), TURNS, (0,))
    orders = {node.order for other in found for node in nodes(other) if isinstance(node, Shared) and node.order}
    assert any(order.index("critic.train") < order.index("actor.train") for order in orders)
    assert any(order.index("critic.values") < order.index("reference.logprobs") for order in orders)
    assert all(order.index("maker.make") == 0 for order in orders if "maker.make" in order)
