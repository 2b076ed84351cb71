"""A stage of the start that stands still ends the run, and says who was waited for."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from rlinf.errors import StartError

_SHOWN = 8  # ranks that are named


@dataclass(frozen=True)
class Deadline:
    """How long a stage may take.

    Attributes:
        stage: its name.
        seconds: that it may take.
        at: when it must be over, by ``time.monotonic``.
    """

    stage: str
    seconds: float
    at: float

    @classmethod
    def of(cls, stage: str, seconds: float) -> Deadline | None:
        """A stage that begins now; ``None`` where ``seconds`` is 0 (it may take for ever)."""
        return cls(stage, seconds, time.monotonic() + seconds) if seconds > 0 else None

    def check(self, waited_for: Iterable[str]) -> None:
        """Raises `StartError` if the stage should be over."""
        if time.monotonic() < self.at:
            return
        ranks = list(waited_for)
        more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
        raise StartError(
            f"the start stands still: stage {self.stage!r} is not over after {self.seconds:g} s. No answer from "
            f"{', '.join(ranks[:_SHOWN])}{more}. See logs/<group>-<rank>.log in output_dir for what they do; if they "
            "only need longer, raise cluster.start_timeout_s (0: no limit)"
        )
