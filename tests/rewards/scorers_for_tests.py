"""Scorers that misbehave, each in its own way; loaded by the pool's subprocesses."""

from __future__ import annotations

import decimal
import os
import re
import subprocess
import sys
import threading

import numpy as np


class Abort(BaseException):
    """What some libraries raise for a time-out."""


class Wordless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def hang():
    """Never return: only a kill ends it."""
    threading.Event().wait()


def misbehave(response, answer):
    match response:
        case "slow":
            hang()
        case "lock":  # holds the interpreter's lock for ever
            re.match(r"(a+)+b", "a" * 64)
        case "exit":
            os._exit(3)
        case "raise":
            raise ValueError(f"boom {answer}")
        case "abort":
            raise Abort("stop")
        case "system exit":
            sys.exit(1)
        case "interrupt":
            raise KeyboardInterrupt
        case "wordless":
            raise Wordless
        case "memory":
            return len(bytearray(1 << 36))
        case "close":  # closes every pipe to the parent
            os.closerange(3, 64)
            hang()
        case "child":  # leaves a process of its own behind, then hangs
            child = subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"])
            with open(answer, "w") as file:
                file.write(str(child.pid))
            hang()
        case "print":
            print("a scorer's print goes to stderr")
    return {
        "none": None,
        "nan": float("nan"),
        "inf": np.float32("inf"),
        "text": "1.0",
        "array": np.ones(2),
        "true": True,
        "numpy": np.float64(0.25),
        "decimal": decimal.Decimal("0.5"),
        "zero": 0.0,
        "pid": os.getpid(),
        "main thread": threading.current_thread() is threading.main_thread(),
        "limit": answer,
    }.get(response, 1.0)


def scaled(response, metadata, *, factor=1.0):
    return factor * metadata["x"]


def refuses_to_start_again(response, answer):
    """Dies at once, and so does every later process: ``answer`` names a file that import looks at."""
    with open(os.environ["RLINF_TEST_BROKEN"], "w") as file:
        file.write("broken")
    os._exit(1)


if os.path.exists(os.environ.get("RLINF_TEST_BROKEN", "")):
    raise RuntimeError("broken for good")
