"""Programs run on paper: when each operation of each rank would begin and end, and whether they end at all. Pure.

Everything that a rank waits for (rows, a turn on a device, a version of the weights) was done at a known time by
others, so a rank's time line follows from theirs. Ranks are taken forward in any order, each as far as what it waits
for is known; where none can go on, they wait for one another for ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rlinf.errors import PlacementError
from rlinf.m2flow.compiler import (
    Acquire,
    Compiled,
    Offload,
    Onload,
    Op,
    Pull,
    ReceiveWeights,
    Release,
    Run,
    SendWeights,
)
from rlinf.m2flow.graph import Graph, Node
from rlinf.m2flow.rows import Ints, Lineage, pieces
from rlinf.m2flow.timeline import Doing, RankId, Span

Times = NDArray[np.float64]


class StageCost(Protocol):
    """What a stage takes on one rank, in the layout that it has."""

    def seconds(self, rows: int) -> float:
        """Of a piece of so many rows, one or more."""

    def ready(self, rows: int) -> Times:
        """When each of these rows is done, in parts of `seconds`: ``[rows]``, ascending, the last one 1.

        Asked of a stage that hands its rows on one after the other.
        """


@dataclass(frozen=True)
class Cost:
    """``fixed + rows * per_row`` seconds; rows are done one after the other behind the fixed part. A `StageCost`."""

    fixed: float = 0.0
    per_row: float = 0.0

    def seconds(self, rows: int) -> float:
        return self.fixed + self.per_row * rows

    def ready(self, rows: int) -> Times:
        each: Times = np.arange(1, rows + 1, dtype=np.float64)
        return (self.fixed + self.per_row * each) / self.seconds(rows) if self.per_row > 0 else each / rows


@dataclass(frozen=True)
class Costs:
    """What a simulation is told of a workload.

    Attributes:
        nodes: node name -> its cost; a node that is not there takes no time.
        onload: group -> seconds.
        offload: group -> seconds.
        sync: source and target group -> seconds that sending takes.
        receive: source and target group -> seconds that the target takes, where they are not those of ``sync``.
        rows: source node name -> rows that it makes in an iteration.
    """

    nodes: Mapping[str, StageCost] = field(default_factory=dict)
    onload: Mapping[str, float] = field(default_factory=dict)
    offload: Mapping[str, float] = field(default_factory=dict)
    sync: Mapping[tuple[str, str], float] = field(default_factory=dict)
    receive: Mapping[tuple[str, str], float] = field(default_factory=dict)
    rows: Mapping[str, int] = field(default_factory=dict)


def check_ends(graph: Graph, compiled: Compiled, phase: str) -> None:
    """Refuse programs that wait for one another for ever.

    Raises:
        PlacementError: naming who waits for what.
    """
    rows = {node.name: 2 * max((stage.dp for stage in compiled.layout.values()), default=1) for node in graph.nodes}
    simulate(graph, compiled, phase, Costs(rows=rows), iterations=1 + compiled.staleness)


def simulate(
    graph: Graph, compiled: Compiled, phase: str, costs: Costs, iterations: int = 1
) -> dict[RankId, list[Span]]:
    """The time line of every rank, in seconds from the start.

    Args:
        graph: the workflow.
        compiled: its programs.
        phase: which of them.
        costs: what each operation takes.
        iterations: how often the phase runs; of later ones, as many are under way at once as staleness allows.

    Raises:
        PlacementError: the programs never end; it tells who waits for what.
    """
    return _Simulation(graph, compiled, phase, costs, iterations).run()


@dataclass
class _Rank:
    """One rank on paper: what it does next, and until when it is busy."""

    group: str
    dp_rank: int
    program: tuple[Op, ...]
    iteration: int = 0
    at: int = 0
    clock: float = 0.0
    todo: list[Ints] | None = None  # pieces of the node that runs, those to come
    spans: list[Span] = field(default_factory=list)
    why: str = ""  # what it waits for
    on: str = ""  # of which group

    @property
    def op(self) -> Op:
        return self.program[self.at]


class _Simulation:
    def __init__(self, graph: Graph, compiled: Compiled, phase: str, costs: Costs, iterations: int) -> None:
        self.graph, self.compiled, self.costs, self.iterations = graph, compiled, costs, iterations
        self.tickets = compiled.tickets[phase]
        self.active = {node.index for node in graph.phase(phase)}
        self.ranks = [
            _Rank(group, rank // stage.tp_ranks, compiled.programs[phase][group])
            for group, stage in compiled.layout.items()
            for rank in range(stage.ranks)
            if compiled.programs[phase][group]
        ]
        self.made: dict[tuple[int, int], Times] = {}  # iteration, node -> when each of its rows is there
        self.makers: dict[tuple[int, int], int] = {}  # iteration, node -> ranks that have not ended it
        self.given_back: dict[tuple[int, int], list[float]] = {}  # iteration, ticket
        self.sent: dict[tuple[int, str, str], list[float]] = {}  # iteration, source, target
        self.ended: dict[int, list[float]] = {}  # iteration
        self.turns = self._earlier()
        self.holders = {  # ticket -> the group whose turn it is, the first of several
            op.ticket: group
            for group in reversed(list(compiled.layout))
            for op in compiled.programs[phase][group]
            if isinstance(op, Acquire)
        }
        self.cuts: dict[int, list[list[Ints]]] = {}  # node -> pieces of each data-parallel rank

    def _earlier(self) -> list[list[int]]:
        """For each ticket the earlier ones that it must wait for: on each of its devices, the last before it."""
        last: dict[int, int] = {}
        found = []
        for index, ticket in enumerate(self.tickets):
            found.append(sorted({last[device] for device in ticket.devices if device in last}))
            last.update(dict.fromkeys(ticket.devices, index))
        self.last = last
        return found

    def run(self) -> dict[RankId, list[Span]]:
        pending = self.ranks
        while pending:
            moved = False
            for rank in pending:
                while rank.iteration < self.iterations and self._step(rank):
                    moved = True
            pending = [rank for rank in pending if rank.iteration < self.iterations]
            if pending and not moved:
                raise PlacementError(self._deadlock(pending))
        found: dict[RankId, list[Span]] = {}
        count: dict[str, int] = {}
        for rank in self.ranks:
            number = count[rank.group] = count.get(rank.group, -1) + 1
            found[rank.group, number] = rank.spans
        return found

    def _step(self, rank: _Rank) -> bool:
        """Take a rank one operation (or one piece) further; False: what it waits for is not known yet."""
        if rank.at == 0 and rank.todo is None and not self._may_begin(rank):
            return False
        done = True
        match rank.op:
            case Pull(node):
                first = self._pieces(rank, self.graph.nodes[node])[:1]
                done = all(self._wait_rows(rank, node, piece) for piece in first)
            case Run(node):
                return self._run(rank, self.graph.nodes[node])
            case Acquire(ticket):
                done = self._wait_turn(rank, ticket)
            case Release(ticket):
                self.given_back.setdefault((rank.iteration, ticket), []).append(rank.clock)
            case Onload():
                self._spend(rank, Doing.ONLOAD, rank.group, self.costs.onload.get(rank.group, 0.0))
            case Offload():
                self._spend(rank, Doing.OFFLOAD, rank.group, self.costs.offload.get(rank.group, 0.0))
            case SendWeights(target):
                self._spend(
                    rank, Doing.SYNC, f"send weights to {target}", self.costs.sync.get((rank.group, target), 0.0)
                )
                self.sent.setdefault((rank.iteration, rank.group, target), []).append(rank.clock)
            case ReceiveWeights(source):
                done = self._receive(rank, source)
        if done:
            self._next(rank)
        return done

    def _next(self, rank: _Rank) -> None:
        rank.at += 1
        if rank.at == len(rank.program):
            self.ended.setdefault(rank.iteration, []).append(rank.clock)
            rank.at, rank.iteration = 0, rank.iteration + 1

    def _may_begin(self, rank: _Rank) -> bool:
        """The driver has at most ``staleness + 1`` iterations under way."""
        before = rank.iteration - 1 - self.compiled.staleness
        if before < 0:
            return True
        if len(self.ended.get(before, ())) < len(self.ranks):
            return self._waits(rank, f"the end of iteration {before}", "the others")
        rank.clock = max(rank.clock, *self.ended[before])
        return True

    def _pieces(self, rank: _Rank, node: Node) -> list[Ints]:
        if node.index not in self.cuts:
            self.cuts[node.index] = self._cut(rank.group, node)
        return list(self.cuts[node.index][rank.dp_rank])

    def _cut(self, group: str, node: Node) -> list[list[Ints]]:
        """Pieces of every data-parallel rank; as `pieces` does, but the most of all is looked for once."""
        lineage, dp = self.graph.lineage(node.index), self.compiled.layout[group].dp
        rows, size = np.arange(self._rows(lineage)), self.compiled.granularity[node.index]
        cut = [pieces(rows, lineage.group, node.spec.unit, dp, rank, size, even=False) for rank in range(dp)]
        if group in self.graph.workers and self.graph.workers[group].cls.collective:
            most = max(map(len, cut))
            cut = [[*mine, *[rows[:0]] * (most - len(mine))] for mine in cut]
        return cut

    def _rows(self, lineage: Lineage) -> int:
        count = self.costs.rows.get(self.graph.nodes[lineage.source].name, 1)
        for n in lineage.factors or ():
            count *= n
        return count

    def _times(self, iteration: int, index: int) -> Times:
        """When each row of a node is there; NaN: not known yet."""
        node = self.graph.nodes[index]
        if (iteration, index) not in self.made:
            count = self._rows(self.graph.lineage(index)) * (node.samples or 1)
            self.made[iteration, index] = np.full(count, np.nan)
            self.makers[iteration, index] = self.compiled.layout[node.worker].ranks
        return self.made[iteration, index]

    def _wait_rows(self, rank: _Rank, index: int, piece: Ints) -> bool:
        """Until the rows of a piece are there; of a stage that takes all, until their makers have ended."""
        node, until = self.graph.nodes[index], rank.clock
        for source in sorted(set(node.reads.values())):
            times = self._times(rank.iteration, source)
            ended = self.makers[rank.iteration, source] == 0
            mine = times[piece] if self.compiled.granularity[index] else times
            if np.isnan(mine).any() and not ended:
                return self._waits(rank, f"rows of {self.graph.nodes[source].name}", self.graph.nodes[source].worker)
            until = max(until, float(np.nanmax(mine, initial=0.0)))
        if until > rank.clock:
            rank.spans.append(Span(Doing.ROWS, node.name, rank.clock, until))
            rank.clock = until
        return True

    def _run(self, rank: _Rank, node: Node) -> bool:
        if rank.todo is None:
            stage = self.compiled.layout[rank.group]
            every = np.arange(self._rows(self.graph.lineage(node.index)))
            rank.todo = self._pieces(rank, node) if node.reads else [every[rank.dp_rank :: stage.dp]]
        if rank.todo:
            piece = rank.todo[0]
            if node.reads and not self._wait_rows(rank, node.index, piece):
                return False
            cost = self.costs.nodes.get(node.name, Cost())
            start = rank.clock
            if len(piece):
                self._spend(rank, Doing.RUN, node.name, cost.seconds(len(piece)), len(piece))
            self._push(rank, node, piece, start, cost)
            rank.todo.pop(0)
        if not rank.todo:
            self._times(rank.iteration, node.index)
            self.makers[rank.iteration, node.index] -= 1
            rank.todo = None
            self._next(rank)
        return True

    def _push(self, rank: _Rank, node: Node, piece: Ints, start: float, cost: StageCost) -> None:
        """A stage that yields its rows hands them on one after the other; others hand on a piece at its end."""
        times = self._times(rank.iteration, node.index)
        n = node.samples or 1
        made = (piece[:, None] * n + np.arange(n)).reshape(-1)
        if len(piece) and self.graph.yields(node):
            each = np.repeat(start + (rank.clock - start) * cost.ready(len(piece)), n)
        else:
            each = np.full(len(made), rank.clock)
        times[made] = np.fmax(times[made], each)  # tensor-parallel ranks make the same rows: the last one counts

    def _wait_turn(self, rank: _Rank, ticket: int) -> bool:
        waits = [(rank.iteration, earlier) for earlier in self.turns[ticket]]
        mine = self.tickets[ticket].devices
        for iteration in range(rank.iteration):  # turns of iterations that are still under way come first
            waits += [(iteration, last) for last in {self.last[device] for device in mine}]
        until = rank.clock
        for key in waits:
            back = self.given_back.get(key, [])
            if len(back) < self.tickets[key[1]].holders:
                return self._waits(rank, f"its turn on devices {sorted(mine)}", self.holders[key[1]])
            until = max(until, *back)
        if until > rank.clock:
            rank.spans.append(Span(Doing.LEASE, rank.group, rank.clock, until))
            rank.clock = until
        return True

    def _receive(self, rank: _Rank, source: str) -> bool:
        iteration = max(rank.iteration - self.compiled.staleness, 0)
        sent = self.sent.get((iteration, source, rank.group), [])
        if len(sent) < self.compiled.layout[source].ranks:
            return self._waits(rank, f"the weights of {source}", source)
        if max(sent) > rank.clock:
            rank.spans.append(Span(Doing.WEIGHTS, source, rank.clock, max(sent)))
            rank.clock = max(sent)
        pair = (source, rank.group)
        seconds = self.costs.receive.get(pair, self.costs.sync.get(pair, 0.0))
        self._spend(rank, Doing.SYNC, f"receive weights from {source}", seconds)
        return True

    def _spend(self, rank: _Rank, doing: Doing, name: str, seconds: float, rows: int = 0) -> None:
        if seconds > 0:
            rank.spans.append(Span(doing, name, rank.clock, rank.clock + seconds, rows))
            rank.clock += seconds

    def _waits(self, rank: _Rank, why: str, on: str) -> bool:
        rank.why, rank.on = why, on
        return False

    def _deadlock(self, pending: list[_Rank]) -> str:
        waits = {rank.group: rank for rank in reversed(pending)}
        group, path = pending[0].group, []
        while group in waits and group not in path:
            path.append(group)
            group = waits[group].on
        circle = path[path.index(group) :] if group in path else path
        each = "; ".join(f"{name} at {self._doing(waits[name])} waits for {waits[name].why}" for name in circle)
        return (
            f"the plan's order of turns never ends: {each}. Give an order in which no stage comes before what it reads"
        )

    def _doing(self, rank: _Rank) -> str:
        """The stage that a rank is at, or about to begin."""
        for op in rank.program[rank.at :]:
            match op:
                case Pull(node) | Run(node):
                    return self.graph.nodes[node].name
                case SendWeights(target):
                    return f"sending weights to {target}"
                case ReceiveWeights(source):
                    return f"receiving weights from {source}"
        return "its end"
