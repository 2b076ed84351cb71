"""Scorers: functions from a response to a number.

Every scorer has one signature, ``score(response, answer, question, metadata, *, ...) -> float``; what follows the
star is configured by ``reward.params`` and bound beforehand. A user's function needs only the leading arguments that
it names: ``score(response, answer)`` will do.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from rlinf.config import RewardConfig
from rlinf.errors import ConfigError
from rlinf.registry import Registry, is_import_path, load_callable, nearest

Scorer = Callable[[str, Any, str, dict[str, Any]], Any]

SAMPLE_ARGUMENTS = ("response", "answer", "question", "metadata")


def _nothing() -> None:
    """A scorer that is warm as soon as it is imported."""


@dataclass(frozen=True)
class BuiltIn:
    """A scorer of the registry.

    The registry is that of a fresh process: a scorer of your own is named by its import path, not added here.

    Attributes:
        function: the scorer; see the module's text for its signature.
        warm_up: imports and builds what the first sample would otherwise pay for out of its own time.
    """

    function: Callable[..., Any]
    warm_up: Callable[[], None] = _nothing


SCORERS: Registry[BuiltIn] = Registry("reward.scorer", ConfigError)

# A sign counts only where it does not join two things ("3-5" holds 3 and 5); commas group thousands.
_NUMBER = re.compile(r"(?:(?<![\w.)\]])[-+])?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?|(?<!\d)\.\d+")


def last_number_in(text: str) -> Decimal | None:
    """The last number that is written in ``text``, thousands' commas allowed."""
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


def as_number(value: Any) -> Decimal | None:
    """A reference answer as a number: itself, or the last number of its text (``"... #### 72"``)."""
    if isinstance(value, bool) or value is None:
        return None
    try:
        return Decimal(str(value).strip().replace(",", ""))
    except InvalidOperation:
        return last_number_in(str(value))


def normalized(text: Any) -> str:
    """Text with runs of white space made one blank, ends stripped."""
    return " ".join(str(text).split())


def answer_part(response: str) -> str:
    """What a response offers as its answer: the last closed ``<answer>`` tag, else its last line that is not blank."""
    tagged = re.findall(r"<answer>(.*?)</answer>", response, flags=re.DOTALL | re.IGNORECASE)
    if tagged:
        return str(tagged[-1]).strip()
    lines = [line.strip() for line in response.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def last_number(
    response: str, answer: Any, question: str, metadata: dict[str, Any], *, tolerance: float = 0.0
) -> float:
    """1 if the last number in the response is the answer's, to ``tolerance``; else 0."""
    said, right = last_number_in(response), as_number(answer)
    if right is None:
        raise ValueError(f"the reference answer {answer!r} holds no number; last_number needs one")
    return float(said is not None and abs(said - right) <= Decimal(str(tolerance)))


def exact_match(
    response: str, answer: Any, question: str, metadata: dict[str, Any], *, ignore_case: bool = False
) -> float:
    """1 if what the response offers as its answer (`answer_part`) is the answer's text; white space does not count."""
    said, right = normalized(answer_part(response)), normalized(answer)
    if ignore_case:
        said, right = said.casefold(), right.casefold()
    return float(said == right)


def contains(
    response: str, answer: Any, question: str, metadata: dict[str, Any], *, ignore_case: bool = False
) -> float:
    """1 if the answer's text, which may not be empty, stands anywhere in the response."""
    said, right = normalized(response), normalized(answer)
    if not right:
        raise ValueError("the reference answer is empty, and every response contains that")
    return float(right.casefold() in said.casefold() if ignore_case else right in said)


def char_fraction(
    response: str, answer: Any, question: str, metadata: dict[str, Any], *, characters: str = "0123456789"
) -> float:
    """The share of the response's characters that are among ``characters``; 0 for an empty response.

    A smooth signal without a task behind it: a model with random weights climbs it within a minute.
    """
    return sum(c in characters for c in response) / len(response) if response else 0.0


for _scorer in (last_number, exact_match, contains, char_fraction):
    SCORERS.add(_scorer.__name__, BuiltIn(_scorer))


def load_scorer(name: str, params: Mapping[str, Any]) -> Scorer:
    """The scorer of that name or import path, with its parameters bound.

    Raises:
        ConfigError: unknown name (the nearest is named), a function that cannot be imported, parameters that it does
            not take or lacks.
    """
    from rlinf.rewards import verifiers  # noqa: F401  (registers itself)

    if is_import_path(name):
        function: Callable[..., Any] = load_callable(name, "reward.scorer", ConfigError)
    else:
        function = SCORERS.get(name).function
    accepted = inspect.signature(function).parameters
    whole = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    configurable = [p for p in accepted if p not in SAMPLE_ARGUMENTS]
    for key in params:
        if key in SAMPLE_ARGUMENTS or (key not in accepted and not whole):
            raise ConfigError(f"reward.scorer {name!r} has no parameter {key!r}.{nearest(key, configurable)}")
    given = [a for a in SAMPLE_ARGUMENTS if a in accepted or whole]
    try:
        inspect.signature(function).bind(**dict.fromkeys(given), **params)
    except TypeError as cause:
        raise ConfigError(
            f"reward.scorer {name!r}{inspect.signature(function)} cannot be called with {given} and the parameters "
            f"{sorted(params)}: {cause}; it takes response, answer, question, metadata by these names, and the rest "
            "from reward.params"
        ) from cause

    def score(response: str, answer: Any, question: str, metadata: dict[str, Any]) -> Any:
        sample = {"response": response, "answer": answer, "question": question, "metadata": metadata}
        return function(**{key: sample[key] for key in given}, **params)

    return score


def warm_up(name: str) -> None:
    """Pay now for what the first sample of that scorer would pay for."""
    if not is_import_path(name):
        SCORERS.get(name).warm_up()


def check_settings(cfg: RewardConfig) -> None:
    """Raise `ConfigError` for numbers that make no sense."""
    if not cfg.timeout_s > 0:
        raise ConfigError(f"reward.timeout_s={cfg.timeout_s}; expected more than 0 seconds")
    if cfg.processes < 1:
        raise ConfigError(f"reward.processes={cfg.processes}; expected at least 1")
    if cfg.memory_gib < 0:
        raise ConfigError(f"reward.memory_gib={cfg.memory_gib}; expected 0 (no limit) or more")
    if not math.isfinite(cfg.error_score):
        raise ConfigError(f"reward.error_score={cfg.error_score}; expected a finite number")


def check(cfg: RewardConfig) -> None:
    """Find what is wrong with a `RewardConfig` before anything starts.

    A scorer of the user's is imported in this process for it.

    Raises:
        ConfigError: names the key, what was found and what was expected.
    """
    check_settings(cfg)
    load_scorer(cfg.scorer, cfg.params)
