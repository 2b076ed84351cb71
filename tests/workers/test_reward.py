"""The reward worker: scores, metrics that combine, and alarms."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from rlinf.batch import Batch
from rlinf.config import RewardConfig
from rlinf.errors import ConfigError
from rlinf.metrics import Metric, Reduction, merge
from rlinf.worker import RankContext
from rlinf.workers.reward import ZERO_ALARM_SAMPLES, Reward


def batch(*responses: str, answer: str = "5") -> Batch:
    n = len(responses)
    return Batch(
        {"response": list(responses), "answer": [answer] * n, "question": [""] * n, "metadata": [{} for _ in range(n)]}
    )


def worker(cfg: RewardConfig, **ctx) -> Reward:
    made = Reward(cfg, RankContext(**ctx))
    made.setup()
    return made


@pytest.fixture(scope="module")
def sums():
    made = worker(RewardConfig(scorer="last_number"))
    yield made
    made.teardown()


def test_rewards_are_float32_row_for_row_with_their_statistics(sums):
    sums.metrics.take()
    out = sums.score(batch("5", "4", "it is 5", ""))
    assert out["rewards"].dtype == torch.float32
    assert out["rewards"].tolist() == [1, 0, 1, 0]
    taken = {name: metric.value for name, metric in sums.metrics.take().items()}
    assert taken == {"mean": 0.5, "std": 0.5, "min": 0, "max": 1, "failed_fraction": 0, "errors": 0, "timeouts": 0}


def test_metrics_do_not_depend_on_how_the_batch_was_cut(sums):
    responses = ["5", "4", "5", "5", "1", "5", "5"]
    sums.metrics.take()
    sums.score(batch(*responses))
    whole = sums.metrics.take()
    for part in (responses[:1], responses[1:3], responses[3:]):
        sums.score(batch(*part))
    parts = sums.metrics.take()
    assert parts.keys() == whole.keys()
    for name, metric in whole.items():
        assert parts[name].value == pytest.approx(metric.value), name


def test_standard_deviations_combine_about_the_common_mean():
    values = [np.array([1.0, 5.0]), np.array([100.0]), np.array([-3.0, 2.0, 2.0])]
    parts = [{"x": Metric(v.std(), len(v), Reduction.STD, v.mean())} for v in values]
    assert merge(parts)["x"].value == pytest.approx(np.concatenate(values).std())


def test_an_empty_batch_scores_nothing(sums):
    assert sums.score(batch())["rewards"].shape == (0,)


def test_failures_are_counted_and_the_first_message_is_said(caplog):
    made = worker(
        RewardConfig(scorer="tests.rewards.scorers_for_tests:misbehave", timeout_s=0.5, error_score=-1.0, processes=2)
    )
    try:
        with caplog.at_level(logging.WARNING, "rlinf.reward"):
            out = made.score(batch("good", "slow", "raise", "none"))
            assert out["rewards"].tolist() == [1, -1, -1, -1]
            assert "3 of 4 samples failed (1 exception, 1 none, 1 timeout)" in caplog.text
            assert "ValueError: boom 5" in caplog.text
            taken = {name: metric.value for name, metric in made.metrics.take().items()}
            assert (taken["errors"], taken["timeouts"], taken["failed_fraction"]) == (2, 1, 0.75)
            made.score(batch("raise"))
            assert "every sample failed" in caplog.text
    finally:
        made.teardown()


def test_scores_that_stay_zero_raise_an_alarm_once_until_one_does_not(sums, caplog):
    with caplog.at_level(logging.WARNING, "rlinf.reward"):
        sums.score(batch("5"))
        sums.score(batch(*["4"] * (ZERO_ALARM_SAMPLES - 1)))
        assert not caplog.records
        sums.score(batch("4"))
        sums.score(batch("4"))
        assert len(caplog.records) == 1
        assert f"last {ZERO_ALARM_SAMPLES} samples all scored 0" in caplog.text
        sums.score(batch("5"))
        sums.score(batch(*["4"] * ZERO_ALARM_SAMPLES))
        assert len(caplog.records) == 2


def test_progress_is_reported():
    seen: list[tuple[float, float]] = []
    made = worker(RewardConfig(scorer="last_number"), report=lambda done, total: seen.append((done, total)))
    made.score(batch("5", "4"))
    made.teardown()
    assert seen == [(1, 2), (2, 2)]


def test_teardown_ends_the_processes_and_an_unknown_scorer_ends_the_setup():
    made = worker(RewardConfig(scorer="last_number"))
    made.teardown()
    made.teardown()
    with pytest.raises(RuntimeError, match="setup"):
        made.score(batch("5"))
    with pytest.raises(ConfigError, match="Did you mean 'last_number'"):
        worker(RewardConfig(scorer="last_numbr"))


def test_the_stage_reads_what_a_sample_is_and_holds_no_device():
    spec = Reward.stages()["score"]
    assert spec.reads_for(None) == ("response", "answer", "question", "metadata")
    assert spec.writes_for(None) == ("rewards",)
    assert not Reward.uses_device
