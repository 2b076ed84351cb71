"""Weights as their ranks hold them, laid open for others to read.

Each source rank copies its share once into memory that every process of its host can map, and tells where what lies.
Any number of readers then take what their own layout wants. Between hosts the same bytes travel with the message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from rlinf.host import this_host
from rlinf.vps.digest import digest_of_box
from rlinf.vps.dtensor import boxes_of, dtype_name
from rlinf.vps.layout import Buffer, ExplicitLayout, Pieces, RankLayout, dense
from rlinf.vps.memory import Handle, Memory, read_only
from rlinf.vps.space import DTYPE_BYTES, Kind, LayoutError, Space, Tensor, same_space

ALIGNED = 64  # bytes; where the buffer of a dtype begins


@dataclass(frozen=True)
class Share:
    """A box of a tensor, as a rank holds it.

    Attributes:
        tensor: index into the space's tensors.
        start: its first coordinate.
        values: the box itself, on any device, of any strides.
    """

    tensor: int
    start: tuple[int, ...]
    values: torch.Tensor


@dataclass(frozen=True)
class Description:
    """What a source rank publishes, and where it lies; the same from sync to sync.

    Attributes:
        space: of the whole model; the same on every source rank.
        layout: where in its bytes this rank's share lies; a buffer for each dtype.
    """

    space: Space
    layout: RankLayout

    @cached_property
    def hash(self) -> str:
        return ExplicitLayout(self.space, (self.layout,), (0,)).hash


@dataclass(frozen=True)
class Publication:
    """One rank's share of the weights.

    Attributes:
        description: what is published, and where it lies.
        handle: of the memory.
        changed: whether any value differs from the publication before it in the same memory; true of the first.
        inline: uint8 ``[nbytes]``, the bytes themselves, for a reader on another host.
        digests: of each piece of the layout, as the source rank holds it, where readers are to verify.
        abroad: the same with the bytes themselves, where there are readers on other hosts.
    """

    description: Description
    handle: Handle
    changed: bool
    inline: np.ndarray | None = None
    digests: tuple[int, ...] | None = None
    abroad: Publication | None = None

    @property
    def space(self) -> Space:
        return self.description.space

    @property
    def layout(self) -> RankLayout:
        return self.description.layout

    def buffers(self, memory: Memory | None = None) -> list[torch.Tensor]:
        """The buffers of the layout, flat and not to be written to.

        Args:
            memory: attached already.

        Raises:
            LayoutError: the memory cannot be reached from here, or holds other bytes than were published.
        """
        if self.handle.host != this_host() and self.inline is not None:
            data = read_only(self.inline)
        else:
            data = (memory or Memory.attach(self.handle)).data
        return _buffers(data, self.layout.buffers)

    def verify(self, rank: int, buffers: Sequence[torch.Tensor]) -> None:
        """Make sure that what a reader has before it is what the source rank holds.

        Args:
            rank: of the source, for the message.
            buffers: as `buffers` gave them.

        Raises:
            LayoutError: a digest differs; names the tensor, its box, and the rank.
        """
        pieces = self.layout.pieces
        for row, expected in enumerate(self.digests or ()):
            tensor = self.space.tensors[int(pieces.tensor[row])]
            ndim = len(tensor.shape)
            start, size = pieces.start[row, :ndim].tolist(), pieces.size[row, :ndim].tolist()
            flat = buffers[int(pieces.buffer[row])]
            first = int(flat.storage_offset()) + int(pieces.offset[row])
            if (
                digest_of_box(flat.as_strided(size, pieces.stride[row, :ndim].tolist(), first), tensor.name, start)
                != expected
            ):
                raise LayoutError(
                    f"{tensor.name}: box from {start} of {size} is not what source rank {rank} holds (its digest "
                    "differs): it was changed after it was published; nothing was taken over"
                )

    def mapped(self) -> Publication:
        """What readers on its host get: they map the memory."""
        return replace(self, inline=None, abroad=None)

    def carried(self) -> Publication:
        """What readers on other hosts get: the bytes of this rank's share.

        Raises:
            LayoutError: it was published for readers of its host alone.
        """
        if self.abroad is None:
            raise LayoutError("what was published for readers of its host alone has no bytes for another host")
        return self.abroad

    def here(self) -> tuple[Publication, Memory | None]:
        """The same in memory of this host, for readers that the bytes do not reach by message; keep the memory."""
        if self.handle.host == this_host():
            return self.mapped(), None
        if self.inline is None:
            raise LayoutError("weights of another host came without their bytes")
        memory = Memory.create(len(self.inline))
        memory.data.copy_(read_only(self.inline))
        return replace(self, handle=memory.handle, inline=None), memory


def space_of_tensors(tensors: Mapping[str, torch.Tensor]) -> Space:
    """Names, global shapes and dtypes of plain tensors and DTensors."""
    return Space(tuple(Tensor(name, tuple(t.shape), dtype_name(t)) for name, t in tensors.items()))


def shares_of(
    space: Space, tensors: Mapping[str, torch.Tensor], rank: int = 0, world: int = 1, mesh: DeviceMesh | None = None
) -> list[Share]:
    """What a rank publishes of live tensors, as views of them.

    Of ranks that hold the same box one publishes it; the boxes are dealt evenly to those who could.

    Args:
        tensors: plain, or DTensors on ``mesh`` or a part of it.
        rank, world: of the source's process group.

    Raises:
        LayoutError: a DTensor is a partial sum, or on a mesh that is no part of ``mesh``.
    """
    found = []
    for name, tensor in tensors.items():
        boxes = boxes_of(tensor, world, mesh)
        start, size = boxes[rank]
        holders = sorted(holder for holder, box in boxes.items() if box == (start, size))
        number = space.index[name]
        if holders[number % len(holders)] == rank and 0 not in size:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            found.append(Share(number, start, local.detach()))
    return found


class Publisher:
    """Publishes a rank's share again and again, in one memory.

    Ranks of one host can have the memory in common. Each copies its share to where it belongs in the whole tensors, and
    so a reader that wants whole tensors finds them put together. What goes to other hosts is this rank's share alone.

    Args:
        space: of the whole model.
        shares: of this rank.
        rank: among the source ranks.
        gather: gives each source rank what all of them passed, in their order; a collective. Without it, or where they
            are on several hosts, each rank has a memory of its own.

    Attributes:
        layout: what the share is, and where it lies in the memory.
        memory: it is gone with this object, but for those who have attached it.
    """

    def __init__(
        self,
        space: Space,
        shares: Sequence[Share],
        rank: int = 0,
        gather: Callable[[Any], list[Any]] | None = None,
    ) -> None:
        self.space = space
        self._published = False
        self._common = gather is not None and len(set(gather(this_host()))) == 1
        self._here = _described(
            space, shares, *(_in_whole_tensors if self._common else _one_after_the_other)(space, shares)
        )
        self.layout = self._here.layout
        nbytes = _starts(self.layout.buffers)[-1]
        if gather is not None and self._common:
            made = Memory.create(nbytes) if rank == 0 else None
            handle = gather(made and made.handle)[0]
            self.memory = made or Memory.attach(handle)
            gather(None)  # the first rank may end, and its memory with it, only once every other has attached it
        else:
            self.memory = Memory.create(nbytes)
        self._into = _places(self._here, self.memory.data)
        self._abroad: tuple[Description, torch.Tensor] | None = None

    @torch.no_grad()
    def publish(self, shares: Sequence[Share], *, inline: bool = False, verify: bool = False) -> Publication:
        """Copy the shares, which are those of the start with the values of now.

        Whoever reads the last publication must be done: its bytes are overwritten.

        Args:
            shares: of this rank.
            inline: there are readers on other hosts; see `Publication.carried`.
            verify: add digests, so that readers check what they read.
        """
        held = [share for share in shares if share.values.numel()]
        changed = not self._published or self._differs(held)
        for into, share in zip(self._into, held, strict=True):
            into.copy_(share.values)
        self._published = True
        digests = None
        if verify:
            digests = tuple(digest_of_box(s.values, self.space.tensors[s.tensor].name, s.start) for s in held)
        here = Publication(self._here, self.memory.handle, changed, None, digests)
        return replace(here, abroad=self._packed(here, held)) if inline else here

    def _packed(self, here: Publication, held: Sequence[Share]) -> Publication:
        """With this rank's share as bytes. A memory of its own holds just that, one in common holds more."""
        if not self._common:
            return replace(here, inline=self.memory.data.numpy())
        if self._abroad is None:
            described = _described(self.space, held, *_one_after_the_other(self.space, held))
            room = torch.zeros(_starts(described.layout.buffers)[-1], dtype=torch.uint8)
            self._abroad = described, room
        described, room = self._abroad
        for into, share in zip(_places(described, room), held, strict=True):
            into.copy_(share.values)
        return replace(here, description=described, inline=room.numpy())

    def _differs(self, shares: Sequence[Share]) -> bool:
        """Whether the memory holds other values. Small tensors first: mostly the first one tells."""
        pairs = sorted(zip(self._into, shares, strict=True), key=lambda pair: pair[0].numel())
        return any(not torch.equal(into, share.values.to(into.device)) for into, share in pairs)


