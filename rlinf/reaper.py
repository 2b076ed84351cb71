"""Ends what a run started, however the run itself ends: ``kill -9`` of the driver leaves nothing behind.

A driver that starts a Ray cluster of its own starts this program with a pipe, and tells it which processes are below
it. When the pipe closes, the driver is gone, and what is left of them is ended. Processes that came later carry a mark
in their environment, which every process inherits. (Ray's own agents, which overwrite their environment, would
otherwise wait a minute for a head that will not come back.)
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import uuid
from pathlib import Path

import psutil

MARK = "RLINF_RUN"
GRACE_S = 2.0  # for processes that are leaving by themselves


class Reaper:
    """The driver's end. Off Linux nothing can be found by its mark; what was told by `remember` is."""

    def __init__(self) -> None:
        token = uuid.uuid4().hex
        env = dict(os.environ)  # the reaper itself does not carry the mark
        os.environ[MARK] = token
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rlinf.reaper", token],
            stdin=subprocess.PIPE,
            env=env,
            start_new_session=True,  # Ctrl-C in a terminal is not for it
        )

    def remember(self) -> None:
        """Tell it all processes that are below this one now."""
        below = psutil.Process().children(recursive=True)
        self._write([(p.pid, p.create_time()) for p in below if p.pid != self._process.pid])

    def _write(self, found: list[tuple[int, float]]) -> None:
        assert self._process.stdin is not None
        for pid, created in found:
            self._process.stdin.write(f"{pid} {created}\n".encode())
        self._process.stdin.flush()

    def close(self) -> None:
        """The run is over: what is left ends now."""
        os.environ.pop(MARK, None)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # somebody ended the reaper
            self._process.stdin.close()
        self._process.wait()


def left(token: str, told: dict[int, float]) -> list[psutil.Process]:
    """Processes that were told of, or whose environment carries the mark, and that are alive."""
    found = []
    wanted = f"{MARK}={token}".encode()
    for process in psutil.process_iter():
        # Any of them may end while it is looked at, or be another user's.
        with contextlib.suppress(psutil.Error, OSError):
            known = told.get(process.pid) == process.create_time()
            if known or wanted in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                found.append(process)
    return found


def sweep(token: str, told: dict[int, float]) -> None:
    """End them: after a moment in which they may leave by themselves, by SIGKILL, until none is left."""
    psutil.wait_procs(left(token, told), timeout=GRACE_S)
    for _ in range(50):
        rest = left(token, told)
        for process in rest:
            with contextlib.suppress(psutil.Error):
                process.kill()
        if not psutil.wait_procs(rest, timeout=0.2)[1]:
            return


def main() -> None:
    told = {}
    for line in sys.stdin:
        pid, created = line.split()
        told[int(pid)] = float(created)
    sweep(sys.argv[1], told)


if __name__ == "__main__":
    main()
