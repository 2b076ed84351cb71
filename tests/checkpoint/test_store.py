"""Committing, finding and pruning checkpoints, with crashes at every point."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlinf.checkpoint import Checkpoints, Identity, Meta, OutputLock, load_state, save_state, store, writable
from rlinf.errors import CheckpointError, ConfigError

SAME = Identity("ppo", "tiny-64")


def meta(step: int, **changes) -> Meta:
    values = {"step": step, "weight_version": step, "workflow": "ppo", "model": "tiny-64", "world_sizes": {"actor": 1}}
    return Meta(**{**values, **changes})


def write(checkpoints: Checkpoints, step: int, **changes) -> Path:
    aside = checkpoints.begin(step)
    save_state({"w": torch.full((4,), float(step)), "step": step}, aside / "actor")
    return checkpoints.commit(aside, meta(step, **changes))


def names(checkpoints: Checkpoints) -> list[str]:
    return sorted(p.name for p in checkpoints.directory.iterdir())


def test_what_is_committed_is_found_and_reads_back(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.latest() is None
    path = write(checkpoints, 3)
    assert path == tmp_path / "checkpoints" / "step-000003" == Checkpoints(tmp_path, keep=2).latest()
    told = checkpoints.verify(path, SAME)
    assert (told.step, told.weight_version, told.world_sizes, told.format) == (3, 3, {"actor": 1}, store.FORMAT)
    assert told.time
    assert load_state({"w": torch.zeros(4), "step": 0}, path / "actor")["w"].tolist() == [3.0] * 4
    assert sorted(p.name for p in path.iterdir()) == ["COMMITTED", "actor", "meta.json"]


def test_only_the_newest_are_kept_also_after_a_restart(tmp_path):
    for step in (1, 2, 3):
        write(Checkpoints(tmp_path, keep=2), step)  # each by a new run
    assert names(Checkpoints(tmp_path, keep=2)) == ["step-000002", "step-000003"]


def test_a_run_resumed_from_an_earlier_step_keeps_its_own_and_finds_them(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    write(checkpoints, 8)
    write(checkpoints, 10)
    assert checkpoints.latest().name == "step-000010"
    write(checkpoints, 6)  # resumed from step 5, kept elsewhere
    assert checkpoints.latest().name == "step-000006"
    assert names(checkpoints) == ["step-000006", "step-000010"]


def test_a_step_that_is_passed_again_is_replaced(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    write(checkpoints, 4, config_digest="old")
    path = write(checkpoints, 4, config_digest="new")
    assert checkpoints.read_meta(path).config_digest == "new"
    assert names(checkpoints) == ["step-000004"]


def test_a_half_written_one_is_passed_over_and_said(tmp_path, caplog):
    checkpoints = Checkpoints(tmp_path, keep=2)
    write(checkpoints, 1)
    (checkpoints.directory / "step-000009").mkdir()
    assert checkpoints.latest().name == "step-000001"
    assert "step-000009" in caplog.text
    with pytest.raises(CheckpointError, match="not a committed checkpoint"):
        checkpoints.verify(checkpoints.directory / "step-000009", SAME)


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from rlinf.checkpoint import Checkpoints, Meta, save_state, store
here, where = Path(sys.argv[1]), sys.argv[2]
die = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)
checkpoints = Checkpoints(here, keep=1)
aside = checkpoints.begin(2)
if where == "tensors":
    import torch.distributed.checkpoint.filesystem as fs
    fs._write_item = die
save_state({"w": torch.full((4,), 2.0), "step": 2}, aside / "actor")
real = os.rename
if where == "marker": store.write_durably = die
if where == "rename": os.rename = die
if where == "between": os.rename = lambda a, b: die() if "tmp-" in str(a) else real(a, b)
if where == "prune": store.shutil.rmtree = die
checkpoints.commit(aside, Meta(step=2, weight_version=2, workflow="ppo", model="tiny-64", world_sizes={"actor": 1}))
"""


@pytest.mark.parametrize(
    ("where", "before", "latest"),
    [
        ("tensors", 1, 1),
        ("marker", 1, 1),
        ("rename", 1, 2),  # whole and flushed: the rename is done for it
        ("prune", 1, 2),
        ("between", 2, 2),  # the same step, replaced: the new one is whole
    ],
)
def test_killed_at_any_point_a_whole_checkpoint_is_there(tmp_path, where, before, latest):
    write(Checkpoints(tmp_path, keep=1), before, config_digest="before")
    ran = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), where], check=False, env=dict(os.environ))
    assert ran.returncode == -signal.SIGKILL
    checkpoints = Checkpoints(tmp_path, keep=1)
    found = checkpoints.latest()
    assert checkpoints.verify(found, SAME).step == latest
    assert checkpoints.read_meta(found).config_digest == ("" if latest == 2 else "before")
    loaded = load_state({"w": torch.zeros(4), "step": 0}, found / "actor")
    assert loaded["w"].tolist() == [float(latest)] * 4
    write(checkpoints, 3)
    assert names(checkpoints) == ["step-000003"]  # nothing of the dead writer is left


