"""The driver's side: a checkpoint is written aside, committed as a whole, found again, and pruned.

A checkpoint counts when it has its final name and its ``COMMITTED`` file. Every state that a crash can leave is one of

- a folder ``.step-N.tmp-*`` without ``COMMITTED``: rubbish, removed once nobody holds the lock inside it;
- a folder ``.step-N.tmp-*`` with ``COMMITTED`` and no ``step-N``: whole, and about to be renamed; the rename is done
  when a writer next opens the folder;
- a folder ``.step-N.old-*``: replaced or pruned, and about to be removed. Where neither of the above gave a ``step-N``
  that replaces it, a replaced one is put back.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rlinf.checkpoint.durable import file_errors, fsync_path, fsync_tree, write_durably
from rlinf.checkpoint.state import PLAIN, stored_files
from rlinf.errors import CheckpointError, ConfigError

FORMAT = 2  # 1 had no scores
MARKER = "COMMITTED"
META = "meta.json"
_WRITING = ".writing"
_FINAL = re.compile(r"step-(\d+)")
_ASIDE = re.compile(r"\.step-(\d+)\.(tmp|old|pruned)-\w+")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Identity:
    """What a checkpoint must be of, to be resumed from.

    Attributes:
        workflow: name of the workflow.
        model: name and shape of the model, as one string that differs where the weights do not fit.
    """

    workflow: str
    model: str


@dataclass(frozen=True)
class Meta:
    """``meta.json``.

    Attributes:
        step: training iterations that are done.
        weight_version: version of the policy's weights.
        workflow: see `Identity`.
        model: see `Identity`.
        world_sizes: ranks of each worker group that wrote it, by the name of its folder; another run may have others.
        before: mean validation reward at the first evaluation of the whole run; ``None`` where there was none.
        after: the same at the newest.
        config_digest: digest of the resolved config, to tell whether it changed; not a condition for resuming.
        format: version of the layout on disk.
        time: when it was committed, ISO 8601 in UTC; filled in by `Checkpoints.commit`.
    """

    step: int
    weight_version: int
    workflow: str
    model: str
    world_sizes: Mapping[str, int] = field(default_factory=dict)
    before: float | None = None
    after: float | None = None
    config_digest: str = ""
    format: int = FORMAT
    time: str = ""


class Checkpoints:
    """The checkpoints of one output directory.

    Attributes:
        directory: ``<output_dir>/checkpoints``.
        keep: how many of the newest committed ones are kept.

    Newest means committed last, not of the highest step: a run that was resumed from an earlier step has lower ones.

    Raises:
        ConfigError: ``keep`` is less than 1.
    """

    def __init__(self, output_dir: Path, keep: int) -> None:
        if keep < 1:
            raise ConfigError(
                f"checkpoint.keep is {keep}; at least 1 must be kept (checkpoint.every=0 writes one, at the end)"
            )
        self.directory = Path(output_dir) / "checkpoints"
        self.keep = keep
        self._writing: dict[Path, int] = {}  # folders begun here, and the descriptors of their locks

    def begin(self, step: int) -> Path:
        """A new folder, aside, for the checkpoint of ``step``; groups write into sub-folders of it.

        Give it to `commit`, or to `abandon`.
        """
        aside = self.directory / f".step-{step:06d}.tmp-{uuid.uuid4().hex[:12]}"
        with file_errors("writing checkpoint", aside):
            self.directory.mkdir(parents=True, exist_ok=True)
            self.recover()
            aside.mkdir()
            descriptor = os.open(aside / _WRITING, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        self._writing[aside] = descriptor
        return aside

    def commit(self, path: Path, meta: Meta) -> Path:
        """Make a folder from `begin` the checkpoint of its step, then prune. Returns where it stands.

        Raises:
            CheckpointError: a file that a group should have written is not there, or the disk refuses. What was
                committed before is untouched, and the folder is removed.
        """
        found = _ASIDE.fullmatch(path.name)
        if path not in self._writing or found is None or int(found[1]) != meta.step:
            raise CheckpointError(f"{path} was not begun here for step {meta.step}")
        final = self.directory / f"step-{meta.step:06d}"
        try:
            with file_errors("writing checkpoint", path):
                _check_whole(path, meta.world_sizes)
                stamped = {**asdict(meta), "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
                (path / META).write_text(json.dumps(stamped, indent=1) + "\n")
                fsync_tree(path)
                serial = 1 + max((_serial(other) for other in self.committed()), default=0)
                write_durably(path / MARKER, json.dumps({"serial": serial, "time": stamped["time"]}) + "\n")
                replaced = None
                if final.exists():  # a run that was resumed from before this step comes past it again
                    replaced = self.directory / f".{final.name}.old-{uuid.uuid4().hex[:12]}"
                    os.rename(final, replaced)
                os.rename(path, final)
                fsync_path(self.directory)
        except BaseException:
            self.abandon(path)
            with contextlib.suppress(OSError):
                self.recover()
            raise
        (final / _WRITING).unlink(missing_ok=True)
        os.close(self._writing.pop(path))
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)
        self.prune()
        return final

    def abandon(self, path: Path) -> None:
        """Remove a folder from `begin` that is not to be committed."""
        descriptor = self._writing.pop(path, None)
        if descriptor is not None:
            os.close(descriptor)
            shutil.rmtree(path, ignore_errors=True)

    def committed(self) -> list[Path]:
        """Committed checkpoints, in the order in which they were committed."""
        found = [p for p in self._folders() if _FINAL.fullmatch(p.name) and (p / MARKER).exists()]
        return sorted(found, key=lambda p: (_serial(p), p.name))

    def latest(self) -> Path | None:
        """The newest committed checkpoint; one that is not whole is passed over, with a warning."""
        try:
            self.recover()
        except OSError as error:
            log.warning("what a dead run left in %s could not be put in order: %s", self.directory, error)
        for path in self._folders():
            if _FINAL.fullmatch(path.name) and not (path / MARKER).exists():
                log.warning("%s has no %s: it is not whole, and is passed over", path, MARKER)
        whole = self.committed()
        return whole[-1] if whole else None

    def read_meta(self, path: Path) -> Meta:
        """Read ``meta.json``.

        Raises:
            CheckpointError: it is not there, is not readable, or is of a newer format.
        """
        path = Path(path)
        with file_errors("reading checkpoint", path):
            text = (path / META).read_text()
        try:
            told = json.loads(text)
            version = int(told["format"])
            if version > FORMAT:
                raise CheckpointError(
                    f"{path} has format {version}, this version of rlinf reads up to {FORMAT}; resume it with the "
                    "version that wrote it"
                )
            return Meta(**told)
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path / META} is not what rlinf writes: {error}") from error

    def verify(self, path: Path, expected: Identity) -> Meta:
        """Check that a checkpoint can be resumed from, and return its meta.

        Raises:
            CheckpointError: it is not committed, lacks files, is of another workflow or model, or of a newer format.
        """
        path = Path(path)
        if not path.is_dir():
            near = [str(p) for p in self.committed()]
            there = f"committed ones are {', '.join(near)}" if near else f"none is committed in {self.directory}"
            raise CheckpointError(f"there is no checkpoint at {path}; {there}")
        if not (path / MARKER).exists():
            raise CheckpointError(
                f"{path} is not a committed checkpoint (no {MARKER} in it): a run ended while it was written, or it is "
                "another folder; give the path of a step-... folder that has one"
            )
        meta = self.read_meta(path)
        with file_errors("reading checkpoint", path):
            _check_whole(path, meta.world_sizes)
        for what, found, wanted in (
            ("workflow", meta.workflow, expected.workflow),
            ("model", meta.model, expected.model),
        ):
            if found != wanted:
                raise CheckpointError(
                    f"{path} is of {what} {found!r}, this run's {what} is {wanted!r}; resume with that {what}, or "
                    "start anew with resume=never and another output_dir"
                )
        return meta

    def prune(self) -> list[Path]:
        """Remove all but the ``keep`` newest committed checkpoints on disk, and what crashed writers left.

        A disk that refuses to delete is a warning: the checkpoint that was just made counts.
        """
        removed = []
        try:
            for path in self.committed()[: -self.keep]:
                # Renamed first: a crash in the middle must not leave half a checkpoint that says it is committed.
                gone = self.directory / f".{path.name}.pruned-{uuid.uuid4().hex[:12]}"
                os.rename(path, gone)
                shutil.rmtree(gone)
                removed.append(path)
            self.recover()
        except OSError as error:
            log.warning("old checkpoints in %s could not be removed: %s", self.directory, error)
        return removed

    def recover(self) -> None:
        """Finish or undo what a writer that died had begun; what a living one holds is left alone."""
        aside = [(path, match) for path in self._folders() if (match := _ASIDE.fullmatch(path.name))]
        held = {match[1] for path, match in aside if path in self._writing or _held(path / _WRITING)}
        for path, match in sorted(aside, key=lambda pair: pair[1][2] == "old"):  # what replaces, then what is replaced
            if match[1] in held:
                continue
            final = self.directory / f"step-{match[1]}"
            if match[2] != "pruned" and (path / MARKER).exists() and not final.exists():
                os.rename(path, final)
                fsync_path(self.directory)
                log.warning("%s was whole but not in its place when a run ended; it is now %s", path.name, final)
            else:
                if match[2] == "tmp":
                    log.warning("%s was not committed (a run ended while it was written); it is removed", path)
                shutil.rmtree(path, ignore_errors=True)

    def _folders(self) -> list[Path]:
        with file_errors("reading", self.directory):
            return sorted(p for p in self.directory.iterdir() if p.is_dir()) if self.directory.is_dir() else []


def _held(lock: Path) -> bool:
    """Whether a living process holds this lock."""
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _serial(path: Path) -> int:
    """Place in the order of commits, as its marker tells."""
    try:
        return int(json.loads((path / MARKER).read_text())["serial"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _check_whole(path: Path, groups: Iterable[str]) -> None:
    """Every file that the groups' own indices name is there: nodes that share no file system would lose some."""
    for group in sorted({path / name for name in groups} | {p.parent for p in path.rglob(PLAIN)}):
        for name in [PLAIN] if not (group / PLAIN).is_file() else stored_files(group):
            if not (group / name).is_file():
                raise CheckpointError(
                    f"{group / name} is missing in the checkpoint: output_dir must be on a file system that all nodes "
                    "share, and nobody may remove files from a checkpoint"
                )