def publish(tensors: Mapping[str, torch.Tensor]) -> tuple[Publication, Publisher]:
    """Publish whole tensors. Keep the publisher for as long as somebody reads."""
    space = space_of_tensors(tensors)
    shares = shares_of(space, tensors)
    publisher = Publisher(space, shares)
    return publisher.publish(shares), publisher


def joined(publications: Sequence[Publication]) -> ExplicitLayout:
    """The layout of all source ranks together.

    Raises:
        LayoutError: they do not speak of one model.
    """
    first = publications[0].space
    for other in publications[1:]:
        if other.space.hash != first.hash:
            same_space(first, other.space)
            raise LayoutError("source ranks hold a tensor in different dtypes")
    hosts = sorted({p.handle.host for p in publications})
    return ExplicitLayout(
        first, tuple(p.layout for p in publications), tuple(hosts.index(p.handle.host) for p in publications)
    )


def _described(
    space: Space, shares: Sequence[Share], places: Sequence[tuple[int, tuple[int, ...]]], sizes: Mapping[str, int]
) -> Description:
    """Shares at (offset, strides) in buffers of these sizes by dtype; empty ones are left out."""
    dtypes = list(sizes)
    rows = [
        (
            share.tensor,
            int(Kind.PARAMETER),
            share.start,
            tuple(share.values.shape),
            dtypes.index(dtype_name(share.values)),
            offset,
            stride,
        )
        for share, (offset, stride) in zip(shares, places, strict=True)
    ]
    buffers = tuple(Buffer(dtype, numel, dtype) for dtype, numel in sizes.items())
    return Description(space, RankLayout(Pieces.of(rows, space.ndim), buffers))


