"""``metrics.jsonl`` and ``samples.jsonl``: strict JSON, a line at a time, and no step twice after a resume."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

_log = logging.getLogger(__name__)

COLUMNS = ("row_id", "group_id", "question", "response", "reward", "answer", "weight_version", "truncated")


class StepLines:
    """A file of JSON lines, each with its ``step``, flushed line by line.

    Opening it drops the lines of steps from ``first_step`` on, which the run is about to do again, and a last line
    that a crash cut short. With ``first_step`` 0 or 1 the file begins anew.

    Raises:
        OSError: the file cannot be opened or written.
    """

    def __init__(self, path: Path, first_step: int) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._keep_before(first_step if first_step > 1 else -1)
        # Unbuffered: what the disk refuses must not lie in a buffer and be written by the next flush.
        self._file: FileIO = open(self.path, "r+b", buffering=0)  # noqa: SIM115 (kept open until close)
        self._end = self._file.seek(0, os.SEEK_END)

    def append(self, records: Iterable[Mapping[str, Any]], at: int | None = None) -> int:
        """Write lines at the end, or over everything from byte ``at`` on. Returns the byte at which they begin.

        A write that fails leaves the file as it was before, but for what stood after ``at``.
        """
        start = self._end if at is None else at
        text = "".join(json.dumps(_strict(record), allow_nan=False, ensure_ascii=False) + "\n" for record in records)
        left = memoryview(text.encode("utf-8", "replace"))
        try:
            self._file.truncate(start)
            self._file.seek(start)
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            self._file.truncate(start)  # half a line would spoil the next one
            self._end = start
            raise
        self._end = self._file.tell()
        return start

    def last(self) -> tuple[int, dict[str, Any]] | None:
        """Where the last line begins, and what it says."""
        content = self.path.read_bytes()
        if not content:
            return None
        start = content[:-1].rfind(b"\n") + 1
        return start, json.loads(content[start:])

    def close(self) -> None:
        self._file.close()

    def _keep_before(self, first_step: int) -> None:
        kept = []
        if first_step > 0 and self.path.exists():
            for line in self.path.read_bytes().split(b"\n"):
                try:
                    if json.loads(line)["step"] < first_step:
                        kept.append(line + b"\n")
                except (ValueError, KeyError, TypeError):
                    continue
        aside = self.path.with_name(f".{self.path.name}.tmp")
        with open(aside, "wb") as file:
            file.writelines(kept)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.replace(aside, self.path)
        except OSError:
            aside.unlink()
            raise


class JsonlTracker:
    """``metrics.jsonl``: one line a step, ``{"step": 3, "time": 1730000000.0, "reward/reward_mean": 0.5, ...}``.

    Values logged for a step again are added to its line. What is not finite is ``null``.
    """

    def __init__(self, path: Path, first_step: int) -> None:
        self._lines = StepLines(path, first_step)
        self._at, self._record = self._lines.last() or (0, {"step": -1})

    def log(self, step: int, values: dict[str, float]) -> None:
        if step == self._record["step"]:
            self._record = {**self._record, **values}
            self._lines.append([self._record], at=self._at)
        else:
            record = {"step": step, "time": round(time.time(), 3), **values}
            self._at = self._lines.append([record])
            self._record = record

    def close(self) -> None:
        self._lines.close()


class Samples:
    """``samples.jsonl``: transcripts, so that a person can read what the policy says at each step.

    Opening and writing never raise: what fails is said once through ``warn``. ``first_step`` as of `open_trackers`.
    """

    def __init__(self, output_dir: Path, first_step: int, warn: Callable[[str], None] = _log.warning) -> None:
        self._warn, self._warned = warn, False
        self._lines: StepLines | None = None
        try:
            self._lines = StepLines(Path(output_dir) / "samples.jsonl", first_step)
        except OSError as error:
            self._complain(error)

    def write(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write transcripts of a step: mappings with some of ``COLUMNS``; other names follow after these."""
        if self._lines is None:
            return
        try:
            self._lines.append({"step": step, **_ordered(row)} for row in rows)
        except (OSError, ValueError, TypeError) as error:
            self._complain(error)

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()
            self._lines = None

    def _complain(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            self._warn(f"samples.jsonl: {error}; the run goes on without these transcripts")


def _ordered(row: Mapping[str, Any]) -> dict[str, Any]:
    return {**{name: row[name] for name in COLUMNS if name in row}, **{k: v for k, v in row.items() if k != "step"}}


def _strict(value: Any) -> Any:
    """JSON without NaN; what JSON has no form for (an answer may be any object) becomes its text."""
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    tolist = getattr(value, "tolist", None)  # of numpy and torch
    return _strict(tolist()) if callable(tolist) else str(value)
