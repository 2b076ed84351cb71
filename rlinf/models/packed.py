"""Samples as one row of tokens, end to end, without padding.

A sample is ``prompt + response[:-1]``: the output at a position predicts the token after it, so the last response
token needs no forward pass, and the outputs that matter are those from the prompt's last token on. Masks come from
lengths and never from token values, so a model whose padding token is its end token is no special case.

Samples of one prompt may share it: its tokens come once, and every response goes on where it ends. Only the attention
of `rlinf.models.attention` can do that. Otherwise position ids restart at every sample, which is all that others need:
transformers builds the block-diagonal causal mask from them (SDPA), or the cumulative lengths (flash attention).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rlinf.batch import Ragged
from rlinf.models.attention import Segment


@dataclass(frozen=True)
class Packed:
    """A micro-batch; ``T`` tokens go in, ``R`` response tokens are predicted, ``n`` samples.

    Attributes:
        input_ids: int64 ``[1, T]``; at least one token, so that every rank can take part in a forward pass.
        position_ids: int64 ``[1, T]``.
        predict: int64 ``[R]``, the positions whose outputs predict the response tokens, sample by sample.
        targets: int64 ``[R]``, the response tokens.
        lengths: int64 ``[n]``, response lengths, of the samples in the order of `rows`.
        rows: int64 ``[n]``, which rows of the batch these are.
        segments: what attends to what, in the order of the tokens.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    predict: torch.Tensor
    targets: torch.Tensor
    lengths: torch.Tensor
    rows: torch.Tensor
    segments: tuple[Segment, ...]

    @property
    def shared(self) -> bool:
        """Some prompt is shared."""
        return any(len(segment.branches) > 1 for segment in self.segments)

    def to(self, device: torch.device | str) -> Packed:
        """The same on a device; ``rows`` stay on the CPU, where batches are."""
        return Packed(
            self.input_ids.to(device),
            self.position_ids.to(device),
            self.predict.to(device),
            self.targets.to(device),
            self.lengths.to(device),
            self.rows,
            self.segments,
        )


def pack(prompts: Ragged, responses: Ragged, rows: Sequence[int], share: bool = False) -> Packed:
    """Pack these rows. No rows, or rows with empty responses only, give one token that predicts nothing.

    Args:
        prompts: token ids, int64.
        responses: token ids, int64; same rows.
        rows: which rows; targets come in this order.
        share: the tokens of equal prompts come once.

    Raises:
        ValueError: a row has a response but no prompt token that could predict its first token.
    """
    where = torch.as_tensor(list(rows), dtype=torch.int64)
    prompt, response = prompts.select(where), responses.select(where)
    if bool(((prompt.lengths == 0) & (response.lengths > 0)).any()):
        raise ValueError("a sample has an empty prompt; its first response token has nothing to be predicted from")
    asked, answered = prompt.rows(), response.rows()
    predict: list[torch.Tensor] = [torch.empty(0, dtype=torch.int64)] * len(asked)
    tokens, segments, start = [], [], 0
    for members in _units(asked, [i for i, row in enumerate(answered) if len(row)], share):
        head = asked[members[0]]
        segment = Segment(len(head), tuple(len(answered[i]) - 1 for i in members))
        tokens += [head, *(answered[i][:-1] for i in members)]
        at = start + len(head)
        for i, size in zip(members, segment.branches, strict=True):
            predict[i] = torch.cat([torch.tensor([start + len(head) - 1]), torch.arange(at, at + size)])
            at += size
        segments.append(segment)
        start = at
    if not tokens:
        tokens, segments = [torch.zeros(1, dtype=torch.int64)], [Segment(1, ())]
    return Packed(
        input_ids=torch.cat(tokens).to(torch.int64)[None],
        position_ids=torch.cat([segment.positions() for segment in segments])[None],
        predict=torch.cat(predict) if predict else torch.empty(0, dtype=torch.int64),
        targets=response.values.to(torch.int64),
        lengths=response.lengths,
        rows=where,
        segments=tuple(segments),
    )


def pack_within(prompts: Ragged, responses: Ragged, rows: Sequence[int], budget: int, share: bool) -> list[Packed]:
    """Pack these rows into micro-batches of at most ``budget`` tokens; see `micro_batches`.

    With ``share``, samples of one prompt stay together as far as the budget allows. Rows without a response need no
    work and are left out.
    """
    asked = prompts.select(torch.as_tensor(list(rows), dtype=torch.int64)).rows()
    sizes = responses.lengths[torch.as_tensor(list(rows), dtype=torch.int64)].tolist()
    units: list[list[int]] = []
    for members in _units(asked, [i for i, size in enumerate(sizes) if size], share):
        used = budget + 1
        for i in members:
            extra = sizes[i] - 1
            if used + extra > budget:
                units.append([])
                used = len(asked[i])
            units[-1].append(i)
            used += extra
    lengths = [len(asked[unit[0]]) + sum(sizes[i] - 1 for i in unit) for unit in units]
    return [
        pack(prompts, responses, sorted(rows[i] for unit in cut for i in units[unit]), share)
        for cut in micro_batches(lengths, budget)
    ]


def _units(prompts: Sequence[torch.Tensor], rows: Sequence[int], share: bool) -> list[list[int]]:
    """Rows with equal prompts together (``share``), by first appearance; else each row alone."""
    if not share:
        return [[row] for row in rows]
    found: dict[bytes, list[int]] = {}
    for row in rows:
        found.setdefault(prompts[row].numpy().tobytes(), []).append(row)
    return list(found.values())


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
