import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.algorithms.losses import PolicyLossInputs, policy_loss
from rlinf.config import AlgorithmConfig
from rlinf.errors import ConfigError
from rlinf.metrics import merge
from tests.algorithms import oracles


def one_token(ratio: float, advantage: float) -> PolicyLossInputs:
    return PolicyLossInputs(
        logprobs=torch.tensor([math.log(ratio) - 1.0]).requires_grad_(),
        old_logprobs=torch.tensor([-1.0]),
        advantages=torch.tensor([advantage]),
        lengths=torch.tensor([1]),
    )


def make(rows: list[dict[str, list[float]]]) -> PolicyLossInputs:
    def flat(key: str) -> torch.Tensor:
        return torch.tensor([x for row in rows for x in row[key]], dtype=torch.float32)

    return PolicyLossInputs(
        logprobs=flat("lp").requires_grad_(),
        old_logprobs=flat("old"),
        advantages=flat("adv"),
        lengths=torch.tensor([len(row["lp"]) for row in rows], dtype=torch.int64),
        entropy=flat("ent"),
        ref_logprobs=flat("ref"),
    )


def random_rows(lengths: list[int], seed: int = 0) -> list[dict[str, list[float]]]:
    generator = torch.Generator().manual_seed(seed)

    def draw(n: int) -> list[float]:
        return torch.randn(n, generator=generator).tolist()

    return [{key: draw(n) for key in ("lp", "old", "adv", "ent", "ref")} for n in lengths]


FULL = AlgorithmConfig(
    clip_low=0.2, clip_high=0.3, dual_clip=3.0, kl_coef=0.1, kl_in="loss", kl_estimator="k3", entropy_coef=0.01
)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),  # on policy
        (1.1, 2.0, -2.2, -2.2),  # inside
        (1.5, 2.0, -2.56, 0.0),  # above 1.28, already better: held
        (0.5, 2.0, -1.0, -1.0),  # below, but worse: free to come back
        (0.5, -2.0, 1.6, 0.0),  # below 0.8, already better: held
        (1.5, -2.0, 3.0, 3.0),  # above, but worse: free to come back
    ],
)
def test_clip_by_hand(ratio, advantage, loss, gradient):
    inputs = one_token(ratio, advantage)
    terms = policy_loss(inputs, AlgorithmConfig(clip_low=0.2, clip_high=0.28))
    terms.total.backward()
    assert terms.total.item() == pytest.approx(loss, rel=1e-5)
    assert inputs.logprobs.grad.item() == pytest.approx(gradient, rel=1e-5)
    assert terms.metrics["clip_fraction"].value == float(gradient == 0.0)


def test_dual_clip_bounds_the_loss_only_where_the_advantage_is_negative_and_the_ratio_large():
    cfg = AlgorithmConfig(dual_clip=3.0)
    off = AlgorithmConfig()
    assert policy_loss(one_token(5.0, -1.0), off).total.item() == pytest.approx(5.0)
    held = one_token(5.0, -1.0)
    terms = policy_loss(held, cfg)
    terms.total.backward()
    assert terms.total.item() == pytest.approx(3.0)
    assert held.logprobs.grad.item() == 0.0
    assert terms.metrics["dual_clip_fraction"].value == 1.0
    for ratio, advantage in [(2.0, -1.0), (5.0, 1.0), (0.1, -1.0), (1.0, 1.0)]:
        same = policy_loss(one_token(ratio, advantage), cfg).total
        torch.testing.assert_close(same, policy_loss(one_token(ratio, advantage), off).total)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(0, 5), max_size=6), seed=st.integers(0, 1000))
