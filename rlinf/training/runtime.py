"""What a rank sets up before it loads a model."""

from __future__ import annotations

import os

import torch

from rlinf.metrics import Metrics, Recorder, Reduction
from rlinf.training.collective import Ranks
from rlinf.worker import RankContext


def prepare(ctx: RankContext) -> Ranks:
    """Ask torch for what the context says, and give the rank's place among the others."""
    if ctx.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS refuses to be deterministic
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # finds bugs, costs time, changes no result
    return Ranks(ctx.mesh if ctx.world_size > 1 else None, ctx.device)


def record(recorder: Recorder, metrics: Metrics) -> None:
    """Hand metrics of a micro-batch to a recorder."""
    for name, metric in metrics.items():
        match metric.reduction:
            case Reduction.MEAN:
                recorder.mean(name, metric.value, metric.weight)
            case Reduction.STD:
                recorder.std(name, metric.value, metric.mean, metric.weight)
            case Reduction.SUM:
                recorder.sum(name, metric.value)
            case Reduction.MAX:
                recorder.max(name, metric.value)
            case Reduction.MIN:
                recorder.min(name, metric.value)
            case Reduction.LAST:
                recorder.last(name, metric.value)
