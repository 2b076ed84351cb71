"""A digest of state that does not depend on its layout: a sum over logical coordinates.

Every element adds ``bits * weight`` modulo 2**64, where the weight is a product of one odd random number for each of
its coordinates and one for its tensor. Ranks add up what they own, each coordinate being owned once, so the sum is the
same in every layout; and it changes when values are swapped, shifted, transposed, or put under another name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from rlinf.vps.geometry import disjoint
from rlinf.vps.layout import DTYPES, Layout, Pattern, Pieces
from rlinf.vps.space import Kind

Digests = dict[Kind, int]
Cell = tuple[int, int, tuple[int, ...], tuple[int, ...]]
"""(kind, tensor, start, size)."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_AT_ONCE = 2**20  # elements that are widened together, so that they stay in the cache
_MASK = (1 << 64) - 1


def owned(layout: Layout, rank: int) -> Pieces:
    """The boxes that a rank counts: of several holders the lowest rank does, once.

    Boxes lie where the rank's first buffer with them has them.
    """
    held = layout.of(rank).pieces
    mine: list[Pieces] = []
    known: dict[int, Pattern] = {}
    for kind, spread in layout.spread.items():
        rows = np.flatnonzero(held.kind == kind)
        seen: set[int] = set()
        for row in rows.tolist():
            tensor = int(held.tensor[row])
            if tensor in seen:
                continue
            seen.add(tensor)
            at = int(spread[tensor])
            if at not in known:
                known[at] = _counted(layout.patterns[at], rank)
            mine.append(_cut_out(held.take(rows[held.tensor[rows] == tensor]), known[at]))
    return Pieces.concat(mine) if mine else Pieces.empty(layout.space.ndim)


def _counted(pattern: Pattern, rank: int) -> Pattern:
    """The boxes of a pattern, cut until equal or disjoint, whose lowest holder is the rank."""
    cells = disjoint(pattern)
    order = np.lexsort((cells.rank, *cells.size.T, *cells.start.T))
    boxes = np.concatenate([cells.start, cells.size], axis=1)[order]
    first = np.append(True, (np.diff(boxes, axis=0) != 0).any(axis=1)) if len(boxes) else np.empty(0, bool)
    chosen = order[first]
    chosen = chosen[cells.rank[chosen] == rank]
    return Pattern(cells.rank[chosen], cells.start[chosen], cells.size[chosen])


def _cut_out(held: Pieces, boxes: Pattern) -> Pieces:
    """These boxes, each out of the first piece that has it."""
    inside = (held.start[None] <= boxes.start[:, None]) & (held.end[None] >= (boxes.start + boxes.size)[:, None])
    piece = inside.all(axis=2).argmax(axis=1)
    found = held.take(piece)
    shift = ((boxes.start - found.start) * found.stride).sum(axis=1)
    return Pieces(found.tensor, found.kind, boxes.start, boxes.size, found.buffer, found.offset + shift, found.stride)


@torch.no_grad()
def digest(
    layout: Layout, rank: int, buffers: Sequence[torch.Tensor], dtypes: Mapping[Kind, NDArray[np.int8]] | None = None
) -> Digests:
    """What one rank adds to the digest of each kind; sum over all ranks modulo 2**64 (`total`).

    Args:
        buffers: of the rank, flat, in the order of its layout.
        dtypes: kind -> of each tensor, the dtype (an index into `DTYPES`) in which values are counted, where they are
            cast on the way.
    """
    pieces = owned(layout, rank)
    found: Digests = dict.fromkeys(layout.spread, 0)
    for row in range(len(pieces)):
        kind, tensor = Kind(int(pieces.kind[row])), layout.space.tensors[int(pieces.tensor[row])]
        size, stride = pieces.size[row].tolist(), pieces.stride[row].tolist()
        buffer = buffers[int(pieces.buffer[row])]
        box = buffer.as_strided(size, stride, buffer.storage_offset() + int(pieces.offset[row]))
        counted = (dtypes or {}).get(kind)
        wanted = buffer.dtype if counted is None else getattr(torch, DTYPES[counted[pieces.tensor[row]]])
        part = _box(box, wanted, tensor.name, pieces.start[row].tolist())
        found[kind] = (found[kind] + part) & _MASK
    return found


def total(parts: Sequence[Digests]) -> Digests:
    """The digest of all ranks' parts."""
    kinds = {kind for part in parts for kind in part}
    return {kind: sum(part.get(kind, 0) for part in parts) & _MASK for kind in sorted(kinds)}


