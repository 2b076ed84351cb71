"""Problems that make no sense, and those that have no solution: what is wrong, and what would be enough. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING

from rlinf.errors import PlacementError
from rlinf.scheduler.problem import Option, Part, Problem

if TYPE_CHECKING:
    from rlinf.scheduler.planner import Choice

GIB = 2**30


def check(problem: Problem) -> None:
    """
    Raises:
        PlacementError: no parts, a cycle, a name that is not there, or costs that cannot be.
    """
    for text in _mistakes(problem):
        raise PlacementError(text)


def _mistakes(problem: Problem) -> Iterator[str]:
    names = [part.name for part in problem.parts]
    if not names:
        yield "there is nothing to plan: the problem has no parts"
    if twice := [name for name in names if names.count(name) > 1]:
        yield f"the part {twice[0]} is there twice"
    for what, pairs in (("reads", problem.reads), ("rest_reads", problem.rest_reads)):
        for pair in sorted(pairs):
            if strange := [name for name in pair if name not in names]:
                yield f"{what} names {strange[0]!r}, which is no part; there are {', '.join(names)}"
    before: dict[str, set[str]] = {name: set() for name in names}
    for source, target in problem.reads:
        before[target].add(source)
    try:
        TopologicalSorter(before).prepare()
    except CycleError as error:
        circle = " -> ".join(reversed(error.args[1]))
        yield f"the parts read one another in a cycle: {circle}; one of them must come first"
    if not problem.pieces:
        yield "the problem has no granularity; {0: 1} is all rows at once"
    for size, pieces in problem.pieces.items():
        if size < 0 or pieces < 1:
            yield f"a granularity of {size} rows with {pieces} pieces an iteration: expected 0 or more, and 1 or more"
    if problem.staleness < 0:
        yield f"staleness is {problem.staleness}: 0 is on-policy, k lets generation run k updates ahead"
    for part in problem.parts:
        if not part.options:
            yield f"{part.name} has no layout that it can run in: give it one for devices that are there"
        for option in part.options:
            yield from _of_option(problem, part, option)


def _of_option(problem: Problem, part: Part, option: Option) -> Iterator[str]:
    where = f"{part.name} on {option.kind or 'no device'}, dp={option.dp} tp={option.tp}"
    if option.kind and option.kind not in problem.devices:
        yield f"{where}: there are no such devices, only {', '.join(problem.devices) or 'none'}"
    if option.dp < 1 or option.tp < 1:
        yield f"{where}: expected 1 or more of each"
    if lacking := sorted(set(problem.pieces) - set(option.stream)):
        yield f"{where}: it has no time for a granularity of {lacking[0]} rows, only for {sorted(option.stream)}"
    times = {f"stream[{size}]": took for size, took in option.stream.items()}
    for name, took in {**times, "rest": option.rest, "swap": option.swap}.items():
        if not math.isfinite(took) or took < 0:
            yield f"{where}: {name} takes {took} s; expected 0 or more, as a stage was measured"
    if not option.rest and not any(option.stream.values()):
        yield f"{where}: all its stages together take no time; give what they were measured to take"
    if option.resident < 0 or option.transient < 0:
        yield f"{where}: it holds {option.resident} and {option.transient} bytes; expected 0 or more"


def infeasible(problem: Problem, of: str, smallest: Choice | None, devices: int | None) -> str:
    """Why there is no plan.

    Args:
        problem: that has none.
        of: what kind of plan, in words.
        smallest: the plan that needs the least memory, if devices had as much as it takes.
        devices: how many would be enough; ``None``: no number, or not known.
    """
    there = ", ".join(
        f"{len(own)} x {kind}" + (f" of {size / GIB:.2f} GiB" if (size := problem.capacity.get(kind)) else "")
        for kind, own in problem.devices.items()
    )
    lines = [f"no {of} fits on {there or 'no devices'}"]
    for part in problem.parts:
        if not any(_alone(problem, option) for option in part.options):
            least = min(part.options, key=lambda option: (option.devices, option.resident + option.transient))
            need = (least.resident + least.transient) / GIB
            lines.append(
                f"{part.name} alone takes {least.devices} device{'s' * (least.devices != 1)} of {need:.2f} GiB at least"
            )
    enough = []
    if smallest is not None:
        needs = ", ".join(f"{size / GIB:.2f} GiB of {kind}" for kind, size in smallest.memory.items() if size)
        enough.append(f"memory of {needs}" if needs else "")
    if devices is not None:
        enough.append(f"{devices} devices as they are")
    if enough := [text for text in enough if text]:
        lines.append(f"enough would be {' or '.join(enough)}")
    else:
        lines.append("give more devices, or smaller layouts")
    return "; ".join(lines)


def _alone(problem: Problem, option: Option) -> bool:
    if not option.kind:
        return True
    size = problem.capacity.get(option.kind)
    fits = size is None or option.resident + option.transient <= size
    return fits and option.devices <= len(problem.devices[option.kind])
