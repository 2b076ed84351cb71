"""The global norm of gradients that live on different meshes.

A parameter is a plain tensor (whole on this rank), or a DTensor over "dp", over "tp", or over both. Each logical
element must be counted once: squares of local elements are summed over the mesh dimensions that shard the parameter,
and over no other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def settle_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Bring every gradient to the placements of its parameter, in place. A collective.

    A replicated parameter that was used on sharded activations is left with a partial sum on each rank.
    """
    for parameter in parameters:
        grad = parameter.grad
        if isinstance(parameter, DTensor) and isinstance(grad, DTensor) and grad.placements != parameter.placements:
            parameter.grad = grad.redistribute(placements=parameter.placements)


@torch.no_grad()
def global_grad_norm(parameters: Iterable[torch.nn.Parameter]) -> float:
    """The 2-norm over all logical elements of all gradients; the same number on every rank. A collective.

    Raises:
        ValueError: a gradient is a partial sum; call `settle_gradients` first.
    """
    groups: dict[tuple[Any, tuple[int, ...]], list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            key, local = _local(parameter.grad)
            groups.setdefault(key, []).append(local)
    total = 0.0
    for (mesh, dims), tensors in groups.items():  # parameters come in one order on all ranks, and so do the groups
        norms = [torch.linalg.vector_norm(tensor, dtype=torch.float32) for tensor in tensors if tensor.numel()]
        squares = torch.zeros((), dtype=torch.float64, device=tensors[0].device)
        if norms:
            squares = torch.stack(norms).double().square().sum()
        for dim in dims:
            dist.all_reduce(squares, group=mesh.get_group(dim))
        total += squares.item()
    return math.sqrt(total) if total >= 0 else math.nan


@torch.no_grad()
def clip_gradients(parameters: Iterable[torch.nn.Parameter], scale: float, max_norm: float) -> float:
    """Multiply all gradients by ``scale``, then clip them to a global norm. A collective.

    Args:
        parameters: gradients may be missing.
        scale: what turns accumulated sums into means.
        max_norm: 0: no clipping.

    Returns:
        The norm after scaling and before clipping. Where it is not finite the gradients are left as they are.
    """
    kept = [parameter for parameter in parameters if parameter.grad is not None]
    settle_gradients(kept)
    norm = global_grad_norm(kept) * abs(scale)
    if not math.isfinite(norm):
        return norm
    factor = scale * min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else scale
    pieces = [_local(parameter.grad)[1] for parameter in kept if parameter.grad is not None]
    if factor != 1.0 and pieces:
        torch._foreach_mul_(pieces, factor)
    return norm


def _local(grad: torch.Tensor) -> tuple[tuple[Any, tuple[int, ...]], torch.Tensor]:
    """((mesh, its dimensions that shard the gradient), this rank's elements)."""
    if not isinstance(grad, DTensor):
        return (None, ()), grad
    if any(placement.is_partial() for placement in grad.placements):
        raise ValueError(f"a gradient with placements {grad.placements} is a partial sum; settle_gradients first")
    sharded = tuple(dim for dim, placement in enumerate(grad.placements) if not placement.is_replicate())
    return (grad.device_mesh, sharded), grad._local_tensor
