"""A resumed run is the rest of one run: what it learns, when, and what it says at the end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import rlinf
from rlinf.runner import Outcome
from tests.e2e.command import SMALL, weights

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]


def run(output: Path, *overrides: str) -> Outcome:
    return rlinf.run(rlinf.load_config([*SMALL, f"output_dir={output}", *overrides]))


@pytest.mark.usefixtures("ray_session")
def test_a_run_cut_in_the_critics_warm_up_ends_as_one_that_was_not_with_the_scores_of_the_whole(
    tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    def lines(name: str) -> list[dict]:
        return [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]

    linear = ("actor.optimizer.schedule=linear", "critic.optimizer.schedule=linear", "critic.optimizer.warmup_steps=2")
    arguments = ("+workflow=ppo", "steps=4", "algorithm.critic_warmup=2", "algorithm.kl_coef=0", *linear)
    whole = run(tmp_path / "whole", *arguments, "checkpoint.every=1", "checkpoint.keep=4", "logger.console=off")
    saved = tmp_path / "whole" / "checkpoints" / "step-000001"
    cut = run(tmp_path / "cut", *arguments, f"resume={saved}", "logger.console=lines")
    said = capfd.readouterr().out
    assert whole.before is not None
    assert (cut.before, cut.after) == (whole.before, whole.after)
    assert f"validation reward {whole.before:.3f} -> {whole.after:.3f} in 4 steps" in said
    assert any(line.startswith("step 2/4") and "actor waits       1" in line for line in said.splitlines())
    assert "eval 1/4" not in said
    for name, since in (("whole", 0), ("cut", 1)):
        trained = [line for line in lines(name) if "time/step" in line]
        assert [line.get("actor/waits") for line in trained] == [2, 1, None, None][since:]
        # The actor's two steps fall from the peak; the critic's four rise for two, then fall.
        assert [line.get("actor/lr") for line in trained] == [None, None, 1e-3, 5e-4][since:]
        assert [line["critic/lr"] for line in trained] == [5e-4, 1e-3, 1e-3, 5e-4][since:]
        assert [line["weight_version"] for line in trained] == [0, 0, 1, 2][since:]
    expected, found = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
