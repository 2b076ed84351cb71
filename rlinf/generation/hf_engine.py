"""A sampling loop over a transformers model with a KV cache, for models that vLLM does not serve.

Prompts are prefilled once and shared by the samples of their group. In a batch-invariant engine a batch is one group:
nothing is padded, and what a sample is computed with depends on its own group alone. Otherwise up to ``max_num_seqs``
samples run side by side, left-padded and masked by length (never by token: the pad token may be the end token).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from rlinf.errors import ModelError
from rlinf.generation.engine import Completion, Engine, EngineSpec, Request
from rlinf.swap import Swap, store_for
from rlinf.training.state import named_tensors
from rlinf.vps.layout import ExplicitLayout
from rlinf.vps.publication import Publication, joined, space_of_tensors
from rlinf.vps.pull import Pull, Sources, whole_layout
from rlinf.vps.space import LayoutError, few, same_space
from rlinf.vps.verify import Check, Published


class HFEngine(Engine):
    """See the module."""

    def __init__(self, spec: EngineSpec) -> None:
        from transformers import AutoModelForCausalLM

        self._spec = spec
        self._device = torch.device(spec.device)
        if spec.tp != 1:
            raise ModelError(f"rollout.tp={spec.tp}: the hf engine runs on one device; set rollout.tp=1 or use vllm")
        with _no_progress_bar():
            model: Any = AutoModelForCausalLM.from_pretrained(
                spec.model_dir,
                dtype=getattr(torch, spec.dtype),
                attn_implementation=spec.attention,
                trust_remote_code=spec.trust_remote_code,
            )
        self._model = model.to(self._device).eval().requires_grad_(False)
        held = [*self._model.parameters(), *self._model.buffers()]
        self._swap = Swap(lambda: held, store_for(spec.device, spec.offload_dir))
        self._eos = torch.tensor(spec.eos_ids, device=self._device)
        self._torn = False
        self._pull: tuple[str, Pull] | None = None  # and the hash of the source that it is for
        self._check: tuple[str, Check] | None = None  # so too

    @property
    def context_length(self) -> int:
        return self._spec.max_positions

    def generate(
        self, requests: Sequence[Request], *, temperature: float, max_new_tokens: int
    ) -> Generator[Completion]:
        if self._torn:
            raise ModelError("the last weight sync failed half-way; this engine's weights are of two versions")
        for batch in self._batches(requests):
            yield from self._sample(batch, temperature, max_new_tokens)

    def _batches(self, requests: Sequence[Request]) -> Iterator[list[Request]]:
        size = self._spec.max_num_seqs
        if self._spec.batch_invariant:
            ordered = sorted(requests, key=lambda r: (r.group, r.key))
            runs = [list(run) for _, run in groupby(ordered, key=lambda r: r.group)]
        else:
            runs = [list(requests)]
        for run in runs:
            for start in range(0, len(run), size):
                yield run[start : start + size]

    @torch.inference_mode()
    def _prefill(self, batch: list[Request]) -> _Running:
        prompts = list(dict.fromkeys(request.prompt for request in batch))
        longest = max(len(prompt) for prompt in prompts)
        ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
        mask = torch.zeros(len(prompts), longest, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        ids, mask = ids.to(self._device), mask.to(self._device)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        out = self._model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1)
        which = {prompt: row for row, prompt in enumerate(prompts)}
        rows = torch.tensor([which[request.prompt] for request in batch], device=self._device)
        out.past_key_values.reorder_cache(rows)
        return _Running(batch, out.past_key_values, mask[rows], positions[rows, -1] + 1, out.logits[rows, -1].float())

    def _sample(self, batch: list[Request], temperature: float, max_new_tokens: int) -> Generator[Completion]:
        run = self._prefill(batch)
        # One number per token, drawn on the CPU: a sample is the same whatever device and batch it runs on.
        uniform = {r.key: _uniform(r.seed, max_new_tokens) for r in batch} if temperature > 0 else {}
        tokens: dict[int, list[int]] = {r.key: [] for r in batch}
        logprobs: dict[int, list[float]] = {r.key: [] for r in batch}
        for step in range(max_new_tokens):
            draws = torch.stack([uniform[r.key][step] for r in run.requests]) if temperature > 0 else None
            chosen, chosen_logprobs = _choose(run.logits, temperature, draws)
            ended = torch.isin(chosen, self._eos)
            going = []
            for row, (request, token, logprob, end) in enumerate(
                zip(run.requests, chosen.tolist(), chosen_logprobs.tolist(), ended.tolist(), strict=True)
            ):
                tokens[request.key].append(token)
                logprobs[request.key].append(logprob)
                if end or step + 1 == max_new_tokens:
                    yield Completion(request.key, tokens.pop(request.key), logprobs.pop(request.key), not end)
                else:
                    going.append(row)
            if not going:
                return
            chosen = run.keep(going, chosen)
            self._advance(run, chosen)

    @torch.inference_mode()
    def _advance(self, run: _Running, chosen: torch.Tensor) -> None:
        run.mask = torch.cat([run.mask, run.mask.new_ones(len(run.requests), 1)], dim=1)
        out = self._model(
            input_ids=chosen[:, None],
            attention_mask=run.mask,
            position_ids=run.positions[:, None],
            past_key_values=run.cache,
            use_cache=True,
        )
        run.positions = run.positions + 1
        run.logits = out.logits[:, -1].float()

    def load_weights(self, publications: Sequence[Publication]) -> None:
        source, state = joined(publications), named_tensors(self._model)
        if self._pull is None or self._pull[0] != source.hash:
            same_space(source.space, space_of_tensors(state))
            self._pull = source.hash, Pull(source, whole_layout(source.space, state))
        pull = self._pull[1]
        sources = [publication.buffers() for publication in publications]
        for rank, publication in enumerate(publications):
            publication.verify(rank, sources[rank])
        targets = {number: tensor.view(-1) for number, tensor in enumerate(state.values())}
        self._torn = True
        for tensor in pull.tensors:
            pull.run(sources, targets, tensor)
        if any(publication.digests for publication in publications):
            self._verify(source, sources, targets)
        self._torn = False

    def _verify(self, source: ExplicitLayout, sources: Sources, targets: Mapping[int, torch.Tensor]) -> None:
        if self._check is None or self._check[0] != source.hash:
            held = whole_layout(source.space, named_tensors(self._model))
            self._check = source.hash, Check(Published(source), held)
        if wrong := self._check[1].wrong(sources, targets):
            raise LayoutError(f"the engine holds other weights than were published: {few(wrong)}")

    def sleep(self) -> None:
        self._swap.off()

    def wake(self) -> None:
        self._swap.on()

    def nbytes(self) -> int:
        return sum(p.nbytes for p in self._model.parameters()) + sum(b.nbytes for b in self._model.buffers())

    def close(self) -> None:
        self._model = None


@dataclass
class _Running:
    """A batch in progress: requests, their KV cache, mask ``[b, t]``, next positions ``[b]``, logits ``[b, vocab]``."""

    requests: list[Request]
    cache: Any
    mask: torch.Tensor
    positions: torch.Tensor
    logits: torch.Tensor

    def keep(self, rows: list[int], chosen: torch.Tensor) -> torch.Tensor:
        """Go on with these rows alone; returns their chosen tokens."""
        if len(rows) == len(self.requests):
            return chosen
        index = torch.tensor(rows, device=self.mask.device)
        self.requests = [self.requests[row] for row in rows]
        self.cache.reorder_cache(index)
        self.mask, self.positions = self.mask[index], self.positions[index]
        return chosen[index]


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _uniform(seed: int, count: int) -> torch.Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _choose(
    logits: torch.Tensor, temperature: float, uniform: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Next tokens ``[b]`` of float32 logits ``[b, vocab]``, and their log-probabilities ``[b]``.

    By inversion of the cumulative distribution at ``uniform`` ``[b]``; greedy if there is none.
    """
    logprobs = torch.log_softmax(logits / temperature if uniform is not None else logits, dim=-1)
    if uniform is None:
        chosen = logits.argmax(dim=-1)
    else:
        cumulative = logprobs.double().exp().cumsum(dim=-1)
        target = uniform.to(cumulative.device) * cumulative[:, -1]
        chosen = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
    return chosen, logprobs.gather(1, chosen[:, None])[:, 0]
