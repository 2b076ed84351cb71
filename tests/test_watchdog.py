"""When the watchdog speaks, and when it ends a run: over a clock that the tests turn."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rlinf.failure import RunFailed
from rlinf.m2flow.timeline import Doing
from rlinf.m2flow.waits import RankId, State, Wait
from rlinf.vitals import Stacks
from rlinf.watchdog import Watchdog

MAKER, USER, IDLE = ("maker", 0), ("user", 1), ("aside", 0)
STALL_S, END_S = 300.0, 600.0


class Standing:
    """Ranks of which one is at work, one waits for it, and one has done its part."""

    def __init__(self, folder: Path) -> None:
        self.now = 1000.0
        self.asked = 0
        self.said: list[str] = []
        self.found: dict[RankId, State] = {
            MAKER: State(MAKER, "maker.make", None, 7, 50.0),
            USER: State(USER, "wait", Wait(Doing.ROWS, "rows of maker.make for user.use", (MAKER,)), 3, 20.0),
            IDLE: State(IDLE, "", None, 5, 10.0),
        }
        self.dog = Watchdog(STALL_S, END_S, folder, self.said.append, self, lambda: self.now)

    def states(self) -> dict[RankId, State]:
        self.asked += 1
        return dict(self.found)

    def stacks(self) -> dict[RankId, Stacks]:
        return {rank: Stacks(f"spot (of {rank[0]}.py:1)", f"stack of {rank[0]}") for rank in self.found}

    def place(self, rank: RankId) -> tuple[str, int]:
        return "here", 42

    def change(self, rank: RankId, **how) -> None:
        self.found[rank] = replace(self.found[rank], **how)

    def go(self, seconds: float, each: Callable[[], None] = lambda: None) -> None:
        """Time passes, with a tick of the driver every half second and ``each`` before each of 5 s."""
        for tick in range(int(seconds * 2)):
            if tick % 10 == 0:
                each()
            self.now += 0.5
            self.dog.look()


@pytest.fixture
def standing(tmp_path: Path) -> Standing:
    found = Standing(tmp_path)
    found.dog.rest()
    return found


def test_a_standstill_is_told_once_and_then_ends_the_run_with_its_cause(standing: Standing, tmp_path: Path) -> None:
    standing.go(STALL_S - 1)
    assert standing.said == []
    standing.go(STALL_S / 2)
    (said,) = standing.said
    assert said.startswith("nothing has moved for ")
    assert "the run ends if it stays so for 600 s" in said
    assert "waits in the end for maker rank 0, which has been in maker.make for" in said
    assert "user rank 1 waits for rows of maker.make for user.use from maker rank 0" in said
    assert "maker rank 0 is at spot (of maker.py:1)" in said
    file = (tmp_path / "stall-1.txt").read_text()
    assert all(f"stack of {rank[0]}" in file for rank in standing.found)
    assert "user rank 1, node here, pid 42" in file
    with pytest.raises(RunFailed) as failed:
        standing.go(2 * END_S)
    assert len(standing.said) == 1
    first = failed.value.first
    assert (first.group, first.rank, first.pid, first.doing, first.user) == ("maker", 0, 42, "maker.make", True)
    assert "the run stands still: nothing has moved for" in first.title
    assert f"{tmp_path / 'stall-1.txt'}" in first.title
    assert "raise cluster.stall_s" in first.title


def test_it_is_asked_a_few_times_within_the_limit_however_often_the_driver_ticks(standing: Standing) -> None:
    standing.go(STALL_S)
    assert standing.asked == 4


def test_whatever_happens_on_any_rank_is_a_movement(standing: Standing) -> None:
    for rank in standing.found:
        standing.go(STALL_S * 0.7)
        standing.change(rank, moves=standing.found[rank].moves + 1)
    standing.go(STALL_S * 0.7)
    assert standing.said == []


def test_a_rank_at_work_that_computes_is_said_to_be_busy_and_never_ended(standing: Standing) -> None:
    def compute() -> None:
        standing.change(MAKER, cpu_s=standing.found[MAKER].cpu_s + 4)

    standing.go(10 * STALL_S, compute)
    assert "no standstill" in standing.said[0]
    assert "maker rank 0 has been busy in maker.make for 300 s, and uses 80% of a core" in standing.said[0]
    assert "user" not in standing.said[0]
    assert len(standing.said) == 4, "after 1, 2, 4 and 8 times the limit"
    assert not list(standing.dog.folder.iterdir())
    with pytest.raises(RunFailed):  # and then it hangs
        standing.go(2 * (STALL_S + END_S))


def test_cpu_time_of_ranks_that_wait_or_have_nothing_to_do_is_no_movement(standing: Standing) -> None:
    def compute() -> None:
        for rank in (USER, IDLE):
            standing.change(rank, cpu_s=standing.found[rank].cpu_s + 5)

    with pytest.raises(RunFailed):
        standing.go(2 * (STALL_S + END_S), compute)


def test_a_standstill_that_ends_is_said_and_the_next_one_has_a_file_of_its_own(standing: Standing) -> None:
    standing.go(1.5 * STALL_S)
    standing.change(USER, moves=4)
    standing.go(STALL_S / 2)
    assert standing.said[1:] == ["it moves again"]
    standing.go(1.5 * STALL_S)
    assert "nothing has moved" in standing.said[2]
    assert sorted(path.name for path in standing.dog.folder.iterdir()) == ["stall-1.txt", "stall-2.txt"]


def test_a_file_of_an_earlier_part_of_the_run_stays(standing: Standing, tmp_path: Path) -> None:
    (tmp_path / "stall-1.txt").write_text("before the run was resumed")
    standing.go(1.5 * STALL_S)
    assert (tmp_path / "stall-1.txt").read_text() == "before the run was resumed"
    assert "stack of maker" in (tmp_path / "stall-2.txt").read_text()


def silent(standing: Standing, cpu_s: float) -> None:
    standing.found[MAKER] = State(MAKER, "", None, 0, cpu_s, silent=True)


def test_a_rank_that_falls_silent_now_and_then_does_not_move_by_that(standing: Standing) -> None:
    answers = itertools.cycle([standing.found[MAKER], State(MAKER, "", None, 0, 60.0, silent=True)])
    looks = [0]

    def flap() -> None:
        if standing.asked > looks[-1]:  # another answer at each look
            looks.append(standing.asked)
            standing.found[MAKER] = next(answers)

    with pytest.raises(RunFailed) as failed:
        standing.go(10 * (STALL_S + END_S), flap)
    assert failed.value.first.group == "maker"


def test_a_rank_that_is_silent_is_named_with_what_it_was_at(standing: Standing) -> None:
    standing.go(STALL_S / 2)
    silent(standing, 60.0)
    standing.go(STALL_S)
    assert "maker rank 0, which has been in maker.make for" in standing.said[0]
    assert "and does not answer" in standing.said[0]


def test_a_rank_that_is_silent_and_computes_is_busy(standing: Standing) -> None:
    standing.go(STALL_S / 2)
    silent(standing, 60.0)

    def compute() -> None:
        silent(standing, standing.found[MAKER].cpu_s + 5)

    standing.go(3 * STALL_S, compute)
    assert all("no standstill" in said for said in standing.said)


def test_nothing_under_way_is_no_standstill(standing: Standing) -> None:
    for _ in range(5):
        standing.go(0.9 * STALL_S)
        standing.dog.rest()
    assert standing.said == []


def test_limits_of_zero_turn_it_off(standing: Standing, tmp_path: Path) -> None:
    standing.dog.end_s = 0
    standing.go(20 * STALL_S)
    assert len(standing.said) == 1
    assert "the run ends" not in standing.said[0]
    standing.dog.stall_s, before = 0, standing.asked
    standing.go(20 * STALL_S)
    assert standing.asked == before


def test_a_folder_that_cannot_be_written_hides_nothing(standing: Standing, tmp_path: Path) -> None:
    standing.dog.folder = tmp_path / "gone"
    standing.go(1.5 * STALL_S)
    assert "the stacks could not be written" in standing.said[0]
    assert "maker rank 0 is at spot" in standing.said[0]
