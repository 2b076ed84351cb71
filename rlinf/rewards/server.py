"""Server: the process that runs a scorer, one sample at a time, in its main thread.

Started by `rlinf.rewards.pool` as ``python -m rlinf.rewards.server CONNECTION LIFE``, two file descriptors. It is the
leader of its own process group, so that whatever a scorer starts can be killed with it. It says ``ready`` once the
scorer is loaded, then answers each sample with one message; messages are JSON, so that the parent never unpickles what
came out of untrusted code.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any

GIB = 1 << 30


def die_with_parent(life: int) -> None:
    """Let the kernel kill this process group when the other end of the pipe ``life`` closes, however that happens.

    On Linux the pipe raises SIGKILL for the group by itself: it works while a scorer holds the interpreter's lock (a
    runaway regular expression), takes along what the scorer started, and does not depend, as PR_SET_PDEATHSIG does, on
    the life of the thread that started the process. Elsewhere a thread waits for the end of the pipe.
    """
    import fcntl

    if sys.platform == "linux":
        fcntl.fcntl(life, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(life, 10, int(signal.SIGKILL))  # F_SETSIG, which the fcntl module does not name everywhere
        fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC | os.O_NONBLOCK)
        try:
            gone = os.read(life, 1) == b""  # the parent may have died before the signal was armed
        except BlockingIOError:
            gone = False
        if gone:
            os.killpg(0, signal.SIGKILL)
        return

    def watch() -> None:
        os.read(life, 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="parent-watch").start()


def limit_memory(gib: float) -> None:
    """Allow ``gib`` of address space beyond what is mapped now, so that it ends in a MemoryError."""
    import resource

    if gib <= 0 or sys.platform != "linux":
        return
    with open("/proc/self/statm") as statm:
        mapped = int(statm.read().split()[0]) * resource.getpagesize()
    limit = mapped + int(gib * GIB)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def judge(value: Any) -> tuple[str, float, str]:
    """(failure kind or "", score, message) of what a scorer returned."""
    if value is None:
        return "none", 0.0, "the scorer returned None; expected a number"
    shown = f"{type(value).__name__} {value!r:.200}"
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        return "not_a_number", 0.0, f"the scorer returned {shown}; expected a number"
    try:
        score = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        return "not_a_number", 0.0, f"the scorer returned {shown}, which is no number ({error})"
    if not math.isfinite(score):
        return "not_finite", 0.0, f"the scorer returned {shown}; expected a finite number"
    return "", score, ""


def serve(connection: Connection) -> None:
    """Load the scorer, then score until the parent closes the connection."""
    from rlinf.rewards.scorers import load_scorer, warm_up

    settings = pickle.loads(connection.recv_bytes())
    try:
        score = load_scorer(settings["scorer"], settings["params"])
        warm_up(settings["scorer"])
    except BaseException as error:
        _say(connection, "broken", 0.0, _describe(error))
        return
    limit_memory(settings["memory_gib"])
    _say(connection, "ready", 0.0, "")
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:
            return
        # A scorer may raise SystemExit, KeyboardInterrupt, or an exception of a library that derives from
        # BaseException: it is a failed sample, not the end of this process.
        try:
            kind, value, message = judge(score(*pickle.loads(request)))
        except BaseException as error:
            kind, value, message = "exception", 0.0, _describe(error)
        _say(connection, kind, value, message)


def _describe(error: BaseException) -> str:
    try:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
    except BaseException:  # an exception whose own text raises
        return type(error).__name__


def _say(connection: Connection, kind: str, value: float, message: str) -> None:
    connection.send_bytes(json.dumps([kind, value, message[:2000]]).encode())


if __name__ == "__main__":
    for descriptor in sys.argv[1:3]:
        os.set_inheritable(int(descriptor), False)  # what a scorer starts must not hold the pipes open
    die_with_parent(int(sys.argv[2]))
    serve(Connection(int(sys.argv[1])))
