"""One worker group's part of a checkpoint, written and read by all its ranks together.

Both functions are collective when a process group is initialised, and work alone without one. Tensors go through
``torch.distributed.checkpoint``: every rank writes its own shards. What a reader takes of them follows from the two
layouts, see `rlinf.checkpoint.planner`, so that a checkpoint of two ranks can be read by one or by four.
"""

from __future__ import annotations

import errno
import hashlib
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from rlinf.checkpoint.durable import as_error, file_errors, fsync_path, write_durably
from rlinf.checkpoint.tree import decode, encode, flatten, rebuild
from rlinf.errors import CheckpointError

PLAIN = "scalars.json"
_SHOWN = 8  # names listed in an error


def save_state(state: dict[str, Any], directory: Path) -> None:
    """Write a state into ``directory`` (made if it is not there).

    Called on all ranks of the group at once, with the same keys on each. A plain tensor that every rank holds is
    written once; a `DTensor` shard by shard. Plain values, and tensors that are not of floats (RNG states, counters),
    must be equal on all ranks: one that differs would be lost, and is refused. Keep it as a DTensor or under a key of
    its rank (present on all ranks) instead.

    Raises:
        CheckpointError: something cannot be kept, ranks differ, or the disk refuses; on all ranks at once.
    """
    directory = Path(directory)
    tensors, plain = _together(lambda: flatten(state), f"saving {directory}")
    _check_ranks_agree(tensors, plain)

    def prepare() -> None:
        with file_errors("writing checkpoint", directory):
            directory.mkdir(parents=True, exist_ok=True)
            if _rank() == 0:
                table = {path: encode(path, value) for path, value in plain.items()}
                write_durably(directory / PLAIN, json.dumps(table, indent=1, allow_nan=False) + "\n")

    _together(prepare, f"saving {directory}")
    if tensors:
        from torch.distributed.checkpoint import FileSystemWriter, save

        writer = FileSystemWriter(directory)
        _dcp("writing checkpoint", directory, lambda: save(tensors, storage_writer=writer, no_dist=not _grouped()))
    _together(lambda: _flush(directory), f"saving {directory}")


