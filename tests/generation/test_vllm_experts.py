"""A model with experts, which vLLM packs for its kernels on CPU in a way of its own, takes over weights."""

from __future__ import annotations

from pathlib import Path

import torch

from rlinf.generation import Engine, build_engine
from tests.generation import oracle


def write_model(directory: Path, seed: int) -> Path:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=371,
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts=5,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=1,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(directory)
    return directory


def assert_speaks(engine: Engine, directory: Path) -> None:
    model = oracle.load(directory)
    for request in oracle.requests(samples=1):
        completion = oracle.run(engine, [request])[request.key]
        assert list(completion.tokens) == oracle.greedy(model, request.prompt, 12, (1,))


def test_after_a_sync_the_new_experts_speak(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    models = [write_model(tmp_path / str(seed), seed) for seed in range(2)]
    weights = [load_file(directory / "model.safetensors") for directory in models]
    engine = build_engine("vllm", oracle.spec(models[0], eos_ids=(1,)))
    try:
        assert_speaks(engine, models[0])
        for ranks, cut in ((1, 0), (2, 1)):
            source = oracle.Source(weights[0], ranks, cut)
            for which in (1, 0, 1):  # the first sync of a source reloads everything
                engine.load_weights(source.publish(weights[which]))
                assert_speaks(engine, models[which])
    finally:
        engine.close()
