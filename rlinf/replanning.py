"""A run that looks whether stages take what its plan was made for, and plans again when they do not.

The runner tells it of every training iteration. When something has drifted, it looks for a better plan among those that
the running workers can take over, and has the runner change to it at the next moment when nothing is under way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rlinf.config import PlanConfig
from rlinf.errors import RlinfError
from rlinf.fleet import Fleet
from rlinf.m2flow.executor import Report
from rlinf.m2flow.plan import Plan, describe, save_plan
from rlinf.m2flow.record import Record
from rlinf.m2flow.timeline import ordered
from rlinf.scheduler.drift import Drift
from rlinf.scheduler.neighbours import neighbours
from rlinf.scheduler.replan import Decision, Planned, replan

SWITCHING_S = 1.0  # that a change of plans is thought to take before one was measured
LOOKING = 0.05  # of the time that the run has left; looking for a better plan may take no more


class Replanning:
    """Of one run.

    Args:
        planned: the plan that runs, and what is needed to plan again; ``None``: nothing is ever planned again, as no
            time was expected.
        cfg: whether to, and from which drift on.
        fleet: that runs the plan.
        record: of the run.
        folder: where plans are written.
        note: shows a person some lines.

    Attributes:
        pending: a decision to change, which waits for the moment when nothing is under way.
        changes: how often the plan was changed.
    """

    def __init__(
        self,
        planned: Planned | None,
        cfg: PlanConfig,
        fleet: Fleet,
        record: Record,
        folder: Path,
        note: Callable[[str], None],
    ) -> None:
        self.planned = planned if cfg.replan else None
        self.cfg, self.fleet, self.record, self.folder, self.note = cfg, fleet, record, folder, note
        self.pending: Decision | None = None
        self.changes = 0
        self._switching_s = SWITCHING_S
        self._drift = Drift(self.planned.judged.spans, cfg.drift) if self.planned else None

    @property
    def values(self) -> dict[str, float]:
        """Metrics of the plan: seconds of an iteration that are expected, and how often it was changed."""
        if self.planned is None:
            return {}
        return {"plan/expected_s": self.planned.judged.seconds, "plan/changes": float(self.changes)}

    def iteration(self, reports: Sequence[Report], seconds: float, left: int) -> None:
        """A training iteration is over.

        Args:
            reports: of all ranks.
            seconds: that it took.
            left: iterations that are still to come.
        """
        if self._drift is None or self.pending is not None or not left:
            return
        self._drift.add({(report.group, report.rank): ordered(report.spans) for report in reports}, seconds)
        if drifted := self._drift.found():
            why = "; ".join(map(str, drifted))
            try:
                decision = self._replan({one.name: one.ratio for one in drifted}, left, LOOKING * left * seconds)
            except RlinfError as error:  # of a plan that runs there is no reason to be; the run goes on in any case
                self.planned = self._drift = None
                self.note(f"{why}: the run cannot be planned again ({error}); its plan stays")
                return
            self.note(f"{why}: {decision.reason}")
            if decision.plan is None:
                self._expect(decision)
            else:
                self.pending = decision

    def _replan(self, ratios: dict[str, float], left: int, limit_s: float) -> Decision:
        planned = self.planned
        assert planned is not None
        graph, compiled = self.fleet.graph, self.fleet.compiled
        others = neighbours(graph, planned.plan, planned.granularities, planned.swaps, planned.devices)
        return replan(
            graph,
            planned.plan,
            planned.model,
            ratios,
            _for(limit_s, (other for other in others if self.fleet.takes(other))),
            planned.capacity,
            compiled.staleness,
            self._switching_s,
            left,
            compiled.in_flight,
        )

    def _expect(self, decision: Decision) -> None:
        """From now on drift is from what is known now."""
        assert self.planned is not None
        judged = decision.judged
        self.planned = replace(self.planned, plan=judged.plan, model=decision.model, judged=judged)
        self._drift = Drift(judged.spans, self.cfg.drift)

    def change(self, step: int) -> None:
        """Take the pending plan over; nothing is under way.

        Args:
            step: iterations that are done.
        """
        assert self.pending is not None
        decision, self.pending = self.pending, None
        start = time.monotonic()
        self.fleet.adopt(decision.judged.compiled)
        self._switching_s = time.monotonic() - start
        self.changes += 1
        path = self.folder / "plan.yaml"
        path.replace(self.folder / f"plan-until-step-{step}.yaml")
        save_plan(decision.judged.plan, path)
        lines = [f"plan from step {step + 1} on ({decision.reason}):", *describe(decision.judged.plan, 1)]
        self.record.adopt(decision.judged.compiled, lines)
        self.note("\n".join(lines))
        self._expect(decision)


def _for(limit_s: float, plans: Iterable[Plan]) -> Iterator[Plan]:
    """Plans, until so many seconds have gone by; one at least."""
    end = time.monotonic() + limit_s
    for plan in plans:
        yield plan
        if time.monotonic() > end:
            return
