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

    ``returned[t]`` are the ranks that gave ticket ``t`` back.
    """

    tickets: tuple[Ticket, ...]
    returned: list[set[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.returned = [set() for _ in self.tickets]

    def done(self, ticket: int) -> bool:
        return len(self.returned[ticket]) >= self.tickets[ticket].holders

    def blockers(self, ticket: int) -> list[int]:
        """Earlier tickets on overlapping devices that are not given back yet."""
        mine = self.tickets[ticket].devices
        return [t for t in range(ticket) if not self.done(t) and self.tickets[t].devices & mine]

    def open_turns(self, devices: frozenset[int]) -> list[int]:
        """Tickets on one of these devices that are not given back yet."""
        return [t for t, ticket in enumerate(self.tickets) if ticket.devices & devices and not self.done(t)]

    def open_on(self, devices: frozenset[int]) -> bool:
        """Whether there is one."""
        return any(not self.done(t) and ticket.devices & devices for t, ticket in enumerate(self.tickets))

    def release(self, ticket: int, rank: int) -> None:
        """A rank of the ticket's group gives it back.

        Raises:
            ValueError: it did so before, or is none of those that the ticket is for.
        """
        if rank in self.returned[ticket]:
            raise ValueError(f"ticket {ticket} was given back by rank {rank} twice")
        if not 0 <= rank < (holders := self.tickets[ticket].holders):
            raise ValueError(f"ticket {ticket} was given back by rank {rank}; it is for ranks 0 to {holders - 1}")
        self.returned[ticket].add(rank)

    @property
    def finished(self) -> bool:
        return all(self.done(t) for t in range(len(self.tickets)))


@dataclass(frozen=True)
class Ahead:
    """A turn that another one waits for.

    Attributes:
        phase, ticket: which.
        ranks: of its group, those that have not given it back.
    """

    phase: str
    ticket: int
    ranks: tuple[int, ...]


def ahead_of(phase: str, book: LeaseBook, ticket: int) -> Ahead:
    left = set(range(book.tickets[ticket].holders)) - book.returned[ticket]
    return Ahead(phase, ticket, tuple(sorted(left)))


class LeaseServer:
    """Asyncio shell around the books; hosted as a Ray actor that uses no CPU.

    Turns of an earlier execution come before those of a later one, where several are under way.
    """

    def __init__(self, tickets: Mapping[str, tuple[Ticket, ...]]) -> None:
        self._tickets = tickets
        self._books: dict[int, LeaseBook] = {}  # execution -> its turns; finished ones are gone
        self._phases: dict[int, str] = {}
        self._changed = asyncio.Condition()

    def adopt(self, tickets: Mapping[str, tuple[Ticket, ...]]) -> None:
        """Executions that begin from now on have these turns.

        Raises:
            RuntimeError: an execution has turns that are not over.
        """
        if self._books:
            raise RuntimeError(f"execution {min(self._books)} is under way; other turns can be taken over at its end")
        self._tickets = tickets

    def begin(self, phase: str, execution: int) -> None:
        """An execution starts; they are numbered in the order in which they do."""
        book = LeaseBook(self._tickets[phase])
        if not book.finished:
            self._books[execution], self._phases[execution] = book, phase

    async def acquire(self, execution: int, ticket: int) -> None:
        """Return when it is this ticket's turn."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._blocked(execution, ticket))

    async def release(self, execution: int, ticket: int, rank: int) -> None:
        async with self._changed:
            book = self._books[execution]
            book.release(ticket, rank)
            if book.finished:
                self._books.pop(execution)
                self._phases.pop(execution)
            self._changed.notify_all()

    def blockers(self, execution: int, ticket: int) -> list[Ahead]:
        """Turns that must be over before this one."""
        own = self._books.get(execution)
        if own is None:
            return []
        found = [ahead_of(self._phases[execution], own, earlier) for earlier in own.blockers(ticket)]
        devices = own.tickets[ticket].devices
        for number, book in self._books.items():
            if number < execution:
                found += [ahead_of(self._phases[number], book, t) for t in book.open_turns(devices)]
        return found

    def _blocked(self, execution: int, ticket: int) -> bool:
        own = self._books[execution]
        devices = own.tickets[ticket].devices
        earlier = (book for number, book in self._books.items() if number < execution)
        return bool(own.blockers(ticket)) or any(book.open_on(devices) for book in earlier)
