"""Reward: scores responses, whatever the scorer does."""

from __future__ import annotations

import logging

import torch

from rlinf.batch import Batch
from rlinf.config import RewardConfig
from rlinf.rewards import Sample, Scored, ScorerPool
from rlinf.worker import RankContext, Worker, stage

log = logging.getLogger("rlinf.reward")

ZERO_ALARM_SAMPLES = 128  # scores of 0 in a row after which it is said that nothing is learnt


class Reward(Worker):
    """Scores responses in subprocesses; a sample whose scorer fails gets ``error_score``, and is counted."""

    uses_device = False
    cfg: RewardConfig

    def __init__(self, cfg: RewardConfig, ctx: RankContext) -> None:
        super().__init__(cfg, ctx)
        self._pool: ScorerPool | None = None
        self._zeros = 0
        self._alarmed = False

    def setup(self) -> None:
        """Start the scorer's subprocesses.

        Raises:
            ConfigError: the scorer does not exist or cannot be loaded.
        """
        self._pool = ScorerPool(self.cfg)

    def teardown(self) -> None:
        """End the subprocesses."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    @stage(reads=("response", "answer", "question", "metadata"), writes=("rewards",))
    def score(self, batch: Batch) -> Batch:
        """Writes ``rewards``, float32 ``[n]``."""
        if self._pool is None:
            raise RuntimeError("Reward.setup() has not been called")
        samples = [
            Sample(*values)
            for values in zip(batch["response"], batch["answer"], batch["question"], batch["metadata"], strict=True)
        ]
        scored = self._pool.score(samples, self.ctx.report)
        rewards = torch.tensor(scored.scores, dtype=torch.float32)
        self._record(rewards, scored)
        self._warn(scored)
        return Batch({"rewards": rewards})

    def _record(self, rewards: torch.Tensor, scored: Scored) -> None:
        n = len(rewards)
        failures = scored.failures
        if n:
            mean, std = rewards.mean().item(), rewards.std(correction=0).item()
            self.metrics.mean("mean", mean, n)
            self.metrics.std("std", std, mean, n)
            self.metrics.min("min", rewards.min().item())
            self.metrics.max("max", rewards.max().item())
            self.metrics.mean("failed_fraction", failures.total() / n, n)
        self.metrics.sum("errors", failures.total() - failures["timeout"])
        self.metrics.sum("timeouts", failures["timeout"])

    def _warn(self, scored: Scored) -> None:
        n, failures = len(scored.scores), scored.failures
        if failures:
            counts = ", ".join(f"{count} {kind}" for kind, count in sorted(failures.items()))
            first = "; ".join(f"first {kind}: {message}" for kind, message in sorted(scored.first.items()))
            every = "every sample failed" if failures.total() == n else f"{failures.total()} of {n} samples failed"
            log.warning(
                "reward.scorer %s: %s (%s) and got %g. %s", self.cfg.scorer, every, counts, self.cfg.error_score, first
            )
        for score in scored.scores:
            self._zeros = self._zeros + 1 if score == 0 else 0
            self._alarmed = self._alarmed and score == 0
        if self._zeros >= ZERO_ALARM_SAMPLES and not self._alarmed:
            self._alarmed = True
            log.warning(
                "reward.scorer %s: the last %d samples all scored 0, so there is nothing to learn from; look at "
                "samples.jsonl: does the scorer find the answer in the responses, and is the task within reach?",
                self.cfg.scorer,
                self._zeros,
            )
