"""Policy and value losses over the response tokens of a micro-batch.

Every loss here is a *sum*. The caller divides it by a denominator that it adds up over all micro-batches and ranks of
one optimiser step, so that how a batch is cut never changes the gradient.

Read in this order: `PolicyLossInputs`, `policy_loss`, then `ppo_clip` (what a loss of your own must look like). The
critic's `value_loss` stands in `rlinf.algorithms.value`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from rlinf.algorithms.kl import MAX_LOG_RATIO, estimator_for, kl_estimate, kl_loss, kl_place
from rlinf.algorithms.registry import resolve, unknown
from rlinf.algorithms.segments import check_flat
from rlinf.algorithms.value import ReturnMoments, ValueLossTerms, value_loss
from rlinf.config import AlgorithmConfig
from rlinf.errors import ConfigError
from rlinf.metrics import Metric, Metrics, Reduction

__all__ = [
    "LOSSES",
    "PolicyLossInputs",
    "PolicyLossTerms",
    "ReturnMoments",
    "TokenLoss",
    "ValueLossTerms",
    "importance_ratio",
    "policy_loss",
    "ppo_clip",
    "value_loss",
]


@dataclass(frozen=True)
class PolicyLossInputs:
    """What a policy loss sees: flat float32 tensors over the ``T`` response tokens of ``n`` whole responses.

    Attributes:
        logprobs: log-probability of each sampled token under the policy in training; carries the graph.
        old_logprobs: the same under the policy at the start of this batch's updates.
        advantages: advantage of each token.
        lengths: tokens of each response; sums to ``T``; 0 is allowed.
        entropy: entropy of the policy at each position, in nats; needed where ``entropy_coef`` is not 0.
        ref_logprobs: log-probabilities under the reference; needed where the KL is part of the loss.
    """

    logprobs: Float[Tensor, " T"]
    old_logprobs: Float[Tensor, " T"]
    advantages: Float[Tensor, " T"]
    lengths: Int64[Tensor, " n"]
    entropy: Float[Tensor, " T"] | None = None
    ref_logprobs: Float[Tensor, " T"] | None = None


@dataclass(frozen=True)
class PolicyLossTerms:
    """The loss of one micro-batch.

    Attributes:
        total: sum of the weighted token losses, KL and entropy terms included. Divide by the global denominator.
        denominator: what this micro-batch adds to the global denominator: its tokens (``token_mean``) or its
            responses that are not empty (``sequence_mean``).
        metrics: means weighted by tokens (``policy_loss`` by the denominator: it is the objective itself). An empty
            micro-batch gives NaN with weight 0, and has no ``ratio_max``: there is no largest of nothing.
    """

    total: Float[Tensor, ""]
    denominator: float
    metrics: Metrics


TokenLoss = Callable[[PolicyLossInputs, AlgorithmConfig], tuple[Tensor, dict[str, Tensor]]]
"""A policy loss: from the inputs to the loss of each token ``[T]``, and named values ``[T]`` to report as means."""


def ppo_clip(inputs: PolicyLossInputs, cfg: AlgorithmConfig) -> tuple[Float[Tensor, " T"], dict[str, Tensor]]:
    """The clipped surrogate of PPO, with its bounds apart and an optional third one.

    - Schulman et al. 2017, "Proximal Policy Optimization Algorithms", equation 7, negated:
      ``max(-A * r, -A * clip(r, 1 - clip_low, 1 + clip_high))`` with ``r = pi / pi_old``.
    - Yu et al. 2025, "DAPO", section 3.1: ``clip_high`` larger than ``clip_low`` keeps exploration alive.
    - Ye et al. 2020, "Mastering Complex Control in MOBA Games", equation 5 (``dual_clip`` is c): where ``A < 0`` the
      loss is at most ``-c * A``, which bounds what one token with a large ratio can do.

    Raises:
        ConfigError: a clip bound is out of its range.
    """
    if not (0.0 <= cfg.clip_low <= 1.0 and cfg.clip_high >= 0.0):
        raise ConfigError(
            f"algorithm.clip_low={cfg.clip_low} must lie in [0, 1] and algorithm.clip_high={cfg.clip_high} be 0 or more"
        )
    if cfg.dual_clip is not None and cfg.dual_clip <= 1.0:
        raise ConfigError(f"algorithm.dual_clip={cfg.dual_clip} must be above 1 (3 is usual), or null for off")
    advantages = inputs.advantages
    ratio = importance_ratio(inputs)
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - cfg.clip_low, 1.0 + cfg.clip_high)
    losses = torch.maximum(plain, clipped)
    report = {"clip_fraction": (clipped > plain).float()}
    if cfg.dual_clip is not None:
        bound = -cfg.dual_clip * advantages
        beyond = (advantages < 0) & (losses > bound)
        losses = torch.where(beyond, bound, losses)
        report["dual_clip_fraction"] = beyond.float()
    return losses, report


LOSSES: dict[str, TokenLoss] = {"ppo_clip": ppo_clip}


def policy_loss(inputs: PolicyLossInputs, cfg: AlgorithmConfig) -> PolicyLossTerms:
    """The policy loss ``cfg.loss`` with the KL to the reference and the entropy bonus, summed over tokens.

    ``cfg.loss`` is a name in `LOSSES`, or the import path of a `TokenLoss`. With ``w`` = 1 (``token_mean``: Yu et al.
    2025, "DAPO", equation 8) or 1 / length of the response (``sequence_mean``: Shao et al. 2024, "DeepSeekMath",
    equation 3), the total is ``sum(w * (loss + kl_coef * kl - entropy_coef * entropy))``.

    Raises:
        ConfigError: an unknown loss, aggregation or estimator, or a value out of its range.
        ValueError: the tensors' shapes do not agree, or entropy or ref_logprobs is missing though the config needs it.
    """
    check_flat(
        inputs.lengths,
        logprobs=inputs.logprobs,
        old_logprobs=inputs.old_logprobs,
        advantages=inputs.advantages,
        entropy=inputs.entropy,
        ref_logprobs=inputs.ref_logprobs,
    )
    losses, report = resolve("algorithm.loss", cfg.loss, LOSSES)(inputs, cfg)
    check_flat(inputs.lengths, **{f"the losses of algorithm.loss={cfg.loss}": losses}, **report)
    weights, denominator = _weights(inputs.lengths.to(losses.device), cfg.aggregation)

    policy = (weights * losses).sum()
    total = policy
    if kl_place(cfg) == "loss":
        if inputs.ref_logprobs is None:
            raise ValueError(f"algorithm.kl_coef={cfg.kl_coef} in the loss needs ref_logprobs, found none")
        total = (
            total + cfg.kl_coef * (weights * kl_loss(inputs.logprobs, inputs.ref_logprobs, estimator_for(cfg))).sum()
        )
    if cfg.entropy_coef != 0.0:
        if inputs.entropy is None:
            raise ValueError(f"algorithm.entropy_coef={cfg.entropy_coef} needs entropy, found none")
        total = total - cfg.entropy_coef * (weights * inputs.entropy).sum()

    with torch.no_grad():
        metrics = _metrics(inputs, cfg, report)
        value = float(policy) / denominator if denominator else math.nan
        metrics["policy_loss"] = Metric(value, denominator)
    return PolicyLossTerms(total, denominator, metrics)


def importance_ratio(inputs: PolicyLossInputs) -> Float[Tensor, " T"]:
    """``pi / pi_old`` of each token, with its logarithm held within ``MAX_LOG_RATIO`` so that it stays finite."""
    return (inputs.logprobs - inputs.old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _weights(lengths: Int64[Tensor, " n"], aggregation: str) -> tuple[Float[Tensor, " T"], float]:
    if aggregation == "token_mean":
        tokens = int(lengths.sum())
        return torch.ones(tokens, device=lengths.device), float(tokens)
    if aggregation == "sequence_mean":
        # An empty response has no token to carry a weight, so its infinite weight is never repeated.
        return torch.repeat_interleave(1.0 / lengths, lengths), float((lengths > 0).sum())
    raise unknown("algorithm.aggregation", aggregation, ("sequence_mean", "token_mean"))


def _metrics(inputs: PolicyLossInputs, cfg: AlgorithmConfig, report: dict[str, Tensor]) -> Metrics:
    ratio = importance_ratio(inputs)
    means = {
        **report,
        "ratio_mean": ratio,
        # The tokens come from the old policy: this estimates KL(pi_old || pi).
        "kl_old": kl_estimate(inputs.old_logprobs, inputs.logprobs, "k3"),
    }
    if inputs.ref_logprobs is not None:
        means["kl_ref"] = kl_estimate(inputs.logprobs, inputs.ref_logprobs, estimator_for(cfg))
    if inputs.entropy is not None:
        means["entropy"] = inputs.entropy
    tokens = ratio.shape[0]
    if tokens == 0:
        return {name: Metric(math.nan, 0.0) for name in means}
    # One transfer from the device for all of them.
    *values, largest = torch.stack([*(m.double().mean() for m in means.values()), ratio.max().double()]).tolist()
    metrics = {name: Metric(value, float(tokens)) for name, value in zip(means, values, strict=True)}
    return {**metrics, "ratio_max": Metric(largest, 1.0, Reduction.MAX)}
