"""Whatever ends a run, nothing stays behind, and ``resume=auto`` goes on to the weights of one that never stopped."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from tests.e2e.command import Command, steps_done, weights
from tests.e2e.conftest import WHOLE

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1500)]
PACE = {"PACE_S": "0.1"}  # a step then takes long enough to be cut


def test_a_run_that_is_killed_in_every_way_ends_at_the_weights_of_one_that_is_not(whole: Path, tmp_path: Path) -> None:
    cut = (*WHOLE, "output_dir=cut", "resume=auto")
    folder = tmp_path / "cut"

    def killed(run: Command, how: signal.Signals, victim: str | None) -> int:
        reached = steps_done(folder)
        run.until(lambda: steps_done(folder) > reached)
        if victim:
            run.rank(victim).send_signal(how)
        else:
            run.process.send_signal(how)
        return run.wait(60)

    for how, victim, code, text in (
        (signal.SIGINT, None, 130, "interrupted"),
        (signal.SIGKILL, None, -9, ""),
        (signal.SIGKILL, "actor-0.log", 1, "actor rank 0"),
        (signal.SIGTERM, None, 143, "terminated"),
    ):
        run = Command(tmp_path, *cut, env=PACE)
        assert killed(run, how, victim) == code, run.said()
        assert text in run.said()
        assert run.leftovers() == [], f"after {how.name}"
    last = Command(tmp_path, *cut)
    assert last.wait() == 0, last.said()
    assert steps_done(folder) == steps_done(whole)

    expected, found = weights(whole), weights(folder)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name

    again = Command(tmp_path, *cut)
    assert again.wait() == 2
    assert "nothing is left to do; raise steps" in again.said()
