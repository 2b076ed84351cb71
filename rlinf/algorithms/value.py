"""The critic's loss, and explained variance from sums that add up over micro-batches and ranks."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from rlinf.algorithms.segments import check_flat
from rlinf.errors import ConfigError
from rlinf.metrics import Metric, Metrics


@dataclass(frozen=True)
class ReturnMoments:
    """Sums over tokens of which explained variance is made. Add them up, over ranks too, before asking for it.

    A mean of explained variances is none: every rank has its own variance of returns.

    Attributes:
        count: tokens.
        returns: sum of the returns.
        returns_squared: sum of their squares.
        errors: sum of ``returns - values``.
        errors_squared: sum of their squares.
    """

    count: float = 0.0
    returns: float = 0.0
    returns_squared: float = 0.0
    errors: float = 0.0
    errors_squared: float = 0.0

    @staticmethod
    def of(values: Float[Tensor, " T"], returns: Float[Tensor, " T"]) -> ReturnMoments:
        target = returns.detach().double()
        error = target - values.detach().double()
        sums = torch.stack([target.sum(), target.square().sum(), error.sum(), error.square().sum()])
        return ReturnMoments(float(target.shape[0]), *sums.tolist())

    def __add__(self, other: ReturnMoments) -> ReturnMoments:
        return ReturnMoments(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def as_tensor(self) -> Float[Tensor, " 5"]:
        """Float64, for an all-reduce with the sum as its operation."""
        return torch.tensor(astuple(self), dtype=torch.float64)

    @staticmethod
    def from_tensor(sums: Float[Tensor, " 5"]) -> ReturnMoments:
        return ReturnMoments(*sums.tolist())

    def explained_variance(self) -> float:
        """``1 - Var(returns - values) / Var(returns)``: 1 is perfect, 0 is as good as a constant; NaN if undefined."""
        if self.count == 0:
            return math.nan
        variance = self.returns_squared / self.count - (self.returns / self.count) ** 2
        # Equal returns have no variance to explain; what is left of it then is rounding.
        if variance <= 1e-12 * self.returns_squared / self.count:
            return math.nan
        unexplained = self.errors_squared / self.count - (self.errors / self.count) ** 2
        return 1.0 - unexplained / variance


@dataclass(frozen=True)
class ValueLossTerms:
    """The critic's loss of one micro-batch.

    Attributes:
        total: sum of the token losses. Divide by the global denominator.
        denominator: tokens of this micro-batch.
        metrics: ``value_loss`` and ``value_clip_fraction``, means weighted by tokens.
        moments: sums for the explained variance of ``values``.
    """

    total: Float[Tensor, ""]
    denominator: float
    metrics: Metrics
    moments: ReturnMoments


def value_loss(
    values: Float[Tensor, " T"],
    old_values: Float[Tensor, " T"],
    returns: Float[Tensor, " T"],
    lengths: Int64[Tensor, " n"],
    clip: float,
) -> ValueLossTerms:
    """Half the squared error, clipped around the old values, summed over tokens.

    ``0.5 * max((v - R) ** 2, (v_old + clip(v - v_old, -clip, clip) - R) ** 2)``: Schulman et al.'s implementation of
    PPO (Engstrom et al. 2020, "Implementation Matters in Deep Policy Gradients", section 2, item 1).

    Args:
        values: the critic's values now; carries the graph.
        old_values: its values when the returns were made.
        returns: what they are fitted to.
        lengths: tokens of each response.
        clip: how far a value may move from the old one before it stops learning; 0: no clipping.

    Raises:
        ConfigError: clip is negative.
        ValueError: the tensors' shapes do not agree with ``lengths``.
    """
    if clip < 0:
        raise ConfigError(f"algorithm.value_clip={clip} must be 0 (off) or more")
    check_flat(lengths, values=values, old_values=old_values, returns=returns)
    plain = (values - returns).square()
    if clip > 0:
        held = old_values + (values - old_values).clamp(-clip, clip)
        clipped = (held - returns).square()
    else:
        clipped = plain
    total = 0.5 * torch.maximum(plain, clipped).sum()
    tokens = float(values.shape[0])
    if tokens:
        loss = float(total.detach()) / tokens
        fraction = float((clipped > plain).double().mean())
    else:
        loss = fraction = math.nan
    metrics = {"value_loss": Metric(loss, tokens), "value_clip_fraction": Metric(fraction, tokens)}
    return ValueLossTerms(total, tokens, metrics, ReturnMoments.of(values, returns))
