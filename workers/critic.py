"""Critic: values of the states that a response goes through, for GAE."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rlinf.algorithms.value import ReturnMoments, value_loss
from rlinf.batch import ROW, Batch
from rlinf.config import CriticConfig
from rlinf.models.load import autocast, load_value
from rlinf.models.packed import Packed
from rlinf.models.source import resolve
from rlinf.training.minibatch import minibatches
from rlinf.training.runtime import free_cache, on_accelerator, prepare, record
from rlinf.training.scoring import cut, dummy, score_rows
from rlinf.training.state import load_training_state, training_state
from rlinf.training.trainer import Trainer
from rlinf.worker import Worker, stage


class Critic(Worker):
    """A backbone with a scalar head, trained on returns.

    Attributes:
        version: training iterations that the weights have seen.
    """

    collective = True
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
        self.trainer = Trainer(self.model, self.cfg.optimizer, self.ranks)

    @stage(reads=("prompt_ids", "response_ids"), writes=("values",))
    def values(self, batch: Batch) -> Batch:
        """Value of the state before each response token."""
        budget = self.cfg.tokens_per_micro_batch
        return Batch({"values": score_rows(self.model, self._forward, batch, budget, self.ranks, self.ctx.report)})

    @stage(reads=("prompt_ids", "response_ids", "values", "returns"), whole=True, updates=True)
    def train(self, batch: Batch) -> None:
        """One iteration: ``epochs`` passes over the samples of all ranks, an optimiser step for each minibatch."""
        algorithm = self.cfg.algorithm
        row_ids = batch[ROW].tolist() if batch.n else []
        place = {row: i for i, row in enumerate(row_ids)}
        everyone = self.ranks.gather_rows(row_ids)
        plan = [
            members
            for epoch in range(algorithm.epochs)
            for members in minibatches(
                everyone, algorithm.mini_batch_size, seed=self.ctx.seed, iteration=self.version, epoch=epoch
            )
        ]
        self._record_explained_variance(batch)
        skipped = 0
        for done, members in enumerate(plan):
            rows = [place[row] for row in members if row in place]
            cuts = cut(batch, rows, self.cfg.tokens_per_micro_batch, self.ctx.device)
            report = self.trainer.step(cuts, self._loss_of(batch), dummy(self.ctx.device))
            skipped += report.skipped
            self.metrics.mean("grad_norm", report.grad_norm)
            self.metrics.last("lr", report.lr)
            self.ctx.report(done + 1, len(plan))
        self.metrics.last("skipped_steps", skipped)
        self.version += 1

    def state(self) -> dict[str, Any]:
        return {"version": self.version, **training_state(self.trainer, self.model)}

    def load_state(self, state: dict[str, Any]) -> None:
        load_training_state(self.trainer, self.model, state, self.ctx.rank)
        self.version = int(state["version"])

    def onload(self) -> None:
        if on_accelerator(self.ctx):
            self.trainer.to(self.ctx.device)

    def offload(self) -> None:
        if on_accelerator(self.ctx):
            self.trainer.to("cpu")
            free_cache(self.ctx)

    def nbytes(self) -> int:
        return self.trainer.nbytes()

    def _forward(self, packed: Packed) -> torch.Tensor:
        with autocast(self.cfg.model, self.ctx.device, sharded=self.ranks.dp > 1):
            return self.model(packed)

    def _loss_of(self, batch: Batch) -> Callable[[Packed], tuple[torch.Tensor, float]]:
        def loss(packed: Packed) -> tuple[torch.Tensor, float]:
            values = self._forward(packed)

            def field(name: str) -> torch.Tensor:
                if not len(packed.rows):
                    return torch.zeros_like(values)
                return batch[name].select(packed.rows).values.to(values)

            terms = value_loss(values, field("values"), field("returns"), packed.lengths, self.cfg.algorithm.value_clip)
            if self.ctx.tp_rank == 0:  # its peers have the same samples
                record(self.metrics, terms.metrics)
            return terms.total, terms.denominator

        return loss

    def _record_explained_variance(self, batch: Batch) -> None:
        """Of the values that the advantages were made of, over all ranks."""
        own = ReturnMoments.of(batch["values"].values, batch["returns"].values) if batch.n else ReturnMoments()
        everyone = ReturnMoments.from_tensor(torch.tensor(self.ranks.sum(own.as_tensor().tolist())))
        self.metrics.last("explained_variance", everyone.explained_variance())
