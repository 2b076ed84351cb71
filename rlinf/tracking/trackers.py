"""All trackers of a run behind one `log`, which never raises and never waits for a network."""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from rlinf.config import LoggerConfig
from rlinf.errors import ConfigError
from rlinf.tracking.backends import MLFLOW_KEYS, MlflowTracker, TensorBoardTracker, WandbTracker
from rlinf.tracking.background import Background, reason
from rlinf.tracking.files import JsonlTracker
from rlinf.tracking.redaction import redact

_log = logging.getLogger(__name__)


class Tracker(Protocol):
    """Takes the values of a step. It may raise: `Trackers` sees to it."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """``values`` by name, e.g. ``actor/entropy``; NaN where there was nothing to measure."""

    def close(self) -> None:
        """Flush, and let go."""


class Trackers:
    """Hands each step to every tracker. A tracker that fails is named once, with the reason, and asked again.

    Steps go up: values of a step that was logged before are added to it while it is the last one, and an earlier step
    is left out, which is said once.
    """

    def __init__(self, trackers: Mapping[str, Tracker], warn: Callable[[str], None] = _log.warning) -> None:
        self._trackers = dict(trackers)
        self._warn = warn
        self._warned: set[str] = set()
        self._refused: dict[str, int] = {}
        self._last = -1

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values of a step (an iteration of training; 0 before the first)."""
        if step < self._last:
            self._once("steps", f"step {step} came after step {self._last}; steps must go up, and it is left out")
            return
        self._last = step
        numbers = self._numbers(values)
        for name, tracker in self._trackers.items():
            try:
                tracker.log(step, dict(numbers))
            except Exception as error:
                self._refused[name] = self._refused.get(name, 0) + 1
                self._once(name, f"tracker {name}: {reason(error)}; the run goes on, and the next step is tried again")

    def close(self, patience_s: float = 10.0) -> None:
        """Close all; remote ones get ``patience_s`` seconds together to deliver what is queued."""
        remote = [each for each in self._trackers.values() if isinstance(each, Background)]
        for each in remote:
            each.finish()
        until = time.monotonic() + patience_s
        for name, tracker in self._trackers.items():
            try:
                if isinstance(tracker, Background):
                    tracker.close(until - time.monotonic())
                else:
                    tracker.close()
            except Exception as error:
                self._once(name, f"tracker {name}: {reason(error)} while closing")
            if lost := self._refused.get(name, 0):
                self._warn(f"tracker {name}: {lost} step{'s' if lost > 1 else ''} could not be written")
        self._trackers = {}

    def _numbers(self, values: Mapping[str, float]) -> dict[str, float]:
        numbers = {}
        for name, value in values.items():
            try:
                numbers[name] = float(value)
            except (TypeError, ValueError):
                self._once(f"value {name}", f"{name} is {type(value).__name__}, not a number; it is not tracked")
        return numbers

    def _once(self, key: str, text: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            self._warn(text)


def check(cfg: LoggerConfig) -> None:
    """Find out before the run whether the trackers that were asked for can be opened at all.

    Raises:
        ConfigError: a package is missing, or a key of ``logger.mlflow`` is unknown.
    """
    for key, package, wanted, off in (
        ("tensorboard", "tensorboard", cfg.tensorboard, "false"),
        ("wandb", "wandb", cfg.wandb is not None, "null"),
        ("mlflow", "mlflow", cfg.mlflow is not None, "null"),
    ):
        if wanted and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"logger.{key} is set, and the package {package} is not installed; run `pip install {package}`, or set "
                f"logger.{key}={off}"
            )
    unknown = sorted(set(cfg.mlflow or {}) - set(MLFLOW_KEYS))
    if unknown:
        raise ConfigError(f"logger.mlflow has no key {', '.join(unknown)}; it has {', '.join(MLFLOW_KEYS)}")
    if cfg.samples < 0:
        raise ConfigError(f"logger.samples is {cfg.samples}; it is a count, 0 for none")


def open_trackers(
    cfg: LoggerConfig,
    output_dir: Path,
    config: Mapping[str, Any],
    first_step: int,
    warn: Callable[[str], None] = _log.warning,
) -> Trackers:
    """Open ``metrics.jsonl`` and the trackers that the config asks for. Never raises.

    Args:
        cfg: which ones.
        output_dir: where files go.
        config: the run's whole config as plain values; secrets are taken out here.
        first_step: the first step that this run trains. 0 or 1: it begins anew. Otherwise it is resumed: what earlier
            runs wrote for this step and later ones is dropped, and remote runs are continued.
        warn: takes the one message for each thing that fails.
    """
    output_dir = Path(output_dir)
    known = redact(config)
    opened: dict[str, Tracker] = {}

    def local(name: str, make: Callable[[], Tracker]) -> None:
        try:
            opened[name] = make()
        except Exception as error:
            warn(f"tracker {name}: {reason(error)}; the run goes on without it")

    local("jsonl", lambda: JsonlTracker(output_dir / "metrics.jsonl", first_step))
    if cfg.tensorboard:
        local("tensorboard", lambda: TensorBoardTracker(output_dir / "tensorboard", known, first_step))
    if cfg.wandb is not None:
        opened["wandb"] = Background("wandb", partial(WandbTracker, cfg.wandb, output_dir, known, first_step), warn)
    if cfg.mlflow is not None:
        opened["mlflow"] = Background("mlflow", partial(MlflowTracker, cfg.mlflow, output_dir, known, first_step), warn)
    return Trackers(opened, warn)
