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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlinf.errors import PlacementError
from rlinf.failure import RunFailed
from rlinf.m2flow.compiler import compile_plan
from rlinf.m2flow.plan import Plan, Stage, stages
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
_SHARES = {TOGETHER: 0.6, APART: 0.9, ALONE: 1.0}  # of the budget, at whose end each is over, where others follow


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

    folder = Path(tempfile.mkdtemp(prefix="rlinf-profile-"))
    failed = False
    try:
        cluster = Cluster.connect(ready.cfg.cluster, show)
        try:
            return _Profiler(ready, cluster, folder, budget_s, show).run()
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
    """A plan to measure.

    Attributes:
        name: for people.
        plan: on the devices of one kind.
        devices: how many it uses.
        share: of the budget, at whose end it must be over.
    """

    name: str
    plan: Plan
    devices: int
    share: float


class _Profiler:
    def __init__(self, ready: Ready, cluster: Cluster, folder: Path, budget_s: float, show: Show) -> None:
        from rlinf.scheduler.bench import Budget

        self.ready, self.cluster, self.folder, self.show = ready, cluster, folder, show
        self.budget = Budget(budget_s)
        self.readings = Readings(ready.graph)
        self.places, self.kinds = kinds_of(cluster.devices)
        self.kind_of = {device: kind for kind, own in self.places.items() for device in own}

    def run(self) -> Profile:
        found = ", ".join(f"{len(own)} x {kind}" for kind, own in self.places.items())
        self.show(f"profiling {self.ready.identity.workflow} on {found}, in {self.budget.seconds:.0f} s if it can be")
        for number, kind in enumerate(self.places):
            last = number == len(self.places) - 1
            likely = 0.0
            for trial in self._trials(kind, last):
                if likely and not self.budget.allows(
                    needs := likely * len(self.places[kind]) / trial.devices, trial.share
                ):
                    text = f"{trial.name} on {kind}: it would take {needs:.0f} s or more"
                    self.readings.left_out.append(text)
                    continue
                likely = self._measure(trial)
        for text in self.readings.left_out:
            self.show(f"left out, as there was no time: {text}")
        took = f"{self.budget.spent:.0f} s"
        note = f"taken in {took} on {time.strftime('%Y-%m-%d %H:%M')}, {found}, host CPU {processor()}"
        if self.readings.left_out:
            note += "; without " + "; ".join(self.readings.left_out)
        return self.readings.profile(identity_of(self.ready), self.kinds, note)

    def _trials(self, kind: str, last: bool) -> Iterator[Trial]:
        """Plans to measure on the devices of a kind, the one that is needed first."""
        devices = self.places[kind]
        names = (TOGETHER, *((APART,) if len(devices) > 1 else ()), *((ALONE,) if len(devices) > 2 else ()))
        for name in names:
            try:
                plan = self._plan(name, len(devices))
            except PlacementError as error:
                if name == TOGETHER:
                    raise
                self.readings.left_out.append(f"{name} on {kind}: {error}")
                continue
            used = max((len(stage.devices) for stage in stages(plan)), default=0)
            yield Trial(name, onto(plan, devices), max(used, 1), 1.0 if name == names[-1] and last else _SHARES[name])

    def _plan(self, name: str, devices: int) -> Plan:
        """
        Raises:
            PlacementError: there is none.
        """
        ready = self.ready
        memory = [device.memory for device in self.cluster.devices][:devices]
        wanted = replace(ready.cfg.plan, kind="collocated", file=None, granularity=0)
        if name == APART:
            wanted = replace(wanted, kind="disaggregated")
        if name == ALONE:
            widths = [spec.tp * max(spec.dp, 1) for spec in ready.graph.workers.values() if spec.cls.uses_device]
            memory = memory[: max(widths, default=1)]
        return choose(ready.graph, wanted, ready.needs, memory)

    def _measure(self, trial: Trial) -> float:
        """Returns the seconds that the least of it took: start, and two iterations."""
        from rlinf.scheduler.bench import Bench

        began = self.budget.spent
        with self._fleet(trial) as (fleet, sizes):
            self.show(f"{trial.name}: workers are up after {self.budget.spent - began:.1f} s")
            bench = Bench(trial.name, fleet, sizes, self.kind_of, self.readings, self.budget, trial.share, self.show)
            bench.iterate()
            least = self.budget.spent - began
            bench.sources()
            bench.memory()
            if trial.name == APART:
                bench.beside()
            bench.fewer_rows()
            if not self.readings.transfers:
                bench.pings()
            bench.switches()
        return least

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
