"""KL divergence to the reference policy: estimators of its value, and a loss with its gradient. The two differ.

Schulman 2020, "Approximating KL Divergence": for tokens sampled from the policy, with
``d = log pi(token) - log ref(token)``, three estimators of ``KL(pi || ref)``:

====  ====================  ==========================================
k1    ``d``                 unbiased, may be negative
k2    ``d ** 2 / 2``        biased, low variance
k3    ``exp(-d) - 1 + d``   unbiased, never negative, low variance
====  ====================  ==========================================

These are *values*. Differentiating one is another matter, because the tokens' distribution depends on the policy too:
in expectation the gradient of k1 is zero, that of k3 is the gradient of ``KL(ref || pi)``, the wrong way round, and
only that of k2 is the gradient of ``KL(pi || ref)`` (Tang and Munos 2025, "On a few pitfalls in KL divergence
gradient estimation for RL"). `kl_loss` therefore has the value that is asked for, and always k2's gradient.

Inside a *reward* the value is what counts, and a policy gradient goes over it: k1 is then the right one (as in
InstructGPT), since the expectation of its own gradient, which a reward leaves out, is zero.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from rlinf.algorithms.registry import unknown
from rlinf.config import AlgorithmConfig
from rlinf.errors import ConfigError

# exp(20) is 5e8: far outside every clip range and trust region, and finite in float32 after squaring.
MAX_LOG_RATIO = 20.0

_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda d: d,
    "k2": lambda d: 0.5 * d.square(),
    "k3": lambda d: torch.expm1((-d).clamp(max=MAX_LOG_RATIO)) + d,
}


def kl_estimate(logprobs: Float[Tensor, " T"], ref_logprobs: Float[Tensor, " T"], kind: str) -> Float[Tensor, " T"]:
    """Estimate ``KL(pi || ref)`` at each token, in nats, from tokens sampled from ``pi``.

    A value for rewards and metrics; do not differentiate it (see `kl_loss`).

    Args:
        logprobs: log-probability of the sampled token under the policy that sampled it.
        ref_logprobs: the same under the other policy.
        kind: ``k1``, ``k2`` or ``k3``.

    Raises:
        ConfigError: the estimator is unknown.
    """
    if kind not in _ESTIMATORS:
        raise unknown("algorithm.kl_estimator", kind, _ESTIMATORS)
    return _ESTIMATORS[kind](logprobs - ref_logprobs)


def kl_loss(logprobs: Float[Tensor, " T"], ref_logprobs: Float[Tensor, " T"], kind: str) -> Float[Tensor, " T"]:
    """A KL term for a loss: its value is that of `kl_estimate`, its gradient that of ``KL(pi || ref)``.

    The gradient with respect to ``logprobs`` is ``d = logprobs - ref_logprobs``, whatever ``kind`` is: for tokens
    sampled from the policy, ``E[d * grad log pi]`` is the gradient of the KL at each position. For tokens of an older
    policy (a later minibatch of the same batch) it is so only as far as the policies agree, as for every such term.

    Raises:
        ConfigError: the estimator is unknown.
    """
    reference = ref_logprobs.detach()
    current = logprobs.detach()
    value = kl_estimate(current, reference, kind)
    return value + (current - reference) * (logprobs - current)


def estimator_for(cfg: AlgorithmConfig) -> str:
    """The estimator that ``cfg.kl_estimator`` means: ``auto`` is k1 in the reward, k3 elsewhere."""
    if cfg.kl_estimator != "auto":
        if cfg.kl_estimator not in _ESTIMATORS:
            raise unknown("algorithm.kl_estimator", cfg.kl_estimator, (*_ESTIMATORS, "auto"))
        return cfg.kl_estimator
    return "k1" if cfg.kl_in == "reward" else "k3"


def kl_place(cfg: AlgorithmConfig) -> str | None:
    """Where the KL to the reference goes, ``loss`` or ``reward``; ``None`` when its coefficient is 0.

    Raises:
        ConfigError: ``cfg.kl_in`` is neither, or the coefficient is negative.
    """
    if cfg.kl_in not in ("loss", "reward"):
        raise unknown("algorithm.kl_in", cfg.kl_in, ("loss", "reward"))
    if cfg.kl_coef < 0:
        raise ConfigError(
            f"algorithm.kl_coef={cfg.kl_coef} would push the policy away from the reference; use 0 or more"
        )
    return cfg.kl_in if cfg.kl_coef > 0 else None