@torch.no_grad()
def places(layout: Layout, rank: int, buffers: Sequence[torch.Tensor]) -> list[tuple[Cell, int]]:
    """Digests of all that a rank holds of tied tensors, in each place: whoever holds a cell must have the same one.

    Tied are those that the space has aliases of, and those that the rank holds several times. Cells are such that ranks
    that cut a tensor differently can still be compared.

    Args:
        buffers: of the rank, flat, in the order of its layout.
    """
    space, held = layout.space, layout.of(rank).pieces
    state = np.stack([held.kind.astype(np.int64), held.tensor.astype(np.int64)], axis=1)
    boxes, times = np.unique(np.concatenate([state, held.start, held.size], axis=1), axis=0, return_counts=True)
    several = {(int(kind), int(tensor)) for kind, tensor in boxes[times > 1, :2]}
    tied = {space.find(name) for name in space.aliases}
    found = []
    for row, (kind, tensor) in enumerate(state.tolist()):
        if tensor not in tied and (kind, tensor) not in several:
            continue
        cells = disjoint(layout.patterns[int(layout.spread[Kind(kind)][tensor])])
        mine = (cells.rank == rank) & (cells.start >= held.start[row]).all(axis=1)
        mine &= (cells.start + cells.size <= held.end[row]).all(axis=1)
        for start, size in zip(cells.start[mine], cells.size[mine], strict=True):
            buffer = buffers[int(held.buffer[row])]
            first = int(held.offset[row] + ((start - held.start[row]) * held.stride[row]).sum())
            box = buffer.as_strided(size.tolist(), held.stride[row].tolist(), buffer.storage_offset() + first)
            cell = (kind, tensor, tuple(start.tolist()), tuple(size.tolist()))
            found.append((cell, _box(box, buffer.dtype, space.tensors[tensor].name, cell[2])))
    return found


@torch.no_grad()
def digest_of_box(values: torch.Tensor, name: str, start: Sequence[int]) -> int:
    """What one box of a tensor adds to the digest, in the dtype that it has.

    Args:
        values: the box, of any strides.
        name: of its tensor.
        start: its first coordinate.
    """
    if not values.ndim:
        return _box(values.reshape(1), values.dtype, name, (0,))
    return _box(values, values.dtype, name, start) if values.numel() else 0


def _box(box: torch.Tensor, dtype: torch.dtype, name: str, start: Sequence[int]) -> int:
    """The sum over one box."""
    *lead, last = box.shape
    sides = enumerate(zip(start, box.shape, strict=True))
    weights = [_weights(dim, first, count).to(box.device) for dim, (first, count) in sides]
    rows = torch.ones((), dtype=torch.int64, device=box.device)
    for each in weights[:-1]:
        rows = rows[..., None] * each
    rows, flat = rows.reshape(-1), box.reshape(-1, last) if lead else box[None]
    at_once = max(1, _AT_ONCE // last)
    sums = 0
    for low in range(0, len(flat), at_once):
        part = flat[low : low + at_once].to(dtype).contiguous()
        sums += int((_in_rows(part.view(_BITS[part.element_size()]), weights[-1]) * rows[low : low + at_once]).sum())
    return sums * _seed(name) & _MASK


def _in_rows(bits: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The sum of ``(bits + 1) * weights`` over each row, modulo 2**64. int64 ``[rows]``."""
    # One is added so that zeros count too.
    if bits.device.type == "cpu":
        # A product of integer matrices runs in one pass and on one thread, and does not wait for cores that are busy.
        # (Not by ``numpy()``: it leaves a storage that can no longer be freed by resizing it.)
        return torch.from_numpy(np.from_dlpack(bits).astype(np.int64)) @ weights + weights.sum()
    return ((bits.to(torch.int64) + 1) * weights).sum(1)


@lru_cache(maxsize=4096)
def _seed(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") | 1


@lru_cache(maxsize=1024)
def _weights(dim: int, first: int, count: int) -> torch.Tensor:
    """An odd random number for each coordinate of a dimension: splitmix64 of the coordinate and the dimension.

    One sequence serves all tensors; `_seed` tells these apart.
    """
    with np.errstate(over="ignore"):
        x = np.arange(first, first + count, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15) * np.uint64(2 * dim + 1)
        x += np.uint64(dim + 1) << np.uint64(48)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
        x = (x ^ (x >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(x.view(np.int64))
