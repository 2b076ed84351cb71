"""Attention over packed samples that computes what is needed and no more, by torch's SDPA on any device.

A row of packed tokens is a list of `Segment`: a prompt and the responses to it. Attention runs segment by segment, so
its cost is the sum of squares of the segments' lengths rather than the square of the sum; and samples of one prompt
share the prompt's tokens, which then go through the whole model once instead of once a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from rlinf.errors import ModelError

NAME = "rlinf_packed"


@dataclass(frozen=True)
class Segment:
    """Tokens that attend to one another: ``prompt`` tokens, then branches that see the prompt and themselves.

    Attributes:
        prompt: tokens of the prompt.
        branches: tokens of each response that are fed in (all but its last); 0 is allowed.
    """

    prompt: int
    branches: tuple[int, ...]

    @property
    def length(self) -> int:
        return self.prompt + sum(self.branches)

    def positions(self) -> torch.Tensor:
        """int64 ``[length]``: every branch goes on where the prompt ends."""
        parts = [torch.arange(self.prompt), *(torch.arange(size) + self.prompt for size in self.branches)]
        return torch.cat(parts)


def register() -> None:
    """Make transformers know this attention as `NAME`."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)


def supports(config: Any) -> bool:
    """Whether a model's attention is plain causal, or causal within a sliding window: all that is done here."""
    text = config.get_text_config(decoder=True)
    kinds = set(getattr(text, "layer_types", None) or ())
    special = ("attention_chunk_size", "attn_logit_softcapping")
    return kinds <= {"full_attention", "sliding_attention"} and not any(getattr(text, key, None) for key in special)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    segments: Sequence[Segment] | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function for transformers.

    Args:
        module: the model's attention module.
        query: ``[1, heads, T, head_dim]``.
        key: ``[1, kv_heads, T, head_dim]``; value likewise.
        attention_mask: none; what may be seen follows from ``segments``.
        scaling: of the scores.
        segments: of the ``T`` tokens, in order; None: each row of the batch is one sequence.
        sliding_window: keys further back than this are not seen.
        others: what transformers hands to every attention function. Those that change the result are refused.

    Returns:
        ``[1, T, heads, head_dim]``, and no weights.

    Raises:
        ModelError: the model asks for something that is not done here.
    """
    asked = [name for name in ("softcap", "s_aux", "position_bias") if others.get(name) is not None]
    if asked or attention_mask is not None or others.get("dropout"):
        found = asked or (["a mask"] if attention_mask is not None else ["dropout"])
        raise ModelError(f"{type(module).__name__} wants {', '.join(found)} in its attention; set model.attention=sdpa")
    repeat = query.shape[1] // key.shape[1]
    if repeat > 1:
        key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    outputs, start = [], 0
    for segment in segments or (Segment(query.shape[2], ()),):
        part = slice(start, start + segment.length)
        start += segment.length
        mask = _mask(segment, sliding_window, query.device)
        outputs.append(
            scaled_dot_product_attention(
                query[:, :, part],
                key[:, :, part],
                value[:, :, part],
                attn_mask=mask,
                is_causal=mask is None,
                scale=scaling,
            )
        )
    return torch.cat(outputs, 2).transpose(1, 2), None


@lru_cache(maxsize=32)  # every layer of a forward and a backward pass asks for the same few
def _mask(segment: Segment, window: int | None, device: torch.device) -> torch.Tensor | None:
    """bool ``[length, length]``: what each token sees. None where that is plainly causal."""
    longest = segment.prompt + max(segment.branches, default=0)
    reach = longest if window is None else window
    if reach >= longest and sum(size > 0 for size in segment.branches) <= 1:
        return None
    position = segment.positions().to(device)
    sizes = torch.tensor([segment.prompt, *segment.branches], device=device)
    owner = torch.repeat_interleave(torch.arange(len(sizes), device=device), sizes)  # 0: the prompt
    seen = (owner[:, None] == owner) | (owner == 0)
    distance = position[:, None] - position
    return seen & (distance >= 0) & (distance < reach)
