"""Train and validation: without repeats, without a question in common."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf.config import DataConfig
from rlinf.data.row import Row
from rlinf.data.sources import Source
from rlinf.data.splits import split_rows
from rlinf.errors import DataError


def source(train: list[str], validation: list[str] | None = None) -> Source:
    given = {"train": train, "validation": validation or []}
    return Source(lambda cfg, split, seed: (Row(q, q) for q in given[split]), lambda cfg: validation is not None)


def config(train_size: int = 0, validation_size: int = 2) -> DataConfig:
    return DataConfig(kind="test", train_size=train_size, validation_size=validation_size)


def questions(rows: list[Row]) -> list[str]:
    return [str(row.question) for row in rows]


def test_repeats_go_and_shared_questions_stay_in_validation_alone():
    splits = split_rows(config(), source(["a", "b", "a ", "c", "d", "c"], ["c", "c", "e"]), 0)
    assert questions(splits.train) == ["a", "b", "d"]
    assert questions(splits.validation) == ["c", "e"]
    assert (splits.train_read, splits.train_duplicates) == (6, 1)
    assert (splits.validation_read, splits.validation_duplicates, splits.overlap) == (3, 1, 1)


def test_train_size_limits_what_is_left_after_both():
    splits = split_rows(config(train_size=2), source(["c", "a", "a", "b", "d"], ["c"]), 0)
    assert questions(splits.train) == ["a", "b"]
    assert splits.train_read == 4


@given(st.lists(st.sampled_from("abcdefghij"), min_size=1), st.integers(0, 5), st.integers(0, 3), st.integers(0, 9))
def test_holding_out_splits_the_different_questions_by_the_seed(rows, validation_size, train_size, seed):
    cfg = config(train_size, validation_size)
    distinct = len(set(rows))
    if distinct <= validation_size:
        with pytest.raises(DataError, match="leaves nothing to train on"):
            split_rows(cfg, source(rows), seed)
        return
    splits = split_rows(cfg, source(rows), seed)
    train, validation = questions(splits.train), questions(splits.validation)
    assert not set(train) & set(validation)
    assert len(set(train)) == len(train)
    assert len(validation) == validation_size
    wanted = distinct - validation_size
    assert len(train) == (min(train_size, wanted) if train_size else wanted)
    assert splits == split_rows(cfg, source(rows), seed)


def test_nothing_to_train_on_says_why():
    with pytest.raises(DataError, match="2 different questions are in validation"):
        split_rows(config(), source(["a", "b", "a"], ["b", "a"]), 0)
    with pytest.raises(DataError, match="holds no rows"):
        split_rows(config(), source([]), 0)
    with pytest.raises(DataError, match="holds no rows"):
        split_rows(config(), source(["a"], []), 0)


def test_validation_may_be_none():
    splits = split_rows(config(validation_size=0), source(["a", "b"]), 0)
    assert questions(splits.train) == ["a", "b"]
    assert splits.validation == []
