"""A workflow of four groups that take known times, one of which becomes five times as slow in the middle of a run."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from rlinf.batch import Batch
from rlinf.m2flow.graph import Graph, Workflow
from rlinf.scheduler.profile import Identity, Kind, Point, Profile, StageProfile
from rlinf.worker import Worker, stage

ROWS = 8
ROW = {"maker.make": 0.04, "judge.judge": 0.04, "rater.rate": 0.02, "learner.learn": 0.02}  # seconds
TIMES = 5  # as slow


@dataclass(frozen=True)
class Settings:
    """
    Attributes:
        slow_from: iteration from which on the rater is slow; 0: never.
    """

    slow_from: int = 0


class Numbers:
    """So many rows an iteration, numbered on and on."""

    writes = ("x",)

    def __init__(self, rows: int = ROWS) -> None:
        self.rows, self.made = rows, 0

    def setup(self) -> None: ...

    def next_batch(self) -> Batch:
        rows = torch.arange(self.made, self.made + self.rows)
        self.made += self.rows
        return Batch({"row_id": rows, "x": rows.clone()})

    def state(self) -> dict[str, Any]:
        return {"made": self.made}

    def load_state(self, state: dict[str, Any]) -> None:
        self.made = int(state["made"])


class Maker(Worker):
    @stage(reads=("x",), writes=("y",))
    def make(self, batch: Batch) -> Iterator[Batch]:
        for row in range(batch.n):
            time.sleep(ROW["maker.make"])
            yield Batch({"row_id": batch["row_id"][row : row + 1], "y": 2 * batch["x"][row : row + 1]})


class Judge(Worker):
    @stage(reads=("y",), writes=("verdict",))
    def judge(self, batch: Batch) -> Batch:
        time.sleep(ROW["judge.judge"] * batch.n)
        return Batch({"verdict": batch["y"] + 2})


class Rater(Worker):
    cfg: Settings

    @stage(reads=("x", "y"), writes=("rating",))
    def rate(self, batch: Batch) -> Batch:
        iteration = int(batch["x"][0]) // ROWS
        slow = self.cfg.slow_from and iteration >= self.cfg.slow_from
        time.sleep((TIMES if slow else 1) * ROW["rater.rate"] * batch.n)
        return Batch({"rating": batch["y"] + 1})


class Learner(Worker):
    @stage(reads=("rating", "verdict"), updates=True, streams=True)
    def learn(self, rows: Batch | Iterable[Batch]) -> None:
        for batch in [rows] if isinstance(rows, Batch) else rows:
            time.sleep(ROW["learner.learn"] * batch.n)
            self.metrics.sum("ratings", float(batch["rating"].sum()))


def graph_of(slow_from: int) -> Graph:
    flow = Workflow("slowing")
    maker, judge = flow.worker(Maker), flow.worker(Judge)
    rater, learner = flow.worker(Rater, Settings(slow_from)), flow.worker(Learner)
    learner.learn(judge.judge(rater.rate(maker.make(flow.source(Numbers())))))
    return flow.build()


def known() -> Profile:
    """What the groups take before one becomes slow."""
    stages = {
        name: StageProfile(points=tuple(Point(kind="cpu", rows=n, seconds=n * row) for n in (1, ROWS)))
        for name, row in ROW.items()
    }
    return Profile(
        identity=Identity(workflow="slowing", model="none"),
        kinds={"cpu": Kind()},
        rows={"host.source0": ROWS},
        stages=stages,
    )
