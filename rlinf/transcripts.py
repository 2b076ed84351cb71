"""A map that shows the first samples of each iteration as they are."""

from __future__ import annotations

from typing import Any

import torch

from rlinf.batch import GROUP, ROW, Batch
from rlinf.m2flow.stage import StageSpec
from rlinf.metrics import Recorder


class Transcripts:
    """Records ``count`` samples an iteration, in the order of their ids."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.__stage__ = StageSpec(
            "transcripts",
            reads=("response",),
            optional=("question", "answer", "rewards", "truncated", "weight_version"),
            whole=True,
        )

    def __call__(self, batch: Batch, metrics: Recorder) -> None:
        picked = batch.select(torch.arange(min(self.count, batch.n)))
        columns = {
            name: field.tolist() if isinstance(field, torch.Tensor) else field
            for name, field in picked.items()
            if name in (ROW, GROUP, *self.__stage__.optional, "response")
        }
        metrics.rows(_row(columns, i) for i in range(picked.n))


def _row(columns: dict[str, Any], i: int) -> dict[str, Any]:
    return {("reward" if name == "rewards" else name): values[i] for name, values in columns.items()}


def transcripts(count: int) -> Transcripts:
    """For ``flow.map``: keep ``count`` sample transcripts an iteration."""
    return Transcripts(count)
