"""A process as a member of a run's channels: what it has put and still holds, and how it comes at what others put."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import weakref
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from rlinf.channel.codec import Encoded
from rlinf.channel.errors import BrokerDied, ChannelError, PeerDied, packed, rebuilt
from rlinf.channel.link import Link
from rlinf.channel.pool import Block, Pool
from rlinf.channel.reach import Delivered, Reach
from rlinf.channel.spec import Address, ChannelSpec, Place, this_place
from rlinf.channel.transports import inprocess
from rlinf.channel.transports.base import MAIN, NOT_LAID_OPEN, Held, Landed, Offer

if TYPE_CHECKING:
    from rlinf.channel.channel import Channel
    from rlinf.channel.wire import Message


class Member:
    """Joins when it is made. Thread-safe.

    Args:
        address: of the broker.
        name: of this member, as the channels' specs say it, e.g. ``rollout/3``. One process may have several members.
        device: where tensors on GPUs should come to, e.g. ``cuda:0``; ``cpu`` where there are none.
        ip: that members on other hosts reach this one by; nothing: by none but the broker.
        deadline_s: how long another member, or the broker, is waited for when it must answer at once.

    Raises:
        BrokerDied: nobody listens at the address.
        ChannelError: the name is taken, or the secret is another run's.
    """

    def __init__(
        self, address: Address, name: str, *, device: str = "cpu", ip: str = "", deadline_s: float = 60.0
    ) -> None:
        self.name = name
        self.device = device
        self.deadline_s = deadline_s
        self.place = this_place(device, ip)
        self.near: dict[str, bool] = {}  # channels whose consumers are all in this process
        self.broken: dict[str, ChannelError] = {}
        self.pool = Pool(self._dropped)
        self._held: dict[int, Held] = {}
        self._numbers = itertools.count(1)
        self._watches = itertools.count(1)
        self._asked: dict[str, str] = {}  # the transports that channels ask for
        self._watched: dict[int, Any] = {}
        self.reach = Reach(self.place, device, deadline_s, self.pool, self._find)
        self._questions: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self._answers: threading.Thread | None = None
        self.link = Link(address, name, self.place, self._on_message, self._on_notes)
        self.reach.link = self.link
        inprocess.register(address.local, self.link.serial, self)
        self.link.start()

    def channel(self, spec: ChannelSpec) -> Channel:
        """An end of a channel. Each thread that gets items by itself takes an end of its own."""
        from rlinf.channel.channel import Channel

        self.link.call("open", spec.plain(), timeout=self.deadline_s)
        self._asked[spec.name] = spec.transport
        return Channel(self, spec)

    def close(self, linger_s: float | None = None) -> None:
        """Leave, once everything that this member put is processed.

        Args:
            linger_s: how long to wait for that; 0: leave at once, and what nobody has taken is lost.

        Raises:
            ChannelError: not everything was processed in that time. The member has left all the same.
        """
        late = ""
        if linger_s != 0 and self._held:
            number, future = self.link.request()
            try:
                self.link.send("drain", number)
                future.result(linger_s)
            except TimeoutError:
                late = f"{self.name} left after {linger_s:g} s with {len(self._held)} items that are not processed"
            except BrokerDied:
                pass  # who waits for items has been told
        self.link.close()
        self._questions.put(None)
        self.reach.close()
        if late:
            raise ChannelError(late)

    def __enter__(self) -> Member:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        self.close(linger_s=0 if kind else None)

    @property
    def memory(self) -> dict[str, int]:
        """Bytes: of the pool, of it in use, and mapped of others; and the number of items that are held."""
        return {
            "pool": self.pool.nbytes,
            "used": self.pool.used,
            "mapped": self.reach.mappings.nbytes,
            "held": len(self._held),
            "watched": len(self._watched),
        }

    # What this member puts

    def hold(self, channel: str, value: Any, made: Encoded | None) -> tuple[int, Offer]:
        """Keep an item until its consumers are done with it. Returns its number, and what is offered.

        Args:
            made: the value taken apart; ``None``: all consumers are in this process, and get the value itself.
        """
        held = Held(value if made is None else None)
        offer = NOT_LAID_OPEN
        if made is not None:
            held.device = made.device
            if made.device:
                _synchronize(made)
            offer = held.lay_open(self.pool, MAIN, made)
        number = next(self._numbers)
        self._held[number] = held
        return number, offer

    def let_go(self, number: int) -> None:
        if held := self._held.pop(number, None):
            held.release(self.pool)

    def _find(self, number: int) -> Held | None:
        return self._held.get(number)

    def value_of(self, number: int) -> Any:
        """The object itself, for a consumer in this process."""
        held = self._held.get(number)
        if held is None:
            raise ChannelError(f"{self.name} does not hold item {number} any more")
        return held.value

    # What others put

    def collect(self, channel: str, item: Delivered) -> Any:
        """The value of an item.

        Raises:
            PeerDied: its producer is gone, and the payload cannot be reached. The item has been given back.
        """
        try:
            value, landed = self.reach.fetch(item, self._asked.get(channel, ""))
        except Exception as error:
            with contextlib.suppress(ChannelError):
                if isinstance(error, PeerDied):
                    self.link.send("back", channel, (item.ticket,))
                else:
                    # To give back what cannot be read would go round for ever. It counts as had.
                    self.link.send("done", channel, (item.ticket,))
                    self.link.send("freed", channel, (item.ticket,))
            raise
        if landed is None:
            self.link.doorbell.ring((channel, item.ticket, None, 0))
        elif item.offer.looked_at or landed.own:
            self._watch(channel, item.ticket, landed)
        return value

    def device_tensors(self, number: int) -> Sequence[Any]:
        """Tensors on GPUs of an item, for a consumer in this process."""
        held = self._held.get(number)
        return held.device if held else ()

    def _watch(self, channel: str, ticket: int, landed: Landed) -> None:
        """When the last view of the item's memory dies, the producer may use it again."""
        bell, own, number = self.link.doorbell, landed.own, next(self._watches)

        def ended(_: Any) -> None:
            bell.ring((channel, ticket, own, number))

        self._watched[number] = weakref.ref(landed.area, ended)

    # What the broker says; in the link's thread

    def _on_message(self, message: Message) -> None:
        what, *rest = message
        if what == "free":
            for number in rest[0]:
                self.let_go(number)
        elif what == "member":
            serial, name, place = rest
            self.reach.learn(serial, name, Place(*place))
        elif what == "gone":
            self.reach.forget(rest[0])
        elif what == "dropped":
            self.reach.mappings.drop(*rest)
        elif what == "near":
            self.near[rest[0]] = rest[1]
        elif what == "broken":
            channel, kind, text, cause = rest
            self.broken.setdefault(channel, rebuilt(kind, text, cause))
        elif what == "mended":
            if isinstance(self.broken.get(rest[0]), PeerDied):
                del self.broken[rest[0]]
        elif what == "ask":
            if self._answers is None:
                self._answers = threading.Thread(target=self._answer_all, name=f"answers-{self.name}", daemon=True)
                self._answers.start()
            self._questions.put(tuple(rest))

    def _on_notes(self, notes: list[tuple[str, int, Block | None, int]]) -> None:
        freed: dict[str, list[int]] = defaultdict(list)
        for channel, ticket, own, number in notes:
            self._watched.pop(number, None)
            if own is not None:
                self.pool.give(own)
            freed[channel].append(ticket)
        with contextlib.suppress(ChannelError):  # the broker is gone
            for channel, tickets in freed.items():
                self.link.send("freed", channel, tuple(tickets))

    def _dropped(self, inode: int) -> None:
        with contextlib.suppress(ChannelError):
            self.link.send("dropped", inode)

    def _answer_all(self) -> None:
        """Beside the link's thread, since some answers take a while."""
        while (question := self._questions.get()) is not None:
            consumer, request, way, number, *rest = question
            try:
                answer = ("reply", self._answer(consumer, way, number, rest))
            except Exception as error:
                text = f"{self.name} could not give an item by {way}: {type(error).__name__}: {error}"
                answer = ("error", "PeerDied", text, packed(error))  # type: ignore[assignment]
            with contextlib.suppress(ChannelError):
                self.link.send("answer", consumer, request, *answer)

    def _answer(self, consumer: int, way: str, number: int, question: Sequence[Any]) -> tuple[Any, ...]:
        held = self._held.get(number)
        if held is None:
            raise ChannelError(f"item {number} is not held any more")
        if way == "open":
            from rlinf.channel.codec import encode

            if MAIN not in held.parts:
                made = encode(held.value)
                held.device = made.device
                held.lay_open(self.pool, MAIN, made)
            return tuple(held.parts[MAIN][1])
        if way == "stage":
            return tuple(held.stage(self.pool))
        if way in ("cuda_ipc", "nccl"):
            return self.reach.device_transport(way).answer(held, consumer, *question)
        return self.reach.host_transport(way).answer(held, consumer, *question)

    def wait(self, future: Future[Any], channel: str, request: int, timeout: float | None) -> Any:
        """The answer to a get or a put.

        Raises:
            ChannelTimeout: it did not come in time; says what is missing.
        """
        with contextlib.suppress(TimeoutError):
            return future.result(timeout)
        if not future.done():
            self.link.send("withdraw", channel, request)
        try:
            return future.result(self.deadline_s)  # what was on its way, or why nothing is
        except TimeoutError:
            raise BrokerDied(f"{self.link.where} did not answer within {self.deadline_s:g} s") from None


def _synchronize(made: Encoded) -> None:
    import torch

    for device in {tensor.device for tensor in made.device}:
        torch.cuda.synchronize(device)  # consumers read on streams of their own
