"""The half of `rlinf.generation.weight_transfer` that lives in vLLM's workers; it needs vLLM to be imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from rlinf.errors import ModelError
from rlinf.generation.engine import Chunk
from rlinf.generation.weight_transfer import BACKEND


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing to agree on: sender and receiver are on one host."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One chunk: the tensors themselves (same process), or the safetensors file that holds them."""

    chunk: Chunk | None = None
    path: str | None = None


class WeightReceiver(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads checkpoint-format chunks into a worker's shard of the model."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        every = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        tied = every - {name for name, _ in self.model.named_parameters()}
        with torch.device(self.device):
            initialize_layerwise_reload(self.model)
        self._expected = {name for name, _ in self.model.named_parameters()} - tied
        self._loaded: set[str] = set()

    def update_weights(self, update_info: dict) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":  # the base class asks torch.accelerator, of which a CPU has none
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        if update_info.chunk is not None:
            # The loader keeps tensors until their layer is complete, the sender only until the next chunk.
            tensors = [(name, tensor.detach().clone()) for name, tensor in update_info.chunk]
        else:
            from safetensors.torch import load_file

            tensors = list(load_file(str(update_info.path)).items())
        with torch.device(self.device):
            self._loaded |= cast(Any, self.model).load_weights(iter(tensors)) or set()

    def finish_weight_update(self) -> None:
        """Repack what is left and put the layers back to work.

        Raises:
            ModelError: a parameter of the engine got nothing.
        """
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        stale = sorted(self._expected - self._loaded)
        if stale:
            raise ModelError(
                f"weight sync left {len(stale)} of the engine's {len(self._expected)} parameters as they were, "
                f"among them {', '.join(stale[:5])}; the sender's model must be the engine's"
            )
        with torch.device(self.device):
            finalize_layerwise_reload(self.model, self.model_config)
            _repack_tied(self.model)

    def shutdown(self) -> None:
        """Nothing to release."""


def _repack_tied(model: torch.nn.Module) -> None:
    """Repack layers that share a parameter.

    A head tied to the embedding is delivered under the embedding's name, so that the reload never touches it; but on
    CPU it computes with a packed copy of its own, which would stay the old one.
    """
    owners: dict[int, list[torch.nn.Module]] = {}
    for layer in model.modules():
        for parameter in layer.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(layer)
    for layers in owners.values():
        for layer in layers if len(layers) > 1 else ():
            if (method := getattr(layer, "quant_method", None)) is not None:
                cast(Any, method).process_weights_after_loading(layer)


class WorkerExtension:
    """vLLM mixes this into its workers, and so imports this module in each of its processes."""


WeightTransferEngineFactory.register_engine(BACKEND, WeightReceiver)
