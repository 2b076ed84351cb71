"""A scorer that waits, as one does that asks a server, and keeps no core busy meanwhile."""

from __future__ import annotations

import time
from typing import Any

from rlinf.rewards.scorers import char_fraction


def score(
    response: str, answer: object, question: str, metadata: dict[str, Any], *, characters: str, seconds: float
) -> float:
    """The share of the response that is made of these characters, after ``seconds``."""
    time.sleep(seconds)
    return char_fraction(response, answer, question, metadata, characters=characters)
