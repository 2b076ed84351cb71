"""A rank interprets its program. Nothing here waits for the driver.

`Wire` is how a rank reaches others; the real one is Ray (`rlinf.group`), tests use a plain one.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import GeneratorType
from typing import Any, Protocol

import numpy as np

from rlinf.batch import GROUP, ROW, Batch
from rlinf.channel.mailbox import Mailbox
from rlinf.channel.routing import route
from rlinf.errors import WorkflowError
from rlinf.m2flow.compiler import (
    Acquire,
    Compiled,
    Offload,
    Onload,
    Pull,
    ReceiveWeights,
    Release,
    Run,
    SendWeights,
)
from rlinf.m2flow.graph import TRAIN, Graph, Node, Source
from rlinf.m2flow.host import Host
from rlinf.m2flow.inflow import Inflow
from rlinf.m2flow.rows import descend, pieces
from rlinf.m2flow.sync import WeightSync
from rlinf.m2flow.timeline import Doing, Span
from rlinf.metrics import Metric, Metrics, Reduction
from rlinf.worker import Worker


class Wire(Protocol):
    """How a rank reaches the others."""

    def send(self, group: str, ranks: list[int], key: tuple[Any, ...], source: int, item: Any) -> None: ...
    def close(self, group: str, ranks: list[int], key: tuple[Any, ...], source: int, sent: int) -> None: ...
    def acquire(self, execution: int, ticket: int) -> None: ...
    def release(self, execution: int, ticket: int) -> None: ...


@dataclass(frozen=True)
class Turn:
    """One execution of a phase's programs.

    Attributes:
        phase: which.
        execution: a number that no other execution of the run has; all ranks get the same.
        done: training iterations before this one; versions of weights follow from it, and which stages still wait.
        since: iterations that were done when nothing else was under way for the last time.
        until: iterations that will be done when that is so again.
    """

    phase: str
    execution: int
    done: int
    since: int
    until: int

    def sampled(self, staleness: int) -> int:
        """Training iterations that the weights have seen with which this one's samples are made.

        Exactly ``staleness`` fewer than there are before it, or those since when nothing else was under way: so the
        samples do not depend on who is faster.
        """
        return max(self.done - staleness, self.since)

    def wanted(self, staleness: int) -> bool:
        """Whether some iteration will be sampled with the weights as they are before this one."""
        return self.done == self.since or self.done + staleness < self.until


@dataclass
class Report:
    """What a rank tells the driver after an iteration."""

    group: str
    rank: int
    metrics: dict[str, Metrics] = field(default_factory=dict)  # node name -> metrics
    spans: list[Span] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)  # sample transcripts


class Executor:
    """Runs the programs of one rank."""

    def __init__(self, graph: Graph, compiled: Compiled, worker: Worker, mailbox: Mailbox, wire: Wire) -> None:
        self.graph = graph
        self.compiled = compiled
        self.worker = worker
        self.mailbox = mailbox
        self.wire = wire
        self.current = ""  # the node or operation that runs now
        self.away = False  # the worker's state is off its device
        self._sync = WeightSync(worker, mailbox, wire, compiled.layout, self.spend, slots=compiled.staleness + 1)
        self._inputs: dict[int, _Input] = {}
        self._report = Report("", 0)

    def run(self, turn: Turn) -> Report:
        """Run the phase's program once."""
        ctx = self.worker.ctx
        report = self._report = Report(ctx.group, ctx.rank)
        program = self.compiled.programs[turn.phase][ctx.group]
        for op in program:
            if isinstance(op, ReceiveWeights):
                self._sync.greet(op.source)  # before any turn: the sender may have its own before this rank's
        for op in program:
            match op:
                case Pull(node, sources):
                    self._inputs[node] = _Input(self, turn, self.graph.nodes[node], sources)
                    self._inputs[node].begin()
                case Run(node, targets, tells):
                    self._run(turn, self.graph.nodes[node], targets, tells)
                case Acquire(ticket):
                    with self.spend(Doing.LEASE, ctx.group, "wait for the device"):
                        self.wire.acquire(turn.execution, ticket)
                case Release(ticket):
                    self.wire.release(turn.execution, ticket)
                case Onload():
                    self.onload()
                case Offload():
                    self.offload()
                case SendWeights(target):
                    if turn.wanted(self.compiled.staleness):
                        self._sync.send(target, self.graph.version(ctx.group, turn.done))
                case ReceiveWeights(source):
                    self._sync.receive(source, self.graph.version(source, turn.sampled(self.compiled.staleness)))
        self.current = ""
        return report

    def onload(self) -> None:
        """Bring the worker's state to its device."""
        with self.spend(Doing.ONLOAD, self.worker.ctx.group, "onload"):
            self.worker.onload()
        self.away = False

    def offload(self) -> None:
        """Take it off."""
        with self.spend(Doing.OFFLOAD, self.worker.ctx.group, "offload"):
            self.worker.offload()
        self.away = True

    @contextmanager
    def spend(self, doing: Doing, name: str, shown: str = "", rows: int = 0) -> Iterator[None]:
        """Record what the time within is spent on."""
        before, self.current = self.current, shown or name
        start = time.time()
        yield
        self._report.spans.append(Span(doing, name, start, time.time(), rows))
        self.current = before

    # Stages

    def _run(self, turn: Turn, node: Node, targets: tuple[int, ...], tells: tuple[int, ...]) -> None:
        given = self._inputs.pop(node.index, None)
        report = self._report
        if (waits := node.starts - turn.done) > 0:
            if given is not None:
                given.drain()
            report.metrics[node.name] = {"waits": Metric(waits, reduction=Reduction.LAST)}
            return
        outlet = _Outlet(self, turn, node, targets)
        if isinstance(node.call, Source):
            assert isinstance(self.worker, Host)  # it alone runs sources, and keeps their cursors
            with self.spend(Doing.RUN, node.name):
                made = self.worker.sources[node.name].next_batch()
                self._tell(turn, tells, made)
                outlet.push(made)
        else:
            assert given is not None  # a stage reads rows
            self._stage(node, given, outlet)
        outlet.close()
        report.metrics[node.name] = self.worker.metrics.take()
        report.rows += self.worker.metrics.take_rows()

    def _stage(self, node: Node, given: _Input, outlet: _Outlet) -> None:
        call = node.call or getattr(self.worker, node.spec.name)
        self.worker.ctx.report(0.0, 0.0)
        if node.spec.streams:
            given.running = True  # the waits for rows within are recorded apart
            self.current = node.name
            call(iter(given), **node.options)
            given.end()
            return
        newer = self._in_flight(node)
        for batch in given:
            with self.spend(Doing.RUN, node.name, rows=batch.n):
                made = call(batch, self.worker.metrics) if node.call else call(batch, **node.options)
                empty = True
                for piece in made if isinstance(made, GeneratorType) else [] if made is None else [made]:
                    empty = False
                    outlet.push(_complete(node, batch, piece))
                    if newer:
                        for source in newer:
                            self._sync.newer(source)
                if empty and made is None and node.writes:
                    raise WorkflowError(f"{node.name} declares that it writes {list(node.writes)} and returned nothing")

    def _in_flight(self, node: Node) -> list[str]:
        """Groups whose newer weights a stage takes over between the rows that it hands on."""
        if not (self.compiled.in_flight and node.spec.expands and node.phase == TRAIN):
            return []
        return [sync.source for sync in self.graph.syncs if sync.target == node.worker]

    def _tell(self, turn: Turn, nodes: tuple[int, ...], made: Batch) -> None:
        """Ids of the rows that a source made, to those who take them piece by piece."""
        for index in nodes:
            group = self.graph.nodes[index].worker
            every = list(range(self.compiled.layout[group].ranks))
            key = ("rows", turn.execution, index)
            self.wire.send(group, every, key, 0, made[ROW].numpy())
            self.wire.close(group, every, key, 0, 1)


