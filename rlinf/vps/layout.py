"""Layouts: for every rank, which logical boxes its physical buffers hold. Columnar and pure.

One form covers all: a piece is a logical box, and where its elements lie in a physical buffer, as an offset and a
stride for each logical dimension. Shards of any dimension, flat ranges, fused and padded tensors, transposed storage
and replicas are lists of pieces, and nothing else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rlinf.vps.space import DTYPE_BYTES, Kind, LayoutError, Space

Ints = NDArray[np.int64]
DTYPES = tuple(DTYPE_BYTES)
WIDTHS = np.array([DTYPE_BYTES[dtype] for dtype in DTYPES], np.int64)  # bytes of an element of each of them


@dataclass(frozen=True)
class Pieces:
    """What one rank holds, columnar; ``D`` is the space's ``ndim``.

    Element ``start + i`` of a piece's box lies at ``buffer[offset + sum(i * stride)]``, in elements of the buffer.

    Attributes:
        tensor: int32 ``[n]``, index into ``space.tensors``.
        kind: int8 ``[n]``, a `Kind`.
        start: int64 ``[n, D]``, first coordinate of the box.
        size: int64 ``[n, D]``, its extent; 1 in dimensions that the tensor does not have.
        buffer: int32 ``[n]``, index into the rank's buffers.
        offset: int64 ``[n]``, of the box's first element in the buffer.
        stride: int64 ``[n, D]``, elements from one coordinate to the next; 0 in dimensions of size 1.
    """

    tensor: NDArray[np.int32]
    kind: NDArray[np.int8]
    start: Ints
    size: Ints
    buffer: NDArray[np.int32]
    offset: Ints
    stride: Ints

    def __len__(self) -> int:
        return len(self.tensor)

    @classmethod
    def empty(cls, ndim: int) -> Pieces:
        none, boxes = np.empty(0, np.int64), np.empty((0, ndim), np.int64)
        return cls(none.astype(np.int32), none.astype(np.int8), boxes, boxes, none.astype(np.int32), none, boxes)

    @classmethod
    def of(
        cls, rows: Iterable[tuple[int, int, Sequence[int], Sequence[int], int, int, Sequence[int]]], ndim: int
    ) -> Pieces:
        """From rows (tensor, kind, start, size, buffer, offset, stride); short boxes are padded. Empty ones go."""
        kept = [row for row in rows if all(size > 0 for size in row[3])]
        if not kept:
            return cls.empty(ndim)

        def padded(boxes: Iterable[Sequence[int]], filler: int) -> Ints:
            return np.array([[*box, *[filler] * (ndim - len(box))] for box in boxes], np.int64).reshape(-1, ndim)

        size = padded((row[3] for row in kept), 1)
        return cls(
            np.array([row[0] for row in kept], np.int32),
            np.array([row[1] for row in kept], np.int8),
            padded((row[2] for row in kept), 0),
            size,
            np.array([row[4] for row in kept], np.int32),
            np.array([row[5] for row in kept], np.int64),
            np.where(size > 1, padded((row[6] for row in kept), 0), 0),
        )

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_]) -> Pieces:
        """These rows, in this order."""
        return replace(self, **{column.name: getattr(self, column.name)[rows] for column in fields(self)})

    def copy(self) -> Pieces:
        """The same in memory of its own."""
        return Pieces(*(getattr(self, column.name).copy() for column in fields(self)))

    @property
    def end(self) -> Ints:
        return self.start + self.size

    @property
    def numel(self) -> Ints:
        """Elements of each piece."""
        return self.size.prod(axis=1)

    @classmethod
    def concat(cls, parts: Sequence[Pieces]) -> Pieces:
        """One after the other."""
        return cls(*(np.concatenate([getattr(part, column.name) for part in parts]) for column in fields(cls)))


@dataclass(frozen=True)
class Buffer:
    """A physical tensor of a rank, seen flat.

    Attributes:
        name: of its own on this rank, e.g. that of a local shard.
        numel: elements.
        dtype: as in `rlinf.vps.space.DTYPE_BYTES`.
        device: ``cpu`` or ``cuda:0``.
    """

    name: str
    numel: int
    dtype: str
    device: str = "cpu"

    @property
    def nbytes(self) -> int:
        return self.numel * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class RankLayout:
    """What one rank holds, and in which buffers."""

    pieces: Pieces
    buffers: tuple[Buffer, ...]

    @cached_property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)


@dataclass(frozen=True)
class Pattern:
    """Which ranks hold which boxes of a tensor; one pattern serves all tensors that are spread alike.

    A rank that holds a box in several buffers (a tied tensor) is in it once.

    Attributes:
        rank: int32 ``[k]``, ascending.
        start: int64 ``[k, D]``.
        size: int64 ``[k, D]``, all positive.
    """

    rank: NDArray[np.int32]
    start: Ints
    size: Ints

    def __len__(self) -> int:
        return len(self.rank)


class Layout(Protocol):
    """Where a space's state is. A small description that every rank has whole.

    Attributes:
        space: of the state.
        world: number of ranks. Two layouts of one plan number the same processes alike; one may use few of them.
        hosts: index of the host of each rank.
        patterns: every way in which some tensor is spread.
        spread: kind -> int32 ``[tensors]``, the pattern of each tensor; -1: there is no such state of it.
    """

    @property
    def space(self) -> Space: ...
    @property
    def world(self) -> int: ...
    @property
    def hosts(self) -> Sequence[int]: ...
    @property
    def patterns(self) -> Sequence[Pattern]: ...
    @property
    def spread(self) -> Mapping[Kind, NDArray[np.int32]]: ...

    def dtypes(self, kind: Kind) -> NDArray[np.int8]:
        """Of each tensor's state as it is held here, an index into `DTYPES`; -1 where it is not held. ``[tensors]``."""

    @property
    def nbytes(self) -> Ints:
        """Bytes of all buffers of each rank, padding and further copies too. int64 ``[world]``."""

    def of(self, rank: int) -> RankLayout:
        """What a rank holds.

        Raises:
            LayoutError: the rank is not one of this layout.
        """

    @property
    def hash(self) -> str:
        """Digest of the description: sides whose hashes agree plan the same."""


