"""The planner: the best plan over the model of `rlinf.scheduler.problem`, exactly. Pure.

A dynamic program over sets of parts. What can be had of a set is a frontier: of all trees over it, with all layouts,
those that no other one beats in every respect (time that streams, time that waits, devices, memory). A set's frontier
follows from those of the two sets that its root cuts it into, and every cut is tried: one side is a downset, so that
nothing in it reads what the other side makes. What is beaten in every respect stays beaten in any larger tree, as
times, devices and memory of a tree never fall when those of a part of it grow; so the frontier of the whole has the
best plan. What already takes longer than a plan that is known is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rlinf.errors import PlacementError
from rlinf.m2flow.plan import Piped, Plan, Shared, Stage, stages
from rlinf.scheduler.checks import check, infeasible
from rlinf.scheduler.frontier import LEAF, PIPED, PIPES, SWAPPED, SWAPS, Search
from rlinf.scheduler.problem import Problem

COLLOCATED, DISAGGREGATED, HYBRID = "collocated", "disaggregated", "hybrid"


@dataclass(frozen=True)
class Objective:
    """What is best.

    Attributes:
        kind: ``time`` of an iteration, ``memory`` of the fullest device, or ``devices``.
        within: for devices, how much slower than the fastest plan, in parts of its time.
    """

    kind: str = "time"
    within: float = 0.0


TIME, MEMORY = Objective("time"), Objective("memory")


def fewest(within: float) -> Objective:
    """The fewest devices with which an iteration takes at most this part longer than on all of them."""
    return Objective("devices", within)


@dataclass(frozen=True)
class Choice:
    """The best plan.

    Attributes:
        plan: with devices by their indices; two parts to each node (`flat` makes fewer of them).
        seconds: of an iteration, by the model.
        granularity: rows at a time; 0: all at once.
        memory: kind -> bytes of its fullest device.
        devices: how many it uses.
        stream, rest: of an iteration.
        swaps, pipes: nodes of the plan that swap, and that are piped.
    """

    plan: Plan
    seconds: float
    granularity: int
    memory: Mapping[str, int]
    devices: int
    stream: float
    rest: float
    swaps: int = 0
    pipes: int = 0


def solve(problem: Problem, objective: Objective = TIME, family: str | None = None) -> Choice:
    """The best plan of all.

    Of plans that are as good, that with the fewest devices is taken, then the one with the fewest swaps and pipes.

    Args:
        problem: what is asked.
        objective: what is best.
        family: of plans, as `rlinf.scheduler.judge.family` has it; ``None``: all.

    Raises:
        PlacementError: the problem makes no sense, or nothing is feasible; it says what would be.
    """
    check(problem)
    if objective.kind == "devices":
        fastest = _best(problem, TIME, family, None)
        if fastest is not None:
            bound = fastest.seconds * (1 + objective.within)
            return _best(problem, objective, family, bound) or fastest
        found = None
    else:
        found = _best(problem, objective, family, None)
    if found is None:
        raise PlacementError(_why(problem, family))
    return found


def _best(problem: Problem, objective: Objective, family: str | None, bound: float | None) -> Choice | None:
    if objective.kind == "time" and any(size is not None for size in problem.capacity.values()):
        return _fastest_that_fits(problem, family, bound)
    best: Choice | None = None
    for size in sorted(problem.pieces):
        best = _better(best, _of_size(problem, size, objective, family, bound), objective)
        if objective.kind == "time" and best is not None:
            bound = best.seconds
    return best


def _fastest_that_fits(problem: Problem, family: str | None, bound: float | None) -> Choice | None:
    """As if memory were no matter, first: where what is found fits, it is the best of more plans than there are.

    Else no plan of a granularity is faster than that, which shows those that are not worth a search.
    """
    free = replace(problem, capacity={})
    least = {size: _of_size(free, size, TIME, family, bound) for size in sorted(problem.pieces)}
    found: Choice | None = None
    for one in least.values():
        found = _better(found, one, TIME)
    if found is None or _fits(problem, found):
        return found
    if family is None:  # what can be had in turns bounds all others
        first = min(problem.pieces)
        turns = _of_size(problem, first, TIME, COLLOCATED, bound)
        bound = bound if turns is None else turns.seconds
    best: Choice | None = None
    for lower in sorted((one for one in least.values() if one is not None), key=lambda one: one.seconds):
        if bound is None or lower.seconds <= bound:
            best = _better(best, _of_size(problem, lower.granularity, TIME, family, bound), TIME)
            bound = bound if best is None else best.seconds
    return best


def _of_size(
    problem: Problem, size: int, objective: Objective, family: str | None, bound: float | None
) -> Choice | None:
    search = Search(problem, size, problem.pieces[size], family, objective.kind, bound)
    found = search.best()
    return None if found is None else _choice(problem, search, found, size)


def _better(one: Choice | None, other: Choice | None, objective: Objective) -> Choice | None:
    """The first of two as good as one another."""

    def rank(choice: Choice) -> tuple[float, ...]:
        memory = max(choice.memory.values(), default=0)
        seconds = float(f"{choice.seconds:.11e}")
        simple = (choice.swaps, choice.pipes)
        return {
            "time": (seconds, choice.devices, *simple, memory),
            "memory": (memory, seconds, choice.devices, *simple),
            "devices": (choice.devices, seconds, *simple, memory),
        }[objective.kind]

    if one is None or other is None:
        return one or other
    return min(one, other, key=rank)


def _fits(problem: Problem, choice: Choice) -> bool:
    return all((most := problem.capacity.get(kind)) is None or size <= most for kind, size in choice.memory.items())


def _choice(problem: Problem, search: Search, label: int, size: int) -> Choice:
    plan = _tree(problem, search, label, dict.fromkeys(problem.devices, 0), size, False)
    stream, rest = search.times(label)
    return Choice(
        plan=plan,
        seconds=search.seconds(label),
        granularity=size,
        memory=search.memory(label),
        devices=len({device for stage in stages(plan) for device in stage.devices}),
        stream=stream,
        rest=rest,
        swaps=search.count(label, SWAPS),
        pipes=search.count(label, PIPES),
    )


def _tree(problem: Problem, search: Search, label: int, start: Mapping[str, int], size: int, swapped: bool) -> Plan:
    """The plan of a label.

    Args:
        start: kind -> place of the first of its devices that this tree may use.
        size: granularity.
        swapped: it is part of a tree that is swapped.
    """
    op = search.op[label]
    if op == LEAF:
        part = problem.parts[search.part[label]]
        option = part.options[search.option[label]]
        if not option.kind:
            return Stage(part.name, (), option.dp, option.tp)
        first = start[option.kind]
        where = problem.devices[option.kind][first : first + option.devices]
        return Stage(part.name, where, option.dp, option.tp, part.spans)
    left, right = search.left[label], search.right[label]
    behind = start
    if op == PIPED:
        behind = {kind: at + search.devices(left, kind) for kind, at in start.items()}
    below = swapped or op == SWAPPED
    parts = (_tree(problem, search, left, start, size, below), _tree(problem, search, right, behind, size, below))
    return Piped(parts, size) if op == PIPED else Shared(parts, below)


def flat(plan: Plan) -> Plan:
    """The same plan with fewer nodes: a part that is piped as the node above it, or shared as it, is taken apart."""
    if isinstance(plan, Stage):
        return plan
    parts: list[Plan] = []
    for part in map(flat, plan.parts):
        same = (
            isinstance(part, Piped) if isinstance(plan, Piped) else isinstance(part, Shared) and part.swap == plan.swap
        )
        parts.extend(part.parts if same and not isinstance(part, Stage) else [part])
    return replace(plan, parts=tuple(parts))


def _why(problem: Problem, family: str | None) -> str:
    """Why nothing is feasible, and what would be enough."""
    free = replace(problem, capacity={})
    of = f"{family} plan" if family else "plan"
    if family and _best(problem, TIME, None, None) is not None:
        smallest = _best(free, MEMORY, family, None)
        if smallest is None:
            wants = {DISAGGREGATED: "two groups on disjoint", HYBRID: "two groups on disjoint, and one on the same"}
            return f"there is no {of}: it has {wants.get(family, 'groups on the same')} devices, which none here can be"
    return infeasible(problem, of, _best(free, MEMORY, family, None), _more_devices(problem, family))


def _more_devices(problem: Problem, family: str | None) -> int | None:
    """How many devices of its kind would be enough, where there is one; as many as options can use are tried."""
    if len(problem.devices) != 1:
        return None
    ((kind, own),) = problem.devices.items()
    most = sum(max((option.devices for option in part.options), default=0) for part in problem.parts)
    count = len(own)
    while count < most:
        count += 1
        wider = replace(problem, devices={kind: tuple(range(count))})
        if _best(wider, TIME, family, None) is not None:
            return count
    return None
