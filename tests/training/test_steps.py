"""Minibatches, gradient norms, and optimiser steps."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from rlinf.config import OptimizerConfig
from rlinf.errors import CheckpointError, ConfigError, RlinfError
from rlinf.training import clip_gradients, global_grad_norm, minibatches
from rlinf.worker import RankContext
from tests.models.small import samples, write_model
from tests.workers.ranks import actor, critic

PROMPTS, RESPONSES = [5, 3, 8, 2, 6], [4, 6, 2, 3, 9]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("steps") / "model", tied=True)


@given(st.sets(st.integers(0, 10**6), max_size=40), st.integers(0, 12), st.randoms())
def test_minibatches_do_not_depend_on_who_holds_the_rows(row_ids, size, random):
    ids = list(row_ids)
    expected = minibatches(sorted(ids), size, seed=1, iteration=2, epoch=0)
    random.shuffle(ids)
    assert minibatches(ids, size, seed=1, iteration=2, epoch=0) == expected
    assert sorted(row for members in expected for row in members) == sorted(ids)
    assert all(len(members) == size for members in expected[:-1]) or size == 0


def test_minibatches_change_with_seed_iteration_and_epoch():
    def cut(**change):
        return minibatches(range(30), 10, **{"seed": 0, "iteration": 0, "epoch": 0, **change})

    assert cut() == cut()
    assert len({str(cut()), str(cut(seed=1)), str(cut(iteration=1)), str(cut(epoch=1))}) == 4


def test_a_row_given_twice_and_a_negative_size_are_refused():
    with pytest.raises(ValueError, match="more than once"):
        minibatches([1, 2, 1], 2, seed=0, iteration=0, epoch=0)
    with pytest.raises(ConfigError, match="mini_batch_size"):
        minibatches([1, 2], -1, seed=0, iteration=0, epoch=0)


def test_the_norm_and_the_clipping_are_torchs_own():
    g = torch.Generator().manual_seed(0)
    shapes = [(3, 4), (5,), (0, 2), ()]
    ours = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for p in ours:
        p.grad = torch.randn(p.shape, generator=g)
    theirs = copy.deepcopy(ours)
    for p, q in zip(ours, theirs, strict=True):
        q.grad = p.grad / 4
    expected = torch.nn.utils.clip_grad_norm_(theirs, 0.1).item()
    assert clip_gradients(ours, 0.25, 0.1) == pytest.approx(expected, rel=1e-5)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_a_norm_that_is_not_finite_leaves_the_gradients_alone():
    p = torch.nn.Parameter(torch.zeros(2))
    p.grad = torch.tensor([1.0, math.nan])
    assert math.isnan(clip_gradients([p], 0.5, 1.0))
    assert p.grad[0] == 1.0
    assert global_grad_norm([]) == 0.0


def weights_after(worker, batch, steps=1):
    for _ in range(steps):
        worker.train(batch)
    return dict(worker.state()["model"])


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("make", [actor, critic])
def test_the_number_of_micro_batches_changes_nothing(directory, make, aggregation):
    batch = samples(PROMPTS, RESPONSES)
    results = []
    for budget in (1, 1000):
        worker = make(directory, RankContext())
        worker.cfg.tokens_per_micro_batch = budget
        worker.cfg.algorithm = copy.copy(worker.cfg.algorithm)
        worker.cfg.algorithm.mini_batch_size, worker.cfg.algorithm.aggregation = 0, aggregation
        weights = weights_after(worker, batch)
        results.append(({n: w.clone() for n, w in weights.items()}, worker.metrics.take()))
    for name, weight in results[0][0].items():
        torch.testing.assert_close(weight, results[1][0][name], rtol=1e-3, atol=1e-4)
    for name, metric in results[0][1].items():
        assert metric.value == pytest.approx(results[1][1][name].value, rel=1e-3, abs=1e-5), name


def test_a_learning_rate_of_zero_changes_no_weight(directory):
    worker = actor(directory, RankContext())
    worker.trainer.cfg = OptimizerConfig(lr=0.0, weight_decay=0.1)
    before = {n: w.clone() for n, w in worker.state()["model"].items()}
    after = weights_after(worker, samples(PROMPTS, RESPONSES), 2)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert worker.metrics.take()["grad_norm"].value > 0


def test_the_same_seed_gives_the_same_weights_bit_for_bit(directory):
    batch = samples(PROMPTS, RESPONSES)
    first, second = (weights_after(actor(directory, RankContext()), batch, 2) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_resumed_actor_continues_bit_for_bit(directory):
    batch = samples(PROMPTS, RESPONSES)
    worker = actor(directory, RankContext())
    worker.train(batch)
    saved = copy.deepcopy(worker.state())
    expected = {n: w.clone() for n, w in weights_after(worker, batch).items()}
    other = actor(directory, RankContext())
    other.load_state(saved)
    assert (other.version, other.trainer.steps) == (1, saved["steps"])
    found = weights_after(other, batch)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_state_of_another_model_is_refused(directory, tmp_path):
    worker = actor(directory, RankContext())
    with pytest.raises(CheckpointError, match="another model"):
        worker.load_state(actor(write_model(tmp_path / "other"), RankContext()).state())


def test_a_gradient_that_is_not_finite_skips_the_step_and_is_counted(directory):
    worker = actor(directory, RankContext(), mini_batch_size=0, epochs=1)
    batch = samples(PROMPTS, RESPONSES)
    batch["advantages"].values[3] = math.nan
    before = {n: w.clone() for n, w in worker.state()["model"].items()}
    after = weights_after(worker, batch)
    assert all(torch.equal(before[name], after[name]) for name in before)
    metrics = worker.metrics.take()
    assert metrics["skipped_steps"].value == 1
    assert not math.isfinite(metrics["grad_norm"].value)


@pytest.mark.parametrize("responses", [[0, 0, 0, 0, 0], None])
def test_a_batch_of_nothing_trains_nothing_and_goes_on(directory, responses):
    batch = samples(PROMPTS, responses) if responses else samples([], [])
    for make in (actor, critic):
        worker = make(directory, RankContext())
        before = {n: w.clone() for n, w in worker.state()["model"].items()}
        after = weights_after(worker, batch)
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert worker.version == 1
        worker.metrics.take()


def test_parity_compares_the_samples_of_these_weights_alone(directory):
    batch = samples(PROMPTS, RESPONSES)
    worker = actor(directory, RankContext(), parity_bound=0.01)
    true = worker.logprobs(batch)["old_logprobs"]
    off = true.with_values(true.values + torch.where(true.row_index == 1, 0.5, 0.0))
    versions = torch.tensor([0, 7, 0, 0, 0])
    worker.train(batch.plus(rollout_logprobs=off, weight_version=versions))
    metrics = worker.metrics.take()
    assert metrics["parity_mean"].value < 1e-5
    assert metrics["parity_max"].value < 1e-4

    strict = actor(directory, RankContext(), parity_bound=0.01, mini_batch_size=0)
    before = {n: w.clone() for n, w in strict.state()["model"].items()}
    with pytest.raises(RlinfError, match=r"mean gap 0\.125.*largest 0\.5.*bound 0\.01"):
        strict.train(batch.plus(rollout_logprobs=off))
    after = strict.state()["model"]
    assert all(torch.equal(before[name], after[name]) for name in before), "the error must come before the step"


def test_a_temperature_of_zero_is_refused(directory):
    from rlinf.workers.actor import Actor

    cfg = actor(directory, RankContext()).cfg
    cfg.temperature = 0.0
    with pytest.raises(ConfigError, match="temperature"):
        Actor(cfg, RankContext()).setup()


def test_an_export_is_a_model_directory_with_equal_logits(directory, tmp_path):
    worker = actor(directory, RankContext())
    worker.train(samples(PROMPTS, RESPONSES))
    worker.export(tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.arange(1, 9)[None]
    assert torch.equal(loaded(ids).logits, worker.model.lm(ids).logits)
    assert {file.name for file in directory.iterdir()} == {file.name for file in (tmp_path / "out").iterdir()}
