"""One run to an output directory."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from pathlib import Path
from types import TracebackType

from rlinf.checkpoint.durable import file_errors
from rlinf.errors import CheckpointError


class OutputLock:
    """Exclusive use of an output directory until `release`, or until this process dies in whatever way.

    The kernel holds the lock (``flock``), so that there is no stale lock file to remove.

    Raises:
        CheckpointError: another run holds it (its pid and host are named), or the directory cannot be written.
    """

    def __init__(self, output_dir: Path) -> None:
        self.path = Path(output_dir) / ".lock"
        with file_errors("locking", self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                holder = os.pread(self._descriptor, 4096, 0).decode(errors="replace")
                os.close(self._descriptor)
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    raise CheckpointError(
                        f"{output_dir} is in use by another run ({_describe(holder)}); wait for it, stop it, or set "
                        "output_dir to another folder"
                    ) from None
                raise
            own = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, json.dumps(own).encode(), 0)

    def release(self) -> None:
        """Let others in. Calling it again does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> OutputLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def writable(output_dir: Path) -> None:
    """Check, before anything starts, that files can be made in ``output_dir`` (it is made if it is not there).

    Raises:
        CheckpointError: they cannot; the path, the reason and the remedy are named.
    """
    probe = Path(output_dir) / f".probe-{os.getpid()}"
    with file_errors("writing to output_dir", Path(output_dir)):
        probe.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(probe, "wb") as file:
                file.write(b"0" * 4096)
                file.flush()
                os.fsync(file.fileno())
        finally:
            probe.unlink(missing_ok=True)


def _describe(holder: str) -> str:
    try:
        told = json.loads(holder)
        return f"pid {told['pid']} on {told['host']} since {told['since']}"
    except (ValueError, KeyError, TypeError):
        return "it has not yet said which"
