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
from rlinf.m2flow.timeline import Execution, RankId, ordered
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

ITERATIONS = 6  # at most, that count
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

    @property
    def left(self) -> float:
        return self.seconds - self.spent


class Bench:
    """Measures one fleet, into `Readings`.

    Args:
        name: of the plan, for messages.
        fleet: set up.
        sizes: group -> bytes on the device of each rank, as `Fleet.setup` returned them.
        kinds: device -> its kind.
        readings: what is measured goes there.
        budget: how much time there is.
        show: tells a person.

    Attributes:
        reserve: seconds of the budget that must be left when this fleet is done.
        first_s, whole_s: that the first iteration took, and the last one that counts.
    """

    def __init__(
        self,
        name: str,
        fleet: Fleet,
        sizes: dict[str, list[int]],
        kinds: dict[int, str],
        readings: Readings,
        budget: Budget,
        show: Callable[[str], None],
    ) -> None:
        self.name, self.fleet, self.sizes, self.readings = name, fleet, sizes, readings
        self.budget, self.show = budget, show
        self.reserve = self.first_s = self.whole_s = 0.0
        self.graph = fleet.graph
        self.which = which(self.graph, fleet.compiled)
        self.nodes = [node for node in self.graph.phase(TRAIN) if node.name in self.which]
        self.settings = {
            group: Setting(kinds[stage.devices[0]] if stage.devices else "", stage.dp, stage.tp)
            for group, stage in fleet.compiled.layout.items()
        }
        self.full: dict[str, int] = {}  # node -> rows of a replica in an iteration
        self._done = max((node.starts for node in self.graph.phase(TRAIN)), default=0)
        self._executions: list[Execution] = []
        self._turn = 0

    # Whole iterations

    def iterate(self) -> None:
        """One iteration that does not count, of few rows (libraries load, memory is mapped); then one that does.

        That one has all rows, or as many as there seems to be time for.
        """
        for group in self.graph.workers:
            stages = sorted({self.which[node.name].stage for node in self.nodes if node.worker == group})
            self._apply(group, measure.watch, stages)
        self._draw()
        least = max(stage.dp for stage in self.fleet.compiled.layout.values())
        self._limit(least)
        _, self.first_s = self._iteration()
        self.show(f"{self.name}: an iteration of few rows to warm up, {self.first_s:.1f} s")
        rows = max(self.readings.source_rows.values(), default=1)
        part = 1
        # Half of the first one is thought to be warming up, and what does not grow with the rows.
        while rows // (2 * part) >= least and self.first_s * (1 + rows / (part * least)) / 2 > self._time():
            part *= 2
        if part > 1:
            self.readings.left_out.append(f"{self.name}: all rows of an iteration; it has 1 of {part}")
        self._limit(max(rows // part, least))
        self._count()
        for node in self.nodes:
            found = self._apply(node.worker, measure.facts, self.which[node.name])
            self.readings.facts.setdefault(node.name, []).extend(found)

    def again(self) -> None:
        """More iterations, until those stages that matter take about as long each time."""
        while len(self._executions) < ITERATIONS and not self._settled() and self.whole_s <= self._time():
            self._count()
        self.readings.syncs += sync_points(self.graph, self.fleet.compiled, self._executions)

    def _count(self) -> None:
        execution, self.whole_s = self._iteration()
        self._executions.append(execution)
        looked: dict[tuple[str, RankId], tuple[int, float]] = {}
        for group in self.graph.workers:
            own = [node.name for node in self.nodes if node.worker == group]
            for rank, found in enumerate(self._apply(group, measure.looked, [self.which[name] for name in own])):
                looked |= {(name, (group, rank)): one for name, one in zip(own, found, strict=True)}
        for name, took in stage_calls(self.graph, execution, looked).items():
            node = self._node(name)
            rows = took.rows if node.reads else self.readings.source_rows[name]  # spans of sources count none
            self.full[name] = max(rows, self.full.get(name, 0))
            self.readings.add(self._key(node, rows), [took])
        self.show(f"{self.name}: an iteration, {self.whole_s:.1f} s")

    def _iteration(self) -> tuple[Execution, float]:
        for group in self.graph.workers:
            self._apply(group, measure.anew)
        began = time.monotonic()
        reports = self.fleet.execute(TRAIN, self._done)
        seconds = time.monotonic() - began
        self._done += 1
        spans = {(one.group, one.rank): ordered(one.spans) for one in reports}
        return Execution(TRAIN, self._done, spans), seconds

    def _settled(self) -> bool:
        known = [self.readings.samples[self._key(self._node(name), rows)] for name, rows in self.full.items()]
        return all(sample.settled for sample in known if sample.median > _SMALL * self.whole_s)

    def _draw(self) -> None:
        """What sources make in an iteration."""
        for node in self.graph.phase(TRAIN):
            if isinstance(node.call, Source):
                ((rows, size),) = self._apply(HOST, measure.draw, node.name)
                self.readings.source_rows[node.name], self.readings.source_bytes[node.name] = rows, size

    def _limit(self, rows: int) -> None:
        for name in self.readings.source_rows:
            self._apply(HOST, measure.limit, name, rows)

    # Parts of it

    def fewer_rows(self) -> None:
        """Stages with fewer rows than in an iteration: the smallest calls first, of all stages."""
        sizes = {
            node.name: smaller(self.full.get(node.name, 0), unit_of(self.graph, node))
            for node in self.nodes
            if not node.spec.whole
        }
        for place in range(max(map(len, sizes.values()), default=0)):
            for node in self.nodes:
                if place < len(sizes.get(node.name, ())):
                    self._size(node, sizes[node.name][place])

    def _size(self, node: Node, rows: int) -> None:
        key, likely = self._key(node, rows), self._expected(node, rows)
        if key in self.readings.samples:  # a group without a device is in the same setting in all plans
            return
        if not self._may(f"{node.name} with {rows} row{'s' * (rows != 1)}", 2 * likely):
            return
        sample = self.readings.add(key, self._call(node, rows, look=True))
        for repeat in range(1, REPEATS):
            if repeat > 1 and (sample.settled or likely > self._time()):
                break
            self.readings.add(key, self._call(node, rows))

    def beside(self) -> None:
        """Stages of groups on disjoint devices at the same time, each with its rows of an iteration of this plan."""
        for first, others in self._company():
            likely = {node.name: self._expected(node, self.full[node.name]) for node in (first, *others)}
            whole = sum(likely[node.name] for node in others)
            if len(others) == 1:
                whole = max(whole, likely[first.name])  # it is repeated as long
            repeats = _times(_SLOWER * whole, likely[first.name])
            names = ", ".join(node.name for node in others)
            if not self._may(f"{first.name} beside {names}", _SLOWER * max(whole, repeats * likely[first.name])):
                continue
            under_way = self._begin(first, self.full[first.name], repeats)
            found = []
            for node in others:
                mine = _times(likely[first.name], likely[node.name]) if len(others) == 1 else 1
                found.append((node, self._call(node, self.full[node.name], repeats=mine)))
            own = self._end(under_way)
            company = [took for _, calls in found for took in calls]
            for node, calls, beside in [(first, own, company), *((node, calls, own) for node, calls in found)]:
                if both := accompanied(calls, beside):
                    self.readings.add(self._key(node, self.full[node.name], beside=True), both)

    def _company(self) -> list[tuple[Node, list[Node]]]:
        """Stages that are kept at work, and those that are measured beside each of them.

        The longest stage of all is one, with all that is on other devices; those that share its devices follow, each
        with the longest of those.
        """
        on = {name: frozenset(stage.devices) for name, stage in self.fleet.compiled.layout.items()}
        mine = [node for node in self.nodes if on[node.worker] and self.full.get(node.name)]
        cost = {node.name: self._expected(node, self.full[node.name]) for node in mine}
        first = max(mine, key=lambda node: cost[node.name], default=None)
        apart = [node for node in mine if first is not None and not on[node.worker] & on[first.worker]]
        if first is None or not apart:
            return []
        longest = max(apart, key=lambda node: cost[node.name])
        rest = [node for node in mine if node not in apart and node is not first]
        return [(first, apart), *((longest, [node]) for node in rest)]

    # What groups hold, and what goes between them

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

    def _time(self) -> float:
        """Seconds that are left for this fleet."""
        return self.budget.left - self.reserve

    def _may(self, what: str, seconds: float) -> bool:
        """Whether there is time for it; what there is not is named at the end."""
        if seconds <= self._time():
            return True
        self.readings.left_out.append(f"{self.name}: {what}")
        return False


def _times(whole: float, each: float) -> int:
    """Calls that last as long as something else."""
    return min(max(math.ceil(whole / max(each, 1e-3)), 1), _BESIDE)
