"""Processes take the ranks whose state they have."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.vps.explain import explain
from rlinf.vps.permute import Permuted, held_in_common, stay
from rlinf.vps.plan import plan
from rlinf.vps.schedule import schedule
from rlinf.vps.space import LayoutError
from tests.vps.labelled import buffers, carry, layouts, same, spaces
from tests.vps.test_plan import MANY, whole


@st.composite
def pairs(draw: st.DrawFn):
    space = draw(spaces())
    return draw(layouts(space, 4)), draw(layouts(space, 4))


def staying(src, dst) -> int:
    traffic = plan(src, dst).traffic()
    return int(traffic.nbytes[traffic.src == traffic.dst].sum())


@given(pairs())
@settings(max_examples=40, deadline=None)
def test_no_other_numbering_keeps_more_in_place_and_every_element_still_arrives(sides) -> None:
    src, dst = sides
    best = stay(src, dst)
    assert staying(src, best) == max(staying(src, Permuted(dst, order)) for order in permutations(range(4)))
    assert same(carry(plan(src, best)), buffers(best, True))


def test_what_only_changed_its_number_stays_whole() -> None:
    from dataclasses import replace

    src = whole(MANY, [0], 2)
    dst = replace(src, ranks=src.ranks[::-1])
    assert len(plan(src, dst).part(1).receives) > 0
    moved = stay(src, dst)
    assert moved.order == (1, 0)
    assert len(plan(src, moved).traffic().between().src) == 0
    assert held_in_common(src, dst)[0, 1] == 12 * 24 * 4


def test_an_order_that_is_none_and_worlds_that_differ_are_refused() -> None:
    layout = whole(MANY, [0], 2)
    with pytest.raises(LayoutError, match=r"\(0, 0\) is not an order of 2 ranks"):
        Permuted(layout, (0, 0))
    with pytest.raises(LayoutError, match="2 processes cannot take the ranks of 3"):
        stay(layout, whole(MANY, [0], 3))


def test_an_explanation_adds_up() -> None:
    src, dst = whole(MANY, [0, 1], 4), whole(MANY, [0, 2, 3], 4)
    from dataclasses import replace

    src, dst = (replace(layout, hosts=(0, 0, 0, 1)) for layout in (src, dst))
    text = explain(schedule(plan(src, dst)))
    size = 12 * 24 * 4 / 1024
    assert (
        f"over 4 ranks on 2 hosts: {size:.1f} KiB stay, {size:.1f} KiB go within a host, {size:.1f} KiB between" in text
    )
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines()[4:]}
    assert rows["0"][:2] == [f"{size:.1f}", "KiB"]
    assert rows["3"][6:8] == [f"{size:.1f}", "KiB"]
