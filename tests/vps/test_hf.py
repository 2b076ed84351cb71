"""The space of a config is what transformers saves for it, name by name and shape by shape."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from rlinf.vps.hf import space_of
from rlinf.vps.mesh import Mesh, MeshLayout
from rlinf.vps.space import Kind, LayoutError
from tests.vps.test_mesh import config

SIZES = {"hidden_size": 12, "head_dim": 2, "num_experts_per_tok": 2}
LARGE = {  # Qwen3-235B-A22B
    "model_type": "qwen3_moe",
    "num_hidden_layers": 94,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "num_experts": 128,
    "moe_intermediate_size": 1536,
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("kind", "more"),
    [("llama", {}), ("qwen3", {}), ("qwen3_moe", {}), ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": []})],
)
def test_names_and_shapes_are_those_that_transformers_saves(
    kind: str, more: dict, bias: bool, tied: bool, tmp_path: Path
) -> None:
    told = config(kind, **SIZES, **more, attention_bias=bias, tie_word_embeddings=tied)
    if kind == "llama":
        told["mlp_bias"] = bias
    made = AutoConfig.for_model(**told)
    AutoModelForCausalLM.from_config(made).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        saved = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    for read in (told, made.to_dict()):  # transformers writes some keys under other names than it reads
        space = space_of(read)
        assert {tensor.name: tensor.shape for tensor in space.tensors} == saved
        assert space.aliases == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})


def test_a_config_that_lacks_what_transformers_derives_is_read_as_transformers_does() -> None:
    told = config("qwen3", hidden_size=12)
    del told["head_dim"], told["num_key_value_heads"]
    shapes = {tensor.name: tensor.shape for tensor in space_of(told).tensors}
    made = AutoConfig.for_model(**told)
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (6 * made.head_dim, 12)
    assert shapes["model.layers.0.self_attn.k_proj.weight"] == (made.num_key_value_heads * made.head_dim, 12)


@pytest.mark.parametrize("name", ["hidden_size", "vocab_size", "num_experts", "moe_intermediate_size"])
def test_a_config_that_lacks_a_size_is_refused(name: str) -> None:
    told = config()
    del told[name]
    with pytest.raises(LayoutError, match=f"the qwen3_moe config has no {name}"):
        space_of(told)


def test_an_architecture_that_is_not_known_is_refused() -> None:
    with pytest.raises(LayoutError, match="model_type='mamba'"):
        space_of(config("mamba"))


def test_a_large_model_has_the_published_number_of_parameters() -> None:
    space = space_of(LARGE, {Kind.PARAMETER: "", Kind.EXP_AVG: "float32"})
    assert sum(tensor.numel for tensor in space.tensors) == 235_093_634_560
    assert space.dtype(0, Kind.PARAMETER) == "bfloat16"
    assert space.dtype(0, Kind.EXP_AVG) == "float32"


def test_biases_are_cut_with_their_rows_and_those_of_columns_are_whole() -> None:
    layout = MeshLayout(config("llama", attention_bias=True, mlp_bias=True), Mesh(tp=2, fused=True))
    at = "model.layers.0."
    sizes = {}
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"):
        found = layout.space.find(f"{at}{name}.bias")
        pieces = [layout.of(rank).pieces for rank in range(2)]
        sizes[name.split(".")[1]] = [int(p.size[p.tensor == found][0, 0]) for p in pieces]
    assert sizes == {"q_proj": [3, 3], "k_proj": [1, 1], "o_proj": [3, 3], "gate_proj": [2, 3], "down_proj": [3, 3]}
    names = {buffer.name for buffer in layout.of(0).buffers if "gate_up" in buffer.name}
    assert len([name for name in names if name.startswith("0.")]) == 2  # weights and biases lie apart
