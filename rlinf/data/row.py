"""Row: one question with its answer, and the schema check that every source's records pass."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Union

from rlinf.errors import DataError
from rlinf.registry import nearest

Messages = list[dict[str, str]]
Question = Union[str, Messages]


@dataclass(frozen=True)
class Row:
    """One question.

    Attributes:
        question: text of the user's turn, or a list of chat messages ``{"role", "content"}``.
        answer: the reference answer; any value but ``None`` and NaN (``None`` where the data has no answers at all).
        metadata: everything else that came with the question.
        where: file and row number, for messages about this row.
    """

    question: Question
    answer: Any
    metadata: dict[str, Any] = field(default_factory=dict)
    where: str = ""

    @property
    def text(self) -> str:
        """The question as one string: the last user message of a chat."""
        if isinstance(self.question, str):
            return self.question
        return next(m["content"] for m in reversed(self.question) if m["role"] == "user")

    @property
    def identity(self) -> str:
        """What two rows share when they ask the same question; surrounding white space does not count."""
        if isinstance(self.question, str):
            return self.question.strip()
        return json.dumps([[m["role"], m["content"].strip()] for m in self.question])


def row_from_columns(columns: object, question_key: str, answer_key: str, where: str) -> Row:
    """Make a row from a record; columns beside question and answer become metadata.

    A column ``metadata`` that holds a mapping is unpacked into it. With an empty ``answer_key`` the answer is ``None``.

    Raises:
        DataError: not a record, a missing column, or a value of the wrong type; names ``where`` and the column.
    """
    if not isinstance(columns, Mapping):
        raise DataError(f"{where}: expected an object with named columns, found {_kind(columns)}")
    require_columns(columns, question_key, answer_key, where)
    question = _question(columns[question_key], question_key, where)
    answer = columns[answer_key] if answer_key else None
    if answer_key and (answer is None or (isinstance(answer, float) and math.isnan(answer))):
        raise DataError(f"{where}: column {answer_key!r} is {answer}; every row needs a reference answer")
    metadata = {str(k): v for k, v in columns.items() if k not in (question_key, answer_key, "metadata")}
    nested = columns.get("metadata") if "metadata" not in (question_key, answer_key) else None
    if isinstance(nested, Mapping):
        metadata.update({str(k): v for k, v in nested.items()})
    elif nested is not None:
        metadata["metadata"] = nested
    return Row(question, answer, metadata, where)


def require_columns(names: Any, question_key: str, answer_key: str, where: str) -> None:
    """Raise `DataError` unless the question's and the answer's column are among ``names``."""
    for key, setting in ((question_key, "data.question_key"), (answer_key, "data.answer_key")):
        if key and key not in names:
            without = " (or to '' if there are no answers)" if setting.endswith("answer_key") else ""
            raise DataError(
                f"{where}: no column {key!r}; set {setting} to the column's name{without}."
                f"{nearest(key, [str(name) for name in names])}"
            )


def _question(value: object, key: str, where: str) -> Question:
    if isinstance(value, str):
        if not value.strip():
            raise DataError(f"{where}: column {key!r} is empty; every row needs a question")
        return value
    if hasattr(value, "tolist"):  # numpy arrays, as parquet readers give lists
        value = value.tolist()
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: column {key!r} is {_kind(value)}; expected text or a list of chat messages")
    messages: Messages = []
    for i, message in enumerate(value):
        role = message.get("role") if isinstance(message, Mapping) else None
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(role, str) or not isinstance(content, str):
            raise DataError(
                f"{where}: column {key!r}, message {i} is {message!r}; expected {{'role': text, 'content': text}}"
            )
        messages.append({"role": role, "content": content})
    if not any(message["role"] == "user" for message in messages):
        raise DataError(f"{where}: column {key!r} holds chat messages, but none of role 'user'")
    return messages


def _kind(value: object) -> str:
    shown = repr(value)
    return f"{type(value).__name__} {shown if len(shown) <= 60 else shown[:57] + '...'}"
