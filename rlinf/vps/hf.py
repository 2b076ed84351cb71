"""The space of a decoder model, from its Hugging Face config alone: Llama, Qwen3 and Qwen3-MoE shapes. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from rlinf.vps.space import Kind, LayoutError, Space, Tensor

EMBED, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


# What transformers takes where a config lacks a key, as far as it is not derived from other keys.
DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "llama": {},
    "qwen3": {"head_dim": 128, "num_key_value_heads": 32},
    "qwen3_moe": {"num_key_value_heads": 4},
}


class Role(Enum):
    """How a tensor is cut for tensor parallelism."""

    VOCABULARY = "rows of the vocabulary, padded"
    HEADS = "rows, by query heads"
    KV_HEADS = "rows, by key-value heads; repeated where there are more ranks than heads"
    ROWS = "rows"
    COLUMNS = "columns"
    WHOLE = "not at all"


@dataclass(frozen=True)
class Slot:
    """A tensor of a model.

    Attributes:
        name: in the checkpoint.
        shape: at parallel size 1.
        role: how it is cut.
        layer: decoder layer; -1: before the first; -2: after the last.
        expert: index of the expert; -1: dense.
        fused: tensors of one layer with one such name lie in one buffer where projections are fused.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    layer: int
    expert: int = -1
    fused: str = ""


@dataclass(frozen=True)
class Decoder:
    """Sizes of a decoder model, as its config gives them."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    head_norms: bool
    attention_bias: bool
    mlp_bias: bool
    experts: int
    moe_intermediate: int
    dense_layers: frozenset[int]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Decoder:
        """Read a config.

        Raises:
            LayoutError: the architecture is not one of those that are known here, or a size is missing.
        """
        kind = config.get("model_type", "")
        if kind not in DEFAULTS:
            raise LayoutError(f"model_type={kind!r}: a space can be described for {', '.join(DEFAULTS)}")
        config = {**DEFAULTS[kind], **config}

        def size(*names: str) -> int:
            for name in names:
                if config.get(name) is not None:
                    return int(config[name])
            raise LayoutError(f"the {kind} config has no {' or '.join(names)}: the shapes cannot be told without it")

        moe = kind == "qwen3_moe"
        layers, hidden, heads = size("num_hidden_layers"), size("hidden_size"), size("num_attention_heads")
        experts = size("num_experts", "num_local_experts") if moe else 0  # the latter is what transformers 5 writes
        step = config.get("decoder_sparse_step", 1)
        listed = config.get("mlp_only_layers") or ()
        dense = frozenset(i for i in range(layers) if not experts or i in listed or (i + 1) % step)
        return cls(
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            intermediate=size("intermediate_size") if dense else 0,
            vocab=size("vocab_size"),
            tied=bool(config.get("tie_word_embeddings", False)),
            head_norms=kind.startswith("qwen3"),
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=kind == "llama" and bool(config.get("mlp_bias", False)),
            experts=experts,
            moe_intermediate=size("moe_intermediate_size") if len(dense) < layers else 0,
            dense_layers=dense,
        )

    def slots(self) -> Iterator[Slot]:
        """Every tensor; a tied head is not one of its own."""
        yield Slot(EMBED, (self.vocab, self.hidden), Role.VOCABULARY, -1)
        for layer in range(self.layers):
            yield from self._layer(layer)
        yield Slot(NORM, (self.hidden,), Role.WHOLE, -2)
        if not self.tied:
            yield Slot(HEAD, (self.vocab, self.hidden), Role.VOCABULARY, -2)

    def _layer(self, layer: int) -> Iterator[Slot]:
        at, hidden = f"model.layers.{layer}.", self.hidden
        yield Slot(at + "input_layernorm.weight", (hidden,), Role.WHOLE, layer)
        yield Slot(at + "post_attention_layernorm.weight", (hidden,), Role.WHOLE, layer)
        attention = at + "self_attn."
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        for name, rows, role in (
            ("q_proj", width, Role.HEADS),
            ("k_proj", kv_width, Role.KV_HEADS),
            ("v_proj", kv_width, Role.KV_HEADS),
        ):
            yield Slot(f"{attention}{name}.weight", (rows, hidden), role, layer, fused="qkv_proj.weight")
            if self.attention_bias:
                yield Slot(f"{attention}{name}.bias", (rows,), role, layer, fused="qkv_proj.bias")
        yield Slot(attention + "o_proj.weight", (hidden, width), Role.COLUMNS, layer)
        if self.attention_bias:
            yield Slot(attention + "o_proj.bias", (hidden,), Role.WHOLE, layer)
        if self.head_norms:
            yield Slot(attention + "q_norm.weight", (self.head_dim,), Role.WHOLE, layer)
            yield Slot(attention + "k_norm.weight", (self.head_dim,), Role.WHOLE, layer)
        if layer in self.dense_layers:
            yield from self._feed_forward(at + "mlp.", self.intermediate, layer, -1)
            return
        yield Slot(at + "mlp.gate.weight", (self.experts, hidden), Role.WHOLE, layer)
        for expert in range(self.experts):
            yield from self._feed_forward(f"{at}mlp.experts.{expert}.", self.moe_intermediate, layer, expert)

    def _feed_forward(self, at: str, width: int, layer: int, expert: int) -> Iterator[Slot]:
        fused = f"gate_up_proj.{expert}"
        for name in ("gate_proj", "up_proj"):
            yield Slot(f"{at}{name}.weight", (width, self.hidden), Role.ROWS, layer, expert, fused)
            if self.mlp_bias:
                yield Slot(f"{at}{name}.bias", (width,), Role.ROWS, layer, expert, fused + ".bias")
        yield Slot(at + "down_proj.weight", (self.hidden, width), Role.COLUMNS, layer, expert)
        if self.mlp_bias:
            yield Slot(at + "down_proj.bias", (self.hidden,), Role.WHOLE, layer, expert)


def space_of(config: Mapping[str, Any], kinds: Mapping[Kind, str] | None = None, dtype: str = "bfloat16") -> Space:
    """The space of a model.

    Args:
        config: of Hugging Face, as a dict.
        kinds: state kind -> dtype; parameters alone if not given.
        dtype: of the parameters.

    Raises:
        LayoutError: the architecture is not one of those that are known here, or a size is missing.
    """
    decoder = Decoder.of(config)
    tensors = tuple(Tensor(slot.name, slot.shape, dtype) for slot in decoder.slots())
    return Space(tensors, kinds or {Kind.PARAMETER: ""}, aliases={HEAD: EMBED} if decoder.tied else {})
