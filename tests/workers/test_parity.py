"""Engine and trainer agree on the log-probabilities of the same weights after every sync, and a gap is found."""

from __future__ import annotations

import pytest
import torch

from rlinf.batch import Batch, Ragged
from rlinf.config import ActorConfig, AlgorithmConfig, ModelConfig, OptimizerConfig, RolloutConfig
from rlinf.errors import RlinfError
from rlinf.worker import RankContext
from rlinf.workers.actor import Actor
from rlinf.workers.rollout import Rollout
from tests.models.small import samples, write_model
from tests.vps.reading import read

SYNCS = 4
TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return ModelConfig(name="small", path=str(write_model(tmp_path_factory.mktemp("parity") / "model")))


def pair(model: ModelConfig, lr: float) -> tuple[Actor, Rollout]:
    actor = Actor(
        ActorConfig(model, AlgorithmConfig(), OptimizerConfig(lr=lr), temperature=TEMPERATURE, parity_bound=1e-3),
        RankContext(),
    )
    actor.setup()
    cfg = RolloutConfig(model, engine="hf", samples_per_prompt=4, max_new_tokens=8, temperature=TEMPERATURE)
    rollout = Rollout(cfg, RankContext())
    rollout.setup()
    return actor, rollout


def generated(rollout: Rollout, step: int) -> Batch:
    """Samples with advantages that move the weights."""
    prompts = samples([5, 3], [1, 1], seed=step).only({"row_id", "prompt_ids"})
    made = Batch.concat(list(rollout.generate(prompts))).sorted()
    generator = torch.Generator().manual_seed(step)
    advantages = torch.randn(len(made["response_ids"].values), generator=generator)
    return made.plus(
        prompt_ids=prompts.select(made["parent"])["prompt_ids"],
        advantages=Ragged(advantages, made["response_ids"].lengths),
    )


@pytest.mark.parametrize("lr", [0.0, 0.02])
def test_after_every_sync_both_sides_agree_at_the_temperature_of_the_samples(model: ModelConfig, lr: float) -> None:
    actor, rollout = pair(model, lr)
    first = dict(rollout.engine._model.named_parameters())["lm_head.weight"].clone()  # type: ignore[attr-defined]
    for step in range(SYNCS):
        rollout.receive_weights(actor.version, [actor.publish_weights("rollout", inline=False)])
        actor.train(generated(rollout, step))
        metrics = actor.metrics.take()
        assert metrics["parity_mean"].value < 1e-5
        assert metrics["parity_max"].value < 1e-4
    moved = (read([actor.publish_weights("rollout", inline=False)])["lm_head.weight"] - first).abs().max()
    assert (float(moved) > 0.01) is (lr > 0)


def test_weights_that_were_never_delivered_are_found_though_the_samples_name_the_right_version(
    model: ModelConfig,
) -> None:
    actor, rollout = pair(model, 0.02)
    actor.train(generated(rollout, 0))
    rollout.version = actor.version
    with pytest.raises(RlinfError, match=r"\(version 1\): mean gap .*weights that were not delivered"):
        actor.train(generated(rollout, 1))


def test_another_temperature_on_one_side_is_found(model: ModelConfig) -> None:
    actor, rollout = pair(model, 0.02)
    rollout.cfg.temperature = 1.0
    with pytest.raises(RlinfError, match="another temperature"):
        actor.train(generated(rollout, 0))
