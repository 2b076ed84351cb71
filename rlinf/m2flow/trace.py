"""The record of executions in Chrome's trace format, for ui.perfetto.dev and chrome://tracing. Pure but for the file.

A process for each group, a thread for each rank; what a rank does is an event, its kind the category. One more process
shows the executions, in as many threads as there are under way at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rlinf.m2flow.compiler import Compiled
from rlinf.m2flow.graph import Graph
from rlinf.m2flow.idle import Waits
from rlinf.m2flow.timeline import WAITS, Doing, Execution, Span

_CATEGORY = dict.fromkeys(WAITS, "wait")  # others: the kind's own name


def events(graph: Graph, compiled: Compiled, executions: Iterable[Execution]) -> Iterator[dict[str, Any]]:
    """Events in the order of processes and threads; microseconds from the first span of the first execution."""
    zero = min((execution.start for execution in executions), default=0.0)
    executions = list(executions)
    known = [Waits(graph, execution.spans) for execution in executions]
    yield from _process(0, "executions")
    lanes = compiled.staleness + 1
    for lane in range(lanes):
        yield _meta("thread_name", 0, lane, "" if lanes == 1 else f"{lane + 1} of {lanes} under way")
    for lane in range(lanes):
        ended = 0.0
        for execution in executions[lane::lanes]:
            start, end = max((execution.start - zero) * 1e6, ended), (execution.end - zero) * 1e6
            ended = max(start, end)
            yield _complete(0, lane, execution.phase, execution.label, start, ended, {"step": execution.step})
    for pid, (group, stage) in enumerate(compiled.layout.items(), start=1):
        yield from _process(pid, group)
        for rank in range(stage.ranks):
            there = ", ".join(map(str, stage.devices_of(rank)))
            yield _meta("thread_name", pid, rank, f"rank {rank}" + (f" (device {there})" if there else ""))
            yield _meta("thread_sort_index", pid, rank, rank)
            nest = _Nest()
            for execution, waits in zip(executions, known, strict=True):
                for span in execution.spans.get((group, rank), ()):
                    start, end = nest.place((span.start - zero) * 1e6, (span.end - zero) * 1e6)
                    args: dict[str, Any] = {"step": execution.step} | ({"rows": span.rows} if span.rows else {})
                    category = _CATEGORY.get(span.doing, span.doing.value)
                    yield _complete(pid, rank, category, _shown(waits, group, span), start, end, args)


def save_trace(graph: Graph, compiled: Compiled, executions: Iterable[Execution], path: Path) -> None:
    """Write the trace, event by event; a reader sees the old file or the whole new one."""
    aside = path.with_name(f".{path.name}.new")
    try:
        with aside.open("w") as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
            for i, event in enumerate(events(graph, compiled, executions)):
                file.write((",\n" if i else "") + json.dumps(event))
            file.write("\n]}\n")
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


class _Nest:
    """Keeps a thread's events apart or nested, as the format asks, even where a clock was set back."""

    def __init__(self) -> None:
        self._open: list[float] = []  # ends of the events around, the outermost first
        self._begun = 0.0

    def place(self, start: float, end: float) -> tuple[float, float]:
        start = self._begun = max(start, self._begun)
        while self._open and self._open[-1] <= start:
            self._open.pop()
        end = max(start, min([end, *self._open]))
        self._open.append(end)
        return start, end


def _shown(waits: Waits, group: str, span: Span) -> str:
    if span.doing in WAITS:
        return f"wait: {waits.cause(group, span)}"
    return span.doing.value if span.doing in (Doing.ONLOAD, Doing.OFFLOAD) else span.name


def _process(pid: int, name: str) -> Iterator[dict[str, Any]]:
    yield _meta("process_name", pid, 0, name)
    yield _meta("process_sort_index", pid, 0, pid)


def _meta(what: str, pid: int, tid: int, value: str | int) -> dict[str, Any]:
    key = "sort_index" if what.endswith("sort_index") else "name"
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {key: value}}


def _complete(
    pid: int, tid: int, category: str, name: str, start: float, end: float, args: dict[str, Any]
) -> dict[str, Any]:
    ts = round(start, 3)
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": pid,
        "tid": tid,
        "ts": ts,
        "dur": round(max(round(end, 3) - ts, 0.0), 3),
        "args": args,
    }
