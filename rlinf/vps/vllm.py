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

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from rlinf.errors import RlinfError
from rlinf.host import this_host
from rlinf.swap import Swap, drop, store_for
from rlinf.vps.brief import Brief, Heard
from rlinf.vps.layout import ExplicitLayout
from rlinf.vps.memory import Handle, Memory
from rlinf.vps.publication import Publication
from rlinf.vps.reload import Way, forget_packed_experts
from rlinf.vps.trace import as_loaded, trace

logger = logging.getLogger(__name__)


@dataclass
class InitInfo(WeightTransferInitInfo):
    """The layout of all source ranks. Nothing is changed when it does not fit."""

    source: ExplicitLayout


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Nothing: what is read was attached before anything was changed."""


class WeightReader(WeightTransferEngine[InitInfo, UpdateInfo]):
    """See the module."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._heard = Heard()

    def hear(self, publications: Sequence[Publication | Brief]) -> list[Publication]:
        """The publications of all source ranks, of which only what is new was told."""
        return [self._heard.whole(f"source rank {rank}", item) for rank, item in enumerate(publications)]

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Trace and plan for a source.

        Raises:
            LayoutError: the source's model is not the engine's; names the parameter or tensor.
        """
        with as_loaded(self.model) as tied:
            traced = trace(self.model, init_info.source.space, tied)
        self._way = Way(self.model, traced, init_info.source)
        self._memories: dict[Handle, Memory] = {}

    def attach(self, publications: Sequence[Publication]) -> None:
        """Map what all source ranks published, in the order of their layout. From now on their end does no harm.

        Raises:
            LayoutError: a source rank has ended, or what it published is not what it holds.
        """
        handles = [p.handle for p in publications if p.handle.host == this_host()]
        self._memories = {handle: self._memories.get(handle) or Memory.attach(handle) for handle in handles}
        self._sources = [p.buffers(self._memories.get(p.handle)) for p in publications]
        for rank, publication in enumerate(publications):
            publication.verify(rank, self._sources[rank])
        self._verifies = any(publication.digests for publication in publications)

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self.seconds = {"copy": 0.0, "load": 0.0}
        self.wrong: list[str] = []
        if self.device.type == "cpu":
            forget_packed_experts(self._way.reloaded)
        with torch.device(self.device):
            initialize_layerwise_reload(self._way.reloaded)

    def update_weights(self, update_info: dict) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":  # the base class asks torch.accelerator, of which a CPU has none
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        with self._timed("copy"):
            self._way.write(self._sources)
        for group in self._way.groups:
            with self._timed("copy"):
                weights = self._way.stage(group, self._sources)
            if self._verifies:
                self.wrong += self._way.wrong_in_stage(group, weights, self._sources)
            with self._timed("load"), torch.device(self.device):
                cast(Any, self.model).load_weights(iter(weights))

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
        if self._verifies:
            self.wrong += self._way.wrong_in_place(self._sources)
        self._sources = []

    @property
    def in_place(self) -> list[str]:
        """See `Way`."""
        return sorted(self._way.in_place)

    def shutdown(self) -> None:
        """Nothing to release."""


class WorkerExtension:
    """vLLM mixes this into its workers, and so imports this module in each of its processes."""

    def prepare_weights(self, source: ExplicitLayout | None, publications: Sequence[Publication | Brief]) -> str:
        """What comes before a sync, and changes no weights.

        Args:
            source: to be planned for; ``None``: it is that of the last time.
            publications: of all source ranks.

        Returns:
            Why there can be no sync; else nothing. An exception would not do: vLLM raises that of one worker, and takes
            what the others answered for their answers to the next call.
        """
        reader = cast(Any, self).weight_transfer_engine
        try:
            whole = reader.hear(publications)  # first: what was told once must stay known whatever fails
            if source is not None:
                reader.init_transfer_engine(InitInfo(source))
            reader.attach(whole)
        except RlinfError as error:
            return str(error)
        except Exception as error:
            logger.exception("this worker cannot prepare a weight sync")
            return repr(error)
        return ""

    def leave(self, folder: Path | None) -> None:
        """Free the memory of weights (they go to a file) and of the KV cache (nothing is kept of it), on a CPU.

        What kernels have packed for themselves stays.
        """
        runner = cast(Any, self).model_runner
        if not hasattr(self, "_swap"):
            self._swap = Swap(lambda: [*runner.model.parameters(), *runner.model.buffers()], store_for("cpu", folder))
        self._swap.off()
        drop(runner.kv_caches)

    def come_back(self) -> None:
        """Undo `leave`."""
        self._swap.on()

    def weight_sync_seconds(self) -> dict[str, float]:
        """Of the last sync: ``copy`` what was copied out of the source's memory, ``load`` what vLLM did with it."""
        return cast(Any, self).weight_transfer_engine.seconds

    def weights_in_place(self) -> list[str]:
        """Parameters that the next sync writes where they lie; none before the first one."""
        return cast(Any, self).weight_transfer_engine.in_place

    def wrong_weights(self) -> list[str]:
        """What the last sync took over and is not what was published, where it was asked to verify."""
        return cast(Any, self).weight_transfer_engine.wrong


WeightTransferEngineFactory.register_engine("vps", WeightReader)
