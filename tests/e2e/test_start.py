"""A start that stands still ends, says who was waited for, and leaves nothing."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.e2e.command import Command

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

HANGING = """
import subprocess, threading
import torch
from rlinf import Batch, Worker, Workflow, stage


class Numbers:
    writes = ("x",)
    def setup(self): pass
    def next_batch(self): return Batch({"row_id": torch.arange(4), "x": torch.ones(4)})
    def state(self): return {}
    def load_state(self, state): pass


class Slow(Worker):
    def setup(self):
        if self.ctx.rank == 1:
            child = subprocess.Popen(["sleep", "600"])  # an engine's own process, say
            (self.ctx.output_dir.parent / "child").write_text(str(child.pid))
            threading.Event().wait()

    @stage(reads=("x",), updates=True)
    def train(self, batch): pass


def flow(cfg):
    flow = Workflow("hanging")
    flow.worker(Slow, dp=2).train(flow.source(Numbers()))
    return flow
"""


def test_a_worker_whose_setup_hangs_ends_the_run_which_names_it(tmp_path: Path) -> None:
    (tmp_path / "hanging_flow.py").write_text(HANGING)
    run = Command(
        tmp_path,
        "workflow.target=hanging_flow.flow",
        "model=tiny",
        "data=digits",
        "output_dir=out",
        "plan=collocated",
        "cluster.devices_per_node=2",
        "cluster.start_timeout_s=12",
        "logger.console=lines",
        env={"PYTHONPATH": str(tmp_path)},
    )
    assert run.wait() == 2, run.said()
    (error,) = [line for line in run.said().splitlines() if line.startswith("error: ")]
    assert "stage 'models and data' is not over after 12 s. No answer from slow rank 1 (node " in error
    assert "rank 0" not in error
    assert "raise cluster.start_timeout_s" in error
    assert run.leftovers() == []
    assert not psutil.pid_exists(int((tmp_path / "child").read_text()))
