"""What every rank did, and when: the record of an execution."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


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
