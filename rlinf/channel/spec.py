"""What members agree on: a channel's name and bounds, where the broker is, where a member is. Plain data."""

from __future__ import annotations

import os
import secrets
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from rlinf.channel.errors import ChannelError
from rlinf.host import this_host

TRANSPORTS = ("inprocess", "shared", "cuda_ipc", "nccl", "gloo", "tcp", "ray_store")
_PLAIN = (type(None), bool, int, float, str, bytes)


@dataclass(frozen=True)
class ChannelSpec:
    """A channel. Every member that opens it gives the same.

    Attributes:
        name: of the channel.
        producers: names of the members that put. A key ends when each of them has closed it.
        consumers: names of the members that get.
        capacity: how much weight may wait under a key before `put` waits; ``None``: any. An item that is heavier than
            the capacity goes in alone, and a consumer that asks for more at once is never starved by it.
        fields: of a `Batch`, those that the consumers read; others stay where they are. ``None``: all.
        transport: the way to take where it is possible, instead of the best.
        key_readers: how many consumers read each key to its end. The broker forgets a key once so many have seen it.
    """

    name: str
    producers: tuple[str, ...]
    consumers: tuple[str, ...]
    capacity: float | None = None
    fields: tuple[str, ...] | None = None
    transport: str = ""
    key_readers: int = 1

    def __post_init__(self) -> None:
        for side in ("producers", "consumers"):
            names: Sequence[str] = getattr(self, side)
            if isinstance(names, str) or not names or len(set(names)) < len(names):
                raise ChannelError(
                    f"channel {self.name!r}: {side} must be different names, at least one; found {names!r}"
                )
            object.__setattr__(self, side, tuple(names))
        if self.fields is not None:
            object.__setattr__(self, "fields", tuple(self.fields))
        if self.capacity is not None and not self.capacity > 0:
            raise ChannelError(f"channel {self.name!r}: capacity must be above 0, or None; found {self.capacity}")
        if self.key_readers < 1:
            raise ChannelError(f"channel {self.name!r}: key_readers must be at least 1; found {self.key_readers}")
        check_transport(self.transport)

    def plain(self) -> tuple[Any, ...]:
        """For a message."""
        return tuple(getattr(self, f.name) for f in fields(self))


@dataclass(frozen=True)
class Address:
    """Where a broker listens, and the secret that lets one in. Whoever has it can take part: pass it on with care.

    Attributes:
        host: see `this_host`.
        local: name of its Unix socket, for members of that host. It lies in no directory.
        ip, port: for other hosts.
    """

    host: str
    local: str
    ip: str
    port: int
    secret: bytes = field(repr=False)


@dataclass(frozen=True)
class Place:
    """Where a member is, as far as transports ask.

    Attributes:
        host: the same for members that can map one another's memory.
        process: the same for members of one process.
        device: ``cpu`` or ``cuda``: where its tensors may lie.
        ray: the Ray session that it is in, or nothing.
        ip: that other hosts reach it by, or nothing.
    """

    host: str
    process: str
    device: str = "cpu"
    ray: str = ""
    ip: str = ""

    def plain(self) -> tuple[str, ...]:
        """For a message."""
        return (self.host, self.process, self.device, self.ray, self.ip)


def this_place(device: str = "cpu", ip: str = "") -> Place:
    """Where this process is. (A process id alone comes again.)"""
    began = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19]
    return Place(this_host(), f"{this_host()}/{os.getpid()}/{began}", device.split(":")[0], _ray_session(), ip)


def _ray_session() -> str:
    import sys

    ray = sys.modules.get("ray")  # who has not imported it is in no session
    if ray is None or not ray.is_initialized():
        return ""
    return str(ray.get_runtime_context().gcs_address)


def new_secret() -> bytes:
    return secrets.token_bytes(32)


def check_key(key: Hashable) -> None:
    """Keys travel to the broker, which knows no classes.

    Raises:
        ChannelError: it is not a plain value, or a tuple of such.
    """
    if isinstance(key, tuple):
        for part in key:
            check_key(part)
    elif type(key) not in _PLAIN:
        raise ChannelError(
            f"a key must be made of None, bool, int, float, str, bytes and tuples of these; found {type(key).__name__} "
            f"({key!r})"
        )


def check_transport(name: str) -> None:
    if name and name not in TRANSPORTS:
        raise ChannelError(f"no transport {name!r}; there are {', '.join(TRANSPORTS)}")
