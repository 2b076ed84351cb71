"""A plan changes where and when, never what: PPO and GRPO with real workers, over threads, under every kind of plan."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf.channel.mailbox import Mailbox
from rlinf.compose import compose
from rlinf.config import TrainConfig
from rlinf.m2flow.compiler import compile_plan
from rlinf.m2flow.executor import Executor, Turn
from rlinf.m2flow.graph import HOST, TRAIN
from rlinf.m2flow.host import Host
from rlinf.m2flow.plan import Piped, Plan, Shared, Stage
from rlinf.preflight import preflight
from rlinf.train import load_graph
from rlinf.worker import RankContext, Worker
from tests.m2flow.test_executor import Local

OVERRIDES = (
    "model=tiny",
    "data=digits",
    "rollout.engine=hf",
    "data.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
    "rollout.max_new_tokens=8",
    "algorithm.kl_coef=0.01",
    "actor.optimizer.lr=1e-3",
    # AdamW divides by the root of the second moment plus eps: where a gradient is all rounding, a smaller eps turns the
    # order of a sum into a whole step.
    "actor.optimizer.eps=1e-6",
    "critic.optimizer.eps=1e-6",
    "logger.samples=16",
)


@dataclass
class Made:
    """What a run made: samples and scores of each step, metrics of each step, and the weights at the end."""

    samples: list[list[dict[str, Any]]] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    weights: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)


def config(workflow: str, out: Path, *overrides: str) -> TrainConfig:
    return compose([f"+workflow={workflow}", *OVERRIDES, f"output_dir={out}", *overrides])


def plan_of(kind: str, workers: tuple[str, ...], m: int) -> Plan:
    """A plan by hand; ``apart`` gives each group a device of its own."""
    every = [name for name in workers if name != "reward"]
    reward = Stage("reward", ())
    on = {name: Stage(name, (i,), spans=name == "rollout") for i, name in enumerate(every)}
    first = {name: replace(stage, devices=(0,)) for name, stage in on.items()}
    rest = [replace(on[name], devices=(1,)) for name in every if name != "rollout"]
    scores = [stage for stage in rest if stage.worker != "actor"]
    match kind:
        case "collocated":
            return Shared((*first.values(), reward))
        case "swapped":
            return Shared((*first.values(), reward), swap=True)
        case "apart":
            return Piped((*on.values(), reward), m)
        case "disaggregated":
            return Piped((first["rollout"], Shared(tuple(rest)), reward), m)
        case "hybrid":
            return Shared((Piped((first["rollout"], Shared(tuple(scores))), m), first["actor"], reward))
    raise AssertionError(kind)


def run(cfg: TrainConfig, kind: str, m: int = 0, staleness: int = 0, steps: int = 2) -> Made:
    """The workflow on real workers, one thread each."""
    ready = preflight(cfg, load_graph)
    graph = ready.graph
    compiled = compile_plan(graph, plan_of(kind, tuple(graph.workers), m), staleness)
    wire = Local(compiled.tickets)
    executors = []
    for group in compiled.layout:
        ctx = RankContext(group, output_dir=ready.output_dir, seed=cfg.seed)
        worker = Host(graph, ctx) if group == HOST else graph.workers[group].cls(graph.workers[group].cfg, ctx)
        worker.setup()
        wire.boxes[group, 0] = Mailbox()
        executors.append(Executor(graph, compiled, worker, wire.boxes[group, 0], wire))
    made, failures = Made(), []

    def loop(executor: Executor, step: int) -> None:
        try:
            report = executor.run(Turn(TRAIN, step, step, 0 if staleness else step, steps if staleness else step))
            if report.rows:
                made.samples.append(report.rows)
            found = {f"{node}/{name}": m.value for node, ms in report.metrics.items() for name, m in ms.items()}
            metrics[step].update(found)
        except BaseException as error:
            failures.append(error)
            for box in wire.boxes.values():
                box.cancel()

    metrics: list[dict[str, float]] = [{} for _ in range(steps)]
    try:
        for step in range(steps):
            wire.begin(TRAIN, step)
            threads = [threading.Thread(target=loop, args=(executor, step)) for executor in executors]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            if failures:
                raise failures[0]
        made.metrics = [{k: v for k, v in sorted(step.items()) if "per_second" not in k} for step in metrics]
        for executor in executors:
            worker: Worker = executor.worker
            if worker.ctx.group in ("actor", "critic"):
                worker.onload()
                state = worker.state()["model"]
                made.weights[worker.ctx.group] = {name: tensor.clone() for name, tensor in state.items()}
    finally:
        for executor in executors:
            executor.worker.teardown()
    return made


def check_same(found: Made, expected: Made) -> None:
    for ours, theirs in zip(found.samples, expected.samples, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a == b
    for ours, theirs in zip(found.metrics, expected.metrics, strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours:
            if "parity" not in name:  # nothing but rounding
                # A variance that is explained is a small difference of large sums.
                bound = 1e-3 if "explained" in name else 1e-5
                assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=bound, nan_ok=True), name
    for role, tensors in expected.weights.items():
        ours = torch.cat([found.weights[role][name].flatten() for name in tensors])
        theirs = torch.cat([tensor.flatten() for tensor in tensors.values()])
        assert (ours - theirs).norm() <= 1e-6 * theirs.norm(), role


@pytest.fixture(scope="module", params=["ppo", "grpo"])
def workflow(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Made]:
    name = request.param
    made = run(config(name, tmp_path_factory.mktemp(name)), "collocated")
    changed = [ours != theirs for ours, theirs in zip(made.samples[0], made.samples[1], strict=True)]
    assert all(changed)  # it generates, and scores differ: what is compared is not nothing
    assert len({row["reward"] for rows in made.samples for row in rows}) > 1
    return name, made


@pytest.mark.parametrize("m", [1, 2, 4, 0])
@pytest.mark.parametrize("kind", ["apart", "disaggregated", "hybrid"])
def test_samples_scores_losses_and_weights_do_not_depend_on_the_plan(
    workflow: tuple[str, Made], tmp_path: Path, kind: str, m: int
) -> None:
    name, expected = workflow
    check_same(run(config(name, tmp_path), kind, m), expected)


def test_swapping_changes_nothing(workflow: tuple[str, Made], tmp_path: Path) -> None:
    name, expected = workflow
    found = run(config(name, tmp_path), "swapped")
    check_same(found, expected)
    assert found.weights.keys() == expected.weights.keys()


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("kind", ["disaggregated", "hybrid"])
def test_the_same_plan_gives_the_same_bits(tmp_path: Path, kind: str, staleness: int) -> None:
    first, second = (run(config("grpo", tmp_path / part), kind, 4, staleness) for part in ("a", "b"))
    assert first.samples == second.samples
    assert repr(first.metrics) == repr(second.metrics)
    for name, tensor in first.weights["actor"].items():
        assert torch.equal(tensor, second.weights["actor"][name])


def test_samples_carry_the_version_that_made_them(tmp_path: Path) -> None:
    versions = [
        {row["weight_version"] for row in rows}
        for rows in run(config("grpo", tmp_path), "disaggregated", 4, staleness=1, steps=3).samples
    ]
    assert versions == [{0}, {0}, {1}]
