"""A workflow whose stages take known times, and known memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from rlinf.batch import Batch, Ragged
from rlinf.m2flow.graph import Graph, Workflow
from rlinf.worker import Worker, stage
from tests.e2e.slowing import Numbers

ROWS, SAMPLES = 4, 2
FIXED, ROW = 0.02, {"make": 0.04, "score": 0.01, "rate": 0.03, "learn": 0.02}  # seconds of a call, and of a row
FIRST = 1.5  # seconds more of a worker's first call
SEND, RECEIVE, OFF, ON = 0.05, 0.03, 0.04, 0.06
HELD, MEMORY = 1 << 20, 1 << 26  # bytes that a rater holds, and that it holds beyond them while it is at work


@dataclass(frozen=True)
class Settings:
    """Of the maker."""

    max_num_seqs: int = 3
    fails: bool = False


class Slow(Worker):
    """The first call of each stage takes longer."""

    def setup(self) -> None:
        self.called: set[str] = set()

    def work(self, what: str, rows: int) -> None:
        time.sleep(FIXED + ROW[what] * rows + (0.0 if what in self.called else FIRST))
        self.called.add(what)


class Maker(Slow):
    @stage(reads=("x",), writes=("tokens",), expands=lambda cfg, options: SAMPLES)
    def make(self, batch: Batch) -> Iterator[Batch]:
        if self.cfg.fails:
            raise ArithmeticError("there is nothing to make")
        self.work("make", batch.n)
        for place, row in enumerate(batch["row_id"].tolist()):
            yield Batch(
                {
                    "row_id": torch.arange(row * SAMPLES, (row + 1) * SAMPLES),
                    "group_id": torch.full((SAMPLES,), row),
                    "parent": torch.full((SAMPLES,), place),
                    "tokens": Ragged.of([[7] * (2 + 4 * sample) for sample in range(SAMPLES)], torch.int64),
                }
            )

    def receive_weights(self, version: int, publications: Any) -> None:
        time.sleep(RECEIVE)


class Scorer(Slow):
    uses_device = False

    @stage(reads=("tokens",), writes=("score",))
    def score(self, batch: Batch) -> Batch:
        self.work("score", batch.n)
        return Batch({"score": torch.ones(batch.n, dtype=torch.float64)})


class Rater(Slow):
    @stage(reads=("tokens",), writes=("rating",))
    def rate(self, batch: Batch) -> Batch:
        held = torch.ones(MEMORY // 4)
        self.work("rate", batch.n)
        return Batch({"rating": held[: batch.n].clone()})

    def nbytes(self) -> int:
        return HELD

    def offload(self) -> None:
        time.sleep(OFF)

    def onload(self) -> None:
        time.sleep(ON)


class Learner(Slow):
    @stage(reads=("score", "rating"), updates=True, streams=True)
    def learn(self, rows: Any) -> None:
        for batch in [rows] if isinstance(rows, Batch) else rows:
            self.work("learn", batch.n)

    def publish_weights(self, target: str, inline: bool, slot: int = 0) -> Any:
        time.sleep(SEND)
        return "weights"


def graph_of(fails: bool = False) -> Graph:
    flow = Workflow("timed")
    maker = flow.worker(Maker, Settings(fails=fails), dp=0)
    scorer = flow.worker(Scorer)
    rater, learner = flow.worker(Rater, dp=0), flow.worker(Learner, dp=0)
    learner.learn(rater.rate(scorer.score(maker.make(flow.source(Numbers(ROWS))))))
    flow.sync(learner, maker)
    return flow.build()
