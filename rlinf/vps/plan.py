"""The plan: which box goes from which rank to which, by geometry alone.

Tensors that are spread alike on both sides form a *flow*: their boxes are intersected once, and the result holds for
each of them. Every rank derives its own part from the two layouts, without an exchange; equal hashes mean equal plans.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rlinf.vps.geometry import Overlaps, nearest, overlap
from rlinf.vps.layout import Ints, Layout, Pieces
from rlinf.vps.space import DTYPE_BYTES, Kind, LayoutError, few, same_space


@dataclass(frozen=True)
class Moves:
    """Boxes that go from a rank to a rank, columnar; those of one pair are in one order on both sides.

    Attributes:
        src: int32 ``[n]``, the rank that has it.
        dst: int32 ``[n]``, the rank that gets it.
        tensor: int32 ``[n]``, index into ``space.tensors``.
        kind: int8 ``[n]``, a `Kind`.
        start: int64 ``[n, D]``, first logical coordinate.
        size: int64 ``[n, D]``, extent.
        width: int8 ``[n]``, bytes of an element on the way: those of the narrower of the two dtypes.
    """

    src: NDArray[np.int32]
    dst: NDArray[np.int32]
    tensor: NDArray[np.int32]
    kind: NDArray[np.int8]
    start: Ints
    size: Ints
    width: NDArray[np.int8]

    def __len__(self) -> int:
        return len(self.src)

    @cached_property
    def nbytes(self) -> Ints:
        """Bytes of each on the way."""
        return self.size.prod(axis=1) * self.width

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_] | slice) -> Moves:
        return Moves(*(getattr(self, column.name)[rows] for column in fields(self)))

    @classmethod
    def concat(cls, parts: Sequence[Moves], ndim: int) -> Moves:
        if not parts:
            none = np.empty(0, np.int32)
            boxes = np.empty((0, ndim), np.int64)
            return cls(none, none, none, none.astype(np.int8), boxes, boxes, none.astype(np.int8))
        return cls(*(np.concatenate([getattr(part, column.name) for part in parts]) for column in fields(cls)))

    def ordered(self) -> Moves:
        """By pair, then by kind, tensor and coordinate: the order in which both sides have them."""
        keys = (*self.start.T[::-1], self.tensor, self.kind, self.dst, self.src)
        return self.take(np.lexsort(keys))


@dataclass(frozen=True)
class Flow:
    """States that are spread alike at the source and at the destination.

    State ``t`` of it takes box ``a`` from ``source[first[a] + (t + turn[a]) % count[a]]``: replicas take turns.

    Attributes:
        tensor, kind: int32 and int8 ``[T]``, the states.
        width: bytes of an element on the way.
        dst: int32 ``[A]``, who gets a box.
        start, size: int64 ``[A, D]``, the box.
        first, count: int64 ``[A]``, its possible sources, as a range of ``source``.
        source: int32, ranks.
        turn: int64 ``[A]``.
    """

    tensor: NDArray[np.int32]
    kind: NDArray[np.int8]
    width: int
    dst: NDArray[np.int32]
    start: Ints
    size: Ints
    first: Ints
    count: Ints
    source: NDArray[np.int32]
    turn: Ints

    def shares(self) -> tuple[NDArray[np.int32], NDArray[np.int32], Ints]:
        """(source, destination, bytes over all states) of every box and possible source of it."""
        atom = np.repeat(np.arange(len(self.dst)), self.count)
        place = np.arange(len(atom)) - np.repeat(np.cumsum(self.count) - self.count, self.count)
        count = self.count[atom]
        begins = (place - self.turn[atom]) % count  # the first state that takes it from there
        states = np.maximum(0, (len(self.tensor) - begins + count - 1) // count)
        nbytes = states * self.size[atom].prod(axis=1) * self.width
        return self.source[self.first[atom] + place], self.dst[atom], nbytes

    def received(self, rank: int) -> Moves:
        """What a rank gets, from itself too."""
        atoms = np.flatnonzero(self.dst == rank)
        state = np.repeat(np.arange(len(self.tensor)), len(atoms))
        atom = np.tile(atoms, len(self.tensor))
        source = self.source[self.first[atom] + (state + self.turn[atom]) % self.count[atom]]
        return self._moves(source, atom, state)

    def sent(self, rank: int) -> Moves:
        """What a rank gives, to itself too."""
        rows = np.flatnonzero(self.source == rank)
        owner = np.repeat(np.arange(len(self.dst)), self.count)
        order = np.repeat(self.first, self.count) + (
            np.arange(len(owner)) - np.repeat(np.cumsum(self.count) - self.count, self.count)
        )
        atom = np.empty(len(owner), np.int64)
        atom[order] = owner  # by position in ``source``
        atoms = atom[rows]
        count = self.count[atoms]
        begins = (rows - self.first[atoms] - self.turn[atoms]) % count
        times = np.maximum(0, (len(self.tensor) - begins + count - 1) // count)
        each = np.repeat(np.arange(len(rows)), times)
        nth = np.arange(len(each)) - np.repeat(np.cumsum(times) - times, times)
        state = begins[each] + nth * count[each]
        return self._moves(np.full(len(each), rank, np.int32), atoms[each], state)

    def _moves(self, source: NDArray[np.int32], atom: Ints, state: Ints) -> Moves:
        return Moves(
            source,
            self.dst[atom],
            self.tensor[state],
            self.kind[state],
            self.start[atom],
            self.size[atom],
            np.full(len(atom), self.width, np.int8),
        )


@dataclass(frozen=True)
class Traffic:
    """Bytes between ranks, summed; int32, int32 and int64 ``[p]``, by source, then by destination."""

    src: NDArray[np.int32]
    dst: NDArray[np.int32]
    nbytes: Ints

    def between(self) -> Traffic:
        """Without what stays where it is."""
        away = self.src != self.dst
        return Traffic(self.src[away], self.dst[away], self.nbytes[away])


@dataclass(frozen=True)
class Part:
    """One rank's part of a plan, ordered as `Moves.ordered`."""

    sends: Moves
    receives: Moves
    local: Moves


