"""Advantages: the pure functions, then the maps that a workflow puts between its scores and its training stages.

Pure: `gae_advantages`, `grpo_advantages`, `whiten`. Maps: `gae(cfg)`, `grpo(cfg)`, or whichever ``cfg.advantage``
names, `advantage_map(cfg)`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from rlinf.algorithms.kl import estimator_for, kl_estimate, kl_place
from rlinf.algorithms.registry import resolve, unknown
from rlinf.algorithms.segments import check_flat, last_index, remaining, row_sums
from rlinf.batch import GROUP, Batch, Ragged
from rlinf.config import AlgorithmConfig
from rlinf.errors import ConfigError, DataError
from rlinf.m2flow.stage import StageSpec, Unit
from rlinf.metrics import Recorder

# Keeps a standard deviation that is all rounding from blowing advantages up; far below any real one.
_EPSILON = 1e-6


def gae_advantages(
    rewards: Float[Tensor, " T"],
    values: Float[Tensor, " T"],
    lengths: Int64[Tensor, " n"],
    gamma: float,
    lam: float,
    bootstrap: Float[Tensor, " n"] | None = None,
) -> tuple[Float[Tensor, " T"], Float[Tensor, " T"]]:
    """Generalised advantage estimation over rows of different lengths.

    Schulman et al. 2016, "High-Dimensional Continuous Control Using Generalized Advantage Estimation", equation 16:
    ``A_t = sum_l (gamma * lam) ** l * delta_{t + l}``, ``delta_t = r_t + gamma * V_{t + 1} - V_t``.

    Every row is over at its last token: the value after it is 0. That holds for a response cut off by its token limit
    too, since it was scored as it stands and nobody will go on with it; an environment that was merely stopped passes
    the value of its final observation as ``bootstrap`` (and 0 for rows that terminated).

    The sum is built by doubling its window, about ``log2(longest row)`` vector operations in float64, so that no row's
    result depends on which other rows are there.

    Args:
        rewards: reward at each token.
        values: value of the state before each token.
        lengths: tokens of each row; 0 is allowed.
        gamma: discount.
        lam: GAE's lambda; 1 is the Monte Carlo return less the value, 0 the one-step error.
        bootstrap: value of the state after each row's last token; ``None``: 0 everywhere.

    Returns:
        Advantages, and returns (advantages plus values), float32.

    Raises:
        ValueError: the shapes do not agree.
    """
    check_flat(lengths, rewards=rewards, values=values)
    value = values.double()
    left = remaining(lengths)
    after = torch.where(left >= 1, _shift(value, 1), 0.0)
    if bootstrap is not None:
        if bootstrap.shape != lengths.shape:
            raise ValueError(f"bootstrap must hold a value for each of {len(lengths)} rows: {tuple(bootstrap.shape)}")
        rows, ends = last_index(lengths)
        after[ends] = bootstrap.double()[rows]
    advantages = rewards.double() + gamma * after - value
    decay, window, longest = gamma * lam, 1, int(lengths.max()) if len(lengths) else 0
    while window < longest:
        # So far each sum covers `window` terms; the sum that starts `window` further on has the next ones.
        following = torch.where(left >= window, _shift(advantages, window), 0.0)
        advantages = advantages + decay**window * following
        window *= 2
    return advantages.float(), (advantages + value).float()


def grpo_advantages(rewards: Float[Tensor, " n"], group_ids: Int64[Tensor, " n"], std: bool) -> Float[Tensor, " n"]:
    """Each sample's reward less its group's mean, divided by the group's standard deviation if ``std``.

    Shao et al. 2024, "DeepSeekMath", section 4.1.2 (``std``); Liu et al. 2025, "Understanding R1-Zero-Like Training",
    section 3.2 (without). Samples belong together by id, wherever they stand. The deviation is the unbiased one. A
    group whose rewards are all the same teaches nothing, and so does a group of one: their advantages are exactly 0.

    Args:
        rewards: score of each sample.
        group_ids: the group of each sample.
        std: divide by the standard deviation.

    Raises:
        ValueError: the shapes do not agree.
    """
    if rewards.dim() != 1 or rewards.shape != group_ids.shape:
        raise ValueError(f"rewards and group_ids must be [n]: {tuple(rewards.shape)}, {tuple(group_ids.shape)}")
    group, counts = _groups(group_ids)
    reward = rewards.double()
    centred = reward - (reward.new_zeros(len(counts)).index_add(0, group, reward) / counts)[group]
    if std:
        squares = reward.new_zeros(len(counts)).index_add(0, group, centred.square())
        deviation = (squares / (counts - 1).clamp(min=1)).sqrt()
        centred = centred / (deviation[group] + _EPSILON)
    return torch.where(_flat_groups(reward, group, counts)[group], 0.0, centred).float()


def zero_variance_groups(rewards: Float[Tensor, " n"], group_ids: Int64[Tensor, " n"]) -> tuple[float, int]:
    """The share of groups whose rewards are all the same (a group of one is), and how many groups there are."""
    group, counts = _groups(group_ids)
    flat = _flat_groups(rewards, group, counts)
    return (float(flat.double().mean()) if len(flat) else float("nan")), len(flat)


def whiten(values: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """Shift to mean 0 and scale to (unbiased) standard deviation 1, over all values; zeros where all are the same."""
    if values.numel() < 2 or bool((values == values[0]).all()):
        return torch.zeros_like(values)
    exact = values.double()
    centred = exact - exact.mean()
    return (centred / (exact.std() + _EPSILON)).to(values.dtype)


def _shift(values: Tensor, by: int) -> Tensor:
    """The value ``by`` places further on; zeros past the end."""
    return torch.cat([values[by:], values.new_zeros(min(by, values.shape[0]))])


def _groups(group_ids: Tensor) -> tuple[Tensor, Tensor]:
    _, group, counts = torch.unique(group_ids, return_inverse=True, return_counts=True)
    return group, counts


def _flat_groups(rewards: Tensor, group: Tensor, counts: Tensor) -> Tensor:
    # By the extremes: a sum's rounding would give equal rewards a tiny variance.
    low = rewards.new_zeros(len(counts)).scatter_reduce(0, group, rewards, "amin", include_self=False)
    high = rewards.new_zeros(len(counts)).scatter_reduce(0, group, rewards, "amax", include_self=False)
    return low == high


class AdvantageMap(Protocol):
    """What `Workflow.map` takes: a callable that declares the fields it reads and writes."""

    __stage__: StageSpec

    def __call__(self, batch: Batch, metrics: Recorder) -> Batch: ...


class Gae:
    """The map of `gae_advantages`: the score at the last token of a response, KL penalties (if any) at every token.

    Reads ``rewards``, ``values``, ``response_ids``, and what the shaping of the rewards needs (see `_Shaping`). Writes
    ``advantages`` (whitened over the whole batch where ``cfg.normalize`` is ``batch``) and ``returns`` (advantages
    before whitening, plus values), Ragged float32 over response tokens.

    Raises:
        ConfigError: a value of the config is out of its range.
    """

    def __init__(self, cfg: AlgorithmConfig) -> None:
        for key in ("gamma", "lam"):
            if not 0.0 <= getattr(cfg, key) <= 1.0:
                raise ConfigError(f"algorithm.{key}={getattr(cfg, key)} must lie in [0, 1]")
        if cfg.normalize not in ("batch", "none"):
            raise unknown("algorithm.normalize", cfg.normalize, ("batch", "none"))
        self.cfg = cfg
        self._shaping = _Shaping(cfg)
        self.__stage__ = StageSpec(
            "gae",
            reads=("rewards", "values", "response_ids", *self._shaping.reads),
            writes=("advantages", "returns"),
            whole=cfg.normalize == "batch",
        )

    def __call__(self, batch: Batch, metrics: Recorder) -> Batch:
        values: Ragged = batch["values"]
        lengths = _lengths(batch, "values")
        scores, penalties = self._shaping(batch, metrics)
        rows, ends = last_index(lengths)
        rewards = -penalties
        rewards[ends] += scores[rows]
        advantages, returns = gae_advantages(rewards, values.values, lengths, self.cfg.gamma, self.cfg.lam)
        tokens = advantages.shape[0]
        metrics.mean("return_mean", _mean(returns), tokens)
        metrics.mean("advantage_mean", _mean(advantages), tokens)
        if self.cfg.normalize == "batch":
            # A standard deviation is of the whole batch or wrong: those of its parts do not add up to it.
            metrics.mean("advantage_std", float(advantages.double().std(correction=0)) if tokens else 0.0, tokens)
            advantages = whiten(advantages)
        metrics.mean("advantage_abs", _mean(advantages.abs()), tokens)
        return Batch({"advantages": Ragged(advantages, lengths), "returns": Ragged(returns, lengths)}, rows=batch.n)


class Grpo:
    """The map of `grpo_advantages`: each token of a response gets the response's advantage in its group.

    Reads ``rewards``, ``response_ids``, ``group_id``, and what the shaping of the rewards needs (see `_Shaping`).
    Writes ``advantages``, Ragged float32 over response tokens. Works group by group.

    Raises:
        ConfigError: a value of the config is out of its range, or would have no effect.
    """

    def __init__(self, cfg: AlgorithmConfig) -> None:
        for key in ("gamma", "lam"):
            if getattr(cfg, key) != 1.0:
                raise ConfigError(
                    f"algorithm.{key}={getattr(cfg, key)} has no effect on grpo, which gives all tokens of a response "
                    "one advantage; set it to 1, or algorithm.advantage=gae in a workflow with a critic"
                )
        self.cfg = cfg
        self._shaping = _Shaping(cfg)
        self.__stage__ = StageSpec(
            "grpo",
            reads=("rewards", "response_ids", GROUP, *self._shaping.reads),
            writes=("advantages",),
            unit=Unit.GROUP,
        )

    def __call__(self, batch: Batch, metrics: Recorder) -> Batch:
        lengths = _lengths(batch)
        scores, penalties = self._shaping(batch, metrics)
        rewards = scores - row_sums(penalties.double(), lengths).float()
        advantages = grpo_advantages(rewards, batch[GROUP], self.cfg.grpo_std)
        # On the raw rewards: a penalty of a thousandth would hide that a group's answers were all right or all wrong.
        metrics.mean("zero_variance_groups", *zero_variance_groups(batch["rewards"], batch[GROUP]))
        flat = torch.repeat_interleave(advantages, lengths)
        tokens = flat.shape[0]
        metrics.mean("advantage_mean", _mean(flat), tokens)
        metrics.mean("advantage_abs", _mean(flat.abs()), tokens)
        return Batch({"advantages": Ragged(flat, lengths)}, rows=batch.n)


def gae(cfg: AlgorithmConfig) -> AdvantageMap:
    """The map `Gae`, to be read in a workflow: ``flow.map(gae(cfg.algorithm), samples)``."""
    return Gae(cfg)


def grpo(cfg: AlgorithmConfig) -> AdvantageMap:
    """The map `Grpo`, to be read in a workflow: ``flow.map(grpo(cfg.algorithm), samples)``."""
    return Grpo(cfg)


ADVANTAGES: dict[str, Callable[[AlgorithmConfig], AdvantageMap]] = {"gae": gae, "grpo": grpo}


def advantage_map(cfg: AlgorithmConfig) -> AdvantageMap:
    """The map that ``cfg.advantage`` names: one of `ADVANTAGES`, or the import path of a function of the same form.

    Raises:
        ConfigError: an unknown name, or the function returns something without a stage declaration.
    """
    made = resolve("algorithm.advantage", cfg.advantage, ADVANTAGES)(cfg)
    if not callable(made) or not isinstance(getattr(made, "__stage__", None), StageSpec):
        raise ConfigError(
            f"algorithm.advantage={cfg.advantage!r} must return a function f(batch, metrics) declared with "
            f"@stage(reads=..., writes=...), found {made!r}"
        )
    return made


class _Shaping:
    """Rewards as training sees them: the score, less a penalty if cut off, less the KL to the reference at each token.

    ``truncated`` is read where ``missing_eos_penalty`` is above 0; ``ref_logprobs`` and ``rollout_logprobs`` where the
    KL goes into the reward (Ouyang et al. 2022, "Training language models to follow instructions", equation 2).
    """

    def __init__(self, cfg: AlgorithmConfig) -> None:
        if cfg.missing_eos_penalty < 0:
            raise ConfigError(f"algorithm.missing_eos_penalty={cfg.missing_eos_penalty} is subtracted; use 0 or more")
        self.penalty = cfg.missing_eos_penalty
        self.kl_coef = cfg.kl_coef if kl_place(cfg) == "reward" else 0.0
        self.kind = estimator_for(cfg)
        self.reads: tuple[str, ...] = ()
        if self.penalty:
            self.reads += ("truncated",)
        if self.kl_coef:
            self.reads += ("ref_logprobs", "rollout_logprobs")

    def __call__(self, batch: Batch, metrics: Recorder) -> tuple[Float[Tensor, " n"], Float[Tensor, " T"]]:
        """The score of each response, and the penalty of each token, both float32.

        Raises:
            DataError: a reward is not a number.
        """
        raw: Tensor = batch["rewards"]
        bad = torch.nonzero(~torch.isfinite(raw), as_tuple=True)[0].tolist()
        if bad:
            raise DataError(
                f"rewards must be finite: {len(bad)} of {len(raw)} are not, the first at row {bad[0]} of the batch "
                f"({float(raw[bad[0]])}); correct the scorer"
            )
        scores = raw.float()
        if self.penalty:
            scores = scores - self.penalty * batch["truncated"].float()
        lengths = _lengths(batch, *(("ref_logprobs", "rollout_logprobs") if self.kl_coef else ()))
        penalties = torch.zeros(int(lengths.sum()))
        if self.kl_coef:
            kl = kl_estimate(batch["rollout_logprobs"].values, batch["ref_logprobs"].values, self.kind).float()
            metrics.mean("kl", _mean(kl), kl.shape[0])
            penalties = self.kl_coef * kl
        shaped = scores.double() - row_sums(penalties.double(), lengths)
        metrics.mean("reward_shaped", _mean(shaped), batch.n)
        return scores, penalties


def _lengths(batch: Batch, *fields: str) -> Int64[Tensor, " n"]:
    """The responses' lengths, which these fields must have too."""
    lengths: Tensor = batch["response_ids"].lengths
    for name in fields:
        if not torch.equal(batch[name].lengths, lengths):
            raise ValueError(f"field {name!r} must have one value for each token of response_ids, row by row")
    return lengths


def _mean(values: Tensor) -> float:
    return float(values.double().mean())
