"""Actor: the policy in training."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch

from rlinf.algorithms.kl import kl_place
from rlinf.algorithms.losses import PolicyLossInputs, policy_loss
from rlinf.batch import Batch
from rlinf.config import ActorConfig
from rlinf.errors import ConfigError, RlinfError
from rlinf.models.load import autocast, load_policy
from rlinf.models.packed import Packed
from rlinf.models.source import resolve
from rlinf.training.collective import Ranks
from rlinf.training.runtime import prepare, record
from rlinf.training.scoring import score_rows
from rlinf.training.state import named_tensors
from rlinf.training.trainer import LossFn, Trainer
from rlinf.training.weights import check_names, export
from rlinf.vps.publication import Publication, Publisher, shares_of, space_of_tensors
from rlinf.worker import stage
from rlinf.workers.trained import TrainedWorker


def _train_reads(cfg: ActorConfig) -> tuple[str, ...]:
    fields = ("prompt_ids", "response_ids", "advantages", "rollout_logprobs")
    return (*fields, "ref_logprobs") if kl_place(cfg.algorithm) == "loss" else fields


def _critic_warmup(cfg: ActorConfig) -> int:
    return cfg.algorithm.critic_warmup


class Actor(TrainedWorker):
    """A causal language model trained with a policy loss."""

    cfg: ActorConfig

    def setup(self) -> None:
        """Load the model and make its optimiser.

        Raises:
            ConfigError: the temperature, or the learning-rate schedule, is wrong.
            ModelError: the model cannot be loaded, spread, or sent under the names that it came with.
        """
        if not self.cfg.temperature > 0:
            raise ConfigError(
                f"actor.temperature={self.cfg.temperature}: training needs samples from a distribution, above 0"
            )
        self.version = 0
        self._publishers: dict[tuple[str, int], Publisher] = {}
        self.ranks = prepare(self.ctx)
        self.source = resolve(self.cfg.model)
        self.model = load_policy(self.source, self.cfg.model, self.ctx.device, self.ranks.mesh)
        check_names(self.model.lm, self.source)
        self.named = self.model.lm
        self.trainer = Trainer(self.model, self.cfg.optimizer, self.ranks)

    @stage(reads=("prompt_ids", "response_ids"), writes=("old_logprobs",))
    def logprobs(self, batch: Batch) -> Batch:
        """Log-probabilities of the responses under the weights as they are: ``old_logprobs``."""
        values = score_rows(
            self.model,
            lambda packed: self._forward(packed)[0],
            batch,
            self.cfg.tokens_per_micro_batch,
            self.ranks,
            self.ctx.report,
        )
        return Batch({"old_logprobs": values})

    @stage(
        reads=_train_reads,
        optional=("old_logprobs", "weight_version"),
        updates=True,
        starts=_critic_warmup,
        streams=True,
    )
    def train(self, rows: Batch | Iterable[Batch]) -> None:
        """One iteration: ``epochs`` passes over the samples of all ranks, an optimiser step for each minibatch.

        The policy that the ratio is taken against is ``old_logprobs`` where some stage writes them, else
        ``rollout_logprobs``.

        Raises:
            RlinfError: engine and trainer disagree about the log-probabilities of the same weights.
        """
        for index, parts in enumerate(self.optimiser_steps(rows)):
            parity = _Parity(self.ranks, self.version) if index == 0 else None
            check = None if parity is None else partial(self._check_parity, parity)
            self.record_step(self.trainer.step(parts, self._loss_with(parity), self.dummy, before=check))

    def publish_weights(self, target: str, inline: bool, slot: int = 0) -> Publication:
        tensors = named_tensors(self.model.lm)
        mesh = self.ranks.mesh
        space = space_of_tensors(tensors)
        shares = shares_of(space, tensors, self.ctx.rank, self.ctx.world_size, mesh)
        if (target, slot) not in self._publishers:
            self._publishers[target, slot] = Publisher(space, shares, self.ctx.rank, self.ranks.gather)
        return self._publishers[target, slot].publish(shares, inline=inline, verify=self.cfg.verify_sync)

    def export(self, directory: Path) -> None:
        """Write the model as a Hugging Face directory. A collective; rank 0 writes."""
        export(self.model.lm, self.source, directory, write=self.ctx.rank == 0)
        self.ranks.gather(None)  # nobody goes on before it is written

    def _forward(self, packed: Packed, training: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
        with autocast(self.cfg.model, self.ctx.device, sharded=self.ranks.dp > 1):
            return self.model(
                packed, self.cfg.temperature, with_entropy=training, entropy_grad=self.cfg.algorithm.entropy_coef != 0
            )

    def _loss_with(self, parity: _Parity | None) -> LossFn:
        def loss(batch: Batch, packed: Packed) -> tuple[torch.Tensor, float]:
            logprobs, entropy = self._forward(packed, training=True)
            if parity is not None:
                parity.add(batch, packed, logprobs)

            def field(name: str) -> torch.Tensor:
                if not len(packed.rows):
                    return torch.zeros_like(logprobs)
                return batch[name].select(packed.rows).values.to(logprobs)

            terms = policy_loss(
                PolicyLossInputs(
                    logprobs=logprobs,
                    old_logprobs=field("old_logprobs" if "old_logprobs" in batch else "rollout_logprobs"),
                    advantages=field("advantages"),
                    lengths=packed.lengths,
                    entropy=entropy,
                    ref_logprobs=field("ref_logprobs") if "ref_logprobs" in _train_reads(self.cfg) else None,
                ),
                self.cfg.algorithm,
            )
            if self.ctx.tp_rank == 0:  # its peers have the same samples
                record(self.metrics, terms.metrics)
                self.metrics.sum("tokens", len(packed.targets))
            return terms.total, terms.denominator

        return loss

    def _check_parity(self, parity: _Parity) -> None:
        mean, largest = parity.result()
        self.metrics.last("parity_mean", mean)
        self.metrics.last("parity_max", largest)
        bound = self.cfg.parity_bound
        if parity.total_tokens and bound > 0 and not mean <= bound:
            raise RlinfError(
                f"engine and trainer disagree about the log-probabilities of the same weights (version "
                f"{self.version}): mean gap {mean:.4g}, largest {largest:.4g} over {parity.total_tokens} tokens, bound "
                f"{bound:.4g}. Look for weights that were not delivered, another dtype, or another temperature; or "
                "raise rollout.parity_bound"
            )


class _Parity:
    """How far the log-probabilities that came with the samples are from the trainer's own, in nats a token.

    Samples that other weights made are left out, where the samples say which.
    """

    def __init__(self, ranks: Ranks, version: int) -> None:
        self.ranks = ranks
        self.version = version
        self.gap = self.tokens = self.largest = 0.0
        self.total_tokens = 0

    @torch.no_grad()
    def add(self, batch: Batch, packed: Packed, logprobs: torch.Tensor) -> None:
        if not len(packed.rows):
            return
        gap = (batch["rollout_logprobs"].select(packed.rows).values - logprobs.cpu()).abs()
        if "weight_version" in batch:
            same = batch["weight_version"][packed.rows] == self.version
            gap = gap[torch.repeat_interleave(same, batch["response_ids"].lengths[packed.rows])]
        if len(gap):
            self.gap += gap.double().sum().item()
            self.tokens += len(gap)
            worst = gap.max().item()
            self.largest = worst if math.isnan(worst) else max(self.largest, worst)

    def result(self) -> tuple[float, float]:
        """Mean and largest over all ranks; NaN where no token counts. A collective."""
        gap, tokens = self.ranks.sum([self.gap, self.tokens])
        (largest,) = self.ranks.max([self.largest])
        self.total_tokens = int(tokens)
        return (gap / tokens, largest) if tokens else (math.nan, math.nan)
