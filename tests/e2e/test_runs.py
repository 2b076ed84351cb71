"""Whole runs inside a Ray session: what they give, and what they do when a part fails."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

import rlinf
from rlinf.runner import Outcome
from tests.e2e.command import SMALL, weights
from tests.e2e.conftest import WHOLE

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]
QUIET = ("logger.console=off", *SMALL)


def run(output: Path, *overrides: str) -> Outcome:
    return rlinf.run(rlinf.load_config([*QUIET, f"output_dir={output}", *overrides]))


@pytest.mark.usefixtures("ray_session")
def test_ppo_with_vllm_trains_evaluates_saves_and_exports_what_transformers_loads(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    outcome = run(
        tmp_path,
        "+workflow=ppo",
        "rollout.engine=vllm",
        "steps=3",
        "rollout.kv_cache_gib=0.1",
        "logger.tensorboard=true",
    )
    assert outcome.steps == 3
    assert outcome.before is not None
    assert outcome.after is not None
    assert outcome.checkpoint == tmp_path / "checkpoints" / "step-000003"
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "time/step" in line]
    assert [line["step"] for line in steps] == [1, 2, 3]
    for line in steps:
        assert line["actor/parity_mean"] < 1e-3
        assert line["rollout/tokens"] > 0
        assert line["actor/grad_norm"] > 0
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert {sample["weight_version"] for sample in samples} == {0, 1, 2}
    assert any((tmp_path / "tensorboard").iterdir())
    model = AutoModelForCausalLM.from_pretrained(outcome.export)
    ids = AutoTokenizer.from_pretrained(outcome.export)("1+1", return_tensors="pt").input_ids
    assert torch.isfinite(model(ids).logits).all()
    start = rlinf.load_config(["+workflow=ppo", "model=tiny"]).model
    from rlinf.models import resolve

    before = AutoModelForCausalLM.from_pretrained(resolve(start)).state_dict()
    assert any(not torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_the_reward_of_the_tiny_model_climbs(whole: Path) -> None:
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward/mean"] for line in lines if "reward/mean" in line]
    assert sum(rewards[-2:]) > sum(rewards[:2]) + 0.1


@pytest.mark.usefixtures("ray_session")
def test_two_runs_with_the_same_seed_agree_bit_for_bit(whole: Path, tmp_path: Path) -> None:
    run(tmp_path, *WHOLE)
    first, second = weights(whole), weights(tmp_path)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def assert_near(found: dict, expected: dict) -> None:
    """Equal but for the order of sums.

    Where a gradient is next to zero, Adam's normalised step follows its last bits, so a few elements may differ by
    up to a step (1e-3); nearly all must agree closely.
    """
    for name, tensor in expected.items():
        apart = (found[name] - tensor).abs()
        assert float(apart.max()) < 2e-3, name
        assert float((apart > 1e-5 + 1e-4 * tensor.abs()).float().mean()) < 0.01, name


@pytest.mark.usefixtures("ray_session")
def test_two_ranks_come_to_the_weights_of_one_and_take_over_its_checkpoint(tmp_path: Path) -> None:
    off = ("evaluation.before=false", "evaluation.after=false", "algorithm.kl_coef=0")
    arguments = ("+workflow=ppo", *off, "steps=3", "checkpoint.every=2")
    run(tmp_path / "one", *arguments)
    run(tmp_path / "two", *arguments, "plan=collocated", "cluster.devices_per_node=2")
    assert_near(weights(tmp_path / "two"), weights(tmp_path / "one"))
    # The second step's checkpoint of one rank goes on at tp=2.
    saved = tmp_path / "one" / "checkpoints" / "step-000002"
    wider = ("plan=collocated", "actor.tp=2", "critic.tp=2", "rollout.dp=1", "cluster.devices_per_node=2")
    assert run(tmp_path / "wide", *arguments, f"resume={saved}", *wider).steps == 3
    assert_near(weights(tmp_path / "wide"), weights(tmp_path / "one"))


FAILING = """
import os, time
import torch
from rlinf import Batch, Worker, Workflow, stage


class Numbers:
    writes = ("x",)
    def setup(self): pass
    def next_batch(self): return Batch({"row_id": torch.arange(4), "x": torch.ones(4)})
    def state(self): return {}
    def load_state(self, state): pass


class Victim(Worker):
    collective = True

    @stage(reads=("x",), writes=("y",))
    def step(self, batch):
        if self.ctx.rank == 1:
            if self.cfg == "raise":
                raise ValueError("the cause, on rank 1")
            os._exit(7)
        torch.distributed.all_reduce(torch.ones(1))
        return Batch({"y": batch["x"]})


class Waiting(Worker):
    @stage(reads=("y",), updates=True)
    def train(self, batch): pass


def flow(cfg):
    flow = Workflow("failing")
    victim = flow.worker(Victim, cfg.workflow.args["how"], dp=2)
    flow.worker(Waiting).train(victim.step(flow.source(Numbers())))
    return flow
"""


@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize(("how", "text"), [("raise", "ValueError: the cause, on rank 1"), ("die", "its process died")])
def test_the_first_failure_is_shown_not_what_followed_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, text: str, capfd: pytest.CaptureFixture
) -> None:
    (tmp_path / "failing_flow.py").write_text(FAILING)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(rlinf.RunFailed) as failed:
        run(
            tmp_path / "out",
            "workflow.target=failing_flow.flow",
            f"+workflow.args.how={how}",
            "plan=collocated",
            "cluster.devices_per_node=2",
            "logger.console=lines",
        )
    assert failed.value.first.group == "victim"
    assert failed.value.first.rank == 1
    assert text in failed.value.first.error
    assert "victim rank 1" in capfd.readouterr().err


MINE = '''
from rlinf import Workflow
from rlinf.data import Prompts
from rlinf.workers.reward import Reward
from rlinf.workers.rollout import Rollout
from rlinf import Worker, stage


class Count(Worker):
    """Counts what it sees; trains nothing."""

    uses_device = False

    @stage(reads=("rewards", "response"), whole=True)
    def look(self, batch):
        self.metrics.sum("seen", batch.n)


def best_of(cfg):
    flow = Workflow("best_of")
    prompts = flow.source(Prompts(cfg.data, cfg.model, "train", cfg.seed))
    samples = flow.worker(Rollout, cfg.rollout).generate(prompts, samples=cfg.workflow.args["n"])
    flow.worker(Count).look(flow.worker(Reward, cfg.reward).score(samples))
    return flow
'''


@pytest.mark.usefixtures("ray_session")
def test_a_workflow_of_a_users_own_file_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_flow.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    outcome = run(tmp_path / "out", "workflow.target=my_flow.best_of", "+workflow.args.n=3", "steps=2")
    assert outcome.export is None
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line["count/seen"] for line in lines] == [6, 6]
    assert os.path.exists(tmp_path / "out" / "logs" / "count-0.log")
