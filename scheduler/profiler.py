"""The profiler: runs the stages of a workflow on real workers, with real data, and says what they take.

It starts workers of its own and ends them; what they trained is thrown away. First every group is on all devices, one
after the other, in whole iterations and then stage by stage with fewer rows. As far as there is time, groups are then
put apart, to measure them in smaller layouts and beside one another, and on as few devices as they can be. What there
was no time for is named.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from rlinf.errors import PlacementError
from rlinf.failure import RunFailed
from rlinf.m2flow.compiler import compile_plan
from rlinf.m2flow.plan import Plan, Stage, stages
from rlinf.scheduler.bench import Bench, Budget
from rlinf.scheduler.identity import identity_of, kinds_of, processor
from rlinf.scheduler.profile import Profile
from rlinf.scheduler.readings import Readings
from rlinf.scheduler.shipped import choose

if TYPE_CHECKING:
    from rlinf.cluster import Cluster
    from rlinf.fleet import Fleet, Glimpse
    from rlinf.preflight import Ready

Show = Callable[[str], None]
TOGETHER, APART, ALONE = "together", "apart", "on few devices"


def profile(ready: Ready, budget_s: float = 120.0, show: Show = print) -> Profile:
    """Measure the stages of a workflow on the devices of its cluster.

    Where a Ray session is there already it is used, and left; nobody may hold its devices. Each stage is measured once
    in whole iterations, whatever that takes.

    Args:
        ready: the run that it is for. Nothing is written to its folder.
        budget_s: how long it may take, the start of workers included.
        show: tells a person how far it is.

    Raises:
        RunFailed: a stage failed, or a worker; every process of the profiler has ended, and the logs are shown where
            they lie.
        RlinfError: something is wrong that its message tells how to mend.
    """
    from rlinf.cluster import Cluster

    budget = Budget(budget_s)
    folder = Path(tempfile.mkdtemp(prefix="rlinf-profile-"))
    failed = False
    try:
        cluster = Cluster.connect(ready.cfg.cluster, show)
        try:
            return _Profiler(ready, cluster, folder, budget, show).run()
        finally:
            cluster.close()
    except RunFailed:
        failed = True
        show(f"it failed while it was profiled; the logs of all workers: {folder / 'logs'}")
        raise
    finally:
        if not failed:
            shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class Trial:
    """A plan to measure on the devices of one kind."""

    name: str
    kind: str
    plan: Plan

    @property
    def ranks(self) -> int:
        return sum(stage.ranks for stage in stages(self.plan))


class _Profiler:
    def __init__(self, ready: Ready, cluster: Cluster, folder: Path, budget: Budget, show: Show) -> None:
        self.ready, self.cluster, self.folder, self.budget, self.show = ready, cluster, folder, budget, show
        self.readings = Readings(ready.graph)
        self.places, self.kinds = kinds_of(cluster.devices)
        self.kind_of = {device: kind for kind, own in self.places.items() for device in own}

    def run(self) -> Profile:
        found = ", ".join(f"{len(own)} x {kind}" for kind, own in self.places.items())
        self.show(f"profiling {self.ready.identity.workflow} on {found}, in {self.budget.seconds:.0f} s if it can be")
        trials = [trial for kind in self.places for trial in self._trials(kind)]
        needs = 0.0
        for trial, following in zip_longest(trials, trials[1:]):
            if trial.name != TOGETHER and needs > self.budget.left:
                self.readings.left_out.append(f"groups {trial.name} on {trial.kind}, which needs {needs:.0f} s or more")
                continue
            needs = self._measure(trial, following)
        for text in self.readings.left_out:
            self.show(f"left out, as there was no time: {text}")
        note = f"taken in {self.budget.spent:.0f} s on {time.strftime('%Y-%m-%d %H:%M')}; {found}, CPU {processor()}"
        return self.readings.profile(identity_of(self.ready), self.kinds, note)

    def _trials(self, kind: str) -> list[Trial]:
        """Plans to measure on the devices of a kind, the one that is needed first.

        Raises:
            PlacementError: the workflow cannot run on these devices.
        """
        devices, found = self.places[kind], []
        for name in (TOGETHER, *((APART,) if len(devices) > 1 else ()), *((ALONE,) if len(devices) > 2 else ())):
            try:
                found.append(Trial(name, kind, onto(self._plan(name, devices), devices)))
            except PlacementError as error:
                if name == TOGETHER:
                    raise
                self.show(f"groups {name} on {kind} cannot be measured: {error}")
        return found

    def _plan(self, name: str, devices: Sequence[int]) -> Plan:
        """
        Raises:
            PlacementError: there is none.
        """
        graph = self.ready.graph
        memory = [self.cluster.devices[device].memory for device in devices]
        if name == ALONE:
            widths = [spec.tp * max(spec.dp, 1) for spec in graph.workers.values() if spec.cls.uses_device]
            memory = memory[: max(widths, default=1)]
        kind = "disaggregated" if name == APART else "collocated"
        return choose(
            graph, replace(self.ready.cfg.plan, kind=kind, file=None, granularity=0), self.ready.needs, memory
        )

    def _measure(self, trial: Trial, following: Trial | None) -> float:
        """Returns the seconds that the following trial needs at least, or so."""
        began = self.budget.spent
        needs = 0.0
        with self._fleet(trial) as (fleet, sizes):
            started = self.budget.spent - began
            self.show(f"{trial.name}: workers are up after {started:.1f} s")
            bench = Bench(trial.name, fleet, sizes, self.kind_of, self.readings, self.budget, self.show)
            bench.iterate()
            if following is not None:
                needs = (started + bench.first_s) * following.ranks / trial.ranks + bench.whole_s
                bench.reserve = needs if needs < self.budget.left else 0.0
            if trial.name == APART:
                bench.beside()
            bench.fewer_rows()
            bench.again()
            if not self.readings.transfers:
                bench.pings()
            bench.switches()
        return needs

    @contextmanager
    def _fleet(self, trial: Trial) -> Iterator[tuple[Fleet, dict[str, list[int]]]]:
        from rlinf.cluster import Cluster
        from rlinf.deadline import Deadline
        from rlinf.fleet import Fleet
        from rlinf.watchdog import Watchdog

        cfg, whole = self.ready.cfg, self.cluster
        mine = Cluster(whole.cfg, whole.nodes, whole.devices, connected=False)  # its end is not that of the session
        fleet = Fleet(mine, self.ready.graph, compile_plan(self.ready.graph, trial.plan), self._watch)
        fleet.watchdog = Watchdog(cfg.cluster.stall_s, cfg.cluster.stall_end_s, self.folder, self.show)
        try:
            mine.hold()
            if whole.reaper is not None:
                whole.reaper.remember()
            fleet.limit = Deadline.of(f"workers to profile, {trial.name}", cfg.cluster.start_timeout_s)
            fleet.launch(cfg.seed, cfg.deterministic, self.folder)
            sizes = fleet.setup()
            fleet.limit = None
            yield fleet, sizes
        finally:
            fleet.close()

    def _watch(self, glimpse: Glimpse) -> None:
        for note in glimpse.notes:
            self.show(f"{glimpse.group}: {note}")


def onto(plan: Plan, devices: tuple[int, ...]) -> Plan:
    """A plan for devices that are numbered from 0, on these instead."""
    if isinstance(plan, Stage):
        return replace(plan, devices=tuple(devices[i] for i in plan.devices))
    return replace(plan, parts=tuple(onto(part, devices) for part in plan.parts))
