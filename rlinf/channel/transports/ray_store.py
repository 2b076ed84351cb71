"""Where members reach each other in no other way: the host part through Ray's object store. Two copies and more."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlinf.channel.errors import PeerDied
from rlinf.channel.transports.base import Held, Landed, Offer, Visit


class RayStore:
    """See `HostTransport`. Both members are in one Ray session.

    A reference that is pickled outside of Ray's calls is pinned for ever. So its parts go over, and it is registered on
    the other side; the producer holds it until the item is done with.
    """

    def answer(self, held: Held, consumer: int, *question: Any) -> tuple[Any, ...]:
        import ray
        from ray._private import worker

        core: Any = worker.global_worker.core_worker  # type: ignore[attr-defined]
        block, _ = held.parts[question[0]]
        reference = ray.put(block.area)
        held.kept.append(reference)
        _, owner, status = core.serialize_object_ref(reference)
        return reference.binary(), owner, status

    def take(self, visit: Visit, part: int, offer: Offer) -> Landed:
        import ray
        from ray._private import worker

        core: Any = worker.global_worker.core_worker  # type: ignore[attr-defined]
        binary, owner, status = visit.ask(part)
        reference: Any = ray.ObjectRef(binary, owner, "rlinf channel")
        core.deserialize_and_register_object_ref(binary, ray.ObjectRef.nil(), owner, status)
        try:
            found = ray.get(reference, timeout=visit.deadline_s)
        except (ray.exceptions.RayError, TimeoutError) as error:
            raise PeerDied(f"an item of {visit.name} is not in Ray's object store any more: {error}") from error
        block = visit.pool.take(offer.nbytes)
        area = block.area
        np.copyto(area, found)
        return Landed(area, block)

    def forget(self, serial: int) -> None:
        pass

    def close(self) -> None:
        pass
