"""rlinf: reinforcement learning at scale. This module is the whole public surface.

- ``Workflow``, ``Worker``, ``stage``, ``Unit``: write a workflow and its workers.
- ``Batch``, ``Ragged``: what flows between them.
- ``load_config``, ``run``: make a config from overrides, and run it, as ``python -m rlinf.train`` does.
- ``RlinfError``, ``RunFailed``: what goes wrong.

Names are imported when first used, so that ``--help`` and the pure parts start at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlinf.batch import Batch, Ragged
    from rlinf.compose import compose as load_config
    from rlinf.config import TrainConfig
    from rlinf.errors import RlinfError
    from rlinf.failure import RunFailed
    from rlinf.m2flow.graph import Workflow
    from rlinf.m2flow.stage import Unit, stage
    from rlinf.train import train as run
    from rlinf.worker import RankContext, Worker

__all__ = [
    "Batch",
    "Ragged",
    "RankContext",
    "RlinfError",
    "RunFailed",
    "TrainConfig",
    "Unit",
    "Worker",
    "Workflow",
    "load_config",
    "run",
    "stage",
]

_HOME = {
    "Batch": "batch:Batch",
    "Ragged": "batch:Ragged",
    "RankContext": "worker:RankContext",
    "RlinfError": "errors:RlinfError",
    "RunFailed": "failure:RunFailed",
    "TrainConfig": "config:TrainConfig",
    "Unit": "m2flow.stage:Unit",
    "Worker": "worker:Worker",
    "Workflow": "m2flow.graph:Workflow",
    "load_config": "compose:compose",
    "run": "train:train",
    "stage": "m2flow.stage:stage",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'rlinf' has no attribute {name!r}")
    module, attribute = _HOME[name].split(":")
    return getattr(import_module(f"rlinf.{module}"), attribute)
