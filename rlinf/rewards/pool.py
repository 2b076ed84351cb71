"""ScorerPool: scoring in subprocesses that can be killed.

A pool is driven by the thread that calls `score`, any thread, and needs none of its own: it hands each idle subprocess
one sample, waits on all connections at once until the nearest deadline, and kills and replaces a subprocess whose
sample is late. A slow sample so costs its own slot and no other.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from rlinf.config import RewardConfig
from rlinf.errors import ConfigError
from rlinf.rewards.scorers import check_settings

START_S = 120.0  # to import a scorer's libraries, on a busy machine
MESSAGE_S = 10.0  # for one message to pass through the pipe
MESSAGE_BYTES = 1 << 20
START_TRIES = 3  # starts of one slot that may fail in a row


class Sample(NamedTuple):
    """What a scorer sees of one response."""

    response: str
    answer: Any
    question: str
    metadata: dict[str, Any]


@dataclass
class Scored:
    """The scores of a list of samples, in its order.

    Attributes:
        scores: one for each sample; failed ones have the configured ``error_score``.
        failed: for each sample, the kind of its failure, or "" (a score of 0.0 is none). Kinds: ``timeout``,
            ``exception``, ``died`` (the process ended), ``none``, ``not_finite``, ``not_a_number``, ``unsendable``,
            ``unavailable`` (no process could be started).
        first: the first message of each kind.
    """

    scores: list[float]
    failed: list[str]
    first: dict[str, str] = field(default_factory=dict)

    @property
    def failures(self) -> Counter[str]:
        """How many samples failed, by kind."""
        return Counter(kind for kind in self.failed if kind)


class Answer(NamedTuple):
    """A message of a subprocess: ``ready``, ``broken``, a kind of failure, or "" with a score."""

    kind: str
    score: float
    message: str


class _Slot:
    """One subprocess, and what it is doing: starting, idle, or scoring the sample ``index``."""

    def __init__(self, settings: bytes) -> None:
        self._settings = settings
        self.ready = False
        self.index: int | None = None
        self.failed_starts = 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        ours, theirs = socket.socketpair()
        life_read, life_write = os.pipe()
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "OMP_NUM_THREADS": "1",  # subprocesses score side by side
        }
        # Text hashes, and so the order of sets, are otherwise different in every process.
        environment.setdefault("PYTHONHASHSEED", "0")
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rlinf.rewards.server", str(theirs.fileno()), str(life_read)],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a scorer prints is a message to people
                pass_fds=(theirs.fileno(), life_read),
                env=environment,
                start_new_session=True,  # Ctrl-C is the parent's to handle; killpg takes what a scorer started
            )
        finally:
            theirs.close()
            os.close(life_read)
        # A subprocess that reads or writes half a message is treated as dead, not waited for.
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(MESSAGE_S), 0))
        self._life = os.fdopen(life_write, "wb", buffering=0)
        self.connection = Connection(ours.detach())
        self.ready, self.index = False, None
        self.deadline = time.monotonic() + START_S
        with contextlib.suppress(OSError):  # it died at once: seen as the end of its connection
            self.connection.send_bytes(self._settings)

    @property
    def alive(self) -> bool:
        return self._process is not None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def receive(self) -> Answer:
        """What the subprocess says; ``died`` when it ended, or what came is not a message."""
        try:
            kind, value, message = json.loads(self.connection.recv_bytes(MESSAGE_BYTES))
            return Answer(str(kind), float(value), str(message))
        except (EOFError, OSError, ValueError, TypeError):
            status = self.stop(grace=1.0)
            how = f"signal {-status}" if status < 0 else f"exit code {status}"
            return Answer("died", 0.0, f"the scorer's process ended with {how} (os._exit, a crash, or out of memory)")

    def stop(self, grace: float = 0.0) -> int:
        """Kill the subprocess and all that it started; returns its exit status (negative: the signal).

        One that is ending by itself is given ``grace`` seconds, for the sake of its own exit status.
        """
        process, self._process = self._process, None
        if process is None:
            return 0
        self.connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        status = process.wait()
        self._life.close()
        self.ready, self.index = False, None
        return status


class ScorerPool:
    """Subprocesses that score samples.

    Args:
        cfg: which scorer, its parameters, its time, how many subprocesses.

    Raises:
        ConfigError: a setting makes no sense, or the scorer cannot be loaded in its subprocess; carries the reason.
    """

    def __init__(self, cfg: RewardConfig) -> None:
        check_settings(cfg)
        self._cfg = cfg
        settings = {"scorer": cfg.scorer, "params": dict(cfg.params), "memory_gib": cfg.memory_gib}
        self._slots = [_Slot(pickle.dumps(settings)) for _ in range(cfg.processes)]
        self._lock = threading.Lock()
        self._closed = False
        try:
            self._start_all()
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids of the running subprocesses."""
        return [slot.pid for slot in self._slots if slot.pid is not None]

    def score(self, samples: Sequence[Sample], progress: Callable[[int, int], None] | None = None) -> Scored:
        """Score all samples; never raises for what a scorer does.

        Args:
            samples: in any order, any number.
            progress: called with (done, total) after each sample.
        """
        if self._closed:
            raise RuntimeError("the scorer pool is closed")
        with self._lock:
            try:
                return _Round(self, samples, progress).run()
            except BaseException:  # Ctrl-C: nobody will take the answers that are still under way
                for slot in self._slots:
                    slot.stop()
                raise

    def close(self) -> None:
        """Kill the subprocesses and wait for them. May be called twice."""
        self._closed = True
        for slot in self._slots:
            slot.stop()

    def __enter__(self) -> ScorerPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _wait(self, slots: Sequence[_Slot]) -> list[tuple[_Slot, int | None, Answer]]:
        """Wait for answers or the nearest deadline; gives (slot, its sample, answer). A late slot is killed."""
        nearest = min(slot.deadline for slot in slots)
        spoken = wait([slot.connection for slot in slots], max(0.0, nearest - time.monotonic()))
        now = time.monotonic()
        events: list[tuple[_Slot, int | None, Answer]] = []
        for slot in slots:
            index = slot.index
            if slot.connection in spoken:
                events.append((slot, index, slot.receive()))
            elif slot.deadline <= now:
                limit = f"{START_S:g} s to start" if index is None else f"{self._cfg.timeout_s:g} s (reward.timeout_s)"
                slot.stop()
                events.append((slot, index, Answer("timeout", 0.0, f"the scorer took longer than {limit}; killed")))
        return events

    def _start_all(self) -> None:
        for slot in self._slots:
            slot.start()
        while starting := [slot for slot in self._slots if not slot.ready]:
            for slot, _, answer in self._wait(starting):
                if answer.kind != "ready":
                    raise ConfigError(
                        f"reward.scorer {self._cfg.scorer!r} cannot be loaded in its process: {answer.message}"
                    )
                slot.ready = True


