"""A fleet on the bench: the workers of one plan, run and called until enough is known of them or time is up."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rlinf.fleet import Calls, Fleet
from rlinf.group import gather
from rlinf.m2flow.graph import HOST, TRAIN, Node, Source
from rlinf.m2flow.timeline import Execution, ordered
from rlinf.scheduler import measure
from rlinf.scheduler.measure import Took, Which
from rlinf.scheduler.profile import Held
from rlinf.scheduler.readings import (
    Key,
    Readings,
    Setting,
    accompanied,
    smaller,
    stage_calls,
    sync_points,
    together,
    transfer,
    unit_of,
    which,
)

ITERATIONS = 4  # at most, besides the first
REPEATS = 5  # of a call, at most
_SMALL = 0.02  # of an iteration; how well a stage's time is known matters only above that
_PINGS = (1 << 12, 1 << 23)  # bytes
_SWITCHES = 2  # the first one makes room, and does not count
_SLOWER = 1.5  # that a call may be beside others
_BESIDE = 30  # calls that are made to keep others company, at most


@dataclass
class Budget:
    """The time that measuring may take.

    Attributes:
        seconds: in all.
        begun: when, by ``clock``.
    """

    seconds: float
    clock: Callable[[], float] = time.monotonic
    begun: float = field(init=False)

    def __post_init__(self) -> None:
        self.begun = self.clock()

    @property
    def spent(self) -> float:
        return self.clock() - self.begun

    def allows(self, seconds: float, share: float = 1.0) -> bool:
        """Whether something that takes so long would be over within this share of the whole."""
        return self.spent + seconds <= share * self.seconds


class Bench:
    """Measures one fleet, into `Readings`.

    Args:
        name: of the plan, for messages.
        fleet: set up.
        sizes: group -> bytes on the device of each rank, as `Fleet.setup` returned them.
        kinds: device -> its kind.
        readings: what is measured goes there.
        budget: until when.
        share: of the budget, which must be left when this fleet is done.
        show: tells a person.
    """

    def __init__(
        self,
        name: str,
        fleet: Fleet,
        sizes: dict[str, list[int]],
        kinds: dict[int, str],
        readings: Readings,
        budget: Budget,
        share: float,
        show: Callable[[str], None],
    ) -> None:
        self.name, self.fleet, self.sizes, self.readings = name, fleet, sizes, readings
        self.budget, self.share, self.show = budget, share, show
        self.graph = fleet.graph
        self.which = which(self.graph, fleet.compiled)
        self.nodes = [node for node in self.graph.phase(TRAIN) if node.name in self.which]
        self.settings = {
            group: Setting(kinds[stage.devices[0]] if stage.devices else "", stage.dp, stage.tp)
            for group, stage in fleet.compiled.layout.items()
        }
        self.full: dict[str, int] = {}  # node -> rows of a replica in an iteration
        self.iteration_s = 0.0
        self._turn = 0

    # Whole iterations

    def iterate(self) -> None:
        """One iteration that does not count (libraries load, memory is mapped), then one or several that do."""
        for group in self.graph.workers:
            stages = sorted({self.which[node.name].stage for node in self.nodes if node.worker == group})
            self._apply(group, measure.watch, stages)
        done = max((node.starts for node in self.graph.phase(TRAIN)), default=0)
        self._iteration(done)
        self.show(f"{self.name}: first iteration {self.iteration_s:.1f} s, which does not count")
        executions: list[Execution] = []
        while not executions or not (len(executions) == ITERATIONS or self._settled() or self._late(self.iteration_s)):
            done += 1
            execution = self._iteration(done)
            executions.append(execution)
            for name, took in stage_calls(self.graph, execution).items():
                self.full[name] = max(took.rows, self.full.get(name, 0))
                self.readings.add(self._key(self._node(name), took.rows), [took])
            self.show(f"{self.name}: iteration {self.iteration_s:.1f} s")
        self.readings.syncs += sync_points(self.graph, self.fleet.compiled, executions)
        for node in self.nodes:
            self.readings.facts.setdefault(node.name, []).extend(
                self._apply(node.worker, measure.facts, self.which[node.name])
            )

    def _iteration(self, done: int) -> Execution:
        began = time.monotonic()
        reports = self.fleet.execute(TRAIN, done)
        self.iteration_s = time.monotonic() - began
        return Execution(TRAIN, done + 1, {(one.group, one.rank): ordered(one.spans) for one in reports})

    def _settled(self) -> bool:
        known = [self.readings.samples[self._key(self._node(name), rows)] for name, rows in self.full.items()]
        return all(sample.settled for sample in known if sample.median > _SMALL * self.iteration_s)

    # Parts of it

    def memory(self) -> None:
        """What each stage holds while it runs on all of its rows."""
        for node in self.nodes:
            rows = self.full[node.name]
            if rows and self._may(f"memory of {node.name} with {rows} rows", self._expected(node, rows)):
                self.readings.add(self._key(node, rows), looked=self._call(node, rows, look=True))

    def fewer_rows(self) -> None:
        """Stages with fewer rows than in an iteration: the smallest calls first, of all stages."""
        sizes = {node.name: smaller(self.full[node.name], unit_of(self.graph, node)) for node in self.nodes}
        for place in range(max(map(len, sizes.values()), default=0)):
            for node in self.nodes:
                if place < len(sizes[node.name]):
                    self._size(node, sizes[node.name][place])

    def _size(self, node: Node, rows: int) -> None:
        key, likely = self._key(node, rows), self._expected(node, rows)
        if not self._may(f"{node.name} with {rows} rows", 3 * likely):
            return
        sample = self.readings.add(key, looked=self._call(node, rows, look=True))
        while len(sample.seconds) < 2 or not (sample.settled or len(sample.seconds) == REPEATS or self._late(likely)):
            self.readings.add(key, self._call(node, rows))

    def beside(self) -> None:
        """Stages of groups on disjoint devices at the same time, each as in an iteration of this plan."""
        for first, others in self._company():
            likely = {node.name: self._expected(node, self.full[node.name]) for node in (first, *others)}
            whole = _SLOWER * sum(likely[node.name] for node in others)
            repeats = min(max(math.ceil(whole / max(likely[first.name], 1e-3)), 1), _BESIDE)
            if not self._may(
                f"{first.name} beside {', '.join(node.name for node in others)}",
                _SLOWER * max(whole, repeats * likely[first.name]),
            ):
                continue
            rows = self.full[first.name]
            under_way = self._begin(first, rows, repeats)
            company: list[Took] = []
            found: list[tuple[Node, list[Took]]] = []
            for node in others:
                mine = min(max(math.ceil(likely[first.name] / max(likely[node.name], 1e-3)), 1), _BESIDE)
                found.append((node, self._call(node, self.full[node.name], repeats=mine if len(others) == 1 else 1)))
                company += found[-1][1]
            own = self._end(under_way)
            for node, calls, beside in [(first, own, company), *((node, calls, own) for node, calls in found)]:
                if both := accompanied(calls, beside):
                    self.readings.add(self._key(node, self.full[node.name], beside=True), both)

    def _company(self) -> list[tuple[Node, list[Node]]]:
        """Stages that are kept at work, and those that are measured beside each of them.

        The longest stage of all is one, with all that is on other devices; those that share its devices follow, each
        with the longest of those.
        """
        on = {name: frozenset(stage.devices) for name, stage in self.fleet.compiled.layout.items()}
        mine = [node for node in self.nodes if on[node.worker] and self.full[node.name]]
        if not mine:
            return []
        cost = {node.name: self._expected(node, self.full[node.name]) for node in mine}
        first = max(mine, key=lambda node: cost[node.name])
        apart = [node for node in mine if not on[node.worker] & on[first.worker]]
        if not apart:
            return []
        longest = max(apart, key=lambda node: cost[node.name])
        rest = [node for node in mine if node not in apart and node is not first]
        return [(first, apart), *((longest, [node]) for node in rest)]

    # What groups hold, and what goes between them

    def sources(self) -> None:
        """What sources make."""
        for node in self.graph.phase(TRAIN):
            if isinstance(node.call, Source):
                ((rows, size),) = self._apply(HOST, measure.draw, node.name)
                self.readings.source_rows[node.name], self.readings.source_bytes[node.name] = rows, size
                sample = self.readings.samples.pop(self._key(node, 0), None)  # spans of sources count no rows
                if sample is not None and rows:
                    self.readings.add(self._key(node, rows)).seconds.extend(sample.seconds)

    def switches(self) -> None:
        """What groups hold on their devices, and how long it takes to take it off and on. Their times may be others
        afterwards: state that was away once lies in other pages."""
        for group, stage in self.fleet.compiled.layout.items():
            if not stage.devices or (group, self.settings[group]) in self.readings.held:
                continue
            resident = max(*self.sizes[group], *self._apply(group, measure.held))
            for _ in range(_SWITCHES):
                moved = self._apply(group, measure.switch)
            off, on = (max(times) for times in zip(*moved, strict=True))
            setting = self.settings[group]._asdict()
            self.readings.held[group, self.settings[group]] = Held(**setting, resident=resident, offload=off, onload=on)

    def pings(self) -> None:
        """Messages between two workers of this host, and of two hosts where there are several."""
        places = {(HOST, 0): self._apply(HOST, measure.place)[0]}
        for group in self.graph.workers:
            places |= {(group, rank): at for rank, at in enumerate(self._apply(group, measure.place))}
        here, ip = places[HOST, 0]
        for wanted in (True, False):
            pair = next(
                (who for who, (at, _) in places.items() if who[0] != HOST and (at.host == here.host) == wanted), None
            )
            if pair is None:
                continue
            from rlinf.channel.choice import choose

            way = choose(here, places[pair][0]).host
            (address,) = self._apply(HOST, measure.open_broker, ip)
            ends = ("first", "second")
            calls: Calls = {}
            for mine, ((group, rank), at) in enumerate([((HOST, 0), ip), (pair, places[pair][1])]):
                of = self.fleet.groups[group]
                ref = of.ranks[rank].apply.remote(measure.ping, address, ends, mine, at, _PINGS, REPEATS)
                calls[ref] = (of, rank)
            took = gather(calls, limit=self.fleet.limit)[0]
            self.readings.transfers[way] = transfer(_PINGS, took)
            self.readings.transport = way  # the way between hosts where there are several

    # Calls

    def _call(self, node: Node, rows: int, repeats: int = 1, look: bool = False) -> list[Took]:
        args = self._args(node, rows, repeats, look)
        return together(self._apply(node.worker, measure.calls, *args))

    def _begin(self, node: Node, rows: int, repeats: int) -> Calls:
        group = self.fleet.groups[node.worker]
        args = self._args(node, rows, repeats, False)
        return {rank.apply.remote(measure.calls, *args): (group, r) for r, rank in enumerate(group.ranks)}

    def _end(self, under_way: Calls) -> list[Took]:
        return together(gather(under_way, limit=self.fleet.limit))

    def _args(self, node: Node, rows: int, repeats: int, look: bool) -> tuple[Which, int, int, int, int, bool]:
        turn, self._turn = self._turn, self._turn + repeats
        return self.which[node.name], rows, unit_of(self.graph, node), turn, repeats, look

    def _apply(self, group: str, function: Callable[..., Any], *args: Any) -> list[Any]:
        return self.fleet.apply(group, function, [args] * len(self.fleet.groups[group].ranks))

    def _node(self, name: str) -> Node:
        return next(node for node in self.graph.nodes if node.name == name)

    def _key(self, node: Node, rows: int, beside: bool = False) -> Key:
        return Key(node.name, self.settings[node.worker], rows, beside)

    def _expected(self, node: Node, rows: int) -> float:
        return self.readings.expected(node.name, self.settings[node.worker], rows)

    def _late(self, seconds: float) -> bool:
        return not self.budget.allows(seconds, self.share)

    def _may(self, what: str, seconds: float) -> bool:
        """Whether there is time for it; what there is not is named at the end."""
        if self._late(seconds):
            self.readings.left_out.append(f"{self.name}: {what}")
            return False
        return True
