"""What must be on the disk is on the disk; and a disk that says no is a `CheckpointError` that names the path."""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlinf.errors import CheckpointError

_REMEDY = {
    errno.ENOSPC: "the disk is full: free some space, or set output_dir to another disk, or lower checkpoint.keep",
    errno.EDQUOT: "the quota is used up: free some space, or set output_dir to another disk",
    errno.EFBIG: "a file may not grow that large here: raise the limit (ulimit -f), or set output_dir to another disk",
    errno.EACCES: "no permission: set output_dir to a folder that this user may write",
    errno.EPERM: "no permission: set output_dir to a folder that this user may write",
    errno.EROFS: "the file system is read-only: set output_dir to another",
    errno.ENOTDIR: "a file stands where a folder is needed: move it away, or set output_dir to another folder",
    errno.EEXIST: "a file stands where a folder is needed: move it away, or set output_dir to another folder",
}


@contextmanager
def file_errors(doing: str, path: Path) -> Iterator[None]:
    """Turn an `OSError` into a `CheckpointError`: what was done, where, and what to change."""
    try:
        yield
    except OSError as error:
        raise as_error(error, doing, path) from error


def as_error(error: OSError, doing: str, path: Path) -> CheckpointError:
    """The message for one file error."""
    where = error.filename if error.filename is not None else path
    remedy = _REMEDY.get(error.errno or 0, "checkpoints that were committed before are untouched")
    return CheckpointError(f"{doing} {path} failed at {where}: {error.strerror or error} ({remedy})")


def fsync_path(path: Path) -> None:
    """Flush one file or folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot flush a folder; they keep its entries in order themselves.
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.EBADF)):
            raise
    finally:
        os.close(descriptor)


def fsync_tree(root: Path) -> None:
    """Flush every file below ``root``, then the folders from the innermost outwards."""
    for folder, _, files in os.walk(root, topdown=False):
        for name in files:
            fsync_path(Path(folder, name))
        fsync_path(Path(folder))


def write_durably(path: Path, text: str) -> None:
    """Write a small file, whole or not at all, and flush it and its folder's entry."""
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")  # ranks without a process group may write the same
    try:
        with open(aside, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    fsync_path(path.parent)
