"""What one stage takes in one layout, from its measured points. Pure. See `rlinf.scheduler.cost` for the rules."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from rlinf.errors import ConfigError
from rlinf.m2flow.simulate import StageCost, Times
from rlinf.scheduler.curve import Curve
from rlinf.scheduler.profile import StageProfile, Tail
from rlinf.scheduler.tail import Pace, fit

PER_DOUBLING, UNMEASURED = 0.1, 0.25  # uncertainty


@dataclass(frozen=True)
class StageTime:
    """A stage in one layout. A `StageCost`; rows are those of a replica in a call.

    Attributes:
        curve: over what `effort` says.
        memory: bytes beyond what stays, over rows.
        spreads: of the measured points, in parts of their seconds: (rows, spread).
        measured: this layout was.
        tail, pace, samples: of a stage that generates: lengths, how fast, and sequences for each row.
        slower: times as long beside others.
        whole: rows of an iteration, of a stage that takes them piece by piece in one call; 0: each piece is a call.
    """

    curve: Curve
    memory: Curve
    spreads: tuple[tuple[int, float], ...] = ()
    measured: bool = True
    tail: Tail | None = None
    pace: Pace | None = None
    samples: int = 1
    slower: float = 1.0
    whole: int = 0

    def effort(self, rows: int) -> float:
        """What the time follows: of a stage that generates the time of its pace, else the rows."""
        if self.tail is None or self.pace is None:
            return float(rows)
        return self.pace.seconds(self.tail, rows * self.samples)

    def seconds(self, rows: int) -> float:
        if self.whole:
            return self.slower * self.curve(self.effort(self.whole)) * rows / self.whole
        return self.slower * self.curve(self.effort(rows))

    def ready(self, rows: int) -> Times:
        if self.tail is not None and self.pace is not None:
            return self.pace.ready(self.tail, rows * self.samples)[self.samples - 1 :: self.samples]
        each: Times = self.curve.fixed + (self.curve(rows) - self.curve.fixed) * np.arange(1, rows + 1) / rows
        return each / each[-1] if each[-1] > 0 else np.arange(1, rows + 1) / rows

    def uncertainty(self, rows: int) -> float:
        """In parts of `seconds`."""
        near = min(self.spreads, key=lambda one: abs(math.log2(one[0] / max(rows, 1))), default=(1, 0.0))[1]
        outside = self.curve.distance(self.effort(rows))
        return near + PER_DOUBLING * outside + (0.0 if self.measured else UNMEASURED)


@dataclass(frozen=True)
class Carried:
    """A stage that first takes rows out of a channel. A `StageCost`."""

    cost: StageCost
    fixed: float
    per_row: float

    def seconds(self, rows: int) -> float:
        return self.cost.seconds(rows) + self.fixed + self.per_row * rows

    def ready(self, rows: int) -> Times:
        late = self.fixed + self.per_row * rows
        found: Times = (late + self.cost.seconds(rows) * self.cost.ready(rows)) / self.seconds(rows)
        return found


def stage_time(name: str, stage: StageProfile, kind: str, dp: int, tp: int, samples: int = 1) -> StageTime:
    """A stage in a layout, from its measured points.

    Raises:
        ConfigError: there are none on this kind.
    """
    alone = [point for point in stage.points if not point.beside and point.kind == kind]
    if not alone:
        there = sorted({point.kind or "no device" for point in stage.points if not point.beside}) or [
            "beside others only"
        ]
        raise ConfigError(
            f"the profile has no time of {name} on {kind or 'no device'}, only on {', '.join(there)}: "
            "measure it there (python -m rlinf.profile ...), or write a point of it"
        )
    degree = nearest_degree({point.tp for point in alone}, tp)
    replicas = min({p.dp for p in alone if p.tp == degree}, key=lambda n: (abs(math.log2(n / dp)), n))
    points = [point for point in alone if (point.tp, point.dp) == (degree, replicas)]
    pace = fit(stage.tail, [(p.rows * samples, p.seconds) for p in points]) if stage.tail else None
    time = StageTime(
        curve=Curve((1.0,), (1.0,)),
        memory=Curve.through([(point.rows, point.transient) for point in points]),
        spreads=tuple((point.rows, point.spread / point.seconds) for point in points),
        measured=(degree, replicas) == (tp, dp),
        tail=stage.tail,
        pace=pace,
        samples=samples,
    )
    return replace(time, curve=Curve.through([(time.effort(point.rows), point.seconds) for point in points]))


def nearest_degree(known: Iterable[int], wanted: int) -> int:
    """The largest of these that is not larger, else the smallest."""
    found = sorted(known)
    return max((n for n in found if n <= wanted), default=found[0] if found else 1)
