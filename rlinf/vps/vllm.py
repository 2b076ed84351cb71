"""The weight-transfer engine ``vps``: the half of a weight sync that runs in each of vLLM's workers.

A worker traces its own loader once for a source's layout, and plans what it takes. Then, at every sync:

- Parameters that lie in memory as the loader fills them are written in place.
- The others, which a kernel has repacked, go through vLLM's layerwise reload: their tensors are handed to the model's
  own loader, module after module, each once. A tensor that lies whole in the source's memory is not even copied; the
  rest is put together in a staging buffer that the next module uses again.

Which parameters are of which sort is seen, not assumed: the first sync reloads all of them, and those that then hold,
element for element, what the layout says, and hold it still after vLLM's processing ran once more, are of the first.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from rlinf.host import this_host
from rlinf.vps.layout import ExplicitLayout
from rlinf.vps.memory import Memory
from rlinf.vps.publication import Publication
from rlinf.vps.reload import Way
from rlinf.vps.trace import as_loaded, trace


@dataclass
class InitInfo(WeightTransferInitInfo):
    """The layout of all source ranks. Nothing is changed when it does not fit."""

    source: ExplicitLayout


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """The publications of all source ranks, in the order of the layout."""

    publications: Sequence[Publication]


class WeightReader(WeightTransferEngine[InitInfo, UpdateInfo]):
    """See the module."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Trace and plan for a source.

        Raises:
            LayoutError: the source's model is not the engine's; names the parameter or tensor.
        """
        with as_loaded(self.model) as tied:
            traced = trace(self.model, init_info.source.space, tied)
        self._way = Way(self.model, traced, init_info.source)
        self._memories: dict[Any, Memory] = {}

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self.seconds = {"copy": 0.0, "load": 0.0}
        with torch.device(self.device):
            initialize_layerwise_reload(self._way.reloaded)

    def update_weights(self, update_info: dict) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":  # the base class asks torch.accelerator, of which a CPU has none
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        self._sources = self._attach(update_info.publications)
        with self._timed("copy"):
            self._way.write(self._sources)
        for group in self._way.groups:
            with self._timed("copy"):
                weights = self._way.stage(group, self._sources)
            with self._timed("load"), torch.device(self.device):
                cast(Any, self.model).load_weights(iter(weights))

    def _attach(self, publications: Sequence[Publication]) -> list[list[torch.Tensor]]:
        handles = [p.handle for p in publications if p.handle.host == this_host()]
        self._memories = {handle: self._memories.get(handle) or Memory.attach(handle) for handle in handles}
        return [p.buffers(self._memories.get(p.handle)) for p in publications]

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self.seconds[what] += time.perf_counter() - begun

    def finish_weight_update(self) -> None:
        """Repack what is left, and put the layers back to work."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with self._timed("load"), torch.device(self.device):
            finalize_layerwise_reload(self._way.reloaded, self.model_config)
            self._way.finish(self._sources)
        self._sources = []

    @property
    def in_place(self) -> list[str]:
        """See `Way`."""
        return sorted(self._way.in_place)

    def shutdown(self) -> None:
        """Nothing to release."""


class WorkerExtension:
    """vLLM mixes this into its workers, and so imports this module in each of its processes."""

    def weight_sync_seconds(self) -> dict[str, float]:
        """Of the last sync: ``copy`` what was copied out of the source's memory, ``load`` what vLLM did with it."""
        return cast(Any, self).weight_transfer_engine.seconds

    def weights_in_place(self) -> list[str]:
        """Parameters that the next sync writes where they lie; none before the first one."""
        return cast(Any, self).weight_transfer_engine.in_place


WeightTransferEngineFactory.register_engine("vps", WeightReader)
