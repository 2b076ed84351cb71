"""MLflow itself, with a store of files: what the tracker writes is read back by MLflow's own client."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from mlflow.entities import Run
from mlflow.tracking import MlflowClient

from rlinf.config import LoggerConfig
from rlinf.tracking import open_trackers

SECRET = "s3cr3t-value"
CONFIG = {
    "model": {"name": "tiny", "path": None},
    "logger": {"wandb": {"api_key": SECRET}, "mlflow": {"tracking_uri": f"https://me:{SECRET}@host/"}},
    "many": {f"key{i:03d}": i for i in range(150)},  # more than MLflow takes at once
    "long": "x" * 7000,  # longer than it takes
}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # the one store that the slim package has
    return (tmp_path / "store").as_uri()


def track(store: str, output: Path, first_step: int, steps: dict[int, dict[str, float]]) -> list[str]:
    """What was said while these steps were tracked."""
    said: list[str] = []
    cfg = LoggerConfig(
        tensorboard=False,
        mlflow={"tracking_uri": store, "experiment": "arithmetic", "run_name": "first", "tags": {"team": "a"}},
    )
    output.mkdir(exist_ok=True)
    trackers = open_trackers(cfg, output, CONFIG, first_step, said.append)
    for step, values in steps.items():
        trackers.log(step, values)
    trackers.close(patience_s=60)
    return said


def runs(store: str) -> list[Run]:
    client = MlflowClient(store)
    experiment = client.get_experiment_by_name("arithmetic")
    assert experiment is not None
    return client.search_runs([experiment.experiment_id])


def history(store: str, run: Run, name: str) -> list[tuple[int, float]]:
    found = MlflowClient(store).get_metric_history(run.info.run_id, name)
    return sorted((metric.step, metric.value) for metric in found)


def test_metrics_params_and_tags_read_back_and_no_secret_is_in_the_store(tmp_path: Path, store: str) -> None:
    wide = {f"wide/{i}": float(i) for i in range(1100)}  # more metrics than MLflow takes at once
    said = track(store, tmp_path / "out", 1, {0: {"eval/mean": 0.25}, 1: {"loss": 2.0, **wide}, 2: {"loss": math.nan}})
    assert said == []
    (run,) = runs(store)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "first")
    assert run.data.tags["team"] == "a"
    assert history(store, run, "eval/mean") == [(0, 0.25)]
    (first, second) = history(store, run, "loss")
    assert first == (1, 2.0)
    assert (second[0], math.isnan(second[1])) == (2, True)
    assert {name: run.data.metrics[name] for name in wide} == wide
    params = run.data.params
    assert params["model.name"] == "tiny"
    assert params["model.path"] == "None"
    assert {name for name in params if name.startswith("many.")} == {f"many.key{i:03d}" for i in range(150)}
    assert params["long"] == "x" * len(params["long"])
    assert len(params["long"]) >= 500
    assert {"logger.wandb.api_key", "logger.mlflow.tracking_uri"} <= params.keys()
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(kept) > 1000
    assert [path for path in kept if SECRET in path.read_text(errors="replace")] == []


def test_a_resumed_run_goes_on_in_its_mlflow_run_and_a_new_one_gets_its_own(tmp_path: Path, store: str) -> None:
    assert track(store, tmp_path / "out", 1, {1: {"loss": 3.0}, 2: {"loss": 2.0}}) == []
    assert track(store, tmp_path / "out", 3, {3: {"loss": 1.0}}) == []
    (run,) = runs(store)
    assert run.info.status == "FINISHED"
    assert history(store, run, "loss") == [(1, 3.0), (2, 2.0), (3, 1.0)]
    assert json.loads((tmp_path / "out" / "mlflow_run.json").read_text()) == {"id": run.info.run_id}
    assert track(store, tmp_path / "other", 1, {1: {"loss": 9.0}}) == []
    assert len(runs(store)) == 2
    assert history(store, run, "loss")[0] == (1, 3.0)


def test_a_store_that_refuses_is_said_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    said = track((tmp_path / "store").as_uri(), tmp_path / "out", 1, {1: {"loss": 3.0}})
    assert any(text.startswith("tracker mlflow: ") and "maintenance mode" in text for text in said)
    assert "loss" in (tmp_path / "out" / "metrics.jsonl").read_text()
