"""What a model is, read from its directory without loading a weight."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rlinf.config import ModelConfig
from rlinf.errors import ModelError


@dataclass(frozen=True)
class ModelInfo:
    """Sizes of a causal language model.

    Attributes:
        architecture: class name, e.g. ``LlamaForCausalLM``.
        layers: decoder layers.
        hidden: width of the residual stream.
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: size of one head.
        vocab: rows of the embedding.
        parameters: logical parameters; a tied head is counted once.
        eos_ids: every token id that ends a response.
        tied: the head shares the embedding's weights.
        max_positions: longest sequence that the model was made for; 0 if its config does not say.
    """

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    parameters: int
    eos_ids: tuple[int, ...]
    tied: bool
    max_positions: int


def describe(path: Path | str, cfg: ModelConfig | None = None) -> ModelInfo:
    """Read config, generation config and safetensors headers of a model directory.

    Raises:
        ModelError: the config cannot be read, or is not one of a causal language model.
    """
    from transformers import AutoConfig

    directory = Path(path)
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=bool(cfg and cfg.trust_remote_code))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read config.json in {directory}: {error}") from error
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_attention_heads", None)
    if heads is None or not config.architectures:
        raise ModelError(f"{directory}/config.json ({config.model_type}) does not describe a causal language model")
    return ModelInfo(
        architecture=config.architectures[0],
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        vocab=text.vocab_size,
        parameters=_count(directory, bool(config.tie_word_embeddings)),
        eos_ids=_eos_ids(directory, text.eos_token_id),
        tied=bool(config.tie_word_embeddings),
        max_positions=getattr(text, "max_position_embeddings", None) or 0,
    )


def _count(directory: Path, tied: bool) -> int:
    shapes: dict[str, list[int]] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with file.open("rb") as handle:
            header = json.loads(handle.read(int.from_bytes(handle.read(8), "little")))
        shapes.update({name: entry["shape"] for name, entry in header.items() if name != "__metadata__"})
    if tied:
        shapes.pop("lm_head.weight", None)  # some files carry the head although it is the embedding
    return sum(math.prod(shape) for shape in shapes.values())


def _eos_ids(directory: Path, from_config: int | list[int] | None) -> tuple[int, ...]:
    generation = directory / "generation_config.json"
    from_generation = json.loads(generation.read_text()).get("eos_token_id") if generation.is_file() else None
    return tuple(sorted({*_as_list(from_config), *_as_list(from_generation)}))


def _as_list(ids: int | Iterable[int] | None) -> list[int]:
    if ids is None:
        return []
    return [ids] if isinstance(ids, int) else list(ids)