def _places(described: Description, data: torch.Tensor) -> list[torch.Tensor]:
    """A view for each piece, in the shape of its tensor's box."""
    flat, pieces = _buffers(data, described.layout.buffers), described.layout.pieces
    found = []
    for row, tensor in enumerate(pieces.tensor.tolist()):
        ndim = len(described.space.tensors[tensor].shape)
        buffer = flat[int(pieces.buffer[row])]
        first = int(buffer.storage_offset()) + int(pieces.offset[row])
        found.append(buffer.as_strided(pieces.size[row, :ndim].tolist(), pieces.stride[row, :ndim].tolist(), first))
    return found


def _one_after_the_other(
    space: Space, shares: Sequence[Share]
) -> tuple[list[tuple[int, tuple[int, ...]]], dict[str, int]]:
    """(offset, strides) of each share in the buffer of its dtype, and the sizes of the buffers by dtype."""
    places, sizes = [], dict.fromkeys(sorted({dtype_name(share.values) for share in shares}), 0)
    for share in shares:
        dtype = dtype_name(share.values)
        places.append((sizes[dtype], dense(tuple(share.values.shape))))
        sizes[dtype] += share.values.numel()
    return places, sizes


def _in_whole_tensors(
    space: Space, shares: Sequence[Share]
) -> tuple[list[tuple[int, tuple[int, ...]]], dict[str, int]]:
    """The same, in buffers that hold every tensor of the space whole."""
    sizes, first = dict.fromkeys(sorted({tensor.dtype for tensor in space.tensors}), 0), []
    for tensor in space.tensors:
        first.append(sizes[tensor.dtype])
        sizes[tensor.dtype] += tensor.numel
    places = []
    for share in shares:
        stride = dense(space.tensors[share.tensor].shape)
        places.append((first[share.tensor] + sum(i * s for i, s in zip(share.start, stride, strict=True)), stride))
    return places, sizes


def _starts(buffers: Sequence[Buffer]) -> list[int]:
    """Where each buffer begins, in bytes, and where all end."""
    starts = [0]
    for buffer in buffers:
        end = starts[-1] + buffer.numel * DTYPE_BYTES[buffer.dtype]
        starts.append(-(-end // ALIGNED) * ALIGNED)
    return starts


def _buffers(data: torch.Tensor, buffers: Sequence[Buffer]) -> list[torch.Tensor]:
    found = []
    for buffer, start in zip(buffers, _starts(buffers), strict=False):
        dtype = getattr(torch, buffer.dtype)
        found.append(data[start : start + buffer.nbytes].view(dtype))
    return found
