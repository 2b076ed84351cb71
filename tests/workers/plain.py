"""An independent trainer: transformers and torch.optim, one sample at a time, formulas written out."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from rlinf.batch import Batch


def token_scores(model: torch.nn.Module, prompt: torch.Tensor, response: torch.Tensor, temperature: float):
    """Log-probabilities and entropies of one response, from the full logits of the full sequence."""
    ids = torch.cat([prompt, response])
    logits = model(input_ids=ids[None]).logits[0, len(prompt) - 1 : len(ids) - 1] / temperature
    logs = torch.log_softmax(logits, -1)
    return logs[torch.arange(len(response)), response], -(logs.exp() * logs).sum(-1)


def train(directory: Path, batch: Batch, plan: list[list[int]], lr: float, max_norm: float, temperature: float = 1.0):
    """PPO-clip with a k2 KL term (0.1) and an entropy bonus (0.01), token mean, for a list of minibatches of row ids.

    Returns the weights, and the gradient norm of each step.
    """
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01, fused=False, foreach=False)
    place = {row: i for i, row in enumerate(batch["row_id"].tolist())}
    norms = []
    for members in plan:
        total, tokens = torch.zeros(()), 0
        for i in (place[row] for row in members):
            response = batch["response_ids"][i]
            if not len(response):
                continue
            logs, entropy = token_scores(model, batch["prompt_ids"][i], response, temperature)
            ratio = (logs - batch["rollout_logprobs"][i]).exp()
            advantage = batch["advantages"][i]
            surrogate = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            kl = (logs - batch["ref_logprobs"][i]) ** 2 / 2
            total = total + (-surrogate + 0.1 * kl - 0.01 * entropy).sum()
            tokens += len(response)
        if not tokens:  # nothing but empty responses
            norms.append(0.0)
            continue
        optimizer.zero_grad()
        (total / tokens).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}, norms
