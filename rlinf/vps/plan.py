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
from rlinf.vps.layout import DTYPES, WIDTHS, Ints, Layout, Pieces
from rlinf.vps.space import Kind, LayoutError, few, same_space


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


Wave = tuple[int, int]
"""(which, of how many) parts of all states, where a plan is carried out part by part."""

WHOLE: Wave = (0, 1)


@dataclass(frozen=True)
class Flow:
    """States that are spread alike at the source and at the destination.

    State ``t`` of it takes box ``a`` from ``source[first[a] + (t + turn[a]) % count[a]]``: replicas take turns.

    Attributes:
        number: of the flow in its plan.
        patterns: (at the source, at the destination), indices into the layouts' patterns.
        widths: (at the source, at the destination), bytes of an element.
        tensor, kind: int32 and int8 ``[T]``, the states.
        dst: int32 ``[A]``, who gets a box.
        start, size: int64 ``[A, D]``, the box.
        first, count: int64 ``[A]``, its possible sources, as a range of ``source``.
        source: int32, ranks.
        turn: int64 ``[A]``.
    """

    number: int
    patterns: tuple[int, int]
    widths: tuple[int, int]
    tensor: NDArray[np.int32]
    kind: NDArray[np.int8]
    dst: NDArray[np.int32]
    start: Ints
    size: Ints
    first: Ints
    count: Ints
    source: NDArray[np.int32]
    turn: Ints

    def wave(self, wave: Wave) -> tuple[int, int]:
        """The states of a wave, as a range. Every flow goes in all waves, so that each of these keeps all ranks busy;
        flows of few states begin in different ones.
        """
        number, of = wave
        phase = self.number % of
        return (len(self.tensor) * number + phase) // of, (len(self.tensor) * (number + 1) + phase) // of

    def shares(self, wave: Wave = WHOLE) -> tuple[NDArray[np.int32], NDArray[np.int32], Ints]:
        """(source, destination, bytes over the states of a wave) of every box and possible source of it."""
        low, high = self.wave(wave)
        atom = np.repeat(np.arange(len(self.dst)), self.count)
        place = _places(self.count)
        count = self.count[atom]
        begins = (place - self.turn[atom]) % count  # the first state that takes it from there
        states = _before(high, begins, count) - _before(low, begins, count)
        nbytes = states * self.size[atom].prod(axis=1) * min(self.widths)
        return self.source[self.first[atom] + place], self.dst[atom], nbytes

    def received(self, rank: int, wave: Wave = WHOLE) -> Moves:
        """What a rank gets, from itself too."""
        low, high = self.wave(wave)
        atoms = np.flatnonzero(self.dst == rank)
        state = np.repeat(np.arange(low, high), len(atoms))
        atom = np.tile(atoms, high - low)
        source = self.source[self.first[atom] + (state + self.turn[atom]) % self.count[atom]]
        return self._moves(source, atom, state)

    def sent(self, rank: int, wave: Wave = WHOLE) -> Moves:
        """What a rank gives, to itself too."""
        low, high = self.wave(wave)
        rows = np.flatnonzero(self.source == rank)
        atoms = self._atom_of_source[rows]
        count = self.count[atoms]
        begins = (rows - self.first[atoms] - self.turn[atoms]) % count
        skipped = _before(low, begins, count)
        times = _before(high, begins, count) - skipped
        each = np.repeat(np.arange(len(rows)), times)
        state = begins[each] + (skipped[each] + _places(times)) * count[each]
        return self._moves(np.full(len(each), rank, np.int32), atoms[each], state)

    @cached_property
    def _atom_of_source(self) -> Ints:
        """The box that each entry of ``source`` belongs to."""
        atom = np.empty(len(self.source), np.int64)
        atom[np.repeat(self.first, self.count) + _places(self.count)] = np.repeat(np.arange(len(self.dst)), self.count)
        return atom

    def _moves(self, source: NDArray[np.int32], atom: Ints, state: Ints) -> Moves:
        return Moves(
            source,
            self.dst[atom],
            self.tensor[state],
            self.kind[state],
            self.start[atom],
            self.size[atom],
            np.full(len(atom), min(self.widths), np.int8),
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

    @property
    def world(self) -> int:
        """Ranks of the wider side."""
        return max(self.src.world, self.dst.world)

    @property
    def hosts(self) -> Ints:
        """Index of the host of each rank."""
        return np.array(self.src.hosts if self.src.world >= self.dst.world else self.dst.hosts)

    def traffic(self, wave: Wave = WHOLE) -> Traffic:
        """Bytes between every two ranks."""
        shares = [flow.shares(wave) for flow in self.flows]
        if not shares:
            none = np.empty(0, np.int32)
            return Traffic(none, none, none.astype(np.int64))
        src, dst, nbytes = (np.concatenate(column) for column in zip(*shares, strict=True))
        pairs, where = np.unique(src.astype(np.int64) * self.world + dst, return_inverse=True)
        total = np.zeros(len(pairs), np.int64)
        np.add.at(total, where, nbytes)
        some = total > 0
        pairs, total = pairs[some], total[some]
        return Traffic((pairs // self.world).astype(np.int32), (pairs % self.world).astype(np.int32), total)

    def part(self, rank: int, wave: Wave = WHOLE) -> Part:
        """What a rank sends, receives, and keeps.

        Raises:
            LayoutError: the rank is in neither layout.
        """
        if not 0 <= rank < self.world:
            raise LayoutError(f"rank {rank} is in neither layout ({self.src.world} and {self.dst.world} ranks)")
        ndim = self.src.space.ndim
        got = Moves.concat([m for flow in self.flows if len(m := flow.received(rank, wave))], ndim).ordered()
        given = Moves.concat([m for flow in self.flows if len(m := flow.sent(rank, wave))], ndim).ordered()
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
    flows: list[Flow] = []
    hosts = Plan(src, dst, ()).hosts
    shared: dict[tuple[int, int], tuple[Overlaps, Ints, Ints, NDArray[np.int32], Ints]] = {}
    for rows in alike(src, dst):
        source, target, *widths = rows[0, :4].tolist()
        if (source, target) not in shared:
            try:
                overlaps = overlap(src.patterns[source], dst.patterns[target])
            except LayoutError as error:
                tensor, kind = rows[0, 4:].tolist()
                raise LayoutError(f"{src.space.tensors[tensor].name} ({Kind(kind).name.lower()}): {error}") from None
            shared[source, target] = overlaps, *_balanced(overlaps, *nearest(overlaps, hosts))
        found, first, count, ranks, turn = shared[source, target]
        flow = Flow(
            number=len(flows),
            patterns=(source, target),
            widths=(widths[0], widths[1]),
            tensor=rows[:, 4].astype(np.int32),
            kind=rows[:, 5].astype(np.int8),
            dst=found.dst,
            start=found.start,
            size=found.size,
            first=first,
            count=count,
            source=ranks,
            turn=(turn + len(flows)) % count,
        )
        flows.append(flow)
    return Plan(src, dst, tuple(flows))


def _balanced(
    found: Overlaps, first: Ints, count: Ints, source: NDArray[np.int32]
) -> tuple[Ints, Ints, NDArray[np.int32], Ints]:
    """Narrow the possible sources of each box to as few as still share the work evenly.

    ``g`` boxes that could each come from the same ``c`` replicas are dealt to ``gcd(c, g)`` blocks of these: every
    replica then gives as much as any other, and a rank speaks with few others.

    Returns:
        first, count, source, and the turn of each box among those of its block.
    """
    # Sets of nearest holders that are alike have one box, one count and one first holder: as one number each.
    same = (found.box * (int(count.max(initial=0)) + 1) + count) * (int(source.max(initial=0)) + 1) + source[first]
    group = np.unique(same, return_inverse=True)[1].reshape(-1)
    size = np.bincount(group)[group]
    order = np.argsort(group, kind="stable")
    place = np.empty(len(group), np.int64)
    place[order] = _places(np.bincount(group))
    blocks = np.gcd(count, size)
    each = count // blocks
    begin = first + place % blocks * each
    narrowed = source[np.repeat(begin, each) + _places(each)]
    return np.cumsum(each) - each, each, narrowed, place // blocks


def _places(count: Ints) -> Ints:
    """0, 1, ... within each run of ``count`` entries."""
    return np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)


def _before(end: int, begins: Ints, step: Ints) -> Ints:
    """How many of ``begins``, ``begins + step``, ... are below ``end``."""
    return np.maximum(0, (end - begins + step - 1) // step)


def alike(src: Layout, dst: Layout) -> list[Ints]:
    """Rows (source pattern, destination pattern, source width, destination width, tensor, kind) of each flow."""
    columns: list[Ints] = []
    for kind, wanted in sorted(dst.spread.items()):
        tensors = np.flatnonzero(wanted >= 0)
        held = src.spread.get(kind)
        lacking = tensors if held is None else tensors[held[tensors] < 0]
        if held is None or len(lacking):
            names = [dst.space.tensors[int(t)].name for t in lacking]
            raise LayoutError(f"the source does not hold the {kind.name.lower()} of {few(names)}")
        have, get = src.dtypes(kind)[tensors], dst.dtypes(kind)[tensors]
        _check_casts(dst, kind, tensors, have, get)
        what = (held[tensors], wanted[tensors], WIDTHS[have], WIDTHS[get], tensors, np.full(len(tensors), int(kind)))
        columns.append(np.stack(what, 1))
    rows = np.concatenate(columns) if columns else np.empty((0, 6), np.int64)
    held, wanted, *widths, tensor, kinds = rows.T
    flow = ((held * len(dst.patterns) + wanted) * 16 + widths[0]) * 16 + widths[1]  # the first four, as one number
    order = np.lexsort((kinds, tensor, flow))
    begins = np.flatnonzero(np.diff(flow[order]) != 0) + 1
    return np.split(rows[order], begins) if len(rows) else []


def _check_casts(dst: Layout, kind: Kind, tensors: Ints, have: NDArray[np.int8], get: NDArray[np.int8]) -> None:
    floats = np.array(["float" in dtype for dtype in DTYPES])
    wrong = np.flatnonzero((have != get) & ~(floats[have] & floats[get]))
    if len(wrong):
        at = int(wrong[0])
        raise LayoutError(
            f"{dst.space.tensors[int(tensors[at])].name} ({kind.name.lower()}) is {DTYPES[have[at]]} at the source and "
            f"{DTYPES[get[at]]} at the destination; only floats can be cast into one another"
        )


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
