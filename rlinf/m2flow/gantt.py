"""Time lines as text: a line for each rank, one for all that do the same, and what devices come to. Pure."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence

from rlinf.m2flow.compiler import Compiled
from rlinf.m2flow.graph import Graph
from rlinf.m2flow.idle import device_times
from rlinf.m2flow.plan import ranges
from rlinf.m2flow.timeline import WAITS, Doing, RankId, Span

SIGNS = {
    Doing.ROWS: (".", "waits for rows"),
    Doing.LEASE: (":", "waits for its turn"),
    Doing.WEIGHTS: ("~", "waits for weights"),
    Doing.SYNC: ("=", "moves weights"),
    Doing.ONLOAD: (">", "onload"),
    Doing.OFFLOAD: ("<", "offload"),
}
LINES = 40  # of a chart; beyond, the first of each group


def chart(
    graph: Graph, compiled: Compiled, spans: Mapping[RankId, Sequence[Span]], width: int, unit: str = "s"
) -> list[str]:
    """A Gantt chart no wider than ``width`` characters, but for very narrow terminals, with its legend.

    Args:
        graph: the workflow.
        compiled: its programs.
        spans: of every rank, from 0.
        width: characters of a line.
        unit: of time.
    """
    end = max((span.end for own in spans.values() for span in own), default=0.0)
    if end <= 0:
        return ["nothing takes any time"]
    letters = _letters(sorted({s.name for own in spans.values() for s in own if s.doing is Doing.RUN}))
    rows = _alike(compiled, spans)
    label = max(len(name) for name, _ in rows)
    cells = max(width - label - 3, 10)
    lines = [" " * (label + 2) + _axis(end, cells, unit)]
    lines += [f"{name:<{label}} |{_bar(own, end, cells, letters)}|" for name, own in rows[:LINES]]
    if len(rows) > LINES:
        lines.append(f"and {len(rows) - LINES} more")
    used = {span.doing for own in spans.values() for span in own}
    keys = [f"{letter} {name}" for name, letter in letters.items()]
    keys += [f"{sign} {words}" for doing, (sign, words) in SIGNS.items() if doing in used]
    return lines + _wrapped(keys, width)


def device_lines(graph: Graph, compiled: Compiled, spans: Mapping[RankId, Sequence[Span]]) -> list[str]:
    """For each device, or several that come to the same: how long it stands still, and why."""
    alike: dict[tuple[tuple[str, ...], str], list[int]] = {}
    for time in device_times(graph, compiled, spans):
        whole = time.busy + sum(time.idle.values())
        causes = sorted(time.idle.items(), key=lambda pair: -pair[1])
        why = ", ".join(f"{cause} {seconds / whole:.0%}" for cause, seconds in causes if seconds >= 0.005 * whole)
        text = f"idle {time.idle_share:4.0%}{f'  ({why})' if why else ''}"
        alike.setdefault((time.groups, text), []).append(time.device)
    heads = [f"device{'s' * (len(own) > 1)} {ranges(own)}: {', '.join(groups)}" for (groups, _), own in alike.items()]
    pad = max(map(len, heads), default=0)
    return [f"{head:<{pad}}  {text}" for head, (_, text) in zip(heads, alike, strict=True)]


def seconds(value: float, unit: str = "s") -> str:
    """``12.5 s``, ``0.25 s``, ``64 units``."""
    return f"{value:,.0f} {unit}" if unit != "s" or value >= 100 else f"{value:.3g} {unit}"


def _alike(compiled: Compiled, spans: Mapping[RankId, Sequence[Span]]) -> list[tuple[str, Sequence[Span]]]:
    """Ranks of a group that do the same at the same time, as one line."""
    found: dict[tuple[str, tuple[Span, ...]], list[int]] = {}
    for (group, rank), own in spans.items():
        found.setdefault((group, tuple(own)), []).append(rank)
    rows: list[tuple[str, Sequence[Span]]] = []
    for (group, own), ranks in found.items():
        there = sorted({device for rank in ranks for device in compiled.layout[group].devices_of(rank)})
        where = f" on {ranges(there)}" if there else ""
        rows.append((f"{group} {ranges(ranks)}{where}", own))
    return rows


def _letters(names: Sequence[str]) -> dict[str, str]:
    """A letter for each stage: of its own name where one is free."""
    found: dict[str, str] = {}
    for name in names:
        own = name.rpartition(".")[2] + name
        wanted = [c for c in own.upper() + own.lower() if c in string.ascii_letters]
        free = (c for c in [*wanted, *string.ascii_letters, *string.digits] if c not in found.values())
        found[name] = next(free, "#")
    return found


def _bar(spans: Sequence[Span], end: float, cells: int, letters: Mapping[str, str]) -> str:
    """What takes most of each cell; work comes before waits, so that short stages are seen."""
    share: list[dict[str, float]] = [{} for _ in range(cells)]
    for span in spans:
        sign = letters[span.name] if span.doing is Doing.RUN else SIGNS[span.doing][0]
        weight = 1e-3 if span.doing in WAITS else 1.0
        first, last = span.start / end * cells, span.end / end * cells
        for cell in range(min(int(first), cells - 1), min(int(last), cells - 1) + 1):
            inside = min(last, cell + 1) - max(first, cell)
            if inside > 0:
                share[cell][sign] = share[cell].get(sign, 0.0) + inside * weight
    return "".join(max(cell, key=lambda sign: cell[sign]) if cell else " " for cell in share)


def _axis(end: float, cells: int, unit: str) -> str:
    line = [" "] * cells
    count = max(cells // 16, 1)
    last = seconds(end, unit)
    for i in range(count):
        text = seconds(end * i / count, unit) if i else "0"
        at = round(cells * i / count)
        if at + len(text) < cells - len(last):
            line[at : at + len(text)] = text
    line[cells - len(last) :] = last
    return "".join(line)


def _wrapped(keys: Sequence[str], width: int) -> list[str]:
    lines = [""]
    for key in keys:
        if lines[-1] and len(lines[-1]) + len(key) + 3 > width:
            lines.append("")
        lines[-1] += ("   " if lines[-1] else "") + key
    return lines
