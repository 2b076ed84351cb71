"""What a person sees: plain lines, the live view, stages that take long, streams that go away."""

from __future__ import annotations

import io
import math
import sys
import threading

import pytest
from rich.console import Console as RichConsole

from rlinf.config import LoggerConfig
from rlinf.console import LineConsole, SilentConsole, open_console
from rlinf.console.columns import duration, short
from rlinf.console.live import LiveConsole, View, frame
from rlinf.errors import ConfigError


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def values(step: int) -> dict[str, float]:
    return {
        "reward/mean": 0.25 + step / 100,
        "actor/kl_old": 2e-4 * step,
        "actor/entropy": math.nan if step == 2 else 1.5,
        "rollout/response_length": 20.0 + step,
        "rollout/truncated": 0.03,
        "perf/tokens_per_s": 312.4,
        "actor/lr": 1e-5,
    }


PHASES = {"rollout.generate": 6.1, "reference.logprobs": 1.2, "actor.train": 3.4, "critic.train": 2.0}


def test_lines_are_aligned_and_say_what_their_numbers_are():
    out, clock = io.StringIO(), Clock()
    console = LineConsole(out, clock=clock)
    console.header(["ppo on tiny", "actor: 1 device"])
    console.start(12, 0)
    console.evaluation(0, {"reward/mean": 0.25, "rollout/response_length": 20.0, "rollout/truncated": 0.0})
    for step in (1, 2):
        clock.now += 10.0 * step
        console.step(step, values(step), PHASES)
    console.step(3, {"reward/mean": -1.0, "time/step": 3.0}, {})
    console.note("saved")
    console.close()
    assert out.getvalue().splitlines() == [
        "ppo on tiny",
        "actor: 1 device",
        "eval  0/12  reward   0.250  length    20.0  cut      0%",
        "step  1/12  reward   0.260  kl  2.0e-04  entropy   1.500  length    21.0  cut      3%  tok/s     312"
        "    10.0 s  eta 1:50  | generate 6.1  actor.train 3.4  critic.train 2.0  logprobs 1.2",
        "step  2/12  reward   0.270  kl  4.0e-04  entropy       -  length    22.0  cut      3%  tok/s     312"
        "    20.0 s  eta 2:30  | generate 6.1  actor.train 3.4  critic.train 2.0  logprobs 1.2",
        "step  3/12  reward  -1.000     3.0 s  eta 1:39",
        "saved",
    ]


def test_an_evaluation_is_not_charged_to_the_next_step():
    clock = Clock()
    console = LineConsole(io.StringIO(), clock=clock)
    console.start(4, 2)
    clock.now = 100.0
    console.evaluation(2, {})
    clock.now = 103.0
    console.step(3, {}, {})
    assert console._left() == 3.0


def test_a_long_step_says_how_far_it_is_once_a_minute():
    out, clock = io.StringIO(), Clock()
    console = LineConsole(out, clock=clock)
    console.start(12, 0)
    for _ in range(130):
        clock.now += 1
        console.progress("rollout.generate", "rollout", clock.now, 130)
    assert out.getvalue().splitlines() == [
        "      1/12  rollout rollout.generate  46%",
        "      1/12  rollout rollout.generate  92%",
    ]


def test_a_stage_is_timed_and_a_failure_in_it_is_said():
    out, clock = io.StringIO(), Clock()
    console = LineConsole(out, clock=clock)
    with console.stage("cluster"):
        clock.now = 1.24

    def fails() -> None:
        with console.stage("models and data"):
            clock.now = 3.24
            raise KeyError("x")

    with pytest.raises(KeyError):
        fails()
    assert out.getvalue().splitlines() == ["cluster            1.2 s", "models and data    failed after 2.0 s"]


class Heard(io.StringIO):
    """A stream that sets an event when a text is written to it."""

    def __init__(self, text: str):
        super().__init__()
        self.text, self.event = text, threading.Event()

    def write(self, text: str) -> int:
        if self.text in text:
            self.event.set()
        return super().write(text)


@pytest.mark.parametrize("how", ["waiting", "progress", "note"])
def test_a_stage_that_takes_long_says_what_it_waits_for(how):
    out = Heard("waiting: ")
    console = LineConsole(out, remind_s=0.01)
    with console.stage("cluster") as stage:
        if how == "waiting":
            stage.waiting("1 of 2 nodes")
        elif how == "note":
            console.note("1 of 2 nodes")
        else:
            console.progress("loads", "actor", 1, 2)
        assert out.event.wait(10)
    told = next(line for line in out.getvalue().splitlines() if "waiting" in line)
    assert told.startswith("cluster            0 s so far, waiting: ")
    assert told.endswith("actor: loads 50%" if how == "progress" else "1 of 2 nodes")


