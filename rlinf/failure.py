"""The first failure is the one that is shown: what a failing rank reports, and which failure caused the others."""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

from rlinf.errors import RlinfError

# What a rank says when a peer of its process group is gone: a consequence, never the cause.
_ECHOES = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "connection refused",
    "socket timeout",
    "ncclremoteerror",
    "ncclsystemerror",
    "the actor died",
    "actor is dead",
    "peerdied",
    "brokerdied",
)


def interruption(error: BaseException) -> BaseException | None:
    """The signal behind an error: where one comes while Ray's own code waits, it is the cause of a `SystemError`."""
    seen: BaseException | None = error
    while isinstance(seen, SystemError):
        seen = seen.__cause__ or seen.__context__
    return seen if seen is not None and seen is not error and not isinstance(seen, Exception) else None


@dataclass(frozen=True)
class Failure:
    """One rank's failure.

    Attributes:
        group, rank, node, pid: who.
        doing: the stage or operation it was at.
        error: the exception as ``Type: message``.
        trace: its own traceback, empty for a process that died.
        when: seconds since the epoch.
        died: the process is gone (killed, out of memory, crashed).
        user: the message alone tells what to do (an `RlinfError`).
        wait: it was waiting for others.
    """

    group: str
    rank: int
    node: str
    pid: int
    doing: str
    error: str
    trace: str
    when: float
    died: bool = False
    user: bool = False

    @staticmethod
    def of(error: BaseException, group: str, rank: int, node: str, pid: int, doing: str) -> Failure:
        text = "".join(traceback.format_exception(error))
        kind = type(error).__name__
        return Failure(
            group, rank, node, pid, doing, f"{kind}: {error}", text, time.time(), user=isinstance(error, RlinfError)
        )

    @property
    def echo(self) -> bool:
        """Whether it only says that some other rank is gone."""
        low = self.error.lower()
        return not self.died and (any(sign in low for sign in _ECHOES) or low.startswith("cancelled"))

    @property
    def title(self) -> str:
        at = f" in {self.doing}" if self.doing else ""
        return f"{self.group} rank {self.rank} (node {self.node}, pid {self.pid}) failed{at}: {self.error}"


class RankError(Exception):
    """Raised by a rank; carries its `Failure` to the driver."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure

    def __str__(self) -> str:
        return self.failure.title


class RunFailed(Exception):
    """The run ends: the first failure, and how many others followed from it."""

    def __init__(self, failures: Sequence[Failure]) -> None:
        self.first = first(failures)
        self.others = len(failures) - 1
        super().__init__(self.first.title)


def first(failures: Sequence[Failure]) -> Failure:
    """The failure that caused the others: not an echo of another's death if any is not; then the earliest.

    A dead process reports its death through Ray, later than its peers notice it, so echoes are set aside first.
    """
    return min(failures, key=lambda failure: (failure.echo, failure.when))
