"""Boxes from flat buffers to flat buffers: strided, cast on the way, as few and as wide copies as can be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rlinf.vps.layout import Pieces
from rlinf.vps.plan import Moves, locate


@dataclass(frozen=True)
class Copy:
    """One box, as it lies on both sides.

    Attributes:
        source, target: buffers.
        read, write: offset and strides, in elements.
        size: of the box.
    """

    source: int
    read: tuple[int, tuple[int, ...]]
    target: int
    write: tuple[int, tuple[int, ...]]
    size: tuple[int, ...]


def copies(moves: Moves, there: Pieces, here: Pieces) -> list[Copy]:
    """Copies that carry out moves between the pieces of one rank and those of another (or the same one).

    A box that the target holds in several buffers is copied to each.
    """
    if not len(moves):
        return []
    source, target = locate(there, moves), locate(here, moves)
    first = np.searchsorted(source.move, np.arange(len(moves)))
    found = []
    for row, move in enumerate(target.move.tolist()):
        at = int(first[move])
        sides = (source.stride[at], target.stride[row], moves.size[move])
        read, write, size = _merged(*(side.tolist() for side in sides))
        found.append(
            Copy(
                int(source.buffer[at]),
                (int(source.offset[at]), read),
                int(target.buffer[row]),
                (int(target.offset[row]), write),
                size,
            )
        )
    return found


def _merged(
    read: Sequence[int], write: Sequence[int], size: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The same with dimensions that follow on one another, on both sides, made one; those of size 1 go."""
    found: list[tuple[int, int, int]] = []
    for r, w, n in zip(read, write, size, strict=True):
        if n == 1:
            continue
        if found and found[-1][0] == r * n and found[-1][1] == w * n:
            found[-1] = (r, w, found[-1][2] * n)
        else:
            found.append((r, w, n))
    found = found or [(1, 1, 1)]
    return tuple(f[0] for f in found), tuple(f[1] for f in found), tuple(f[2] for f in found)


@torch.no_grad()
def run(copy: Copy, source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy one box from a flat buffer to another, on whatever devices, casting where dtypes differ."""
    (read, from_), (write, into) = copy.read, copy.write
    if len(copy.size) > 1 and from_[-1] == into[-1] == 1 and _plain(source, target):
        np.copyto(_rows(target, copy.size, write, into), _rows(source, copy.size, read, from_))
        return
    reads = source.as_strided(copy.size, from_, source.storage_offset() + read)
    # Between GPUs the stream keeps the order. To the host it would not: what is read there must have arrived.
    between_gpus = source.is_cuda and target.is_cuda
    target.as_strided(copy.size, into, target.storage_offset() + write).copy_(reads, non_blocking=between_gpus)


def _plain(source: torch.Tensor, target: torch.Tensor) -> bool:
    return source.dtype == target.dtype and source.device.type == target.device.type == "cpu"


def _rows(flat: torch.Tensor, size: Sequence[int], offset: int, stride: Sequence[int]) -> np.ndarray:
    """A box as an array whose elements are its rows: each is then copied by one memcpy, which beats a strided loop."""
    width = flat.element_size()
    return np.ndarray(
        size[:-1],
        np.dtype((np.void, size[-1] * width)),
        flat.detach().view(torch.uint8).numpy(),
        offset * width,
        [step * width for step in stride[:-1]],
    )
