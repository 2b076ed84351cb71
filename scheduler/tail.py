"""Generation's long tail: how many steps a batch of sequences takes, and when each of them is done. Pure.

An engine has ``slots``; where one falls free the next sequence begins. A step makes a token of every active sequence
and takes ``a + b * active`` seconds, so a batch takes ``a * steps + b * tokens``: tokens are a matter of the mean
length, steps of the longest ones. Expected lengths are those of order statistics (David and Nagaraja, Order Statistics,
2003): of ``n`` draws the largest is expected at ``Q(1) - int_0^1 Q'(u) u^n du``, with ``Q`` the quantile function; the
``i``-th smallest of the others is about ``Q(i / (n + 1))``.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from rlinf.scheduler.curve import Floats
from rlinf.scheduler.profile import Tail


@dataclass(frozen=True)
class Pace:
    """``fixed + per_step * steps + per_token * tokens`` seconds."""

    fixed: float
    per_step: float
    per_token: float

    def seconds(self, tail: Tail, sequences: int) -> float:
        return self.fixed + self.per_step * steps(tail, sequences) + self.per_token * mean(tail) * sequences

    def ready(self, tail: Tail, sequences: int) -> Floats:
        """When each sequence is done, ascending, in parts of the whole: ``[sequences]``, the last one 1."""
        ends = _ends(tail, sequences)
        active = np.minimum(tail.slots, sequences - np.arange(sequences))  # until each end
        tokens = np.cumsum(np.diff(ends, prepend=0.0) * active)
        at = self.fixed + self.per_step * ends + self.per_token * tokens
        found: Floats = at / at[-1] if at[-1] > 0 else np.arange(1, sequences + 1) / sequences
        return found


def mean(tail: Tail) -> float:
    """Tokens of a sequence, expected: of the distribution that is linear between its quantiles."""
    return (
        float(np.trapezoid(tail.lengths, dx=1 / (len(tail.lengths) - 1))) if len(tail.lengths) > 1 else tail.lengths[0]
    )


def quantile(tail: Tail, at: Floats | float) -> Floats:
    """Tokens: the length that a part ``at`` of the sequences does not exceed."""
    return np.asarray(np.interp(at, np.linspace(0, 1, len(tail.lengths)), tail.lengths), dtype=np.float64)


def longest(tail: Tail, sequences: int) -> float:
    """Tokens of the longest of so many sequences, expected."""
    at = np.linspace(0, 1, len(tail.lengths)) ** (sequences + 1)
    slopes = np.diff(tail.lengths) * (len(tail.lengths) - 1)
    return tail.lengths[-1] - float(slopes @ np.diff(at)) / (sequences + 1)


def expected(tail: Tail, sequences: int) -> Floats:
    """Lengths of so many sequences, from the shortest to the longest: ``[sequences]``."""
    found = quantile(tail, np.arange(1, sequences + 1) / (sequences + 1))
    found[-1] = longest(tail, sequences)
    return np.maximum.accumulate(found)


def steps(tail: Tail, sequences: int) -> float:
    """Until the last of so many sequences is done, expected.

    While more wait than there are slots, every slot is at work: they shrink at the mean rate. Then the longest of
    those that are left counts. Never falls with more sequences.
    """
    last = longest(tail, min(sequences, tail.slots))
    return last + max(sequences - tail.slots, 0) * mean(tail) / tail.slots


def fit(tail: Tail, points: list[tuple[int, float]]) -> Pace:
    """The pace that comes closest to measured calls, in squares of relative errors; no part of it is negative.

    Of one call nobody knows what its time is made of: then a step counts the same however many sequences it is for.

    Args:
        tail: of the calls.
        points: (sequences, seconds).
    """
    from scipy.optimize import nnls

    if len(points) == 1:
        (sequences, seconds) = points[0]
        return Pace(0.0, seconds / steps(tail, sequences), 0.0)
    rows = [[1.0, steps(tail, n), mean(tail) * n] for n, _ in points]
    weights = np.asarray([1 / seconds for _, seconds in points])
    found, _ = nnls(np.asarray(rows) * weights[:, None], np.ones(len(points)))
    return Pace(*map(float, found))


def _ends(tail: Tail, sequences: int) -> Floats:
    """Steps after which each sequence is done, ascending: each begins where a slot falls free."""
    lengths = expected(tail, sequences)
    if sequences <= tail.slots:
        return lengths
    slots = [0.0] * tail.slots
    ends = []
    for place in _mixed(sequences):
        end = slots[0] + float(lengths[place])
        heapq.heapreplace(slots, end)
        ends.append(end)
    return np.sort(np.asarray(ends))


def _mixed(count: int) -> list[int]:
    """Numbers below ``count`` in an order without trend, the same one each time: by the golden ratio's multiples."""
    places = np.argsort((np.arange(1, count + 1) * 0.6180339887498949) % 1.0)
    return [int(place) for place in places]