@dataclass(frozen=True)
class ExplicitLayout:
    """Pieces of every rank, written out: from live modules, or from an engine whose loader was traced."""

    space: Space
    ranks: tuple[RankLayout, ...]
    hosts: tuple[int, ...]

    @property
    def world(self) -> int:
        return len(self.ranks)

    @cached_property
    def _grouped(self) -> tuple[tuple[Pattern, ...], dict[Kind, NDArray[np.int32]]]:
        rank = np.repeat(np.arange(self.world, dtype=np.int32), [len(r.pieces) for r in self.ranks])
        every = Pieces.concat([r.pieces for r in self.ranks]) if self.ranks else Pieces.empty(self.space.ndim)
        state = every.kind.astype(np.int64) * len(self.space.tensors) + every.tensor
        rows = np.concatenate([state[:, None], rank[:, None], every.start, every.size], axis=1)
        rows = np.unique(rows, axis=0)  # by state, then by rank
        states, first = np.unique(rows[:, 0], return_index=True)
        found: dict[bytes, int] = {}
        patterns: list[Pattern] = []
        spread = {Kind(kind): np.full(len(self.space.tensors), -1, np.int32) for kind in np.unique(every.kind)}
        ndim = self.space.ndim
        for at, table in zip(states.tolist(), np.split(rows[:, 1:], first[1:])[: len(states)], strict=True):
            key = table.tobytes()
            if key not in found:
                found[key] = len(patterns)
                patterns.append(Pattern(table[:, 0].astype(np.int32), table[:, 1 : 1 + ndim], table[:, 1 + ndim :]))
            kind, tensor = divmod(at, len(self.space.tensors))
            spread[Kind(kind)][tensor] = found[key]
        return tuple(patterns), spread

    @property
    def patterns(self) -> Sequence[Pattern]:
        return self._grouped[0]

    @property
    def spread(self) -> Mapping[Kind, NDArray[np.int32]]:
        return self._grouped[1]

    @property
    def nbytes(self) -> Ints:
        return np.array([rank.nbytes for rank in self.ranks], np.int64)

    def dtypes(self, kind: Kind) -> NDArray[np.int8]:
        found = np.full(len(self.space.tensors), -1, np.int8)
        where = np.full(len(self.space.tensors), -1, np.int64)
        for rank, held in enumerate(self.ranks):
            codes = np.array([DTYPES.index(buffer.dtype) for buffer in held.buffers], np.int8)
            of_kind = held.pieces.kind == kind
            tensor, code = held.pieces.tensor[of_kind], codes[held.pieces.buffer[of_kind]]
            known = np.where(found[tensor] >= 0, found[tensor], code)
            if (odd := np.flatnonzero(known != code)).size:
                at = int(tensor[odd[0]])
                raise LayoutError(
                    f"{self.space.tensors[at].name} ({kind.name.lower()}) is {DTYPES[found[at]]} on rank {where[at]} "
                    f"and {DTYPES[code[odd[0]]]} on rank {rank}: all ranks must hold it in one dtype"
                )
            found[tensor], where[tensor] = code, rank
        return found

    def of(self, rank: int) -> RankLayout:
        if not 0 <= rank < self.world:
            raise LayoutError(f"rank {rank} is not in this layout of {self.world} ranks")
        return self.ranks[rank]

    @cached_property
    def hash(self) -> str:
        digest = hashlib.blake2b(self.space.hash.encode(), digest_size=16)
        digest.update(repr(self.hosts).encode())
        for rank in self.ranks:
            digest.update(repr(rank.buffers).encode())
            for column in fields(rank.pieces):
                digest.update(np.ascontiguousarray(getattr(rank.pieces, column.name)).tobytes())
        return digest.hexdigest()


def elements(layout: Layout) -> Ints:
    """Elements of a tensor of each pattern on each rank: int64 ``[patterns, world]``."""
    table = np.zeros((len(layout.patterns), layout.world), np.int64)
    for row, pattern in enumerate(layout.patterns):
        np.add.at(table[row], pattern.rank, pattern.size.prod(axis=1))
    return table


def bytes_in_boxes(layout: Layout) -> Ints:
    """Bytes of the boxes of each rank, each counted once: int64 ``[world]``."""
    width = np.zeros(len(layout.patterns), np.int64)
    for kind, spread in layout.spread.items():
        states = np.flatnonzero(spread >= 0)
        np.add.at(width, spread[states], WIDTHS[layout.dtypes(kind)[states]])
    return width @ elements(layout)


def dense(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