def test_a_stream_that_went_away_or_lacks_letters_does_not_raise():
    gone = io.StringIO()
    gone.close()
    console = LineConsole(gone, gone)
    console.note("x")
    console.error("y")
    plain = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    LineConsole(plain).note("größer ✓")
    assert plain.buffer.getvalue() == b"gr??er ?\n"


def test_off_says_errors_alone():
    out, errors = io.StringIO(), io.StringIO()
    console = SilentConsole(out, errors)
    with console.stage("cluster"):
        console.header("x")
    console.start(2, 0)
    console.step(1, values(1), PHASES)
    console.note("n")
    console.error("actor rank 0 failed")
    assert out.getvalue() == ""
    assert errors.getvalue() == "actor rank 0 failed\n"


def test_the_console_is_chosen_by_the_config_and_the_terminal(monkeypatch):
    assert isinstance(open_console(LoggerConfig(console="off")), SilentConsole)
    assert isinstance(open_console(LoggerConfig(console="live")), LiveConsole)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)
    assert isinstance(open_console(LoggerConfig()), LineConsole)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(open_console(LoggerConfig()), LiveConsole)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(open_console(LoggerConfig()), LineConsole)
    with pytest.raises(ConfigError, match="'fancy'; it is one of auto, live, lines, off"):
        open_console(LoggerConfig(console="fancy"))


def drawn(view: View, width: int = 100, **options) -> str:
    rich = RichConsole(width=width, file=io.StringIO())
    rich.print(frame(view, width=width, **options))
    return rich.file.getvalue()


def live(terminal: RichConsole) -> tuple[LiveConsole, Clock]:
    clock = Clock()
    console = LiveConsole(terminal, errors=io.StringIO(), clock=clock)
    console.start(12, 0)
    console.evaluation(0, {"reward/mean": 0.25})
    for step in range(1, 4):
        clock.now += 10.0
        console.step(step, values(step), PHASES)
    clock.now += 4.0
    console.progress("generate", "rollout", 21, 32)
    console.progress("score", "reward", 0, 0)
    return console, clock


def test_the_live_view_shows_step_worker_values_course_and_times():
    terminal = RichConsole(width=100, file=io.StringIO(), force_terminal=True)
    console, _ = live(terminal)
    told = drawn(console.view())
    for text in (
        "step 3/12",
        "0:34  eta 1:30",
        "rollout generate",
        "66%",
        "reward  score",
        "eval 0",
        "step 3",
        "0.280",
    ):
        assert text in told, text
    for text in ("0.260 to 0.280", "generate", "6.1 s  48%", "actor.train", "tok/s", "6.0e-04"):
        assert text in told, text
    with console.stage("checkpoint"):
        console.note("above the view")
    console.error("boom")
    console.close()
    shown = terminal.file.getvalue()
    assert "above the view" in shown
    assert "checkpoint         0.0 s" in shown


def test_the_view_fits_a_low_and_narrow_terminal_without_block_letters():
    console, _ = live(RichConsole(width=60, file=io.StringIO()))
    console.close()
    told = drawn(console.view(), width=60, ascii_only=True, height=5)
    assert "step 2" in told
    assert "step 1 " not in told
    assert "…" not in told  # columns are left out rather than cut
    assert all(len(line) <= 60 for line in told.splitlines())


def test_an_empty_view_and_a_run_without_reward_draw():
    assert "step 0/0" in drawn(View())
    drawn(View(rewards=[math.nan, math.nan]))
    assert "last step" not in drawn(View(phases={"a": 0.0}))
    assert "0.04 s" in drawn(View(phases={"a": 0.04}))


@pytest.mark.parametrize(("value", "text"), [(0, "0:00"), (59.6, "1:00"), (754, "12:34"), (3723, "1:02:03")])
def test_durations(value, text):
    assert duration(value) == text


def test_phases_have_their_short_names_where_these_are_unique():
    assert short({"actor.train": 1.0, "critic.train": 2.0, "reward.score": 3.0}) == [
        ("score", 3.0),
        ("critic.train", 2.0),
        ("actor.train", 1.0),
    ]
    assert short({"a": 5.0, "b": 0.09}) == [("a", 5.0)]
    assert short({"a": 0.05, "b": 0.04}) == [("a", 0.05), ("b", 0.04)]
