"""What every rank did, and when: the record of an execution."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

RankId = tuple[str, int]  # group, rank


class Doing(StrEnum):
    """What a rank spends time on."""

    RUN = "run"  # a stage of its own
    ROWS = "rows"  # waiting for rows
    LEASE = "lease"  # waiting for its turn on the device
    WEIGHTS = "weights"  # waiting for a version of the weights
    SYNC = "sync"  # publishing or loading weights
    ONLOAD = "onload"
    OFFLOAD = "offload"


WAITS = frozenset({Doing.ROWS, Doing.LEASE, Doing.WEIGHTS})


@dataclass(frozen=True)
class Span:
    """A stretch of one rank's time.

    Attributes:
        doing: what it was spent on.
        name: the stage that ran (``actor.train``), or what was waited for.
        start: seconds; of a real run since the epoch, of a predicted one since its start.
        end: likewise.
        rows: rows that a stage worked on in it.
    """

    doing: Doing
    name: str
    start: float
    end: float
    rows: int = 0


@dataclass(frozen=True)
class Execution:
    """One execution of a phase by every rank.

    Attributes:
        phase: which.
        step: training iterations that were done when it had ended.
        spans: of each rank, by their beginning. One may lie within another: weights that are taken over in flight.
    """

    phase: str
    step: int
    spans: Mapping[RankId, Sequence[Span]]

    @property
    def start(self) -> float:
        """Seconds, as the spans count them; 0 without any."""
        return min((span.start for spans in self.spans.values() for span in spans), default=0.0)

    @property
    def end(self) -> float:
        return max((span.end for spans in self.spans.values() for span in spans), default=0.0)

    @property
    def label(self) -> str:
        """For people: ``step 3``, ``evaluate after step 4``."""
        return f"step {self.step}" if self.phase == "train" else f"{self.phase} after step {self.step}"


def ordered(spans: Iterable[Span]) -> list[Span]:
    """Spans by their beginning, one that holds others before them."""
    return sorted(spans, key=lambda span: (span.start, -span.end))


def within(spans: Iterable[Span], start: float, end: float) -> list[Span]:
    """The parts of spans that lie between two moments."""
    return [
        replace(span, start=max(span.start, start), end=min(span.end, end))
        for span in spans
        if span.end > start and span.start < end
    ]
