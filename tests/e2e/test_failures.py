"""Whatever fails, wherever it runs, ends the run with the failure that came first."""

from __future__ import annotations

from pathlib import Path

import pytest

import rlinf
from tests.e2e.command import SMALL

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

FLOW = """
import torch
from rlinf import Batch, Worker, Workflow, stage


class Numbers:
    writes = ("x",)
    def setup(self): pass
    def next_batch(self): return Batch({"row_id": torch.arange(4), "x": torch.ones(4)})
    def state(self): return {}
    def load_state(self, state): pass


def explode():
    raise RuntimeError("it cannot be read again")


class Bomb:
    def __reduce__(self):
        return explode, ()


class Learner(Worker):
    def setup(self):
        with open(self.ctx.output_dir / "starts", "a") as file:
            file.write("started\\n")
        if self.cfg == "setup":
            raise OSError("the model's file is gone")

    @stage(reads=("x",), writes=("y",))
    def look(self, batch):
        return Batch({"y": [Bomb() if self.cfg == "deliver" else 1 for _ in range(batch.n)]})

    @stage(reads=("z",), whole=True, updates=True)
    def train(self, batch): pass

    def publish_weights(self, target, inline, slot=0):
        return "w"


class Engine(Worker):
    @stage(reads=("y",), writes=("z",))
    def use(self, batch):
        return Batch({"z": torch.ones(batch.n)})

    def receive_weights(self, version, publications):
        raise ValueError(f"no room for {publications[0]}")


def flow(cfg):
    flow = Workflow("failing")
    learner, engine = flow.worker(Learner, cfg.workflow.args["how"]), flow.worker(Engine)
    learner.train(engine.use(learner.look(flow.source(Numbers()))))
    if cfg.workflow.args["how"] == "sync":
        flow.sync(learner, engine)
    return flow
"""


@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize(
    ("how", "group", "text"),
    [
        ("setup", "learner", "failed in setup: OSError: the model's file is gone"),
        ("sync", "engine", "failed in receive weights from learner: ValueError: no room for w"),
        # Whoever cannot read what it was sent says so.
        ("deliver", "engine", "failed in wait for rows of learner.look for engine.use: RuntimeError: it cannot be"),
    ],
)
def test_a_failure_in_the_start_a_weight_sync_or_a_delivery_is_the_one_that_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, group: str, text: str
) -> None:
    (tmp_path / "failures_flow.py").write_text(FLOW)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    arguments = (*SMALL, "workflow.target=failures_flow.flow", f"+workflow.args.how={how}", "logger.console=off")
    with pytest.raises(rlinf.RunFailed) as failed:
        rlinf.run(rlinf.load_config([*arguments, f"output_dir={tmp_path / 'out'}"]))
    assert failed.value.first.group == group
    assert text in failed.value.first.title
    assert (tmp_path / "out" / "starts").read_text() == "started\n", "it was started again"
