import math

import pytest
import torch

from rlinf.algorithms.kl import estimator_for, kl_estimate, kl_loss, kl_place
from rlinf.config import AlgorithmConfig
from rlinf.errors import ConfigError

KINDS = ["k1", "k2", "k3"]


def categorical(seed: int, vocabulary: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(vocabulary, generator=generator, dtype=torch.float64).requires_grad_()
    reference = torch.randn(vocabulary, generator=generator, dtype=torch.float64).log_softmax(-1)
    return logits, reference


def exact_kl(logits: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    logp = logits.log_softmax(-1)
    return (logp.exp() * (logp - reference)).sum()


def expected_gradient(logits: torch.Tensor, per_token) -> torch.Tensor:
    """The gradient that sampling would give on average: summed over the vocabulary, the sampling itself held fixed."""
    logp = logits.log_softmax(-1)
    (gradient,) = torch.autograd.grad((logp.detach().exp() * per_token(logp)).sum(), logits)
    return gradient


def test_values_by_hand():
    logprobs, reference = torch.log(torch.tensor([0.5])), torch.log(torch.tensor([0.25]))
    d = math.log(2)
    assert kl_estimate(logprobs, reference, "k1").item() == pytest.approx(d)
    assert kl_estimate(logprobs, reference, "k2").item() == pytest.approx(d * d / 2)
    assert kl_estimate(logprobs, reference, "k3").item() == pytest.approx(0.5 - 1 + d)


@pytest.mark.parametrize("kind", ["k1", "k3"])
@pytest.mark.parametrize("seed", range(3))
def test_k1_and_k3_values_are_unbiased(kind, seed):
    logits, reference = categorical(seed)
    logp = logits.log_softmax(-1).detach()
    assert (logp.exp() * kl_estimate(logp, reference, kind)).sum().item() == pytest.approx(
        exact_kl(logits, reference).item()
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_the_loss_has_the_gradient_of_the_exact_kl_whatever_its_value(kind, seed):
    logits, reference = categorical(seed)
    (expected,) = torch.autograd.grad(exact_kl(logits, reference), logits)
    torch.testing.assert_close(expected_gradient(logits, lambda p: kl_loss(p, reference, kind)), expected)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_differentiating_the_estimators_themselves_is_wrong(kind):
    """The mistake that the loss avoids is real: k1's gradient vanishes, k3's is that of the KL the other way round."""
    logits, reference = categorical(0)
    naive = expected_gradient(logits, lambda p: kl_estimate(p, reference, kind))
    if kind == "k1":
        torch.testing.assert_close(naive, torch.zeros_like(naive))
    else:
        reverse = (reference.exp() * (reference - logits.log_softmax(-1))).sum()
        torch.testing.assert_close(naive, torch.autograd.grad(reverse, logits)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_has_the_value_of_the_estimator(kind):
    logprobs, reference = -torch.rand(9).requires_grad_(), -torch.rand(9)
    torch.testing.assert_close(kl_loss(logprobs, reference, kind), kl_estimate(logprobs, reference, kind))


def test_no_gradient_reaches_the_reference():
    reference = (-torch.rand(3)).requires_grad_()
    kl_loss((-torch.rand(3)).requires_grad_(), reference, "k2").sum().backward()
    assert reference.grad is None


@pytest.mark.parametrize("kind", KINDS)
def test_far_apart_policies_stay_finite(kind):
    logprobs = torch.tensor([-300.0, -0.0]).requires_grad_()
    loss = kl_loss(logprobs, torch.tensor([-0.0, -300.0]), kind)
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert torch.isfinite(logprobs.grad).all()


def test_auto_is_k1_in_the_reward_and_k3_in_the_loss():
    assert estimator_for(AlgorithmConfig(kl_in="reward")) == "k1"
    assert estimator_for(AlgorithmConfig(kl_in="loss")) == "k3"
    assert estimator_for(AlgorithmConfig(kl_in="reward", kl_estimator="k2")) == "k2"


def test_unknown_values_name_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'k3'"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k33")
    with pytest.raises(ConfigError, match="did you mean 'reward'"):
        kl_place(AlgorithmConfig(kl_in="rewards", kl_coef=0.1))
    with pytest.raises(ConfigError, match="use 0 or more"):
        kl_place(AlgorithmConfig(kl_coef=-0.1))
