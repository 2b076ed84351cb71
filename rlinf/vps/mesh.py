"""Layouts on paper: a decoder model over tensor, pipeline, expert, context and data parallel ranks, at any size. Pure.

Ranks are numbered as in Megatron: tensor parallel fastest, then context, then data, then pipeline. Experts have a grid
of their own over the ranks of a stage: expert-tensor fastest, then expert, then expert-data. Every cut is an interval
``[n * i // parts, n * (i + 1) // parts)``, so nothing needs to divide anything.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlinf.vps.hf import Decoder, Role, Slot, space_of
from rlinf.vps.layout import DTYPES, WIDTHS, Buffer, Ints, Pattern, Pieces, RankLayout, bytes_in_boxes, elements
from rlinf.vps.space import OPTIMISER, Kind, LayoutError, Space

Box = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Mesh:
    """Degrees of parallelism.

    Attributes:
        tp: tensor parallel.
        pp: pipeline stages.
        dp: data parallel.
        cp: context parallel; its ranks hold what data parallel ones do.
        ep: expert parallel; ``etp``: tensor parallel within an expert. ``ep * etp`` divides the ranks of a stage.
        layers: layers of each stage (uneven), in order; empty: as even as possible.
        interleave: pieces that each stage has, dealt round-robin.
        fsdp: data parallel ranks share each tensor by rows, as torch's FSDP does (pieces of ``ceil``, the last ones
            may be empty).
        zero1: data parallel ranks share each optimiser state by flat ranges.
        vocab_multiple: rows of the vocabulary are padded to a multiple of this times ``tp``.
        fused: projections of q, k, v and of gate, up lie in one buffer each.
        ranks_per_host: for the distance between ranks.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    layers: tuple[int, ...] = ()
    interleave: int = 1
    fsdp: bool = False
    zero1: bool = False
    vocab_multiple: int = 1
    fused: bool = False
    ranks_per_host: int = 8

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def stage(self) -> int:
        """Ranks of a pipeline stage."""
        return self.tp * self.dp * self.cp


