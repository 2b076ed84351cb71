"""A model with its optimiser, and what one optimiser step is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rlinf.algorithms.schedule import lr_factor
from rlinf.batch import Batch
from rlinf.config import OptimizerConfig
from rlinf.models.heads import PolicyModel, ValueModel
from rlinf.models.packed import Packed
from rlinf.training.collective import Ranks
from rlinf.training.grad_norm import clip_gradients

Part = tuple[Batch, Sequence[Packed]]
"""Rows, and the micro-batches of them that count."""

LossFn = Callable[[Batch, Packed], tuple[torch.Tensor, float]]
"""Loss of a micro-batch of some rows: the sum over its tokens, and what it adds to the denominator."""


@dataclass(frozen=True)
class StepReport:
    """What an optimiser step did.

    Attributes:
        grad_norm: global norm before clipping.
        lr: learning rate of this step.
        skipped: the weights were left as they were, for the norm was not finite or there was nothing to learn from.
        denominator: of all ranks.
    """

    grad_norm: float
    lr: float
    skipped: bool
    denominator: float


class Trainer:
    """Steps a model's weights.

    A step sums losses over micro-batches and divides the gradient once, by the denominator of all micro-batches of
    all ranks: one micro-batch of 8 samples, 8 of one, and two ranks with 4 each are the same step.

    Attributes:
        model: `PolicyModel` or `ValueModel`, spread over the mesh.
        optimizer: AdamW; its state is there from the start, so that a checkpoint always has the same shape.
        steps: optimiser steps attempted; the clock of the learning-rate schedule.
    """

    def __init__(self, model: PolicyModel | ValueModel, cfg: OptimizerConfig, ranks: Ranks) -> None:
        self.model = model
        self.cfg = cfg
        self.ranks = ranks
        self.steps = 0
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        lr_factor(0, cfg)  # a wrong schedule is an error now, not after the first rollout
        self.optimizer = torch.optim.AdamW(
            _by_mesh(self.parameters),
            lr=cfg.lr,
            betas=(cfg.betas[0], cfg.betas[1]),
            eps=cfg.eps,
            weight_decay=cfg.weight_decay,
            fused=True,
        )
        for parameter in self.parameters:
            self.optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            }

    def step(
        self,
        parts: Iterable[Part],
        loss: LossFn,
        dummy: Packed,
        before: Callable[[], None] | None = None,
    ) -> StepReport:
        """One optimiser step over the micro-batches of all ranks. A collective.

        Args:
            parts: this rank's, as they come; equally many on all ranks, with any number of micro-batches, none too.
            loss: called once for each micro-batch.
            dummy: predicts nothing; run, with no weight, where another rank has more micro-batches.
            before: called between the last backward pass and the optimiser; what it raises stops the step.
        """
        self.optimizer.zero_grad(set_to_none=True)
        own = 0.0
        for batch, micro_batches in parts:
            count = int(self.ranks.max([len(micro_batches)])[0])
            for i in range(count):
                real = i < len(micro_batches)
                total, denominator = loss(batch, micro_batches[i] if real else dummy)
                # FSDP averages gradients over dp where the sum is wanted.
                (total * (self.ranks.dp if real else 0)).backward()
                own += denominator if real else 0.0
        (denominator,) = self.ranks.sum([own])
        if before is not None:
            before()
        lr = self.cfg.lr * lr_factor(self.steps, self.cfg)
        self.steps += 1
        norm = 0.0
        skipped = denominator == 0
        if not skipped:
            norm = clip_gradients(self.parameters, 1.0 / denominator, self.cfg.max_grad_norm)
            skipped = not math.isfinite(norm)
        if not skipped:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return StepReport(norm, lr, skipped, denominator)

    def nbytes(self) -> int:
        """Bytes of weights and optimiser state on this rank."""
        moments = [tensor for state in self.optimizer.state.values() for tensor in state.values()]
        return module_bytes(self.model) + sum(_local_bytes(tensor) for tensor in moments)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Weights, buffers, gradients where there are any, and optimiser state."""
        yield from self.model.parameters()
        yield from self.model.buffers()
        yield from (parameter.grad for parameter in self.parameters if parameter.grad is not None)
        for state in self.optimizer.state.values():
            yield from state.values()


def _by_mesh(parameters: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    """Parameter groups that a fused kernel can take whole: it mixes neither plain tensors with DTensors, nor meshes."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return [{"params": members} for members in groups.values()]


def module_bytes(module: nn.Module) -> int:
    """Bytes of a module's parameters and buffers on this rank."""
    return sum(_local_bytes(tensor) for tensor in [*module.parameters(), *module.buffers()])


def _local_bytes(tensor: torch.Tensor) -> int:
    local = getattr(tensor, "_local_tensor", tensor)
    return local.numel() * local.element_size()
