"""Learning-rate schedule: the factor on the peak learning rate at each optimiser step."""

from __future__ import annotations

import math
from collections.abc import Callable

from rlinf.algorithms.registry import unknown
from rlinf.config import OptimizerConfig
from rlinf.errors import ConfigError

# Progress in [0, 1] after the warm-up -> share of the way from the peak down to the floor that is still left.
_DECAY: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    # Loshchilov and Hutter 2017, "SGDR", equation 5, one cycle.
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}


def lr_factor(step: int, cfg: OptimizerConfig) -> float:
    """The factor on ``cfg.lr`` for the ``step``-th optimiser step, counted from 0.

    Steps ``0 .. warmup_steps - 1`` rise linearly, ``(step + 1) / warmup_steps``: the first step already trains, and
    the last of them runs at the peak. From step ``warmup_steps`` (factor 1) the schedule falls to ``min_lr_ratio``,
    which it reaches at step ``total_steps`` and keeps. ``total_steps`` counts the warm-up.

    The factor depends on nothing but ``step``, so that a resumed run needs no scheduler state beside the step.

    Raises:
        ConfigError: the schedule is unknown, or its numbers contradict one another.
        ValueError: ``step`` is negative.
    """
    if step < 0:
        raise ValueError(f"optimiser steps are counted from 0, found {step}")
    if cfg.schedule not in _DECAY:
        raise unknown("optimizer.schedule", cfg.schedule, _DECAY)
    if not 0.0 <= cfg.min_lr_ratio <= 1.0:
        raise ConfigError(f"optimizer.min_lr_ratio={cfg.min_lr_ratio} must lie in [0, 1]: it is a share of lr")
    if cfg.warmup_steps < 0:
        raise ConfigError(f"optimizer.warmup_steps={cfg.warmup_steps} must be 0 (no warm-up) or more")
    if cfg.schedule != "constant":
        _check_span(cfg)

    if step < cfg.warmup_steps:
        return (step + 1) / cfg.warmup_steps
    if cfg.schedule == "constant":
        return 1.0
    span = cfg.total_steps - cfg.warmup_steps
    progress = min((step - cfg.warmup_steps) / span, 1.0) if span else 1.0
    return cfg.min_lr_ratio + (1.0 - cfg.min_lr_ratio) * _DECAY[cfg.schedule](progress)


def _check_span(cfg: OptimizerConfig) -> None:
    if cfg.total_steps <= 0:
        raise ConfigError(
            f"optimizer.schedule={cfg.schedule} needs optimizer.total_steps above 0, found {cfg.total_steps}; "
            "set it to the number of optimiser steps of the run"
        )
    if cfg.warmup_steps > cfg.total_steps:
        raise ConfigError(
            f"optimizer.warmup_steps={cfg.warmup_steps} is more than optimizer.total_steps={cfg.total_steps}, which "
            "counts the warm-up; lower the first or raise the second"
        )
