"""Trackers that draw curves: TensorBoard, Weights & Biases, MLflow. Packages are imported when one is opened."""

from __future__ import annotations

import json
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlinf.tracking.redaction import redact_text

MLFLOW_KEYS = ("tracking_uri", "experiment", "run_name", "tags")


class TensorBoardTracker:
    """Event files under ``<output_dir>/tensorboard``. What an earlier run wrote from ``first_step`` on is hidden."""

    def __init__(self, directory: Path, config: Mapping[str, Any], first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Nothing of an earlier run is kept when this one begins anew; step 0 is the evaluation before training.
        self._writer = SummaryWriter(str(directory), purge_step=first_step if first_step > 1 else 0)
        text = json.dumps(config, indent=2, default=str)
        self._writer.add_text("config", "".join(f"    {line}\n" for line in text.splitlines()), max(first_step - 1, 0))

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """Weights & Biases. ``arguments`` are those of ``wandb.init``; a resumed run continues its W&B run."""

    def __init__(
        self, arguments: Mapping[str, Any], output_dir: Path, config: Mapping[str, Any], first_step: int
    ) -> None:
        import wandb

        told = dict(arguments)
        identity = (
            told.pop("id", None) or _remembered(output_dir / "wandb_run.json", first_step) or uuid.uuid4().hex[:8]
        )
        settings = {"console": "off", **(told.pop("settings", None) or {})}  # the console may show what is redacted
        if any(redact_text(argument) != argument for argument in sys.argv):
            settings["x_disable_meta"] = True  # W&B would send the command line
        defaults = {"dir": str(output_dir), "resume": "allow"}
        extra = dict(told.pop("config", None) or {})
        self._run = wandb.init(**{**defaults, **told}, id=identity, config={**config, **extra}, settings=settings)
        _remember(output_dir / "wandb_run.json", identity)
        # W&B drops what comes with a lower step than its own counter; with a step metric it has no say in it.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()


class MlflowTracker:
    """MLflow. ``arguments`` has some of ``MLFLOW_KEYS``; a resumed run continues its MLflow run.

    MLflow's client itself cuts what is more, or longer, than a server takes at once.
    """

    def __init__(
        self, arguments: Mapping[str, Any], output_dir: Path, config: Mapping[str, Any], first_step: int
    ) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        self._client = MlflowClient(tracking_uri=arguments.get("tracking_uri"))
        remembered = _remembered(output_dir / "mlflow_run.json", first_step)
        if remembered is not None:
            self._run_id = remembered
            self._client.update_run(remembered, status="RUNNING")
            return
        name = arguments.get("experiment") or "rlinf"
        experiment = self._client.get_experiment_by_name(name)
        identity = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        run = self._client.create_run(
            identity, run_name=arguments.get("run_name") or output_dir.name, tags=arguments.get("tags")
        )
        self._run_id = run.info.run_id
        _remember(output_dir / "mlflow_run.json", self._run_id)
        self._client.log_batch(self._run_id, params=[Param(*pair) for pair in sorted(flat(config).items())])

    def log(self, step: int, values: dict[str, float]) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(self._run_id, [self._metric(name, value, now, step) for name, value in values.items()])

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """A nested config by dotted keys, each value as text."""
    found: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = str(value)
    return found


def _remembered(path: Path, first_step: int) -> str | None:
    """The id under which the run that is resumed was tracked; none for a run that begins anew."""
    if first_step <= 1 or not path.exists():
        return None
    return str(json.loads(path.read_text())["id"])


def _remember(path: Path, identity: str) -> None:
    path.write_text(json.dumps({"id": identity}) + "\n")
