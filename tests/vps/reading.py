"""A reader of publications that wants everything, whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlinf.vps.publication import Publication, joined
from rlinf.vps.pull import Pull, whole_layout


def read(publications: Sequence[Publication]) -> dict[str, torch.Tensor]:
    """Every tensor by name; what nobody published stays not a number."""
    source = joined(publications)
    tensors = {t.name: torch.full(t.shape, float("nan")).to(getattr(torch, t.dtype)) for t in source.space.tensors}
    pull = Pull(source, whole_layout(source.space, tensors))
    buffers = [publication.buffers() for publication in publications]
    targets = {number: tensor.view(-1) for number, tensor in enumerate(tensors.values())}
    for tensor in pull.tensors:
        pull.run(buffers, targets, tensor)
    return tensors
