"""Critic: values of the states that a response goes through, for GAE."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from rlinf.algorithms.value import ReturnMoments, value_loss
from rlinf.batch import Batch
from rlinf.config import CriticConfig
from rlinf.models.load import autocast, load_value
from rlinf.models.packed import Packed
from rlinf.models.source import resolve
from rlinf.training.runtime import prepare, record
from rlinf.training.scoring import score_rows
from rlinf.training.trainer import Trainer
from rlinf.worker import stage
from rlinf.workers.trained import TrainedWorker


class Critic(TrainedWorker):
    """A backbone with a scalar head, trained on returns."""

    cfg: CriticConfig

    def setup(self) -> None:
        """Load the backbone, put a head on it, and make its optimiser.

        Raises:
            ConfigError: the learning-rate schedule is wrong.
            ModelError: the model cannot be loaded or spread.
        """
        self.version = 0
        self.ranks = prepare(self.ctx)
        self.model = load_value(resolve(self.cfg.model), self.cfg.model, self.ctx.device, self.ranks.mesh)
        self.named = self.model
        self.trainer = Trainer(self.model, self.cfg.optimizer, self.ranks)

    @stage(reads=("prompt_ids", "response_ids"), writes=("values",))
    def values(self, batch: Batch) -> Batch:
        """Value of the state before each response token."""
        budget = self.cfg.tokens_per_micro_batch
        return Batch({"values": score_rows(self.model, self._forward, batch, budget, self.ranks, self.ctx.report)})

    @stage(reads=("prompt_ids", "response_ids", "values", "returns"), updates=True, streams=True)
    def train(self, rows: Batch | Iterable[Batch]) -> None:
        """One iteration: ``epochs`` passes over the samples of all ranks, an optimiser step for each minibatch."""
        moments = ReturnMoments()

        def seen(batches: Iterable[Batch]) -> Iterator[Batch]:
            nonlocal moments
            for batch in batches:
                if batch.n:
                    moments += ReturnMoments.of(batch["values"].values, batch["returns"].values)
                yield batch

        for parts in self.optimiser_steps(seen([rows] if isinstance(rows, Batch) else rows)):
            self.record_step(self.trainer.step(parts, self._loss, self.dummy))
        everyone = ReturnMoments.from_tensor(torch.tensor(self.ranks.sum(moments.as_tensor().tolist())))
        self.metrics.last("explained_variance", everyone.explained_variance())

    def _forward(self, packed: Packed) -> torch.Tensor:
        with autocast(self.cfg.model, self.ctx.device, sharded=self.ranks.dp > 1):
            return self.model(packed)

    def _loss(self, batch: Batch, packed: Packed) -> tuple[torch.Tensor, float]:
        values = self._forward(packed)

        def field(name: str) -> torch.Tensor:
            if not len(packed.rows):
                return torch.zeros_like(values)
            return batch[name].select(packed.rows).values.to(values)

        terms = value_loss(values, field("values"), field("returns"), packed.lengths, self.cfg.algorithm.value_clip)
        if self.ctx.tp_rank == 0:  # its peers have the same samples
            record(self.metrics, terms.metrics)
        return terms.total, terms.denominator
