"""The planner's model once more, from its description alone: every tree, layout, granularity and swap, one by one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, reduce

from rlinf.m2flow.plan import Piped, Plan, Shared, Stage
from rlinf.scheduler.problem import Option, Problem

Counts = tuple[tuple[str, int], ...]
"""Kind -> a number, as pairs in the order of the kinds."""


@dataclass(frozen=True)
class Value:
    """What a tree comes to.

    Attributes:
        placed: groups with devices.
        family: of the plan, if it were the whole.
    """

    stream: float
    rest: float
    busy: float
    devices: Counts
    held: Counts
    peak: Counts
    placed: int
    family: str = "collocated"


def leaf(option: Option, size: int, swapped: bool) -> Value:
    stream, rest = option.stream[size], option.rest + (option.swap if swapped else 0.0)
    if not option.kind:
        return Value(stream, rest, stream + rest, (), (), (), 0)
    kind, full = option.kind, option.resident + option.transient
    held = 0 if swapped else option.resident
    count = option.dp * option.tp
    return Value(stream, rest, stream + rest, ((kind, count),), ((kind, held),), ((kind, full),), 1)


def joined(how: str, a: Value, b: Value, pieces: int, reads: bool, rests: bool) -> Value:
    """Two trees under a node, ``shared`` or ``piped``, the second of which may read the first."""
    kinds = sorted({kind for kind, _ in (*a.devices, *b.devices)})
    of = [(dict(one.devices), dict(one.held), dict(one.peak)) for one in (a, b)]

    def each(place: int, kind: str) -> tuple[int, int]:
        return of[0][place].get(kind, 0), of[1][place].get(kind, 0)

    family = next((one.family for one, other in ((a, b), (b, a)) if not other.placed), "")
    if how == "piped":
        slow = max(a.stream, b.stream)
        return Value(
            (a.stream + b.stream) / pieces + (1 - 1 / pieces) * slow if reads else slow,
            a.rest + b.rest if rests else max(a.rest, b.rest),
            max(a.busy, b.busy),
            tuple((kind, sum(each(0, kind))) for kind in kinds),
            tuple((kind, max(each(1, kind))) for kind in kinds),
            tuple((kind, max(each(2, kind))) for kind in kinds),
            a.placed + b.placed,
            family or "disaggregated",
        )
    peaks = []
    for kind in kinds:
        (held_a, held_b), (peak_a, peak_b) = each(1, kind), each(2, kind)
        peaks.append((kind, max(peak_a + held_b, peak_b + held_a)))
    return Value(
        a.stream + b.stream,
        a.rest + b.rest,
        a.busy + b.busy,
        tuple((kind, max(each(0, kind))) for kind in kinds),
        tuple((kind, sum(each(1, kind))) for kind in kinds),
        tuple(peaks),
        a.placed + b.placed,
        family or ("collocated" if a.family == b.family == "collocated" else "hybrid"),
    )


def closed(problem: Problem) -> frozenset[tuple[str, str]]:
    pairs = set(problem.reads)
    while True:
        more = {(a, d) for a, b in pairs for c, d in pairs if b == c} - pairs
        if not more:
            return frozenset(pairs)
        pairs |= more


def linked(problem: Problem, first: frozenset[str], second: frozenset[str]) -> tuple[bool, bool]:
    """(the second reads the first, their rests add)."""
    pairs = closed(problem)
    rests = problem.rest_reads
    return (
        any((x, y) in pairs for x in first for y in second),
        any((x, y) in rests or (y, x) in rests for x in first for y in second),
    )


def seconds(found: Value, problem: Problem) -> float:
    alone = found.stream + found.rest
    return max(found.busy, alone / (problem.staleness + 1)) if problem.staleness else alone


def feasible(found: Value, problem: Problem) -> bool:
    return all(count <= len(problem.devices[kind]) for kind, count in found.devices) and all(
        (most := problem.capacity.get(kind)) is None or size <= most for kind, size in found.peak
    )


def every(problem: Problem) -> Iterator[Value]:
    """What all feasible plans come to; plans that come to the very same count once."""
    pairs = closed(problem)
    by_name = {part.name: part for part in problem.parts}

    for size, pieces in problem.pieces.items():

        @cache
        def values(parts: frozenset[str], swapped: bool, size: int = size, pieces: int = pieces) -> frozenset[Value]:
            if len(parts) == 1:
                (name,) = parts
                return frozenset(leaf(option, size, swapped) for option in by_name[name].options)
            found = set()
            for first, second in cuts(parts, pairs):
                reads, rests = linked(problem, first, second)
                for a, b in itertools.product(values(first, swapped), values(second, swapped)):
                    for how in ("shared", "piped"):
                        found.add(joined(how, a, b, pieces, reads, rests))
                if not swapped:
                    for a, b in itertools.product(values(first, True), values(second, True)):
                        if a.placed + b.placed > 1:
                            found.add(joined("shared", a, b, pieces, reads, rests))
            return frozenset(found)

        yield from (found for found in values(frozenset(by_name), False) if feasible(found, problem))


def cuts(parts: frozenset[str], pairs: frozenset[tuple[str, str]]) -> Iterator[tuple[frozenset[str], frozenset[str]]]:
    """Ways to take parts apart, in which the first ones read none of the second."""
    for count in range(1, len(parts)):
        for some in itertools.combinations(sorted(parts), count):
            first = frozenset(some)
            second = parts - first
            if not any((b, a) in pairs for a in first for b in second):
                yield first, second


def value(plan: Plan, problem: Problem, size: int, swapped: bool = False) -> Value:
    """What one plan comes to, whose nodes have two parts each."""
    if isinstance(plan, Stage):
        (part,) = [part for part in problem.parts if part.name == plan.worker]
        kinds = [kind for kind, own in problem.devices.items() if plan.devices and set(plan.devices) <= set(own)]
        wanted = (kinds[0] if kinds else "", plan.dp, plan.tp)
        (option,) = [o for o in part.options if (o.kind, o.dp, o.tp) == wanted]
        assert len(plan.devices) == option.devices
        return leaf(option, size, swapped)
    first, second = plan.parts
    inside = swapped or (isinstance(plan, Shared) and plan.swap)
    reads, rests = linked(problem, groups(first), groups(second))
    assert not linked(problem, groups(second), groups(first))[0]
    how = "piped" if isinstance(plan, Piped) else "shared"
    a, b = value(first, problem, size, inside), value(second, problem, size, inside)
    return joined(how, a, b, problem.pieces[size], reads, rests)


def groups(plan: Plan) -> frozenset[str]:
    if isinstance(plan, Stage):
        return frozenset([plan.worker])
    return reduce(frozenset.union, map(groups, plan.parts))


def devices_of(plan: Plan) -> frozenset[int]:
    """Checked by the way: parts that are piped have no device in common."""
    if isinstance(plan, Stage):
        return frozenset(plan.devices)
    each = [devices_of(part) for part in plan.parts]
    together = reduce(frozenset.union, each)
    if isinstance(plan, Piped):
        assert sum(map(len, each)) == len(together)
    return together
