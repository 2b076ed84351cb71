"""From the model config to an ordinary Hugging Face model directory on this machine."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from rlinf.config import ModelConfig
from rlinf.errors import ModelError
from rlinf.models import smollm2, tiny
from rlinf.models.cache import build_once
from rlinf.models.quiet import quiet

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BUILT_IN = {"smollm2": smollm2, "tiny": tiny}
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py"]


def resolve(cfg: ModelConfig) -> Path:
    """The directory of the model: ``config.json``, safetensors, tokenizer, generation config, chat template.

    ``cfg.path`` is a directory or a hub name. Without it, ``cfg.name`` is one of the models that are made here, once,
    into the user's cache. Safe for several processes at once.

    Raises:
        ModelError: unknown name, no such directory, or a directory that lacks something; the message says what.
    """
    if cfg.path is not None:
        directory = _local_or_hub(cfg.path)
    elif cfg.name in BUILT_IN:
        source = BUILT_IN[cfg.name]
        with quiet():
            directory = build_once(source.cache_name(), source.build)
    else:
        raise ModelError(
            f"model.name={cfg.name!r} is not one of {sorted(BUILT_IN)} and model.path is not set; "
            "set model.path to a Hugging Face model directory or hub name"
        )
    check_directory(directory)
    return directory


def check_directory(directory: Path) -> None:
    """Make sure that a directory has what loading a model and its tokenizer needs.

    Raises:
        ModelError: names everything that is missing.
    """
    missing = []
    if not (directory / "config.json").is_file():
        missing.append("config.json")
    missing += _missing_weights(directory)
    if not any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        missing.append("a tokenizer (tokenizer.json, tokenizer.model or vocab.json)")
    if missing:
        raise ModelError(f"model directory {directory} lacks {'; '.join(missing)}")


def load_tokenizer(path: Path | str, cfg: ModelConfig | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory.

    Raises:
        ModelError: it cannot be read, or has no end-of-sequence token.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=bool(cfg and cfg.trust_remote_code))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read the tokenizer in {path}: {error}") from error
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"the tokenizer in {path} has no eos_token; responses could never end: "
            "set eos_token in its tokenizer_config.json"
        )
    return tokenizer


def _local_or_hub(path: str) -> Path:
    local = Path(path).expanduser()
    if local.is_dir():
        return local.resolve()
    if local.exists():
        raise ModelError(f"model.path={path!r} is a file; a Hugging Face model directory is needed")
    if path.startswith((".", "~", os.sep)) or not HUB_NAME.fullmatch(path):
        raise ModelError(f"model.path={path!r}: no such directory")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, allow_patterns=HUB_FILES))
    except Exception as error:  # the hub client has no common base for network, HTTP and cache errors
        raise ModelError(
            f"model.path={path!r} is neither a directory here nor a model that the hub gave: "
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        ) from error


def _missing_weights(directory: Path) -> list[str]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        shards = set(json.loads(index.read_text())["weight_map"].values())
        lost = sorted(shard for shard in shards if not (directory / shard).is_file())
        return [f"weight files {', '.join(lost)} that {index.name} lists"] if lost else []
    if any(directory.glob("*.safetensors")):
        return []
    if any(directory.glob("*.bin")):
        return ["safetensors weights (it has *.bin; load it with transformers and call save_pretrained to convert)"]
    return ["weights (*.safetensors)"]
