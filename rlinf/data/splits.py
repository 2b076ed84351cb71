"""Train and validation without a question in common, in an order that depends on the data and the seed alone."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from rlinf.config import DataConfig
from rlinf.data.row import Row
from rlinf.data.sources import Source
from rlinf.errors import DataError
from rlinf.seeding import derive


@dataclass(frozen=True)
class Splits:
    """Rows of both splits with the counts of what was left out; see `DataReport` for their meaning."""

    train: list[Row]
    validation: list[Row]
    train_read: int
    validation_read: int
    train_duplicates: int
    validation_duplicates: int
    overlap: int
    held_out: bool


@dataclass
class _Distinct:
    """Reads rows until enough different ones are there."""

    rows: list[Row] = field(default_factory=list)
    read: int = 0
    duplicates: int = 0
    refused: set[str] = field(default_factory=set)

    def take(self, source: Iterable[Row], limit: int | None, refuse: frozenset[str] = frozenset()) -> _Distinct:
        """Take up to ``limit`` rows (``None``: all) that neither repeat nor stand in ``refuse``."""
        seen: set[str] = set()
        for row in source if limit != 0 else ():
            self.read += 1
            identity = row.identity
            if identity in refuse:
                self.refused.add(identity)
            elif identity in seen:
                self.duplicates += 1
            else:
                seen.add(identity)
                self.rows.append(row)
                if limit is not None and len(self.rows) >= limit:
                    break
        return self


def split_rows(cfg: DataConfig, source: Source, seed: int) -> Splits:
    """Read both splits.

    Rows of the same question are kept once. A question in both splits stays in validation. Without validation rows of
    its own, a source gives ``validation_size`` of its rows, drawn by the seed. ``train_size`` limits what is left for
    training (0: all); reading stops as soon as enough is there.

    Raises:
        DataError: nothing to train on, or fewer validation rows than were to be held out.
    """
    limit = cfg.train_size or None
    if source.own_validation(cfg):
        validation = _Distinct().take(source.rows(cfg, "validation", seed), cfg.validation_size)
        if cfg.validation_size and not validation.rows:
            raise DataError(f"{describe(cfg, 'validation')} holds no rows")
        taken = frozenset(row.identity for row in validation.rows)
        train = _Distinct().take(source.rows(cfg, "train", seed), limit, taken)
        if not train.rows:
            raise DataError(
                f"{describe(cfg, 'train')} leaves nothing to train on: {train.read} rows read, of which "
                f"{len(train.refused)} different questions are in validation too; use different data for validation, "
                "or lower data.validation_size"
            )
        return Splits(
            train.rows,
            validation.rows,
            train.read,
            validation.read,
            train.duplicates,
            validation.duplicates,
            len(train.refused),
            held_out=False,
        )

    wanted = None if limit is None else limit + cfg.validation_size
    both = _Distinct().take(source.rows(cfg, "train", seed), wanted)
    if not both.rows:
        raise DataError(f"{describe(cfg, 'train')} holds no rows")
    if len(both.rows) <= cfg.validation_size:
        raise DataError(
            f"{describe(cfg, 'train')} has {len(both.rows)} different questions; holding out data.validation_size="
            f"{cfg.validation_size} leaves nothing to train on: lower it, or give validation rows (data.validation)"
        )
    chosen = set(random.Random(derive(seed, "hold-out")).sample(range(len(both.rows)), cfg.validation_size))
    return Splits(
        [row for i, row in enumerate(both.rows) if i not in chosen],
        [row for i, row in enumerate(both.rows) if i in chosen],
        both.read,
        len(chosen),
        both.duplicates,
        0,
        0,
        held_out=True,
    )


def describe(cfg: DataConfig, split: str) -> str:
    """Where a split's rows come from, for messages."""
    given = cfg.train if split == "train" else cfg.validation
    return " ".join(part for part in (cfg.kind, cfg.name, given or "") if part)
