"""Signs of life of a process: the CPU time that it uses, and what its threads are at. Linux."""

from __future__ import annotations

import contextlib
import os
import signal
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

# A rank that gets it writes the Python stacks of its threads to its log. Not one that libraries or job schedulers use.
STACKS = signal.SIGRTMAX - 3
_SHORT = 3  # frames that are shown to a person


@dataclass(frozen=True)
class Stacks:
    """What the threads of a process are at.

    Attributes:
        short: one line on the thread that does the work.
        whole: all of them, as Python and the kernel see them.
    """

    short: str
    whole: str


def cpu_seconds(pid: int) -> float:
    """CPU seconds that a process and its children have used, children that have ended included; 0 of one that is gone.

    Those of a child that has ended and was not waited for are missing, so the sum may shrink.
    """
    import psutil

    used = 0.0
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):  # it has just ended
                times = each.cpu_times()
                used += times.user + times.system + times.children_user + times.children_system
    return used


def stacks_of(frames: Mapping[int, FrameType], names: Mapping[int | None, str], works: int, pid: int) -> Stacks:
    """Those of this process.

    Args:
        frames: innermost frame of each thread, by its number.
        names: of the threads.
        works: the thread that does the work.
        pid: of this process.
    """
    found = [f"thread {names.get(number, number)}:\n{_formatted(frame)}" for number, frame in frames.items()]
    short = ""
    if works in frames:
        innermost = reversed(traceback.extract_stack(frames[works])[-_SHORT:])
        short = " < ".join(f"{f.name} ({os.path.basename(f.filename)}:{f.lineno})" for f in innermost)
    return Stacks(short, "\n".join([*found, *kernel_view(pid)]))


def stacks_from_outside(pid: int) -> Stacks:
    """Those of a process of this node that does not answer: the kernel's view; its log gets Python's if that works."""
    view = kernel_view(pid)  # before it is disturbed
    asked = _asked(pid)
    short = view[0] if view else "its process is gone"
    log = "its Python stacks are at the end of its log" if asked else "there are no Python stacks of it"
    return Stacks(short, "\n".join([*view, log]))


def kernel_view(pid: int) -> list[str]:
    """A line for each thread of a process, the main one first, and for each of its children."""
    import psutil

    main = Path(f"/proc/{pid}/task/{pid}")
    with contextlib.suppress(OSError):
        tasks = sorted(main.parent.iterdir(), key=lambda task: (task != main, int(task.name)))
        lines = [f"task {task.name} {line}" for task in tasks if (line := _task(task))]
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(pid).children(recursive=True):
                if line := _task(Path(f"/proc/{child.pid}")):
                    lines.append(f"child {child.pid} {line}")
        return lines
    return []


def _task(folder: Path) -> str:
    with contextlib.suppress(OSError):
        state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        comm, wchan = (folder / "comm").read_text().strip(), (folder / "wchan").read_text().strip()
        return f"({comm}): state {state}, waits in the kernel at {wchan if wchan != '0' else '-'}"
    return ""


def _asked(pid: int) -> bool:
    """Ask for Python's stacks, if the process has said what to do on the signal: it would end it otherwise."""
    with contextlib.suppress(OSError, StopIteration, ValueError):
        status = Path(f"/proc/{pid}/status").read_text().splitlines()
        caught = int(next(line for line in status if line.startswith("SigCgt:")).split()[1], 16)
        if caught >> (STACKS - 1) & 1:
            os.kill(pid, STACKS)
            return True
    return False


def _formatted(frame: FrameType) -> str:
    return "".join(traceback.format_stack(frame)).rstrip()
