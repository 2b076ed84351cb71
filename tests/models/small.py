"""Models of a few thousand parameters, and samples for them."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rlinf.batch import Batch, Ragged
from rlinf.models.tiny import byte_tokenizer

VOCAB = 264
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,  # pad == eos, as in SmolLM2
}


def write_model(directory: Path, kind: str = "llama", tied: bool = False, window: int | None = None) -> Path:
    """Write a model directory; ``kind`` is llama or qwen3 (which has norms over single heads, and may
    attend within a sliding window)."""
    torch.manual_seed(7)
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied))
    else:
        sliding = (
            {} if window is None else {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 1}
        )
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=tied, **sliding))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # ones would hide a norm that is not trained, or not sent
                parameter.add_(torch.rand_like(parameter) - 0.5)
    model.save_pretrained(directory)
    PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer(), eos_token="<|eos|>", pad_token="<|eos|>"
    ).save_pretrained(directory)
    return directory


def ragged(lengths: list[int], generator: torch.Generator, tokens: bool = False) -> Ragged:
    total = sum(lengths)
    values = (
        torch.randint(1, VOCAB, (total,), generator=generator) if tokens else torch.randn(total, generator=generator)
    )
    return Ragged(values, torch.tensor(lengths, dtype=torch.int64))


def samples(prompts: list[int], responses: list[int], seed: int = 0) -> Batch:
    """Random samples with every field that actor and critic read; responses contain the pad and end token (1)."""
    g = torch.Generator().manual_seed(seed)
    n = len(prompts)
    asked, answered = ragged(prompts, g, tokens=True), ragged(responses, g, tokens=True)
    ends = answered.lengths.cumsum(0)[answered.lengths > 0] - 1
    answered.values[ends] = 1
    return Batch(
        {
            "row_id": torch.arange(n) * 10 + 3,
            "prompt_ids": asked,
            "response_ids": answered,
            "advantages": ragged(responses, g),
            "rollout_logprobs": Ragged(ragged(responses, g).values * 0.3 - 5.6, answered.lengths),
            "ref_logprobs": Ragged(ragged(responses, g).values * 0.3 - 5.6, answered.lengths),
            "values": ragged(responses, g),
            "returns": ragged(responses, g),
        }
    )
