"""What would change the choice of a plan: factors on stages, batch and lengths at which another family is faster. Pure.

The best plan of each family is simulated again with the cost in question some times as high, up and down to `MOST`,
and the nearest factor at which another one wins by `MARGIN` is found by bisection.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from rlinf.errors import PlacementError, RlinfError
from rlinf.m2flow.plan import Plan, stages
from rlinf.scheduler.auto import Found, Ground, find
from rlinf.scheduler.judge import Judged, Model, judge
from rlinf.scheduler.replan import Corrected
from rlinf.scheduler.whatif import change

MOST, MARGIN = 8.0, 0.01
_STEPS = 5  # of bisection: to about a hundredth of the way between two factors that were tried
_SHARE = 0.02  # of an iteration; stages below are not tried
_RANKS = 256  # in all, beyond which it would take minutes
_GRID = (1.25, 1.5, 2.0, 3.0, 4.0, 6.0, MOST)


@dataclass(frozen=True)
class Flip:
    """The choice changes.

    Attributes:
        what: is changed.
        factor: by which.
        family: that is the best from there on.
    """

    what: str
    factor: float
    family: str

    def __str__(self) -> str:
        return f"{self.what} {self.factor:.2f} times: {self.family}"


def flips(found: Found, ground: Ground) -> Iterator[Flip | str]:
    """Each factor in turn, and another number of devices."""
    rivals = [one for one in found.families.values() if isinstance(one, Judged)]
    if sum(stage.ranks for stage in stages(found.best.plan)) > _RANKS:
        yield f"not looked for with more than {_RANKS} ranks"
        return
    if len(rivals) > 1:
        plans = [one.plan for one in rivals]
        for name, took in sorted(found.best.stages.items(), key=lambda pair: -pair[1]):
            if took > _SHARE * found.best.seconds:
                yield from _factors(name, plans, found, ground, _slowed(ground, name))
        yield from _factors("rows of an iteration", plans, found, ground, _batch(ground))
        if any(stage.tail for stage in ground.profile.stages.values()):
            yield from _factors("lengths", plans, found, ground, _lengths(ground))
    yield from _devices(found, ground)


def _slowed(ground: Ground, name: str) -> Callable[[float], Model]:
    return lambda factor: Corrected(ground.model, {name: factor})


def _batch(ground: Ground) -> Callable[[float], Model]:
    rows = max(ground.profile.rows.values())

    def model(factor: float) -> Model:
        changed = change(ground.profile, ground.graph, rows=max(round(rows * factor), 1))
        return replace(ground, profile=changed).model

    return model


def _lengths(ground: Ground) -> Callable[[float], Model]:
    return lambda factor: replace(ground, profile=change(ground.profile, ground.graph, lengths=factor)).model


def _factors(
    what: str, plans: Sequence[Plan], found: Found, ground: Ground, model: Callable[[float], Model]
) -> Iterator[Flip]:
    for direction in (1, -1):
        below = 1.0
        for step in _GRID:
            at = step**direction
            if (winner := _winner(plans, found, ground, model(at))) is not None:
                low, high = below, at
                for _ in range(_STEPS):
                    middle = math.sqrt(low * high)
                    if (other := _winner(plans, found, ground, model(middle))) is not None:
                        high, winner = middle, other
                    else:
                        low = middle
                yield Flip(what, high, winner)
                break
            below = at


def _winner(plans: Sequence[Plan], found: Found, ground: Ground, model: Model) -> str | None:
    """The family of another plan that is faster by `MARGIN`; ``None``: there is none."""
    took: dict[Plan, Judged] = {}
    for plan in plans:
        try:
            took[plan] = judge(ground.graph, plan, model, ground.staleness, ground.in_flight)
        except PlacementError:
            continue
    if found.best.plan not in took:
        return None
    mine = took[found.best.plan].seconds
    best = min(took.values(), key=lambda one: one.seconds)
    return best.family if best.seconds < mine * (1 - MARGIN) and best.family != found.best.family else None


def _devices(found: Found, ground: Ground) -> Iterator[str]:
    """Half and twice as many devices of each kind."""
    count = sum(map(len, ground.places.values()))
    for factor in (0.5, 2):
        places, at = {}, 0
        for kind, own in ground.places.items():
            wanted = max(int(len(own) * factor), 1)
            places[kind] = tuple(range(at, at + wanted))
            at += wanted
        if at == count or at > _RANKS // 4:
            continue
        try:
            other = find(replace(ground, places=places)).best
        except RlinfError as error:
            yield f"{at} devices: none fits ({error})"
            continue
        gain = found.best.seconds / other.seconds
        same = "still " if other.family == found.best.family else ""
        yield f"{at} device{'s' * (at > 1)} instead of {count}: {same}{other.family}, {gain:.2f} times as fast"
