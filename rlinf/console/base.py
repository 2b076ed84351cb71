"""`Console`: what every kind of it can be told, and what they share: stages that speak up, and the time left."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TextIO

from rlinf.console.columns import seconds


class Stage:
    """A stage of the start that is under way."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.waits_for = ""

    def waiting(self, what: str) -> None:
        """Say what it waits for now; shown when the stage takes long."""
        self.waits_for = what


class Console:
    """Base of all kinds, and the one that says nothing (`SilentConsole`) but errors.

    None of its methods raises: a terminal that went away does not end a run.
    """

    def __init__(
        self,
        out: TextIO | None = None,
        errors: TextIO | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        remind_s: float = 10.0,
    ) -> None:
        self._out, self._errors = out or sys.stdout, errors or sys.stderr
        self._clock, self._remind_s = clock, remind_s
        self._lock = threading.RLock()
        self._stage: Stage | None = None
        self._doing: dict[str, tuple[str, float, float]] = {}  # worker: phase, done, total
        self._total = 0
        self._step = 0
        self._begun = self._last = clock()
        self._took: deque[float] = deque(maxlen=8)

    # What a run tells.

    @contextmanager
    def stage(self, name: str) -> Iterator[Stage]:
        """A stage of the start, timed. One that takes long says every ``remind_s`` seconds what it waits for."""
        begun, over, told = self._clock(), threading.Event(), Stage(name)
        outer, self._stage = self._stage, told
        watcher = threading.Thread(target=self._remind, args=(told, begun, over), daemon=True)
        watcher.start()
        ended = "failed after "
        try:
            yield told
            ended = ""
        finally:
            over.set()
            watcher.join()
            self._stage = outer
            with self._lock:
                self._doing.clear()
                self._say(f"{name:<18} {ended}{self._clock() - begun:.1f} s")

    def header(self, lines: Sequence[str] | str) -> None:
        """What this run is: placement, batch sizes, memory."""
        for line in [lines] if isinstance(lines, str) else lines:
            self._say(line)

    def start(self, total_steps: int, first_step: int) -> None:
        """Training starts. ``first_step`` counts the steps that are done already (0, or those of the checkpoint)."""
        with self._lock:
            self._total, self._step = total_steps, first_step
            self._begun = self._last = self._clock()

    def progress(self, phase: str, worker: str, done: float, total: float) -> None:
        """How far a worker is in the stage that it runs now; ``total`` 0: not known."""
        with self._lock:
            self._doing[worker] = (phase, done, total)

    def step(self, step: int, values: Mapping[str, float], phases: Mapping[str, float]) -> None:
        """A step is done: its metrics by name, and the seconds that each phase took."""
        with self._lock:
            now = self._clock()
            self._took.append(seconds(values, phases, now - self._last))
            self._last, self._step = now, step
            self._doing.clear()

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """An evaluation after ``step`` steps; names as those of a step."""
        with self._lock:
            self._last = self._clock()  # the next step is not charged for it
            self._doing.clear()

    def note(self, text: str) -> None:
        """Something to know."""
        if self._stage is not None:
            self._stage.waits_for = text
        self._say(text)

    def error(self, text: str) -> None:
        """Something that went wrong; also where the console is off."""
        self._write(self._errors, text)

    def close(self) -> None:
        """The end, also after a failure. Calling it again does nothing."""

    # What the kinds share.

    def _say(self, text: str) -> None:
        """A line for the person who watches."""

    def _write(self, stream: TextIO, text: str) -> None:
        encoding = getattr(stream, "encoding", None) or "utf-8"
        with self._lock, contextlib.suppress(OSError, ValueError):  # closed, or a pipe whose reader went away
            stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
            stream.flush()

    def _left(self) -> float | None:
        """Seconds until the last step is done, from the last steps."""
        if not self._took:
            return None
        return sum(self._took) / len(self._took) * max(self._total - self._step, 0)

    def _remind(self, stage: Stage, begun: float, over: threading.Event) -> None:
        while not over.wait(self._remind_s):
            with self._lock:
                doing = ", ".join(f"{worker}: {phase}{_share(d, t)}" for worker, (phase, d, t) in self._doing.items())
                what = stage.waits_for or doing
                self._say(
                    f"{stage.name:<18} {self._clock() - begun:.0f} s so far{f', waiting: {what}' if what else ''}"
                )


class SilentConsole(Console):
    """``logger.console=off``: errors alone."""


def _share(done: float, total: float) -> str:
    return f" {done / total:.0%}" if total > 0 else ""
