"""How much lies on each device, at its fullest moment: from a time line, predicted or measured. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rlinf.m2flow.compiler import Compiled
from rlinf.m2flow.timeline import Doing, RankId, Span


@dataclass(frozen=True)
class Sizes:
    """Bytes.

    Attributes:
        resident: group -> that each device of a rank holds of it, while it is there.
        transient: stage -> that each device of a rank holds beyond them while the stage runs.
    """

    resident: Mapping[str, int] = field(default_factory=dict)
    transient: Mapping[str, int] = field(default_factory=dict)


def peak_bytes(compiled: Compiled, spans: Mapping[RankId, Sequence[Span]], sizes: Sizes) -> dict[int, int]:
    """Device -> the most bytes that lie on it at once.

    A group that is swapped is there from its onload to its offload, any other one always.

    Args:
        compiled: the programs.
        spans: of every rank, in the order of their beginning.
        sizes: of groups and stages.
    """
    always: dict[int, int] = {}
    events: dict[int, list[tuple[float, int]]] = {}
    for group, stage in compiled.layout.items():
        held, swapped = sizes.resident.get(group, 0), group in compiled.swapped
        for rank in range(stage.ranks):
            own = spans.get((group, rank), ())
            changes = list(_working(own, sizes)) + (list(_there(own, held)) if swapped else [])
            for device in stage.devices_of(rank):
                always[device] = always.get(device, 0) + (0 if swapped else held)
                events.setdefault(device, []).extend(changes)
    return {device: held + _highest(events[device]) for device, held in sorted(always.items())}


def _working(spans: Sequence[Span], sizes: Sizes) -> Iterator[tuple[float, int]]:
    for span in spans:
        size = sizes.transient.get(span.name, 0)
        if span.doing is Doing.RUN and size:
            yield span.start, size
            yield span.end, -size


def _there(spans: Sequence[Span], held: int) -> Iterator[tuple[float, int]]:
    """From the first thing that a rank does in a turn to its offload.

    A switch that takes no time leaves no span, so that a turn may begin with a wait for rows; that is left out, as in
    its own turn nothing else comes onto the device, and what it waits for it then works on.
    """
    since: float | None = None
    for span in spans:
        if span.doing is Doing.LEASE:
            if since is not None:
                yield span.start, -held
            since = None
        elif since is None and span.doing in (Doing.ONLOAD, Doing.RUN, Doing.SYNC, Doing.OFFLOAD):
            since = span.start
            yield since, held
        if span.doing is Doing.OFFLOAD and since is not None:
            yield span.end, -held
            since = None
    if since is not None:
        yield spans[-1].end, -held


def _highest(events: Sequence[tuple[float, int]]) -> int:
    """What goes at a moment has gone before anything comes."""
    most = now = 0
    for _, change in sorted(events):
        now += change
        most = max(most, now)
    return most
