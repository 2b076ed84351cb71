"""Sources: where rows come from. The registry, and the source that is a user's function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from rlinf.config import DataConfig
from rlinf.data.row import Row, row_from_columns
from rlinf.errors import DataError
from rlinf.registry import Registry, is_import_path, load_callable

Split = Literal["train", "validation"]


def _nothing(cfg: DataConfig) -> None:
    """A source without anything to check ahead."""


@dataclass(frozen=True)
class Source:
    """A kind of data.

    Attributes:
        rows: ``rows(cfg, split, seed)`` yields the split's rows, lazily where it can; raises `DataError`.
        own_validation: whether the source has validation rows of its own; else they are held out of train.
        check: raises `DataError` for what is wrong and can be seen without reading everything.
    """

    rows: Callable[[DataConfig, Split, int], Iterable[Row]]
    own_validation: Callable[[DataConfig], bool]
    check: Callable[[DataConfig], None] = _nothing


SOURCES: Registry[Source] = Registry("data.kind", DataError)


def source_of(cfg: DataConfig) -> Source:
    """The source that ``cfg.kind`` names: a registered one, or a user's function by import path.

    Raises:
        DataError: unknown kind (the nearest is named), or a function that cannot be imported.
    """
    from rlinf.data import files, tasks  # noqa: F401  (they register themselves)

    return user_source(cfg.kind) if is_import_path(cfg.kind) else SOURCES.get(cfg.kind)


def user_source(path: str) -> Source:
    """Rows from a user's function.

    It is called with ``data.params`` as keyword arguments and returns an iterable of mappings with the columns
    ``data.question_key`` and ``data.answer_key``. Where it takes an argument ``split``, it is asked for ``"train"`` and
    for ``"validation"``, else validation is held out; where it takes ``seed``, it is given the run's.
    """
    function = load_callable(path, "data.kind", DataError)
    accepted = set(inspect.signature(function).parameters)

    def call(cfg: DataConfig, split: Split, seed: int) -> Iterator[Row]:
        given: dict[str, Any] = {name: v for name, v in (("split", split), ("seed", seed)) if name in accepted}
        records: Any = function(**cfg.params, **given)
        if not isinstance(records, Iterable):
            raise DataError(f"{path}() returned {type(records).__name__}; expected an iterable of mappings")
        for number, record in enumerate(records):
            yield row_from_columns(record, cfg.question_key, cfg.answer_key, f"{path}(), {split} row {number}")

    def check(cfg: DataConfig) -> None:
        try:
            inspect.signature(function).bind(
                **cfg.params, **{name: None for name in ("split", "seed") if name in accepted}
            )
        except TypeError as cause:
            raise DataError(f"data.params do not fit {path}{inspect.signature(function)}: {cause}") from cause

    return Source(call, lambda cfg: "split" in accepted, check)