class _Input:
    """The rows that a node reads, in pieces as its granularity says. Iterate once."""

    def __init__(self, executor: Executor, turn: Turn, node: Node, sources: tuple[int, ...]) -> None:
        graph, compiled = executor.graph, executor.compiled
        self.executor, self.node, self.sources = executor, node, sources
        self.running = False  # the time between two pieces is the stage's
        self._since = (0.0, 0)
        self._open: dict[Hashable, int] = {
            (turn.phase, turn.execution, source, node.index): compiled.layout[graph.nodes[source].worker].dp
            for source in sources
        }
        self._number = {key: i for i, key in enumerate(self._open)}
        self._turn = turn
        self._first: Batch | None = None
        self._flow = Inflow(node.name, len(sources), None)

    def begin(self) -> None:
        """Wait for the first piece."""
        executor, node = self.executor, self.node
        names = " and ".join(executor.graph.nodes[source].name for source in self.sources)
        self._shown = f"wait for {names}"
        with executor.spend(Doing.ROWS, node.name, self._shown):
            if granularity := executor.compiled.granularity[node.index]:
                self._flow = self._in_pieces(granularity)
            self._first = self._wait()

    def _in_pieces(self, granularity: int) -> Inflow:
        executor, node, ctx = self.executor, self.node, self.executor.worker.ctx
        lineage = executor.graph.lineage(node.index)
        assert lineage.factors is not None  # the compiler takes such stages whole
        dp = executor.compiled.layout[node.worker].dp
        told = list(executor.mailbox.stream(("rows", self._turn.execution, node.index), 1))
        ids = descend(np.concatenate(told), lineage.factors)
        collective = executor.worker.collective and ctx.world_size > 1
        expected = pieces(ids, lineage.group, node.spec.unit, dp, ctx.dp_rank, granularity, even=collective)
        return Inflow(
            node.name,
            len(self.sources),
            expected,
            # Tensor-parallel ranks must be given the same piece in each call, and sums the same order in each run.
            in_order=node.spec.streams or ctx.tp > 1,
            merge=not (collective or node.spec.streams or ctx.deterministic),
        )

    def __iter__(self) -> Iterator[Batch]:
        piece = self._first
        self._first = None
        while piece is not None:
            if self.running:
                self._since = (time.time(), piece.n)
            yield piece
            if self.running:
                self.end()
            if self._flow.over:
                self._finish()
                if self.running:
                    self._since = (time.time(), 0)  # what the stage does once it has all rows
                return
            with self.executor.spend(Doing.ROWS, self.node.name, self._shown):
                piece = self._wait()

    def end(self) -> None:
        """The stage's time with the last piece is over."""
        start, rows = self._since
        if start:
            self.executor._report.spans.append(Span(Doing.RUN, self.node.name, start, time.time(), rows))
        self._since = (0.0, 0)

    def drain(self) -> None:
        """Take all rows and forget them."""
        for _ in self:
            pass

    def _wait(self) -> Batch | None:
        """The next piece; ``None``: there is none."""
        while (piece := self._flow.take()) is None and not self._flow.over:
            items, complete = self.executor.mailbox.any(self._open)
            for key, item in items:
                self._flow.add(self._number[key], item)
            for key in complete:
                del self._open[key]
                self._flow.close(self._number[key])
        return piece

    def _finish(self) -> None:
        """Closing messages may still be on their way."""
        while self._open:
            _, complete = self.executor.mailbox.any(self._open)
            for key in complete:
                del self._open[key]


