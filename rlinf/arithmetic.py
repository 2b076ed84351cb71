"""Batch arithmetic and memory, on paper: what a config comes to, checked in one message before anything starts."""

from __future__ import annotations

from dataclasses import dataclass

from rlinf.config import TrainConfig
from rlinf.errors import ConfigError


@dataclass(frozen=True)
class BatchSizes:
    """What one training iteration works on.

    Attributes:
        prompts: prompts drawn.
        samples: responses, prompts x samples_per_prompt.
        mini_batch: samples to one optimiser step.
        optimizer_steps: optimiser steps of the iteration, over all epochs.
    """

    prompts: int
    samples: int
    mini_batch: int
    optimizer_steps: int

    def lines(self) -> list[str]:
        return [
            f"{self.prompts} prompts x {self.samples // self.prompts} samples = {self.samples} samples a step",
            f"{self.optimizer_steps} optimizer step(s) of {self.mini_batch} samples a step",
        ]


def batch_sizes(cfg: TrainConfig) -> BatchSizes:
    """Derive the sizes.

    Raises:
        ConfigError: every size that is not positive, and a mini-batch that does not divide, with the nearest that do.
    """
    sizes = {
        "data.prompts_per_step": cfg.data.prompts_per_step,
        "rollout.samples_per_prompt": cfg.rollout.samples_per_prompt,
        "rollout.max_new_tokens": cfg.rollout.max_new_tokens,
        "algorithm.epochs": cfg.algorithm.epochs,
        "steps": cfg.steps,
    }
    wrong = [f"{key}={value} must be at least 1" for key, value in sizes.items() if value < 1]
    for role in ("actor", "critic", "reference", "rollout"):
        section = getattr(cfg, role)
        wrong += [f"{role}.tp={section.tp} must be at least 1"] if section.tp < 1 else []
        wrong += [f"{role}.dp={section.dp} must be 0 (all devices) or more"] if section.dp < 0 else []
        budget = getattr(section, "tokens_per_micro_batch", 1)
        wrong += [f"{role}.tokens_per_micro_batch={budget} must be at least 1"] if budget < 1 else []
    for key in ("wait_s", "start_timeout_s", "stall_s", "stall_end_s"):
        seconds = getattr(cfg.cluster, key)
        wrong += [f"cluster.{key}={seconds:g} must be 0 or more seconds"] if not seconds >= 0 else []
    if not 0 <= cfg.algorithm.critic_warmup < max(cfg.steps, 1):
        wrong += [
            f"algorithm.critic_warmup={cfg.algorithm.critic_warmup} must be 0 or more, and below steps={cfg.steps}, "
            "so that the actor learns too"
        ]
    if wrong:
        raise ConfigError("; ".join(wrong))
    prompts, each = cfg.data.prompts_per_step, cfg.rollout.samples_per_prompt
    samples = prompts * each
    mini = cfg.algorithm.mini_batch_size or samples
    if samples % mini:
        fits = [n for n in range(1, samples + 1) if samples % n == 0]
        near = sorted(sorted(fits, key=lambda n: abs(n - mini))[:3])
        raise ConfigError(
            f"algorithm.mini_batch_size={mini} does not divide the {samples} samples of a step "
            f"(data.prompts_per_step={prompts} x rollout.samples_per_prompt={each} = {samples}): "
            f"the nearest sizes that do are {', '.join(map(str, near))}"
        )
    return BatchSizes(prompts, samples, mini, cfg.algorithm.epochs * samples // mini)


def training_bytes(parameters: int, ranks: int, dtype_bytes: int = 4) -> int:
    """Weights, gradients and two AdamW moments of one rank under FSDP, without activations."""
    return 4 * parameters * dtype_bytes // max(ranks, 1)
