"""How rows come into a stage and leave it: the two ends that an executor gives to each."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rlinf.batch import GROUP, ROW, Batch
from rlinf.channel.routing import route
from rlinf.m2flow.graph import Node
from rlinf.m2flow.inflow import Inflow
from rlinf.m2flow.rows import descend, pieces
from rlinf.m2flow.timeline import Doing, Span
from rlinf.m2flow.waits import RankId

if TYPE_CHECKING:
    from rlinf.m2flow.executor import Executor


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


class Inlet:
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
        self._shown = f"rows of {names} for {node.name}"
        with self._waiting():
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
            with self._waiting():
                piece = self._wait()

    def _waiting(self) -> AbstractContextManager[None]:
        return self.executor.spend(Doing.ROWS, self.node.name, self._shown, on=self._lacking)

    def _lacking(self) -> list[RankId]:
        nodes = self.executor.graph.nodes
        open_keys = list(self._open)  # the program's own thread takes keys away meanwhile
        return self.executor.lacking({key: nodes[self.sources[self._number[key]]].worker for key in open_keys})

    def end(self) -> None:
        """The stage's time with the last piece is over."""
        start, rows = self._since
        if start:
            self.executor.record(Span(Doing.RUN, self.node.name, start, time.time(), rows))
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
        """Closing messages may still be on their way, or those who make the rows still at it."""
        while self._open:
            with self._waiting():
                _, complete = self.executor.mailbox.any(self._open)
            for key in complete:
                del self._open[key]


class Outlet:
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
