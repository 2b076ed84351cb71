"""Between hosts, CPU: the host part as one message of a Gloo group of the two."""

from __future__ import annotations

from typing import Any

import torch

from rlinf.channel.errors import PeerDied
from rlinf.channel.transports.base import Held, Landed, Offer, Visit
from rlinf.channel.transports.pair import Pairs


class Gloo:
    """See `HostTransport`.

    Args:
        ip: that this member is reached by.
    """

    def __init__(self, ip: str, seconds: float) -> None:
        self._pairs = Pairs("gloo", ip, seconds)

    def answer(self, held: Held, consumer: int, *question: Any) -> tuple[Any, ...]:
        if question[0] == "meet":
            return self._pairs.meet(consumer)
        block, _ = held.parts[question[1]]
        self._pairs.sender(consumer).send([torch.frombuffer(block.area, dtype=torch.uint8)])
        return ()

    def take(self, visit: Visit, part: int, offer: Offer) -> Landed:
        block = visit.pool.take(offer.nbytes)
        area = block.area
        try:
            receiver = self._pairs.receiver(visit)
            with receiver.lock:
                visit.ask("send", part)
                receiver.receive([torch.frombuffer(area, dtype=torch.uint8)])
        except PeerDied:
            self._pairs.forget(visit.serial)
            visit.pool.give(block)
            raise
        return Landed(area, block)

    def forget(self, serial: int) -> None:
        self._pairs.forget(serial)

    def close(self) -> None:
        self._pairs.close()
