"""The mailbox and the routing of rows."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf.batch import Batch
from rlinf.channel.mailbox import Cancelled, Mailbox
from rlinf.channel.routing import route
from rlinf.m2flow.stage import Unit


@given(st.permutations([("put", 0, "a"), ("put", 0, "b"), ("put", 1, "c"), ("close", 0, 2), ("close", 1, 1)]))
def test_a_key_is_complete_when_all_is_there_whatever_the_order_of_messages(messages: list) -> None:
    box = Mailbox()
    for kind, source, value in messages:
        (box.put if kind == "put" else box.close)("k", source, value)
    assert sorted(box.stream("k", 2)) == ["a", "b", "c"]


def test_keys_do_not_mix() -> None:
    box = Mailbox()
    box.put("one", 0, 1)
    box.put("two", 0, 2)
    box.close("two", 0, 1)
    box.close("one", 0, 1)
    assert list(box.stream("two", 1)) == [2]
    assert list(box.stream("one", 1)) == [1]


def test_items_are_handed_on_before_the_key_is_complete() -> None:
    box = Mailbox()
    box.put("k", 0, "early")
    stream = box.stream("k", 1)
    assert next(stream) == "early"
    box.close("k", 0, 1)
    assert list(stream) == []


def test_a_cancelled_wait_ends() -> None:
    box = Mailbox()
    ended: list[type] = []

    def wait() -> None:
        try:
            list(box.stream("k", 1))
        except Cancelled:
            ended.append(Cancelled)

    thread = threading.Thread(target=wait)
    thread.start()
    box.cancel()
    thread.join(5)
    assert ended == [Cancelled]


def test_a_failure_ends_a_wait_that_is_under_way_and_every_later_one_with_the_first_error() -> None:
    mailbox = Mailbox()
    found: list[Exception] = []
    waiting = threading.Event()

    def wait() -> None:
        stream = mailbox.stream("k", 1)
        next(stream)
        waiting.set()
        try:
            next(stream)
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    mailbox.put("k", 0, "a")
    assert waiting.wait(10)
    mailbox.fail(ValueError("lost on the way"))
    mailbox.cancel()
    thread.join(10)
    assert [str(error) for error in found] == ["lost on the way"]
    with pytest.raises(ValueError, match="lost on the way"):
        next(mailbox.stream("other", 1))


@pytest.mark.parametrize("dp", [1, 2, 3])
def test_rows_go_round_and_groups_stay_whole(dp: int) -> None:
    batch = Batch({"row_id": torch.arange(24), "group_id": torch.arange(24) // 4})
    by_row = route(batch, dp, Unit.SEQUENCE)
    assert [part.n for part in by_row] == [24 // dp] * dp
    by_group = route(batch, dp, Unit.GROUP)
    groups = [set(part["group_id"].tolist()) for part in by_group]
    assert sum(map(len, groups)) == 6
    assert sorted(i for part in by_group for i in part["row_id"].tolist()) == list(range(24))


@given(st.lists(st.integers(0, 10**6), unique=True, max_size=40), st.integers(1, 7), st.randoms())
def test_a_rows_place_does_not_depend_on_the_batch_it_comes_in(ids: list[int], dp: int, rng) -> None:
    batch = Batch({"row_id": torch.tensor(ids, dtype=torch.int64)})
    place = {i: rank for rank, part in enumerate(route(batch, dp, Unit.SEQUENCE)) for i in part["row_id"].tolist()}
    half = rng.sample(ids, len(ids) // 2)
    for rank, part in enumerate(route(Batch({"row_id": torch.tensor(half, dtype=torch.int64)}), dp, Unit.SEQUENCE)):
        assert all(place[i] == rank for i in part["row_id"].tolist())
