"""Who reads what of a checkpoint: the layout that was saved and the one that is wanted, intersected by `rlinf.vps`.

Torch's distributed checkpoint keeps the files and carries the reading out. What it saved says which boxes of a tensor
there are; how this rank's own tensors are spread says which boxes it wants. Each rank plans its own part, without an
exchange, and however both sides are cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.tensor import DTensor

from rlinf.errors import CheckpointError
from rlinf.vps.cover import check_cover
from rlinf.vps.dtensor import boxes_of
from rlinf.vps.layout import Buffer, ExplicitLayout, Pieces, RankLayout, dense
from rlinf.vps.plan import Moves, plan
from rlinf.vps.space import Kind, LayoutError, Space, Tensor

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Where it starts, and its extent."""

_DAMAGED = "the checkpoint is damaged: resume from an earlier one"
_BYTES = "uint8"  # what is planned is boxes: their elements are read as they were saved, whatever they are


class LayoutLoadPlanner(DefaultLoadPlanner):
    """Reads into tensors that are spread in any way, from pieces that were saved in any other.

    Args:
        directory: where the files lie.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory

    def create_local_plan(self) -> LoadPlan:
        """This rank's part. What fails here fails on all ranks, before any of them reads.

        Raises:
            CheckpointError: what was saved has a hole, or a box twice; a box is in no file, or in one that was cut
                short; what this rank holds of a tensor is not what its placements say.
            LayoutError: a tensor is a partial sum.
            OSError: a file is gone, or cannot be looked at.
        """
        assert self.metadata is not None
        tensors = {name: tensor for name, tensor in self.state_dict.items() if tensor.numel()}
        chunks = {name: _chunks(self.metadata.state_dict_metadata[name]) for name in tensors}
        wanted = {name: box for name, tensor in tensors.items() if (box := box_of(name, tensor)) is not None}
        found = reads({name: tuple(tensor.shape) for name, tensor in tensors.items()}, chunks, wanted)
        _check_files(
            {(name, chunk): chunks[name][chunk] for name, chunk, _, _ in found},
            self.metadata.storage_data or {},
            self.directory,
        )
        return LoadPlan(
            [_item(name, chunks[name], wanted[name], chunk, start, size) for name, chunk, start, size in found]
        )


def box_of(name: str, tensor: torch.Tensor) -> Box | None:
    """What this rank holds of a tensor; ``None``: the tensor lies on other ranks alone.

    Raises:
        CheckpointError: its local part has another extent than the placements give it.
        LayoutError: it is a partial sum.
    """
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim, tuple(tensor.shape)
    ranks = tensor.device_mesh.mesh
    box = boxes_of(tensor, ranks.numel()).get(dist.get_rank())
    held = tuple(tensor.to_local().shape)
    if box is not None and box[1] != held:
        raise CheckpointError(
            f"{name}: this rank holds a part of {held}, and a box from {list(box[0])} of {list(box[1])} is expected by "
            f"its placements {tensor.placements} over a mesh of {tuple(ranks.shape)}; build it as torch spreads it"
        )
    return box


def reads(
    shapes: Mapping[str, tuple[int, ...]], chunks: Mapping[str, list[Box]], wanted: Mapping[str, Box]
) -> list[tuple[str, int, tuple[int, ...], tuple[int, ...]]]:
    """What to read: (tensor, which of its chunks, first coordinate, extent), every element of what is wanted once.

    Args:
        shapes: of each tensor, none of them without elements.
        chunks: boxes of each that were saved.
        wanted: the box of each that is read; it may be empty, and tensors of which nothing is read may lack.

    Raises:
        CheckpointError: the chunks of a tensor leave a hole, or meet; whether or not that is wanted here.
    """
    for name, boxes in sorted(chunks.items()):
        if not any(all(size > 0 for size in box[1]) for box in boxes):
            whole = f"box from {[0] * len(shapes[name])} of {list(shapes[name])}"
            raise CheckpointError(f"{name}: {whole} is expected, and nothing of it was saved; {_DAMAGED}")
    space = Space(tuple(Tensor(name, shapes[name], _BYTES) for name in sorted(shapes)), {Kind.PARAMETER: ""})
    most = max(map(len, chunks.values()), default=0)
    # The k-th chunk of every tensor lies on the k-th rank of a world that exists on paper alone.
    saved = [_held(space, {n: boxes[k] for n, boxes in chunks.items() if k < len(boxes)}) for k in range(most)]
    try:
        source = ExplicitLayout(space, tuple(saved), (0,) * most)
        check_cover(source, copies=1)
        target = ExplicitLayout(space, (_held(space, wanted),), (0,))
        part = plan(source, target).part(0)
    except LayoutError as error:
        raise CheckpointError(
            f"what was saved does not add up: {error} (rank k stands for the k-th piece that was saved of a tensor); "
            f"{_DAMAGED}"
        ) from None
    moves = Moves.concat([part.receives, part.local], space.ndim)
    found = []
    for row in range(len(moves)):
        tensor = space.tensors[int(moves.tensor[row])]
        ndim = len(tensor.shape)
        start, size = (tuple(column[row, :ndim].tolist()) for column in (moves.start, moves.size))
        found.append((tensor.name, int(moves.src[row]), start, size))
    return found


def _held(space: Space, boxes: Mapping[str, Box]) -> RankLayout:
    """A rank that holds one box of some tensors, each in a buffer of its own."""
    held = [(name, *box) for name, box in boxes.items() if all(size > 0 for size in box[1])]
    pieces = Pieces.of(
        (
            (space.index[name], Kind.PARAMETER, start, size, number, 0, dense(size))
            for number, (name, start, size) in enumerate(held)
        ),
        space.ndim,
    )
    return RankLayout(pieces, tuple(Buffer(name, Tensor(name, size).numel, _BYTES) for name, _, size in held))


def _check_files(pieces: Mapping[tuple[str, int], Box], places: Mapping[MetadataIndex, Any], directory: Path) -> None:
    """The files that this rank reads are there, as long as the index says: reading would find out half-way."""
    ends: dict[str, int] = {}
    for (name, chunk), (start, size) in pieces.items():
        place = places.get(MetadataIndex(name, torch.Size(start), chunk))
        if place is None:
            raise CheckpointError(f"{name}: box from {list(start)} of {list(size)} is in no file; {_DAMAGED}")
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    for file, end in sorted(ends.items()):
        found = (directory / file).stat().st_size
        if found < end:
            raise CheckpointError(f"{directory / file} has {found} bytes, {end} or more expected; {_DAMAGED}")


def _chunks(stored: object) -> list[Box]:
    assert isinstance(stored, TensorStorageMetadata)  # what is stored was compared with what is wanted before
    return [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in stored.chunks]


def _item(
    name: str, chunks: list[Box], own: Box, chunk: int, start: tuple[int, ...], size: tuple[int, ...]
) -> ReadItem:
    def within(box: Box) -> torch.Size:
        return torch.Size(at - first for at, first in zip(start, box[0], strict=True))

    return ReadItem(
        type=LoadItemType.TENSOR,
        dest_index=MetadataIndex(name, torch.Size(own[0])),
        dest_offsets=within(own),
        storage_index=MetadataIndex(name, torch.Size(chunks[chunk][0]), chunk),
        storage_offsets=within(chunks[chunk]),
        lengths=torch.Size(size),
    )
