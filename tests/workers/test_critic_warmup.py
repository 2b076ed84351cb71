"""While the critic warms up, the actor stands still: its weights, its optimiser, its learning rate's clock."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from rlinf.batch import Batch
from rlinf.config import ActorConfig, CriticConfig, ModelConfig, OptimizerConfig
from rlinf.m2flow.executor import Report
from rlinf.m2flow.graph import Workflow
from rlinf.worker import RankContext
from rlinf.workers.actor import Actor
from rlinf.workers.critic import Critic
from tests.m2flow.test_executor import execute
from tests.models.small import samples, write_model
from tests.workers.ranks import ALGORITHM

PROMPTS, RESPONSES = [5, 3, 8], [4, 6, 2]
WARMUP, ITERATIONS = 2, 5
LR = 0.01


class Samples:
    """The same samples in each iteration."""

    def __init__(self) -> None:
        self.batch = samples(PROMPTS, RESPONSES)

    @property
    def writes(self) -> tuple[str, ...]:
        return tuple(name for name in self.batch if name != "row_id")

    def setup(self) -> None: ...

    def next_batch(self) -> Batch:
        return self.batch

    def state(self) -> dict:
        return {}

    def load_state(self, state: dict) -> None: ...


class Observed(Actor):
    """Is set up where it is made, and remembers the state that it began with."""

    def __init__(self, cfg: ActorConfig, ctx: RankContext) -> None:
        super().__init__(cfg, ctx)
        self.setup()
        self.start = copy.deepcopy(self.state())


class Ready(Critic):
    def __init__(self, cfg: CriticConfig, ctx: RankContext) -> None:
        super().__init__(cfg, ctx)
        self.setup()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return ModelConfig(name="small", path=str(write_model(tmp_path_factory.mktemp("warmup") / "model")))


def run(model: ModelConfig, warmup: int, iterations: int) -> tuple[Observed, list[Report]]:
    algorithm = replace(ALGORITHM, critic_warmup=warmup, mini_batch_size=0, epochs=1)
    optimizer = OptimizerConfig(lr=LR, schedule="linear")
    actor = ActorConfig(model, algorithm, replace(optimizer, total_steps=ITERATIONS - WARMUP))
    critic = CriticConfig(model, algorithm, replace(optimizer, total_steps=ITERATIONS))
    flow = Workflow("warmup")
    rows = flow.source(Samples())
    flow.worker(Observed, actor, name="actor").train(rows)
    flow.worker(Ready, critic, name="critic").train(rows)
    reports: list[Report] = []
    workers = execute(flow.build(), devices=1, iterations=iterations, reports=reports)
    return workers["actor", 0], reports


def rates(reports: list[Report], node: str) -> list[float | None]:
    told = [report.metrics[node] for report in reports if node in report.metrics]
    return [metrics["lr"].value if "lr" in metrics else None for metrics in told]


def assert_equal(found: dict, expected: dict) -> None:
    for part in ("model", "optimizer"):
        torch.testing.assert_close(found[part], expected[part], rtol=0, atol=0)
    assert [found[name] for name in ("version", "steps")] == [expected[name] for name in ("version", "steps")]


def test_both_learning_rates_by_hand_the_actors_begins_at_its_peak_after_the_warm_up(model: ModelConfig) -> None:
    _, reports = run(model, WARMUP, ITERATIONS)
    assert rates(reports, "critic.train") == pytest.approx([LR, LR * 0.8, LR * 0.6, LR * 0.4, LR * 0.2])
    actor = rates(reports, "actor.train")
    assert actor[:WARMUP] == [None, None]
    assert actor[WARMUP:] == pytest.approx([LR, LR * 2 / 3, LR / 3])


def test_nothing_of_the_actor_changes_in_the_warm_up_and_then_it_learns_as_one_that_never_waited(
    model: ModelConfig,
) -> None:
    waited, _ = run(model, WARMUP, WARMUP)
    found, start = waited.state(), waited.start
    assert (found["version"], found["steps"]) == (0, 0)
    assert_equal(found, start)
    learned, _ = run(model, WARMUP, ITERATIONS)
    straight, _ = run(model, 0, ITERATIONS - WARMUP)
    assert_equal(learned.state(), straight.state())
    assert not torch.equal(learned.state()["model"]["lm_head.weight"], start["model"]["lm_head.weight"])
