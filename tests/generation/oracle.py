"""What transformers makes of the same model: the independent reading that engines are held against."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from rlinf.generation import Completion, Engine, EngineSpec, Request
from rlinf.models import describe
from rlinf.vps.publication import Publication, Publisher, Share, space_of_tensors

LONG = 150  # tokens; more than a block of vLLM's prefix cache on CPU


def build(directory: Path) -> Path:
    """A model with what makes loading hard: a head tied to the embedding, grouped heads, a padded vocabulary."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=267,
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def load(model_dir: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


def spec(model_dir: Path, **changes: Any) -> EngineSpec:
    info = describe(model_dir)
    defaults: dict[str, Any] = {
        "eos_ids": info.eos_ids,
        "max_positions": info.max_positions,
        "kv_cache_bytes": 1 << 26,
        "max_num_seqs": 16,
    }
    return EngineSpec(model_dir=model_dir, **{**defaults, **changes})


def prompts() -> list[tuple[int, ...]]:
    """Of different lengths, one of them long enough for the prefix cache."""
    source = random.Random(7)
    return [tuple(source.randrange(8, 264) for _ in range(length)) for length in (3, 11, LONG, 6)]


def requests(samples: int, rows: list[int] | None = None) -> list[Request]:
    found = []
    for row, prompt in enumerate(prompts()):
        if rows is None or row in rows:
            found += [Request(row * 8 + j, row, prompt, 1000 + row * 8 + j) for j in range(samples)]
    return found


def run(engine: Engine, given: list[Request], temperature: float = 0.0, limit: int = 12) -> dict[int, Completion]:
    return {c.key: c for c in engine.generate(given, temperature=temperature, max_new_tokens=limit)}


@torch.no_grad()
def logprobs(model: Any, prompt: tuple[int, ...], response: list[int], temperature: float) -> torch.Tensor:
    """One full forward pass, no cache, no batch."""
    ids = torch.tensor([[*prompt, *response]])
    logits = model(ids).logits[0, len(prompt) - 1 : -1].float() / (temperature or 1.0)
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(response)[:, None])[:, 0]


@torch.no_grad()
def greedy(model: Any, prompt: tuple[int, ...], limit: int, eos: tuple[int, ...]) -> list[int]:
    out = model.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=limit, eos_token_id=list(eos), pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


def other(model: Any, seed: int) -> dict[str, torch.Tensor]:
    """Weights of another model of the same shapes."""
    source = torch.Generator().manual_seed(seed)
    return {name: p.detach() + 0.05 * torch.randn(p.shape, generator=source) for name, p in model.named_parameters()}


class Source:
    """Weights, published by ranks that each hold a part of every tensor. The same source can publish again.

    Args:
        cut: the dimension that tensors are cut along; vectors always along their only one.
        common: the ranks have one memory together.
    """

    def __init__(self, weights: dict[str, torch.Tensor], ranks: int = 1, cut: int = 0, common: bool = False) -> None:
        self._ranks, self._cut = ranks, cut
        self._space = space_of_tensors(weights)
        handles: list[Any] = []

        def gather(value: Any) -> list[Any]:
            """Of what all ranks pass only a host, and the first one's handle, are asked for."""
            handles.append(value)
            return [value] * ranks if isinstance(value, str) else [handles[1]] * ranks

        self._publishers = [
            Publisher(self._space, shares, rank, gather if common else None)
            for rank, shares in enumerate(self._shares(weights))
        ]

    def _shares(self, weights: dict[str, torch.Tensor]) -> list[list[Share]]:
        found: list[list[Share]] = [[] for _ in range(self._ranks)]
        for name, tensor in weights.items():
            if not tensor.ndim:
                found[0].append(Share(self._space.index[name], (), tensor.detach()))
                continue
            along = self._cut if tensor.ndim > self._cut else 0
            first = 0
            for rank, part in enumerate(tensor.detach().tensor_split(self._ranks, along)):
                start = tuple(first if dim == along else 0 for dim in range(tensor.ndim))
                found[rank].append(Share(self._space.index[name], start, part))
                first += part.shape[along]
        return found

    def publish(
        self, weights: dict[str, torch.Tensor], inline: bool = False, verify: bool = False
    ) -> list[Publication]:
        shares = self._shares(weights)
        found = [p.publish(own, inline=inline, verify=verify) for p, own in zip(self._publishers, shares, strict=True)]
        return [published.carried() for published in found] if inline else found

    def flip(self, rank: int) -> None:
        """One bit of what a rank has published is another one now."""
        self._publishers[rank].memory.data[1000] ^= 1

    def spoil(self) -> None:
        """Nothing that was published is there any more."""
        for publisher in self._publishers:
            publisher.memory.data.fill_(0xFF)  # as floats: not a number


def deliver(
    engine: Engine, weights: dict[str, torch.Tensor], ranks: int = 1, cut: int = 0, common: bool = False
) -> None:
    """One sync; what was published is gone as soon as it is over."""
    source = Source(weights, ranks, cut, common)
    engine.load_weights(source.publish(weights))
    source.spoil()