def test_totals_match_the_plain_python_oracle(aggregation, kind, lengths, seed):
    cfg = replace(FULL, aggregation=aggregation, kl_estimator=kind)
    rows = random_rows(lengths, seed)
    terms = policy_loss(make(rows), cfg)
    total, denominator = oracles.ppo_total(rows, cfg)
    assert terms.total.item() == pytest.approx(total, rel=1e-4, abs=1e-4)
    assert terms.denominator == denominator


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(0, 4), min_size=2, max_size=6), cut=st.integers(0, 6), seed=st.integers(0, 99))
def test_micro_batches_add_up_to_the_batch(aggregation, lengths, cut, seed):
    cfg = replace(FULL, aggregation=aggregation)
    rows = random_rows(lengths, seed)
    whole_inputs = make(rows)
    whole = policy_loss(whole_inputs, cfg)
    whole.total.backward()
    parts_inputs = [make(rows[:cut]), make(rows[cut:])]
    parts = [policy_loss(inputs, cfg) for inputs in parts_inputs]
    for part in parts:
        part.total.backward()
    torch.testing.assert_close(sum(part.total for part in parts), whole.total, rtol=1e-4, atol=1e-5)
    assert sum(part.denominator for part in parts) == whole.denominator
    torch.testing.assert_close(torch.cat([p.logprobs.grad for p in parts_inputs]), whole_inputs.logprobs.grad)
    merged = merge(part.metrics for part in parts)
    assert merged.keys() == whole.metrics.keys()
    for name, metric in whole.metrics.items():
        assert merged[name].value == pytest.approx(metric.value, rel=1e-4, abs=1e-5, nan_ok=True), name
        assert merged[name].weight == metric.weight


@settings(max_examples=20, deadline=None)
@given(order=st.permutations(range(5)), aggregation=st.sampled_from(["token_mean", "sequence_mean"]))
def test_the_order_of_rows_does_not_matter(order, aggregation):
    cfg = replace(FULL, aggregation=aggregation)
    rows = random_rows([3, 0, 1, 4, 2])
    torch.testing.assert_close(
        policy_loss(make([rows[i] for i in order]), cfg).total, policy_loss(make(rows), cfg).total
    )


@settings(max_examples=25, deadline=None)
@given(
    log_ratio=st.floats(-200, 200, width=32),
    advantage=st.floats(-100, 100, width=32),
    ref=st.floats(-200, 0, width=32),
)
def test_loss_and_gradient_are_finite_however_far_apart_the_policies_are(log_ratio, advantage, ref):
    logprobs = torch.tensor([min(0.0, log_ratio)]).requires_grad_()
    inputs = PolicyLossInputs(
        logprobs,
        torch.tensor([min(0.0, -log_ratio)]),
        torch.tensor([advantage]),
        torch.tensor([1]),
        torch.tensor([1.0]),
        torch.tensor([ref]),
    )
    terms = policy_loss(inputs, replace(FULL, dual_clip=None))
    terms.total.backward()
    assert torch.isfinite(terms.total)
    assert torch.isfinite(logprobs.grad).all()
    assert all(math.isfinite(metric.value) for metric in terms.metrics.values())


@pytest.mark.parametrize("lengths", [[], [0, 0]])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_an_empty_batch_has_a_zero_total_with_a_graph_and_nan_metrics_without_weight(lengths, aggregation):
    inputs = make(random_rows(lengths))
    terms = policy_loss(inputs, replace(FULL, aggregation=aggregation))
    terms.total.backward()
    assert terms.total.item() == 0.0
    assert terms.denominator == 0.0
    assert inputs.logprobs.grad.shape == (0,)
    assert all(math.isnan(metric.value) and metric.weight == 0.0 for metric in terms.metrics.values())
    full = policy_loss(make(random_rows([2])), replace(FULL, aggregation=aggregation)).metrics
    assert merge([terms.metrics, full]) == full


def test_the_kl_coefficient_moves_the_gradient():
    def gradient(coef: float) -> torch.Tensor:
        inputs = make(random_rows([3, 2]))
        policy_loss(inputs, AlgorithmConfig(kl_coef=coef)).total.backward()
        return inputs.logprobs.grad

    inputs = make(random_rows([3, 2]))
    moved = gradient(0.5) - gradient(0.0)
    torch.testing.assert_close(moved, 0.5 * (inputs.logprobs - inputs.ref_logprobs).detach())


def test_the_entropy_coefficient_moves_the_gradient():
    inputs = make(random_rows([3, 2]))
    entropy = inputs.entropy.clone().requires_grad_()
    policy_loss(replace(inputs, entropy=entropy), AlgorithmConfig(entropy_coef=0.25)).total.backward()
    torch.testing.assert_close(entropy.grad, torch.full((5,), -0.25))


