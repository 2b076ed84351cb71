"""Which samples go to which optimiser step: a function of the seed and the samples' ids, not of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from rlinf.errors import ConfigError
from rlinf.seeding import derive


def minibatches(row_ids: Sequence[int], size: int, *, seed: int, iteration: int, epoch: int) -> list[list[int]]:
    """Cut the samples of all ranks into minibatches, in a random order that is the same on every rank.

    Args:
        row_ids: of all ranks, in any order; each once.
        size: samples to a minibatch; 0: all. The last minibatch holds what is left.
        seed: of the run.
        iteration: training iterations before this one.
        epoch: passes over these samples before this one.

    Returns:
        The row ids of each minibatch, ascending.

    Raises:
        ConfigError: the size is negative.
        ValueError: a row id occurs twice.
    """
    if size < 0:
        raise ConfigError(f"algorithm.mini_batch_size={size} must be 0 (the whole batch) or more")
    check_once(row_ids)
    ordered = sorted(row_ids)
    if not ordered:
        return []
    if size == 0 or size >= len(ordered):
        return [ordered]
    generator = torch.Generator().manual_seed(derive(seed, "minibatches", iteration, epoch))
    shuffled = [ordered[i] for i in torch.randperm(len(ordered), generator=generator).tolist()]
    return [sorted(shuffled[start : start + size]) for start in range(0, len(shuffled), size)]


def check_once(row_ids: Sequence[int]) -> None:
    """Each row id must occur once.

    Raises:
        ValueError: a row id occurs twice.
    """
    twice = [a for a, b in pairwise(sorted(row_ids)) if a == b]
    if twice:
        raise ValueError(
            f"{len(twice)} row ids occur more than once among the ranks of a batch, among them {twice[:8]}"
        )
