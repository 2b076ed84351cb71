"""The Rollout worker, mostly on the transformers engine; what the engines do is tests/generation's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf.batch import Batch, Ragged
from rlinf.config import ModelConfig, RolloutConfig
from rlinf.errors import ConfigError, DataError, ModelError
from rlinf.generation import Completion, Request
from rlinf.models import load_tokenizer, resolve
from rlinf.seeding import derive
from rlinf.vps.publication import publish
from rlinf.worker import RankContext
from rlinf.workers.rollout import Rollout
from tests.generation import oracle

ROWS = [5, 2, 9]


def config(**changes: Any) -> RolloutConfig:
    defaults: dict[str, Any] = {"engine": "hf", "samples_per_prompt": 4, "max_new_tokens": 6}
    defaults["model"] = ModelConfig(name="tiny")
    return RolloutConfig(**{**defaults, **changes})


def worker(ctx: RankContext | None = None, **changes: Any) -> Rollout:
    made = Rollout(config(**changes), ctx or RankContext())
    made.setup()
    return made


@pytest.fixture(scope="module")
def rollout() -> Iterator[Rollout]:
    made = worker()
    yield made
    made.teardown()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(resolve(ModelConfig(name="tiny")))


@pytest.fixture
def batch(tokenizer: Any) -> Batch:
    ids = [tokenizer(text).input_ids for text in ("2+2?", "a longer question", "x")]
    return Batch({"row_id": torch.tensor(ROWS), "prompt_ids": Ragged.of(ids, torch.int64)})


def joined(made: Iterator[Batch]) -> Batch:
    return Batch.concat(list(made)).sorted()


def test_rows_are_the_samples_of_each_prompt(rollout: Rollout, batch: Batch, tokenizer: Any) -> None:
    out = joined(rollout.generate(batch))
    assert set(out) == {*Rollout.stages()["generate"].writes_for(rollout.cfg), "row_id", "parent"}
    assert out["row_id"].tolist() == [row * 4 + j for row in sorted(ROWS) for j in range(4)]
    assert out["group_id"].tolist() == [row for row in sorted(ROWS) for _ in range(4)]
    assert [ROWS[parent] for parent in out["parent"].tolist()] == out["group_id"].tolist()
    assert torch.equal(out["response_ids"].lengths, out["rollout_logprobs"].lengths)
    for ids, text, truncated in zip(out["response_ids"].rows(), out["response"], out["truncated"], strict=True):
        assert text == tokenizer.decode(ids, skip_special_tokens=True)
        assert bool(truncated) == (ids[-1] != tokenizer.eos_token_id)
    dtypes = {name: field.dtype for name, field in out.items() if isinstance(field, torch.Tensor)}
    assert dtypes == {
        "row_id": torch.int64,
        "group_id": torch.int64,
        "parent": torch.int64,
        "truncated": torch.bool,
        "weight_version": torch.int64,
    }
    assert out["response_ids"].values.dtype == torch.int64
    assert out["rollout_logprobs"].values.dtype == torch.float32


def test_groups_come_one_by_one_and_whole(rollout: Rollout, batch: Batch) -> None:
    parts = list(rollout.generate(batch))
    assert [part.n for part in parts] == [4, 4, 4]
    assert all(len(set(part["group_id"].tolist())) == 1 for part in parts)


def test_a_row_is_the_same_on_any_rank_in_any_order_with_any_company(rollout: Rollout, batch: Batch) -> None:
    whole = joined(rollout.generate(batch))
    split = [joined(rollout.generate(batch.select([i]))) for i in (2, 0, 1)]
    again = Batch.concat(split).sorted()
    assert torch.equal(whole["response_ids"].values, again["response_ids"].values)
    assert torch.equal(whole["rollout_logprobs"].values, again["rollout_logprobs"].values)
    elsewhere = Rollout(rollout.cfg, RankContext(rank=3, world_size=4, dp=4))
    elsewhere.tokenizer, elsewhere.engine = rollout.tokenizer, rollout.engine
    there = joined(elsewhere.generate(batch))
    assert torch.equal(whole["response_ids"].values, there["response_ids"].values)


def test_the_seed_of_the_run_changes_the_samples(rollout: Rollout, batch: Batch) -> None:
    other = Rollout(rollout.cfg, RankContext(seed=1))
    other.tokenizer, other.engine = rollout.tokenizer, rollout.engine
    mine, theirs = joined(rollout.generate(batch)), joined(other.generate(batch))
    assert mine["response"] != theirs["response"]


def test_every_sample_has_a_seed_of_its_own(rollout: Rollout, batch: Batch) -> None:
    requests = rollout._requests(ROWS, batch["prompt_ids"], 4)
    assert [request.seed for request in requests] == [derive(0, "sample", request.key) for request in requests]
    assert len({request.seed for request in requests}) == 12


def test_evaluation_is_greedy_with_one_sample_when_asked(rollout: Rollout, batch: Batch) -> None:
    once = joined(rollout.generate(batch, temperature=0.0, samples=1))
    assert once["row_id"].tolist() == sorted(ROWS)
    more = joined(rollout.generate(batch, temperature=0.0, samples=3))
    assert [more["response"][i] for i in range(0, 9, 3)] == once["response"]


def test_progress_reaches_the_total(batch: Batch, rollout: Rollout) -> None:
    seen: list[tuple[float, float]] = []
    watched = Rollout(rollout.cfg, RankContext(report=lambda done, total: seen.append((done, total))))
    watched.tokenizer, watched.engine = rollout.tokenizer, rollout.engine
    list(watched.generate(batch))
    assert seen == [(done, 12) for done in range(13)]


def test_metrics_are_those_of_the_rows(rollout: Rollout, batch: Batch) -> None:
    rollout.metrics.take()
    out = joined(rollout.generate(batch))
    metrics = {name: metric.value for name, metric in rollout.metrics.take().items()}
    lengths = out["response_ids"].lengths.float()
    assert metrics["response_length"] == pytest.approx(lengths.mean().item())
    assert metrics["response_length_max"] == lengths.max()
    assert metrics["tokens"] == lengths.sum()
    assert metrics["truncated"] == pytest.approx(out["truncated"].float().mean().item())
    assert metrics["tokens_per_second"] > 0


def test_an_overlong_prompt_is_an_error_that_names_its_row(rollout: Rollout, batch: Batch) -> None:
    room = rollout.engine.context_length - 6
    ids = [torch.full((room + 1,), 40), torch.full((room,), 40), torch.tensor([40])]
    with pytest.raises(DataError, match=f"row 5 has {room + 1} tokens; 1 to {room} fit"):
        next(rollout.generate(batch.plus(prompt_ids=Ragged.of(ids))))


def test_an_empty_prompt_is_an_error_that_names_its_row(rollout: Rollout, batch: Batch) -> None:
    ids = [torch.tensor([40]), torch.empty(0, dtype=torch.int64), torch.tensor([40])]
    with pytest.raises(DataError, match="row 2 has 0 tokens"):
        next(rollout.generate(batch.plus(prompt_ids=Ragged.of(ids))))


def test_an_empty_batch_makes_nothing(rollout: Rollout, batch: Batch) -> None:
    assert list(rollout.generate(batch.select([]))) == []


@pytest.mark.parametrize("options", [{"temperature": -0.1}, {"samples": 0}])
def test_impossible_options_are_refused(rollout: Rollout, batch: Batch, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        next(rollout.generate(batch, **options))


class Script:
    """An engine that answers what it was told to."""

    context_length = 100

    def __init__(self, tokens: dict[int, list[int]]) -> None:
        self.tokens = tokens
        self.asked: list[Request] = []

    def generate(self, requests: list[Request], **options: Any) -> Iterator[Completion]:
        self.asked = list(requests)
        for request in requests:
            if (tokens := self.tokens.get(request.key)) is not None:
                yield Completion(request.key, tokens, [-0.5] * len(tokens), truncated=False)


def test_a_sample_that_the_engine_lost_is_an_error_that_names_its_prompt(rollout: Rollout, batch: Batch) -> None:
    other = Rollout(rollout.cfg, RankContext())
    lost = {22, 37}  # of the prompts 5 and 9
    other.tokenizer = rollout.tokenizer
    other.engine = Script({row * 4 + j: [40] for row in ROWS for j in range(4) if row * 4 + j not in lost})
    with pytest.raises(ModelError, match=r"ended without 2 of 12 samples, of the prompts in rows \[5, 9\]"):
        list(other.generate(batch))


def test_tokens_go_in_and_come_out_as_they_are_though_their_text_would_make_others(
    rollout: Rollout, batch: Batch
) -> None:
    tokenizer = rollout.tokenizer
    half = tokenizer("é").input_ids[0]  # the first of two bytes: no text by itself
    asked = [[half, half, 31, 31], [1, 40, 1], [40]]  # and the end token in the middle
    said = {row * 4 + j: [half, 31, 40 + j, 1] for row in ROWS for j in range(4)}
    for ids in (*asked[:2], said[ROWS[0] * 4]):
        assert tokenizer(tokenizer.decode(ids, skip_special_tokens=True)).input_ids != ids
    other = Rollout(rollout.cfg, RankContext())
    other.tokenizer, other.engine = tokenizer, Script(said)
    out = joined(other.generate(batch.plus(prompt_ids=Ragged.of(asked, torch.int64))))
    assert {request.key: list(request.prompt) for request in other.engine.asked} == {
        row * 4 + j: ids for row, ids in zip(ROWS, asked, strict=True) for j in range(4)
    }
    assert dict(zip(out["row_id"].tolist(), (ids.tolist() for ids in out["response_ids"].rows()), strict=True)) == said


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout.dtype='fp8'"):
        worker(dtype="fp8")


def test_samples_carry_the_version_of_the_weights_that_made_them(batch: Batch) -> None:
    made = worker()
    weights = {name: p * 1.5 for name, p in made.engine._model.named_parameters()}  # type: ignore[attr-defined]
    before = joined(made.generate(batch))
    published, _publisher = publish(weights)
    made.receive_weights(3, [published])
    after = joined(made.generate(batch))
    assert set(before["weight_version"].tolist()) == {0}
    assert set(after["weight_version"].tolist()) == {3}
    assert before["response"] != after["response"]
    with pytest.raises(ModelError, match="version 3 after 3"):
        made.receive_weights(3, [published])


def test_a_sync_that_brings_the_same_bytes_again_is_told(caplog: pytest.LogCaptureFixture) -> None:
    made = worker()
    weights = dict(made.engine._model.named_parameters())  # type: ignore[attr-defined]
    source = oracle.Source(weights)
    made.receive_weights(1, source.publish(weights))
    made.receive_weights(2, source.publish({name: p * 1.5 for name, p in weights.items()}))
    assert not caplog.records
    made.receive_weights(3, source.publish(weights))
    assert "version 3 are, byte for byte, those of version 2" in caplog.text


def test_all_end_ids_of_the_generation_config_end_a_response_though_padding_is_one(
    tmp_path: Path, batch: Batch
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(resolve(ModelConfig(name="tiny")), directory)
    digit = 31
    file = directory / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": [1, digit], "pad_token_id": 1}))
    made = worker(model=ModelConfig(name="copy", path=str(directory)), samples_per_prompt=16)
    out = joined(made.generate(batch))
    last = {int(ids[-1]) for ids, cut in zip(out["response_ids"].rows(), out["truncated"], strict=True) if not cut}
    assert last == {1, digit}
    inner = torch.cat([ids[:-1] for ids in out["response_ids"].rows()])
    assert not torch.isin(inner, torch.tensor([1, digit])).any()


@pytest.mark.model
def test_a_real_model_answers_and_takes_new_weights() -> None:
    cfg = config(model=ModelConfig(name="smollm2"), engine="vllm", max_new_tokens=16, kv_cache_gib=0.25)
    made = Rollout(cfg, RankContext())
    made.setup()
    try:
        messages = [{"role": "user", "content": "What is 2+3?"}]
        ids = made.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        asked = Batch({"row_id": torch.tensor([0]), "prompt_ids": Ragged.of([ids], torch.int64)})
        answer = joined(made.generate(asked, temperature=0.0, samples=1))
        assert "5" in answer["response"][0]
        assert answer["response_ids"].values[-1] == made.tokenizer.eos_token_id  # which is its pad token too
        model = oracle.load(resolve(cfg.model))
        source = oracle.Source(dict(model.named_parameters()), ranks=2)
        made.receive_weights(1, source.publish({n: p * 0 for n, p in model.named_parameters()}))
        silenced = joined(made.generate(asked, temperature=0.0, samples=1))
        assert silenced["response"] != answer["response"]
        made.receive_weights(2, source.publish(dict(model.named_parameters())))
        assert joined(made.generate(asked, temperature=0.0, samples=1))["response"] == answer["response"]
    finally:
        made.teardown()
