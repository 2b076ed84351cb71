"""Planning again, while a run goes on: other plans for the ranks that run, judged by costs as they turned out. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from rlinf.m2flow.compiler import Compiled
from rlinf.m2flow.costs import RECEIVE, SEND
from rlinf.m2flow.graph import Graph
from rlinf.m2flow.memory import Sizes
from rlinf.m2flow.plan import Plan
from rlinf.m2flow.simulate import Costs, StageCost, Times
from rlinf.m2flow.timeline import Doing
from rlinf.scheduler.drift import operation
from rlinf.scheduler.judge import Judged, Model, judge, judge_all

GAIN = 0.05  # of an iteration: less is within what a model errs


@dataclass(frozen=True)
class Planned:
    """A plan, and what is needed to plan again.

    Attributes:
        plan: that runs.
        model: of costs, that it was chosen by.
        judged: what is expected of it.
        capacity: of a device, in bytes; ``None``: not known.
        granularities: rows at a time that other plans may have; none: those of this plan, and all at once.
        swaps: whether other plans may swap; none: as this one does.
        devices: that other plans may use; none: those of this plan.
        reasons: for the choice, as lines for a person.
    """

    plan: Plan
    model: Model
    judged: Judged
    capacity: Callable[[int], int | None]
    granularities: tuple[int, ...] = ()
    swaps: tuple[bool, ...] = ()
    devices: tuple[int, ...] = ()
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class Decision:
    """What came of planning again.

    Attributes:
        plan: to change to; ``None``: the one that runs stays.
        reason: in words.
        before, after: seconds of an iteration that are expected, as it is and with the best other plan.
        judged: the plan that runs from now on, by the corrected model.
        model: that.
    """

    plan: Plan | None
    reason: str
    before: float
    after: float
    judged: Judged
    model: Model


@dataclass(frozen=True)
class Scaled:
    """A cost, some times as high. A `StageCost`."""

    cost: StageCost
    factor: float

    def seconds(self, rows: int) -> float:
        return self.factor * self.cost.seconds(rows)

    def ready(self, rows: int) -> Times:
        return self.cost.ready(rows)


@dataclass(frozen=True)
class Corrected:
    """A model whose times are those of another one, some times as long. A `Model`."""

    model: Model
    ratios: Mapping[str, float]

    def costs(self, plan: Plan, compiled: Compiled) -> Costs:
        found, ratio = self.model.costs(plan, compiled), self._ratio
        return replace(
            found,
            nodes={name: Scaled(cost, ratio(name)) for name, cost in found.nodes.items()},
            onload={group: s * ratio(operation(group, Doing.ONLOAD.value)) for group, s in found.onload.items()},
            offload={group: s * ratio(operation(group, Doing.OFFLOAD.value)) for group, s in found.offload.items()},
            sync={(a, b): s * ratio(operation(a, SEND + b)) for (a, b), s in found.sync.items()},
            receive={
                (a, b): found.receive.get((a, b), found.sync.get((a, b), 0.0)) * ratio(operation(b, RECEIVE + a))
                for a, b in (*found.sync, *found.receive)
            },
        )

    def sizes(self, compiled: Compiled) -> Sizes:
        return self.model.sizes(compiled)

    def _ratio(self, name: str) -> float:
        return self.ratios.get(name, 1.0)


def corrected(model: Model, ratios: Mapping[str, float]) -> Model:
    """The model, with what was measured.

    Args:
        model: that was wrong; one that was corrected before is corrected further.
        ratios: work, as `rlinf.scheduler.drift` names it -> times what the model says.
    """
    if isinstance(model, Corrected):
        names = {*model.ratios, *ratios}
        both = {name: model.ratios.get(name, 1.0) * ratios.get(name, 1.0) for name in names}
        return Corrected(model.model, both)
    return Corrected(model, dict(ratios))


def replan(
    graph: Graph,
    plan: Plan,
    model: Model,
    ratios: Mapping[str, float],
    candidates: Iterable[Plan],
    capacity: Callable[[int], int | None],
    staleness: int,
    switching_s: float,
    iterations_left: int,
    in_flight: bool = False,
) -> Decision:
    """Whether another plan is worth changing to, now that costs are known better.

    It is if an iteration becomes shorter by more than `GAIN`, and all that are left by more than changing takes.

    Args:
        graph: the workflow.
        plan: that runs.
        model: by which it was planned.
        ratios: as for `corrected`.
        candidates: plans that the ranks which run can take over.
        capacity: of a device, in bytes; ``None``: not known.
        staleness, in_flight: as for `compile_plan`.
        switching_s: seconds that the change itself takes.
        iterations_left: of the run.

    Raises:
        PlacementError: the plan that runs cannot be compiled.
    """
    better = corrected(model, ratios)
    now = judge(graph, plan, better, staleness, in_flight)
    others = (other for other in candidates if other != plan)
    found, refused = judge_all(graph, others, better, capacity, staleness, in_flight)

    def stays(reason: str, after: float) -> Decision:
        return Decision(None, f"the plan stays: {reason}", now.seconds, after, now, better)

    if not found:
        why = f"; the first of {len(refused)}: {refused[0][1]}" if refused else ""
        return stays(f"the running workers can take over no other{why}", now.seconds)
    best = found[0]
    gain = now.seconds - best.seconds
    pair = f"{best.seconds:.3g} s an iteration instead of {now.seconds:.3g} s"
    if gain <= 0:
        return stays(f"none of {len(found)} others is faster ({pair})", best.seconds)
    share = f"{gain / now.seconds:.0%}"
    if gain <= GAIN * now.seconds:
        return stays(f"the best of {len(found)} others gains too little ({pair}, {share})", best.seconds)
    if gain * iterations_left <= switching_s:
        text = f"changing takes {switching_s:.3g} s, and {iterations_left} iterations are left to gain it back"
        return stays(f"{text} ({pair})", best.seconds)
    reason = f"another plan is expected to take {pair} ({share} less), with {iterations_left} to go"
    return Decision(best.plan, reason, now.seconds, best.seconds, best, better)
