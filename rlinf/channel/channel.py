"""`Channel`: an end of a named, bounded stream of items from some members to others."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Hashable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from rlinf.channel.choice import explain
from rlinf.channel.codec import detached, encode
from rlinf.channel.errors import BrokerDied, ChannelError, ChannelFailed, ChannelTimeout, EndOfStream, packed
from rlinf.channel.member import Member
from rlinf.channel.reach import Delivered
from rlinf.channel.spec import ChannelSpec, Place, check_key
from rlinf.channel.transports.base import Offer

EVERY = object()  # of `Channel.close`: every key
_ALL = float("inf")
_WIDE = 1 << 22  # bytes from which copying would hold up an event loop


@dataclass(frozen=True)
class Received:
    """An item with what came with it; it is acknowledged by `Channel.done`, or goes back by `Channel.give_back`."""

    value: Any
    key: Hashable
    weight: float
    ticket: int


class Channel:
    """One end, made by `Member.channel`. Every error names the channel and whom it is about.

    Items that `get` and its kin return are acknowledged by the next call of such a method on the same end, or by
    `done`. What is not acknowledged when this member dies goes to another consumer. An end therefore belongs to one
    thread or task at a time; others take ends of their own, or `receive`, whose items are acknowledged one by one.

    Tensors of an item look at memory of its producer, which uses it again once they are gone: keep an item for long
    only as a copy (``copy=True``), and write only to copies.
    """

    def __init__(self, member: Member, spec: ChannelSpec) -> None:
        self.spec = spec
        self._member = member
        self._hand: list[int] = []

    # Producers

    def put(
        self,
        item: Any,
        key: Hashable = None,
        *,
        keys: Sequence[Hashable] | None = None,
        weight: float = 1.0,
        priority: int = 0,
        timeout: float | None = None,
    ) -> None:
        """Offer an item. Returns once its tensors are copied (they may change again) and there is room for it.

        Args:
            item: any structure of tensors, arrays, `Batch` and Python values. Within a process it goes as it is.
            key: that it goes to.
            keys: several instead: whoever gets under one of them gets it, and the payload is there once.
            weight: what `ChannelSpec.capacity` and `get_batch` count, e.g. tokens.
            priority: higher ones are taken first; those of the same are taken in the order of the puts.
            timeout: seconds to wait for room.

        Raises:
            ChannelTimeout: there was no room; the item is not in.
            PeerDied: no consumer is left. (Without a capacity a put does not wait for the broker: a later one raises.)
            ChannelError: the key is closed, this member is no producer, or the item cannot be sent.
        """
        waits = self._put(item, (key,) if keys is None else tuple(keys), weight, priority)
        if waits:
            request, future = waits
            self._member.wait(future, self.spec.name, request, timeout)

    async def put_async(
        self,
        item: Any,
        key: Hashable = None,
        *,
        keys: Sequence[Hashable] | None = None,
        weight: float = 1.0,
        priority: int = 0,
        timeout: float | None = None,
    ) -> None:
        """`put`. Large items are copied beside the event loop."""
        into = (key,) if keys is None else tuple(keys)
        waits = await asyncio.to_thread(self._put, item, into, weight, priority)
        if waits:
            await self._wait_async(*waits, timeout)

    def _put(
        self, item: Any, keys: tuple[Hashable, ...], weight: float, priority: int
    ) -> tuple[int, Future[Any]] | None:
        member, name = self._member, self.spec.name
        self._check_side("producers")
        self._check()
        for key in keys:
            check_key(key)
        if not keys or len(set(keys)) < len(keys):
            raise ValueError(f"channel {name!r}: keys must be different, at least one; found {keys!r}")
        if not weight >= 0:
            raise ValueError(f"channel {name!r}: weight must be 0 or more; found {weight}")
        near = member.near.get(name, False) and self.spec.transport in ("", "inprocess")
        made = None if near else encode(item, self.spec.fields)
        number, offer = member.hold(name, self._pruned(item) if near else None, made)
        nbytes = made.nbytes + sum(tensor.nbytes for tensor in made.device) if made else 0
        about = (float(weight), int(priority), nbytes, offer.looked_at)
        request, future = (0, None) if self.spec.capacity is None else member.link.request()
        try:
            member.link.send("put", name, number, request, keys, *about, tuple(offer))
        except BaseException:
            member.let_go(number)
            raise
        return (request, future) if future else None

    def _pruned(self, item: Any) -> Any:
        from rlinf.batch import Batch

        return item.only(self.spec.fields) if self.spec.fields is not None and isinstance(item, Batch) else item

    def close(self, key: Any = EVERY) -> None:
        """This producer puts nothing more under the key; without one: under any.

        Consumers see the end once every producer has closed and all items are acknowledged.
        """
        self._check_side("producers")
        self._check()
        if key is not EVERY:
            check_key(key)
        self._member.link.send("close", self.spec.name, key is EVERY, None if key is EVERY else key)

    # Consumers

    def get(self, key: Hashable = None, *, timeout: float | None = None, copy: bool = False) -> Any:
        """The next item under a key.

        Args:
            timeout: seconds to wait.
            copy: the item's tensors are this process' own.

        Raises:
            EndOfStream: all producers have closed the key, and everything under it is processed.
            ChannelTimeout: nothing came; says what it waited for.
            PeerDied: a producer died that had not closed the key, or whose item is lost; or the broker did.
            ChannelFailed: some member has failed the channel.
        """
        return self._single(self._await((key,), 0.0, _ALL, 1, timeout), copy)

    def get_batch(
        self,
        at_least: float = 0.0,
        at_most: float | None = None,
        key: Hashable = None,
        *,
        timeout: float | None = None,
        copy: bool = False,
    ) -> list[Any]:
        """As many items as weigh enough: waits for ``at_least``, then takes what is there, up to ``at_most``.

        There is always one item at least. When no more can come there may be fewer than ``at_least``.

        Raises:
            as `get`.
        """
        most = _ALL if at_most is None else at_most
        return self._several(self._await((key,), at_least, most, 1 << 30, timeout), copy)

    def select(
        self, keys: Sequence[Hashable], *, wait: bool = True, timeout: float | None = None
    ) -> tuple[list[Received], list[Hashable]]:
        """What is there under any of some keys, and which of them have ended. Neither comes again.

        Args:
            wait: otherwise return at once, with nothing, if there is nothing.

        Raises:
            as `get`, but for `EndOfStream`.
        """
        try:
            entries, ended = self._await(tuple(keys), 0.0, _ALL, 1 << 30, timeout if wait else 0.0)
        except ChannelTimeout:
            if wait:
                raise
            return [], []
        return self._received(entries), list(ended)

    def stream(self, key: Hashable = None) -> Iterator[Any]:
        """Items under a key as they come, until its end."""
        while True:
            try:
                yield self.get(key)
            except EndOfStream:
                return

    def __iter__(self) -> Iterator[Any]:
        return self.stream()

    async def get_async(self, key: Hashable = None, *, timeout: float | None = None, copy: bool = False) -> Any:
        """`get`. Cancelling it loses nothing: what was on its way goes back."""
        answer = await self._await_async((key,), 0.0, _ALL, 1, timeout)
        return await self._in_thread(answer, lambda: self._single(answer, copy))

    async def get_batch_async(
        self,
        at_least: float = 0.0,
        at_most: float | None = None,
        key: Hashable = None,
        *,
        timeout: float | None = None,
        copy: bool = False,
    ) -> list[Any]:
        """`get_batch`; see `get_async`."""
        most = _ALL if at_most is None else at_most
        answer = await self._await_async((key,), at_least, most, 1 << 30, timeout)
        return await self._in_thread(answer, lambda: self._several(answer, copy))

    async def stream_async(self, key: Hashable = None) -> AsyncIterator[Any]:
        """`stream`."""
        while True:
            try:
                yield await self.get_async(key)
            except EndOfStream:
                return

    def receive(
        self,
        key: Hashable = None,
        *,
        at_least: float = 0.0,
        at_most: float | None = None,
        most_items: int = 1,
        timeout: float | None = None,
    ) -> list[Received]:
        """Items that stay in hand until `done` or `give_back` names them. Any number of threads may call it."""
        most = _ALL if at_most is None else at_most
        entries, ended = self._ask((key,), at_least, most, most_items, (), timeout)
        if ended:
            raise self._end(key)
        return [self._one(entry) for entry in entries]

    def done(self, *items: Received) -> None:
        """These items are processed; without any: those that the last get returned."""
        tickets = tuple(item.ticket for item in items) if items else self._acknowledged()
        if tickets:
            self._member.link.send("done", self.spec.name, tickets)

    def give_back(self, *items: Received) -> None:
        """These items are not processed here: they go to the head of their keys, for any consumer."""
        self._member.link.send("back", self.spec.name, tuple(item.ticket for item in items))

    # Both

    def fail(self, error: BaseException) -> None:
        """Everyone who waits at this channel, now or later, gets the first such error, as `ChannelFailed`."""
        text = f"channel {self.spec.name!r} was failed by {self._member.name}: {type(error).__name__}: {error}"
        self._member.link.send("fail", self.spec.name, "ChannelFailed", text, packed(error))

    def statistics(self) -> dict[str, Any]:
        """Counts since the channel began (`statistics.Counts`), and what waits or is in hand now."""
        return self._member.link.call("statistics", before=(self.spec.name,), timeout=self._member.deadline_s)

    def explain(self) -> str:
        """Which pairs of members go by which transport."""
        places = self._member.link.call("places", before=(self.spec.name,), timeout=self._member.deadline_s)
        found = {name: Place(*place) for name, place in places.items()}
        return explain(self.spec.producers, self.spec.consumers, found, self.spec.transport)

    def _check(self) -> None:
        if error := self._member.broken.get(self.spec.name):
            raise error

    def _check_side(self, side: str) -> None:
        if self._member.name not in getattr(self.spec, side):
            known = ", ".join(getattr(self.spec, side))
            raise ChannelError(
                f"channel {self.spec.name!r}: {self._member.name} is none of its {side}, who are {known}"
            )

    # Waiting

    def _acknowledged(self) -> tuple[int, ...]:
        hand, self._hand = tuple(self._hand), []
        return hand

    def _want(
        self, keys: tuple[Hashable, ...], at_least: float, at_most: float, most: int, done: tuple[int, ...]
    ) -> tuple[int, Future[Any]]:
        self._check_side("consumers")
        for key in keys:
            check_key(key)
        if isinstance(error := self._member.broken.get(self.spec.name), ChannelFailed):
            raise error
        request, future = self._member.link.request()
        self._member.link.send("want", self.spec.name, request, done, keys, float(at_least), float(at_most), most)
        return request, future

    def _ask(self, keys: Any, at_least: float, at_most: float, most: int, done: Any, timeout: float | None) -> Any:
        request, future = self._want(keys, at_least, at_most, most, done)
        try:
            return self._member.wait(future, self.spec.name, request, timeout)
        except KeyboardInterrupt:
            self._abandon(request, future)
            raise

    def _await(self, keys: Any, at_least: float, at_most: float, most: int, timeout: float | None) -> Any:
        return self._ask(keys, at_least, at_most, most, self._acknowledged(), timeout)

    async def _await_async(self, keys: Any, at_least: float, at_most: float, most: int, timeout: float | None) -> Any:
        request, future = self._want(keys, at_least, at_most, most, self._acknowledged())
        return await self._wait_async(request, future, timeout)

    async def _wait_async(self, request: int, future: Future[Any], timeout: float | None) -> Any:
        waiter = asyncio.wrap_future(future)
        try:
            done, _ = await asyncio.wait([waiter], timeout=timeout)
            if not done:
                self._member.link.send("withdraw", self.spec.name, request)
            return await asyncio.shield(waiter)
        except asyncio.CancelledError:
            self._abandon(request, future)
            raise

    def _abandon(self, request: int, future: Future[Any]) -> None:
        """Nobody waits for the answer any more: what was on its way goes back."""

        def give_back(answered: Future[Any]) -> None:
            if answered.cancelled() or answered.exception() or not isinstance(answered.result(), list):
                return
            if tickets := tuple(entry[0] for entry in answered.result()[0]):
                with contextlib.suppress(BrokerDied):
                    self._member.link.send("back", self.spec.name, tickets)

        self._member.link.send("withdraw", self.spec.name, request)
        future.add_done_callback(give_back)

    # Values

    def _one(self, entry: tuple[Any, ...]) -> Received:
        ticket, key, producer, number, weight, offer = entry
        item = Delivered(ticket, key, producer, number, weight, Offer(*offer))
        return Received(self._member.collect(self.spec.name, item), key, weight, ticket)

    def _received(self, entries: Sequence[tuple[Any, ...]]) -> list[Received]:
        found = []
        for i, entry in enumerate(entries):
            try:
                found.append(self._one(entry))
            except BaseException:
                rest = tuple(other[0] for other in itertools.chain(entries[:i], entries[i + 1 :]))
                if rest:
                    self._member.link.send("back", self.spec.name, rest)
                raise
        self._hand += [item.ticket for item in found]
        return found

    def _several(self, answer: Any, copy: bool) -> list[Any]:
        entries, ended = answer
        if ended:
            raise self._end(ended[0])
        values = [item.value for item in self._received(entries)]
        return [detached(value) for value in values] if copy else values

    def _single(self, answer: Any, copy: bool) -> Any:
        return self._several(answer, copy)[0]

    def _end(self, key: Hashable) -> EndOfStream:
        return EndOfStream(f"channel {self.spec.name!r}: key {key!r} has ended: all its producers have closed it")

    async def _in_thread(self, answer: Any, collect: Any) -> Any:
        """Fetching from another host must not hold up the event loop."""
        entries, _ = answer
        if any(self._member.reach.slow(entry[2], Offer(*entry[5])) for entry in entries):
            return await asyncio.to_thread(collect)
        return collect()
