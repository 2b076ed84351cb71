"""Which memory items lie in: ranges (pure), and the pool of segments."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf.channel import pool as module
from rlinf.channel.pool import Pool
from rlinf.channel.ranges import ALIGNED, Ranges, aligned


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 900)), max_size=60))
def test_ranges_never_overlap_and_all_comes_back(orders: list[tuple[bool, int]]) -> None:
    ranges, taken = Ranges(4096), dict[int, int]()
    for take, number in orders:
        if take:
            start = ranges.take(number)
            size = max(aligned(number), ALIGNED)
            if start is None:
                assert all(gap < size for gap in gaps(taken))
                continue
            assert start % ALIGNED == 0
            assert all(start + size <= other or other + length <= start for other, length in taken.items())
            assert start + size <= 4096
            taken[start] = size
        elif taken:
            start = sorted(taken)[number % len(taken)]
            del taken[start]
            ranges.give(start)
        assert ranges.free == 4096 - sum(taken.values())
    for start in list(taken):
        ranges.give(start)
    assert ranges.empty
    assert ranges.take(4096) == 0


def gaps(taken: dict[int, int]) -> list[int]:
    found, at = [], 0
    for start in sorted(taken):
        found.append(start - at)
        at = start + taken[start]
    return [*found, 4096 - at]


def test_a_block_given_back_is_used_again() -> None:
    pool = Pool()
    first = pool.take(100_000)
    pool.give(first)
    before = pool.nbytes
    for _ in range(100):
        pool.give(pool.take(100_000))
    assert pool.nbytes == before
    assert pool.used == 0


def test_small_items_leave_the_segments_of_large_ones_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGEST", 8 << 20)
    pool = Pool()
    large = pool.take(9 << 20)
    pool.give(large)
    assert all(pool.take(1000).segment is not large.segment for _ in range(20))
    assert pool.take(9 << 20).segment is large.segment


def test_segments_that_nobody_needs_are_let_go_and_others_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT", 4 << 20)
    told: list[int] = []
    pool = Pool(told.append)
    blocks = [pool.take(3 << 20) for _ in range(4)]
    inodes = {block.segment.memory.handle.inode for block in blocks}
    for block in blocks:
        pool.give(block)
    assert pool.nbytes <= 4 << 20
    assert told
    assert set(told) <= inodes
