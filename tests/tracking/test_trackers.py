"""Trackers that fail, hang, are slow, or are missing; and what they are given."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import threading
import types

import pytest

from rlinf.config import LoggerConfig
from rlinf.errors import ConfigError
from rlinf.tracking import Trackers, check, open_trackers
from rlinf.tracking.background import Background

SECRET = "s3cr3t-value"


class Kept:
    def __init__(self):
        self.got, self.closed = [], 0

    def log(self, step, values):
        self.got.append((step, values))

    def close(self):
        self.closed += 1


class Broken(Kept):
    def log(self, step, values):
        raise RuntimeError(f"cannot reach https://me:{SECRET}@host")

    close = log


def test_a_tracker_that_fails_is_named_once_and_the_others_go_on():
    said, kept = [], Kept()
    trackers = Trackers({"broken": Broken(), "kept": kept}, said.append)
    for step in (1, 2, 3):
        trackers.log(step, {"a": step})
    trackers.close()
    trackers.close()
    assert [step for step, _ in kept.got] == [1, 2, 3]
    assert kept.closed == 1
    assert len(said) == 2
    assert said[0].startswith("tracker broken: RuntimeError: cannot reach")
    assert "3 steps could not be written" in said[1]
    assert SECRET not in "".join(said)


def test_steps_go_up():
    said, kept = [], Kept()
    trackers = Trackers({"kept": kept}, said.append)
    for step in (1, 2, 2, 1, 1, 3):
        trackers.log(step, {"a": 0.0})
    assert [step for step, _ in kept.got] == [1, 2, 2, 3]
    assert len(said) == 1
    assert "step 1 came after step 2" in said[0]


def test_what_is_not_a_number_is_left_out_and_said():
    said, kept = [], Kept()
    Trackers({"kept": kept}, said.append).log(1, {"a": 1, "text": "x", "nan": math.nan})
    assert kept.got[0][1].keys() == {"a", "nan"}
    assert "text is str" in said[0]


def test_a_background_tracker_delivers_all_in_order():
    said, kept = [], Kept()
    background = Background("far", lambda: kept, said.append)
    for step in range(50):
        background.log(step, {})
    background.close()
    assert [step for step, _ in kept.got] == list(range(50))
    assert kept.closed == 1
    assert said == []


def test_a_constructor_that_fails_is_tried_again_and_nothing_is_lost():
    said, kept, tries = [], Kept(), []

    def make():
        tries.append(1)
        if len(tries) < 4:
            raise SystemExit("no network")
        return kept

    background = Background("far", make, said.append, delays=(0.001,))
    done = threading.Event()
    kept.log = lambda step, values: (kept.got.append(step), done.set() if step == 2 else None)
    background.log(1, {})
    background.log(2, {})
    assert done.wait(10)
    background.close()
    assert kept.got == [1, 2]
    assert said == ["tracker far: SystemExit: no network; the run goes on, and it is tried again"]


def test_a_step_that_is_refused_for_good_is_given_up_and_counted():
    said = []

    class Picky(Kept):
        def log(self, step, values):
            if step == 2:
                raise ValueError("I do not like 2")
            super().log(step, values)

    picky = Picky()
    seen = threading.Event()
    background = Background("far", lambda: picky, said.append, delays=(0.001, 0.001))
    picky_log = picky.log
    picky.log = lambda step, values: (picky_log(step, values), seen.set() if step == 3 else None)
    for step in (1, 2, 3):
        background.log(step, {})
    assert seen.wait(10)
    background.close()
    assert [step for step, _ in picky.got] == [1, 3]
    assert said[-1] == "tracker far: 1 step did not arrive (ValueError: I do not like 2)"


def test_a_hanging_tracker_blocks_neither_the_step_nor_the_end():
    said, release = [], threading.Event()

    class Hangs(Kept):
        def log(self, step, values):
            release.wait(30)

    background = Background("far", Hangs, said.append, capacity=2)
    for step in range(10):
        background.log(step, {})
    background.close(patience_s=0.05)
    assert "10 steps did not arrive" in said[-1]
    assert "oldest steps give way" in said[0]
    release.set()


def test_a_missing_package_is_a_config_error_before_the_run(monkeypatch):
    real = importlib.util.find_spec
    gone = {"tensorboard", "wandb", "mlflow"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name in gone else real(name, *a))
    with pytest.raises(ConfigError, match=r"logger.tensorboard.*pip install tensorboard.*logger.tensorboard=false"):
        check(LoggerConfig())
    with pytest.raises(ConfigError, match=r"pip install wandb.*logger.wandb=null"):
        check(LoggerConfig(tensorboard=False, wandb={}))
    with pytest.raises(ConfigError, match=r"pip install mlflow"):
        check(LoggerConfig(tensorboard=False, mlflow={}))
    check(LoggerConfig(tensorboard=False))


def test_unknown_mlflow_keys_are_errors(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", types.SimpleNamespace(__spec__=object()))
    with pytest.raises(ConfigError, match="no key tracking_url; it has tracking_uri"):
        check(LoggerConfig(mlflow={"tracking_url": "x"}))


def scalars(directory):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_reads_back_and_a_resumed_run_hides_what_it_does_again(tmp_path):
    cfg = LoggerConfig()
    trackers = open_trackers(cfg, tmp_path, {"seed": 1}, 1)
    for step in (1, 2, 3, 4):
        trackers.log(step, {"a": float(step)})
    trackers.close()
    trackers = open_trackers(cfg, tmp_path, {"seed": 1}, 3)
    trackers.log(3, {"a": 30.0})
    trackers.close()
    assert scalars(tmp_path / "tensorboard") == {"a": [(1, 1.0), (2, 2.0), (3, 30.0)]}


def fake_wandb(monkeypatch, log):
    class Run:
        def define_metric(self, name, **options):
            log.append(("define", name, options))

        def log(self, values):
            log.append(("log", values))

        def finish(self):
            log.append(("finish",))

    def init(**options):
        log.append(("init", options))
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init, __spec__=object()))


def test_wandb_continues_its_run_and_cannot_drop_steps_by_its_own_counter(tmp_path, monkeypatch):
    log: list = []
    fake_wandb(monkeypatch, log)
    cfg = LoggerConfig(tensorboard=False, wandb={"project": "p", "settings": {"quiet": True}})
    check(cfg)
    for first_step in (1, 5):
        trackers = open_trackers(cfg, tmp_path, {"hf_token": SECRET, "lr": 1.0}, first_step)
        trackers.log(first_step, {"a": 1.0})
        trackers.close()
    first, second = (entry[1] for entry in log if entry[0] == "init")
    assert first["project"] == "p"
    assert first["settings"] == {"console": "off", "quiet": True}
    assert first["config"] == {"hf_token": "<redacted>", "lr": 1.0}
    assert first["id"] == second["id"]
    assert second["resume"] == "allow"
    assert ("define", "*", {"step_metric": "step"}) in log
    assert ("log", {"step": 5, "a": 1.0}) in log
    assert log[-1] == ("finish",)


def test_no_secret_is_in_any_file_or_message(tmp_path, monkeypatch):
    said: list[str] = []

    def init(**options):
        raise RuntimeError(f"401 for https://{SECRET}@api.example.org?api_key={SECRET}")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init, __spec__=object()))
    config = {
        "logger": {"mlflow": {"tracking_uri": f"https://me:{SECRET}@host"}, "wandb": {"api_key": SECRET}},
        "cluster": {"runtime_env": {"env_vars": {"HF_TOKEN": SECRET}}},
        "overrides": [f"+logger.wandb.api_key={SECRET}"],
    }
    trackers = open_trackers(LoggerConfig(wandb={}), tmp_path, config, 1, said.append)
    trackers.log(1, {"a": 1.0})
    trackers.close()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]
    assert said
    assert SECRET not in "".join(said)


def test_opening_never_raises(tmp_path):
    said: list[str] = []
    (tmp_path / "metrics.jsonl").mkdir()
    (tmp_path / "tensorboard").write_text("")
    trackers = open_trackers(LoggerConfig(), tmp_path, {}, 1, said.append)
    trackers.log(1, {"a": 1.0})
    trackers.close()
    assert {text.split(":")[0] for text in said} == {"tracker jsonl", "tracker tensorboard"}


def test_the_values_on_file_are_those_that_were_logged(tmp_path):
    trackers = open_trackers(LoggerConfig(tensorboard=False), tmp_path, {}, 1)
    trackers.log(0, {"eval/reward": 0.25})
    trackers.log(1, {"reward/reward_mean": 0.5})
    trackers.close()
    told = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(t["step"], t.get("eval/reward"), t.get("reward/reward_mean")) for t in told] == [
        (0, 0.25, None),
        (1, None, 0.5),
    ]