class _Outlet:
    """What a node writes, on its way to its consumers."""

    def __init__(self, executor: Executor, turn: Turn, node: Node, targets: tuple[int, ...]) -> None:
        self.executor, self.turn, self.node, self.targets = executor, turn, node, targets
        self.ctx = executor.worker.ctx
        self.sent = dict.fromkeys(targets, 0)

    def push(self, out: Batch) -> None:
        """Send rows to the ranks that they belong to, with the fields that are read there."""
        if self.ctx.tp_rank:
            return  # tensor-parallel ranks make the same rows; the first one sends them
        graph, layouts = self.executor.graph, self.executor.compiled.layout
        for target in self.targets:
            consumer = graph.nodes[target]
            layout = layouts[consumer.worker]
            fields = [name for name, at in consumer.reads.items() if at == self.node.index]
            part = out.only({ROW, *([GROUP] if GROUP in out else []), *fields})
            for dp_rank, rows in enumerate(route(part, layout.dp, consumer.spec.unit)):
                ranks = [dp_rank * layout.tp_ranks + t for t in range(layout.tp_ranks)]
                self.executor.wire.send(consumer.worker, ranks, self._key(target), self.ctx.dp_rank, rows)
            self.sent[target] += 1

    def close(self) -> None:
        """Nothing more comes."""
        if self.ctx.tp_rank:
            return
        for target in self.targets:
            group = self.executor.graph.nodes[target].worker
            every = list(range(self.executor.compiled.layout[group].ranks))
            self.executor.wire.close(group, every, self._key(target), self.ctx.dp_rank, self.sent[target])

    def _key(self, target: int) -> tuple[Any, ...]:
        return (self.turn.phase, self.turn.execution, self.node.index, target)


def _complete(node: Node, given: Batch, made: Batch) -> Batch:
    """Check what a stage returned, and give it the ids and the fields that it hands on."""
    missing = set(node.writes) - set(made)
    if missing and (made.n or given.n):
        raise WorkflowError(f"{node.name} declares that it writes {sorted(missing)}; it returned {sorted(made)}")
    if node.spec.expands:
        parents = given.select(made["parent"])
        if node.samples and not bool((made[ROW] // node.samples == parents[ROW]).all()):
            raise WorkflowError(
                f"{node.name} declares {node.samples} rows of each: sample j of the row p must have the id "
                f"p * {node.samples} + j, found {made[ROW][:4].tolist()} of the rows {parents[ROW][:4].tolist()}"
            )
        return made.plus(**{name: parents[name] for name in node.carried})
    if ROW in made:
        return made
    if made.n != given.n:
        raise WorkflowError(
            f"{node.name} got {given.n} rows and returned {made.n} without {ROW!r}: return a row for each, "
            f"or declare expands=True, or return {ROW!r}"
        )
    ids = {ROW: given[ROW], **({GROUP: given[GROUP]} if GROUP in given else {})}
    return made.plus(**ids)
