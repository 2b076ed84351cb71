"""Rows that are made: distinct arithmetic questions, and the tasks of reasoning-gym."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator
from typing import Any

from rlinf.config import DataConfig
from rlinf.data.row import Row
from rlinf.data.sources import SOURCES, Source, Split
from rlinf.errors import DataError
from rlinf.registry import nearest
from rlinf.seeding import derive

_OPERATORS = "+-*"


def arithmetic_space(digits: int, operators: str, terms: int) -> int:
    """How many distinct questions there are: ``(10**digits)**terms * len(operators)**(terms - 1)``."""
    return (10**digits) ** terms * len(operators) ** (terms - 1)


def arithmetic(index: int, digits: int, operators: str, terms: int) -> Row:
    """Question ``index`` of the space: its digits in mixed radix are the numbers, then the operators.

    With ``digits=1, operators="+", terms=2``, index 35 is "What is 3+5?" with the answer "8".
    """
    rest, base = index, 10**digits
    numbers = []
    for _ in range(terms):
        rest, number = divmod(rest, base)
        numbers.append(number)
    numbers.reverse()
    expression = str(numbers[0])
    for number in numbers[1:]:
        rest, which = divmod(rest, len(operators))
        expression += f"{operators[which]}{number}"
    # The expression is made of digits and of + - * alone, so that Python's own precedence is the oracle.
    answer = eval(expression, {"__builtins__": {}})
    return Row(f"What is {expression}?", str(answer), {"expression": expression}, f"arithmetic question {index}")


def _arithmetic_params(cfg: DataConfig) -> tuple[int, str, int]:
    known = {"digits": 1, "operators": "+", "terms": 2}
    for key in cfg.params:
        if key not in known:
            raise DataError(f"data.kind=arithmetic has no parameter {key!r} in data.params.{nearest(key, known)}")
    digits, operators, terms = (cfg.params.get(key, value) for key, value in known.items())
    for key, value, least in (("digits", digits, 1), ("terms", terms, 2)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise DataError(f"data.params.{key}={value!r}; expected a whole number of at least {least}")
    if not isinstance(operators, str) or not operators or set(operators) - set(_OPERATORS):
        raise DataError(f"data.params.operators={operators!r}; expected a text of characters among {_OPERATORS!r}")
    return digits, "".join(sorted(set(operators))), terms


def _arithmetic_rows(cfg: DataConfig, split: Split, seed: int) -> Iterator[Row]:
    digits, operators, terms = _arithmetic_params(cfg)
    space = arithmetic_space(digits, operators, terms)
    wanted = cfg.train_size + cfg.validation_size if cfg.train_size else space
    for index in range(space) if wanted >= space else _distinct(space, wanted, derive(seed, "arithmetic")):
        yield arithmetic(index, digits, operators, terms)


def _distinct(space: int, count: int, seed: int) -> list[int]:
    """``count`` different numbers below ``space``, which may be beyond what `random.sample` indexes."""
    draw = random.Random(seed)
    if space < 2**62:
        return draw.sample(range(space), count)
    found: dict[int, None] = {}
    while len(found) < count:
        found[draw.randrange(space)] = None
    return list(found)


def _check_arithmetic(cfg: DataConfig) -> None:
    digits, operators, terms = _arithmetic_params(cfg)
    if not cfg.train_size and arithmetic_space(digits, operators, terms) > 10**6:
        raise DataError("data.train_size=0 asks for all of more than a million arithmetic questions; say how many")


def make_task(name: str, params: dict[str, Any], size: int, seed: int) -> Any:
    """The reasoning-gym data set of that task.

    Raises:
        DataError: unknown task (the nearest is named), an unknown or refused parameter.
    """
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise DataError(f"data.name={name!r} is not a reasoning-gym task.{nearest(name, DATASETS)}")
    known = [p for p in inspect.signature(DATASETS[name][1]).parameters if p not in ("size", "seed")]
    for key in params:
        if key not in known:
            raise DataError(f"reasoning-gym task {name!r} has no parameter {key!r} (data.params).{nearest(key, known)}")
    try:
        return reasoning_gym.create_dataset(name, size=size, seed=seed, **params)
    # A task validates its parameters by assert, by ValueError, or not at all.
    except Exception as cause:
        raise DataError(
            f"reasoning-gym task {name!r} refused data.params={params}: {type(cause).__name__}: {cause}"
        ) from cause


def _task_rows(cfg: DataConfig, split: Split, seed: int) -> Iterator[Row]:
    size = cfg.train_size if split == "train" else cfg.validation_size
    # Tasks seed a Random with seed + index: 31 bits keep every task's own arithmetic in range.
    task = make_task(str(cfg.name), dict(cfg.params), size, derive(seed, "reasoning_gym", split) % 2**31)
    for index in range(size):
        entry = task[index]
        where = f"reasoning-gym task {cfg.name}, {split} row {index}"
        metadata = {**entry["metadata"], "source_dataset": cfg.name, "source_params": dict(cfg.params)}
        yield Row(entry["question"], entry["answer"], metadata, where)


def _check_task(cfg: DataConfig) -> None:
    if not cfg.name:
        raise DataError("data.name is not set; data.kind=reasoning_gym needs the name of a task, e.g. chain_sum")
    if cfg.train_size < 1:
        raise DataError(f"data.train_size={cfg.train_size}; reasoning-gym makes questions without end, say how many")
    make_task(cfg.name, dict(cfg.params), 1, 0)


SOURCES.add("arithmetic", Source(_arithmetic_rows, lambda cfg: False, _check_arithmetic))
SOURCES.add("reasoning_gym", Source(_task_rows, lambda cfg: True, _check_task))
