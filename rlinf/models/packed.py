"""Samples as one row of tokens, end to end, without padding.

A sample is ``prompt + response[:-1]``: the output at a position predicts the token after it, so the last response
token needs no forward pass, and the outputs that matter are those from the prompt's last token on. Masks come from
lengths and never from token values, so a model whose padding token is its end token is no special case.

Position ids restart at every sample. That is all that attention needs: transformers builds the block-diagonal causal
mask from them (SDPA), or the cumulative lengths (flash attention).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rlinf.batch import Ragged


@dataclass(frozen=True)
class Packed:
    """A micro-batch; ``T`` tokens go in, ``R`` response tokens are predicted, ``n`` samples.

    Attributes:
        input_ids: int64 ``[1, T]``; at least one token, so that every rank can take part in a forward pass.
        position_ids: int64 ``[1, T]``, restarting at each sample.
        predict: int64 ``[R]``, the positions whose outputs predict the response tokens, sample by sample.
        targets: int64 ``[R]``, the response tokens.
        lengths: int64 ``[n]``, response lengths, of the samples in the order of `rows`.
        rows: int64 ``[n]``, which rows of the batch these are.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    predict: torch.Tensor
    targets: torch.Tensor
    lengths: torch.Tensor
    rows: torch.Tensor

    def to(self, device: torch.device | str) -> Packed:
        """The same on a device; ``rows`` stay on the CPU, where batches are."""
        return Packed(
            self.input_ids.to(device),
            self.position_ids.to(device),
            self.predict.to(device),
            self.targets.to(device),
            self.lengths.to(device),
            self.rows,
        )


def packed_lengths(prompt_lengths: torch.Tensor, response_lengths: torch.Tensor) -> torch.Tensor:
    """Tokens that each sample puts into a forward pass, int64 ``[n]``; none if its response is empty."""
    return torch.where(response_lengths > 0, prompt_lengths + response_lengths - 1, 0)


def pack(prompts: Ragged, responses: Ragged, rows: Sequence[int]) -> Packed:
    """Pack these rows. No rows, or rows with empty responses only, give one token that predicts nothing.

    Args:
        prompts: token ids, int64.
        responses: token ids, int64; same rows.
        rows: which rows, and in what order.

    Raises:
        ValueError: a row has a response but no prompt token that could predict its first token.
    """
    where = torch.as_tensor(list(rows), dtype=torch.int64)
    prompt, response = prompts.select(where), responses.select(where)
    if bool(((prompt.lengths == 0) & (response.lengths > 0)).any()):
        raise ValueError("a sample has an empty prompt; its first response token has nothing to be predicted from")
    tokens, positions, predict, start = [], [], [], 0
    for asked, answered in zip(prompt.rows(), response.rows(), strict=True):
        if not len(answered):
            continue
        sample = torch.cat([asked, answered[:-1]])
        tokens.append(sample)
        positions.append(torch.arange(len(sample)))
        predict.append(torch.arange(len(asked) - 1, len(sample)) + start)
        start += len(sample)
    if not tokens:
        tokens, positions = [torch.zeros(1, dtype=torch.int64)], [torch.zeros(1, dtype=torch.int64)]
        predict = [torch.empty(0, dtype=torch.int64)]
    return Packed(
        input_ids=torch.cat(tokens).to(torch.int64)[None],
        position_ids=torch.cat(positions)[None],
        predict=torch.cat(predict),
        targets=response.values.to(torch.int64),
        lengths=response.lengths,
        rows=where,
    )


def micro_batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Cut rows into micro-batches of at most ``budget`` tokens, as few as first-fit-decreasing needs.

    Rows go, longest first, to the micro-batch with the least attention work (the sum of squared lengths) that has
    room. A row longer than the budget is a micro-batch of its own. Rows of length 0 need no work and are left out.
    The result depends on the arguments alone.

    Raises:
        ValueError: the budget is not positive.
    """
    if budget < 1:
        raise ValueError(f"tokens_per_micro_batch must be at least 1, found {budget}")
    order = sorted((row for row in range(len(lengths)) if lengths[row] > 0), key=lambda row: (-lengths[row], row))
    alone = [[row] for row in order if lengths[row] >= budget]
    rest = [row for row in order if lengths[row] < budget]
    first_fit: list[list[int]] = []
    room: list[int] = []
    for row in rest:
        at = next((i for i, free in enumerate(room) if free >= lengths[row]), None)
        if at is None:
            first_fit.append([])
            room.append(budget)
            at = len(room) - 1
        first_fit[at].append(row)
        room[at] -= lengths[row]
    balanced = _balance(rest, lengths, len(first_fit), budget)
    return alone + [sorted(rows) for rows in (balanced or first_fit)]


def _balance(order: Sequence[int], lengths: Sequence[int], bins: int, budget: int) -> list[list[int]] | None:
    """Longest-processing-time-first on squared lengths; None where a row then finds no room."""
    rows: list[list[int]] = [[] for _ in range(bins)]
    used, work = [0] * bins, [0] * bins
    for row in order:
        free = [i for i in range(bins) if used[i] + lengths[row] <= budget]
        if not free:
            return None
        at = min(free, key=lambda i: (work[i], i))
        rows[at].append(row)
        used[at] += lengths[row]
        work[at] += lengths[row] ** 2
    return rows
