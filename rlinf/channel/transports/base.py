"""What transports share. A payload has a part on the host (skeleton, CPU tensors), and perhaps tensors on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from rlinf.channel.codec import Encoded, encode
from rlinf.channel.pool import Block, Mappings, Pool
from rlinf.channel.spec import Place
from rlinf.vps.memory import Handle

MAIN, STAGED = 0, 1  # parts: the host part of an item; its GPU tensors, copied to the host


class Offer(NamedTuple):
    """Where a part lies, in the memory of its producer. It goes through the broker as a plain tuple.

    Attributes:
        handle: of the memory; nothing: the value has not been laid open, since all consumers were in its process.
        start, nbytes: the range.
        skeleton: bytes of it that are the skeleton, at the end.
        device: number of tensors on GPUs.
    """

    handle: tuple[Any, ...]
    start: int
    nbytes: int
    skeleton: int
    device: int

    @property
    def memory(self) -> Handle:
        return Handle(*self.handle)

    @property
    def looked_at(self) -> bool:
        """Whether a consumer may look at the memory for longer than it takes to read the skeleton."""
        return self.nbytes > self.skeleton or self.device > 0 or not self.handle


NOT_LAID_OPEN = Offer((), 0, 0, 0, 0)


@dataclass
class Held:
    """What a producer holds of an item until its last consumer is done with it.

    Attributes:
        value: the object itself, if it was not taken apart.
        parts: blocks of its parts, and what was offered of them.
        device: its tensors on GPUs.
        kept: what else a transport keeps for it.
    """

    value: Any = None
    parts: dict[int, tuple[Block, Offer]] = field(default_factory=dict)
    device: Sequence[torch.Tensor] = ()
    kept: list[Any] = field(default_factory=list)

    def lay_open(self, pool: Pool, part: int, made: Encoded) -> Offer:
        """Copy a part to where others can reach it."""
        block = pool.take(made.nbytes)
        try:
            made.write(block.area)
        except BaseException:
            pool.give(block)
            raise
        handle = block.segment.memory.handle
        plain = (handle.host, handle.pid, handle.fd, handle.inode, handle.nbytes)
        offer = Offer(plain, block.start, made.nbytes, len(made.skeleton), len(made.device))
        self.parts[part] = (block, offer)
        return offer

    def stage(self, pool: Pool) -> Offer:
        """The tensors on GPUs, as a part on the host."""
        if STAGED not in self.parts:
            self.lay_open(pool, STAGED, encode([tensor.cpu() for tensor in self.device]))
        return self.parts[STAGED][1]

    def release(self, pool: Pool) -> None:
        for block, _ in self.parts.values():
            pool.give(block)
        self.parts.clear()
        self.value, self.device = None, ()
        self.kept.clear()


@dataclass
class Visit:
    """A consumer at an item of another member.

    Attributes:
        serial, name, place: of the member that holds it.
        number: of the item there.
        ask: put a question to that member's side of the same transport; gives its answer, in plain values.
        mappings, pool: of the consumer: memory of others that it maps, and its own.
        here: where the consumer is.
        device: that tensors on GPUs should come to.
    """

    serial: int
    name: str
    place: Place
    number: int
    ask: Callable[..., Any]
    mappings: Mappings
    pool: Pool
    here: Place
    device: str
    deadline_s: float


@dataclass
class Landed:
    """The host part of an item, within reach.

    Attributes:
        area: uint8 ``[nbytes]``; views of it hold on to this very object.
        own: a block of the consumer's pool that it lies in; ``None``: it lies in the producer's memory.
    """

    area: np.ndarray
    own: Block | None = None


class HostTransport(Protocol):
    """Carries the host part."""

    def answer(self, held: Held, consumer: int, *question: Any) -> tuple[Any, ...]:
        """Producer: what a consumer (by serial) needs to know."""

    def take(self, visit: Visit, part: int, offer: Offer) -> Landed:
        """Consumer: get the part.

        Raises:
            PeerDied: the producer is gone or silent; its name is in the message.
        """

    def forget(self, serial: int) -> None:
        """A member is gone."""

    def close(self) -> None:
        """Let go of connections."""


class DeviceTransport(Protocol):
    """Carries tensors on GPUs."""

    def answer(self, held: Held, consumer: int, *question: Any) -> tuple[Any, ...]:
        """Producer: what a consumer (by serial) needs to know."""

    def take(self, visit: Visit) -> Sequence[torch.Tensor]:
        """Consumer: get the tensors."""

    def forget(self, serial: int) -> None:
        """A member is gone."""

    def close(self) -> None:
        """Let go of connections."""