def test_a_folder_that_a_living_writer_holds_is_left_alone(tmp_path):
    one, other = Checkpoints(tmp_path, keep=1), Checkpoints(tmp_path, keep=1)
    aside = one.begin(2)
    write(other, 1)
    other.recover()
    assert aside.is_dir()
    one.abandon(aside)
    assert names(other) == ["step-000001"]


def test_a_full_disk_at_commit_names_the_path_and_loses_nothing_old(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, keep=1)
    write(checkpoints, 1)

    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(store, "write_durably", full)
    with pytest.raises(CheckpointError, match=rf"{checkpoints.directory}.*disk is full"):
        write(checkpoints, 2)
    assert names(checkpoints) == ["step-000001"]


def test_a_failure_between_the_two_renames_puts_the_old_one_back(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, keep=1)
    write(checkpoints, 1, config_digest="old")
    real = os.rename

    def broken(source, target) -> None:
        if ".tmp-" in str(source):
            raise OSError(5, "Input/output error", str(source))
        real(source, target)

    monkeypatch.setattr(os, "rename", broken)
    with pytest.raises(CheckpointError, match="Input/output error"):
        write(checkpoints, 1)
    assert checkpoints.read_meta(checkpoints.latest()).config_digest == "old"


def test_a_file_in_place_of_the_folder_is_named(tmp_path):
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(CheckpointError, match=r"checkpoints.*a file stands where a folder is needed"):
        Checkpoints(tmp_path, keep=1).begin(1)


def test_files_that_other_nodes_wrote_elsewhere_are_missed(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    aside = checkpoints.begin(1)
    save_state({"w": torch.ones(4)}, aside / "actor")
    next((aside / "actor").glob("*.distcp")).unlink()
    with pytest.raises(CheckpointError, match=r"actor/__0_0.distcp is missing.*all nodes"):
        checkpoints.commit(aside, meta(1))
    aside = checkpoints.begin(1)
    with pytest.raises(CheckpointError, match=r"actor/scalars.json is missing"):
        checkpoints.commit(aside, meta(1))
    assert names(checkpoints) == []


@pytest.mark.parametrize(
    ("expected", "told"),
    [
        (Identity("grpo", "tiny-64"), "of workflow 'ppo', this run's workflow is 'grpo'"),
        (Identity("ppo", "smollm2"), "of model 'tiny-64', this run's model is 'smollm2'"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(tmp_path, expected, told):
    checkpoints = Checkpoints(tmp_path, keep=1)
    with pytest.raises(CheckpointError, match=told):
        checkpoints.verify(write(checkpoints, 1), expected)


def test_scores_are_kept_and_a_checkpoint_of_the_format_before_them_still_reads(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    path = write(checkpoints, 1, before=0.25, after=0.5)
    told = checkpoints.verify(path, SAME)
    assert (told.before, told.after) == (0.25, 0.5)
    old = {name: value for name, value in vars(told).items() if name not in ("before", "after")}
    (path / "meta.json").write_text(json.dumps({**old, "format": 1}))
    told = checkpoints.verify(path, SAME)
    assert (told.step, told.before, told.after) == (1, None, None)


def test_a_newer_format_and_a_broken_meta_are_refused(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    path = write(checkpoints, 1)
    told = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps({**told, "format": 99, "something_new": 1}))
    with pytest.raises(CheckpointError, match="format 99"):
        checkpoints.verify(path, SAME)
    (path / "meta.json").write_text("{")
    with pytest.raises(CheckpointError, match="not what rlinf writes"):
        checkpoints.verify(path, SAME)


def test_a_path_that_is_not_there_lists_those_that_are(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    write(checkpoints, 1)
    with pytest.raises(CheckpointError, match="step-000001"):
        checkpoints.verify(checkpoints.directory / "step-000007", SAME)


def test_keeping_none_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match=r"checkpoint\.keep is 0"):
        Checkpoints(tmp_path, keep=0)


HOLDS = """
import sys, time
from pathlib import Path
from rlinf.checkpoint import OutputLock
lock = OutputLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_run_is_told_the_pid_of_the_first_and_death_frees_the_lock(tmp_path):
    first = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    assert first.stdout.readline() == "held\n"
    with pytest.raises(CheckpointError, match=rf"in use by another run \(pid {first.pid} on "):
        OutputLock(tmp_path)
    first.kill()
    first.communicate()
    with OutputLock(tmp_path):
        pass
    OutputLock(tmp_path).release()


def test_an_output_dir_that_takes_no_files_is_named(tmp_path, monkeypatch):
    writable(tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file.*folder"):
        writable(tmp_path / "file")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(CheckpointError, match="disk is full"):
        writable(tmp_path / "new")
