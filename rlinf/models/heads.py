"""What is put on top of a backbone: log-probabilities of response tokens, or a value for each of them.

Both are modules whose one ``forward`` does everything, so that FSDP's hooks see every use of a parameter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rlinf.errors import ModelError
from rlinf.models import attention
from rlinf.models.packed import Packed

LOGITS_AT_ONCE = 2**25  # elements of the largest logits tensor that is made (128 MiB in float32)


class PolicyModel(nn.Module):
    """A causal language model that scores responses.

    Attributes:
        lm: the transformers model; its parameter names are the checkpoint's.
    """

    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.lm = lm
        self.shares_prompts = shares_prompts(lm)

    def forward(
        self, packed: Packed, temperature: float, with_entropy: bool = False, entropy_grad: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probabilities of the response tokens under ``softmax(logits / temperature)``.

        The output layer runs at the positions that predict response tokens and nowhere else, in chunks; never are
        more than `LOGITS_AT_ONCE` logits held, neither here nor for the backward pass.

        Args:
            packed: a micro-batch with ``R`` response tokens.
            temperature: that of sampling, above 0.
            with_entropy: also the entropy of each predicted distribution, in nats.
            entropy_grad: gradients flow through the entropy.

        Returns:
            float32 ``[R]`` each; None instead of the entropy where it was not asked for.
        """
        lm: Any = self.lm
        hidden = hidden_states(lm.base_model, packed)

        def score(part: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            logits = output_logits(lm, part).float() / temperature
            log_z = logits.logsumexp(-1)
            logprob = logits.gather(-1, target[:, None])[:, 0] - log_z
            if not with_entropy:
                return logprob, logprob.detach()
            with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_grad):
                # H = log Z - E[logit]
                source, norm = (logits, log_z) if entropy_grad else (logits.detach(), log_z.detach())
                entropy = norm - ((source - norm[:, None]).exp() * source).sum(-1)
            return logprob, entropy

        size = max(1, LOGITS_AT_ONCE // lm.config.get_text_config(decoder=True).vocab_size)
        parts = list(zip(hidden.split(size), packed.targets.split(size), strict=True))
        if len(parts) <= 1 or not torch.is_grad_enabled():
            scored = [score(*part) for part in parts]
        else:  # recompute a chunk's logits in the backward pass rather than keep those of all chunks
            scored = [checkpoint(score, *part, use_reentrant=False) for part in parts]
        logprobs = torch.cat([logprob for logprob, _ in scored])
        return logprobs, torch.cat([entropy for _, entropy in scored]) if with_entropy else None


class ValueModel(nn.Module):
    """A backbone with a scalar head that starts at zero: before training every value is 0, whatever the backbone.

    Attributes:
        backbone: the transformers model without its output layer.
        value_head: ``hidden -> 1``.
    """

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self.backbone = backbone
        self.shares_prompts = shares_prompts(backbone)
        size = backbone.config.get_text_config(decoder=True).hidden_size
        reference = next(backbone.parameters())
        self.value_head = nn.Linear(size, 1, dtype=reference.dtype, device=reference.device)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(self, packed: Packed) -> torch.Tensor:
        """Value of the state before each response token: float32 ``[R]``."""
        return self.value_head(hidden_states(self.backbone, packed))[:, 0].float()


def shares_prompts(backbone: Any) -> bool:
    """Whether a transformers model can take packed samples that share a prompt."""
    return backbone.config._attn_implementation == attention.NAME


def hidden_states(backbone: Any, packed: Packed) -> torch.Tensor:
    """Final hidden states ``[R, hidden]`` that predict the response tokens."""
    layout: dict[str, Any] = {}
    if shares_prompts(backbone):
        layout["segments"] = packed.segments
    elif packed.shared:
        raise ValueError(f"samples share prompts, which needs the attention {attention.NAME}")
    outputs = backbone(input_ids=packed.input_ids, position_ids=packed.position_ids, use_cache=False, **layout)
    return outputs.last_hidden_state[0].index_select(0, packed.predict)


def output_logits(lm: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Logits ``[R, vocab]`` of final hidden states ``[R, hidden]``."""
    logits = lm.get_output_embeddings()(hidden)
    cap = getattr(lm.config.get_text_config(decoder=True), "final_logit_softcapping", None)
    return logits if cap is None else torch.tanh(logits / cap) * cap


@torch.no_grad()
def check_output_logits(lm: Any) -> None:
    """Make sure that `output_logits` is what the model itself does after its backbone, on three tokens.

    Raises:
        ModelError: the model does something else with its logits (a scale of its own, say).
    """
    device = next(lm.parameters()).device
    vocab = lm.config.get_text_config(decoder=True).vocab_size
    ids = torch.tensor([[1 % vocab, 2 % vocab, 3 % vocab]], device=device)
    own = lm(input_ids=ids, use_cache=False).logits[0].float()
    ours = output_logits(lm, lm.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]).float()
    gap = (own - ours).abs().max().item()
    if not gap <= 1e-2 * max(1.0, own.abs().max().item()):
        raise ModelError(
            f"{type(lm).__name__} computes its logits in a way that rlinf.models.heads.output_logits does not know "
            f"(they differ by {gap:.3g}); log-probabilities would be wrong. Teach output_logits that step."
        )
