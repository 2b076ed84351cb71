"""A run in which nothing moves says why, and ends; one that is only slow goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.command import SMALL, Command

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

FLOW = """
import threading
import time
import torch
from rlinf import Batch, Worker, Workflow, stage


class Numbers:
    writes = ("x",)
    def setup(self): pass
    def next_batch(self): return Batch({"row_id": torch.arange(4), "x": torch.ones(4)})
    def state(self): return {}
    def load_state(self, state): pass


def nobody_ends_this():
    threading.Event().wait()


class Maker(Worker):
    @stage(reads=("x",), writes=("y",))
    def make(self, batch):
        yield Batch({"row_id": batch["row_id"][:3], "y": torch.ones(3)})
        if self.cfg == "hangs":
            nobody_ends_this()
        end = time.time() + 8
        while time.time() < end:  # it computes, and says nothing
            sum(range(10000))
        yield Batch({"row_id": batch["row_id"][3:], "y": torch.ones(1)})


class User(Worker):
    @stage(reads=("y",), updates=True)
    def use(self, batch): pass


def flow(cfg):
    flow = Workflow("stalls")
    flow.worker(User).use(flow.worker(Maker, cfg.workflow.args["how"]).make(flow.source(Numbers())))
    return flow
"""
LIMITS = ("cluster.stall_s=2", "cluster.stall_end_s=2", "steps=1", "workflow.target=stalling.flow", "output_dir=out")


def start(folder: Path, how: str) -> Command:
    (folder / "stalling.py").write_text(FLOW)
    return Command(folder, *SMALL, *LIMITS, f"+workflow.args.how={how}", "logger.console=lines")


def test_a_standstill_names_who_waits_for_whom_with_stacks_and_ends_the_run(tmp_path: Path) -> None:
    run = start(tmp_path, "hangs")
    assert run.wait() == 1, run.said()
    said = run.said()
    assert "nothing has moved for" in said
    assert "all that waits, waits in the end for maker rank 0, which is in maker.make" in said
    assert "user rank 0 waits for rows of maker.make for user.use from maker rank 0" in said
    assert "the run stands still" in said
    assert "maker rank 0 does not come to an end" in said
    stacks = (tmp_path / "out" / "stall-1.txt").read_text()
    assert "nobody_ends_this" in stacks
    assert "waits in the kernel at" in stacks
    assert run.leftovers() == []


def test_a_stage_that_computes_for_long_is_no_standstill(tmp_path: Path) -> None:
    run = start(tmp_path, "computes")
    assert run.wait() == 0, run.said()
    assert "nothing has moved" not in run.said()
    assert not list((tmp_path / "out").glob("stall-*"))
