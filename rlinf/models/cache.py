"""Model directories that are built once and kept in the user's cache.

A directory is written aside, flushed, and renamed: another process sees a whole one or none, and a process that is
killed leaves nothing that could be mistaken for a model.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from rlinf.errors import ModelError


def cache_root() -> Path:
    """``$XDG_CACHE_HOME/rlinf/models``, by default under ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "rlinf" / "models"


def build_once(name: str, build: Callable[[Path], None]) -> Path:
    """The cached directory ``name``; made by ``build(directory)`` if it is not there yet.

    Of several processes that ask at once, one builds and the others wait for it.

    Args:
        name: directory name; it must change whenever what ``build`` writes changes.
        build: fills an empty directory.

    Raises:
        ModelError: the cache directory cannot be written.
    """
    from filelock import FileLock

    target = cache_root() / name
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.parent / f"{name}.lock"):
            if not target.is_dir():
                for left_over in target.parent.glob(f".{name}.*"):  # of builders that were killed
                    shutil.rmtree(left_over, ignore_errors=True)
                _build_aside(target, build)
    except OSError as error:
        raise ModelError(
            f"cannot write the model cache at {target.parent}: {error}; "
            "free space there, or set XDG_CACHE_HOME to a directory that can be written"
        ) from error
    return target


def _build_aside(target: Path, build: Callable[[Path], None]) -> None:
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        build(aside)
        for file in aside.rglob("*"):
            if file.is_file():
                _flush(file)
        _flush(aside)
        aside.chmod(0o755)
        aside.rename(target)
        _flush(target.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
