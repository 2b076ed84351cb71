"""A rank interprets its program. Nothing here waits for the driver.

`Wire` is how a rank reaches others; the real one is Ray (`rlinf.group`), tests use a plain one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import GeneratorType
from typing import Any, Protocol

from rlinf.batch import GROUP, ROW, Batch
from rlinf.channel.mailbox import Mailbox
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
from rlinf.m2flow.lease import Ahead
from rlinf.m2flow.plan import ranges
from rlinf.m2flow.ports import Inlet, Outlet, Turn
from rlinf.m2flow.sync import WeightSync
from rlinf.m2flow.timeline import Doing, Span
from rlinf.m2flow.waits import RankId, Wait
from rlinf.metrics import Metric, Metrics, Reduction
from rlinf.worker import Worker


class Wire(Protocol):
    """How a rank reaches the others."""

    def send(self, group: str, ranks: list[int], key: tuple[Any, ...], source: int, item: Any) -> None: ...
    def close(self, group: str, ranks: list[int], key: tuple[Any, ...], source: int, sent: int) -> None: ...
    def acquire(self, execution: int, ticket: int) -> None: ...
    def release(self, execution: int, ticket: int, rank: int) -> None: ...
    def blockers(self, execution: int, ticket: int) -> list[Ahead]: ...


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
        self.holding = False  # it is this rank's turn on its devices
        self._sync = WeightSync(worker, mailbox, wire, compiled.layout, self.spend, slots=compiled.staleness + 1)
        self._moves = 0
        self._wait: tuple[Doing, str, Callable[[], list[RankId]]] | None = None
        self._inputs: dict[int, Inlet] = {}
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
                    self._inputs[node] = Inlet(self, turn, self.graph.nodes[node], sources)
                    self._inputs[node].begin()
                case Run(node, targets, tells):
                    self._run(turn, self.graph.nodes[node], targets, tells)
                case Acquire(ticket):
                    on = partial(self._ahead, turn.execution, ticket)
                    devices = sorted(self.compiled.tickets[turn.phase][ticket].devices)
                    with self.spend(Doing.LEASE, ctx.group, f"its turn on device {ranges(devices)}", on=on):
                        self.wire.acquire(turn.execution, ticket)
                    self.holding = True
                case Release(ticket):
                    self.holding = False
                    self.wire.release(turn.execution, ticket, ctx.rank)
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

    def adopt(self, compiled: Compiled) -> None:
        """Run these programs from now on, in the same groups of as many ranks; nothing may be under way.

        What the rank knows of weights that were sent stays, those that wait to be taken over too: executions before and
        after are one run. The worker's state goes off its device, or comes to it, as the new programs expect it.
        """
        self.compiled, self._sync.layout = compiled, compiled.layout
        if (swapped := self.worker.ctx.group in compiled.swapped) != self.away:
            (self.offload if swapped else self.onload)()

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
    def spend(
        self, doing: Doing, name: str, shown: str = "", rows: int = 0, on: Callable[[], list[RankId]] | None = None
    ) -> Iterator[None]:
        """Record what the time within is spent on.

        Args:
            doing: of which kind.
            name: of the stage, or of what is waited for.
            shown: to a person; the name by default. Of a wait: what it is for.
            rows: that are worked on.
            on: of a wait: tells which ranks could end it.
        """
        before = self.current, self._wait
        self.current = shown or name
        if on is not None:
            self.current, self._wait = f"wait for {shown}", (doing, shown, on)
        self._moves += 1
        start = time.time()
        yield
        self.record(Span(doing, name, start, time.time(), rows))
        self._moves += 1
        self.current, self._wait = before

    def record(self, span: Span) -> None:
        """Keep what a stretch of time was spent on."""
        self._report.spans.append(span)

    @property
    def moves(self) -> int:
        """Grows with each operation, and each message that comes."""
        return self._moves + self.mailbox.moves

    def wait(self) -> Wait | None:
        """What is waited for now. For another thread than the program's own."""
        found = self._wait
        return None if found is None else Wait(found[0], found[1], tuple(found[2]()))

    def _ahead(self, execution: int, ticket: int) -> list[RankId]:
        """Ranks whose turns must be over first: they have them now, or will have them before."""
        found: set[RankId] = set()
        for turn in self.wire.blockers(execution, ticket):
            for group, ops in self.compiled.programs[turn.phase].items():
                if Acquire(turn.ticket) in ops:
                    found |= {(group, rank) for rank in turn.ranks}
        return sorted(found)

    def lacking(self, keys: Mapping[Hashable, str]) -> list[RankId]:
        """Ranks that have not closed some keys, by the first rank of each replica; the group that closes each."""
        layout = self.compiled.layout
        return [
            (group, dp_rank * layout[group].tp_ranks)
            for key, group in keys.items()
            for dp_rank in self.mailbox.lacking(key, range(layout[group].dp))
        ]

    # Stages

    def _run(self, turn: Turn, node: Node, targets: tuple[int, ...], tells: tuple[int, ...]) -> None:
        given = self._inputs.pop(node.index, None)
        report = self._report
        if (waits := node.starts - turn.done) > 0:
            if given is not None:
                given.drain()
            report.metrics[node.name] = {"waits": Metric(waits, reduction=Reduction.LAST)}
            return
        outlet = Outlet(self, turn, node, targets)
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

    def _stage(self, node: Node, given: Inlet, outlet: Outlet) -> None:
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
                    outlet.push(complete(node, batch, piece))
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


def complete(node: Node, given: Batch, made: Batch) -> Batch:
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