class _Round:
    """One call of `ScorerPool.score`."""

    def __init__(
        self, pool: ScorerPool, samples: Sequence[Sample], progress: Callable[[int, int], None] | None
    ) -> None:
        self._pool = pool
        self._cfg = pool._cfg
        self._samples = samples
        self._progress = progress
        self._waiting = deque(range(len(samples)))
        self._done = 0
        self._why_unavailable = ""
        self._scored = Scored([self._cfg.error_score] * len(samples), [""] * len(samples))

    def run(self) -> Scored:
        slots = self._pool._slots
        for slot in slots:
            slot.failed_starts = 0
        while self._done < len(self._samples):
            for slot in slots:
                if self._waiting and not slot.alive and slot.failed_starts < START_TRIES:
                    slot.start()
                while self._waiting and slot.ready and slot.index is None:
                    self._send(slot, self._waiting.popleft())
            busy = [slot for slot in slots if slot.alive and (slot.index is not None or not slot.ready)]
            if busy and self._done < len(self._samples):
                for slot, index, answer in self._pool._wait(busy):
                    self._take(slot, index, answer)
            elif all(not slot.alive and slot.failed_starts >= START_TRIES for slot in slots):
                while self._waiting:
                    self._finish(self._waiting.popleft(), Answer("unavailable", 0.0, self._why_unavailable))
        return self._scored

    def _take(self, slot: _Slot, index: int | None, answer: Answer) -> None:
        if index is not None:
            slot.index = None
            self._finish(index, answer)
        elif answer.kind == "ready":
            slot.ready, slot.failed_starts = True, 0
        else:
            slot.stop()
            slot.failed_starts += 1
            self._why_unavailable = f"no scorer process could be started again: {answer.message}"

    def _send(self, slot: _Slot, index: int) -> None:
        try:
            request = pickle.dumps(tuple(self._samples[index]))
        # Pickling runs code of whatever the metadata holds.
        except Exception as error:
            message = f"the sample cannot be pickled: {type(error).__name__}: {error}"
            self._finish(index, Answer("unsendable", 0.0, message))
            return
        try:
            slot.connection.send_bytes(request)
        except OSError:  # it died between two samples; the sample goes to another
            slot.stop()
            self._waiting.appendleft(index)
            return
        slot.index, slot.deadline = index, time.monotonic() + self._cfg.timeout_s

    def _finish(self, index: int, answer: Answer) -> None:
        self._done += 1
        if answer.kind:
            self._scored.failed[index] = answer.kind
            self._scored.first.setdefault(answer.kind, answer.message)
        else:
            self._scored.scores[index] = answer.score
        if self._progress is not None:
            self._progress(self._done, len(self._samples))
