"""A run in which nothing moves says why, and ends; one that is only slow goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.command import SMALL, Command

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

FLOW = """
import ctypes
import os
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


def hangs_in_native_code():
    ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)  # it keeps Python's lock


class Maker(Worker):
    @stage(reads=("x",), writes=("y",))
    def make(self, batch):
        yield Batch({"row_id": batch["row_id"][:3], "y": torch.ones(3)})
        if self.cfg == "never yields the last row":
            nobody_ends_this()
        if self.cfg == "hangs in native code":
            hangs_in_native_code()
        end = time.time() + 8
        while self.cfg == "computes" and time.time() < end:  # and says nothing
            sum(range(10000))
        yield Batch({"row_id": batch["row_id"][3:], "y": torch.ones(1)})
        if self.cfg == "never ends":
            nobody_ends_this()


class User(Worker):
    @stage(reads=("y",), updates=True)
    def use(self, batch):
        if self.cfg == "last stage" and self.ctx.rank == 1:
            nobody_ends_this()


def flow(cfg):
    flow, how = Workflow("stalls"), cfg.workflow.args["how"]
    flow.worker(User, how, dp=2).use(flow.worker(Maker, how, dp=1).make(flow.source(Numbers())))
    return flow
"""
LIMITS = (
    "cluster.stall_s=2",
    "cluster.stall_end_s=2",
    "plan=collocated",
    "cluster.devices_per_node=2",
    "steps=1",
    "workflow.target=stalling.flow",
    "output_dir=out",
)
NOTHING = "nothing has moved for"


def start(folder: Path, how: str) -> Command:
    (folder / "stalling.py").write_text(FLOW)
    return Command(folder, *SMALL, *LIMITS, f"+workflow.args.how={how}", "logger.console=lines")


def error_of(run: Command) -> str:
    """The end of a run that stood still; nothing of it is left."""
    assert run.wait() == 1, run.said()
    assert NOTHING in run.said()
    assert run.leftovers() == []
    (line,) = [line for line in run.said().splitlines() if "the run stands still" in line]
    return line


@pytest.mark.parametrize("how", ["never yields the last row", "never ends"])
def test_a_standstill_names_who_waits_for_whom_with_stacks_and_ends_the_run(tmp_path: Path, how: str) -> None:
    run = start(tmp_path, how)
    error = error_of(run)
    assert "maker rank 0 (node " in error
    assert "failed in maker.make: the run stands still" in error
    said = run.said()
    assert "all that waits, waits in the end for maker rank 0, which has been in maker.make for" in said
    for rank in (0, 1):
        assert f"user rank {rank} waits for rows of maker.make for user.use from maker rank 0" in said
    assert "nobody_ends_this (stalling.py:" in said
    stacks = (tmp_path / "out" / "stall-1.txt").read_text()
    assert "in nobody_ends_this" in stacks
    assert "waits in the kernel at" in stacks
    assert "user rank 1, node " in stacks


def test_a_last_stage_that_hangs_on_one_rank_is_the_cause_though_nobody_waits_for_it(tmp_path: Path) -> None:
    run = start(tmp_path, "last stage")
    error = error_of(run)
    assert "user rank 1 (node " in error
    assert "nobody waits for user rank 1, which has been in user.use for" in error
    assert "user rank 0 has done its part" in run.said()


def test_a_rank_that_hangs_in_native_code_and_cannot_answer_is_the_cause(tmp_path: Path) -> None:
    run = start(tmp_path, "hangs in native code")
    error = error_of(run)
    assert "maker rank 0 (node " in error
    assert "all that waits, waits in the end for maker rank 0, which has been in " in error
    assert "and does not answer" in error
    assert "maker rank 0 is at task " in run.said()
    assert "its Python stacks are at the end of its log" in (tmp_path / "out" / "stall-1.txt").read_text()
    assert "in hangs_in_native_code" in (tmp_path / "out" / "logs" / "maker-0.log").read_text()


def test_a_stage_that_computes_for_long_is_no_standstill(tmp_path: Path) -> None:
    run = start(tmp_path, "computes")
    assert run.wait() == 0, run.said()
    assert NOTHING not in run.said()
    assert "maker rank 0 has been busy in maker.make for" in run.said()
    assert not list((tmp_path / "out").glob("stall-*"))
