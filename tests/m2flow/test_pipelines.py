"""Plans that pipe rows and run ahead, over threads: what is made does not depend on the plan."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch

from rlinf.batch import Batch
from rlinf.m2flow.executor import Report
from rlinf.m2flow.graph import Graph, Workflow
from rlinf.m2flow.plan import Piped, Plan, Shared, Stage
from rlinf.m2flow.stage import StageSpec, Unit
from rlinf.m2flow.timeline import Doing
from rlinf.worker import RankContext, Worker, stage
from tests.m2flow.test_executor import Numbers, execute


class Maker(Worker):
    """Four rows of each, with the weights that it has."""

    def __init__(self, cfg: Any, ctx: RankContext) -> None:
        super().__init__(cfg, ctx)
        self.w = self.version = -1

    def receive_weights(self, version, publications) -> None:
        self.version, (self.w,) = version, set(publications)

    @stage(
        reads=("x",),
        writes=("y", "w", "group_id"),
        unit=Unit.GROUP,
        expands=lambda cfg, options: 4,
    )
    def make(self, batch: Batch) -> Iterator[Batch]:
        for i in torch.randperm(batch.n).tolist():  # rows finish in any order
            row = int(batch["row_id"][i])
            yield Batch(
                {
                    "row_id": torch.arange(row * 4, row * 4 + 4),
                    "group_id": torch.full((4,), row),
                    "parent": torch.full((4,), i),
                    "y": batch["x"][i] + torch.arange(4).double() / 8,
                    "w": torch.full((4,), float(self.w)),
                }
            )


class Scores(Worker):
    def __init__(self, cfg: Any, ctx: RankContext) -> None:
        super().__init__(cfg, ctx)
        self.calls: list[int] = []

    @stage(reads=("y",), writes=("z",))
    def score(self, batch: Batch) -> Batch:
        self.calls.append(batch.n)
        return Batch({"z": batch["y"] * 3})


class Relative:
    __stage__ = StageSpec("relative", reads=("z",), writes=("a",), unit=Unit.GROUP)

    def __call__(self, batch: Batch, metrics: Any) -> Batch:
        group, counts = torch.unique(batch["group_id"], return_inverse=True, return_counts=True)[1:]
        assert (counts == 4).all()  # groups stay whole
        means = torch.zeros(len(counts), dtype=torch.float64).index_add(0, group, batch["z"]) / 4
        return Batch({"a": batch["z"] - means[group]})


class Learner(Worker):
    """Two of its stages take rows as they come."""

    def __init__(self, cfg: Any, ctx: RankContext) -> None:
        super().__init__(cfg, ctx)
        self.w = 0
        self.seen: list[list[tuple[int, float, float, float]]] = []
        self.pieces: list[int] = []

    @stage(reads=("y",), writes=("v",))
    def values(self, batch: Batch) -> Batch:
        return Batch({"v": batch["y"] * 0})

    @stage(reads=("y", "a", "w", "v"), updates=True, streams=True)
    def train(self, rows: Batch | Iterable[Batch]) -> None:
        self.seen.append([])
        for batch in [rows] if isinstance(rows, Batch) else rows:
            self.pieces.append(batch.n)
            columns = (batch[name].tolist() for name in ("row_id", "y", "a", "w"))
            self.seen[-1] += zip(*columns, strict=True)
        self.w += 1

    def publish_weights(self, target, inline, slot=0):
        return self.w


def graph_of(maker: int = 1, scores: int = 1, learner: int = 1, tp: int = 1) -> Graph:
    flow = Workflow("w")
    make, score = flow.worker(Maker, dp=maker), flow.worker(Scores, dp=scores, tp=tp)
    learn = flow.worker(Learner, dp=learner)
    samples = score.score(make.make(flow.source(Numbers())))
    learn.train(learn.values(flow.map(Relative(), samples)))
    flow.sync(learn, make)
    return flow.build()


def placed(graph: Graph, name: str, first: int) -> Stage:
    spec = graph.workers[name]
    return Stage(name, tuple(range(first, first + spec.dp * spec.tp)), spec.dp, spec.tp)


def plans(graph: Graph, m: int) -> dict[str, Plan]:
    maker, scores, learner = (placed(graph, name, 0) for name in ("maker", "scores", "learner"))
    far, further = placed(graph, "scores", 8), placed(graph, "learner", 16)
    beside = placed(graph, "learner", 8)
    return {
        "collocated": Shared((maker, scores, learner)),
        "apart": Piped((maker, far, further), m),
        "disaggregated": Piped((maker, Shared((far, beside))), m),
        "hybrid": Shared((Piped((maker, far), m), learner)),
    }


def rows_of(workers: dict[tuple[str, int], Worker], ranks: int) -> list[list[tuple[int, float, float, float]]]:
    """Rows of each iteration, of all ranks."""
    seen = [workers["learner", rank].seen for rank in range(ranks)]
    return [sorted(row for rank in each for row in rank) for each in zip(*seen, strict=True)]


def by_hand(iterations: int, staleness: int = 0) -> list[list[tuple[int, float, float, float]]]:
    found = []
    for i in range(iterations):
        rows = []
        for x in range(i * 6, i * 6 + 6):
            for j in range(4):
                y = x + j / 8
                rows.append((x * 4 + j, y, 3 * y - 3 * (x + 1.5 / 8), float(max(i - staleness, 0))))
        found.append(rows)
    return found


@pytest.mark.parametrize("kind", ["collocated", "apart", "disaggregated", "hybrid"])
@pytest.mark.parametrize("m", [1, 2, 4, 0])
@pytest.mark.parametrize(("maker", "scores", "learner", "tp"), [(1, 1, 1, 1), (2, 1, 2, 1), (1, 3, 1, 2), (4, 2, 2, 1)])
def test_a_plan_changes_where_and_when_never_what(
    kind: str, m: int, maker: int, scores: int, learner: int, tp: int
) -> None:
    graph = graph_of(maker, scores, learner, tp)
    workers = execute(graph, 0, iterations=3, plan=plans(graph, m)[kind])
    for found, expected in zip(rows_of(workers, learner), by_hand(3), strict=True):
        assert [row[0] for row in found] == [row[0] for row in expected]
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected))


@pytest.mark.parametrize("m", [1, 4, 5, 8, 24, 100])
def test_stages_on_disjoint_devices_take_as_many_rows_as_the_granularity_says(m: int) -> None:
    graph = graph_of()
    workers = execute(graph, 0, plan=plans(graph, m)["apart"])
    whole, rest = divmod(24, m)
    assert sorted(workers["scores", 0].calls) == sorted([m] * whole + [rest] * bool(rest))
    # The learner's come in order, and groups were whole on their way.
    assert workers["learner", 0].pieces == [m] * whole + [rest] * bool(rest)
    assert [row[0] for row in workers["learner", 0].seen[0]] == list(range(24))


def test_on_shared_devices_a_stage_takes_all_rows_at_once() -> None:
    graph = graph_of()
    workers = execute(graph, 0, plan=plans(graph, 4)["collocated"])
    assert workers["scores", 0].calls == [24]
    assert execute(graph, 0, plan=plans(graph, 4)["disaggregated"])["scores", 0].calls == [4] * 6


@pytest.mark.parametrize("staleness", [1, 2, 3])
@pytest.mark.parametrize("kind", ["collocated", "apart", "disaggregated"])
def test_samples_are_made_by_weights_that_are_exactly_as_old_as_asked(kind: str, staleness: int) -> None:
    graph = graph_of(2, 1, 2)
    workers = execute(graph, 0, iterations=7, plan=plans(graph, 4)[kind], staleness=staleness)
    versions = [[row[3] for row in rows] for rows in rows_of(workers, 2)]
    assert versions == [[row[3] for row in rows] for rows in by_hand(7, staleness)]


def test_what_runs_ahead_ends_on_the_weights_that_are_there_when_it_stops() -> None:
    graph = graph_of()
    workers = execute(graph, 0, iterations=2, plan=plans(graph, 4)["apart"], staleness=3)
    assert [rows[0][3] for rows in rows_of(workers, 1)] == [0.0, 0.0]


class Gate(Scores):
    """Its first call ends when the maker has gone on: only where both run at once."""

    went_on = threading.Event()

    @stage(reads=("y",), writes=("z",))
    def score(self, batch: Batch) -> Batch:
        assert self.went_on.wait(10)
        return super().score(batch)


class Slow(Maker):
    @stage(reads=("x",), writes=("y", "w", "group_id"), unit=Unit.GROUP, expands=lambda cfg, options: 4)
    def make(self, batch: Batch) -> Iterator[Batch]:
        for number, piece in enumerate(super().make(batch)):
            if number == 2:
                Gate.went_on.set()  # by now the first rows are with the gate
            yield piece


def test_a_consumer_works_while_its_producer_does() -> None:
    Gate.went_on.clear()
    flow = Workflow("w")
    make, score, learn = flow.worker(Slow), flow.worker(Gate), flow.worker(Learner)
    learn.train(learn.values(flow.map(Relative(), score.score(make.make(flow.source(Numbers()))))))
    flow.sync(learn, make)
    graph = flow.build()
    plan = Piped((Stage("slow", (0,)), Stage("gate", (1,)), Stage("learner", (2,))), 4)
    reports: list[Report] = []
    execute(graph, 0, plan=plan, reports=reports)
    (gate,) = (report for report in reports if report.group == "gate")
    runs = [span for span in gate.spans if span.doing is Doing.RUN]
    assert [span.rows for span in runs] == [4] * 6
    assert all(a.end <= b.start for a, b in zip(gate.spans, gate.spans[1:], strict=False))
    assert time.time() >= runs[-1].end


class InFlight(Maker):
    """Waits for the update of the iteration before to be on its way, after its first rows."""

    @stage(reads=("x",), writes=("y", "w", "group_id"), unit=Unit.GROUP, expands=lambda cfg, options: 4)
    def make(self, batch: Batch) -> Iterator[Batch]:
        iteration = int(batch["row_id"][0]) // 6
        for number, piece in enumerate(super().make(batch)):
            if number == 3 and iteration == 1:
                assert Published.sent.wait(10)
            yield piece.plus(w=torch.full((4,), float(self.w)))


class Published(Learner):
    sent = threading.Event()

    @stage(reads=("y", "a", "w", "v"), updates=True, streams=True)
    def train(self, rows: Batch | Iterable[Batch]) -> None:
        super().train(rows)

    def publish_weights(self, target, inline, slot=0):
        if self.w == 1:
            threading.Timer(0.2, self.sent.set).start()  # by then it is with the maker
        return self.w


def test_in_flight_rows_that_come_after_newer_weights_are_made_with_them() -> None:
    Published.sent.clear()
    flow = Workflow("w")
    make, score = flow.worker(InFlight), flow.worker(Scores)
    learn = flow.worker(Published)
    learn.train(learn.values(flow.map(Relative(), score.score(make.make(flow.source(Numbers()))))))
    flow.sync(learn, make)
    plan = Piped((Stage("inflight", (0,)), Stage("scores", (1,)), Stage("published", (2,))), 4)
    workers = execute(flow.build(), 0, iterations=4, plan=plan, staleness=1, in_flight=True)
    seen = workers["published", 0].seen
    assert [sorted({row[3] for row in rows}) for rows in seen][:2] == [[0.0], [0.0, 1.0]]
    for i, rows in enumerate(seen):
        assert all(max(i - 1, 0) <= row[3] <= i for row in rows)
        assert sorted(row[0] for row in rows) == list(range(i * 24, i * 24 + 24))
