"""Ranks of one host: each lays its old state open in memory that the others map, and every rank takes what it wants.

One copy from where the state lies to where it goes. State that was allocated in an `Arena` from the start is open
already; other state is copied in first.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rlinf.vps.layout import Buffer, RankLayout
from rlinf.vps.memory import Handle, Memory

_ALIGNED = 4096  # pages, so that the memory of one buffer can be given back
_PUNCH_HOLE, _KEEP_SIZE = 2, 1  # of fallocate(2)


@dataclass(frozen=True)
class Opened:
    """What a rank tells the others: the memory, and where in it each buffer begins, in bytes."""

    handle: Handle
    starts: tuple[int, ...]
    buffers: tuple[Buffer, ...]


class Arena:
    """Buffers in memory that processes of this host can map. Kept, it serves any number of relayouts.

    Attributes:
        tensors: flat, one for each buffer, zeroed.
    """

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        starts, end = [], 0
        for buffer in buffers:
            starts.append(end)
            end += -(-buffer.nbytes // _ALIGNED) * _ALIGNED
        self._memory = Memory.create(end)
        self.opened = Opened(self._memory.handle, tuple(starts), tuple(buffers))
        self.tensors = views(self._memory, self.opened)

    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these are the arena's own tensors."""
        pairs = zip(self.tensors, tensors, strict=True)
        return len(self.tensors) == len(tensors) and all(a.data_ptr() == b.data_ptr() for a, b in pairs)

    def free(self, number: int) -> None:
        """Give the memory of a buffer back to the system; its content is gone, for every process."""
        start, size = self.opened.starts[number], self.opened.buffers[number].nbytes
        libc = ctypes.CDLL(None, use_errno=True)
        pages = ctypes.c_long(-(-size // _ALIGNED) * _ALIGNED)
        if size and libc.fallocate(self._memory.handle.fd, _PUNCH_HOLE | _KEEP_SIZE, ctypes.c_long(start), pages):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def opened(layout: RankLayout, tensors: Sequence[torch.Tensor], arena: Arena | None) -> Arena:
    """The arena that the tensors lie in, or a new one that they are copied into."""
    if arena is not None and arena.holds(tensors):
        return arena
    made = Arena(layout.buffers)
    for mine, given in zip(made.tensors, tensors, strict=True):
        mine.copy_(given)
    return made


def attach(told: Opened) -> list[torch.Tensor]:
    """The buffers of another rank, flat; not to be written to.

    Raises:
        LayoutError: its process has ended.
    """
    return views(Memory.attach(told.handle), told)


def views(memory: Memory, told: Opened) -> list[torch.Tensor]:
    return [
        memory.data[start : start + buffer.nbytes].view(getattr(torch, buffer.dtype))
        for start, buffer in zip(told.starts, told.buffers, strict=True)
    ]
