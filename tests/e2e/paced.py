"""The scorer of `data=digits`; each sample takes as long as PACE_S says, so that a run can be met half-way."""

from __future__ import annotations

import os
import time

from rlinf.rewards.scorers import char_fraction


def score(response: str, answer: object, question: str, metadata: dict, *, characters: str) -> float:
    time.sleep(float(os.environ.get("PACE_S", "0")))
    return char_fraction(response, answer, question, metadata, characters=characters)
