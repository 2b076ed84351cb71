"""What a channel counts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class Counts:
    """Sums since the channel began, as the broker sees them.

    An item that goes to several keys counts once when it is put, and once for each key afterwards. When all is done,
    ``acknowledged`` is the number of items (of their keys) that were put, whatever died: each was processed once.

    Attributes:
        items, weight, nbytes: that were put.
        delivered: to consumers, again after `given_back` too.
        acknowledged: processed.
        given_back: taken from consumers that died, timed out or gave them back.
        lost: with a producer that died.
        deepest: most weight that waited under one key at once.
        waited_s: sum over deliveries of the time from put to delivery; ``longest_s``: the longest.
        idle_s: sum over gets of the time that a consumer waited.
    """

    items: int = 0
    weight: float = 0.0
    nbytes: int = 0
    delivered: int = 0
    acknowledged: int = 0
    given_back: int = 0
    lost: int = 0
    deepest: float = 0.0
    waited_s: float = 0.0
    longest_s: float = 0.0
    idle_s: float = 0.0

    def put(self, weight: float, nbytes: int, items: int = 1) -> None:
        self.items += items
        self.weight += weight
        self.nbytes += nbytes

    def deliver(self, waited_s: float) -> None:
        self.delivered += 1
        self.waited_s += waited_s
        self.longest_s = max(self.longest_s, waited_s)

    def plain(self) -> dict[str, Any]:
        return asdict(self)
