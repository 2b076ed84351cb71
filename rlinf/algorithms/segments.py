"""Sums and shifts within the rows of a flat ragged tensor (values end to end, with the rows' lengths)."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor


def row_index(lengths: Int64[Tensor, " n"]) -> Int64[Tensor, " T"]:
    """The row that each of the ``T = lengths.sum()`` values belongs to."""
    return torch.repeat_interleave(torch.arange(lengths.shape[0], device=lengths.device), lengths)


def row_sums(values: Float[Tensor, " T"], lengths: Int64[Tensor, " n"]) -> Float[Tensor, " n"]:
    """The sum of each row, in the values' own precision; 0 for an empty row."""
    return values.new_zeros(lengths.shape[0]).index_add(0, row_index(lengths), values)


def last_index(lengths: Int64[Tensor, " n"]) -> tuple[Int64[Tensor, " m"], Int64[Tensor, " m"]]:
    """The ``m`` rows that are not empty, and where in the flat tensor each of them ends."""
    rows = torch.nonzero(lengths, as_tuple=True)[0]
    return rows, lengths.cumsum(0)[rows] - 1


def remaining(lengths: Int64[Tensor, " n"]) -> Int64[Tensor, " T"]:
    """How many values follow each value within its row; 0 at the row's end."""
    ends = torch.repeat_interleave(lengths.cumsum(0), lengths)
    return ends - 1 - torch.arange(ends.shape[0], device=lengths.device)


def check_flat(lengths: Tensor, **flat: Tensor | None) -> None:
    """Check that flat tensors hold one value for each token that ``lengths`` counts (``None`` is passed over).

    Raises:
        ValueError: one of them has another shape, or lengths are not int64 ``[n]``.
    """
    if lengths.dtype != torch.int64 or lengths.dim() != 1:
        raise ValueError(f"lengths must be int64 [n], found {lengths.dtype} {tuple(lengths.shape)}")
    tokens = int(lengths.sum())
    for name, tensor in flat.items():
        if tensor is not None and tuple(tensor.shape) != (tokens,):
            raise ValueError(f"{name} must be flat [{tokens}] as lengths say, found {tuple(tensor.shape)}")
