"""What a planner is asked: groups with the layouts that they can use, and devices. Plain data, and the model's rules.

**The model.** Of a group in a layout two times are known: ``stream``, of its stages that can work on rows as they
come, and ``rest``, of those that wait for a whole iteration. A plan is a tree (`rlinf.m2flow.plan`); of a part of it
the model knows ``stream`` and ``rest`` likewise, and an iteration takes the root's ``stream + rest``:

- `Stage`: as the layout says.
- ``Shared(a, b)``, in turns on the same devices: both add.
- ``Piped(a, b)``, on disjoint devices, where ``b`` reads what ``a`` makes, in ``M`` pieces: the first piece fills the
  pipe, the slower part sets the pace: ``stream = (a + b) / M + (1 - 1 / M) * max(a, b)``. Where neither reads from
  the other they run side by side: the larger one.
- ``rest`` of parts that are piped: they add where one's reads the other's, else the larger one counts.

The pipe's formula is that of RLinf (arXiv:2509.15965, section 4); ``rest`` is what it leaves out, a stage that cannot
begin before the last row is there.

With staleness ``k`` iterations overlap: an iteration takes at least what the busiest devices work in it (of parts that
are shared the sum, of parts that are piped the larger), and at least ``1 / (k + 1)`` of the time that it takes alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Option:
    """A layout that a group can run in.

    Attributes:
        kind: of its devices; ``""`` where it computes on none.
        dp, tp: ranks, ``dp * tp`` devices (none without a kind).
        stream: granularity -> seconds of an iteration's stages that work on rows as they come, taken so many at a time.
        rest: seconds of those that wait for all rows.
        resident: bytes that stay on each device.
        transient: bytes on top of them while it works.
        swap: seconds in an iteration to take the resident bytes off and on, at all of its turns.
    """

    kind: str
    dp: int
    tp: int
    stream: Mapping[int, float]
    rest: float = 0.0
    resident: int = 0
    transient: int = 0
    swap: float = 0.0

    @property
    def devices(self) -> int:
        return self.dp * self.tp if self.kind else 0


@dataclass(frozen=True)
class Part:
    """A worker group."""

    name: str
    options: tuple[Option, ...]
    spans: bool = False


@dataclass(frozen=True)
class Problem:
    """What is asked.

    Attributes:
        parts: the groups, in an order in which none comes before what it reads.
        reads: (a, b): ``b`` reads what ``a`` makes, straight or by way of others.
        rest_reads: (a, b): the ``rest`` of ``b`` reads what the ``rest`` of ``a`` makes.
        devices: kind -> indices of its devices.
        capacity: kind -> bytes of a device; ``None``: not known, everything fits.
        pieces: granularity -> pieces of an iteration; granularity 0 (all at once) has 1. Options have times for each.
        staleness: updates that generation may be behind.
    """

    parts: tuple[Part, ...]
    reads: frozenset[tuple[str, str]]
    devices: Mapping[str, tuple[int, ...]]
    rest_reads: frozenset[tuple[str, str]] = frozenset()
    capacity: Mapping[str, int | None] = field(default_factory=dict)
    pieces: Mapping[int, int] = field(default_factory=lambda: {0: 1})
    staleness: int = 0
