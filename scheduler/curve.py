"""A quantity that never falls as its argument grows, from measured points. Pure.

Points that fall although they should not (noise) are pooled by isotonic regression (Ayer et al., 1955: pool adjacent
violators); all others are met exactly. Between points it is a line; beyond the largest one it goes on as the
points of the upper half do, and below the smallest one as the first two do, never below 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """See the module's docstring.

    Attributes:
        x: of the points, ascending, above 0.
        y: of the points, never falling.
    """

    x: tuple[float, ...]
    y: tuple[float, ...]

    @classmethod
    def through(cls, points: Sequence[tuple[float, float]]) -> Curve:
        """Through points (x, y), one or more, in any order; of several with the same x their mean counts."""
        places: dict[float, list[float]] = {}
        for at, value in points:
            places.setdefault(float(at), []).append(float(value))
        x = sorted(places)
        y = pooled([float(np.mean(places[at])) for at in x], [len(places[at]) for at in x])
        return cls(tuple(x), tuple(y))

    def __call__(self, at: float) -> float:
        x, y = self.x, self.y
        if at > x[-1]:
            return y[-1] + self.slope * (at - x[-1])
        if at < x[0]:
            fixed = self.fixed
            return fixed + (y[0] - fixed) * max(at, 0.0) / x[0]
        return float(np.interp(at, x, y))

    @property
    def fixed(self) -> float:
        """At 0: where the line through the first two points begins; of one point nobody knows, and it counts as 0."""
        if len(self.x) == 1:
            return 0.0
        slope = (self.y[1] - self.y[0]) / (self.x[1] - self.x[0])
        return min(max(self.y[0] - slope * self.x[0], 0.0), self.y[0])

    @property
    def slope(self) -> float:
        """Beyond the last point: from the last one at half its x, or before, which short steps do not blur."""
        lower = [i for i, x in enumerate(self.x) if x <= self.x[-1] / 2] or list(range(len(self.x) - 1))
        if not lower:
            return self.y[-1] / self.x[-1]
        i = lower[-1]
        return (self.y[-1] - self.y[i]) / (self.x[-1] - self.x[i])

    def distance(self, at: float) -> float:
        """How far outside the points it is, in doublings; 0 within them."""
        return float(max(np.log2(max(at, 1e-9) / self.x[-1]), np.log2(self.x[0] / max(at, 1e-9)), 0.0))


def pooled(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The nearest values, by weighted squares, that never fall."""
    blocks: list[tuple[float, float, int]] = []  # value, weight, how many
    for value, weight in zip(values, weights, strict=True):
        blocks.append((value, weight, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (a, wa, na), (b, wb, nb) = blocks[-2:]
            blocks[-2:] = [((a * wa + b * wb) / (wa + wb), wa + wb, na + nb)]
    return [value for value, _, count in blocks for _ in range(count)]
