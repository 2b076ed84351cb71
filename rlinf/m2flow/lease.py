"""Leases: who may use a device now. A pure book of turns, and the thin Ray actor that ranks wait at.

Turns are granted in the order of the plan: a ticket waits for every earlier one whose devices overlap its own. A turn
is all-or-nothing over its devices, so no two ranks can hold halves of what the other needs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Ticket:
    """A turn on devices: all of ``holders`` ranks must give it back before an overlapping one starts."""

    devices: frozenset[int]
    holders: int


@dataclass
class LeaseBook:
    """State of the turns of one execution (one iteration of one phase).

    ``released[t]`` counts the ranks that gave ticket ``t`` back.
    """

    tickets: tuple[Ticket, ...]
    released: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.released = [0] * len(self.tickets)

    def done(self, ticket: int) -> bool:
        return self.released[ticket] >= self.tickets[ticket].holders

    def blockers(self, ticket: int) -> list[int]:
        """Earlier tickets on overlapping devices that are not given back yet."""
        mine = self.tickets[ticket].devices
        return [t for t in range(ticket) if not self.done(t) and self.tickets[t].devices & mine]

    def open_on(self, devices: frozenset[int]) -> bool:
        """Whether a turn on one of these devices is not given back yet."""
        return any(not self.done(t) and ticket.devices & devices for t, ticket in enumerate(self.tickets))

    def release(self, ticket: int) -> None:
        if self.done(ticket):
            raise ValueError(f"ticket {ticket} was given back by more ranks than its {self.tickets[ticket].holders}")
        self.released[ticket] += 1

    @property
    def finished(self) -> bool:
        return all(self.done(t) for t in range(len(self.tickets)))


class LeaseServer:
    """Asyncio shell around the books; hosted as a Ray actor that uses no CPU.

    Turns of an earlier execution come before those of a later one, where several are under way.
    """

    def __init__(self, tickets: Mapping[str, tuple[Ticket, ...]]) -> None:
        self._tickets = tickets
        self._books: dict[int, LeaseBook] = {}  # execution -> its turns; finished ones are gone
        self._phases: dict[int, str] = {}
        self._changed = asyncio.Condition()

    def begin(self, phase: str, execution: int) -> None:
        """An execution starts; they are numbered in the order in which they do."""
        book = LeaseBook(self._tickets[phase])
        if not book.finished:
            self._books[execution], self._phases[execution] = book, phase

    async def acquire(self, execution: int, ticket: int) -> None:
        """Return when it is this ticket's turn."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._blocked(execution, ticket))

    async def release(self, execution: int, ticket: int) -> None:
        async with self._changed:
            book = self._books[execution]
            book.release(ticket)
            if book.finished:
                self._books.pop(execution)
                self._phases.pop(execution)
            self._changed.notify_all()

    def blockers(self, execution: int, ticket: int) -> list[tuple[str, int]]:
        """(phase, ticket) of the turns that must be over before this one."""
        own = self._books.get(execution)
        if own is None:
            return []
        found = [(self._phases[execution], earlier) for earlier in own.blockers(ticket)]
        devices = own.tickets[ticket].devices
        for number, book in self._books.items():
            if number < execution:
                turns = enumerate(book.tickets)
                found += [(self._phases[number], t) for t, turn in turns if turn.devices & devices and not book.done(t)]
        return found

    def _blocked(self, execution: int, ticket: int) -> bool:
        own = self._books[execution]
        devices = own.tickets[ticket].devices
        earlier = (book for number, book in self._books.items() if number < execution)
        return bool(own.blockers(ticket)) or any(book.open_on(devices) for book in earlier)
