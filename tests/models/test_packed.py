"""Packed forward passes against transformers' own full logits, one sample at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModel, AutoModelForCausalLM

from rlinf.batch import Batch, Ragged
from rlinf.config import ModelConfig
from rlinf.errors import ModelError
from rlinf.models import heads
from rlinf.models.load import load_policy, load_value
from rlinf.models.packed import micro_batches, pack, pack_within
from tests.models.small import samples, write_model

CFG = ModelConfig(name="small", path="unused")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("packed") / "model")


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("logits_at_once", [2**25, 264 * 2])
def test_logprobs_and_entropies_are_those_of_single_samples(directory, temperature, logits_at_once, monkeypatch):
    monkeypatch.setattr(heads, "LOGITS_AT_ONCE", logits_at_once)  # in one piece, and in chunks of two tokens
    batch = samples([4, 1, 7, 3, 2], [5, 3, 0, 1, 6])
    model = load_policy(directory, CFG, "cpu", None)
    rows = [4, 0, 2, 3, 1]
    packed = pack(batch["prompt_ids"], batch["response_ids"], rows)
    logprobs, entropy = model(packed, temperature, with_entropy=True, entropy_grad=True)

    plain = AutoModelForCausalLM.from_pretrained(directory)
    expected_logprobs, expected_entropy = [], []
    for i in rows:
        prompt, response = batch["prompt_ids"][i], batch["response_ids"][i]
        logits = plain(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1] / temperature
        distribution = torch.distributions.Categorical(logits=logits, validate_args=False)
        expected_logprobs.append(distribution.log_prob(response))
        expected_entropy.append(distribution.entropy())
    torch.testing.assert_close(logprobs, torch.cat(expected_logprobs), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, torch.cat(expected_entropy), rtol=1e-5, atol=1e-5)

    weights = torch.randn(len(logprobs), generator=torch.Generator().manual_seed(1))
    (logprobs * weights + entropy).sum().backward()
    (torch.cat(expected_logprobs) * weights + torch.cat(expected_entropy)).sum().backward()
    ours, theirs = dict(model.lm.named_parameters()), dict(plain.named_parameters())
    for name in theirs:
        torch.testing.assert_close(ours[name].grad, theirs[name].grad, rtol=1e-3, atol=1e-4)


def test_entropy_without_its_gradient_moves_nothing(directory):
    batch = samples([4], [5])
    model = load_policy(directory, CFG, "cpu", None)
    _, entropy = model(pack(batch["prompt_ids"], batch["response_ids"], [0]), 1.0, with_entropy=True)
    assert not entropy.requires_grad


def test_values_are_those_of_the_state_before_each_token(directory):
    batch = samples([4, 2], [3, 5])
    model = load_value(directory, CFG, "cpu", None)
    packed = pack(batch["prompt_ids"], batch["response_ids"], [0, 1])
    assert not model(packed).any(), "values start at zero"
    with torch.no_grad():
        model.value_head.weight.normal_()
        model.value_head.bias.fill_(0.5)
    backbone = AutoModel.from_pretrained(directory)
    expected = []
    for i in (0, 1):
        prompt, response = batch["prompt_ids"][i], batch["response_ids"][i]
        hidden = backbone(torch.cat([prompt, response])[None]).last_hidden_state[0, len(prompt) - 1 : -1]
        expected.append(hidden @ model.value_head.weight[0] + 0.5)
    torch.testing.assert_close(model(packed), torch.cat(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [[], [0], [0, 1]])
def test_a_pack_of_empty_responses_predicts_nothing_and_has_zero_gradients(directory, rows):
    batch = samples([4, 2], [0, 0])
    model = load_policy(directory, CFG, "cpu", None)
    logprobs, _ = model(pack(batch["prompt_ids"], batch["response_ids"], rows), 1.0, with_entropy=True)
    assert logprobs.shape == (0,)
    logprobs.sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_a_response_without_a_prompt_is_refused():
    batch = samples([0], [2])
    with pytest.raises(ValueError, match="empty prompt"):
        pack(batch["prompt_ids"], batch["response_ids"], [0])


def test_a_head_that_scales_its_logits_unknown_to_us_is_refused(directory):
    lm = AutoModelForCausalLM.from_pretrained(directory)
    plain = lm.forward

    def scaled(*args, **kwargs):
        out = plain(*args, **kwargs)
        out.logits = out.logits * 0.25
        return out

    lm.forward = scaled
    with pytest.raises(ModelError, match="output_logits"):
        heads.check_output_logits(lm)


@given(st.lists(st.integers(0, 40), max_size=30), st.integers(1, 50))
def test_micro_batches_hold_every_row_once_within_the_budget(lengths, budget):
    cuts = micro_batches(lengths, budget)
    assert sorted(row for rows in cuts for row in rows) == [row for row, length in enumerate(lengths) if length]
    for rows in cuts:
        assert rows == sorted(rows)
        assert sum(lengths[row] for row in rows) <= budget or len(rows) == 1
    filled = sorted(sum(lengths[row] for row in rows) for rows in cuts)
    assert len(filled) < 2 or filled[0] + filled[1] > budget or len(cuts) <= 2 * sum(lengths) / budget + 1
    assert cuts == micro_batches(lengths, budget)


def test_micro_batches_share_attention_work():
    assert micro_batches([8, 8, 1, 1, 1, 1], 12) == [[0, 2, 4], [1, 3, 5]]


def test_the_last_response_token_and_empty_responses_need_no_forward_pass():
    batch = samples([3, 4, 3], [2, 1, 0])
    assert pack(batch["prompt_ids"], batch["response_ids"], [0, 1, 2]).input_ids.shape[1] == 4 + 4


def group_samples() -> Batch:
    """Two prompts of three samples each, out of order, with an empty and a one-token response among them."""
    batch = samples([4, 7, 4, 7, 4, 7], [5, 1, 3, 6, 0, 2])
    prompts = [batch["prompt_ids"][0], batch["prompt_ids"][1]] * 3
    return batch.plus(prompt_ids=Ragged.of(prompts))


@pytest.mark.parametrize("window", [None, 3])
def test_sharing_a_prompt_changes_neither_results_nor_gradients(tmp_path, window):
    directory = write_model(tmp_path / "model", kind="qwen3", window=window)
    batch = group_samples()
    rows = [3, 0, 1, 2, 4, 5]
    results = []
    for attention in ("auto", "sdpa"):
        model = load_policy(directory, ModelConfig(name="small", path="unused", attention=attention), "cpu", None)
        assert model.shares_prompts is (attention == "auto")
        packed = pack(batch["prompt_ids"], batch["response_ids"], rows, share=model.shares_prompts)
        logprobs, _ = model(packed, 1.0)
        (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
        results.append((packed.input_ids.shape[1], logprobs, dict(model.lm.named_parameters())))
    (short, ours, our_parameters), (long, theirs, their_parameters) = results
    assert (short, long) == (4 + 4 + 2 + 7 + 0 + 5 + 1, 4 * 2 + 4 + 2 + 7 * 3 + 0 + 5 + 1)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    for name, parameter in their_parameters.items():
        torch.testing.assert_close(our_parameters[name].grad, parameter.grad, rtol=1e-3, atol=1e-4)


def test_samples_that_share_a_prompt_are_refused_by_an_attention_that_cannot(directory):
    batch = group_samples()
    model = load_policy(directory, ModelConfig(name="small", path="unused", attention="sdpa"), "cpu", None)
    with pytest.raises(ValueError, match="share prompts"):
        model(pack(batch["prompt_ids"], batch["response_ids"], [0, 2], share=True), 1.0)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("budget", [1, 9, 14, 1000])
def test_a_group_is_cut_only_where_the_budget_asks_for_it(share, budget):
    batch = group_samples()
    cuts = pack_within(batch["prompt_ids"], batch["response_ids"], [5, 4, 3, 2, 1, 0], budget, share)
    assert sorted(row for packed in cuts for row in packed.rows.tolist()) == [0, 1, 2, 3, 5]
    for packed in cuts:
        assert packed.input_ids.shape[1] <= budget or len(packed.rows) == 1
        assert packed.shared <= share
    if budget == 1000:
        assert len(cuts) == 1
