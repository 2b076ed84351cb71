"""One host: the consumer maps the producer's memory, once, and looks at the item where it lies. No copy, no message."""

from __future__ import annotations

from typing import Any

from rlinf.channel.pool import area_of
from rlinf.channel.transports.base import Held, Landed, Offer, Visit


class Shared:
    """See `HostTransport`."""

    def answer(self, held: Held, consumer: int, *question: Any) -> tuple[Any, ...]:
        return ()

    def take(self, visit: Visit, part: int, offer: Offer) -> Landed:
        memory = visit.mappings.get(visit.serial, visit.name, offer.memory)
        return Landed(area_of(memory, offer.start, offer.nbytes))

    def forget(self, serial: int) -> None:
        pass

    def close(self) -> None:
        pass
