"""PPO on Ray under the plans that ship: where and when differ, what is made does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import rlinf
from rlinf.m2flow.plan import Piped, Shared, from_dict, meeting
from tests.e2e.command import SMALL, weights

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]
SAME = (
    *SMALL,
    "+workflow=ppo",
    "logger.console=off",
    "steps=2",
    "data.prompts_per_step=4",
    "algorithm.kl_coef=0.01",
    "evaluation.before=false",
    "evaluation.after=false",
    "logger.samples=16",
    # A smaller eps turns the order of a sum, where a gradient is all rounding, into a whole step.
    "actor.optimizer.eps=1e-6",
    "critic.optimizer.eps=1e-6",
)


def run(output: Path, *overrides: str) -> Path:
    rlinf.run(rlinf.load_config([*SAME, f"output_dir={output}", *overrides]))
    return output


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def one_device(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("plans") / "collocated")


@pytest.mark.parametrize("kind", ["collocated", "disaggregated", "hybrid"])
def test_two_devices_under_another_plan_make_what_one_makes(one_device: Path, tmp_path: Path, kind: str) -> None:
    how = ("plan.swap=always",) if kind == "collocated" else ("plan.granularity=4",)
    out = run(tmp_path / kind, f"plan={kind}", *how, "cluster.devices_per_node=2")
    plan = from_dict(yaml.safe_load((out / "plan.yaml").read_text()))
    assert isinstance(meeting(plan, "rollout", "critic"), Shared if kind == "collocated" else Piped)
    assert isinstance(meeting(plan, "rollout", "actor"), Piped if kind == "disaggregated" else Shared)
    if isinstance(plan, Shared):
        assert plan.swap == (kind == "collocated")
    samples, expected = lines(out / "samples.jsonl"), lines(one_device / "samples.jsonl")
    assert len({sample["reward"] for sample in expected}) > 1
    assert samples == expected
    for found, wanted in zip(lines(out / "metrics.jsonl"), lines(one_device / "metrics.jsonl"), strict=True):
        for name in (
            "actor/policy_loss",
            "actor/kl_old",
            "critic/value_loss",
            "gae/kl",
            "reward/mean",
            "actor/entropy",
        ):
            if name in wanted:
                assert found[name] == pytest.approx(wanted[name], rel=1e-5, abs=1e-6), name
        assert {"actor/policy_loss", "critic/value_loss", "reward/mean"} <= wanted.keys()
    ours, theirs = weights(out), weights(one_device)
    assert ours.keys() == theirs.keys()
    gap = torch.cat([(ours[name] - theirs[name]).flatten() for name in theirs]).norm()
    assert gap <= 1e-6 * torch.cat([tensor.flatten() for tensor in theirs.values()]).norm()


@pytest.mark.usefixtures("ray_session")
def test_generation_runs_ahead_of_training_by_the_staleness_and_stops_for_a_checkpoint(tmp_path: Path) -> None:
    out = run(
        tmp_path / "ahead",
        "plan=disaggregated",
        "plan.granularity=4",
        "plan.staleness=1",
        "cluster.devices_per_node=2",
        "steps=5",
        "checkpoint.every=3",
    )
    versions: dict[int, set[int]] = {}
    for sample in lines(out / "samples.jsonl"):
        versions.setdefault(sample["step"], set()).add(sample["weight_version"])
    # Nothing is under way after the third: the fourth begins with the newest weights.
    assert versions == {1: {0}, 2: {0}, 3: {1}, 4: {3}, 5: {3}}
