"""What waits under one key of a channel. Pure: no clock, no sockets; times come in from outside."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Item:
    """What a producer put, as the broker knows it.

    Attributes:
        producer, number: who holds the payload, and as what.
        offer: where the payload lies (`transports.base.Offer`); the broker does not look into it.
        copies: keys under which it is not done with yet.
        views: consumers may look at its memory for longer than they process it, and say when they do no longer.
        parked: keys under which there was no room for it so far.
        keys: that it was put under.
        request: of the `put` that waits for room; 0: nobody waits.
    """

    producer: int
    number: int
    weight: float
    priority: int
    nbytes: int
    offer: tuple[Any, ...]
    at: float
    keys: tuple[Hashable, ...]
    views: bool = True
    copies: int = 0
    parked: int = 0
    request: int = 0


@dataclass(slots=True)
class Entry:
    """An item under one of its keys.

    Attributes:
        order: counts up with the puts.
        ticket: of its last delivery. Each has its own: what a consumer says of an earlier one must not count for it.
        freed: the consumer looks at its memory no longer.
    """

    order: int
    key: Hashable
    item: Item
    ticket: int = 0
    freed: bool = False


@dataclass(slots=True, eq=False)
class Want:
    """A `get` that waits.

    Attributes:
        at_least: weight that must be there, unless no more can come.
        at_most: weight that it takes; always one item at least.
        most_items: how many items it takes.
    """

    member: int
    request: int
    keys: tuple[Hashable, ...]
    at_least: float
    at_most: float
    most_items: int
    at: float


@dataclass(slots=True)
class KeyQueue:
    """One key.

    Attributes:
        weight: of what waits.
        parked: entries that wait for room, in order.
        closed: names of producers that have closed the key.
        in_hand: members to how many entries they have and have not acknowledged.
        readers: members that have taken something.
        told: members that have seen the end.
        lost: names of producers that died to how many of their items went with them.
    """

    key: Hashable
    weight: float = 0.0
    parked: deque[Entry] = field(default_factory=deque)
    closed: set[str] = field(default_factory=set)
    in_hand: dict[int, int] = field(default_factory=dict)
    readers: set[int] = field(default_factory=set)
    told: set[int] = field(default_factory=set)
    lost: dict[str, int] = field(default_factory=dict)
    wants: list[Want] = field(default_factory=list)
    _heap: list[tuple[int, int, Entry]] = field(default_factory=list)

    def __len__(self) -> int:
        """Items that wait."""
        return len(self._heap)

    def __iter__(self) -> Iterator[Entry]:
        return (entry for _, _, entry in self._heap)

    def push(self, entry: Entry) -> None:
        """Add, or give back: its order says where it stands among those of its priority."""
        heapq.heappush(self._heap, (-entry.item.priority, entry.order, entry))
        self.weight += entry.item.weight

    @property
    def first(self) -> tuple[int, int] | None:
        """What orders the first one against the first of other keys."""
        return self._heap[0][:2] if self._heap else None

    def peek(self) -> Entry:
        return self._heap[0][2]

    def pop(self) -> Entry:
        entry = heapq.heappop(self._heap)[2]
        self.weight = self.weight - entry.item.weight if self._heap else 0.0  # sums of floats drift
        return entry

    def room(self, weight: float, capacity: float | None) -> bool:
        """Whether so much more may wait. A consumer that waits for more than is there makes room."""
        return (
            capacity is None
            or not self._heap
            or self.weight + weight <= capacity
            or any(want.at_least > self.weight for want in self.wants)
        )

    def take_away(self, unwanted: Callable[[Item], bool]) -> list[Entry]:
        """Remove some of what waits."""
        gone = [entry for entry in (*self, *self.parked) if unwanted(entry.item)]
        if gone:
            kept = [entry for entry in self if not unwanted(entry.item)]
            self.parked = deque(entry for entry in self.parked if not unwanted(entry.item))
            self._heap, self.weight = [], 0.0
            for entry in kept:
                self.push(entry)
        return gone

    def hand(self, member: int, by: int) -> None:
        count = self.in_hand.get(member, 0) + by
        if count:
            self.in_hand[member] = count
        else:
            self.in_hand.pop(member, None)

    def may_grow(self, producers: Collection[str], gone: Collection[str]) -> bool:
        """Whether something may still be put here."""
        return bool(self.parked) or any(name not in self.closed and name not in gone for name in producers)

    def ended(self, producers: Collection[str], member: int) -> bool:
        """Whether nothing more will come for this member: others could still give back what they hold."""
        return (
            not self._heap
            and not self.parked
            and not self.lost
            and all(name in self.closed for name in producers)
            and not any(other != member for other in self.in_hand)
        )

    def untouched(self, closed: set[str]) -> bool:
        """Whether forgetting it changes nothing, where these producers have closed every key."""
        busy = self._heap or self.parked or self.in_hand or self.readers or self.lost or self.wants
        return not busy and self.closed <= closed

    def seen_by_all(self, readers: int) -> bool:
        """Whether its end is known to all who read it, and so many at least."""
        return not self.in_hand and not self.wants and len(self.told) >= readers and self.readers <= self.told