def test_kl_in_the_reward_stays_out_of_the_loss_but_is_measured():
    inputs = make(random_rows([3]))
    terms = policy_loss(inputs, AlgorithmConfig(kl_coef=0.5, kl_in="reward"))
    torch.testing.assert_close(terms.total, policy_loss(inputs, AlgorithmConfig()).total)
    assert terms.metrics["kl_ref"].value == pytest.approx((inputs.logprobs - inputs.ref_logprobs).mean().item())


def test_metrics_by_hand():
    inputs = PolicyLossInputs(
        logprobs=torch.log(torch.tensor([0.5, 0.3, 0.1])).requires_grad_(),
        old_logprobs=torch.log(torch.tensor([0.25, 0.3, 0.2])),
        advantages=torch.tensor([1.0, 1.0, 1.0]),
        lengths=torch.tensor([2, 0, 1]),
    )
    metrics = policy_loss(inputs, AlgorithmConfig()).metrics
    found = {name: metric.value for name, metric in metrics.items()}
    ratios = [2.0, 1.0, 0.5]
    assert found == {
        "policy_loss": pytest.approx(-(1.2 + 1.0 + 0.5) / 3),
        "clip_fraction": pytest.approx(1 / 3),
        "ratio_mean": pytest.approx(sum(ratios) / 3),
        "ratio_max": pytest.approx(2.0),
        "kl_old": pytest.approx(sum(r - 1 - math.log(r) for r in ratios) / 3),
    }
    assert {metrics[name].weight for name in found if name != "ratio_max"} == {3.0}


def test_a_users_loss_by_import_path_gets_aggregation_and_metrics():
    inputs = make(random_rows([2, 1]))
    cfg = AlgorithmConfig(loss="tests.algorithms.user_code:reinforce", aggregation="sequence_mean")
    terms = policy_loss(inputs, cfg)
    losses = -inputs.advantages * inputs.logprobs
    torch.testing.assert_close(terms.total, losses[:2].mean() + losses[2])
    assert terms.metrics["surprise"].value == pytest.approx(-inputs.logprobs.mean().item(), rel=1e-5)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"loss": "ppo_clp"}, "did you mean 'ppo_clip'"),
        ({"loss": "no_such_module:f"}, "cannot be imported"),
        ({"loss": "tests.algorithms.user_code:reinforc"}, "did you mean 'reinforce'"),
        ({"aggregation": "token_men"}, "did you mean 'token_mean'"),
        ({"dual_clip": 0.5}, "must be above 1"),
        ({"clip_low": -0.1}, "must lie in"),
    ],
)
def test_wrong_config_values_say_what_to_change(keys, message):
    with pytest.raises(ConfigError, match=message):
        policy_loss(make(random_rows([2])), AlgorithmConfig(**keys))


def test_a_users_function_may_be_named_with_a_dot_too():
    terms = policy_loss(make(random_rows([2])), AlgorithmConfig(loss="tests.algorithms.user_code.reinforce"))
    assert "surprise" in terms.metrics


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_on_a_gpu_as_on_the_cpu(aggregation):
    cfg = replace(FULL, aggregation=aggregation)
    here = make(random_rows([3, 0, 2]))
    moved = {name: value.detach().cuda() for name, value in vars(here).items() if name not in ("lengths", "logprobs")}
    there = PolicyLossInputs(logprobs=here.logprobs.detach().cuda().requires_grad_(), lengths=here.lengths, **moved)
    terms, expected = policy_loss(there, cfg), policy_loss(here, cfg)
    torch.testing.assert_close(terms.total.cpu(), expected.total)
    assert terms.metrics["kl_old"].value == pytest.approx(expected.metrics["kl_old"].value, rel=1e-4)


def test_missing_or_misshapen_tensors_are_named():
    inputs = make(random_rows([2]))
    with pytest.raises(ValueError, match="needs ref_logprobs"):
        policy_loss(replace(inputs, ref_logprobs=None), AlgorithmConfig(kl_coef=0.1))
    with pytest.raises(ValueError, match="needs entropy"):
        policy_loss(replace(inputs, entropy=None), AlgorithmConfig(entropy_coef=0.1))
    with pytest.raises(ValueError, match=r"advantages must be flat \[2\]"):
        policy_loss(replace(inputs, advantages=torch.zeros(3)), AlgorithmConfig())
    with pytest.raises(ValueError, match="user_code:misshapen must be flat"):
        policy_loss(inputs, AlgorithmConfig(loss="tests.algorithms.user_code:misshapen"))
