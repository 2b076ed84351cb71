"""The record of a run: the spans of its last executions, and the files that are made of them.

``costs.yaml`` (what stages cost), ``trace.json`` (for ui.perfetto.dev) and ``timeline.html`` (predicted over measured)
are written again and again while the run goes on, so that a run that is cut off has them too. Memory is bounded: the
last `KEPT` executions, or fewer where they come to more than `SPANS` spans. So is time: the files are written again
only when their last writing took less than a fiftieth of the time since. A file that cannot be written is a note.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from rlinf.m2flow.compiler import Compiled
from rlinf.m2flow.costs import fit, save_costs
from rlinf.m2flow.executor import Report
from rlinf.m2flow.graph import TRAIN, Graph
from rlinf.m2flow.page import Shown, Spans, save_page
from rlinf.m2flow.simulate import Costs, simulate
from rlinf.m2flow.timeline import Execution, RankId, Span, ordered
from rlinf.m2flow.trace import save_trace

KEPT = 16  # executions in the trace, and behind the costs
SPANS = 200_000  # in all of them together
SHOWN = 6  # executions on the page
_SHARE = 50  # of the time, at most one part goes into writing


class Record:
    """Give it every execution's reports; it keeps the files up to date.

    Args:
        graph: the workflow.
        compiled: its programs.
        folder: where the files go.
        about: lines that describe the run, the first one as the page's title.
        note: told, once, of what could not be written.
    """

    def __init__(
        self, graph: Graph, compiled: Compiled, folder: Path, about: Sequence[str], note: Callable[[str], None]
    ) -> None:
        self.graph, self.compiled, self.folder, self.about, self.note = graph, compiled, folder, about, note
        self.executions: deque[Execution] = deque()
        self._ran: deque[Compiled] = deque()  # the programs of each
        self._shown: dict[tuple[str, int], Shown] = {}  # what was expected of an execution does not change later
        self._spans = 0
        self._told = False
        self._new = False
        self._written, self._took = 0.0, 0.0  # when, and how long

    @property
    def page(self) -> Path:
        return self.folder / "timeline.html"

    def add(self, phase: str, step: int, reports: Iterable[Report]) -> None:
        """An execution is over.

        Args:
            phase: of which.
            step: training iterations that are done.
            reports: of all ranks.
        """
        execution = Execution(phase, step, {(report.group, report.rank): ordered(report.spans) for report in reports})
        self.executions.append(execution)
        self._ran.append(self.compiled)
        self._spans += _count(execution)
        while len(self.executions) > KEPT or (self._spans > SPANS and len(self.executions) > 2):
            self._spans -= _count(self.executions.popleft())
            self._ran.popleft()
        self._new = True
        if time.monotonic() - self._written >= _SHARE * self._took:
            self.write()

    def adopt(self, compiled: Compiled, about: Sequence[str]) -> None:
        """Executions that are added from now on ran these programs, on the same ranks.

        Args:
            compiled: the programs.
            about: lines for those that describe the run.
        """
        self.compiled, self.about, self._new = compiled, [*self.about, *about], True

    def write(self) -> None:
        """Write all files, unless nothing has come since. Never raises."""
        if not self._new:
            return
        start = time.monotonic()
        try:
            shown = self._predict()
            save_costs(fit(self.graph, self.compiled, self.executions), self.folder / "costs.yaml")
            save_trace(self.graph, self.compiled, self.executions, self.folder / "trace.json")
            save_page(self.graph, self.compiled, shown, self.about, self.page)
            self._new = False
        except Exception as error:  # whatever it is, training is worth more than its picture
            if not self._told:
                self._told = True
                where = self.folder if isinstance(error, OSError) else f"{self.folder} ({type(error).__name__})"
                self.note(f"the time line could not be written to {where}: {error}; the run goes on without it")
        self._written = time.monotonic()
        self._took = self._written - start

    def _predict(self) -> list[Shown]:
        """The last executions, each with what the earlier ones made one expect of it."""
        last, ran = list(self.executions), list(self._ran)
        found = {}
        for i, execution in list(enumerate(last))[-SHOWN:]:
            key = (execution.phase, execution.step)
            if key not in self._shown:
                earlier = [other for other in last[:i] if other.phase == execution.phase]
                self._shown[key] = self._expected(execution, ran[i], earlier)
            beside = last[max(i - self.compiled.staleness, 0) : i] + last[i + 1 : i + 1 + self.compiled.staleness]
            known = self._shown[key]
            found[key] = replace(known, around=(merge(beside), known.around[1]))
        self._shown = found
        return list(found.values())

    def _expected(self, execution: Execution, ran: Compiled, earlier: Sequence[Execution]) -> Shown:
        """What was measured under another plan counts too: a stage costs what it costs."""
        if not earlier:
            return Shown(execution, None, "No prediction: nothing was measured before it.", compiled=ran)
        times = f"the {len(earlier)} before it" if len(earlier) > 1 else "the one before it"
        costs = fit(self.graph, self.compiled, earlier)
        spans, around = expect(self.graph, ran, execution.phase, costs)
        return Shown(execution, replace(execution, spans=spans), f"Predicted from {times}.", ({}, around), ran)


def expect(graph: Graph, compiled: Compiled, phase: str, costs: Costs) -> tuple[Spans, Spans]:
    """Spans of one execution as it will be when the run is under way, and those of others around it. Pure.

    Where staleness lets several be under way at once, that is not the first: one is taken that has others before and
    behind it. What ranks do in an execution does not depend on later ones, so that it is what comes to their time
    lines when there is one more.
    """
    ahead = compiled.staleness if phase == TRAIN else 0
    until = [simulate(graph, compiled, phase, costs, iterations=n) for n in range(2 * ahead, 2 * ahead + 2) if n]
    if not ahead:
        return until[0], {}
    before, with_it = until
    every = simulate(graph, compiled, phase, costs, iterations=3 * ahead + 1)
    own = {rank: spans[len(before[rank]) :] for rank, spans in with_it.items()}
    return own, {rank: before[rank] + spans[len(with_it[rank]) :] for rank, spans in every.items()}


def merge(executions: Iterable[Execution]) -> Spans:
    """All spans of several executions."""
    found: dict[RankId, list[Span]] = {}
    for execution in executions:
        for rank, spans in execution.spans.items():
            found.setdefault(rank, []).extend(spans)
    return found


def _count(execution: Execution) -> int:
    return sum(map(len, execution.spans.values()))
