"""The fleet: all worker groups of a run on their devices. The driver's only handle on them.

It starts them in named stages, tells them to run a phase of their programs, and watches. No row passes through it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rlinf.cluster import Cluster, Device
from rlinf.deadline import Deadline
from rlinf.errors import NeedsNewWorld, PlacementError
from rlinf.group import WorkerGroup, gather, quiet
from rlinf.m2flow.compiler import Compiled
from rlinf.m2flow.executor import Report, Turn
from rlinf.m2flow.graph import HOST, Graph
from rlinf.m2flow.host import Host
from rlinf.m2flow.plan import Plan, Stage, ranges, stages
from rlinf.m2flow.timeline import Doing
from rlinf.watchdog import RayRanks, Seat, Watchdog
from rlinf.wire import Services
from rlinf.worker import RankContext, Worker

TEARDOWN_S = 3.0
Calls = dict[Any, tuple[WorkerGroup, int]]  # Ray reference -> who was called


@dataclass(frozen=True)
class Glimpse:
    """What the first rank of a group does now."""

    group: str
    doing: str
    done: float
    total: float
    notes: list[str]


class Worlds(Protocol):
    """Who can give a group other ranks, or other GPUs: what `Fleet.adopt` cannot do with those that run."""

    def new_world(self, fleet: Fleet, compiled: Compiled) -> None:
        """Have the fleet run these programs, in their layouts, with the state that its groups have now.

        Called between iterations, nothing under way. On return ``fleet.groups`` are the new ranks, connected to one
        another and to the leases, and ``fleet.compiled`` is what was given; where it raises, all is as it was.
        """
        ...


@dataclass
class Fleet:
    """Make it by `launch`; end it by `close`, whatever happened.

    Attributes:
        watch: called with a `Glimpse` of each group while the driver waits.
        limit: until when the calls that are made now must be answered.
        watchdog: looks whether anything moves while the driver waits.
        worlds: takes over where a plan needs other ranks than those that run; ``None``: such a plan is refused.
    """

    cluster: Cluster
    graph: Graph
    compiled: Compiled
    watch: Callable[[Glimpse], None] = lambda glimpse: None
    groups: dict[str, WorkerGroup] = field(default_factory=dict)
    limit: Deadline | None = None
    watchdog: Watchdog | None = None
    worlds: Worlds | None = None
    _under_way: int = 0
    _services: Any = None
    _executions: int = 0
    _glimpses: dict[Any, str] = field(default_factory=dict)

    def launch(self, seed: int, deterministic: bool, output_dir: Path) -> None:
        """Start every rank and connect them.

        Raises:
            RunFailed: a rank could not start.
        """
        several = len(self.cluster.nodes) > 1
        ip = self.cluster.nodes[0].ip if several else "127.0.0.1"
        self._services = self.cluster.launch(Services, self.compiled.tickets, ip, max_concurrency=1000)
        folder = self.cluster.cfg.offload_dir
        placed: dict[str, list[tuple[Device, ...]]] = {}
        for name, stage in self.compiled.layout.items():
            cls: type[Worker] = Host if name == HOST else self.graph.workers[name].cls
            cfg = self.graph if name == HOST else self.graph.workers[name].cfg
            ctx = RankContext(
                group=name,
                world_size=stage.ranks,
                dp=stage.dp,
                tp=stage.tp_ranks,
                seed=seed,
                deterministic=deterministic,
                output_dir=output_dir.absolute(),
                offload_dir=None if folder is None else Path(folder).absolute(),
            )
            devices = placed[name] = self._placed(stage)
            self.groups[name] = WorkerGroup.launch(self.cluster, name, cls, cfg, ctx, devices)
        found = self._all("identify", lambda group: ())
        for name, group in self.groups.items():
            group.introduce([found[name, rank] for rank in range(len(group.ranks))])
        if self.watchdog is not None:
            self.watchdog.ranks = RayRanks(
                {
                    (name, rank): Seat(actor, self.cluster.holder(placed[name][rank]), *group.places[rank])
                    for name, group in self.groups.items()
                    for rank, actor in enumerate(group.ranks)
                }
            )
        import ray

        broker = ray.get(self._services.address.remote())
        run = (self.graph, self.compiled, self._services, broker, several)
        self._all("connect", lambda group: (*run, group.meet))

    def setup(self) -> dict[str, list[int]]:
        """Build all workers. Returns the bytes on the device, by group and rank."""
        found = self._in_turn("setup", lambda group: ())
        sizes: dict[str, list[int]] = {}
        for (group, _), size in found.items():
            sizes.setdefault(group, []).append(size)
        return sizes

    def begin(self, phase: str, done: int, since: int, until: int) -> Calls:
        """Let every group run its program of this phase once, after those that it was told before.

        Args:
            phase: which.
            done: training iterations before it.
            since: iterations that were done when nothing was under way for the last time.
            until: iterations that will be done when that is so again.
        """
        import ray

        self._executions += 1
        self._under_way += 1
        turn = Turn(phase, self._executions, done, since, until)
        ray.get(self._services.begin.remote(phase, turn.execution))
        return self._ask("execute", lambda group: (turn,))

    def finish(self, calls: Calls) -> list[Report]:
        """Wait for what was begun.

        Raises:
            RunFailed: a rank failed, or nothing has moved for too long.
        """
        if self.watchdog is not None:
            self.watchdog.rest()
        self._under_way -= 1
        return gather(calls, self._tick, limit=self.limit)

    def adopt(self, compiled: Compiled) -> None:
        """Go on under another plan, between iterations: other turns, pieces, pipes, swaps, and on CPUs other devices.

        Workers keep their state. Nothing is changed where it raises one of these errors but the last:

        Raises:
            RuntimeError: an execution is under way.
            PlacementError: the staleness is another one. That is no matter of the plan: it changes the samples.
            NeedsNewWorld: it needs other ranks, or other GPUs, and there are no `worlds` to make them.
            RunFailed: a rank failed; the run is over.
        """
        import ray

        if self._under_way:
            raise RuntimeError(f"{self._under_way} executions are under way; another plan is adopted at their end")
        if (compiled.staleness, compiled.in_flight) != (self.compiled.staleness, self.compiled.in_flight):
            raise PlacementError(
                f"the plan is compiled for staleness {compiled.staleness} (in_flight={compiled.in_flight}), and the "
                f"run has {self.compiled.staleness} (in_flight={self.compiled.in_flight}): compile it for that"
            )
        if reason := beyond(self.cluster.devices, self.compiled.layout, compiled.layout):
            if self.worlds is None:
                raise NeedsNewWorld(
                    f"{reason}; start anew with that plan (resume=auto goes on from the last checkpoint)"
                )
            self.worlds.new_world(self, compiled)
            return
        ray.get(self._services.adopt.remote(compiled.tickets))
        environ = {
            name: [self.cluster.environment(mine) for mine in self._placed(stage)]
            for name, stage in compiled.layout.items()
        }
        leave = compiled.swapped - self.compiled.swapped  # they make room for those that come
        for names in (sorted(leave), [name for name in self.groups if name not in leave]):
            calls = {
                actor.adopt.remote(compiled, environ[name][rank]): (self.groups[name], rank)
                for name in names
                for rank, actor in enumerate(self.groups[name].ranks)
            }
            gather(calls, self._tick, limit=self.limit)
        self.compiled = compiled

    def takes(self, plan: Plan) -> bool:
        """Whether the ranks that run can go on under a plan."""
        now = {name: stage for name, stage in self.compiled.layout.items() if name != HOST}
        return not beyond(self.cluster.devices, now, {stage.worker: stage for stage in stages(plan)})

    def execute(self, phase: str, done: int) -> list[Report]:
        """`begin` and `finish`, with nothing else under way."""
        return self.finish(self.begin(phase, done, done, done))

    def save(self, directory: Path) -> dict[str, int]:
        """Every group writes its state below ``directory``. Returns the ranks of each group."""
        self._in_turn("save", lambda group: (directory.absolute() / group.name,))
        return {name: len(group.ranks) for name, group in self.groups.items()}

    def load(self, directory: Path) -> None:
        self._in_turn("load", lambda group: (directory.absolute() / group.name,))

    def call(self, group: str, method: str, *args: Any) -> list[Any]:
        """Call a method of the worker on every rank of a group."""
        ranks = self.groups[group]
        calls = {rank.call.remote(method, *args): (ranks, r) for r, rank in enumerate(ranks.ranks)}
        return gather(calls, self._tick, limit=self.limit)

    def apply(self, group: str, function: Callable[..., Any], args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """``function(worker, *args[rank])`` on every rank of a group, at the same time. Results by rank.

        Raises:
            RunFailed: it failed on one.
        """
        ranks = self.groups[group]
        calls = {rank.apply.remote(function, *args[r]): (ranks, r) for r, rank in enumerate(ranks.ranks)}
        return gather(calls, self._tick, limit=self.limit)

    def close(self) -> None:
        """End every process of the run: workers get a moment to end their own children, then all are killed."""
        import ray

        def teardown() -> None:
            refs = [rank.teardown.remote() for group in self.groups.values() for rank in group.ranks]
            ray.wait(refs, num_returns=len(refs), timeout=TEARDOWN_S)

        if self.groups:
            quiet(teardown)
        quiet(self.cluster.close)

    def _placed(self, stage: Stage) -> list[tuple[Device, ...]]:
        """Devices of each rank."""
        return [tuple(self.cluster.devices[i] for i in stage.devices_of(rank)) for rank in range(stage.ranks)]

    def _ask(
        self, method: str, args: Callable[[WorkerGroup], tuple[Any, ...]], names: Iterable[str] | None = None
    ) -> Calls:
        groups = [self.groups[name] for name in (self.groups if names is None else names)]
        return {
            getattr(actor, method).remote(*args(group)): (group, rank)
            for group in groups
            for rank, actor in enumerate(group.ranks)
        }

    def _in_turn(self, method: str, args: Callable[[WorkerGroup], tuple[Any, ...]]) -> dict[tuple[str, int], Any]:
        """As `_all`, but groups that are swapped come one by one: there is not room for all of them."""
        swapped = self.compiled.swapped
        found: dict[tuple[str, int], Any] = {}
        for names in [[name for name in self.groups if name not in swapped], *([name] for name in sorted(swapped))]:
            calls = self._ask(method, args, names)
            results = gather(calls, self._tick, limit=self.limit)
            found |= {(group.name, rank): r for (group, rank), r in zip(calls.values(), results, strict=True)}
        return found

    def _all(self, method: str, args: Callable[[WorkerGroup], tuple[Any, ...]]) -> dict[tuple[str, int], Any]:
        calls = self._ask(method, args)
        results = gather(calls, self._tick, limit=self.limit)
        return {(group.name, rank): result for (group, rank), result in zip(calls.values(), results, strict=True)}

    def _tick(self) -> None:
        import ray

        if self.watchdog is not None:
            self.watchdog.look()

        if self._glimpses:
            ready, _ = ray.wait(list(self._glimpses), num_returns=len(self._glimpses), timeout=0)
            for ref in ready:
                name = self._glimpses.pop(ref)
                try:
                    self.watch(Glimpse(name, *ray.get(ref)))
                except ray.exceptions.RayError:
                    continue  # the rank is gone: its own call says so, and why
        asked = set(self._glimpses.values())
        for name, group in self.groups.items():
            if name not in asked:
                self._glimpses[group.ranks[0].watch.remote()] = name


def beyond(devices: Sequence[Device], now: Mapping[str, Stage], then: Mapping[str, Stage]) -> str:
    """What running ranks would lack to go on in other layouts; empty: nothing. Pure.

    A rank keeps its group, its place in it, its node and its GPU; on a CPU it can take other cores of its node.

    Args:
        devices: of the cluster.
        now, then: group -> its stage of the plan.
    """
    if now.keys() != then.keys():
        return f"the plan has the groups {sorted(then)}, and {sorted(now)} run"
    for name, stage in then.items():
        have = now[name]
        if (have.dp, have.tp, have.spans) != (stage.dp, stage.tp, stage.spans):
            return f"{name} runs as dp={have.dp} x tp={have.tp}, and the plan needs dp={stage.dp} x tp={stage.tp}"
        for rank in range(stage.ranks):
            before, after = ([devices[i] for i in one.devices_of(rank)] for one in (have, stage))
            fixed = any(device.kind == "gpu" for device in (*before, *after))
            other = before != after if fixed else [d.node for d in before] != [d.node for d in after]
            if other:
                why = "a process keeps its GPU" if fixed else "a process keeps its node"
                places = [ranges(one.devices_of(rank)) for one in (have, stage)]
                return f"{name} rank {rank} runs on device {places[0]}, and the plan needs it on {places[1]}: {why}"
    return ""


def summarize(reports: list[Report], compiled: Compiled) -> tuple[dict[str, float], dict[str, float]]:
    """(metrics, seconds by node) of an execution.

    Metrics are named ``group/metric`` (``map/metric`` for a map, which has no group of its own); where two stages of a
    group record the same name, ``group.stage/metric``.
    Tensor-parallel ranks record the same, so the first of each replica counts. A node's seconds go from its first
    rank's start to its last rank's end.
    """
    from rlinf.metrics import Metrics, merge

    by_node: dict[str, list[Metrics]] = {}
    spans: dict[str, tuple[float, float]] = {}
    for report in reports:
        for span in report.spans:
            if span.doing in (Doing.RUN, Doing.SYNC):
                start, end = spans.get(span.name, (span.start, span.end))
                spans[span.name] = (min(start, span.start), max(end, span.end))
        if report.rank % compiled.layout[report.group].tp_ranks == 0:
            for node, metrics in report.metrics.items():
                by_node.setdefault(node, []).append(metrics)
    merged = {node: merge(parts) for node, parts in by_node.items()}
    owners: dict[str, list[str]] = {}
    for node, metrics in merged.items():
        for name in metrics:
            group, stage = node.split(".")
            owners.setdefault(f"{stage if group == HOST else group}/{name}", []).append(node)
    values = {}
    for key, nodes in owners.items():
        for node in nodes:
            name = key.split("/", 1)[1]
            values[key if len(nodes) == 1 else f"{node}/{name}"] = merged[node][name].value
    seconds = {name: end - start for name, (start, end) in spans.items()}
    return values, seconds


def flatten_rows(reports: list[Report]) -> list[Mapping[str, Any]]:
    """Sample transcripts of an execution."""
    return [row for report in reports for row in report.rows]
