"""The planner's model once more, from its description alone: every tree, layout, granularity and swap, one by one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce

from rlinf.m2flow.plan import Piped, Plan, Shared, Stage
from rlinf.scheduler.problem import Option, Problem


@dataclass(frozen=True)
class Tree:
    """A plan without places: a leaf has a part and an option; another node ``how`` and two trees."""

    how: str  # leaf | shared | swapped | piped
    part: str = ""
    option: Option | None = None
    below: tuple[Tree, ...] = ()

    def parts(self) -> frozenset[str]:
        return frozenset([self.part]) if self.how == "leaf" else self.below[0].parts() | self.below[1].parts()

    def placed(self) -> int:
        """Groups with devices."""
        if self.how == "leaf":
            return int(bool(self.option and self.option.kind))
        return sum(tree.placed() for tree in self.below)


@dataclass(frozen=True)
class Value:
    stream: float
    rest: float
    busy: float
    devices: dict[str, int]
    held: dict[str, int]
    peak: dict[str, int]


def value(tree: Tree, problem: Problem, size: int, swapped: bool = False) -> Value:
    if tree.how == "leaf":
        assert tree.option is not None
        option = tree.option
        stream, rest = option.stream[size], option.rest + (option.swap if swapped else 0.0)
        if not option.kind:
            return Value(stream, rest, stream + rest, {}, {}, {})
        full = option.resident + option.transient
        held = 0 if swapped else option.resident
        kind = option.kind
        return Value(stream, rest, stream + rest, {kind: option.dp * option.tp}, {kind: held}, {kind: full})
    a, b = (value(below, problem, size, swapped or tree.how == "swapped") for below in tree.below)
    kinds = {*a.devices, *b.devices}

    def get(of: dict[str, int], kind: str) -> int:
        return of.get(kind, 0)

    if tree.how != "piped":
        return Value(
            a.stream + b.stream,
            a.rest + b.rest,
            a.busy + b.busy,
            {k: max(get(a.devices, k), get(b.devices, k)) for k in kinds},
            {k: get(a.held, k) + get(b.held, k) for k in kinds},
            {k: max(get(a.peak, k) + get(b.held, k), get(b.peak, k) + get(a.held, k)) for k in kinds},
        )
    first, second = (below.parts() for below in tree.below)
    m = problem.pieces[size]
    reads = any((x, y) in closed(problem) for x in first for y in second)
    rests = any((x, y) in problem.rest_reads or (y, x) in problem.rest_reads for x in first for y in second)
    slow = max(a.stream, b.stream)
    return Value(
        (a.stream + b.stream) / m + (1 - 1 / m) * slow if reads else slow,
        a.rest + b.rest if rests else max(a.rest, b.rest),
        max(a.busy, b.busy),
        {k: get(a.devices, k) + get(b.devices, k) for k in kinds},
        {k: max(get(a.held, k), get(b.held, k)) for k in kinds},
        {k: max(get(a.peak, k), get(b.peak, k)) for k in kinds},
    )


def closed(problem: Problem) -> frozenset[tuple[str, str]]:
    pairs = set(problem.reads)
    while True:
        more = {(a, d) for a, b in pairs for c, d in pairs if b == c} - pairs
        if not more:
            return frozenset(pairs)
        pairs |= more


def seconds(found: Value, problem: Problem) -> float:
    alone = found.stream + found.rest
    return max(found.busy, alone / (problem.staleness + 1)) if problem.staleness else alone


def feasible(found: Value, problem: Problem) -> bool:
    return all(count <= len(problem.devices[kind]) for kind, count in found.devices.items()) and all(
        problem.capacity.get(kind) is None or size <= problem.capacity[kind] for kind, size in found.peak.items()
    )


def shapes(parts: tuple[str, ...], problem: Problem, swapped: bool = False) -> Iterator[Tree]:
    """Every tree; options are still open."""
    if len(parts) == 1:
        yield Tree("leaf", parts[0])
        return
    reads = closed(problem)
    for count in range(1, len(parts)):
        for first in itertools.combinations(parts, count):
            second = tuple(part for part in parts if part not in first)
            if any((b, a) in reads for a in first for b in second):
                continue
            for how in ("shared", "piped", *(() if swapped else ("swapped",))):
                inside = swapped or how == "swapped"
                for a in shapes(first, problem, inside):
                    for b in shapes(second, problem, inside):
                        yield Tree(how, below=(a, b))


def with_options(tree: Tree, chosen: dict[str, Option]) -> Tree:
    if tree.how == "leaf":
        return Tree("leaf", tree.part, chosen[tree.part])
    return Tree(tree.how, below=tuple(with_options(below, chosen) for below in tree.below))


def every(problem: Problem) -> Iterator[tuple[Tree, int, Value]]:
    """All feasible plans: (tree, granularity, value)."""
    parts = tuple(part.name for part in problem.parts)
    trees = list(shapes(parts, problem))
    for chosen in itertools.product(*(part.options for part in problem.parts)):
        options = dict(zip(parts, chosen, strict=True))
        for shape in trees:
            tree = with_options(shape, options)
            if any(node.how == "swapped" and node.placed() < 2 for node in walk(tree)):
                continue
            for size in problem.pieces:
                found = value(tree, problem, size)
                if feasible(found, problem):
                    yield tree, size, found


def walk(tree: Tree) -> Iterator[Tree]:
    yield tree
    for below in tree.below:
        yield from walk(below)


def family(tree: Tree) -> str:
    """Of a tree, by where groups with devices meet."""
    if tree.how == "leaf":
        return "collocated"
    placed = [below for below in tree.below if below.placed()]
    if len(placed) < 2:
        return family(placed[0]) if placed else "collocated"
    if tree.how == "piped":
        return "disaggregated"
    return "collocated" if all(family(below) == "collocated" for below in placed) else "hybrid"


def tree_of(plan: Plan, problem: Problem) -> Tree:
    """A plan's tree, its nodes cut in two again."""
    if isinstance(plan, Stage):
        (part,) = [part for part in problem.parts if part.name == plan.worker]
        kinds = [kind for kind, own in problem.devices.items() if plan.devices and set(plan.devices) <= set(own)]
        wanted = (kinds[0] if kinds else "", plan.dp, plan.tp)
        (option,) = [o for o in part.options if (o.kind, o.dp, o.tp) == wanted]
        return Tree("leaf", plan.worker, option)
    how = "piped" if isinstance(plan, Piped) else "swapped" if plan.swap else "shared"
    return reduce(lambda a, b: Tree(how, below=(a, b)), [tree_of(part, problem) for part in plan.parts])


def devices_of(plan: Plan) -> frozenset[int]:
    """Checked by the way: parts that are piped have no device in common."""
    if isinstance(plan, Stage):
        return frozenset(plan.devices)
    each = [devices_of(part) for part in plan.parts]
    if isinstance(plan, Piped):
        assert sum(map(len, each)) == len(frozenset().union(*each))
    return frozenset().union(*each)


__all__ = ["Shared", "every", "family", "feasible", "seconds", "tree_of", "value"]
