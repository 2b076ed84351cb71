"""Memory that other processes of a host can map, and that is gone with the last process that holds it.

It has no name in any directory: others open it through the process that made it. Nothing is left behind, however a
process ends, and the size of ``/dev/shm`` does not matter.
"""

from __future__ import annotations

import mmap
import os
import warnings
from dataclasses import dataclass

import torch

from rlinf.host import this_host
from rlinf.vps.space import LayoutError


@dataclass(frozen=True)
class Handle:
    """Where another process finds a memory.

    Attributes:
        host: see `this_host`.
        pid, fd: of the process that made it.
        inode: of the memory; tells it from another one that took its place.
        nbytes: its size.
    """

    host: str
    pid: int
    fd: int
    inode: int
    nbytes: int


class Memory:
    """Mapped memory. Make it by `create` or `attach`.

    Attributes:
        handle: for other processes.
        data: uint8 ``[nbytes]``; readers must not write to it.
    """

    def __init__(self, handle: Handle, fd: int) -> None:
        self.handle = handle
        self._fd = fd  # as long as it is open, others can attach
        # Every page is touched now: the first touch of a page costs many times what copying it does.
        self._map = mmap.mmap(fd, max(handle.nbytes, 1), flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.data = torch.frombuffer(self._map, dtype=torch.uint8)[: handle.nbytes]

    def __del__(self) -> None:
        if (fd := getattr(self, "_fd", None)) is not None:
            os.close(fd)

    @classmethod
    def create(cls, nbytes: int) -> Memory:
        """New memory of this process, zeroed."""
        fd = os.memfd_create("rlinf-vps", os.MFD_CLOEXEC)
        os.ftruncate(fd, max(nbytes, 1))
        return cls(Handle(this_host(), os.getpid(), fd, os.fstat(fd).st_ino, nbytes), fd)

    @classmethod
    def attach(cls, handle: Handle) -> Memory:
        """Memory that a process of this host made.

        Raises:
            LayoutError: it is on another host, or its process has ended.
        """
        if handle.host != this_host():
            raise LayoutError(f"memory of process {handle.pid} is on host {handle.host}, and this is {this_host()}")
        try:
            fd = os.open(f"/proc/{handle.pid}/fd/{handle.fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise LayoutError(f"memory of process {handle.pid} cannot be opened: has it ended? ({error})") from None
        if os.fstat(fd).st_ino != handle.inode:
            os.close(fd)
            raise LayoutError(f"memory of process {handle.pid} is gone: another process has its number")
        return cls(handle, fd)


def read_only(array: object) -> torch.Tensor:
    """A uint8 tensor over an array that must not be written to (out of Ray's shared memory)."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)
