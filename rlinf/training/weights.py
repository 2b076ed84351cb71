"""Full tensors of a model that is spread over ranks: to send to an engine, or to write as a model directory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from rlinf.errors import ModelError
from rlinf.training.state import named_tensors

COPIED = (
    "config.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
SHARD_BYTES = 4 * 2**30
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@torch.no_grad()
def full_weights(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, full tensor) of each parameter and persistent buffer, in one order on all ranks; tied ones once.

    A collective: every rank must exhaust it. All ranks get the tensors, on the device that they train on.
    """
    for name, tensor in named_tensors(module).items():
        yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check_names(module: nn.Module, source: Path) -> None:
    """Make sure that parameters are called as in the directory that they came from, as engines expect them.

    Raises:
        ModelError: transformers renames this model's weights while it loads them.
    """
    strange = sorted(set(named_tensors(module)) - set(_source_dtypes(source)))
    if strange:
        raise ModelError(
            f"{type(module).__name__} has {len(strange)} weights under names that {source} does not use, among them "
            f"{strange[:4]}: what is trained could not be sent to an engine, or exported, under the right names"
        )


def export(module: nn.Module, source: Path, directory: Path, *, write: bool) -> None:
    """Write a Hugging Face model directory: each weight in the dtype of the source, its config, its tokenizer.

    A collective. On the rank that writes, the directory is complete when this returns.

    Args:
        module: the transformers model.
        source: the directory that it was loaded from.
        directory: made if it is not there.
        write: this rank writes (one does).
    """
    dtypes = _source_dtypes(source)
    shards: list[dict[str, int]] = []  # name -> bytes
    pending: dict[str, torch.Tensor] = {}
    if write:
        directory.mkdir(parents=True, exist_ok=True)
    for name, tensor in full_weights(module):
        if not write:
            continue
        kept = tensor.to("cpu", dtypes.get(name, tensor.dtype)).contiguous()
        if pending and sum(t.nbytes for t in pending.values()) + kept.nbytes > SHARD_BYTES:
            shards.append(_save(pending, directory / _part(len(shards))))
            pending = {}
        pending[name] = kept
    if not write:
        return
    shards.append(_save(pending, directory / _part(len(shards))))
    _name_shards(directory, shards)
    for name in (*COPIED, *(file.name for file in source.glob("*.py"))):
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)


def _part(number: int) -> str:
    return f"part-{number}.safetensors"


def _save(tensors: dict[str, torch.Tensor], file: Path) -> dict[str, int]:
    from safetensors.torch import save_file

    save_file(tensors, file, metadata={"format": "pt"})
    return {name: tensor.nbytes for name, tensor in tensors.items()}


def _name_shards(directory: Path, shards: list[dict[str, int]]) -> None:
    """Give the files the names that transformers looks for."""
    if len(shards) == 1:
        (directory / _part(0)).rename(directory / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards):
        final = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        (directory / _part(i)).rename(directory / final)
        weight_map.update(dict.fromkeys(names, final))
    total = sum(size for names in shards for size in names.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _source_dtypes(source: Path) -> dict[str, torch.dtype]:
    """Name -> dtype of each weight in a directory's safetensors files."""
    found: dict[str, torch.dtype] = {}
    for file in sorted(source.glob("*.safetensors")):
        with file.open("rb") as handle:
            header = json.loads(handle.read(int.from_bytes(handle.read(8), "little")))
        found.update(
            {
                name: DTYPES[entry["dtype"]]
                for name, entry in header.items()
                if name != "__metadata__" and entry["dtype"] in DTYPES
            }
        )
    return found