@dataclass(frozen=True)
class MeshLayout:
    """A `Layout` of a model over a mesh; tables are made when they are asked for.

    Attributes:
        config: the model's, of Hugging Face.
        mesh: degrees of parallelism.
        dtypes_of: kind -> dtype; the kinds that there are.
        processes: of the world; ranks past the mesh hold nothing. 0: those of the mesh.
    """

    config: Mapping[str, Any]
    mesh: Mesh
    dtypes_of: Mapping[Kind, str] = field(default_factory=lambda: {Kind.PARAMETER: "bfloat16"})
    processes: int = 0

    def __post_init__(self) -> None:
        mesh, layers = self.mesh, self.decoder.layers
        if not self.dtypes_of:
            raise LayoutError("dtypes_of is empty: a layout holds one kind of state at least")
        degrees = ("tp", "pp", "dp", "cp", "ep", "etp", "interleave", "vocab_multiple", "ranks_per_host")
        for name in degrees:
            if getattr(mesh, name) < 1:
                raise LayoutError(f"{name}={getattr(mesh, name)}: a mesh needs 1 or more")
        if mesh.stage % (mesh.ep * mesh.etp):
            raise LayoutError(
                f"ep={mesh.ep} x etp={mesh.etp} does not divide the {mesh.stage} ranks of a stage "
                f"(tp={mesh.tp} x cp={mesh.cp} x dp={mesh.dp})"
            )
        pieces = mesh.pp * mesh.interleave
        if mesh.layers and (len(mesh.layers) != pieces or sum(mesh.layers) != layers or min(mesh.layers) < 0):
            raise LayoutError(
                f"layers={mesh.layers}: {pieces} numbers, none below 0, that add up to {layers} are needed"
            )
        if self.world < mesh.world:
            raise LayoutError(f"{self.processes} processes are too few for a mesh of {mesh.world} ranks")

    @cached_property
    def decoder(self) -> Decoder:
        return Decoder.of(self.config)

    @cached_property
    def space(self) -> Space:
        return space_of(self.config, self.dtypes_of, self.dtypes_of.get(Kind.PARAMETER, "float32"))

    @property
    def world(self) -> int:
        return self.processes or self.mesh.world

    @cached_property
    def hosts(self) -> Sequence[int]:
        return tuple(rank // self.mesh.ranks_per_host for rank in range(self.world))

    @cached_property
    def _slots(self) -> tuple[Slot, ...]:
        """In the order of the space."""
        return tuple(sorted(self.decoder.slots(), key=lambda slot: slot.name))

    @cached_property
    def _stage_of(self) -> Sequence[int]:
        """Pipeline stage of each layer."""
        mesh, layers = self.mesh, self.decoder.layers
        pieces = mesh.pp * mesh.interleave
        edges = np.cumsum([0, *mesh.layers]) if mesh.layers else np.arange(pieces + 1) * layers // pieces
        piece = np.searchsorted(edges, np.arange(layers), "right") - 1
        return tuple((piece % mesh.pp).tolist())

    @cached_property
    def _classes(self) -> tuple[tuple[Slot, ...], NDArray[np.int32]]:
        """(one slot of each class, class of each slot): those of a class are spread alike."""
        known: dict[tuple[Any, ...], int] = {}
        firsts: list[Slot] = []
        member = []
        for slot in self._slots:
            key = (slot.role, slot.shape, self._stages(slot), self._expert_rank(slot))
            if (at := known.setdefault(key, len(firsts))) == len(firsts):
                firsts.append(slot)
            member.append(at)
        return tuple(firsts), np.array(member, np.int32)

    @cached_property
    def _tables(self) -> tuple[tuple[Pattern, ...], dict[Kind, NDArray[np.int32]]]:
        firsts, member = self._classes
        patterns: list[Pattern] = []
        spread_of: dict[bool, NDArray[np.int32]] = {}
        spread: dict[Kind, NDArray[np.int32]] = {}
        for kind in sorted(self.dtypes_of):
            flat = self._flat(kind)
            if flat not in spread_of:
                spread_of[flat] = member + np.int32(len(patterns))
                patterns += (self._pattern(slot, flat) for slot in firsts)
            spread[kind] = spread_of[flat]
        return tuple(patterns), spread

    def _flat(self, kind: Kind) -> bool:
        """Whether data parallel ranks share a state by flat ranges."""
        return self.mesh.zero1 and kind in OPTIMISER

    @property
    def patterns(self) -> Sequence[Pattern]:
        return self._tables[0]

    @property
    def spread(self) -> Mapping[Kind, NDArray[np.int32]]:
        return self._tables[1]

    @property
    def nbytes(self) -> Ints:
        found, logical = bytes_in_boxes(self), elements(self)
        physical = np.diff(self.padded_vocab * np.arange(self.mesh.tp + 1) // self.mesh.tp)
        for kind in self.dtypes_of:
            for at, slot in () if self.mesh.fsdp or self._flat(kind) else self._vocabulary:
                for stage in self._stages(slot):
                    ranks = np.arange(stage * self.mesh.stage, (stage + 1) * self.mesh.stage)
                    padding = physical[ranks % self.mesh.tp] * slot.shape[1] - logical[self.spread[kind][at], ranks]
                    found[ranks] += padding * WIDTHS[self.dtypes(kind)[at]]
        return found

    def dtypes(self, kind: Kind) -> NDArray[np.int8]:
        return np.full(len(self._slots), DTYPES.index(self.dtypes_of[kind]), np.int8)

    def _stages(self, slot: Slot) -> tuple[int, ...]:
        if slot.layer >= 0:
            return (self._stage_of[slot.layer],)
        last = self.mesh.pp - 1
        if slot.layer == -2:
            return (last,)
        return (0, last) if self.decoder.tied and last else (0,)

    def _expert_rank(self, slot: Slot) -> int:
        """The expert-parallel rank that has an expert; -1 for what is dense."""
        if slot.expert < 0:
            return -1
        ep = self.mesh.ep
        return ((slot.expert + 1) * ep - 1) // self.decoder.experts  # the inverse of the interval rule

    def _pattern(self, slot: Slot, flat: bool) -> Pattern:
        mesh = self.mesh
        rank: list[int] = []
        boxes: list[Box] = []
        for stage in self._stages(slot):
            first = stage * mesh.stage
            for part in range(mesh.etp if slot.expert >= 0 else mesh.tp):
                box = self._box(slot, part)
                members = self._members(slot, part)
                for member, cut in zip(members.tolist(), _shares(box, len(members), mesh.fsdp, flat), strict=True):
                    rank += [first + member] * len(cut)
                    boxes += cut
        order = np.argsort(np.array(rank, np.int64), kind="stable")
        ndim = self.space.ndim

        def table(which: int, filler: int) -> Ints:
            rows = np.array([box[which] for box in boxes], np.int64).reshape(len(boxes), len(slot.shape))
            return np.pad(rows, ((0, 0), (0, ndim - len(slot.shape))), constant_values=filler)[order]

        return Pattern(np.array(rank, np.int32)[order], table(0, 0), table(1, 1))

    def _members(self, slot: Slot, part: int) -> Ints:
        """Ranks within a stage that hold a tensor-parallel part, by data parallel rank."""
        mesh = self.mesh
        ranks = np.arange(mesh.stage)
        if slot.expert < 0:
            return ranks[ranks % mesh.tp == part]
        mine = (ranks // mesh.etp) % mesh.ep == self._expert_rank(slot)
        return ranks[mine & (ranks % mesh.etp == part)]

    def _box(self, slot: Slot, part: int) -> Box:
        """What a tensor-parallel rank has, before data parallel ranks share it."""
        decoder, parts = self.decoder, self.mesh.etp if slot.expert >= 0 else self.mesh.tp
        start, size = [0] * len(slot.shape), list(slot.shape)
        dim, low, high = 0, 0, slot.shape[0]
        match slot.role:
            case Role.WHOLE:
                return tuple(start), tuple(size)
            case Role.VOCABULARY:
                rows = self.padded_vocab
                low, high = (min(decoder.vocab, rows * (part + i) // parts) for i in (0, 1))
            case Role.HEADS:
                low, high = (decoder.heads * (part + i) // parts * decoder.head_dim for i in (0, 1))
            case Role.KV_HEADS:
                low = decoder.kv_heads * part // parts * decoder.head_dim
                high = -(-decoder.kv_heads * (part + 1) // parts) * decoder.head_dim
            case Role.ROWS:
                low, high = (slot.shape[0] * (part + i) // parts for i in (0, 1))
            case Role.COLUMNS:
                dim = 1
                if slot.expert < 0 and slot.name.endswith("o_proj.weight"):
                    low, high = (decoder.heads * (part + i) // parts * decoder.head_dim for i in (0, 1))
                else:
                    low, high = (slot.shape[1] * (part + i) // parts for i in (0, 1))
        start[dim], size[dim] = low, high - low
        return tuple(start), tuple(size)

    @property
    def padded_vocab(self) -> int:
        """Physical rows of the vocabulary; those past the logical ones are zero, and their moments too."""
        multiple = self.mesh.vocab_multiple * self.mesh.tp
        return -(-self.decoder.vocab // multiple) * multiple

    @cached_property
    def _buffers(self) -> tuple[tuple[str, ...], Ints]:
        """(names of a kind's buffers, over all ranks; the buffer of each slot)."""
        known: dict[str, int] = {}
        fused = self.mesh.fused
        at = [
            known.setdefault(f"{slot.layer}.{slot.fused}" if fused and slot.fused else slot.name, len(known))
            for slot in self._slots
        ]
        return tuple(known), np.array(at, np.int64)

    def of(self, rank: int) -> RankLayout:
        if not 0 <= rank < self.world:
            raise LayoutError(f"rank {rank} is not in this layout of {self.world} ranks")
        tables = [_rows_of(pattern, rank) for pattern in self.patterns]
        counts = np.array([len(start) for start, _ in tables], np.int64)
        first = np.cumsum(counts) - counts
        starts, sizes = (np.concatenate([table[i] for table in tables]) for i in (0, 1))
        strides = _strides(sizes)
        parts: list[Pieces] = []
        buffers: list[Buffer] = []
        for kind, spread in self.spread.items():
            held = counts[spread]
            tensor = np.repeat(np.arange(len(spread)), held)
            row = first[spread][tensor] + _within(held)
            names, numel, buffer, offset = self._placed(rank, kind, tensor, sizes[row])
            at = (buffer + len(buffers)).astype(np.int32)
            of_kind = np.full(len(tensor), kind, np.int8)
            parts.append(Pieces(tensor.astype(np.int32), of_kind, starts[row], sizes[row], at, offset, strides[row]))
            dtype, suffix = self.dtypes_of[kind], f" ({kind.name.lower()})"
            buffers += [Buffer(name + suffix, n, dtype) for name, n in zip(names, numel.tolist(), strict=True)]
        return RankLayout(Pieces.concat(parts), tuple(buffers))

    def _placed(self, rank: int, kind: Kind, tensor: Ints, size: Ints) -> tuple[list[str], Ints, Ints, Ints]:
        """Lay a rank's boxes of a kind, ``[n, D]``, one after the other into its buffers.

        Returns:
            Names and elements of the buffers, and for each box the place of its buffer among them and its offset there.
        """
        names, buffer_of = self._buffers
        buffer, count = buffer_of[tensor], size.prod(axis=1)
        order = np.argsort(buffer, kind="stable")
        before = np.cumsum(count[order]) - count[order]
        offset = np.empty_like(count)
        offset[order] = before - before[np.searchsorted(buffer[order], buffer[order])]
        numel = np.zeros(len(names), np.int64)
        np.add.at(numel, buffer, count)
        if not (self.mesh.fsdp or self._flat(kind)) and rank < self.mesh.world:
            edges = self.padded_vocab * (rank % self.mesh.tp + np.arange(2)) // self.mesh.tp
            for at, slot in self._vocabulary:
                if rank // self.mesh.stage in self._stages(slot):  # a part that is padding alone is stored too
                    numel[buffer_of[at]] = int(edges[1] - edges[0]) * slot.shape[1]
        used = np.flatnonzero(numel)
        return [names[i] for i in used.tolist()], numel[used], np.searchsorted(used, buffer), offset

    @cached_property
    def _vocabulary(self) -> tuple[tuple[int, Slot], ...]:
        return tuple((i, slot) for i, slot in enumerate(self._slots) if slot.role is Role.VOCABULARY)

    @cached_property
    def hash(self) -> str:
        # All of the decoder, not only the space: models of the same shapes are cut differently if their heads differ.
        decoder = [(f.name, getattr(self.decoder, f.name)) for f in fields(Decoder)]
        plain = [(name, sorted(value) if isinstance(value, frozenset) else value) for name, value in decoder]
        told = (plain, self.mesh, sorted((int(k), d) for k, d in self.dtypes_of.items()), self.world)
        return hashlib.blake2b(repr(told).encode(), digest_size=16).hexdigest()


def _rows_of(pattern: Pattern, rank: int) -> tuple[Ints, Ints]:
    """(start, size) of what a rank has in a pattern, whose ranks ascend."""
    low, high = np.searchsorted(pattern.rank, [rank, rank + 1])
    return pattern.start[low:high], pattern.size[low:high]


def _within(counts: Ints) -> Ints:
    """``[2, 0, 3]`` -> ``[0, 1, 0, 1, 2]``."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)


def _strides(size: Ints) -> Ints:
    """Of boxes ``[n, D]`` that lie in rows; 0 in dimensions of size 1."""
    inner = np.ones_like(size)
    inner[:, :-1] = np.cumprod(size[:, :0:-1], axis=1)[:, ::-1]
    return np.where(size > 1, inner, 0)


def _shares(box: Box, members: int, fsdp: bool, flat: bool) -> list[list[Box]]:
    """What each data parallel rank has of a box: all of it, some rows, or a flat range as boxes."""
    start, size = box
    if min(size, default=1) == 0:
        return [[] for _ in range(members)]
    if flat:
        numel = int(np.prod(size, dtype=np.int64))
        return [flat_range(box, numel * i // members, numel * (i + 1) // members) for i in range(members)]
    if not fsdp:
        return [[box]] * members
    if not size:
        return [[box]] + [[] for _ in range(members - 1)]
    each = -(-size[0] // members)
    found: list[list[Box]] = []
    for i in range(members):
        low, high = min(size[0], each * i), min(size[0], each * (i + 1))
        cut = (start[0] + low, *start[1:]), (high - low, *size[1:])
        found.append([cut] if high > low else [])
    return found


def flat_range(box: Box, low: int, high: int) -> list[Box]:
    """Elements ``[low, high)`` of a box in row-major order, as boxes in that order: at most ``2 * ndim - 1``."""
    start, size = box
    if low >= high:
        return []
    if not size:
        return [box]
    inner = int(np.prod(size[1:], dtype=np.int64))
    first, last = -(-low // inner), high // inner
    lead: list[Box] = []
    if first > last:  # within one row
        row = low // inner
        parts = flat_range((start[1:], size[1:]), low - row * inner, high - row * inner)
        return [((start[0] + row, *begin), (1, *extent)) for begin, extent in parts]
    if low < first * inner:
        row = first - 1
        parts = flat_range((start[1:], size[1:]), low - row * inner, inner)
        lead += [((start[0] + row, *begin), (1, *extent)) for begin, extent in parts]
    if last > first:
        lead.append(((start[0] + first, *start[1:]), (last - first, *size[1:])))
    if high > last * inner:
        parts = flat_range((start[1:], size[1:]), 0, high - last * inner)
        lead += [((start[0] + last, *begin), (1, *extent)) for begin, extent in parts]
    return lead
