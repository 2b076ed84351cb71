"""Plans, judged by the simulator: seconds of an iteration, idle devices, peak memory. Pure.

The planner's model is a formula; the simulator runs the compiled programs. What the planner finds, and every plan that
ships, is simulated, and the simulator's figure decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from rlinf.errors import PlacementError
from rlinf.m2flow.compiler import Compiled, compile_plan
from rlinf.m2flow.graph import TRAIN, Graph
from rlinf.m2flow.idle import DeviceTime, device_times
from rlinf.m2flow.memory import Sizes, peak_bytes
from rlinf.m2flow.plan import Piped, Plan, Shared, Stage, nodes, stages
from rlinf.m2flow.simulate import Costs, simulate
from rlinf.m2flow.timeline import Doing, RankId, Span

COLLOCATED, DISAGGREGATED, HYBRID = FAMILIES = ("collocated", "disaggregated", "hybrid")


class Model(Protocol):
    """What a judge asks of a cost model, for a plan that is compiled."""

    def costs(self, plan: Plan, compiled: Compiled) -> Costs:
        """Of every operation, in the plan's layouts."""

    def sizes(self, compiled: Compiled) -> Sizes:
        """Bytes on devices."""


@dataclass(frozen=True)
class Judged:
    """A plan and what is to be expected of it.

    Attributes:
        plan: which.
        compiled: its programs.
        seconds: of an iteration, once under way.
        spans: predicted time line of the first iteration.
        memory: device -> bytes at its fullest.
        graph: the workflow.
    """

    plan: Plan
    compiled: Compiled
    seconds: float
    spans: Mapping[RankId, Sequence[Span]]
    memory: Mapping[int, int]
    graph: Graph

    @property
    def family(self) -> str:
        return family(self.plan)

    @cached_property
    def times(self) -> list[DeviceTime]:
        """How each device spends its time."""
        return device_times(self.graph, self.compiled, self.spans)

    @property
    def idle_share(self) -> float:
        """Of all devices that the plan uses, from 0 to 1."""
        return sum(time.idle_share for time in self.times) / len(self.times) if self.times else 0.0

    @cached_property
    def stages(self) -> dict[str, float]:
        """Stage -> seconds that its slowest rank runs it."""
        found: dict[str, float] = {}
        for own in self.spans.values():
            mine: dict[str, float] = {}
            for span in own:
                if span.doing is Doing.RUN:
                    mine[span.name] = mine.get(span.name, 0.0) + span.end - span.start
            for name, took in mine.items():
                found[name] = max(found.get(name, 0.0), took)
        return found


def judge(graph: Graph, plan: Plan, model: Model, staleness: int = 0, in_flight: bool = False) -> Judged:
    """Compile a plan and simulate it.

    Raises:
        PlacementError: it cannot be compiled.
    """
    compiled = compile_plan(graph, plan, staleness, in_flight)
    costs = model.costs(plan, compiled)
    spans = simulate(graph, compiled, TRAIN, costs)
    memory = peak_bytes(compiled, spans, model.sizes(compiled))
    return Judged(plan, compiled, pace(graph, compiled, costs), spans, memory, graph)


def pace(graph: Graph, compiled: Compiled, costs: Costs) -> float:
    """Seconds from the end of an iteration to that of the next, once the run is under way."""
    if not compiled.staleness:
        return _end(simulate(graph, compiled, TRAIN, costs))
    few, more = 2 * compiled.staleness + 1, 4 * compiled.staleness + 3
    ends = [_end(simulate(graph, compiled, TRAIN, costs, iterations=n)) for n in (few, more)]
    return (ends[1] - ends[0]) / (more - few)


def judge_all(
    graph: Graph,
    plans: Iterable[Plan],
    model: Model,
    capacity: Callable[[int], int | None],
    staleness: int = 0,
    in_flight: bool = False,
) -> tuple[list[Judged], list[tuple[Plan, str]]]:
    """Judge several plans.

    Args:
        graph: the workflow.
        plans: each is judged once, also if it comes twice.
        model: of costs.
        capacity: of a device, in bytes; ``None``: not known.
        staleness, in_flight: as for `compile_plan`.

    Returns:
        Those that can be used, the fastest first (of equal ones the simplest); and the others, with the reason.
    """
    found, refused, seen = [], [], set()
    for plan in plans:  # as they come: some are made one at a time
        if plan in seen:
            continue
        seen.add(plan)
        try:
            one = judge(graph, plan, model, staleness, in_flight)
        except PlacementError as error:
            refused.append((plan, str(error)))
            continue
        if over := {d: size for d, size in one.memory.items() if (most := capacity(d)) is not None and size > most}:
            device, size = max(over.items(), key=lambda item: item[1])
            have = (capacity(device) or 0) / 2**30
            refused.append((plan, f"device {device} would hold {size / 2**30:.2f} GiB at its fullest, of {have:.2f}"))
        else:
            found.append(one)
    return ranked(found), refused


def ranked(judged: Iterable[Judged]) -> list[Judged]:
    """The fastest first, of equal ones the simplest."""
    return sorted(judged, key=lambda one: (round(one.seconds, 9), simplicity(one.plan), str(one.plan)))


def family(plan: Plan) -> str:
    """Which of `FAMILIES` a plan is of, by where groups with devices meet.

    Collocated: none are piped. Disaggregated: at the top they are piped. Hybrid: some are, below a turn.
    """
    tree = _with_devices(plan)
    if tree is None or not any(isinstance(node, Piped) for node in nodes(tree)):
        return COLLOCATED
    return DISAGGREGATED if isinstance(tree, Piped) else HYBRID


def _with_devices(plan: Plan) -> Plan | None:
    """The tree without groups that are on no device, and without nodes that then have one part."""
    if isinstance(plan, Stage):
        return plan if plan.devices else None
    parts = [part for part in map(_with_devices, plan.parts) if part is not None]
    if len(parts) < 2:
        return parts[0] if parts else None
    return Piped(tuple(parts), plan.granularity) if isinstance(plan, Piped) else Shared(tuple(parts), plan.swap)


def simplicity(plan: Plan) -> tuple[int, int, int]:
    """How simple a plan is: pipes in it, devices that it uses, orders of turns that are not the workflow's own."""
    every = list(nodes(plan))
    return (
        sum(isinstance(node, Piped) for node in every),
        sum(len(stage.devices) for stage in stages(plan)),
        sum(isinstance(node, Shared) and bool(node.order) for node in every),
    )


def _end(spans: Mapping[RankId, Sequence[Span]]) -> float:
    return max((span.end for own in spans.values() for span in own), default=0.0)
