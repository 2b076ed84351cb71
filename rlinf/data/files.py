"""Rows from JSONL and parquet files, and from Hugging Face data sets."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rlinf.config import DataConfig
from rlinf.data.row import Row, require_columns, row_from_columns
from rlinf.data.sources import SOURCES, Source, Split
from rlinf.errors import DataError


def _file(cfg: DataConfig, split: Split) -> Path:
    given = cfg.train if split == "train" else cfg.validation
    if not given:
        raise DataError(f"data.{split} is not set; data.kind={cfg.kind} needs the path of a {cfg.kind} file")
    path = Path(given).expanduser()
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise DataError(f"data.{split}={given} {what}; expected a {cfg.kind} file (looked at {path.resolve()})")
    if path.stat().st_size == 0:
        raise DataError(f"data.{split}={given} is empty (0 bytes)")
    return path


def _file_source(read: Callable[[Path, DataConfig], Iterator[Row]]) -> Source:
    def rows(cfg: DataConfig, split: Split, seed: int) -> Iterator[Row]:
        return read(_file(cfg, split), cfg)

    def check(cfg: DataConfig) -> None:
        for split in ("train", "validation"):
            if (split == "train" or cfg.validation) and next(rows(cfg, split, 0), None) is None:
                raise DataError(f"data.{split}={getattr(cfg, split)} holds no rows")

    return Source(rows, lambda cfg: bool(cfg.validation), check)


def read_jsonl(path: Path, cfg: DataConfig) -> Iterator[Row]:
    """Rows of a file with one JSON object a line; blank lines are passed over. Row numbers are line numbers from 1.

    Raises:
        DataError: malformed JSON, text that is not UTF-8, a missing column or a wrong type, with the row number.
    """
    number = 0
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                except json.JSONDecodeError as cause:
                    raise DataError(
                        f"{path}, row {number}: malformed JSON at column {cause.colno} ({cause.msg}); expected one "
                        "complete object on the line"
                    ) from cause
                yield row_from_columns(record, cfg.question_key, cfg.answer_key, f"{path}, row {number}")
    except UnicodeDecodeError as cause:
        raise DataError(f"{path}: not UTF-8 text after row {number} ({cause.reason}); expected a JSONL file") from cause


def read_parquet(path: Path, cfg: DataConfig) -> Iterator[Row]:
    """Rows of a parquet file. Row numbers count from 1.

    Raises:
        DataError: not a parquet file, a missing column (from the schema), or a wrong type, with the row number.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as cause:
        raise DataError(f"{path}: not a readable parquet file ({cause})") from cause
    with table:
        require_columns(table.schema_arrow.names, cfg.question_key, cfg.answer_key, str(path))
        number = 0
        for batch in table.iter_batches(batch_size=1024):
            for record in batch.to_pylist():
                number += 1
                yield row_from_columns(record, cfg.question_key, cfg.answer_key, f"{path}, row {number}")


def _load_hf(cfg: DataConfig, split_name: str) -> Any:
    """The split, from a folder (as `save_to_disk` wrote it, or of data files) or from the hub."""
    import datasets

    if not cfg.name:
        raise DataError("data.name is not set; data.kind=hf needs a data set's name or folder")
    try:
        folder = Path(cfg.name).expanduser()
        if (folder / "dataset_info.json").is_file() or (folder / "dataset_dict.json").is_file():
            saved = datasets.load_from_disk(str(folder))
            if isinstance(saved, datasets.Dataset):
                return saved
            if split_name not in saved:
                raise DataError(f"data set {cfg.name!r} has no split {split_name!r}; it has {sorted(saved)}")
            return saved[split_name]
        source = str(folder) if folder.exists() else cfg.name
        return datasets.load_dataset(source, split=split_name, **cfg.params)
    except DataError:
        raise
    # load_dataset raises anything from ConnectionError to the exceptions of a user's loading script.
    except Exception as cause:
        raise DataError(
            f"cannot load split {split_name!r} of data set {cfg.name!r} with {dict(cfg.params)}: "
            f"{type(cause).__name__}: {cause}"
        ) from cause


def _hf_rows(cfg: DataConfig, split: Split, seed: int) -> Iterator[Row]:
    name = (cfg.train or "train") if split == "train" else (cfg.validation or "validation")
    where = f"{cfg.name}[{name}]"
    loaded = _load_hf(cfg, name)
    require_columns(loaded.column_names, cfg.question_key, cfg.answer_key, where)
    for number, record in enumerate(loaded, start=1):
        yield row_from_columns(record, cfg.question_key, cfg.answer_key, f"{where}, row {number}")


def _check_hf(cfg: DataConfig) -> None:
    if not cfg.name:
        raise DataError("data.name is not set; data.kind=hf needs a data set's name or folder")
    looks_local = cfg.name.startswith((".", "/", "~")) or cfg.name.count("/") > 1
    if looks_local and not Path(cfg.name).expanduser().exists():
        raise DataError(f"data.name={cfg.name} does not exist (looked at {Path(cfg.name).expanduser().resolve()})")
    if Path(cfg.name).expanduser().exists():  # a hub's data set is not fetched just to look at it
        for split in ("train", "validation"):
            if (split == "train" or cfg.validation) and next(_hf_rows(cfg, split, 0), None) is None:
                raise DataError(f"data set {cfg.name!r}: the {split} split holds no rows")


SOURCES.add("jsonl", _file_source(read_jsonl))
SOURCES.add("parquet", _file_source(read_parquet))
SOURCES.add("hf", Source(_hf_rows, lambda cfg: bool(cfg.validation), _check_hf))
