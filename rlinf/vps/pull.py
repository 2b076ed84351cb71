"""A reader's part: what its own layout wants, out of the publications of all source ranks, each byte read once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from rlinf.vps.dtensor import dtype_name
from rlinf.vps.layout import Buffer, ExplicitLayout, Pieces, RankLayout, dense
from rlinf.vps.plan import locate, plan
from rlinf.vps.space import Kind, Space

Sources = Sequence[Sequence[torch.Tensor]]
"""What source ranks publish: by rank and buffer, flat."""


@dataclass(frozen=True)
class _Copy:
    """A box, as it lies at the source (rank, buffer) and here (buffer); offsets and strides in elements."""

    rank: int
    source: int
    read: tuple[int, tuple[int, ...]]
    target: int
    write: tuple[int, tuple[int, ...]]
    size: tuple[int, ...]


class Pull:
    """What one reader copies; planned once for any number of syncs.

    Args:
        source: of all source ranks.
        wanted: what the reader holds.

    Raises:
        LayoutError: the sides are of different models; the source lacks a tensor or a part of it; a dtype cannot be
            cast. Nothing has been copied then.
    """

    def __init__(self, source: ExplicitLayout, wanted: RankLayout) -> None:
        self.nbytes = 0
        self._by_tensor: dict[int, list[_Copy]] = {}
        if not len(wanted.pieces):
            return
        world, space = source.world, source.space
        # The reader is one rank more than the sources have: it is none of them.
        nothing = RankLayout(Pieces.empty(space.ndim), ())
        reader = ExplicitLayout(space, (nothing,) * world + (wanted,), (*source.hosts, 0))
        moves = plan(source, reader).part(world).receives
        self.nbytes = int(moves.nbytes.sum())
        here = locate(wanted.pieces, moves)
        for rank in range(world):
            own = np.flatnonzero(moves.src == rank)
            there = locate(source.of(rank).pieces, moves.take(own))
            first = {int(own[move]): row for row, move in reversed(list(enumerate(there.move.tolist())))}
            for row in np.flatnonzero(np.isin(here.move, own)).tolist():
                move = int(here.move[row])
                at = first[move]
                copy = _Copy(
                    rank,
                    int(there.buffer[at]),
                    (int(there.offset[at]), tuple(there.stride[at].tolist())),
                    int(here.buffer[row]),
                    (int(here.offset[row]), tuple(here.stride[row].tolist())),
                    tuple(moves.size[move].tolist()),
                )
                self._by_tensor.setdefault(int(moves.tensor[move]), []).append(copy)

    @torch.no_grad()
    def run(self, sources: Sources, targets: Mapping[int, torch.Tensor], tensor: int) -> None:
        """Copy what is wanted of one tensor, cast on the way where dtypes differ.

        Args:
            sources: see `Sources`.
            targets: by buffer of the reader's layout, flat; others are left out.
            tensor: index into the space.
        """
        for copy in self._by_tensor.get(tensor, ()):
            if (target := targets.get(copy.target)) is not None:
                _at(target, copy.size, copy.write).copy_(_at(sources[copy.rank][copy.source], copy.size, copy.read))

    def whole(self, sources: Sources, tensor: int, shape: Sequence[int]) -> torch.Tensor | None:
        """The tensor itself, where it need not be copied.

        It lies in rows in one memory, at least with all that is wanted; the rest of it may be anything.
        The reader wants it in rows in a buffer of its own.
        """
        copies, rows = self._by_tensor.get(tensor, []), dense(shape)
        # Source ranks of a host may have their memory in common.
        places = {(sources[c.rank][c.source].data_ptr(), c.read[0] - c.write[0]) for c in copies}
        if len(places) != 1 or any(_differ(copy.size, copy.read[1], copy.write[1]) for copy in copies):
            return None
        source, (_, first) = sources[copies[0].rank][copies[0].source], places.pop()
        if first < 0 or first + prod(shape) > source.numel():
            return None
        return _at(source, tuple(shape), (first, rows))

    @property
    def tensors(self) -> list[int]:
        """Those of which anything is wanted."""
        return sorted(self._by_tensor)


def whole_layout(space: Space, tensors: Mapping[str, torch.Tensor]) -> RankLayout:
    """A reader that holds whole tensors, contiguous, each in a buffer of its own; in the order of ``tensors``."""
    rows = [
        (space.index[name], int(Kind.PARAMETER), (0,) * t.ndim, tuple(t.shape), number, 0, dense(t.shape))
        for number, (name, t) in enumerate(tensors.items())
    ]
    buffers = tuple(Buffer(name, t.numel(), dtype_name(t), str(t.device)) for name, t in tensors.items())
    return RankLayout(Pieces.of(rows, space.ndim), buffers)


def _differ(size: Sequence[int], read: Sequence[int], write: Sequence[int]) -> bool:
    """Whether strides differ in a dimension that has any."""
    return any(n > 1 and a != b for n, a, b in zip(size, read, write, strict=True))


def _at(flat: torch.Tensor, size: tuple[int, ...], place: tuple[int, tuple[int, ...]]) -> torch.Tensor:
    offset, stride = place
    return flat.as_strided(size, stride, int(flat.storage_offset()) + offset)
