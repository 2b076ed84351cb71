"""Whole runs with ``plan=auto``: planned by a profile, and planned again when a group becomes slow, and only then."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import rlinf
from rlinf.arithmetic import batch_sizes
from rlinf.checkpoint import Identity
from rlinf.m2flow.plan import load_plan, stages
from rlinf.preflight import Ready
from rlinf.runner import run
from rlinf.scheduler.profile import save_profile
from tests.e2e import slowing
from tests.e2e.command import SMALL

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300), pytest.mark.usefixtures("ray_session")]

SLOW_FROM = 4


def ran(folder: Path, slow_from: int, steps: int, *overrides: str) -> tuple[Path, list[dict[str, float]]]:
    """The output folder, and the metrics of each training step."""
    save_profile(slowing.known(), folder / "known.yaml")
    cfg = rlinf.load_config(
        [
            *("+workflow=grpo", *SMALL, "plan=auto", f"plan.profile={folder / 'known.yaml'}", f"steps={steps}"),
            *("cluster.devices_per_node=2", "checkpoint.every=0", "checkpoint.export=false", *overrides),
        ]
    )
    out = folder / "out"
    graph = slowing.graph_of(slow_from)
    assert run(Ready(cfg, graph, batch_sizes(cfg), Identity("slowing", "none"), out, None)).steps == steps
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return out, [line for line in lines if "time/step" in line]


def where(path: Path) -> dict[str, tuple[int, ...]]:
    return {stage.worker: stage.devices for stage in stages(load_plan(path))}


def test_a_group_that_becomes_slow_gets_a_device_of_its_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out, steps = ran(tmp_path, SLOW_FROM, 20)
    said = capfd.readouterr().out
    (old,) = out.glob("plan-until-step-*.yaml")
    at = int(old.stem.rpartition("-")[2])
    assert SLOW_FROM < at < SLOW_FROM + 6  # seen after three slow iterations at most, changed at the next one's end

    # 0.32 s of making and 0.16 s of rating beside as much of judging, then 0.16 s of learning; with a rater 5 times as
    # slow that would be 1.28 s, and with the rater alone 0.04 + 0.8 + 0.02 s
    before, after = where(old), where(out / "plan.yaml")
    assert before["rater"] == before["maker"] != before["learner"] == before["judge"]
    assert after["maker"] == after["learner"] == after["judge"] != after["rater"]

    changes = [step["plan/changes"] for step in steps]
    assert changes == [0.0] * at + [1.0] * (len(steps) - at)
    expected = [step["plan/expected_s"] for step in steps]
    assert len(set(expected[:at])) == 1
    assert expected[-1] > expected[0]
    assert re.search(r"rater\.rate took [45]\S* times what was predicted", said)
    assert f"plan from step {at + 1} on" in said
    assert {step["learner/ratings"] for step in steps} == {
        float(sum(2 * row + 1 for row in range(8 * i, 8 * i + 8))) for i in range(len(steps))
    }
    assert "WHAT WOULD CHANGE THE CHOICE" in (out / "plan.txt").read_text()


@pytest.mark.parametrize(("slow_from", "overrides"), [(0, ()), (2, ("plan.replan=false",))])
def test_without_a_slow_down_or_when_told_so_a_plan_stays(
    tmp_path: Path, slow_from: int, overrides: tuple[str, ...]
) -> None:
    out, steps = ran(tmp_path, slow_from, 8, *overrides)
    assert list(out.glob("plan-until-step-*")) == []
    assert all(step.get("plan/changes", 0.0) == 0.0 for step in steps)
    assert where(out / "plan.yaml")["rater"] == where(out / "plan.yaml")["maker"]
