"""Memory that items lie in: segments that are touched once, kept, and used again. Other processes of the host map them.

A segment has no name in any directory (`rlinf.vps.memory`): however a process ends, nothing is left in ``/dev/shm``.
"""

from __future__ import annotations

import threading
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlinf.channel.errors import PeerDied
from rlinf.channel.ranges import Ranges, aligned
from rlinf.vps.memory import Handle, Memory
from rlinf.vps.space import LayoutError

SMALLEST, LARGEST = 1 << 20, 1 << 26  # bytes of a segment, but for items that are larger
KEPT = 1 << 31  # bytes of empty segments that are kept


@dataclass(frozen=True)
class Block:
    """A range of a pool, for one item."""

    segment: Segment
    start: int
    nbytes: int

    @property
    def area(self) -> np.ndarray:
        """uint8 ``[nbytes]``. A new object at each call, so that its end can be watched."""
        return area_of(self.segment.memory, self.start, self.nbytes)


class Segment:
    """Memory, and what of it is free."""

    def __init__(self, nbytes: int) -> None:
        self.memory = Memory.create(nbytes)
        self.ranges = Ranges(nbytes)


class Pool:
    """A process' own memory for items. Thread-safe.

    Args:
        dropped: told of a segment that is let go, by its inode: those who map it may let go as well.
    """

    def __init__(self, dropped: Callable[[int], None] = lambda inode: None) -> None:
        self._segments: list[Segment] = []
        self._lock = threading.Lock()
        self._dropped = dropped

    def take(self, nbytes: int) -> Block:
        """Memory for an item; it holds anything."""
        with self._lock:
            for segment in self._segments:
                if segment.ranges.size > LARGEST and nbytes * 8 < segment.ranges.size:
                    continue  # small items would keep large ones out of it
                if (start := segment.ranges.take(nbytes)) is not None:
                    return Block(segment, start, nbytes)
            grown = max(SMALLEST, min(LARGEST, self.nbytes))
            segment = Segment(max(grown, aligned(nbytes)))
            # The smallest that fits is taken.
            insort(self._segments, segment, key=lambda s: s.ranges.size)
            start = segment.ranges.take(nbytes)
            assert start is not None
            return Block(segment, start, nbytes)

    def give(self, block: Block) -> None:
        """The item is gone."""
        with self._lock:
            block.segment.ranges.give(block.start)
            empty = [segment for segment in self._segments if segment.ranges.empty]
            spare = sum(segment.ranges.size for segment in empty)
            gone = []
            for segment in empty:
                if spare <= KEPT:
                    break
                spare -= segment.ranges.size
                self._segments.remove(segment)
                gone.append(segment.memory.handle.inode)
        for inode in gone:
            self._dropped(inode)

    @property
    def nbytes(self) -> int:
        return sum(segment.ranges.size for segment in self._segments)

    @property
    def used(self) -> int:
        return sum(segment.ranges.size - segment.ranges.free for segment in self._segments)


class Mappings:
    """Other processes' segments, each mapped once. Thread-safe."""

    def __init__(self) -> None:
        self._mapped: dict[int, dict[int, Memory]] = {}  # by member and inode
        self._lock = threading.Lock()

    def get(self, owner: int, name: str, handle: Handle) -> Memory:
        """A segment of a member.

        Raises:
            PeerDied: the member has ended, and the segment was not mapped yet.
        """
        with self._lock:
            mapped = self._mapped.setdefault(owner, {})
            if handle.inode not in mapped:
                try:
                    mapped[handle.inode] = Memory.attach(handle)
                except LayoutError as error:
                    raise PeerDied(f"an item of {name} cannot be read any more: {error}") from None
            return mapped[handle.inode]

    def drop(self, owner: int, inode: int | None = None) -> None:
        """Let go of one segment of a member, or of all. Views of them keep what they look at."""
        with self._lock:
            if inode is None:
                self._mapped.pop(owner, None)
            elif owner in self._mapped:
                self._mapped[owner].pop(inode, None)

    def drop_all(self) -> None:
        with self._lock:
            self._mapped.clear()

    @property
    def nbytes(self) -> int:
        return sum(memory.handle.nbytes for mapped in self._mapped.values() for memory in mapped.values())


def area_of(memory: Memory, start: int, nbytes: int) -> Any:
    """uint8 ``[nbytes]`` of a memory. Views hold on to this very object: it dies with the last of them."""
    return np.frombuffer(memory.data.numpy(), np.uint8, nbytes, start)
