import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.algorithms.losses import ReturnMoments, value_loss
from rlinf.errors import ConfigError


def test_clip_by_hand():
    # Return 1. Moved 0.5 towards it, held at 0.2: worse, so the held error counts. Moved away: the plain error counts.
    values = torch.tensor([0.5, -0.5, 0.1]).requires_grad_()
    terms = value_loss(values, torch.zeros(3), torch.ones(3), torch.tensor([2, 0, 1]), clip=0.2)
    terms.total.backward()
    assert terms.total.item() == pytest.approx(0.5 * (0.8**2 + 1.5**2 + 0.9**2))
    assert values.grad.tolist() == pytest.approx([0.0, -1.5, -0.9])
    assert terms.denominator == 3.0
    assert terms.metrics["value_loss"].value == pytest.approx(terms.total.item() / 3)
    assert terms.metrics["value_clip_fraction"].value == pytest.approx(1 / 3)


def test_clip_zero_is_plain_half_squared_error():
    values, returns = torch.randn(5), torch.randn(5)
    terms = value_loss(values, torch.zeros(5), returns, torch.tensor([5]), clip=0.0)
    expected = 0.5 * torch.nn.functional.mse_loss(values, returns, reduction="sum")
    torch.testing.assert_close(terms.total, expected)
    assert terms.metrics["value_clip_fraction"].value == 0.0


@settings(max_examples=30, deadline=None)
@given(rows=st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=3, max_size=12), cut=st.integers(0, 12))
def test_explained_variance_of_parts_is_that_of_the_whole(rows, cut):
    values, returns = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    parts = ReturnMoments.of(values[:cut], returns[:cut]) + ReturnMoments.of(values[cut:], returns[cut:])
    parts = ReturnMoments.from_tensor(parts.as_tensor())
    variance = np.var(returns.numpy())
    if variance > 1e-6:
        expected = 1 - np.var((returns - values).numpy()) / variance
        assert parts.explained_variance() == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_explained_variance_of_equal_returns_or_of_nothing_is_nan():
    assert math.isnan(ReturnMoments().explained_variance())
    assert math.isnan(ReturnMoments.of(torch.rand(5), torch.full((5,), 0.1)).explained_variance())


def test_a_perfect_critic_explains_everything():
    returns = torch.randn(6)
    terms = value_loss(returns.clone(), returns, returns, torch.tensor([6]), clip=0.2)
    assert terms.moments.explained_variance() == 1.0


def test_an_empty_batch_has_a_zero_total_with_a_graph():
    values = torch.empty(0).requires_grad_()
    terms = value_loss(values, torch.empty(0), torch.empty(0), torch.tensor([0, 0]), clip=0.2)
    terms.total.backward()
    assert terms.total.item() == 0.0
    assert terms.denominator == 0.0
    assert all(math.isnan(metric.value) and metric.weight == 0.0 for metric in terms.metrics.values())


@settings(max_examples=20, deadline=None)
@given(cut=st.integers(0, 8), clip=st.sampled_from([0.0, 0.2]))
def test_micro_batches_add_up(cut, clip):
    generator = torch.Generator().manual_seed(cut)
    v, o, r = torch.randn(3, 8, generator=generator)
    whole = value_loss(v, o, r, torch.tensor([8]), clip)
    parts = [value_loss(v[s], o[s], r[s], torch.tensor([len(v[s])]), clip) for s in (slice(cut), slice(cut, None))]
    torch.testing.assert_close(sum(part.total for part in parts), whole.total)
    assert sum(part.denominator for part in parts) == whole.denominator


def test_wrong_arguments_say_what_to_change():
    with pytest.raises(ConfigError, match="value_clip=-1"):
        value_loss(torch.zeros(1), torch.zeros(1), torch.zeros(1), torch.tensor([1]), clip=-1.0)
    with pytest.raises(ValueError, match="returns must be flat"):
        value_loss(torch.zeros(1), torch.zeros(1), torch.zeros(2), torch.tensor([1]), clip=0.0)
