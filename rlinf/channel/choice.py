"""Which way serves a pair of members: from where they are, and where their tensors live."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlinf.channel.errors import ChannelError
from rlinf.channel.spec import Place

DEVICE_WAYS = ("cuda_ipc", "nccl")


@dataclass(frozen=True)
class Ways:
    """How a payload goes between two members.

    Attributes:
        host: transport of the host part.
        device: transport of tensors on GPUs; ``staged``: they are copied to the host and go with the other part;
            nothing: there can be none.
    """

    host: str
    device: str

    def __str__(self) -> str:
        return self.host if self.device in ("", self.host) else f"{self.host}, GPU tensors {self.device}"


def host_ways(source: Place, target: Place) -> list[str]:
    """What can carry the host part, best first."""
    near = source.host == target.host
    reachable = near or bool(source.ip and target.ip)
    return [
        *(["inprocess"] if source.process == target.process else []),
        *(["shared"] if near else []),
        *(["tcp", "gloo"] if reachable else []),
        *(["ray_store"] if source.ray and source.ray == target.ray else []),
    ]


def device_ways(source: Place, target: Place) -> list[str]:
    """What can carry tensors on GPUs, best first."""
    if source.device != "cuda":
        return []
    if source.process == target.process:
        return ["inprocess"]
    near, both = source.host == target.host, target.device == "cuda"
    reachable = near or bool(source.ip and target.ip)
    return [
        *(["cuda_ipc"] if near and both else []),
        *(["nccl"] if both and reachable else []),
        "staged",
    ]


def choose(source: Place, target: Place, asked: str = "") -> Ways:
    """The way from a producer to a consumer.

    Args:
        asked: the way to take where it is possible, instead of the best.

    Raises:
        ChannelError: what was asked for is not possible between these two, or nothing is.
    """
    host, device = host_ways(source, target), device_ways(source, target)
    if not host:
        raise ChannelError(
            f"nothing leads from {_at(source)} to {_at(target)}: give members the address that other hosts reach "
            "them by (ip=), or start both in one Ray session"
        )
    if asked and asked not in (*host, *device) and not (asked in DEVICE_WAYS and source.device == "cpu"):
        raise ChannelError(
            f"the transport {asked!r} cannot serve {_at(source)} to {_at(target)}; possible are "
            f"{', '.join([*host, *device])}"
        )
    if asked in host:
        # A device transport between the same two is not overridden by a host transport, but for the value itself.
        rest = [way for way in device if way != "inprocess" or asked == "inprocess"]
        return Ways(asked, rest[0] if rest else ("staged" if device else ""))
    return Ways(host[0], asked if asked in device else (device[0] if device else ""))


def _at(place: Place) -> str:
    return f"{place.device} in process {place.process.rsplit('/', 2)[-2]} of host {place.ip or place.host[:8]}"


def explain(producers: Sequence[str], consumers: Sequence[str], places: Mapping[str, Place], asked: str = "") -> str:
    """One line for each way, and the pairs that take it; then who is not here yet."""
    found: dict[str, list[str]] = {}
    for producer in producers:
        for consumer in consumers:
            if producer in places and consumer in places:
                way = str(choose(places[producer], places[consumer], asked))
                found.setdefault(way, []).append(f"{producer} -> {consumer}")
    lines = [
        f"{way}: {len(pairs)} pairs: {', '.join(pairs[:4])}{', ...' if len(pairs) > 4 else ''}"
        for way, pairs in sorted(found.items())
    ]
    missing = sorted({name for name in (*producers, *consumers) if name not in places})
    return "\n".join([*lines, *([f"not here yet: {', '.join(missing)}"] if missing else [])])
