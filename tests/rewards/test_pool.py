"""Whatever a scorer does, the run goes on, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from rlinf.config import RewardConfig
from rlinf.errors import ConfigError
from rlinf.rewards import Sample, ScorerPool

MISBEHAVE = "tests.rewards.scorers_for_tests:misbehave"


def samples(*responses: str) -> list[Sample]:
    return [Sample(response, "", "", {}) for response in responses]


def gone(pid: int, within_s: float = 20.0) -> bool:
    """Whether the process ends (a zombie, which its reaper has not fetched yet, has ended)."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rsplit(")", 1)[1].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


@pytest.fixture(scope="module")
def pool():
    with ScorerPool(RewardConfig(scorer=MISBEHAVE, timeout_s=1.0, processes=2, error_score=-1.0)) as made:
        yield made


@pytest.mark.parametrize(
    ("response", "kind", "said"),
    [
        ("slow", "timeout", "longer than 1 s"),
        ("lock", "timeout", "longer than 1 s"),
        ("exit", "died", "exit code 3"),
        ("close", "died", "ended"),
        ("raise", "exception", "ValueError: boom"),
        ("abort", "exception", "Abort: stop"),
        ("system exit", "exception", "SystemExit"),
        ("interrupt", "exception", "KeyboardInterrupt"),
        ("wordless", "exception", "Wordless"),
        ("memory", "exception", "MemoryError"),
        ("none", "none", "None"),
        ("nan", "not_finite", "nan"),
        ("inf", "not_finite", "inf"),
        ("text", "not_a_number", "'1.0'"),
        ("array", "not_a_number", "ndarray"),
    ],
)
def test_a_failure_is_counted_by_kind_scores_error_score_and_costs_no_other_sample(pool, response, kind, said):
    scored = pool.score(samples("good", response, "zero", "good"))
    assert scored.scores == [1.0, -1.0, 0.0, 1.0]
    assert scored.failed == ["", kind, "", ""]
    assert scored.failures == {kind: 1}
    assert said in scored.first[kind]


def test_numbers_of_all_kinds_are_scores(pool):
    scored = pool.score(samples("true", "numpy", "decimal", "zero", "print"))
    assert scored.scores == [1.0, 0.25, 0.5, 0.0, 1.0]
    assert not scored.failures


def test_results_come_back_in_the_order_of_the_samples_with_the_first_message_of_a_kind(pool):
    many = [Sample("limit", float(i), "", {}) for i in range(50)]
    many[10], many[20] = Sample("raise", "A", "", {}), Sample("raise", "B", "", {})
    seen: list[tuple[int, int]] = []
    scored = pool.score(many, lambda done, total: seen.append((done, total)))
    assert [s for s, f in zip(scored.scores, scored.failed, strict=True) if not f] == [
        float(i) for i in range(50) if i not in (10, 20)
    ]
    assert scored.failures == {"exception": 2}
    assert seen == [(i, 50) for i in range(1, 51)]


def test_a_sample_that_cannot_be_sent_is_counted(pool):
    scored = pool.score([Sample("good", threading.Lock(), "", {}), *samples("good")])
    assert (scored.failed, scored.scores) == (["unsendable", ""], [-1.0, 1.0])


def test_no_samples_give_no_scores(pool):
    assert pool.score([]).scores == []


def test_a_response_larger_than_a_pipe_passes(pool):
    assert pool.score(samples("x" * 3_000_000)).scores == [1.0]


def test_every_sample_failing_is_not_the_end(pool):
    scored = pool.score(samples(*["exit"] * 5))
    assert scored.scores == [-1.0] * 5
    assert scored.failures == {"died": 5}
    assert pool.score(samples("good")).scores == [1.0]


def test_one_slow_sample_holds_up_its_own_slot_alone():
    with ScorerPool(RewardConfig(scorer=MISBEHAVE, timeout_s=3.0, processes=2)) as pool:
        slots = pool.pids
        scored = pool.score(samples("slow", *["pid"] * 20))
    assert scored.failed == ["timeout", *[""] * 20]
    # All others were scored by the other process, before the slow one was given up and replaced.
    assert len(set(scored.scores[1:])) == 1
    assert scored.scores[1] in slots


