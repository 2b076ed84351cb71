"""The best plan: what the planner finds in each family and granularity, and what ships, judged by simulation. Pure.

The planner is exact over its model, a formula (`rlinf.scheduler.problem`). What it leaves out, turns that wait for one
another within a pipe or at its end, the simulator has; so its plans, one of each family and granularity, are simulated
beside those that ship and those that are near the best of them, and the simulator's figure decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from rlinf.config import PlanConfig
from rlinf.errors import PlacementError
from rlinf.m2flow.graph import Graph
from rlinf.m2flow.plan import Piped, Plan, nodes, stages
from rlinf.scheduler.ask import problem, sizes
from rlinf.scheduler.cost import CostModel
from rlinf.scheduler.judge import FAMILIES, Judged, judge_all, ranked, simplicity
from rlinf.scheduler.neighbours import neighbours
from rlinf.scheduler.planner import TIME, Objective, flat, solve
from rlinf.scheduler.problem import Problem
from rlinf.scheduler.profile import Profile
from rlinf.scheduler.shipped import KINDS

NEAR, RANKS = 120, 64  # plans near the best that are simulated too; ranks beyond which that would take long
EQUAL = 0.01  # of an iteration; a simulation is no better, and of equal plans the simplest is taken


@dataclass(frozen=True)
class Ground:
    """What a plan is for.

    Attributes:
        graph: the workflow.
        profile: what its stages take.
        places: kind -> indices of its devices, all of them numbered from 0.
        capacity: kind -> bytes of a device; ``None``: not known.
        staleness, in_flight: as for `compile_plan`.
        granularity: rows at a time; 0: whichever are best.
        swap: ``auto``: where memory asks; ``never``.
    """

    graph: Graph
    profile: Profile
    places: Mapping[str, tuple[int, ...]]
    capacity: Mapping[str, int | None] = field(default_factory=dict)
    staleness: int = 0
    in_flight: bool = False
    granularity: int = 0
    swap: str = "auto"

    @cached_property
    def kind_of(self) -> dict[int, str]:
        return {device: kind for kind, own in self.places.items() for device in own}

    @cached_property
    def model(self) -> CostModel:
        return CostModel(self.profile, self.graph, self.kind_of)

    @cached_property
    def granularities(self) -> tuple[int, ...]:
        return (self.granularity,) if self.granularity else sizes(self.graph, self.model)

    @cached_property
    def problem(self) -> Problem:
        return problem(self.graph, self.model, self.places, self.capacity, self.staleness, self.granularities)

    def bytes_of(self, device: int) -> int | None:
        """Of a device; ``None``: not known."""
        return self.capacity.get(self.kind_of[device])


@dataclass(frozen=True)
class Found:
    """What came of looking for a plan.

    Attributes:
        best: the plan.
        families: family -> its best plan, or why there is none.
        judged: all plans that can be used, the fastest first.
        refused: those that cannot, with the reason.
        shipped: name of a plan that ships -> it.
    """

    best: Judged
    families: Mapping[str, Judged | str]
    judged: tuple[Judged, ...]
    refused: tuple[tuple[Plan, str], ...]
    shipped: Mapping[str, Plan]


def find(ground: Ground, objective: Objective = TIME) -> Found:
    """The best plan.

    Raises:
        PlacementError: there is none; it says what would be enough.
        ConfigError: the profile lacks something.
    """
    planned, impossible = _planned(ground, objective)
    ships = dict(shipped(ground))
    judged, refused = _judged(ground, [*planned, *ships.values()])
    if not judged:
        if not planned:
            solve(ground.problem, objective)  # it fails, and says what would be enough for any plan
        raise PlacementError(f"no plan fits; of {len(refused)} the first: {refused[0][1]}")
    for look in (_near, _other_sizes):
        known = {one.plan for one in judged}
        more, others = _judged(ground, (p for p in look(ground, pick(judged, objective).plan) if p not in known))
        judged, refused = ranked([*judged, *more]), [*refused, *others]
    families: dict[str, Judged | str] = {}
    for name in FAMILIES:
        own = [one for one in judged if one.family == name]
        families[name] = pick(own, objective) if own else str(impossible.get(name, "none of its plans fits"))
    return Found(pick(judged, objective), families, tuple(judged), tuple(refused), ships)


def _judged(ground: Ground, plans: Iterable[Plan]) -> tuple[list[Judged], list[tuple[Plan, str]]]:
    return judge_all(ground.graph, plans, ground.model, ground.bytes_of, ground.staleness, ground.in_flight)


def _near(ground: Ground, plan: Plan) -> list[Plan]:
    """Plans with the layouts and granularities of this one: other turns, and other groups apart."""
    if sum(stage.ranks for stage in stages(plan)) > RANKS:
        return []
    own = tuple({node.granularity for node in nodes(plan) if isinstance(node, Piped)}) or ground.granularities[:2]
    return neighbours(ground.graph, plan, own, devices=ground.kind_of, most=NEAR)


def _other_sizes(ground: Ground, plan: Plan) -> list[Plan]:
    """The same plan with each granularity: those come first among its neighbours."""
    return neighbours(ground.graph, plan, ground.granularities, most=len(ground.granularities))


def pick(judged: list[Judged], objective: Objective) -> Judged:
    """The best of some plans; the fastest come first."""
    if objective.kind == "memory":
        return min(judged, key=lambda one: (max(one.memory.values(), default=0), one.seconds))
    fastest = judged[0].seconds
    near = [one for one in judged if one.seconds <= fastest * (1 + (objective.within or EQUAL))]
    if objective.kind == "devices":
        return min(near, key=lambda one: (len(one.memory), one.seconds))
    return min(near, key=lambda one: (simplicity(one.plan), one.seconds))


def _planned(ground: Ground, objective: Objective) -> tuple[list[Plan], dict[str, PlacementError]]:
    """The planner's plans, one of each family and granularity; and why a family has none."""
    found: list[Plan] = []
    impossible: dict[str, PlacementError] = {}
    for size, pieces in ground.problem.pieces.items():
        asked = replace(ground.problem, pieces={size: pieces})
        for name in FAMILIES:
            try:
                found.append(flat(solve(asked, objective, name).plan))
            except PlacementError as error:
                impossible[name] = error
    return found, impossible


