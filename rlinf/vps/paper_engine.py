"""The model of one rank of a vLLM engine, built without the engine, its processes, or memory for its weights.

It is what a plan for an engine of any size is made from before any of its processes is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


@dataclass(frozen=True)
class EngineRank:
    """Which rank of which engine.

    Attributes:
        tp, tp_rank: tensor parallelism.
        pp, pp_rank: pipeline parallelism.
        expert_parallel: whole experts on each of the ``tp`` ranks, instead of a part of every expert.
    """

    tp: int = 1
    tp_rank: int = 0
    pp: int = 1
    pp_rank: int = 0
    expert_parallel: bool = False


@contextmanager
def engine_rank(model_dir: Path, rank: EngineRank, dtype: str = "float32", *, meta: bool = True) -> Iterator[nn.Module]:
    """The model of a rank, its parameters as its loader fills them. It cannot compute.

    Args:
        model_dir: a Hugging Face model directory; its weights are not read.
        rank: within its engine.
        dtype: of the engine's weights.
        meta: parameters on the meta device; else in memory, to be loaded.

    While it lasts, vLLM's parallel groups in this process are those of the rank: no engine may compute here meanwhile.
    """
    import vllm.distributed.parallel_state as state
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    groups = {"_WORLD": (rank.tp * rank.pp, rank.pp_rank * rank.tp + rank.tp_rank), "_PP": (rank.pp, rank.pp_rank)}
    groups |= dict.fromkeys(("_TP", "_EP"), (rank.tp, rank.tp_rank))
    groups |= dict.fromkeys(("_DP", "_PCP", "_DCP", "_ETP", "_EPLB"), (1, 0))
    args: dict[str, Any] = {"dtype": dtype, "skip_tokenizer_init": True, "enforce_eager": True}
    config = EngineArgs(model=str(model_dir), **args).create_engine_config()
    config.parallel_config.tensor_parallel_size = rank.tp
    config.parallel_config.pipeline_parallel_size = rank.pp
    config.parallel_config.enable_expert_parallel = rank.expert_parallel
    before = {name: getattr(state, name, None) for name in groups}
    try:
        for name, (size, place) in groups.items():
            setattr(state, name, _group(name, size, place))
        with set_current_vllm_config(config):
            with _EmptyOnMeta(meta), set_default_torch_dtype(getattr(torch, dtype)):
                model = initialize_model(config)
            yield model
    finally:
        for name, group in before.items():
            setattr(state, name, group)


class _Placeless:
    """Stands for a process group of which only size and rank are asked."""

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


def _group(name: str, size: int, rank: int) -> Any:
    from vllm.distributed.parallel_state import GroupCoordinator

    group = object.__new__(GroupCoordinator)
    group.__dict__.update(
        unique_name=name,
        rank=rank,
        local_rank=rank,
        ranks=list(range(size)),
        world_size=size,
        rank_in_group=rank,
        device=torch.device("cpu"),
        device_group=_Placeless(size, rank),
        cpu_group=_Placeless(size, rank),
        device_communicator=None,
        mq_broadcaster=None,
        use_device_communicator=False,
    )
    return group


class _EmptyOnMeta(TorchFunctionMode):
    """Parameters are made by ``torch.empty`` and take no memory; tables that layers compute (expert maps) are real."""

    def __init__(self, active: bool) -> None:
        super().__init__()
        self._active = active

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if self._active and func in (torch.empty, torch.zeros, torch.ones) and given.get("device") is None:
            given["device"] = "meta"
        return func(*args, **given)
