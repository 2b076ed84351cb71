"""A profile says what stages of known times take; nothing of its taking stays behind."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import rlinf
from rlinf.arithmetic import batch_sizes
from rlinf.checkpoint import Identity
from rlinf.failure import RunFailed
from rlinf.preflight import Ready
from rlinf.scheduler.profile import Point, Profile, load_profile, save_profile
from rlinf.scheduler.profiler import profile
from rlinf.scheduler.table import profile_lines
from tests.e2e.command import SMALL
from tests.scheduler import timed

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

SLACK = 1.0  # seconds that a busy machine may add; less than what a first call takes longer


@pytest.fixture(scope="module")
def session() -> Iterator[None]:
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


def ready(folder: Path, fails: bool = False) -> Ready:
    cfg = rlinf.load_config(["+workflow=ppo", *SMALL, "cluster.devices_per_node=2"])
    return Ready(cfg, timed.graph_of(fails), batch_sizes(cfg), Identity("timed", "none"), folder / "run", None)


def ranks() -> list[str]:
    """Processes below this one that write a log of a rank."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            log = os.readlink(f"/proc/{process.pid}/fd/1")
        except OSError:
            continue
        if "rlinf-profile-" in log:
            found.append(log)
    return found


@pytest.fixture(scope="module")
def taken(session: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Profile, list[str], Path]:
    """The profile, what was said meanwhile, and the folder of the run that it was for."""
    said: list[str] = []
    folder = tmp_path_factory.mktemp("profiled")
    return profile(ready(folder), 300.0, said.append), said, folder


def points(found: Profile, stage: str, dp: int, beside: bool = False) -> dict[int, Point]:
    """Rows -> point."""
    every = found.stages[stage].points
    return {point.rows: point for point in every if (point.dp, point.beside) == (dp, beside)}


@pytest.mark.parametrize(
    ("stage", "name", "rows"),
    # Of a replica in an iteration, where there are two, and in smaller calls: a half, a quarter and a single row.
    [("maker.make", "make", (1, 2)), ("rater.rate", "rate", (1, 2, 4)), ("learner.learn", "learn", (1, 2, 4))],
)
def test_stages_take_what_they_take_and_their_first_calls_do_not_count(
    taken: tuple[Profile, list[str], Path], stage: str, name: str, rows: tuple[int, ...]
) -> None:
    found, _, _ = taken
    for dp in (2, 1):
        measured = points(found, stage, dp)
        wanted = rows if dp == 2 else [1, *(2 * count for count in rows)]
        assert set(measured) == set(wanted), (stage, dp)
        for count, point in measured.items():
            least = timed.FIXED + timed.ROW[name] * count
            assert least <= point.seconds <= least + SLACK, (stage, dp, count)
            assert point.kind == "cpu"


def test_a_group_without_a_device_has_one_layout_and_sources_have_their_rows(
    taken: tuple[Profile, list[str], Path],
) -> None:
    found, _, _ = taken
    assert {(point.kind, point.dp) for point in found.stages["scorer.score"].points} == {("", 1)}
    assert set(points(found, "scorer.score", 1)) == {1, 2, 4, 8}
    assert found.rows == {"host.source0": timed.ROWS}
    assert set(points(found, "host.source0", 1)) == {timed.ROWS}


def test_stages_are_measured_while_others_are_at_work_on_other_devices(taken: tuple[Profile, list[str], Path]) -> None:
    found, _, _ = taken
    for stage, name, rows in (("rater.rate", "rate", 8), ("learner.learn", "learn", 8), ("maker.make", "make", 4)):
        (point,) = points(found, stage, 1, beside=True).values()
        assert point.rows == rows
        assert timed.FIXED + timed.ROW[name] * rows <= point.seconds <= timed.FIXED + timed.ROW[name] * rows + SLACK


def test_memory_is_what_a_call_holds_beyond_what_stays(taken: tuple[Profile, list[str], Path]) -> None:
    found, _, _ = taken
    for dp in (1, 2):
        for point in points(found, "rater.rate", dp).values():
            assert timed.MEMORY * 0.9 <= point.transient <= timed.MEMORY * 1.5
    assert all(point.transient < timed.MEMORY / 4 for point in points(found, "learner.learn", 2).values())
    assert {held.resident for held in found.groups["rater"]} == {timed.HELD}


def test_switches_syncs_and_transfers_are_measured(taken: tuple[Profile, list[str], Path]) -> None:
    found, _, _ = taken
    assert {held.dp for held in found.groups["rater"]} == {1, 2}
    for held in found.groups["rater"]:
        assert timed.OFF <= held.offload <= timed.OFF + SLACK
        assert timed.ON <= held.onload <= timed.ON + SLACK
    assert {(sync.source_ranks, sync.target_ranks) for sync in found.syncs} == {(2, 2), (1, 1)}
    for sync in found.syncs:
        assert (sync.source, sync.target) == ("learner", "maker")
        assert timed.SEND <= sync.send <= timed.SEND + SLACK
        assert timed.RECEIVE <= sync.receive <= timed.RECEIVE + SLACK
    assert found.transport == "shared"
    assert 0 < found.transfers["shared"].per_byte < 1e-6


def test_rows_have_the_bytes_of_their_fields_and_sequences_their_lengths(
    taken: tuple[Profile, list[str], Path],
) -> None:
    found, _, _ = taken
    tail = found.stages["maker.make"].tail
    assert tail is not None
    assert tail.slots == 3
    assert (tail.lengths[0], tail.lengths[-1]) == (2, 6)  # half of them each
    assert list(tail.lengths) == sorted(tail.lengths)
    # A score is 8 bytes, and its message has a head.
    assert 8 <= found.stages["scorer.score"].row_bytes <= 8 + 300
    assert found.stages["learner.learn"].row_bytes == 0
    assert all(stage.tail is None for name, stage in found.stages.items() if name != "maker.make")


def test_nothing_is_left_and_the_run_s_folder_is_not_touched(taken: tuple[Profile, list[str], Path]) -> None:
    _, said, folder = taken
    assert list(folder.iterdir()) == []
    assert not any("left out" in line for line in said)
    deadline = time.monotonic() + 10
    while ranks() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert ranks() == []


def test_a_profile_that_was_taken_can_be_kept_and_read_by_people(
    taken: tuple[Profile, list[str], Path], tmp_path: Path
) -> None:
    found, _, _ = taken
    save_profile(found, tmp_path / "profile.yaml")
    assert load_profile(tmp_path / "profile.yaml") == found
    table = "\n".join(profile_lines(found))
    for part in ("maker.make", "others beside", "8 rows", "MiB", "p50", "learner -> maker, 2 ranks to 2", "by shared"):
        assert part in table, part


def test_a_stage_that_fails_is_shown_with_its_own_error_and_ends_everything(session: None, tmp_path: Path) -> None:
    said: list[str] = []
    shared = set(os.listdir("/dev/shm"))
    with pytest.raises(RunFailed) as failed:
        profile(ready(tmp_path, fails=True), 300.0, said.append)
    assert failed.value.first.group == "maker"
    assert "failed in maker.make: ArithmeticError: there is nothing to make" in failed.value.first.title
    logs = Path(said[-1].rpartition(": ")[2])
    assert "there is nothing to make" in (logs / "maker-0.log").read_text()
    deadline = time.monotonic() + 10
    while ranks() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert ranks() == []
    assert set(os.listdir("/dev/shm")) <= shared
    assert not (tmp_path / "run").exists()
