"""Curves: points met, never falling, going on beyond them; pooling against a quadratic programme's answer."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import isotonic_regression

from rlinf.scheduler.curve import Curve, pooled

VALUES = st.lists(st.floats(0.001, 1e3), min_size=1, max_size=12)


@given(VALUES, st.data())
def test_pooling_is_isotonic_regression(values: list[float], data: st.DataObject) -> None:
    weights = data.draw(st.lists(st.integers(1, 5), min_size=len(values), max_size=len(values)))
    assert pooled(values, weights) == pytest.approx(isotonic_regression(values, weights=weights).x)


@given(st.dictionaries(st.integers(1, 1000), st.floats(0.001, 1e3), min_size=1, max_size=8))
def test_it_never_falls(points: dict[int, float]) -> None:
    curve = Curve.through(list(points.items()))
    found = [curve(at) for at in np.linspace(0, 2500, 200)]
    assert all(b >= a - 1e-9 * max(a, 1.0) for a, b in pairwise(found))
    assert found[0] >= 0


@given(st.dictionaries(st.integers(1, 1000), st.floats(0.001, 1e3), min_size=1, max_size=8))
def test_points_that_do_not_fall_are_met(points: dict[int, float]) -> None:
    ascending = dict(zip(sorted(points), sorted(points.values()), strict=True))
    curve = Curve.through(list(ascending.items()))
    assert [curve(x) for x in ascending] == pytest.approx(list(ascending.values()))


def test_between_and_beyond_points_counted_by_hand() -> None:
    curve = Curve.through([(8, 18.0), (2, 6.0), (4, 10.0)])  # 2 + 2 x
    assert [curve(x) for x in (0, 1, 3, 16)] == pytest.approx([2.0, 4.0, 8.0, 34.0])
    assert curve.fixed == 2.0


def test_of_one_point_all_is_in_proportion() -> None:
    curve = Curve.through([(4, 8.0)])
    assert [curve(x) for x in (0, 1, 4, 8)] == pytest.approx([0.0, 2.0, 8.0, 16.0])


def test_a_flat_last_step_does_not_hold_beyond_it() -> None:
    curve = Curve.through([(2, 4.0), (7, 14.0), (8, 14.0)])  # the last two are noisy: 14.0 and 16.0 are the truth
    assert curve(16) == pytest.approx(14 + 8 * (14 - 4) / 6)


def test_the_same_place_twice_counts_once_with_the_mean() -> None:
    assert Curve.through([(1, 1.0), (1, 3.0), (2, 4.0)]).y == (2.0, 4.0)


def test_distance_is_told_in_doublings() -> None:
    curve = Curve.through([(2, 1.0), (8, 2.0)])
    assert [curve.distance(at) for at in (1, 2, 5, 8, 32)] == pytest.approx([1, 0, 0, 0, 2])
