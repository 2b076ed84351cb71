"""Where a rank's incoming items wait until its program pulls them. Thread-safe; waits on a condition, never polls."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


class Cancelled(Exception):
    """The run ends; nobody will send what this rank waits for."""


@dataclass
class _Slot:
    items: list[Any] = field(default_factory=list)
    received: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    expected: dict[int, int] = field(default_factory=dict)


class Mailbox:
    """Items by key. Each source sends any number of items under a key, then closes it with how many it sent.

    Messages may come in any order: the count in the closing message tells when the key is complete.
    """

    def __init__(self) -> None:
        self._slots: dict[Hashable, _Slot] = defaultdict(_Slot)
        self._changed = threading.Condition()
        self._failure: Exception | None = None
        self.moves = 0  # messages that have come

    def put(self, key: Hashable, source: int, item: Any) -> None:
        with self._changed:
            slot = self._slots[key]
            slot.items.append(item)
            slot.received[source] += 1
            self.moves += 1
            self._changed.notify_all()

    def close(self, key: Hashable, source: int, sent: int) -> None:
        with self._changed:
            self._slots[key].expected[source] = sent
            self.moves += 1
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """What is waited for will not come: whoever waits, now or later, gets the first such error."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def cancel(self) -> None:
        """`fail`, because the run ends."""
        self.fail(Cancelled("the run ends"))

    def stream(self, key: Hashable, sources: int) -> Iterator[Any]:
        """Yield the items as they come, until all ``sources`` have closed the key.

        Raises:
            Exception: that of `fail`; after `cancel`, `Cancelled`.
        """
        while True:
            with self._changed:
                slot = self._slots[key]
                while not (slot.items or self._failure or self._complete(slot, sources)):
                    self._changed.wait()
                if self._failure is not None:
                    raise self._failure
                items, slot.items = slot.items, []
                done = self._complete(slot, sources)
                if done:
                    del self._slots[key]
            yield from items
            if done:
                return

    def any(self, keys: Mapping[Hashable, int], wait: bool = True) -> tuple[list[tuple[Hashable, Any]], list[Hashable]]:
        """What is there under any of some keys; wait until there is something.

        Args:
            keys: key -> sources that must close it.
            wait: otherwise return at once with nothing, if nothing is there.

        Returns:
            Items with their keys, and the keys that are complete. Neither comes again.

        Raises:
            Exception: as `stream`.
        """
        with self._changed:
            while True:
                if self._failure is not None:
                    raise self._failure
                items: list[tuple[Hashable, Any]] = []
                complete = []
                for key, sources in keys.items():
                    slot = self._slots[key]
                    items += [(key, item) for item in slot.items]
                    slot.items = []
                    if self._complete(slot, sources):
                        complete.append(key)
                        del self._slots[key]
                if items or complete or not wait:
                    return items, complete
                self._changed.wait()

    def lacking(self, key: Hashable, sources: Iterable[int]) -> list[int]:
        """Sources that have not closed a key yet, or whose items are not all there."""
        with self._changed:
            slot = self._slots.get(key)
            if slot is None:
                return list(sources)
            return [s for s in sources if s not in slot.expected or slot.received[s] < slot.expected[s]]

    def complete(self, key: Hashable, sources: int) -> bool:
        """Whether all that will come under a key is there; it stays."""
        with self._changed:
            return key in self._slots and self._complete(self._slots[key], sources)

    @staticmethod
    def _complete(slot: _Slot, sources: int) -> bool:
        return len(slot.expected) == sources and all(slot.received[s] >= n for s, n in slot.expected.items())
