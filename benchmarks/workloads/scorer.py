"""A scorer that waits, as one does that asks a server, and keeps no core busy meanwhile."""

from __future__ import annotations

import time
from typing import Any


def score(response: str, answer: object, question: str, metadata: dict[str, Any], *, seconds: float) -> float:
    """The share of the response that is made of digits below 5, after ``seconds``."""
    time.sleep(seconds)
    return sum(character in "01234" for character in response) / max(len(response), 1)