def load_state(template: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Read what `save_state` wrote into the tensors of ``template``, in place.

    Called on all ranks of the group at once. The template's tensors may be sharded otherwise than those that were
    saved, over another number of ranks, and be on another device; shapes and dtypes must be the same.

    Returns:
        A tree with the template's keys: its own tensors, filled, and the saved plain values.

    Raises:
        CheckpointError: a key that is missing or that nobody asked for, another shape or dtype, a hole in what was
            saved, a file that is gone or was cut short; on all ranks at once, before any tensor is touched.
    """
    directory = Path(directory)
    tensors, plain = _together(lambda: flatten(template), f"loading {directory}")
    saved_plain = _together(lambda: _check_against(tensors, plain, directory), f"loading {directory}")
    if tensors:
        from torch.distributed.checkpoint import FileSystemReader, load

        from rlinf.checkpoint.planner import LayoutLoadPlanner

        reader, planner = FileSystemReader(directory), LayoutLoadPlanner(directory)
        alone = not _grouped()
        _dcp(
            "reading checkpoint",
            directory,
            lambda: load(tensors, storage_reader=reader, planner=planner, no_dist=alone),
        )
    return rebuild(template, lambda path, value: value if path in tensors else saved_plain[path])


def stored_files(directory: Path) -> list[str]:
    """Files that the group folder's own index says must be in it."""
    if not (directory / ".metadata").exists():
        return [PLAIN]
    from torch.distributed.checkpoint import FileSystemReader

    index = FileSystemReader(directory).read_metadata()
    return [PLAIN, *sorted({info.relative_path for info in (index.storage_data or {}).values()})]


def _check_against(tensors: dict[str, torch.Tensor], plain: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Compare a template with what is stored; return the plain values."""
    if not directory.is_dir():
        raise CheckpointError(
            f"{directory} is not there: the checkpoint has no such worker group, or output_dir is not on a file system "
            "that all nodes share"
        )
    with file_errors("reading checkpoint", directory):
        saved_plain = {path: decode(value) for path, value in json.loads((directory / PLAIN).read_text()).items()}
    stored: dict[str, Any] = {}
    if (directory / ".metadata").exists():
        from torch.distributed.checkpoint import FileSystemReader

        with file_errors("reading checkpoint", directory):
            stored = FileSystemReader(directory).read_metadata().state_dict_metadata

    here, there = {**tensors, **plain}, {**stored, **saved_plain}
    missing, extra = sorted(set(here) - set(there)), sorted(set(there) - set(here))
    problems = []
    if missing:
        problems.append(f"missing in the checkpoint: {_some(missing)}")
    if extra:
        problems.append(f"in the checkpoint alone: {_some(extra)}")
    for path, tensor in tensors.items():
        if path in saved_plain:
            problems.append(f"{path}: a plain value was saved, a tensor is expected")
        elif path in stored:
            saved, shape = stored[path], tuple(tensor.shape)
            if tuple(saved.size) != shape:
                problems.append(f"{path}: saved with shape {tuple(saved.size)}, expected {shape}")
            elif saved.properties.dtype != tensor.dtype:
                problems.append(f"{path}: saved as {saved.properties.dtype}, expected {tensor.dtype}")
    problems += [f"{path}: a tensor was saved, a plain value is expected" for path in plain if path in stored]
    if problems:
        more = f"\n  ... and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise CheckpointError(
            f"{directory} does not fit what this run builds:\n  "
            + "\n  ".join(problems[:_SHOWN])
            + more
            + "\nresume with the model, dtype, optimizer and workflow of the run that wrote it, or start anew with "
            "resume=never (world sizes and parallel layouts may differ)"
        )
    return saved_plain


def _check_ranks_agree(tensors: dict[str, torch.Tensor], plain: dict[str, Any]) -> None:
    if not _grouped() or dist.get_world_size() == 1:
        return
    mine: dict[str, str] = {path: f"plain value {value!r}" for path, value in plain.items()}
    for path, tensor in tensors.items():
        kind = "DTensor" if isinstance(tensor, DTensor) else "tensor"
        mine[path] = f"{kind} {tuple(tensor.shape)} {tensor.dtype}"
        # Replicas of floats may differ in the last bit on some devices; what counts or seeds may not.
        if kind == "tensor" and not (tensor.is_floating_point() or tensor.is_complex()):
            raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            mine[path] += f" with content {hashlib.blake2b(raw, digest_size=8).hexdigest()}"
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for rank, theirs in enumerate(everyone[1:], start=1):
        for path in sorted(set(everyone[0]) | set(theirs)):
            first, other = everyone[0].get(path, "absent"), theirs.get(path, "absent")
            if first != other:
                raise CheckpointError(
                    f"ranks differ in {path} of the state: rank 0 has {first[:200]}, rank {rank} has {other[:200]}; "
                    "values of a rank's own must be a DTensor, or stand on every rank under a key for each rank"
                )


def _dcp(doing: str, directory: Path, action: Callable[[], Any]) -> None:
    from torch.distributed.checkpoint.api import CheckpointException  # derives from BaseException

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            action()
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        refused = _disk_error(cause)
        if refused is not None:
            raise as_error(refused, f"rank {rank}: {doing}", directory) from error
        raise CheckpointError(f"rank {rank}: {doing} {directory} failed: {type(cause).__name__}: {cause}") from error
    except OSError as error:
        raise as_error(error, doing, directory) from error


def _disk_error(cause: BaseException | None) -> OSError | None:
    """The file error behind what torch raises: its writer trips over a short write and shows that instead."""
    seen = cause
    while seen is not None:
        if isinstance(seen, OSError):
            return seen
        seen = seen.__cause__ or seen.__context__
    if cause is not None and "inline_container" in str(cause):  # of another rank: the chain is lost on the way
        return OSError(errno.ENOSPC, "a write was cut short")
    return None


def _together(action: Callable[[], Any], doing: str) -> Any:
    """Run on every rank; where one fails, all raise, so that nobody waits in a collective for one that left."""
    if not _grouped() or dist.get_world_size() == 1:
        return action()
    result, mine = None, None
    try:
        result = action()
    except Exception as error:
        mine = error
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, None if mine is None else f"{mine}")
    if mine is not None:
        raise mine
    failed = [(rank, text) for rank, text in enumerate(everyone) if text is not None]
    if failed:
        raise CheckpointError(f"{doing} failed on rank {failed[0][0]}: {failed[0][1]}")
    return result


def _flush(directory: Path) -> None:
    with file_errors("writing checkpoint", directory):
        fsync_path(directory)


def _grouped() -> bool:
    return dist.is_available() and dist.is_initialized()


def _rank() -> int:
    return dist.get_rank() if _grouped() else 0


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