def test_it_works_off_the_main_thread_and_scores_in_a_main_thread(pool):
    found: list[list[float]] = []
    thread = threading.Thread(target=lambda: found.append(pool.score(samples("main thread", "slow", "good")).scores))
    thread.start()
    thread.join()
    assert found == [[1.0, -1.0, 1.0]]


def test_a_pool_made_in_a_thread_outlives_it():
    made: list[ScorerPool] = []
    thread = threading.Thread(target=lambda: made.append(ScorerPool(RewardConfig(scorer=MISBEHAVE))))
    thread.start()
    thread.join()
    with made[0] as pool:
        assert pool.score(samples("good")).failed == [""]


def test_parameters_are_bound_and_only_named_arguments_are_passed():
    cfg = RewardConfig(scorer="tests.rewards.scorers_for_tests.scaled", params={"factor": 3.0})
    with ScorerPool(cfg) as pool:
        assert pool.score([Sample("", "", "", {"x": 2.0})]).scores == [6.0]


def test_close_leaves_no_process_and_may_come_twice():
    pool = ScorerPool(RewardConfig(scorer=MISBEHAVE, timeout_s=60, processes=2))
    pids = pool.pids
    assert len(pids) == 2
    pool.close()
    pool.close()
    assert all(gone(pid) for pid in pids)
    assert pool.pids == []
    with pytest.raises(RuntimeError, match="closed"):
        pool.score(samples("good"))


def test_a_late_scorer_is_killed_with_what_it_started(tmp_path):
    note = tmp_path / "pid"
    with ScorerPool(RewardConfig(scorer=MISBEHAVE, timeout_s=5.0)) as pool:
        scored = pool.score([Sample("child", str(note), "", {})])
    assert scored.failed == ["timeout"]
    assert gone(int(note.read_text()))


PARENT = """
import os, sys, threading
from rlinf.config import RewardConfig
from rlinf.rewards import Sample, ScorerPool

pool = ScorerPool(RewardConfig(scorer="tests.rewards.scorers_for_tests:misbehave", timeout_s=3600, processes=3))
print(*pool.pids, flush=True)
responses = [("lock", ""), ("child", sys.argv[1])]
pool.score([Sample(r, a, "", {}) for r, a in responses])
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_no_process_outlives_its_parent_however_that_ends(tmp_path, how):
    note = tmp_path / "pid"
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PARENT), str(note)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 3
        until = time.monotonic() + 30
        while not (note.exists() and note.read_text()):  # the scorers are at work: one holds its lock, one has a child
            assert time.monotonic() < until
            time.sleep(0.02)
        os.kill(parent.pid, how)
        parent.wait(30)
        assert all(gone(pid) for pid in [*pids, int(note.read_text())])
    finally:
        parent.kill()
        parent.wait()


def test_a_scorer_that_cannot_be_loaded_is_an_error_at_the_start():
    with pytest.raises(ConfigError, match=r"cannot be loaded in its process: ConfigError.*no_such_module"):
        ScorerPool(RewardConfig(scorer="no_such_module:score"))
    with pytest.raises(ConfigError, match=r"reward\.processes=0"):
        ScorerPool(RewardConfig(scorer=MISBEHAVE, processes=0))


def test_a_pool_whose_processes_no_longer_start_gives_error_scores(tmp_path, monkeypatch):
    monkeypatch.setenv("RLINF_TEST_BROKEN", str(tmp_path / "broken"))
    cfg = RewardConfig(scorer="tests.rewards.scorers_for_tests:refuses_to_start_again", error_score=-1.0)
    with ScorerPool(cfg) as pool:
        scored = pool.score(samples("a", "b", "c"))
    assert scored.failed == ["died", "unavailable", "unavailable"]
    assert scored.scores == [-1.0] * 3
    assert "broken for good" in scored.first["unavailable"]