def shipped(ground: Ground) -> Iterator[tuple[str, Plan]]:
    """The plans that ship, in each granularity, on all devices."""
    count = len(ground.kind_of)
    swaps = (False,) if ground.swap == "never" else (False, True)
    makers: dict[str, list[int]] = {"collocated": [0], "disaggregated": [0], "hybrid": [0]}
    if 2 < count <= 16:
        makers |= {name: list(range(1, count)) for name in ("disaggregated", "hybrid")}
    for name, make in KINDS.items():
        for first in makers[name]:
            for size in ground.granularities:
                for swap in swaps:
                    cfg = PlanConfig(kind=name, granularity=size, maker_devices=first)
                    label = f"{name}{f', {first} for makers' if first else ''}, {size or 'all'} rows at a time"
                    plan = _made(make, ground.graph, count, cfg, swap)
                    if plan is not None and _measured(ground, plan):
                        yield f"{label}{', swapped' if swap else ''}", plan


def _measured(ground: Ground, plan: Plan) -> bool:
    """Whether its groups have tensor-parallel degrees that were measured, or that the workflow asks for."""
    return all(
        stage.tp in ground.model.degrees(stage.worker, ground.kind_of[stage.devices[0]])
        or ground.graph.workers[stage.worker].tp > 1
        for stage in stages(plan)
        if stage.devices
    )


def _made(
    make: Callable[[Graph, int, PlanConfig, bool], Plan], graph: Graph, count: int, cfg: PlanConfig, swap: bool
) -> Plan | None:
    try:
        return make(graph, count, cfg, swap)
    except PlacementError:
        return None
