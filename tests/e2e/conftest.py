"""Whole runs, small: the tiny model, on a Ray session that the tests start and end themselves."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.command import SMALL, Command

WHOLE = (
    "+workflow=grpo",
    *SMALL,
    "steps=6",
    "data.prompts_per_step=4",
    "checkpoint.every=1",
    "evaluation.before=false",
    "reward.scorer=tests.e2e.paced:score",
)


@pytest.fixture(scope="module")
def ray_session() -> Iterator[None]:
    """A Ray session of this process's own, on free ports, that runs join."""
    import ray

    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of the run `WHOLE`, by the command, that nothing stopped."""
    folder = tmp_path_factory.mktemp("whole")
    run = Command(folder, *WHOLE, "output_dir=out")
    assert run.wait() == 0, run.said()
    assert run.leftovers() == []
    *_, metrics, last = run.said().splitlines()
    assert "tensorboard" not in metrics  # it was not asked for
    assert last.startswith("validation reward")
    assert "->" not in last  # there was no evaluation before
    return folder / "out"
