"""Layouts on paper: a decoder model over tensor, pipeline, expert, context and data parallel ranks, at any size. Pure.

Ranks are numbered as in Megatron: tensor parallel fastest, then context, then data, then pipeline. Experts have a grid
of their own over the ranks of a stage: expert-tensor fastest, then expert, then expert-data. Every cut is an interval
``[n * i // parts, n * (i + 1) // parts)``, so nothing needs to divide anything.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlinf.vps.hf import Decoder, Role, Slot, space_of
from rlinf.vps.layout import DTYPES, Buffer, Ints, Pattern, Pieces, RankLayout
from rlinf.vps.space import Kind, LayoutError, Space

OPTIMISER = (Kind.MASTER, Kind.EXP_AVG, Kind.EXP_AVG_SQ)
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
        if mesh.stage % (mesh.ep * mesh.etp):
            raise LayoutError(
                f"ep={mesh.ep} x etp={mesh.etp} does not divide the {mesh.stage} ranks of a stage "
                f"(tp={mesh.tp} x cp={mesh.cp} x dp={mesh.dp})"
            )
        if mesh.layers and (len(mesh.layers) != mesh.pp * mesh.interleave or sum(mesh.layers) != layers):
            raise LayoutError(
                f"layers={mesh.layers}: {mesh.pp * mesh.interleave} numbers that add up to {layers} are needed"
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
    def _tables(self) -> tuple[tuple[Pattern, ...], dict[Kind, NDArray[np.int32]]]:
        patterns: list[Pattern] = []
        known: dict[tuple[Any, ...], int] = {}
        spread: dict[Kind, NDArray[np.int32]] = {}
        for kind in sorted(self.dtypes_of):
            flat = self.mesh.zero1 and kind in OPTIMISER
            if not flat and Kind.PARAMETER in spread:
                spread[kind] = spread[Kind.PARAMETER]
                continue
            if flat and (done := next((k for k in OPTIMISER if k in spread), None)) is not None:
                spread[kind] = spread[done]
                continue
            row = []
            for slot in self._slots:
                key = (slot.role, slot.shape, self._stages(slot), self._expert_rank(slot), flat)
                if key not in known:
                    known[key] = len(patterns)
                    patterns.append(self._pattern(slot, flat))
                row.append(known[key])
            spread[kind] = np.array(row, np.int32)
        return tuple(patterns), spread

    @property
    def patterns(self) -> Sequence[Pattern]:
        return self._tables[0]

    @property
    def spread(self) -> Mapping[Kind, NDArray[np.int32]]:
        return self._tables[1]

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

    def of(self, rank: int) -> RankLayout:
        if not 0 <= rank < self.world:
            raise LayoutError(f"rank {rank} is not in this layout of {self.world} ranks")
        mesh = self.mesh
        rows: list[tuple[int, int, Any, Any, int, int, Any]] = []
        sizes: list[int] = []
        names: list[tuple[str, Kind]] = []
        buffer_of: dict[tuple[str, Kind], int] = {}
        mine = [np.flatnonzero(pattern.rank == rank) for pattern in self.patterns]
        for kind, spread in self.spread.items():
            for tensor, slot in enumerate(self._slots):
                pattern = self.patterns[spread[tensor]]
                for row in mine[spread[tensor]].tolist():
                    start, size = pattern.start[row], pattern.size[row]
                    whole = mesh.fused and slot.fused
                    key = (f"{slot.layer}.{slot.fused}" if whole else slot.name), kind
                    if key not in buffer_of:
                        buffer_of[key] = len(sizes)
                        sizes.append(0)
                        names.append(key)
                    at = buffer_of[key]
                    inner = np.cumprod([1, *size[:0:-1].tolist()])[::-1]
                    rows.append((tensor, int(kind), start, size, at, sizes[at], inner))
                    sizes[at] += int(size.prod())
                if slot.role is Role.VOCABULARY and (slot.name, kind) in buffer_of and not (mesh.fsdp or mesh.zero1):
                    edges = self.padded_vocab * (rank % mesh.tp + np.arange(2)) // mesh.tp
                    sizes[buffer_of[slot.name, kind]] = int(edges[1] - edges[0]) * slot.shape[1]
        buffers = [
            Buffer(f"{name} ({kind.name.lower()})", n, self.dtypes_of[kind])
            for (name, kind), n in zip(names, sizes, strict=True)
        ]
        return RankLayout(Pieces.of(rows, self.space.ndim), tuple(buffers))

    @cached_property
    def hash(self) -> str:
        told = (self.space.hash, self.mesh, sorted((int(k), d) for k, d in self.dtypes_of.items()), self.world)
        return hashlib.blake2b(repr(told).encode(), digest_size=16).hexdigest()


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
