"""State that leaves its device between a worker's turns, and comes back to where it was.

What is moved are storages, in place: parameters, DTensors, FSDP's flat views and the optimiser's state are the same
objects before and after, and hold the same bits.

- From a GPU they go to pinned host memory; the storage gives its memory up, and gets new memory later.
- On a CPU the device's memory is the process's own. The pages of a storage are exchanged, under the same addresses, for
  pages of a file: one in memory (`memfd`) or one on disk. The process lets go of them and maps them again, and nothing
  is copied but the first time. A file on disk the kernel can write out, so that the host's memory becomes free too; one
  in memory frees the process's alone, as pinned memory does for a GPU.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import torch
from torch.distributed.tensor import DTensor

from rlinf.errors import RlinfError

SMALL = 1 << 16  # bytes; a smaller storage stays: moving it would cost more than it frees
PAGE = mmap.PAGESIZE
# Of Linux; Python has none of them. POPULATE_READ maps pages that can be written to as well, and many at a time.
_MAP_FIXED, _DONTNEED, _POPULATE_READ, _PUNCH_HOLE = 0x10, 4, 22, 0x03
_THREADS = 4  # more than that wait for one another in the kernel
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]


class Store(Protocol):
    """Where storages lie while they are away."""

    def off(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Take them off their device. Raises: RlinfError, if there is no room; they stay then."""

    def on(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Bring the same ones back."""


class Swap:
    """A worker's tensors, there or away.

    Args:
        tensors: gives all of them, as they are now; a storage that several share is moved once.
        store: where they go.

    Attributes:
        away: they are not there.
    """

    def __init__(self, tensors: Callable[[], Iterable[torch.Tensor]], store: Store) -> None:
        self._tensors = tensors
        self._store = store
        self._gone: list[torch.UntypedStorage] = []
        self.away = False

    def off(self) -> None:
        """Send them away. Twice is once.

        Raises:
            RlinfError: there is no room for them; they are still there.
        """
        if not self.away:
            storages = _storages(self._tensors())
            self._store.off(storages)
            self._gone, self.away = storages, True

    def on(self) -> None:
        """Bring them back. Twice is once."""
        if self.away:
            self._store.on(self._gone)
            self._gone, self.away = [], False


def _storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Those that are worth it, each once."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.detach().untyped_storage()
        if storage.nbytes() >= SMALL:
            found.setdefault(storage.data_ptr(), storage)
    return list(found.values())


def store_for(device: str, folder: Path | None = None) -> Store:
    """The store that fits a device.

    Args:
        device: of the tensors.
        folder: on a CPU, where the file is made; ``None``: in memory.
    """
    return PinnedStore(device) if device.startswith("cuda") else PageStore(folder)


class PageStore:
    """Pages of a file that has no name, and is gone with the process, however that ends.

    A storage that was away once lies in pages of the file from then on, until it is no longer among those that go away,
    or this object goes: until then it is kept from its allocator.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._file = -1
        self._end = 0  # of what is used of the file
        self._placed: _Placed = {}
        weakref.finalize(self, _restore, self._placed).atexit = False  # a process that ends needs no memory

    def off(self, storages: Sequence[torch.UntypedStorage]) -> None:
        pages = {_pages(storage): storage for storage in storages}
        for address in [address for address, (size, _, _) in self._placed.items() if (address, size) not in pages]:
            self._forget(address)
        new = {place: storage for place, storage in pages.items() if place[0] not in self._placed}
        if new:
            self._place(new)
        for address, size in pages:
            _libc.madvise(address, size, _DONTNEED)  # they are in the file

    def on(self, storages: Sequence[torch.UntypedStorage]) -> None:
        # All at once. A kernel before 5.14 does not know this: pages then come one by one as they are touched.
        with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), _THREADS)) as pool:
            list(pool.map(lambda storage: _libc.madvise(*_pages(storage), _POPULATE_READ), storages))

    def _forget(self, address: int) -> None:
        """A storage is of no use any more: its allocator gets memory of its own for it."""
        size, at, _ = self._placed[address]
        _map(address, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        _libc.fallocate(self._file, _PUNCH_HOLE, at, size)
        del self._placed[address]

    def _place(self, new: dict[tuple[int, int], torch.UntypedStorage]) -> None:
        """Copy pages into the file, then map them from there."""
        total = sum(size for _, size in new)
        try:
            file = self._open()
            os.posix_fallocate(file, self._end, total)  # a page without room would be a bus error, not an exception
            at = self._end
            for address, size in new:
                data, done = memoryview((ctypes.c_char * size).from_address(address)).cast("B"), 0
                while done < size:
                    done += os.pwrite(file, data[done:], at + done)
                at += size
        except OSError as error:
            if self._file >= 0:
                os.ftruncate(self._file, self._end)
            where = f"a file in {self._folder}" if self._folder else "memory (memfd)"
            raise RlinfError(
                f"{total / 2**30:.2f} GiB of state could not be moved to {where}: {error.strerror or error}; it stays "
                "on its device. Free some room, set cluster.offload_dir to a folder that has it, or plan.swap=never"
            ) from error
        for (address, size), storage in new.items():
            _map(address, size, mmap.MAP_SHARED, self._file, self._end)
            self._placed[address] = size, self._end, storage
            self._end += size

    def _open(self) -> int:
        if self._file < 0:
            if self._folder is None:
                self._file = os.memfd_create("rlinf-swap", os.MFD_CLOEXEC)
            else:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._file, name = tempfile.mkstemp(prefix="rlinf-swap-", dir=self._folder)
                os.unlink(name)
            weakref.finalize(self, os.close, self._file).atexit = False
        return self._file


def _pages(storage: torch.UntypedStorage) -> tuple[int, int]:
    """(address, bytes) of the pages that a storage has for itself."""
    first = -(-storage.data_ptr() // PAGE) * PAGE
    return first, (storage.data_ptr() + storage.nbytes()) // PAGE * PAGE - first


def _map(address: int, size: int, flags: int, file: int = -1, offset: int = 0) -> None:
    found = _libc.mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags | _MAP_FIXED, file, offset)
    if found != address:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def drop(tensors: Iterable[torch.Tensor]) -> None:
    """Free the memory of CPU tensors whose values nobody needs: what is read of them next is zeros."""
    for storage in _storages(tensors):
        _libc.madvise(*_pages(storage), _DONTNEED)


_Placed = dict[int, tuple[int, int, torch.UntypedStorage]]
"""Address of the first page -> bytes of pages, where they are in the file, whose they are."""


def _restore(placed: _Placed) -> None:
    """Storages get memory of their own again, before their allocator does."""
    for address, (size, _, _) in placed.items():
        kept = bytes((ctypes.c_char * size).from_address(address))
        _map(address, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        ctypes.memmove(address, kept, size)
    placed.clear()


class PinnedStore:
    """Pinned host memory, which a GPU copies to and from at the link's speed. It is kept for the next time."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._kept: list[torch.Tensor] = []

    def off(self, storages: Sequence[torch.UntypedStorage]) -> None:
        try:
            if [host.numel() for host in self._kept] != [storage.nbytes() for storage in storages]:
                self._kept = []  # the old ones go before the new ones come
                self._kept = [torch.empty(s.nbytes(), dtype=torch.uint8, pin_memory=True) for s in storages]
        except RuntimeError as error:
            self._kept = []
            size = sum(storage.nbytes() for storage in storages)
            raise RlinfError(f"there is no pinned memory for {size / 2**30:.2f} GiB of state: {error}") from error
        self._copy([(host, _bytes(storage)) for host, storage in zip(self._kept, storages, strict=True)])
        for storage in storages:
            storage.resize_(0)
        torch.cuda.empty_cache()  # for another process to take

    def on(self, storages: Sequence[torch.UntypedStorage]) -> None:
        for storage, host in zip(storages, self._kept, strict=True):
            storage.resize_(host.numel())
        self._copy([(_bytes(storage), host) for host, storage in zip(self._kept, storages, strict=True)])

    def _copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for into, source in pairs:
                into.copy_(source, non_blocking=True)
        self._stream.synchronize()


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]
