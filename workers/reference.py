"""Reference: the frozen policy that the KL penalty is taken against."""

from __future__ import annotations

from functools import cached_property

import torch

from rlinf.batch import Batch
from rlinf.config import ReferenceConfig
from rlinf.errors import ConfigError
from rlinf.models.load import autocast, load_policy
from rlinf.models.packed import Packed
from rlinf.models.source import resolve
from rlinf.swap import Swap, store_for
from rlinf.training.runtime import prepare
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

    @cached_property
    def swap(self) -> Swap:
        tensors = [*self.model.parameters(), *self.model.buffers()]
        return Swap(lambda: tensors, store_for(self.ctx.device, self.ctx.offload_dir))

    def onload(self) -> None:
        self.swap.on()

    def offload(self) -> None:
        self.swap.off()

    def nbytes(self) -> int:
        return module_bytes(self.model)

    def _forward(self, packed: Packed) -> torch.Tensor:
        with autocast(self.cfg.model, self.ctx.device, sharded=self.ranks.dp > 1):
            return self.model(packed, self.cfg.temperature)[0]
