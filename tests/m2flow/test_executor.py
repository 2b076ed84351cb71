"""Ranks interpret their programs over a plain in-process wire: the same code that runs over Ray."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from rlinf.batch import Batch
from rlinf.channel.mailbox import Mailbox
from rlinf.errors import WorkflowError
from rlinf.m2flow.compiler import compile_plan
from rlinf.m2flow.executor import Executor, Report, Turn
from rlinf.m2flow.graph import HOST, TRAIN, Graph, Workflow
from rlinf.m2flow.host import Host
from rlinf.m2flow.lease import Ahead, LeaseBook, ahead_of
from rlinf.m2flow.plan import Plan
from rlinf.m2flow.stage import StageSpec, Unit
from rlinf.scheduler.shipped import collocated
from rlinf.worker import RankContext, Worker, stage


class Local:
    """A wire between threads of one process."""

    def __init__(self, tickets: Any) -> None:
        self.boxes: dict[tuple[str, int], Mailbox] = {}
        self.tickets = tickets
        self.books: dict[Any, LeaseBook] = {}
        self.changed = threading.Condition()

    def send(self, group, ranks, key, source, item) -> None:
        for rank in ranks:
            self.boxes[group, rank].put(key, source, item)

    def close(self, group, ranks, key, source, sent) -> None:
        for rank in ranks:
            self.boxes[group, rank].close(key, source, sent)

    def begin(self, phase, execution) -> None:
        with self.changed:
            self.books.setdefault(execution, LeaseBook(self.tickets[phase]))

    def acquire(self, execution, ticket) -> None:
        with self.changed:
            book = self.books[execution]
            devices = book.tickets[ticket].devices

            def mine() -> bool:
                earlier = (other for number, other in list(self.books.items()) if number < execution)
                return not book.blockers(ticket) and not any(other.open_on(devices) for other in earlier)

            assert self.changed.wait_for(mine, timeout=20)

    def blockers(self, execution, ticket) -> list[Ahead]:
        book = self.books[execution]
        return [ahead_of(TRAIN, book, earlier) for earlier in book.blockers(ticket)]

    def release(self, execution, ticket, rank) -> None:
        with self.changed:
            self.books[execution].release(ticket, rank)
            self.changed.notify_all()


def executors_of(
    graph: Graph, devices: int, plan: Plan | None = None, staleness: int = 0, in_flight: bool = False
) -> tuple[list[Executor], Local]:
    """One for each rank, over a wire of threads."""
    compiled = compile_plan(graph, plan or collocated(graph, devices), staleness, in_flight)
    wire = Local(compiled.tickets)
    executors = []
    for group, layout in compiled.layout.items():
        for rank in range(layout.ranks):
            ctx = RankContext(group, rank, layout.ranks, layout.dp, layout.tp_ranks)
            spec = graph.workers.get(group)
            worker = Host(graph, ctx) if spec is None else spec.cls(spec.cfg, ctx)
            wire.boxes[group, rank] = Mailbox()
            executors.append(Executor(graph, compiled, worker, wire.boxes[group, rank], wire))
    return executors, wire


def execute(
    graph: Graph,
    devices: int,
    iterations: int = 1,
    first: int = 0,
    reports: list[Report] | None = None,
    plan: Plan | None = None,
    staleness: int = 0,
    in_flight: bool = False,
) -> dict[tuple[str, int], Worker]:
    executors, wire = executors_of(graph, devices, plan, staleness, in_flight)
    failures: list[BaseException] = []

    def loop(executor: Executor) -> None:
        try:
            last = first + iterations
            for i in range(first, last):
                wire.begin(TRAIN, i)
                report = executor.run(Turn(TRAIN, i, i, first, last) if staleness else Turn(TRAIN, i, i, i, i))
                if reports is not None:
                    reports.append(report)
        except BaseException as error:
            failures.append(error)
            for box in wire.boxes.values():
                box.cancel()

    threads = [
        threading.Thread(target=loop, args=(e,), name=f"{e.worker.ctx.group}-{e.worker.ctx.rank}") for e in executors
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    if failures:
        raise failures[0]
    assert not any(thread.is_alive() for thread in threads)
    return {(executor.worker.ctx.group, executor.worker.ctx.rank): executor.worker for executor in executors}


class Numbers:
    writes = ("x", "tag")

    def __init__(self) -> None:
        self.at = 0

    def setup(self) -> None: ...

    def next_batch(self) -> Batch:
        ids = torch.arange(self.at, self.at + 6)
        self.at += 6
        return Batch({"row_id": ids, "x": ids.double(), "tag": [f"t{i}" for i in ids.tolist()]})

    def state(self) -> dict:
        return {"at": self.at}

    def load_state(self, state: dict) -> None:
        self.at = state["at"]


class Twice(Worker):
    @stage(reads=("x",), writes=("y",), unit=Unit.GROUP, expands=True)
    def double(self, batch: Batch):
        for i in reversed(range(batch.n)):  # pieces may come in any order
            ids = batch["row_id"][i] * 2 + torch.arange(2)
            y = batch["x"][i] + torch.arange(2).double() / 2
            yield Batch(
                {"row_id": ids, "group_id": batch["row_id"][i].repeat(2), "parent": torch.tensor([i, i]), "y": y}
            )


class Sum(Worker):
    def __init__(self, cfg: Any, ctx: RankContext) -> None:
        super().__init__(cfg, ctx)
        self.rows: list[tuple[int, float, float, str]] = []

    @stage(reads=("y", "z", "tag"), whole=True, updates=True)
    def add(self, batch: Batch) -> None:
        self.rows += zip(batch["row_id"].tolist(), batch["y"].tolist(), batch["z"].tolist(), batch["tag"], strict=True)


class Negate:
    __stage__ = StageSpec("negate", reads=("y",), writes=("z",))

    def __call__(self, batch: Batch, metrics: Any) -> Batch:
        return Batch({"z": -batch["y"]})


def doubling(dp: int, tp: int) -> Graph:
    flow = Workflow("w")
    samples = flow.worker(Twice, dp=dp).double(flow.source(Numbers()))
    flow.worker(Sum, dp=dp, tp=tp).add(flow.map(Negate(), samples))
    return flow.build()


@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (2, 1), (1, 2), (3, 1), (2, 2)])
def test_every_row_arrives_once_with_its_fields_matched_by_id_at_any_layout(dp: int, tp: int) -> None:
    workers = execute(doubling(dp, tp), devices=dp * tp, iterations=2)
    expected = sorted((2 * i + j, i + j / 2, -(i + j / 2), f"t{i}") for i in range(12) for j in range(2))
    for t in range(tp):
        rows = [row for d in range(dp) for row in workers["sum", d * tp + t].rows]
        assert sorted(rows) == expected


def test_rows_come_in_the_order_of_their_ids() -> None:
    rows = execute(doubling(1, 1), devices=1)["sum", 0].rows
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)


class Source2(Worker):
    def __init__(self, cfg: Any, ctx: RankContext) -> None:
        super().__init__(cfg, ctx)
        self.w = torch.zeros(4)
        self.sent = 0

    @stage(reads=("y",), updates=True, whole=True)
    def train(self, batch: Batch) -> None:
        self.w += 1

    def publish_weights(self, target, inline, slot=0):
        self.sent += 1
        self.inline = inline
        return self.ctx.rank, float(self.w[0])


class Sink(Worker):
    def __init__(self, cfg: Any, ctx: RankContext) -> None:
        super().__init__(cfg, ctx)
        self.seen: list[tuple[int, float]] = []

    def receive_weights(self, version, publications) -> None:
        self.version = version
        assert [rank for rank, _ in publications] == list(range(len(publications)))
        (self.a,) = {value for _, value in publications}

    @stage(reads=("x",), writes=("y",))
    def use(self, batch: Batch) -> Batch:
        self.seen.append((self.version, self.a))
        return Batch({"y": batch["x"]})


@pytest.mark.parametrize(("senders", "receivers"), [(1, 1), (2, 3), (3, 1)])
def test_generation_sees_the_weights_of_the_last_update_at_any_m_to_n(senders: int, receivers: int) -> None:
    flow = Workflow("w")
    sink, source = flow.worker(Sink, dp=receivers), flow.worker(Source2, dp=senders)
    source.train(sink.use(flow.source(Numbers())))
    flow.sync(source, sink)
    workers = execute(flow.build(), devices=3, iterations=3)
    for rank in range(receivers):
        assert workers["sink", rank].seen == [(0, 0.0), (1, 1.0), (2, 2.0)]
    for rank in range(senders):
        assert workers["source2", rank].sent == 3
        assert not workers["source2", rank].inline


@dataclass
class Parcel:
    bytes_too: bool

    def mapped(self) -> Parcel:
        return Parcel(False)

    def carried(self) -> Parcel:
        return self


class Parcels(Source2):
    def publish_weights(self, target, inline, slot=0):
        return Parcel(inline)


class Unpacks(Sink):
    def receive_weights(self, version, publications) -> None:
        self.version, self.a = version, 0.0
        self.got = [parcel.bytes_too for parcel in publications]


def test_the_bytes_themselves_are_sent_to_readers_on_another_host_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = {"unpacks-0": "a", "unpacks-1": "b", "parcels-0": "a", "parcels-1": "b"}
    monkeypatch.setattr("rlinf.m2flow.sync.this_host", lambda: hosts[threading.current_thread().name])
    flow = Workflow("w")
    sink, source = flow.worker(Unpacks, dp=2), flow.worker(Parcels, dp=2)
    source.train(sink.use(flow.source(Numbers())))
    flow.sync(source, sink)
    workers = execute(flow.build(), devices=2, iterations=2)
    assert workers["unpacks", 0].got == [False, True]
    assert workers["unpacks", 1].got == [True, False]


class Late(Source2):
    @stage(reads=("y",), updates=True, whole=True, starts=lambda cfg: cfg)
    def train(self, batch: Batch) -> None:
        self.w += 1


@pytest.mark.parametrize("first", [0, 1])
def test_a_stage_that_waits_updates_nothing_and_its_weights_are_sent_once_until_it_starts(first: int) -> None:
    flow = Workflow("w")
    sink, late = flow.worker(Sink), flow.worker(Late, 2)
    late.train(sink.use(flow.source(Numbers())))
    flow.sync(late, sink)
    reports: list[Report] = []
    workers = execute(flow.build(), devices=1, iterations=4 - first, first=first, reports=reports)
    assert workers["sink", 0].seen == [(0, 0.0), (0, 0.0), (0, 0.0), (1, 1.0)][first:]
    assert workers["late", 0].sent == 2
    told = [report.metrics["late.train"] for report in reports if report.group == "late"]
    assert [metrics["waits"].value for metrics in told if metrics] == [2, 1][first:]
    assert told[-2:] == [{}, {}]


class Short(Worker):
    @stage(reads=("x",), writes=("y",))
    def lose(self, batch: Batch) -> Batch:
        return Batch({"y": batch["x"][1:]})


class Silent(Worker):
    @stage(reads=("x",), writes=("y",))
    def say(self, batch: Batch) -> Batch:
        return Batch({"why": batch["x"]})


@pytest.mark.parametrize(
    ("cls", "name", "text"),
    [
        (Short, "lose", "got 6 rows and returned 5"),
        (Silent, "say", r"declares that it writes \['y'\]; it returned \['why'\]"),
    ],
)
def test_a_stage_that_breaks_its_declaration_is_named(cls: type[Worker], name: str, text: str) -> None:
    flow = Workflow("w")
    getattr(flow.worker(cls), name)(flow.source(Numbers()))
    with pytest.raises(WorkflowError, match=text):
        execute(flow.build(), devices=1)


def test_the_cursor_of_each_source_is_the_hosts_state() -> None:
    host = execute(doubling(1, 1), devices=1, iterations=2)[HOST, 0]
    assert host.state() == {"host.source0": {"at": 12}}
