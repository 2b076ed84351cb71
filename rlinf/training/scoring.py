"""Rows of a batch through a model, micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from rlinf.batch import Batch, Ragged
from rlinf.models.heads import PolicyModel, ValueModel
from rlinf.models.packed import Packed, pack, pack_within
from rlinf.models.parallelize import reshard
from rlinf.training.collective import Ranks


def cut(batch: Batch, rows: Sequence[int], budget: int, device: str, share: bool) -> list[Packed]:
    """Micro-batches of these rows of a batch with ``prompt_ids`` and ``response_ids``, on the device."""
    if not rows:
        return []
    return [
        packed.to(device) for packed in pack_within(batch["prompt_ids"], batch["response_ids"], rows, budget, share)
    ]


def dummy(device: str) -> Packed:
    """A micro-batch that predicts nothing, for a rank that has run out of rows while others have not."""
    empty = Ragged.of([], torch.int64)
    return pack(empty, empty, []).to(device)


@torch.no_grad()
def score_rows(
    model: PolicyModel | ValueModel,
    forward: Callable[[Packed], torch.Tensor],
    batch: Batch,
    budget: int,
    ranks: Ranks,
    report: Callable[[float, float], None],
) -> Ragged:
    """One number for each response token of every row, without gradients. A collective.

    Args:
        model: what ``forward`` runs.
        forward: from a micro-batch to float32 ``[R]``.
        batch: ``prompt_ids`` and ``response_ids``; without rows it may lack both.
        budget: tokens in a micro-batch.
        ranks: of the group; each has rows of its own.
        report: progress in micro-batches.

    Returns:
        float32 on the CPU, shaped as ``response_ids``.
    """
    cuts = cut(batch, range(batch.n), budget, ranks.device, model.shares_prompts)
    lengths = batch["response_ids"].lengths if batch.n else torch.empty(0, dtype=torch.int64)
    values = torch.zeros(int(lengths.sum()), dtype=torch.float32)
    places = Ragged(torch.arange(len(values)), lengths)
    count = int(ranks.max([len(cuts)])[0])
    for i in range(count):
        if i < len(cuts):
            values[places.select(cuts[i].rows).values] = forward(cuts[i]).float().cpu()
        else:
            forward(dummy(ranks.device))
        report(i + 1, count)
    reshard(model)
    return Ragged(values, lengths)
