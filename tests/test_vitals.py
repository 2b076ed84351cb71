"""What can be seen of a process: its CPU time, and where its threads are."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlinf.vitals import STACKS, cpu_seconds, kernel_view, stacks_from_outside, stacks_of

BURN = "import time\nwhile time.process_time() < {}: pass\n"
HANG = """
import ctypes, faulthandler, os, sys
faulthandler.register({signal}, file=open(sys.argv[1], "w"))
def in_native_code():
    print("there", flush=True)
    ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)  # it keeps Python's lock
in_native_code()
"""


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen]]:
    processes: list[subprocess.Popen] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_children_count_also_when_they_have_ended() -> None:
    before = cpu_seconds(os.getpid())
    subprocess.run([sys.executable, "-c", BURN.format(0.5)], check=True)
    once = cpu_seconds(os.getpid())
    assert once - before > 0.4  # the kernel counts in hundredths
    subprocess.run([sys.executable, "-c", BURN.format(0.5)], check=True)
    assert cpu_seconds(os.getpid()) - once > 0.4


def test_a_process_that_is_gone_has_used_nothing_and_is_said_to_be_gone(started: list[subprocess.Popen]) -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    assert cpu_seconds(process.pid) == 0
    assert stacks_from_outside(process.pid).short == "its process is gone"


def test_the_thread_that_works_is_shown_by_its_innermost_functions() -> None:
    there, leave = threading.Event(), threading.Event()

    def waits_for_ever() -> None:
        there.set()
        leave.wait()

    thread = threading.Thread(target=waits_for_ever, name="program")
    thread.start()
    assert there.wait(10)
    assert thread.ident is not None
    frames = {thread.ident: sys._current_frames()[thread.ident]}
    found = stacks_of(frames, {thread.ident: "program"}, thread.ident, os.getpid())
    leave.set()
    thread.join()
    assert "waits_for_ever (test_vitals.py:" in found.short
    assert "thread program:" in found.whole
    assert f"task {os.getpid()} (" in found.whole


def test_a_process_that_keeps_pythons_lock_still_writes_its_stacks_when_it_is_asked(
    started: list[subprocess.Popen], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-c", HANG.format(signal=int(STACKS)), str(log)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    started.append(process)
    assert process.stdout is not None
    assert process.stdout.readline() == "there\n"
    until(lambda: "state S" in kernel_view(process.pid)[0])
    found = stacks_from_outside(process.pid)
    assert "state S, waits in the kernel at" in found.short
    assert "at the end of its log" in found.whole
    until(lambda: "in_native_code" in log.read_text())
    assert process.poll() is None


def test_a_process_that_would_not_survive_the_question_is_not_asked(started: list[subprocess.Popen]) -> None:
    process = subprocess.Popen(["sleep", "60"])
    started.append(process)
    found = stacks_from_outside(process.pid)
    assert "there are no Python stacks of it" in found.whole
    assert process.poll() is None
