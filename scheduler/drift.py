"""Whether stages take the time that a plan was made for. Pure: spans of iterations, predicted and measured, in."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from rlinf.m2flow.timeline import WAITS, Doing, RankId, Span

THRESHOLD = 0.25  # above or below what was predicted
WINDOW = 3  # iterations whose median counts: one slow call moves nothing
SHARE = 0.02  # of an iteration; what takes less is no reason for anything
Spans = Mapping[RankId, Sequence[Span]]
Work = dict[str, dict[int, float]]
"""What is done -> rank -> seconds in an iteration."""


@dataclass(frozen=True)
class Drifted:
    """Work that takes another time than was predicted.

    Attributes:
        name: a stage (``rollout.generate``), or another operation of a group (``actor: send weights to rollout``).
        measured: seconds in an iteration, of its slowest rank.
        predicted: likewise.
        slow: a rank that is slower than the others of its group by more than the threshold, and theirs, the median.
    """

    name: str
    measured: float
    predicted: float
    slow: tuple[int, float, float] | None = None

    @property
    def ratio(self) -> float:
        """Of what was measured to what was predicted."""
        return self.measured / self.predicted

    def __str__(self) -> str:
        text = f"{self.name} took {self.ratio:.2g} times what was predicted ({_pair(self.measured, self.predicted)})"
        if self.slow is None:
            return text
        rank, own, others = self.slow
        return f"{text}; its rank {rank} is slower than the others ({own:.3g} s, they {others:.3g} s)"


class Drift:
    """Give it every iteration; ask it what has drifted.

    Work is compared once it was done in each of the last ``window`` iterations, by medians, its slowest rank with the
    slowest rank predicted. Work for which no time was predicted is not compared: no factor mends it.

    Args:
        predicted: spans of every rank in one iteration.
        threshold: parts of the predicted time above or below it that are drift (0.25: a quarter).
        window: iterations that are looked at.
        warm_up: first iterations that do not count: they compile, connect, fill caches.
    """

    def __init__(self, predicted: Spans, threshold: float = THRESHOLD, window: int = WINDOW, warm_up: int = 1) -> None:
        self.predicted = work(predicted)
        self.threshold, self.window = threshold, window
        self._left_out = warm_up
        self._seen: deque[tuple[Work, float]] = deque(maxlen=window)

    def add(self, spans: Spans, seconds: float) -> None:
        """An iteration is over.

        Args:
            spans: of every rank, measured.
            seconds: that it took, from the end of the one before.
        """
        if self._left_out:
            self._left_out -= 1
        else:
            self._seen.append((work(spans), seconds))

    def found(self) -> list[Drifted]:
        """What has drifted, that which costs or saves the most first; nothing before the window is full."""
        if len(self._seen) < self.window:
            return []
        iteration = median(seconds for _, seconds in self._seen)
        found = []
        for name, predicted in self.predicted.items():
            measured = self._measured(name)
            if not measured or not max(predicted.values()):
                continue
            slowest = Drifted(name, max(measured.values()), max(predicted.values()), self._slow(measured, predicted))
            counts = max(slowest.measured, slowest.predicted) >= SHARE * iteration
            if counts and abs(slowest.ratio - 1) > self.threshold:
                found.append(slowest)
        return sorted(found, key=lambda one: -abs(one.measured - one.predicted))

    def _measured(self, name: str) -> dict[int, float]:
        """Rank -> median of its seconds; of ranks that did it in every iteration."""
        times = [seen.get(name, {}) for seen, _ in self._seen]
        every = set(times[0]).intersection(*times)
        return {rank: median(own[rank] for own in times) for rank in sorted(every)}

    def _slow(self, measured: Mapping[int, float], predicted: Mapping[int, float]) -> tuple[int, float, float] | None:
        """The rank that is the farthest behind, by what was predicted of each: ranks may have more or fewer rows."""
        ratios = {rank: measured[rank] / predicted[rank] for rank in measured if predicted.get(rank)}
        if len(ratios) < 2:
            return None
        rank = max(ratios, key=ratios.__getitem__)
        others = [other for other in ratios if other != rank]
        if ratios[rank] <= (1 + self.threshold) * median(ratios[other] for other in others):
            return None
        return rank, measured[rank], median(measured[other] for other in others)


def work(spans: Spans) -> Work:
    """Seconds of all that ranks do but wait, by what it is; without what a stage's span holds of other things."""
    found: Work = {}
    for (group, rank), own in spans.items():
        inside = [span for span in own if span.doing in (Doing.SYNC, Doing.WEIGHTS)]
        for span in own:
            if span.doing in WAITS:
                continue
            took = span.end - span.start
            if span.doing is Doing.RUN:
                took -= sum(o.end - o.start for o in inside if span.start <= o.start and o.end <= span.end)
            ranks = found.setdefault(name_of(group, span), {})
            ranks[rank] = ranks.get(rank, 0.0) + max(took, 0.0)  # a clock may have been set back
    return found


def name_of(group: str, span: Span) -> str:
    """What the work of a span is called: a stage by its name, another operation with its group's before it."""
    if span.doing is Doing.RUN:
        return span.name
    return operation(group, span.name if span.doing is Doing.SYNC else span.doing.value)


def operation(group: str, what: str) -> str:
    return f"{group}: {what}"


def _pair(measured: float, predicted: float) -> str:
    return f"{measured:.3g} s of {predicted:.3g} s"
