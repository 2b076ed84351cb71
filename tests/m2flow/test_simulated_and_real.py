"""What the simulator predicts is what real ranks do: stages of known times, under several plans, within 3%.

The stages sleep, so that their times are known and other work on the machine hardly matters. Where it does, a plan is
tried again: its best of three executions counts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf.batch import Batch
from rlinf.cluster import Cluster
from rlinf.config import ClusterConfig
from rlinf.fleet import Fleet
from rlinf.m2flow.compiler import compile_plan
from rlinf.m2flow.graph import TRAIN, Graph, Workflow
from rlinf.m2flow.plan import Piped, Plan, Shared, Stage
from rlinf.m2flow.simulate import Cost, Costs, simulate
from rlinf.worker import Worker, stage

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

ROWS, FIXED, ROW = 8, 0.05, {"make": 0.15, "score": 0.2, "rate": 0.1, "learn": 0.1}


class Numbers:
    writes = ("x",)

    def setup(self) -> None: ...

    def next_batch(self) -> Batch:
        return Batch({"row_id": torch.arange(ROWS), "x": torch.zeros(ROWS)})

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: dict[str, Any]) -> None: ...


class Maker(Worker):
    @stage(reads=("x",), writes=("y",))
    def make(self, batch: Batch) -> Iterator[Batch]:
        time.sleep(FIXED)
        for row in range(batch.n):
            time.sleep(ROW["make"])
            yield Batch({"row_id": batch["row_id"][row : row + 1], "y": batch["x"][row : row + 1]})


class Scorer(Worker):
    uses_device = False

    @stage(reads=("y",), writes=("score",))
    def score(self, batch: Batch) -> Batch:
        time.sleep(FIXED + ROW["score"] * batch.n)
        return Batch({"score": batch["y"]})


class Rater(Worker):
    @stage(reads=("y",), writes=("rating",))
    def rate(self, batch: Batch) -> Batch:
        time.sleep(FIXED + ROW["rate"] * batch.n)
        return Batch({"rating": batch["y"]})


class Learner(Worker):
    @stage(reads=("score", "rating"), updates=True, whole=True)
    def learn(self, batch: Batch) -> None:
        time.sleep(FIXED + ROW["learn"] * batch.n)


def graph_of() -> Graph:
    flow = Workflow("timed")
    maker, scorer, rater, learner = (flow.worker(cls) for cls in (Maker, Scorer, Rater, Learner))
    learner.learn(rater.rate(scorer.score(maker.make(flow.source(Numbers())))))
    return flow.build()


def on(worker: str, *devices: int) -> Stage:
    return Stage(worker, devices, dp=max(len(devices), 1))


PLANS: dict[str, Plan] = {
    "in turns": Shared((on("maker", 0, 1), on("scorer"), on("rater", 0, 1), on("learner", 0, 1))),
    "scored beside": Piped((Shared((on("maker", 0, 1), on("rater", 0, 1), on("learner", 0, 1))), on("scorer")), 2),
    "apart": Piped((on("maker", 0), Shared((on("rater", 1), on("learner", 1))), on("scorer")), 1),
    "hybrid": Shared((Piped((on("maker", 0), on("rater", 1), on("scorer")), 2), on("learner", 0, 1))),
}
# By hand, in seconds. A row takes 0.15 to make, 0.2 to score, 0.1 to rate, 0.1 to learn from, a call 0.05 more.
EXPECTED = {
    # 4 rows of each rank: 0.65; 8 scored: 1.65, and meanwhile 4 rated on each; 4 learned from: 0.45
    "in turns": 0.65 + 1.65 + 0.45,
    # two ranks make two rows at 0.2, 0.35, 0.5, 0.65, and pairs are scored in 0.45 each, from the first one on;
    # meanwhile all is rated
    "scored beside": 0.2 + 4 * 0.45 + 0.45,
    # rows come at 0.2 + 0.15 i and are scored in 0.25 each; all are learned from on one device
    "apart": 0.2 + 8 * 0.25 + 0.85,
    # pairs come at 0.35 + 0.3 i and are scored in 0.45 each
    "hybrid": 0.35 + 4 * 0.45 + 0.45,
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        found = Cluster.connect(ClusterConfig(devices_per_node=2))
        found.hold()
        yield found
    finally:
        ray.shutdown()


@pytest.mark.parametrize("name", PLANS)
def test_a_real_execution_takes_what_the_simulator_says(name: str, cluster: Cluster, tmp_path: Path) -> None:
    graph = graph_of()
    compiled = compile_plan(graph, PLANS[name])
    costs = Costs(
        nodes={node.name: Cost(FIXED, ROW[node.spec.name]) for node in graph.nodes if node.spec.name in ROW},
        rows={"host.source0": ROWS},
    )
    predicted = max(span.end for own in simulate(graph, compiled, TRAIN, costs).values() for span in own)
    assert predicted == pytest.approx(EXPECTED[name])

    fleet = Fleet(cluster, graph, compiled)
    fleet.launch(seed=0, deterministic=True, output_dir=tmp_path)
    fleet.setup()
    fleet.execute(TRAIN, 0)  # the first one connects
    measured = []
    for step in range(1, 4):
        spans = [span for report in fleet.execute(TRAIN, step) for span in report.spans]
        measured.append(max(span.end for span in spans) - min(span.start for span in spans))
        if abs(measured[-1] / predicted - 1) < 0.03:
            break
    for group in fleet.groups.values():
        import ray

        for rank in group.ranks:
            ray.kill(rank)
    assert min(abs(seconds / predicted - 1) for seconds in measured) < 0.03, measured
