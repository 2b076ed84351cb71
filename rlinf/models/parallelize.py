"""How a model is spread over the ranks of a ("dp", "tp") mesh, by torch's own means alone.

Tensor parallelism follows the plan that the model's config carries (`base_model_tp_plan`), so no model needs a table
here. Embedding, output layer and norms are replicated over "tp". Data parallelism is FSDP2: one unit for each decoder
layer, and the root. A mesh dimension of size 1 is not wrapped.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch
from torch import nn

from rlinf.errors import ModelError
from rlinf.models.info import ModelInfo

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle


def check_tp(info: ModelInfo, tp: int) -> None:
    """Make sure that a tensor-parallel size leaves every head whole. Needs no model.

    Raises:
        ModelError: names the sizes that work.
    """
    if tp >= 1 and info.heads % tp == 0 and info.kv_heads % tp == 0:
        return
    works = [size for size in range(1, info.kv_heads + 1) if info.heads % size == 0 and info.kv_heads % size == 0]
    raise ModelError(
        f"tp={tp} would split a head: {info.architecture} has {info.heads} query heads and {info.kv_heads} key-value "
        f"heads; set tp to one of {works}"
    )


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh | None,
    compute_dtype: torch.dtype,
    *,
    backbone: nn.Module,
) -> nn.Module:
    """Spread ``model`` over ``mesh``, in place.

    Args:
        model: a `PolicyModel` or `ValueModel`, the same weights on every rank.
        mesh: the ("dp", "tp") mesh; None in a world of one rank, where nothing is wrapped.
        compute_dtype: dtype of FSDP's gathered parameters; the shards keep theirs, and gradients are reduced in
            float32.
        backbone: the transformers base model inside ``model``.

    Raises:
        ModelError: the model's plan is missing, or uses a style that is not known here.
    """
    if mesh is None:
        return model
    if mesh["tp"].size() > 1:
        _tensor_parallel(backbone, mesh["tp"])
    if mesh["dp"].size() > 1:
        _fully_shard(model, backbone, mesh["dp"], compute_dtype)
    return model


def reshard(model: nn.Module) -> None:
    """Free the gathered parameters that FSDP keeps after a forward pass in the hope of a backward pass."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def decoder_layers(backbone: nn.Module) -> list[nn.Module]:
    """The blocks that transformers says are not to be split, outermost first."""
    names = set(getattr(backbone, "_no_split_modules", None) or ())
    return [module for module in backbone.modules() if type(module).__name__ in names]


def _fully_shard(model: nn.Module, backbone: nn.Module, mesh: DeviceMesh, compute_dtype: torch.dtype) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for layer in decoder_layers(backbone):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def _tensor_parallel(backbone: nn.Module, mesh: DeviceMesh) -> None:
    from torch.distributed.tensor.parallel import parallelize_module

    written: dict[str, str] = getattr(backbone.config, "base_model_tp_plan", None) or {}
    if not written:
        raise ModelError(
            f"{type(backbone).__name__} carries no tensor-parallel plan (config.base_model_tp_plan); set tp to 1"
        )
    plan = {}
    matched = set()
    for name, module in backbone.named_modules():
        for pattern, style in written.items():
            if fnmatchcase(name, pattern):
                matched.add(pattern)
                if not isinstance(module, nn.Embedding):  # replicated, with the output layer that may share it
                    plan[name] = _style(style, name)
    if unmatched := sorted(set(written) - matched):
        raise ModelError(f"{type(backbone).__name__} has no module for {unmatched} of its plan; set tp to 1")
    parallelize_module(backbone, mesh, plan)


def _style(style: str, name: str) -> ParallelStyle:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    if style == "colwise":
        return ColwiseParallel()
    if style == "rowwise":
        return RowwiseParallel()
    if style == "replicated_with_grad_allreduce":
        # A norm over one head of activations [batch, sequence, heads, head_dim] that are split over the heads.
        return SequenceParallel(sequence_dim=2, use_local_output=True)
    raise ModelError(
        f"the model's tensor-parallel plan wants {style!r} for {name}, which is not known here; set tp to 1"
    )
