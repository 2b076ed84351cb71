"""Rollout: samples responses to prompts, with the weights of the last sync."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from rlinf.batch import Batch, Ragged
from rlinf.config import RolloutConfig
from rlinf.errors import ConfigError, DataError, ModelError
from rlinf.generation import Completion, EngineSpec, Request, build_engine
from rlinf.models import describe, load_tokenizer, resolve
from rlinf.seeding import derive
from rlinf.vps.publication import Publication
from rlinf.worker import RankContext, Unit, Worker, stage

logger = logging.getLogger("rlinf.rollout")
DTYPES = ("float32", "bfloat16")
UNBOUNDED = 1 << 30  # tokens; of a model whose config names no longest sequence


def _samples(cfg: RolloutConfig, options: Mapping[str, Any]) -> int:
    return options.get("samples") or cfg.samples_per_prompt


class Rollout(Worker):
    """One rank holds one engine; an engine of ``tp`` > 1 spreads over its devices by processes of its own."""

    spans_tp = True
    cfg: RolloutConfig

    def __init__(self, cfg: RolloutConfig, ctx: RankContext) -> None:
        super().__init__(cfg, ctx)
        self.version = 0  # of the weights that the engine has
        self._received: int | None = None  # the last version that a sync brought

    def setup(self) -> None:
        model_dir = resolve(self.cfg.model)
        self.tokenizer = load_tokenizer(model_dir, self.cfg.model)
        eos = self.tokenizer.eos_token_id
        self.engine = build_engine(self.cfg.engine, engine_spec(self.cfg, self.ctx, model_dir, eos))

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.close()

    def onload(self) -> None:
        self.engine.wake()

    def offload(self) -> None:
        self.engine.sleep()

    def nbytes(self) -> int:
        return self.engine.nbytes()

    @stage(
        reads=("row_id", "prompt_ids"),
        writes=("response_ids", "rollout_logprobs", "truncated", "weight_version", "response", "group_id"),
        unit=Unit.GROUP,
        expands=_samples,
    )
    def generate(
        self, batch: Batch, *, temperature: float | None = None, samples: int | None = None
    ) -> Iterator[Batch]:
        """Yield each prompt's samples as soon as the last of them is finished.

        Sample ``j`` of the prompt ``p`` has the row id ``p * samples + j`` and a seed derived from it. Its
        ``weight_version`` is the oldest that may have had a part in it: weights can change between two yields.

        Args:
            batch: ``row_id`` int64 ``[n]`` and ``prompt_ids`` Ragged int64.
            temperature: of the sampling, 0 is greedy; the config's by default.
            samples: to each prompt; the config's by default.

        Raises:
            DataError: a prompt is empty, or does not fit beside the response; the message names its row.
            ModelError: the engine lost samples.
        """
        temperature = self.cfg.temperature if temperature is None else temperature
        samples = self.cfg.samples_per_prompt if samples is None else samples
        if temperature < 0 or samples < 1:
            raise ConfigError(f"temperature={temperature}, samples={samples}: they must be at least 0 and 1")
        prompts = batch["row_id"].tolist()
        requests = self._requests(prompts, batch["prompt_ids"], samples)
        positions = {prompt: position for position, prompt in enumerate(prompts)}
        if len(positions) != len(prompts):
            raise DataError(f"row_id must be unique in a batch; {len(prompts)} rows have {len(positions)} ids")
        version = self.version
        done: dict[int, list[Completion]] = {prompt: [] for prompt in prompts}
        finished, tokens, seconds, resumed = 0, 0, 0.0, time.perf_counter()
        self.ctx.report(0, len(requests))
        completions = self.engine.generate(requests, temperature=temperature, max_new_tokens=self.cfg.max_new_tokens)
        with closing(completions):  # a consumer that leaves early stops what still runs
            for completion in completions:
                finished, tokens = finished + 1, tokens + len(completion.tokens)
                self.ctx.report(finished, len(requests))
                prompt = completion.key // samples
                done[prompt].append(completion)
                if len(done[prompt]) == samples:
                    group = sorted(done.pop(prompt), key=lambda c: c.key)
                    seconds += time.perf_counter() - resumed
                    yield self._group(prompt, positions[prompt], group, version)
                    resumed = time.perf_counter()  # the consumer's time is not the engine's
        if done:
            lost = {row: samples - len(some) for row, some in done.items()}
            raise ModelError(
                f"rollout.engine={self.cfg.engine} ended without {sum(lost.values())} of {len(requests)} samples, of "
                f"the prompts in rows {sorted(lost)[:8]}; look at this rank's log"
            )
        if seconds > 0:
            self.metrics.mean("tokens_per_second", tokens / seconds, seconds)

    def _requests(self, rows: list[int], prompt_ids: Ragged, samples: int) -> list[Request]:
        requests = []
        room = self.engine.context_length - self.cfg.max_new_tokens
        for row, prompt in zip(rows, prompt_ids.rows(), strict=True):
            if not 0 < len(prompt) <= room:
                raise DataError(
                    f"the prompt of row {row} has {len(prompt)} tokens; 1 to {room} fit, because the engine holds "
                    f"{self.engine.context_length} and rollout.max_new_tokens={self.cfg.max_new_tokens}; "
                    "lower data.max_prompt_tokens or rollout.max_new_tokens, or raise rollout.kv_cache_gib"
                )
            tokens = tuple(prompt.tolist())
            for key in range(row * samples, (row + 1) * samples):
                requests.append(Request(key, row, tokens, derive(self.ctx.seed, "sample", key)))
        return requests

    def _group(self, prompt: int, position: int, group: list[Completion], version: int) -> Batch:
        lengths = [len(c.tokens) for c in group]
        self.metrics.mean("response_length", sum(lengths) / len(group), len(group))
        self.metrics.max("response_length_max", max(lengths))
        self.metrics.mean("truncated", sum(c.truncated for c in group) / len(group), len(group))
        self.metrics.sum("tokens", sum(lengths))
        return Batch(
            {
                "row_id": torch.tensor([c.key for c in group]),
                "group_id": torch.full((len(group),), prompt),
                "parent": torch.full((len(group),), position),
                "response_ids": Ragged.of((list(c.tokens) for c in group), torch.int64),
                "rollout_logprobs": Ragged.of((list(c.logprobs) for c in group), torch.float32),
                "truncated": torch.tensor([c.truncated for c in group]),
                "weight_version": torch.full((len(group),), version),
                "response": self.tokenizer.batch_decode([list(c.tokens) for c in group], skip_special_tokens=True),
            }
        )

    def receive_weights(self, version: int, publications: Sequence[Publication]) -> None:
        """Take over all weights, as version ``version``; samples made from now on carry it.

        Raises:
            ModelError: the version does not increase.
            LayoutError: the weights are not of the engine's model; it goes on with those that it has.
        """
        if self._received is not None and version <= self._received:
            raise ModelError(f"weight sync brings version {version} after {self._received}; versions must increase")
        self.engine.load_weights(publications)
        if self._received is not None and not any(publication.changed for publication in publications):
            logger.warning(
                "the weights of version %d are, byte for byte, those of version %s: training changed nothing (a "
                "learning rate of 0, or skipped steps), or did not reach what is published",
                version,
                self._received,
            )
        self.version = self._received = version


def engine_spec(cfg: RolloutConfig, ctx: RankContext, model_dir: Path, tokenizer_eos: int) -> EngineSpec:
    """What the engine of a rank is built from."""
    info = describe(model_dir, cfg.model)
    on_cpu = torch.device(ctx.device).type == "cpu"
    dtype = cfg.dtype if cfg.dtype != "auto" else "float32" if on_cpu else "bfloat16"
    if dtype not in DTYPES:
        raise ConfigError(f"rollout.dtype={cfg.dtype!r} is not one of {('auto', *DTYPES)}")
    return EngineSpec(
        model_dir=model_dir,
        eos_ids=tuple(sorted({*info.eos_ids, tokenizer_eos})),
        max_positions=info.max_positions or UNBOUNDED,
        dtype=dtype,
        device=ctx.device,
        tp=cfg.tp,
        max_num_seqs=cfg.max_num_seqs,
        kv_cache_bytes=int(cfg.kv_cache_gib * 2**30),
        gpu_memory_utilization=cfg.gpu_memory_utilization,
        enforce_eager=cfg.enforce_eager,
        trust_remote_code=cfg.model.trust_remote_code,
        batch_invariant=ctx.deterministic,
        attention="sdpa" if cfg.model.attention == "auto" else cfg.model.attention,
        offload_dir=ctx.offload_dir,
    )
