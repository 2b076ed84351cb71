"""Reference: the frozen policy that the KL penalty is taken against."""

from __future__ import annotations

import torch

from rlinf.batch import Batch
from rlinf.config import ReferenceConfig
from rlinf.errors import ConfigError
from rlinf.models.load import autocast, load_policy
from rlinf.models.packed import Packed
from rlinf.models.source import resolve
from rlinf.training.runtime import free_cache, on_accelerator, prepare
from rlinf.training.scoring import score_rows
from rlinf.training.trainer import module_bytes
from rlinf.worker import Worker, stage


class Reference(Worker):
    """A causal language model that is never trained."""

    collective = True
    cfg: ReferenceConfig

    def setup(self) -> None:
        """Load the model.

        Raises:
            ConfigError: the temperature is not above 0.
            ModelError: the model cannot be loaded or spread.
        """
        if not self.cfg.temperature > 0:
            raise ConfigError(f"reference.temperature={self.cfg.temperature} must be above 0, as the actor's")
        self.ranks = prepare(self.ctx)
        source = resolve(self.cfg.model)
        self.model = load_policy(source, self.cfg.model, self.ctx.device, self.ranks.mesh, trainable=False)

    @stage(reads=("prompt_ids", "response_ids"), writes=("ref_logprobs",))
    def logprobs(self, batch: Batch) -> Batch:
        """Log-probabilities of the responses under the reference: ``ref_logprobs``."""
        budget = self.cfg.tokens_per_micro_batch
        values = score_rows(self.model, self._forward, batch, budget, self.ranks, self.ctx.report)
        return Batch({"ref_logprobs": values})

    def onload(self) -> None:
        if on_accelerator(self.ctx):
            self.model.to(self.ctx.device)

    def offload(self) -> None:
        if on_accelerator(self.ctx):
            self.model.to("cpu")
            free_cache(self.ctx)

    def nbytes(self) -> int:
        return module_bytes(self.model)

    def _forward(self, packed: Packed) -> torch.Tensor:
        with autocast(self.cfg.model, self.ctx.device, sharded=self.ranks.dp > 1):
            return self.model(packed, self.cfg.temperature)[0]
