"""How a member comes at what others put: who they are, the memory of theirs that it maps, the ways it has used."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from rlinf.channel.choice import choose
from rlinf.channel.codec import decode
from rlinf.channel.errors import PeerDied
from rlinf.channel.link import Link
from rlinf.channel.pool import Mappings, Pool
from rlinf.channel.spec import Place
from rlinf.channel.transports import inprocess
from rlinf.channel.transports.base import (
    MAIN,
    NOT_LAID_OPEN,
    STAGED,
    DeviceTransport,
    Held,
    HostTransport,
    Landed,
    Offer,
    Visit,
)


@dataclass(frozen=True)
class Delivered:
    """An item as the broker hands it on.

    Attributes:
        ticket: by which it is acknowledged or given back.
        producer, number: who holds the payload, and as what.
    """

    ticket: int
    key: Hashable
    producer: int
    number: int
    weight: float
    offer: Offer


class Reach:
    """A member's way to the others.

    Args:
        place, device, deadline_s: of the member.
        pool: its memory, where items from other hosts land.
        find: an item that it holds itself, by number; for those who fetch it by TCP.

    Attributes:
        link: to the broker; set once there is one.
        mappings: memory of others.
    """

    link: Link

    def __init__(
        self, place: Place, device: str, deadline_s: float, pool: Pool, find: Callable[[int], Held | None]
    ) -> None:
        self.mappings = Mappings()
        self._place, self._device, self._deadline_s = place, device, deadline_s
        self._pool, self._find = pool, find
        self._peers: dict[int, tuple[str, Place]] = {}
        self._departed: dict[int, str] = {}
        self._host: dict[str, HostTransport] = {}
        self._devices: dict[str, DeviceTransport] = {}
        self._making = threading.Lock()

    def learn(self, serial: int, name: str, place: Place) -> None:
        """Another member is there."""
        self._peers[serial] = (name, place)

    def forget(self, serial: int) -> None:
        """It is gone."""
        if peer := self._peers.pop(serial, None):
            self._departed[serial] = peer[0]
        self.mappings.drop(serial)
        for transport in self._transports():
            transport.forget(serial)

    def close(self) -> None:
        for transport in self._transports():
            transport.close()
        self.mappings.drop_all()

    def slow(self, producer: int, offer: Offer) -> bool:
        """Whether `fetch` waits for another member."""
        _, place = self._peers.get(producer, ("", self._place))
        return place.host != self._place.host or bool(offer.device)

    def fetch(self, item: Delivered, asked: str) -> tuple[Any, Landed | None]:
        """The value of an item, and where it landed; nothing for that where it is the object itself.

        Args:
            asked: the transport that the channel asks for.

        Raises:
            PeerDied: its producer is gone, and the payload cannot be reached.
        """
        if item.producer not in self._peers:
            name = self._departed.get(item.producer, "the producer of an item")
            raise PeerDied(f"{name} is gone, and item {item.number} of it cannot be read any more")
        name, place = self._peers[item.producer]
        ways = choose(place, self._place, asked)
        if item.offer == NOT_LAID_OPEN:
            if producer := inprocess.find(self.link.address.local, item.producer):
                return producer.value_of(item.number), None
            visit = self._visit(item, name, place, "open")
            offer = Offer(*visit.ask())
        else:
            offer = item.offer
        host = ways.host if ways.host != "inprocess" else "shared"  # it was laid open already
        landed = self.host_transport(host).take(self._visit(item, name, place, host), MAIN, offer)
        tensors: Sequence[Any] = ()
        if offer.device:
            if producer := inprocess.find(self.link.address.local, item.producer):
                tensors = producer.device_tensors(item.number)
            elif ways.device in ("", "staged"):
                staged = Offer(*self._visit(item, name, place, "stage").ask())
                part = self.host_transport(host).take(self._visit(item, name, place, host), STAGED, staged)
                on_host = decode(part.area.copy() if part.own else part.area, staged.skeleton)
                tensors = [tensor.to(self._device, copy=True) for tensor in on_host]
                del on_host
                if part.own:
                    self._pool.give(part.own)
            else:
                tensors = self.device_transport(ways.device).take(self._visit(item, name, place, ways.device))
        return decode(landed.area, offer.skeleton, tensors), landed

    def _visit(self, item: Delivered, name: str, place: Place, way: str) -> Visit:
        def ask(*question: Any) -> Any:
            return self._ask(item.producer, name, way, item.number, *question)

        return Visit(
            item.producer,
            name,
            place,
            item.number,
            ask,
            self.mappings,
            self._pool,
            self._place,
            self._device,
            self._deadline_s,
        )

    def _ask(self, serial: int, name: str, *question: Any) -> Any:
        number, future = self.link.request()
        self.link.send("ask", number, serial, *question)
        try:
            return future.result(self._deadline_s)
        except TimeoutError:
            raise PeerDied(f"{name} did not answer {question[0]!r} within {self._deadline_s:g} s") from None

    # Transports, made when they are first needed

    def _transports(self) -> list[HostTransport | DeviceTransport]:
        return [*self._host.values(), *self._devices.values()]

    def host_transport(self, name: str) -> HostTransport:
        with self._making:
            if name not in self._host:
                self._host[name] = self._new_host_transport(name)
            return self._host[name]

    def _new_host_transport(self, name: str) -> HostTransport:
        if name == "shared":
            from rlinf.channel.transports.shared import Shared

            return Shared()
        if name == "tcp":
            from rlinf.channel.transports.tcp import Tcp

            return Tcp(self.link.address.secret, self._place.ip, self._find)
        if name == "gloo":
            from rlinf.channel.transports.gloo import Gloo

            return Gloo(self._place.ip, self._deadline_s)
        from rlinf.channel.transports.ray_store import RayStore

        return RayStore()

    def device_transport(self, name: str) -> DeviceTransport:
        with self._making:
            if name not in self._devices:
                if name == "cuda_ipc":
                    from rlinf.channel.transports.cuda_ipc import CudaIpc

                    self._devices[name] = CudaIpc()
                else:
                    from rlinf.channel.transports.nccl import Nccl

                    self._devices[name] = Nccl(self._place.ip, self._deadline_s)
            return self._devices[name]
