import math
import pickle
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from rlinf.algorithms.advantages import advantage_map, gae, grpo, whiten
from rlinf.batch import Batch, Ragged
from rlinf.config import AlgorithmConfig
from rlinf.errors import ConfigError, DataError
from rlinf.m2flow.stage import Unit
from rlinf.metrics import Recorder
from tests.algorithms import oracles

CONFIGS = Path(__file__).parents[2] / "configs" / "algorithm"
PLAIN = AlgorithmConfig(gamma=1.0, lam=1.0, normalize="none")


def batch(lengths: tuple[int, ...] = (3, 1, 2), seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = Ragged(torch.arange(sum(lengths)), torch.tensor(lengths, dtype=torch.int64))

    def tokens() -> Ragged:
        return ids.with_values(torch.randn(sum(lengths), generator=generator))

    n = len(lengths)
    return Batch(
        {
            "row_id": torch.arange(n),
            "group_id": torch.arange(n) // 2,
            "response_ids": ids,
            "rewards": torch.randn(n, generator=generator),
            "truncated": torch.arange(n) % 2 == 0,
            "values": tokens(),
            "ref_logprobs": tokens(),
            "rollout_logprobs": tokens(),
        }
    )


def apply(function, rows: Batch) -> tuple[Batch, dict]:
    metrics = Recorder()
    out = function(rows.only(function.__stage__.reads), metrics)
    assert set(out) == set(function.__stage__.writes)
    return out, metrics.take()


def test_gae_reads_only_what_the_config_needs():
    assert gae(PLAIN).__stage__.reads == ("rewards", "values", "response_ids")
    with_all = replace(PLAIN, missing_eos_penalty=1.0, kl_coef=0.1, kl_in="reward")
    assert set(gae(with_all).__stage__.reads) - set(gae(PLAIN).__stage__.reads) == {
        "truncated",
        "ref_logprobs",
        "rollout_logprobs",
    }
    assert gae(replace(PLAIN, kl_coef=0.1, kl_in="loss")).__stage__.reads == gae(PLAIN).__stage__.reads
    assert grpo(PLAIN).__stage__.reads == ("rewards", "response_ids", "group_id")


def test_only_batch_wide_whitening_needs_the_whole_batch_and_only_grpo_whole_groups():
    assert gae(replace(PLAIN, normalize="batch")).__stage__.whole
    assert not gae(PLAIN).__stage__.whole
    assert gae(PLAIN).__stage__.unit is Unit.SEQUENCE
    assert grpo(AlgorithmConfig()).__stage__.unit is Unit.GROUP
    assert not grpo(AlgorithmConfig()).__stage__.whole


def test_gae_puts_the_score_at_the_last_token_and_the_kl_at_every_token():
    rows = batch()
    cfg = AlgorithmConfig(gamma=0.9, lam=0.8, normalize="none", kl_coef=0.1, kl_in="reward", missing_eos_penalty=0.5)
    out, metrics = apply(gae(cfg), rows)
    advantages, kls, shaped = [], [], []
    for i in range(rows.n):
        kl = (rows["rollout_logprobs"][i] - rows["ref_logprobs"][i]).tolist()
        rewards = [-0.1 * k for k in kl]
        rewards[-1] += rows["rewards"][i].item() - 0.5 * float(rows["truncated"][i])
        advantages += oracles.gae(rewards, rows["values"][i].tolist(), 0.9, 0.8)
        kls += kl
        shaped.append(sum(rewards))
    assert out["advantages"].values.tolist() == pytest.approx(advantages, rel=1e-4, abs=1e-5)
    torch.testing.assert_close(out["returns"].values, out["advantages"].values + rows["values"].values)
    assert torch.equal(out["returns"].lengths, rows["response_ids"].lengths)
    assert metrics["kl"].value == pytest.approx(sum(kls) / len(kls), rel=1e-4)
    assert metrics["reward_shaped"].value == pytest.approx(sum(shaped) / len(shaped), rel=1e-4)


def test_gae_whitens_advantages_and_leaves_returns_as_they_were():
    rows = batch()
    plain, raw = apply(gae(PLAIN), rows)
    white, metrics = apply(gae(replace(PLAIN, normalize="batch")), rows)
    torch.testing.assert_close(white["advantages"].values, whiten(plain["advantages"].values))
    assert torch.equal(white["returns"].values, plain["returns"].values)
    assert metrics["advantage_std"].value == pytest.approx(
        plain["advantages"].values.std(correction=0).item(), rel=1e-4
    )
    assert metrics["advantage_mean"] == raw["advantage_mean"]  # both before whitening
    assert "advantage_std" not in raw  # parts of a batch have none that would add up


def test_grpo_gives_every_token_the_advantage_of_its_response():
    rows = batch((3, 1, 2, 2)).plus(rewards=torch.tensor([1.0, 0.0, 1.0, 1.0]), group_id=torch.tensor([5, 5, 2, 2]))
    out, metrics = apply(grpo(AlgorithmConfig(grpo_std=False)), rows)
    assert out["advantages"].values.tolist() == [0.5] * 3 + [-0.5] + [0.0] * 4
    assert metrics["zero_variance_groups"].value == 0.5
    assert metrics["zero_variance_groups"].weight == 2


def test_grpo_subtracts_the_kl_of_the_whole_response_but_counts_flat_groups_on_raw_rewards():
    rows = batch((2, 1)).plus(rewards=torch.ones(2))
    out, metrics = apply(grpo(AlgorithmConfig(grpo_std=False, kl_coef=0.1, kl_in="reward")), rows)
    kl = (rows["rollout_logprobs"].values - rows["ref_logprobs"].values) * 0.1
    first, second = 1 - kl[:2].sum(), 1 - kl[2]
    half = ((first - second) / 2).item()
    assert out["advantages"].values.tolist() == pytest.approx([half, half, -half], rel=1e-4)
    assert metrics["zero_variance_groups"].value == 1.0


def test_grpo_group_by_group_equals_all_at_once_metrics_included():
    rows = batch((3, 1, 2, 2))
    function = grpo(AlgorithmConfig(kl_coef=0.1, kl_in="reward"))
    whole, whole_metrics = apply(function, rows)
    metrics = Recorder()
    parts = [function(rows.select(part), metrics) for part in ([0, 1], [2, 3])]
    torch.testing.assert_close(Batch.concat(parts)["advantages"].values, whole["advantages"].values)
    taken = metrics.take()
    assert {k: (m.value, m.weight) for k, m in taken.items()} == {
        k: (pytest.approx(m.value, abs=1e-9), m.weight) for k, m in whole_metrics.items()
    }


@pytest.mark.parametrize("make", [gae, grpo])
def test_rows_of_no_tokens_and_batches_of_no_rows_work(make):
    cfg = AlgorithmConfig(kl_coef=0.1, kl_in="reward", missing_eos_penalty=0.1)
    out, metrics = apply(make(cfg), batch((0, 2, 0)))
    assert out["advantages"].lengths.tolist() == [0, 2, 0]
    assert torch.isfinite(out["advantages"].values).all()
    out, metrics = apply(make(cfg), batch(()))
    assert out.n == 0
    assert all(math.isnan(metric.value) and metric.weight == 0 for metric in metrics.values())


@pytest.mark.parametrize("make", [gae, grpo])
def test_maps_travel_to_another_process(make):
    function = make(AlgorithmConfig())
    copy = pickle.loads(pickle.dumps(function))
    assert copy.__stage__ == function.__stage__
    assert torch.equal(apply(copy, batch())[0]["advantages"].values, apply(function, batch())[0]["advantages"].values)


def test_a_reward_that_is_not_a_number_is_an_error_with_its_row():
    rows = batch().plus(rewards=torch.tensor([0.0, math.nan, 1.0]))
    with pytest.raises(DataError, match="1 of 3 are not, the first at row 1"):
        apply(gae(PLAIN), rows)


def test_fields_that_do_not_fit_the_responses_are_named():
    rows = batch((3, 1))
    rows = rows.plus(values=rows["values"].select(torch.tensor([1, 0])))
    with pytest.raises(ValueError, match="'values' must have one value for each token"):
        apply(gae(PLAIN), rows)


def test_the_config_names_the_map_or_a_users_own():
    assert advantage_map(AlgorithmConfig(advantage="grpo")).__stage__.name == "grpo"
    own = advantage_map(AlgorithmConfig(advantage="tests.algorithms.user_code:constant_advantage"))
    assert apply(own, batch())[0]["advantages"].values.tolist() == [1.0] * 6
    with pytest.raises(ConfigError, match="did you mean 'grpo'"):
        advantage_map(AlgorithmConfig(advantage="grop"))
    with pytest.raises(ConfigError, match="must return a function"):
        advantage_map(AlgorithmConfig(advantage="tests.algorithms.user_code:not_a_map"))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"gamma": 1.5}, "algorithm.gamma=1.5"),
        ({"lam": -0.1}, "algorithm.lam=-0.1"),
        ({"normalize": "bach"}, "did you mean 'batch'"),
        ({"missing_eos_penalty": -1.0}, "use 0 or more"),
    ],
)
def test_values_out_of_range_are_refused_when_the_workflow_is_built(keys, message):
    with pytest.raises(ConfigError, match=message):
        gae(AlgorithmConfig(**keys))


@pytest.mark.parametrize("key", ["gamma", "lam"])
def test_what_has_no_effect_on_grpo_is_refused(key):
    with pytest.raises(ConfigError, match=rf"algorithm\.{key}=0\.95 has no effect on grpo"):
        grpo(AlgorithmConfig(**{key: 0.95}))


@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_the_vetted_defaults_fit_the_schema_and_build_their_map(name):
    given = OmegaConf.load(CONFIGS / f"{name}.yaml")
    cfg = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(AlgorithmConfig), given))
    assert advantage_map(cfg).__stage__.name == {"ppo": "gae", "grpo": "grpo"}[name]
    assert set(given) <= {field.name for field in fields(AlgorithmConfig)}
