"""``python -m rlinf.profile`` as a person runs it."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import psutil
import pytest

from rlinf.scheduler.profile import load_profile
from tests.e2e.command import SMALL, Command

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

PPO = {
    *("host.source0", "rollout.generate", "reward.score", "reference.logprobs", "critic.values", "host.gae"),
    *("actor.train", "critic.train", "host.transcripts"),
}
GRPO = {
    *("host.source0", "rollout.generate", "reward.score", "reference.logprobs", "host.grpo", "actor.train"),
    "host.transcripts",
}


def profiled(folder: Path, *arguments: str, env: dict[str, str] | None = None) -> Command:
    return Command(folder, *SMALL, *arguments, env=env, module="rlinf.profile")


def starting(run: Command) -> bool:
    """Whether some rank's process is there."""
    for process in run.look():
        with contextlib.suppress(psutil.Error):
            if "RankHost" in " ".join(process.cmdline()):
                return True
    return False


@pytest.mark.parametrize(
    ("workflow", "devices", "stages", "budget"), [("grpo", 2, GRPO, ("--budget", "0")), ("ppo", 1, PPO, ())]
)
def test_the_command_measures_each_stage_and_leaves_a_profile_alone(
    tmp_path: Path, workflow: str, devices: int, stages: set[str], budget: tuple[str, ...]
) -> None:
    shared = set(os.listdir("/dev/shm"))
    out = ("--out", "found.yaml") if budget else ()
    layout = (f"cluster.devices_per_node={devices}", "algorithm.kl_coef=0.1")
    kept = {"RLINF_PROFILES": str(tmp_path / "kept")}
    run = profiled(tmp_path, f"+workflow={workflow}", *layout, *out, *budget, env=kept)
    assert run.wait() == 0, run.said()
    assert run.leftovers() == []
    assert set(os.listdir("/dev/shm")) <= shared
    path = tmp_path / "found.yaml" if out else next((tmp_path / "kept").iterdir())
    assert (
        run.said().rstrip().splitlines()[-1].startswith(f"profile      {path.relative_to(tmp_path) if out else path}")
    )
    assert {entry.name.split("-")[0] for entry in tmp_path.iterdir()} == {"said", path.relative_to(tmp_path).parts[0]}

    found = load_profile(path)
    assert set(found.stages) == stages
    assert all(point.seconds > 0 for stage in found.stages.values() for point in stage.points)
    assert found.rows == {"host.source0": 2}
    assert {held.dp for layouts in found.groups.values() for held in layouts} == {devices}
    generate = found.stages["rollout.generate"]
    assert generate.tail is not None
    assert 1 <= generate.tail.lengths[0] <= generate.tail.lengths[-1] <= 6  # rollout.max_new_tokens
    assert [(sync.source, sync.target) for sync in found.syncs] == [("actor", "rollout")]
    assert all(name in run.said() for name in stages)
    if budget:
        assert "left out, as there was no time: groups apart" in run.said()
        assert all(len(stage.points) == 1 for stage in found.stages.values())
    else:
        assert len(found.stages["actor.train"].points) > 1


def test_an_interrupted_command_leaves_nothing(tmp_path: Path) -> None:
    shared = set(os.listdir("/dev/shm"))
    run = profiled(tmp_path, "+workflow=grpo", "cluster.devices_per_node=1")
    run.until(lambda: starting(run))
    run.process.send_signal(signal.SIGINT)
    assert run.wait(60) == 130, run.said()
    assert "interrupted" in run.said()
    assert run.leftovers() == []
    assert set(os.listdir("/dev/shm")) <= shared


def test_what_is_wrong_is_said_before_anything_starts(tmp_path: Path) -> None:
    run = profiled(tmp_path, "+workflow=ppo", "--out", "no/such/folder/profile.yaml")
    assert run.wait(60) == 2
    assert "the folder" in run.said()
    run = profiled(tmp_path, "+workflow=ppo", "rollout.max_new_tokns=3")
    assert run.wait(60) == 2
    assert "max_new_tokens" in run.said()
