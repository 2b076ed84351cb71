"""Which way serves a pair of ranks: from where they are, and where their tensors live."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rlinf.vps.transfer.peers import TransferError

WAYS = ("local", "shared", "cuda_ipc", "nccl", "gloo")


@dataclass(frozen=True)
class Place:
    """Where a rank is.

    Attributes:
        host: the same for ranks that can map one another's memory.
        device: ``cpu`` or ``cuda``: where its state lies.
    """

    host: str
    device: str


def choose(source: Place, target: Place, same_rank: bool, asked: str = "") -> str:
    """The way from one rank to another.

    Args:
        asked: the way to take where it is possible, instead of the best.

    Raises:
        TransferError: what was asked for is not possible between these two.
    """
    if same_rank:
        return "local"
    near, devices = source.host == target.host, {source.device, target.device}
    able = [
        *(["cuda_ipc"] if near and devices == {"cuda"} else []),
        *(["shared"] if near and devices == {"cpu"} else []),
        *(["nccl"] if devices == {"cuda"} else []),
        "gloo",
    ]
    if asked and asked not in able:
        raise TransferError(
            f"the way {asked!r} cannot serve {source.device} on {source.host} to {target.device} on {target.host}; "
            f"possible are {', '.join(able)}"
        )
    return asked or able[0]


def explain(places: Sequence[Place], asked: str = "") -> str:
    """``12 pairs by shared, 4 by gloo``."""
    found = Counter(choose(a, b, i == j, asked) for i, a in enumerate(places) for j, b in enumerate(places) if i != j)
    return ", ".join(f"{count} pairs by {way}" for way, count in sorted(found.items())) or "one rank"
