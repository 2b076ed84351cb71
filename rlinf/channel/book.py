"""The broker's book: who is here, and what each message changes. A plain state machine.

Messages go in; ``out`` collects messages for members. There are no clock, sockets or payloads here, so that tests drive
it through any order of events.
"""

from __future__ import annotations

import itertools
from typing import Any

from rlinf.channel.account import places, statistics
from rlinf.channel.queue import Item, Want
from rlinf.channel.room import Peer, Room
from rlinf.channel.spec import ChannelSpec

Message = tuple[Any, ...]


class Book:
    """All channels of a broker.

    Attributes:
        out: (serial, message) that are to be sent, in order.
    """

    def __init__(self) -> None:
        self.rooms: dict[str, Room] = {}
        self.members: dict[int, Peer] = {}
        self.out: list[tuple[int, Message]] = []
        self._knows: dict[int, set[int]] = {}  # whose place a member was told
        self._known_to: dict[int, set[int]] = {}
        self._draining: dict[int, int] = {}  # requests of members that leave once all they put is processed
        self._serials = itertools.count(1)
        self._tickets = itertools.count(1)

    def join(self, name: str, place: tuple[Any, ...]) -> int:
        """A member comes. Returns its serial; 0 where another of that name is here."""
        if any(member.name == name for member in self.members.values()):
            return 0
        serial = next(self._serials)
        self.members[serial] = Peer(serial, name, place)
        self._knows[serial], self._known_to[serial] = set(), set()
        return serial

    def leave(self, serial: int, reason: str, now: float) -> None:
        """A member is gone: it died, or left."""
        for other in self._known_to.pop(serial):
            self._send(other, "gone", serial)
            self._knows[other].discard(serial)
        for other in self._knows.pop(serial):
            if other in self._known_to:
                self._known_to[other].discard(serial)
        del self.members[serial]
        self._draining.pop(serial, None)
        for room in list(self.rooms.values()):
            if serial in room.members:
                room.leave(serial, reason, now)
                if not room.members:
                    del self.rooms[room.spec.name]
        self._drained()

    def handle(self, serial: int, message: Message, now: float) -> None:
        """A message of a member that is here."""
        self._dispatch(serial, message, now)
        self._drained()

    def _drained(self) -> None:
        for serial, request in list(self._draining.items()):
            if not sum(room.unfinished(serial) for room in self.rooms.values() if serial in room.members):
                del self._draining[serial]
                self._send(serial, "reply", request, None)

    def _dispatch(self, serial: int, message: Message, now: float) -> None:
        what, *rest = message
        if what in ("ask", "answer"):
            getattr(self, f"_{what}")(serial, *rest)
            return
        if what == "open":
            self._open(serial, *rest)
            return
        if what == "drain":
            self._draining[serial] = rest[0]
            return
        if what == "dropped":
            for other in self._known_to[serial]:
                self._send(other, "dropped", serial, *rest)
            return
        channel, *rest = rest
        room = self.rooms.get(channel)
        if room is None or serial not in room.members:
            text = f"{self.members[serial].name} has not opened channel {channel!r}"
            self._send(serial, "broken", channel, "ChannelError", text, b"")
            return
        if what == "put":
            number, request, keys, weight, priority, nbytes, views, offer = rest
            room.put(Item(serial, number, weight, priority, nbytes, offer, now, keys, views, request=request), now)
        elif what == "want":
            request, done, keys, at_least, at_most, most_items = rest
            room.done(serial, done, now)
            room.want(Want(serial, request, keys, at_least, at_most, most_items, now), now)
        elif what == "done":
            room.done(serial, rest[0], now)
        elif what == "freed":
            room.freed(serial, rest[0])
        elif what == "back":
            room.give_back(serial, rest[0], now)
        elif what == "withdraw":
            room.withdraw(serial, rest[0], now)
        elif what == "close":
            room.close(serial, rest[0], rest[1], now)
        elif what == "fail":
            room.fail((rest[0], rest[1], rest[2]))
        elif what == "statistics":
            self._send(serial, "reply", rest[0], statistics(room))
        elif what == "places":
            self._send(serial, "reply", rest[0], places(room))
        else:
            raise ValueError(f"no message {what!r}")

    def _open(self, serial: int, request: int, plain: tuple[Any, ...]) -> None:
        spec, member = ChannelSpec(*plain), self.members[serial]
        room = self.rooms.get(spec.name)
        if room is None:
            room = self.rooms[spec.name] = Room(spec, self._send, self._introduce, self._tickets)
        if room.spec != spec:
            text = f"{member.name} opened a channel as {spec}, and others as {room.spec}; all must say the same"
            self._send(serial, "error", request, "ChannelError", text, b"")
            return
        if serial not in room.members:
            room.enter(member)
        self._send(serial, "reply", request, None)

    def _introduce(self, serial: int, other: int) -> None:
        if other not in self._knows[serial] and other in self.members:
            self._knows[serial].add(other)
            self._known_to[other].add(serial)
            member = self.members[other]
            self._send(serial, "member", other, member.name, member.place)

    # One member asks another where or how it gives a payload, in a few bytes.

    def _ask(self, serial: int, request: int, other: int, *question: Any) -> None:
        if other in self.members:
            self._introduce(other, serial)
            self._send(other, "ask", serial, request, *question)
        else:
            self._send(serial, "error", request, "PeerDied", "the producer of this item is gone", b"")

    def _answer(self, serial: int, other: int, request: int, *answer: Any) -> None:
        self._send(other, *answer[:1], request, *answer[1:])

    def _send(self, serial: int, *message: Any) -> None:
        if serial in self.members:
            self.out.append((serial, message))