@dataclass(frozen=True)
class Plan:
    """Make it with `plan`."""

    src: Layout
    dst: Layout
    flows: tuple[Flow, ...]

    @cached_property
    def traffic(self) -> Traffic:
        """Bytes between every two ranks."""
        shares = [flow.shares() for flow in self.flows]
        if not shares:
            none = np.empty(0, np.int32)
            return Traffic(none, none, none.astype(np.int64))
        src, dst, nbytes = (np.concatenate(column) for column in zip(*shares, strict=True))
        world = max(self.src.world, self.dst.world)
        pairs, where = np.unique(src.astype(np.int64) * world + dst, return_inverse=True)
        total = np.zeros(len(pairs), np.int64)
        np.add.at(total, where, nbytes)
        some = total > 0
        pairs, total = pairs[some], total[some]
        return Traffic((pairs // world).astype(np.int32), (pairs % world).astype(np.int32), total)

    def part(self, rank: int) -> Part:
        """What a rank sends, receives, and keeps.

        Raises:
            LayoutError: the rank is in neither layout.
        """
        if not 0 <= rank < max(self.src.world, self.dst.world):
            raise LayoutError(f"rank {rank} is in neither layout ({self.src.world} and {self.dst.world} ranks)")
        ndim = self.src.space.ndim
        got = Moves.concat([m for flow in self.flows if len(m := flow.received(rank))], ndim).ordered()
        given = Moves.concat([m for flow in self.flows if len(m := flow.sent(rank))], ndim).ordered()
        return Part(given.take(given.dst != rank), got.take(got.src != rank), got.take(got.src == rank))

    @cached_property
    def hash(self) -> str:
        """Ranks with equal hashes have the same plan: it follows from the two layouts alone."""
        return hashlib.blake2b((self.src.hash + self.dst.hash).encode(), digest_size=16).hexdigest()


def plan(src: Layout, dst: Layout) -> Plan:
    """Plan the way from one layout to another.

    Raises:
        LayoutError: the sides are of different models; a state that the destination wants is not at the source, or
            only a part of it; a dtype that cannot be cast into the other. It names tensor, box and ranks.
    """
    same_space(src.space, dst.space)
    flows = []
    hosts = np.array(src.hosts if src.world >= dst.world else dst.hosts)
    for turn, (source, target, states, kinds, width) in enumerate(_alike(src, dst)):
        where = src.patterns[source], dst.patterns[target]
        try:
            found = overlap(*where)
        except LayoutError as error:
            name = src.space.tensors[int(states[0])].name
            raise LayoutError(f"{name} ({Kind(int(kinds[0])).name.lower()}): {error}") from None
        flows.append(_flow(found, where[0].rank, hosts, states, kinds, width, turn))
    return Plan(src, dst, tuple(flows))


def _flow(
    found: Overlaps, holder: NDArray[np.int32], hosts: Ints, tensor: Ints, kind: Ints, width: int, turn: int
) -> Flow:
    first, count, source = nearest(found, holder, hosts)
    # Boxes with the same possible sources begin at different ones, and so do flows.
    group = np.unique(found.box, return_inverse=True)[1]
    order = np.argsort(group, kind="stable")
    within = np.empty(len(group), np.int64)
    begins = np.flatnonzero(np.diff(group[order], prepend=-1))
    within[order] = np.arange(len(group)) - np.repeat(begins, np.diff(np.append(begins, len(group))))
    return Flow(
        tensor.astype(np.int32),
        kind.astype(np.int8),
        width,
        found.dst,
        found.start,
        found.size,
        first,
        count,
        source,
        (within + turn) % count,
    )


def _alike(src: Layout, dst: Layout) -> list[tuple[int, int, Ints, Ints, int]]:
    """(source pattern, destination pattern, tensors, kinds, bytes of an element) of each flow."""
    columns: list[Ints] = []
    for kind, wanted in sorted(dst.spread.items()):
        tensors = np.flatnonzero(wanted >= 0)
        held = src.spread.get(kind)
        lacking = tensors if held is None else tensors[held[tensors] < 0]
        if held is None or len(lacking):
            names = [dst.space.tensors[int(t)].name for t in lacking]
            raise LayoutError(f"the source does not hold the {kind.name.lower()} of {few(names)}")
        widths = _widths(src, dst, kind, tensors)
        columns.append(np.stack([held[tensors], wanted[tensors], widths, tensors, np.full(len(tensors), int(kind))], 1))
    rows = np.concatenate(columns) if columns else np.empty((0, 5), np.int64)
    rows = rows[np.lexsort((rows[:, 4], rows[:, 3], rows[:, 2], rows[:, 1], rows[:, 0]))]
    begins = np.flatnonzero((np.diff(rows[:, :3], axis=0, prepend=-1) != 0).any(axis=1))
    groups = np.split(rows, begins[1:]) if len(rows) else []
    return [(int(g[0, 0]), int(g[0, 1]), g[:, 3], g[:, 4], int(g[0, 2])) for g in groups]


def _widths(src: Layout, dst: Layout, kind: Kind, tensors: Ints) -> Ints:
    """Bytes of an element on the way, by tensor.

    Raises:
        LayoutError: floats cannot become integers, nor integers floats.
    """
    found = np.empty(len(tensors), np.int64)
    known: dict[tuple[str, str], int] = {}
    for i, tensor in enumerate(tensors.tolist()):
        pair = src.dtype(tensor, kind), dst.dtype(tensor, kind)
        if pair not in known:
            if pair[0] != pair[1] and not ("float" in pair[0] and "float" in pair[1]):
                raise LayoutError(
                    f"{dst.space.tensors[tensor].name} ({kind.name.lower()}) is {pair[0]} at the source and {pair[1]} "
                    "at the destination; only floats can be cast into one another"
                )
            known[pair] = min(DTYPE_BYTES[pair[0]], DTYPE_BYTES[pair[1]])
        found[i] = known[pair]
    return found


@dataclass(frozen=True)
class Places:
    """Where the boxes of moves lie on one rank; a box that is held in several buffers has several places.

    Attributes:
        move: int64 ``[m]``, index into the moves.
        buffer: int32 ``[m]``; offset: int64 ``[m]``; stride: int64 ``[m, D]``, in elements, as in `Pieces`.
    """

    move: Ints
    buffer: NDArray[np.int32]
    offset: Ints
    stride: Ints


def locate(pieces: Pieces, moves: Moves) -> Places:
    """Find the boxes of moves among the pieces of a rank. By move.

    Raises:
        LayoutError: a box is not held: the moves are of another layout.
    """
    state = pieces.kind.astype(np.int64) << 32 | pieces.tensor
    order = np.argsort(state, kind="stable")
    held, wanted = state[order], moves.kind.astype(np.int64) << 32 | moves.tensor
    low, high = np.searchsorted(held, wanted, "left"), np.searchsorted(held, wanted, "right")
    move = np.repeat(np.arange(len(moves)), high - low)
    piece = order[np.arange(len(move)) - np.repeat(np.cumsum(high - low) - high, high - low)]
    inside = (pieces.start[piece] <= moves.start[move]) & (pieces.end[piece] >= (moves.start + moves.size)[move])
    kept = inside.all(axis=1)
    move, piece = move[kept], piece[kept]
    lost = np.flatnonzero(np.bincount(move, minlength=len(moves)) == 0)
    if len(lost):
        at = int(lost[0])
        raise LayoutError(
            f"tensor {moves.tensor[at]}, box from {moves.start[at].tolist()} of {moves.size[at].tolist()} is not held "
            f"by the rank ({len(lost)} such boxes): the plan is of another layout"
        )
    shift = ((moves.start[move] - pieces.start[piece]) * pieces.stride[piece]).sum(axis=1)
    return Places(move, pieces.buffer[piece], pieces.offset[piece] + shift, pieces.stride[piece])


__all__ = ["Flow", "Moves", "Part", "Places", "Plan", "Traffic", "locate", "plan"]
