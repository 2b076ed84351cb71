"""A tracker on a thread of its own: it may be slow, fail or hang, and the run does not notice."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rlinf.tracking.redaction import redact_text

if TYPE_CHECKING:
    from rlinf.tracking.trackers import Tracker


class Background:
    """Hands steps to a tracker from a thread, in order, through a bounded queue.

    The tracker is made on the thread too, and made again after a while for as long as that fails. A step that it
    refuses is tried again after each of ``delays`` (seconds), then given up. When the queue is full the oldest step
    gives way. The first failure is said through ``warn``, and at `close` how many steps did not arrive.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Tracker],
        warn: Callable[[str], None],
        *,
        capacity: int = 256,
        delays: Sequence[float] = (1.0, 5.0, 30.0, 120.0),
    ) -> None:
        self.name = name
        self._make, self._warn = make, warn
        self._capacity, self._delays = capacity, tuple(delays)
        self._tracker: Tracker | None = None
        self._queue: deque[tuple[int, dict[str, float]]] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._in_hand = 0
        self._lost = 0
        self._why = ""
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, values: dict[str, float]) -> None:
        """Queue a step. Returns at once."""
        with self._changed:
            if len(self._queue) >= self._capacity:
                self._queue.popleft()
                self._lost += 1
                self._failed("it is slower than the run, and the oldest steps give way")
            self._queue.append((step, values))
            self._changed.notify_all()

    def finish(self) -> None:
        """Take no more steps, and deliver what is queued without pauses; does not wait for it."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def close(self, patience_s: float = 10.0) -> None:
        """`finish`, and wait for it, at most ``patience_s`` seconds. A thread that hangs dies with the process."""
        self.finish()
        self._thread.join(max(patience_s, 0.0))
        with self._changed:
            if self._thread.is_alive():
                self._failed(f"it did not finish within {patience_s:.0f} s")
            lost = self._lost + self._in_hand + len(self._queue)
            self._queue.clear()
            if lost:
                self._warn(f"tracker {self.name}: {lost} step{'s' if lost > 1 else ''} did not arrive ({self._why})")

    def _work(self) -> None:
        self._open()  # early: a long start is over when the first step comes
        while (taken := self._next()) is not None:
            delivered = self._deliver(*taken)
            with self._changed:
                self._in_hand = 0
                if not delivered:
                    self._lost += 1
                    if self._closing:  # it refuses, and there is no time to ask again for each
                        self._lost += len(self._queue)
                        self._queue.clear()
        if self._tracker is not None:
            try:
                self._tracker.close()
            except BaseException as error:
                self._failed(reason(error))

    def _next(self) -> tuple[int, dict[str, float]] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            if not self._queue:
                return None
            self._in_hand = 1
            return self._queue.popleft()

    def _open(self) -> Tracker | None:
        if self._tracker is None:
            try:
                self._tracker = self._make()
            except BaseException as error:  # a client library may well call sys.exit
                self._failed(reason(error))
        return self._tracker

    def _deliver(self, step: int, values: dict[str, float]) -> bool:
        tries, refusals = 0, 0
        while True:
            tracker = self._open()
            if tracker is not None:
                try:
                    tracker.log(step, values)
                    return True
                except BaseException as error:
                    refusals += 1
                    self._failed(reason(error))
            if refusals > len(self._delays) or not self._pause(self._delays[min(tries, len(self._delays) - 1)]):
                return False
            tries += 1

    def _pause(self, seconds: float) -> bool:
        """Wait before another try; false when the run ends meanwhile."""
        with self._changed:
            return not self._changed.wait_for(lambda: self._closing, timeout=seconds)

    def _failed(self, why: str) -> None:
        first, self._why = not self._why, why
        if first:
            self._warn(f"tracker {self.name}: {why}; the run goes on, and it is tried again")


def reason(error: BaseException) -> str:
    """One line that says why, without secrets (a URL in it may carry a password)."""
    lines = str(error).strip().splitlines()
    return redact_text(f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": "))[:300]
