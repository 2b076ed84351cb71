"""One channel in the broker's book: items meet the consumers that wait for them. Pure; times come in from outside."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rlinf.channel.account import some, state_of
from rlinf.channel.queue import Entry, Item, KeyQueue, Want
from rlinf.channel.spec import ChannelSpec
from rlinf.channel.statistics import Counts

_ITEMS, _ENDED = "items", "ended"
Wrong = tuple[str, str, bytes]  # an error's kind, text and cause, as `errors.rebuilt` takes them


@dataclass
class Peer:
    """A process that takes part. ``serial`` is never used twice; the name may come again after a death."""

    serial: int
    name: str
    place: tuple[Any, ...]


class Room:
    """A channel.

    Args:
        send: gives a message to a member, by serial.
        introduce: lets the first member know where the second one is.
        tickets: numbers that count up.

    Attributes:
        gone: names that were here, and why they are not.
        hand: entries that are not acknowledged, by member and ticket.
        views: entries that are acknowledged and still looked at, likewise.
        wants: gets that wait, by member and request.
        taken: weight that each consumer has had.
    """

    def __init__(
        self,
        spec: ChannelSpec,
        send: Callable[..., None],
        introduce: Callable[[int, int], None],
        tickets: Iterator[int],
    ) -> None:
        self.spec = spec
        self.counts = Counts()
        self.members: dict[int, Peer] = {}
        self.queues: dict[Hashable, KeyQueue] = {}
        self._closed: set[str] = set()  # producers that have closed every key
        self.gone: dict[str, str] = {}
        self._failure: Wrong | None = None
        self.hand: dict[int, dict[int, Entry]] = {}
        self.views: dict[int, dict[int, Entry]] = {}
        self.wants: dict[tuple[int, int], Want] = {}
        self._puts: dict[tuple[int, int], Item] = {}  # that wait for room, by member and request
        self.taken: dict[int, float] = defaultdict(float)
        self._open: dict[int, int] = defaultdict(int)  # entries that are not acknowledged, by producer
        self._near: dict[int, bool] = {}  # producers that were told that all consumers are in their process
        self._send, self._introduce, self._tickets = send, introduce, tickets

    # Members

    def enter(self, member: Peer) -> None:
        self.members[member.serial] = member
        self.hand[member.serial], self.views[member.serial] = {}, {}
        if self.gone.pop(member.name, None) and member.name in self.spec.consumers:
            for other in self.members:
                self._send(other, "mended", self.spec.name)
        if self._failure:
            self._send(member.serial, "broken", self.spec.name, *self._failure)
        self._locality()

    def leave(self, serial: int, reason: str, now: float) -> None:
        """What the member had in hand goes back; what it put and nobody has is lost."""
        member = self.members.pop(serial)
        self._near.pop(serial, None)
        self._open.pop(serial, None)
        self.taken.pop(serial, None)
        self.gone[member.name] = reason
        for key in [key for key in self.wants if key[0] == serial]:
            self._drop_want(*key)
        for key in [key for key in self._puts if key[0] == serial]:
            del self._puts[key]
        for entry in self.views.pop(serial).values():
            self._free(entry.item)
        for queue in self.queues.values():
            if lost := queue.take_away(lambda item: item.producer == serial):
                self._lose(queue, member.name, len(lost))
        self._return(serial, list(self.hand.pop(serial).values()))
        for queue in self.queues.values():
            queue.readers.discard(serial)
        if member.name in self.spec.consumers and all(name in self.gone for name in self.spec.consumers):
            wrong = ("PeerDied", self._named("nobody is left to take items: ", self.spec.consumers), b"")
            self._refuse_puts(wrong)
            for other in self.members.values():
                if other.name in self.spec.producers:
                    self._send(other.serial, "broken", self.spec.name, *wrong)
        self._settle(list(self.queues), now)
        self._locality()

    def _locality(self) -> None:
        """Tell producers whether all consumers are in their own process: items then need not be laid open."""
        here = {member.name: member.place[1] for member in self.members.values()}
        processes = {here.get(name, "") for name in self.spec.consumers}
        for serial, member in self.members.items():
            near = processes == {member.place[1]}
            if member.name in self.spec.producers and self._near.get(serial, False) != near:
                self._near[serial] = near
                self._send(serial, "near", self.spec.name, near)

    def _named(self, text: str, names: Sequence[str]) -> str:
        found = [f"{name} {self.gone[name]}" for name in names if name in self.gone]
        return f"channel {self.spec.name!r}: {text}{some(found)}"

    def _lose(self, queue: KeyQueue, name: str, count: int) -> None:
        queue.lost[name] = queue.lost.get(name, 0) + count
        self.counts.lost += count

    # Producers

    def put(self, item: Item, now: float) -> None:
        """An item is offered. With a ``request`` its producer is told when it is in."""
        serial = item.producer
        if wrong := self._failure or self._wrong_put(self.members[serial].name, item.keys):
            self._send(serial, "free", (item.number,))
            if item.request:
                self._send(serial, "error", item.request, *wrong)
            else:
                self._send(serial, "broken", self.spec.name, *wrong)
            return
        item.copies = len(item.keys)
        self._open[serial] += item.copies
        self.counts.put(item.weight, item.nbytes)
        for key in item.keys:
            queue, entry = self._queue(key), Entry(next(self._tickets), key, item)
            if queue.parked or not queue.room(item.weight, self.spec.capacity):
                queue.parked.append(entry)
                item.parked += 1
            else:
                self._push(queue, entry)
        if item.parked:
            self._puts[serial, item.request] = item
        elif item.request:
            self._send(serial, "reply", item.request, None)
        self._settle(item.keys, now)

    def _wrong_put(self, name: str, keys: Sequence[Hashable]) -> Wrong | None:
        here = f"channel {self.spec.name!r}: {name}"
        if name not in self.spec.producers:
            return "ChannelError", f"{here} put, and is none of its producers, {list(self.spec.producers)}", b""
        for key in keys:
            if name in self._closed or (key in self.queues and name in self.queues[key].closed):
                return "ChannelError", f"{here} put under key {key!r} after it had closed it", b""
        if all(consumer in self.gone for consumer in self.spec.consumers):
            return "PeerDied", self._named("nobody is left to take items: ", self.spec.consumers), b""
        return None

    def close(self, serial: int, every: bool, key: Hashable, now: float) -> None:
        """A producer puts nothing more under a key, or under any."""
        name = self.members[serial].name
        if name not in self.spec.producers:
            names = list(self.spec.producers)
            text = f"channel {self.spec.name!r}: {name} closed it, and is none of its producers, {names}"
            self._send(serial, "broken", self.spec.name, "ChannelError", text, b"")
            return
        if every:
            self._closed.add(name)
        for queue in list(self.queues.values()) if every else [self._queue(key)]:
            queue.closed.add(name)
            self._settle([queue.key], now)

    def fail(self, wrong: Wrong) -> None:
        """The first failure is what everyone sees who waits, now or later."""
        if self._failure:
            return
        self._failure = wrong
        for serial in self.members:
            self._send(serial, "broken", self.spec.name, *wrong)
        for serial, request in list(self.wants):
            self._drop_want(serial, request)
            self._send(serial, "error", request, *wrong)
        self._refuse_puts(wrong)

    def _refuse_puts(self, wrong: Wrong) -> None:
        for (serial, request), item in self._puts.items():
            self._take_out(item)
            self._send(serial, "error", request, *wrong)
        self._puts.clear()

    def _take_out(self, item: Item) -> None:
        """Remove an item that waits for room; where it has been taken under another key already, it stays there."""
        for key in item.keys:
            if key in self.queues:
                removed = len(self.queues[key].take_away(lambda other: other is item))
                item.copies -= removed
                self._open[item.producer] -= removed
        if not item.copies:
            self._send(item.producer, "free", (item.number,))

    # Consumers

    def want(self, want: Want, now: float) -> None:
        """A consumer waits for items under any of some keys."""
        name = self.members[want.member].name
        wrong = self._failure
        if name not in self.spec.consumers:
            here = f"channel {self.spec.name!r}: {name} asked for items"
            wrong = "ChannelError", f"{here}, and is none of its consumers, {list(self.spec.consumers)}", b""
        if wrong:
            self._send(want.member, "error", want.request, *wrong)
            return
        self.wants[want.member, want.request] = want
        for key in want.keys:
            self._queue(key).wants.append(want)
        self._settle(want.keys, now)

    def withdraw(self, serial: int, request: int, now: float) -> None:
        """A member waits no longer for a get or a put. Its answer may be on its way already; then nothing happens."""
        if want := self.wants.get((serial, request)):
            text = "; ".join(state_of(self, key) for key in want.keys[:4])
            self._drop_want(serial, request)
        elif (item := self._puts.get((serial, request))) and item.parked == len(item.keys):
            text = "; ".join(state_of(self, key) for key in item.keys[:4])
            text = f"no room for weight {item.weight:g} (capacity {self.spec.capacity:g}): {text}"
            del self._puts[serial, request]
            self._take_out(item)
            self.counts.put(-item.weight, -item.nbytes, -1)
            self._settle(item.keys, now)
        elif item:  # it is in under some of its keys, and may have been taken there: so it goes in under all
            for key in item.keys:
                self._admit(self._queue(key), item)
            self._settle(item.keys, now)
            return
        else:
            return
        self._send(serial, "error", request, "ChannelTimeout", f"channel {self.spec.name!r}: {text}", b"")

    def _drop_want(self, serial: int, request: int) -> None:
        for key in self.wants.pop((serial, request)).keys:
            queue = self.queues[key]
            queue.wants.remove(next(want for want in queue.wants if want.member == serial and want.request == request))
            self._forget(queue)

    def done(self, serial: int, tickets: Sequence[int], now: float) -> None:
        """A consumer has processed items."""
        keys = set()
        for ticket in tickets:
            if entry := self.hand[serial].pop(ticket, None):
                keys.add(entry.key)
                self.queues[entry.key].hand(serial, -1)
                if entry.item.producer in self.members:
                    self._open[entry.item.producer] -= 1
                self.counts.acknowledged += 1
                if entry.freed or not entry.item.views:
                    self._free(entry.item)
                else:
                    self.views[serial][ticket] = entry
        self._settle(keys, now)

    def freed(self, serial: int, tickets: Sequence[int]) -> None:
        """A consumer looks at the memory of items no longer. Until it acknowledges them, others may yet need it."""
        for ticket in tickets:
            if entry := self.views[serial].pop(ticket, None):
                self._free(entry.item)
            elif entry := self.hand[serial].get(ticket):
                entry.freed = True

    def give_back(self, serial: int, tickets: Sequence[int], now: float) -> None:
        """A consumer does not process items after all: they go back to the head."""
        entries = [entry for ticket in tickets if (entry := self.hand[serial].pop(ticket, None))]
        self._return(serial, entries)
        self._settle({entry.key for entry in entries}, now)

    def _return(self, serial: int, entries: Sequence[Entry]) -> None:
        for entry in entries:
            queue, entry.freed = self.queues[entry.key], False
            queue.hand(serial, -1)
            if entry.item.producer in self.members:
                queue.push(entry)
                self.counts.given_back += 1
            else:
                self._lose(queue, "a producer that is gone too", 1)

    def unfinished(self, serial: int) -> int:
        """How much of what a producer put is not acknowledged, and still can be."""
        nobody = self._failure or all(name in self.gone for name in self.spec.consumers)
        return 0 if nobody else self._open.get(serial, 0)

    def _free(self, item: Item) -> None:
        item.copies -= 1
        if not item.copies and item.producer in self.members:
            self._send(item.producer, "free", (item.number,))

    # Meeting

    def _queue(self, key: Hashable) -> KeyQueue:
        if key not in self.queues:
            self.queues[key] = KeyQueue(key, closed=set(self._closed))
        return self.queues[key]

    def _forget(self, queue: KeyQueue) -> None:
        """Finished keys leave nothing. (One key, that of items put without one, is kept once it was closed.)"""
        closed_singly = queue.closed - self._closed
        if queue.untouched(self._closed) or (
            queue.seen_by_all(self.spec.key_readers) and not len(queue) and not (queue.key is None and closed_singly)
        ):
            self.queues.pop(queue.key, None)

    def _push(self, queue: KeyQueue, entry: Entry) -> None:
        queue.push(entry)
        self.counts.deepest = max(self.counts.deepest, queue.weight)

    def _admit(self, queue: KeyQueue, forced: Item | None = None) -> None:
        """Let in what has room now, or one item in any case."""
        while queue.parked and (forced or queue.room(queue.parked[0].item.weight, self.spec.capacity)):
            entry = next((e for e in queue.parked if e.item is forced), None) if forced else queue.parked[0]
            if entry is None:
                return
            queue.parked.remove(entry)
            self._push(queue, entry)
            item = entry.item
            item.parked -= 1
            if not item.parked:
                del self._puts[item.producer, item.request]
                self._send(item.producer, "reply", item.request, None)

    def _settle(self, keys: Iterable[Hashable], now: float) -> None:
        """After a change under some keys: whoever can be answered is."""
        for key in list(keys):
            while (queue := self.queues.get(key)) is not None:
                self._admit(queue)
                ready = [(want, found) for want in queue.wants if (found := self._answer(want))]
                if not ready:
                    self._forget(queue)
                    break
                # Of several, the one that holds least, then the one that has had least, then the one that came first.
                want, found = min(ready, key=lambda pair: self._load(pair[0].member)) if len(ready) > 1 else ready[0]
                self.counts.idle_s += now - want.at
                if found == _ITEMS:
                    self._deliver(want, now)
                elif found == _ENDED:
                    self._end(want)
                else:
                    self._drop_want(want.member, want.request)
                    self._send(want.member, "error", want.request, "PeerDied", found, b"")

    def _load(self, serial: int) -> tuple[float, float]:
        return sum(entry.item.weight for entry in self.hand[serial].values()), self.taken[serial]

    def _answer(self, want: Want) -> str:
        """What a want gets now: items, the end of a key, the text of an error; or nothing, and it waits."""
        queues = [self.queues[key] for key in want.keys]
        producers, growing = self.spec.producers, any(q.may_grow(self.spec.producers, self.gone) for q in queues)
        if any(len(q) for q in queues) and (sum(q.weight for q in queues) >= want.at_least or not growing):
            return _ITEMS
        if any(q.ended(producers, want.member) for q in queues):
            return _ENDED
        for queue in queues:
            if queue.lost:
                lost = ", ".join(f"{count} put by {name}" for name, count in queue.lost.items())
                return self._named(f"items under key {queue.key!r} are lost ({lost}): ", tuple(self.gone))
            if gone := [name for name in self.gone if name in producers and name not in queue.closed]:
                return self._named(f"key {queue.key!r} was not closed: ", gone)
        return ""

    def _deliver(self, want: Want, now: float) -> None:
        queues, weight = [self.queues[key] for key in want.keys], 0.0
        entries: list[Entry] = []
        while len(entries) < want.most_items and (full := [queue for queue in queues if len(queue)]):
            queue = min(full, key=lambda q: q.first or (0, 0)) if len(full) > 1 else full[0]
            if entries and weight + queue.peek().item.weight > want.at_most:
                break
            entry = queue.pop()
            queue.hand(want.member, 1)
            queue.readers.add(want.member)
            entry.ticket = next(self._tickets)
            self.hand[want.member][entry.ticket] = entry
            self._introduce(want.member, entry.item.producer)
            self.counts.deliver(now - entry.item.at)
            weight += entry.item.weight
            entries.append(entry)
        self.taken[want.member] += weight
        self._drop_want(want.member, want.request)
        told = tuple((e.ticket, e.key, e.item.producer, e.item.number, e.item.weight, e.item.offer) for e in entries)
        self._send(want.member, "deliver", want.request, told, ())
        for queue in queues:
            self._admit(queue)

    def _end(self, want: Want) -> None:
        ended = [key for key in want.keys if self.queues[key].ended(self.spec.producers, want.member)]
        for key in ended:
            self.queues[key].told.add(want.member)
        self._drop_want(want.member, want.request)
        self._send(want.member, "deliver", want.request, (), tuple(ended))
