"""A rank interprets its program. Nothing here waits for the driver.

`Wire` is how a rank reaches others; the real one is Ray (`rlinf.group`), tests use a plain one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import GeneratorType
from typing import Any, Protocol

from rlinf.batch import GROUP, ROW, Batch
from rlinf.channel.mailbox import Mailbox
from rlinf.channel.routing import route
from rlinf.errors import WorkflowError
from rlinf.host import this_host
from rlinf.m2flow.compiler import Acquire, Compiled, Pull, ReceiveWeights, Release, Run, SendWeights
from rlinf.m2flow.graph import Graph, Node, Source
from rlinf.m2flow.host import Host
from rlinf.metrics import Metric, Metrics, Reduction
from rlinf.worker import Worker


class Wire(Protocol):
    """How a rank reaches the others."""

    def send(self, group: str, ranks: list[int], key: tuple[Any, ...], source: int, item: Any) -> None: ...
    def close(self, group: str, ranks: list[int], key: tuple[Any, ...], source: int, sent: int) -> None: ...
    def acquire(self, phase: str, execution: int, ticket: int) -> None: ...
    def release(self, phase: str, execution: int, ticket: int) -> None: ...


@dataclass(frozen=True)
class Span:
    """One operation of one rank: wall-clock seconds since the epoch."""

    name: str
    start: float
    end: float


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
        self._inputs: dict[int, Batch] = {}
        self._synced: dict[tuple[str, str], int] = {}  # (source, target) -> version

    def run(self, phase: str, execution: int, done: int) -> Report:
        """Run the phase's program once.

        Args:
            execution: a number that no other execution of the run has; all ranks get the same.
            done: training iterations that are over; versions of weights follow from it, and which stages still wait.
        """
        ctx = self.worker.ctx
        report = Report(ctx.group, ctx.rank)
        for op in self.compiled.programs[phase][ctx.group]:
            start = time.time()
            match op:
                case Pull(node, sources):
                    self.current = f"wait for {' and '.join(self.graph.nodes[s].name for s in sources)}"
                    self._inputs[node] = self._pull(phase, execution, self.graph.nodes[node], sources)
                case Run(node, targets):
                    self.current = self.graph.nodes[node].name
                    if (waits := self.graph.nodes[node].starts - done) > 0:
                        self._inputs.pop(node)
                        report.metrics[self.current] = {"waits": Metric(waits, reduction=Reduction.LAST)}
                        continue
                    self._run(phase, execution, self.graph.nodes[node], targets)
                    report.metrics[self.current] = self.worker.metrics.take()
                    report.rows += self.worker.metrics.take_rows()
                case Acquire(ticket, onload):
                    self.current = "wait for the device"
                    self.wire.acquire(phase, execution, ticket)
                    if onload:
                        self.worker.onload()
                case Release(ticket, offload):
                    if offload:
                        self.worker.offload()
                    self.wire.release(phase, execution, ticket)
                case SendWeights(target):
                    self.current = f"send weights to {target}"
                    self._send_weights(target, execution, self.graph.version(ctx.group, done))
                case ReceiveWeights(source):
                    self.current = f"receive weights from {source}"
                    self._receive_weights(source, execution, self.graph.version(source, done))
            if not isinstance(op, Release):
                report.spans.append(Span(self.current, start, time.time()))
        self.current = ""
        return report

    # Rows

    def _pull(self, phase: str, execution: int, node: Node, sources: tuple[int, ...]) -> Batch:
        joined: Batch | None = None
        for source in sources:
            producers = self.compiled.layout[self.graph.nodes[source].worker].dp
            parts = list(self.mailbox.stream((phase, execution, source, node.index), producers))
            batch = Batch.concat(parts)
            batch = batch.sorted() if batch.n else batch
            joined = batch if joined is None else joined.join(batch)
        assert joined is not None  # a node that reads has a source
        return joined

    def _run(self, phase: str, execution: int, node: Node, targets: tuple[int, ...]) -> None:
        ctx = self.worker.ctx
        ctx.report(0.0, 0.0)
        given = self._inputs.pop(node.index, Batch({}))
        sent = dict.fromkeys(targets, 0)
        for made in self._call(node, given):
            out = _complete(node, given, made)
            if ctx.tp_rank:
                continue  # tensor-parallel ranks make the same rows; the first one sends them
            for target in targets:
                consumer = self.graph.nodes[target]
                layout = self.compiled.layout[consumer.worker]
                fields = [name for name, at in consumer.reads.items() if at == node.index]
                part = out.only({ROW, *([GROUP] if GROUP in out else []), *fields})
                for dp_rank, rows in enumerate(route(part, layout.dp, consumer.spec.unit)):
                    ranks = [dp_rank * layout.tp_ranks + t for t in range(layout.tp_ranks)]
                    key = (phase, execution, node.index, target)
                    self.wire.send(consumer.worker, ranks, key, ctx.dp_rank, rows)
                sent[target] += 1
        if ctx.tp_rank == 0:
            for target in targets:
                consumer = self.graph.nodes[target]
                every = list(range(self.compiled.layout[consumer.worker].ranks))
                key = (phase, execution, node.index, target)
                self.wire.close(consumer.worker, every, key, ctx.dp_rank, sent[target])

    def _call(self, node: Node, given: Batch) -> Iterator[Batch]:
        if isinstance(node.call, Source):
            assert isinstance(self.worker, Host)  # it alone runs sources, and keeps their cursors
            yield self.worker.sources[node.name].next_batch()
            return
        if node.call is not None:
            made = node.call(given, self.worker.metrics)
        else:
            made = getattr(self.worker, node.spec.name)(given, **node.options)
        if isinstance(made, GeneratorType):
            yield from made
        elif made is not None:
            yield made
        elif node.writes:
            raise WorkflowError(f"{node.name} declares that it writes {list(node.writes)} and returned nothing")

    # Weights

    def _send_weights(self, target: str, execution: int, version: int) -> None:
        """Publish, once all readers say that they are there: none of them reads the last publication any more."""
        ctx = self.worker.ctx
        if self._synced.get((ctx.group, target)) == version:
            return
        readers = self.compiled.layout[target].ranks
        hosts = set(self.mailbox.stream(("readers", execution, ctx.group, target), readers))
        published = self.worker.publish_weights(target, inline=hosts != {this_host()})
        key, every = ("weights", execution, ctx.group, target), list(range(readers))
        self.wire.send(target, every, key, ctx.rank, (ctx.rank, published))
        self.wire.close(target, every, key, ctx.rank, 1)
        self._synced[ctx.group, target] = version

    def _receive_weights(self, source: str, execution: int, version: int) -> None:
        ctx = self.worker.ctx
        if self._synced.get((source, ctx.group)) == version:
            return
        senders = self.compiled.layout[source].ranks
        every = list(range(senders))
        self.wire.send(source, every, ("readers", execution, source, ctx.group), ctx.rank, this_host())
        self.wire.close(source, every, ("readers", execution, source, ctx.group), ctx.rank, 1)
        by_rank = dict(self.mailbox.stream(("weights", execution, source, ctx.group), senders))
        self.worker.receive_weights(version, [by_rank[rank] for rank in every])
        self._synced[source, ctx.group] = version


def _complete(node: Node, given: Batch, made: Batch) -> Batch:
    """Check what a stage returned, and give it the ids and the fields that it hands on."""
    missing = set(node.writes) - set(made)
    if missing:
        raise WorkflowError(f"{node.name} declares that it writes {sorted(missing)}; it returned {sorted(made)}")
    if node.spec.expands:
        parents = given.select(made["parent"])
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
