"""The page of a run: one HTML file without network, with time lines of its last executions, predicted over measured.

This module makes the data that the page shows; how it looks stands in `rlinf.m2flow.page_html`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlinf.m2flow.compiler import Compiled
from rlinf.m2flow.graph import Graph
from rlinf.m2flow.idle import Waits, device_times
from rlinf.m2flow.page_html import HTML
from rlinf.m2flow.timeline import WAITS, Execution, RankId, Span, within

Spans = Mapping[RankId, Sequence[Span]]
RANKS = 256  # that a page shows: beyond, the first of each group


@dataclass(frozen=True)
class Shown:
    """An execution on the page.

    Attributes:
        measured: what was done.
        predicted: what was expected, as if it were measured; ``None``: nothing was known to expect it from.
        why: where the prediction comes from, or why there is none.
        around: spans of other executions, with which these were under way: measured, and predicted.
        compiled: its programs, where they are not those of the page.
    """

    measured: Execution
    predicted: Execution | None
    why: str
    around: tuple[Spans, Spans] = field(default=({}, {}))
    compiled: Compiled | None = None


def save_page(graph: Graph, compiled: Compiled, shown: Sequence[Shown], about: Sequence[str], path: Path) -> None:
    """Write the page; a reader sees the old file or the whole new one.

    Args:
        graph: the workflow.
        compiled: its programs.
        shown: the executions to choose from; the last training iteration is shown first.
        about: lines that describe the run, the first one as its title.
        path: the file.
    """
    text = json.dumps(page_data(graph, compiled, shown, about), separators=(",", ":")).replace("<", "\\u003c")
    aside = path.with_name(f".{path.name}.new")
    try:
        aside.write_text(HTML.replace("@DATA@", text))
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def page_data(graph: Graph, compiled: Compiled, shown: Sequence[Shown], about: Sequence[str]) -> dict[str, Any]:
    """What the page shows, as plain data.

    A span is ``[rank, kind, what, start, end, rows]``: positions in the lists ``ranks``, ``kinds`` and ``names``, then
    seconds from the start of its execution. ``what`` of a wait is what was waited for.
    """
    ranks = [(group, rank) for group, stage in compiled.layout.items() for rank in range(stage.ranks)]
    most = max(RANKS // max(len(compiled.layout), 1), 1)
    left_out = len(ranks)
    if len(ranks) > RANKS:
        ranks = [(group, rank) for group, rank in ranks if rank < most]
    left_out -= len(ranks)
    table = _Table({rank: i for i, rank in enumerate(ranks)})
    executions = []
    for each in shown:
        sides, ran = zip((each.measured, each.predicted), each.around, strict=True), each.compiled or compiled
        measured, predicted = (side and _side(graph, ran, table, side, around) for side, around in sides)
        label, origin = each.measured.label, each.measured.start
        executions.append(
            {
                "label": label,
                "phase": each.measured.phase,
                "at": origin,
                "why": each.why,
                "measured": measured,
                "predicted": predicted,
            }
        )
    return {
        "about": list(about),
        "ranks": [
            {"group": group, "rank": rank, "devices": list(compiled.layout[group].devices_of(rank))}
            for group, rank in ranks
        ],
        "left_out": left_out,
        "kinds": table.kinds,
        "waits": [kind in {wait.value for wait in WAITS} for kind in table.kinds],
        "names": table.names,
        "stages": [node.name for node in graph.nodes],
        "executions": executions,
    }


class _Table:
    """Texts by number."""

    def __init__(self, ranks: Mapping[RankId, int]) -> None:
        self.ranks = ranks
        self.kinds: list[str] = []
        self.names: list[str] = []
        self._number: dict[tuple[int, str], int] = {}

    def __call__(self, into: list[str], text: str) -> int:
        key = (id(into), text)
        if key not in self._number:
            self._number[key] = len(into)
            into.append(text)
        return self._number[key]


def _side(graph: Graph, compiled: Compiled, table: _Table, execution: Execution, around: Spans) -> dict[str, Any]:
    start, end = execution.start, execution.end
    others = {rank: within(spans, start, end) for rank, spans in around.items()}

    def listed(of: Spans) -> list[list[float]]:
        waits, rows = Waits(graph, of), []
        for rank, number in table.ranks.items():
            for span in of.get(rank, ()):
                what = waits.cause(rank[0], span) if span.doing in WAITS else span.name
                place = [number, table(table.kinds, span.doing.value), table(table.names, what)]
                rows.append([*place, round(span.start - start, 6), round(span.end - start, 6), span.rows])
        return rows

    return {
        "seconds": round(end - start, 6),
        "spans": listed(execution.spans),
        "around": listed(others),
        "devices": [
            {
                "device": time.device,
                "groups": list(time.groups),
                "busy": round(time.busy, 6),
                "idle": {cause: round(seconds, 6) for cause, seconds in time.idle.items()},
            }
            for time in device_times(graph, compiled, execution.spans, others)
        ],
    }
