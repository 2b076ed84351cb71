import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.algorithms.advantages import gae_advantages, grpo_advantages, whiten, zero_variance_groups
from tests.algorithms import oracles

FLOATS = st.floats(-10, 10, width=32)
ROWS = st.lists(st.lists(st.tuples(FLOATS, FLOATS), max_size=9), max_size=6)


def flat(rows: list[list[tuple[float, float]]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    pairs = [pair for row in rows for pair in row]
    return (
        torch.tensor([reward for reward, _ in pairs], dtype=torch.float32),
        torch.tensor([value for _, value in pairs], dtype=torch.float32),
        torch.tensor([len(row) for row in rows], dtype=torch.int64),
    )


def test_gae_by_hand():
    # deltas: 0.5*0.4-0.2=0; 0.5*0.6-0.4=-0.1; 1-0.6=0.4. gamma*lam=0.25.
    rewards, values = torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.2, 0.4, 0.6])
    advantages, returns = gae_advantages(rewards, values, torch.tensor([3]), gamma=0.5, lam=0.5)
    assert advantages.tolist() == pytest.approx([0.25 * 0.0, 0.0, 0.4], abs=1e-6)
    assert returns.tolist() == pytest.approx([0.2, 0.4, 1.0], abs=1e-6)


def test_lambda_one_without_discount_is_the_rest_of_the_rewards_less_the_value():
    rewards, values = torch.tensor([1.0, 2.0, 3.0, 5.0]), torch.tensor([0.5, 0.5, 0.5, 0.25])
    advantages, returns = gae_advantages(rewards, values, torch.tensor([3, 1]), gamma=1.0, lam=1.0)
    assert returns.tolist() == [6.0, 5.0, 3.0, 5.0]
    assert advantages.tolist() == [5.5, 4.5, 2.5, 4.75]


def test_lambda_zero_is_the_one_step_error():
    rewards, values = torch.tensor([1.0, 1.0]), torch.tensor([2.0, 4.0])
    advantages, _ = gae_advantages(rewards, values, torch.tensor([2]), gamma=0.5, lam=0.0)
    assert advantages.tolist() == [1.0 + 0.5 * 4.0 - 2.0, 1.0 - 4.0]


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, gamma=st.sampled_from([0.0, 0.5, 0.99, 1.0]), lam=st.sampled_from([0.0, 0.5, 0.95, 1.0]))
def test_gae_matches_the_definition_row_by_row(rows, gamma, lam):
    advantages, returns = gae_advantages(*flat(rows), gamma, lam)
    expected = [a for row in rows for a in oracles.gae([r for r, _ in row], [v for _, v in row], gamma, lam)]
    np.testing.assert_allclose(advantages.numpy(), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(returns.numpy(), advantages.numpy() + flat(rows)[1].numpy(), rtol=1e-4, atol=1e-4)


def test_gae_matches_the_definition_on_a_long_row():
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 1037, generator=generator)
    lengths = torch.tensor([1000, 0, 37])
    found, _ = gae_advantages(rewards, values, lengths, 0.999, 0.97)
    expected = [
        a
        for part in (slice(0, 1000), slice(1000, 1037))
        for a in oracles.gae(rewards[part].tolist(), values[part].tolist(), 0.999, 0.97)
    ]
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-5)


@settings(max_examples=30, deadline=None)
@given(rows=ROWS, cut=st.integers(0, 6))
def test_a_row_gets_the_same_bits_whatever_rows_are_beside_it(rows, cut):
    whole, _ = gae_advantages(*flat(rows), 0.99, 0.95)
    parts = [gae_advantages(*flat(part), 0.99, 0.95)[0] for part in (rows[:cut], rows[cut:])]
    assert torch.equal(torch.cat(parts), whole)


def test_bootstrap_is_the_value_after_the_last_step_of_its_row_only():
    rewards, values, lengths = torch.ones(3), torch.zeros(3), torch.tensor([2, 0, 1])
    found, _ = gae_advantages(rewards, values, lengths, 0.5, 1.0, bootstrap=torch.tensor([8.0, 100.0, 0.0]))
    assert found.tolist() == [1 + 0.5 * (1 + 0.5 * 8), 1 + 0.5 * 8, 1.0]
    with pytest.raises(ValueError, match="each of 3 rows"):
        gae_advantages(rewards, values, lengths, 0.5, 1.0, bootstrap=torch.zeros(2))


def test_grpo_by_hand():
    rewards, groups = torch.tensor([1.0, 5.0, 0.0, 5.0]), torch.tensor([7, 3, 7, 3])
    assert grpo_advantages(rewards, groups, std=False).tolist() == [0.5, 0.0, -0.5, 0.0]
    root = 1 / math.sqrt(2)  # the unbiased deviation of {0, 1} is 1 / sqrt(2)
    assert grpo_advantages(rewards, groups, std=True).tolist() == pytest.approx([root, 0, -root, 0], rel=1e-5)


GROUPED = st.lists(st.tuples(FLOATS, st.integers(0, 3)), max_size=12)


@settings(max_examples=60, deadline=None)
@given(samples=GROUPED, std=st.booleans())
def test_grpo_matches_the_plain_oracle(samples, std):
    rewards, groups = [r for r, _ in samples], [g for _, g in samples]
    found = grpo_advantages(torch.tensor(rewards), torch.tensor(groups, dtype=torch.int64), std)
    np.testing.assert_allclose(found.numpy(), oracles.grpo(rewards, groups, std), rtol=1e-4, atol=1e-4)


@settings(max_examples=40, deadline=None)
@given(samples=GROUPED.filter(bool), data=st.data())
def test_groups_go_by_id_not_by_position(samples, data):
    order = torch.tensor(data.draw(st.permutations(range(len(samples)))))
    rewards = torch.tensor([r for r, _ in samples])
    groups = torch.tensor([g for _, g in samples])
    whole = grpo_advantages(rewards, groups, std=True)
    torch.testing.assert_close(grpo_advantages(rewards[order], groups[order], std=True), whole[order])
    relabelled = groups * -1000 + 17
    torch.testing.assert_close(grpo_advantages(rewards, relabelled, std=True), whole)


def test_groups_of_one_and_of_equal_rewards_get_exactly_zero():
    rewards = torch.tensor([0.1, 0.1, 0.1, 0.7])
    assert grpo_advantages(rewards, torch.tensor([1, 1, 1, 2]), std=True).tolist() == [0.0] * 4
    assert zero_variance_groups(rewards, torch.tensor([1, 1, 1, 2])) == (1.0, 2)
    assert zero_variance_groups(rewards, torch.tensor([1, 1, 2, 2])) == (0.5, 2)


@settings(max_examples=30, deadline=None)
@given(values=st.lists(st.floats(-100, 100, width=32), max_size=12))
def test_whitened_values_have_mean_zero_and_deviation_one_or_are_all_zero(values):
    found = whiten(torch.tensor(values)).double()
    if len(set(values)) < 2:
        assert found.tolist() == [0.0] * len(values)
    elif np.std(values) > 1e-2:
        assert found.mean().item() == pytest.approx(0.0, abs=1e-5)
        assert found.std().item() == pytest.approx(1.0, rel=1e-3)


def test_whiten_by_hand():
    assert whiten(torch.tensor([1.0, 2.0, 3.0])).tolist() == pytest.approx([-1.0, 0.0, 1.0], abs=1e-5)
