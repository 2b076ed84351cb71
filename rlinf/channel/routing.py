"""Which data-parallel rank gets which rows. Pure, and a function of the rows alone.

A row's place follows from its id, never from who made it or when it came, so the parts of a row that come from
different producers meet at the same rank without an exchange.
"""

from __future__ import annotations

import torch

from rlinf.batch import GROUP, ROW, Batch
from rlinf.m2flow.stage import Unit


def route(batch: Batch, dp: int, unit: Unit) -> list[Batch]:
    """Split a batch for ``dp`` consumers: round-robin by row, or by group where groups may not be cut."""
    if dp == 1:
        return [batch]
    whole_groups = unit in (Unit.GROUP, Unit.TRAJECTORY) and GROUP in batch
    place = batch[GROUP if whole_groups else ROW] % dp
    return [batch.select(torch.nonzero(place == rank).flatten()) for rank in range(dp)]
