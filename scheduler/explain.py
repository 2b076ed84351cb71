"""Why a plan was chosen: its time line, the best of each family with the reason that it lost, and what would change it.

Pure: lines of text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlinf.m2flow.gantt import chart, device_lines, seconds
from rlinf.m2flow.idle import OVER, TURN
from rlinf.m2flow.plan import describe, stages
from rlinf.scheduler.auto import Found, Ground
from rlinf.scheduler.judge import Judged
from rlinf.scheduler.sensitivity import flips

GIB = 2**30
_PART = 0.02  # of an iteration; smaller differences are no reason


@dataclass(frozen=True)
class Look:
    """How to write it.

    Attributes:
        width: characters of a line.
        unit: of time; ``s`` where it was measured.
    """

    width: int = 100
    unit: str = "s"


def explained(found: Found, ground: Ground, look: Look, asked: Judged | None = None) -> Iterator[str]:
    """The chosen plan, the others, and what would change the choice.

    Args:
        found: what came of looking for it.
        ground: what it is for.
        look: how to write it.
        asked: another plan, which somebody wants to see beside it.
    """
    best = found.best
    yield "THE PLAN"
    yield from (f"  {line}" for line in describe(best.plan))
    yield f"  expected: {_expected(best, ground, look)}"
    yield ""
    yield "ITS TIME LINE, an iteration"
    yield from chart(ground.graph, best.compiled, best.spans, look.width, look.unit)
    yield from device_lines(ground.graph, best.compiled, best.spans)
    yield ""
    yield f"THE BEST OF EACH FAMILY, of {len(found.judged)} plans that were simulated"
    yield from _families(found, look)
    if asked is not None:
        yield ""
        yield f"THE PLAN THAT WAS ASKED FOR ({asked.family})"
        yield from (f"  {line}" for line in describe(asked.plan))
        yield f"  {_against(asked, best, look)}"
        for text in reasons(asked, best, look):
            yield f"    {text}"
    yield ""
    yield "WHAT WOULD CHANGE THE CHOICE"
    lines = [f"  {flip}" for flip in flips(found, ground)]
    yield from lines or ["  nothing that was tried: stages, batch or lengths up to 8 times as large or small"]


def _expected(one: Judged, ground: Ground, look: Look) -> str:
    unsure = uncertainty(one, ground)
    memory = _memory(one.memory)
    return (
        f"{seconds(one.seconds, look.unit)} an iteration"
        + (f" (± {unsure:.0%})" if unsure >= 0.005 else "")
        + f", devices idle {one.idle_share:.0%}"
        + (f", at most {memory} on a device" if memory else "")
    )


def uncertainty(one: Judged, ground: Ground) -> float:
    """Of an iteration's seconds, in parts of them: that of its stages, by the time that they take."""
    total = sum(one.stages.values())
    found = 0.0
    for node in ground.graph.phase("train"):
        if node.name in one.stages and node.name in ground.profile.stages:
            layout = one.compiled.layout[node.worker]
            kind = ground.kind_of[layout.devices[0]] if layout.devices else ""
            time = ground.model.stage(node.name, kind, layout.dp, layout.tp)
            rows = max(ground.model.share(node, layout.dp), 1)
            found += one.stages[node.name] * time.uncertainty(rows)
    return found / total if total else 0.0


def _families(found: Found, look: Look) -> Iterator[str]:
    for name, one in found.families.items():
        if isinstance(one, str):
            yield f"  {name}: none. {one}"
        elif one is found.best or one.plan == found.best.plan:
            yield f"  {name}: the plan above, {seconds(one.seconds, look.unit)}"
        else:
            yield f"  {name}: {_against(one, found.best, look)}"
            yield from (f"      {line}" for line in describe(one.plan))
            yield from (f"    {text}" for text in reasons(one, found.best, look))


def _against(one: Judged, best: Judged, look: Look) -> str:
    memory = _memory(one.memory)
    return (
        f"{seconds(one.seconds, look.unit)}, {one.seconds / best.seconds - 1:+.0%}, devices idle {one.idle_share:.0%}"
        + (f", at most {memory} on a device" if memory else "")
    )


def reasons(one: Judged, best: Judged, look: Look | None = None) -> list[str]:
    """What a plan loses against another one, and what it gains, the largest first."""
    look = look or Look()
    whole = best.seconds
    found: list[tuple[float, str]] = []
    for name in {**best.stages, **one.stages}:
        mine, other = one.stages.get(name, 0.0), best.stages.get(name, 0.0)
        if abs(mine - other) > _PART * whole:
            where = f"on {_where(one, name)}, instead of {seconds(other, look.unit)} on {_where(best, name)}"
            found.append((mine - other, f"{name} takes {seconds(mine, look.unit)} {where}"))
    here, there = _idle(one), _idle(best)
    for cause in {**here, **there}:
        more = here.get(cause, 0.0) - there.get(cause, 0.0)
        if abs(more) > _PART * whole:
            word = "longer" if more > 0 else "less"
            found.append((more, f"its devices wait {seconds(abs(more), look.unit)} {word} for {_cause(cause)}"))
    found.sort(key=lambda pair: -pair[0])
    lost = [f"- {text}" for more, text in found if more > 0]
    won = [f"+ {text}" for more, text in reversed(found) if more < 0]
    return [*lost, *won] or ["- it takes as long, and is less simple"]


def _where(one: Judged, stage: str) -> str:
    layout = one.compiled.layout[stage.partition(".")[0]]
    if not layout.devices:
        return "no device"
    tp = f" (tp={layout.tp})" if layout.tp > 1 else ""
    return f"{len(layout.devices)} device{'s' * (len(layout.devices) > 1)}{tp}"


def _idle(one: Judged) -> dict[str, float]:
    """Cause -> seconds that a device waits for it, on average."""
    found: dict[str, float] = {}
    for time in one.times:
        for cause, took in time.idle.items():
            found[cause] = found.get(cause, 0.0) + took / len(one.times)
    return found


def _cause(cause: str) -> str:
    return {OVER: "the others to end", TURN: "their turn"}.get(cause, cause)


def _memory(memory: Mapping[int, int]) -> str:
    most = max(memory.values(), default=0)
    return f"{most / GIB:.2f} GiB" if most else ""


def devices_used(one: Judged) -> Sequence[int]:
    """Devices of a plan, ascending."""
    return sorted({device for stage in stages(one.plan) for device in stage.devices})
