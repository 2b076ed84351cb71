"""Scorers that rest on libraries: math-verify and reasoning-gym."""

from __future__ import annotations

import functools
import json
import logging
from typing import Any

from rlinf.rewards.scorers import SCORERS, BuiltIn, answer_part, last_number_in


def math_verify(response: str, answer: Any, question: str, metadata: dict[str, Any], *, precision: int = 6) -> float:
    """1 if math-verify finds the response's mathematical answer equal to the reference answer, else 0.

    The reference may be a number, LaTeX with or without its delimiters, or a text with ``\\boxed{}``. ``precision`` is
    in decimal digits. What math-verify cannot make sense of in a response is a wrong answer, not a failure. Its own
    time-out is off: that one needs the main thread, raises what is no `Exception`, and would answer "wrong" for "not
    known"; the pool's time-out stands instead.

    Raises:
        ValueError: nothing mathematical in the reference answer.
    """
    from math_verify import parse, verify

    reference = str(answer).strip()
    delimited = any(mark in reference for mark in ("$", r"\(", r"\[", r"\boxed"))
    gold = parse(reference if delimited else f"${reference}$", parsing_timeout=None, raise_on_error=True)
    if not gold:
        raise ValueError(f"math-verify finds nothing mathematical in the reference answer {answer!r}")
    said = parse(response, parsing_timeout=None)
    return float(bool(said) and verify(gold, said, float_rounding=precision, timeout_seconds=None))


@functools.lru_cache(maxsize=64)
def _task(name: str, params: str) -> Any:
    import reasoning_gym as gym

    return gym.create_dataset(name, size=1, seed=0, **json.loads(params))


def reasoning_gym(response: str, answer: Any, question: str, metadata: dict[str, Any], *, task: str = "") -> float:
    """The task's own `score_answer`, in 0..1.

    The answer is the response's last ``<answer>`` tag; without one its last line, or, where the reference answer is a
    number, the last number of that line. Task and parameters are those that made the question (``source_dataset`` and
    ``source_params`` in its metadata), or ``task``.

    Raises:
        ValueError: no task is named, or none of that name exists.
    """
    name = task or metadata.get("source_dataset")
    if not name:
        raise ValueError("metadata names no source_dataset; use data.kind=reasoning_gym or set reward.params.task")
    said = answer_part(response)
    if "</answer>" not in response.lower() and _is_number(answer):
        number = last_number_in(said)
        said = said if number is None else f"{number:f}"
    entry = {"question": question, "answer": answer, "metadata": metadata}
    params = json.dumps(metadata.get("source_params", {}), sort_keys=True)
    return float(_task(str(name), params).score_answer(said, entry))


def _is_number(answer: Any) -> bool:
    try:
        float(str(answer))
    except ValueError:
        return False
    return True


def _warm_math_verify() -> None:
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time-out is off
    math_verify(r"$\frac{1}{2}$", "0.5", "", {})  # builds the LaTeX grammar


def _warm_reasoning_gym() -> None:
    import reasoning_gym as gym  # noqa: F401


SCORERS.add("math_verify", BuiltIn(math_verify, _warm_math_verify))
SCORERS.add("reasoning_gym", BuiltIn(reasoning_gym, _warm_reasoning_gym))
