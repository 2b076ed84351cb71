"""Layouts of live modules and optimisers: plain tensors, and DTensors of any mesh and placements.

A DTensor says how it is spread over all ranks, so each rank knows every rank's pieces without an exchange.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard, _StridedShard

from rlinf.vps.layout import Buffer, ExplicitLayout, Pieces, RankLayout, dense
from rlinf.vps.space import Kind, LayoutError, Space, Tensor, few

OPTIMISER_KINDS = {"exp_avg": Kind.EXP_AVG, "exp_avg_sq": Kind.EXP_AVG_SQ, "master": Kind.MASTER}
OPTIMISER_SCALARS = frozenset({"step"})


@dataclass(frozen=True)
class LiveState:
    """Everything that a module and its optimiser hold, each under a kind.

    Attributes:
        tensors: kind -> name -> tensor; a tied tensor once.
        scalars: plain values, and the optimiser's own that every rank has (`OPTIMISER_SCALARS`), by name.
        aliases: other names of tied tensors -> their name in ``tensors``.
        derived: buffers that a checkpoint does not keep, for the module makes them anew.
    """

    tensors: Mapping[Kind, Mapping[str, torch.Tensor]]
    scalars: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    derived: frozenset[str] = frozenset()


def live_state(module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> LiveState:
    """Sort out what is there.

    Raises:
        LayoutError: a state of the optimiser is of no kind that is known, or belongs to no parameter of the module.
    """
    parameters = dict(module.named_parameters())
    name_of = {id(parameter): name for name, parameter in parameters.items()}
    aliases = {
        name: name_of[id(parameter)]
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if name_of[id(parameter)] != name
    }
    kept = set(module.state_dict())
    buffers = dict(module.named_buffers())
    tensors: dict[Kind, dict[str, torch.Tensor]] = {
        Kind.PARAMETER: {name: parameter.detach() for name, parameter in parameters.items()},
        Kind.BUFFER: {name: buffer for name, buffer in buffers.items() if name in kept},
    }
    scalars: dict[str, Any] = {}
    strange = []
    for parameter, state in (optimizer.state if optimizer else {}).items():
        name = name_of.get(id(parameter))
        if name is None:
            raise LayoutError(f"the optimiser holds state of a tensor of {tuple(parameter.shape)} that is no parameter")
        for key, value in state.items():
            if key in OPTIMISER_KINDS and isinstance(value, torch.Tensor):
                tensors.setdefault(OPTIMISER_KINDS[key], {})[name] = value
            elif not isinstance(value, torch.Tensor) or (key in OPTIMISER_SCALARS and value.numel() == 1):
                scalars[f"{name}.{key}"] = value
            else:
                strange.append(f"{key} of {name}")
    if strange:
        raise LayoutError(
            f"state that nobody classified: {few(strange)}; add its kind to rlinf.vps.dtensor.OPTIMISER_KINDS, so that "
            "it is moved with its parameter"
        )
    return LiveState({k: t for k, t in tensors.items() if t}, scalars, aliases, frozenset(set(buffers) - kept))


def layout_of(
    state: LiveState,
    *,
    mesh: DeviceMesh | None = None,
    ranks: Sequence[int] = (0,),
    world: int = 0,
    hosts: Sequence[int] | None = None,
) -> ExplicitLayout:
    """The layout of a state over all ranks that hold it; the same on each of them.

    Args:
        mesh: of all ranks, with named dimensions; a tensor on some of its dimensions is repeated over the others.
        ranks: process ``ranks[r]`` of the world is rank ``r`` of the state's process group.
        world: number of processes; 0: just those.
        hosts: index of the host of each process; all on one if not given.

    Raises:
        LayoutError: a tensor is a partial sum, or its mesh has ranks that are not among ``ranks``; a state has another
            shape than its parameter, or a kind has several dtypes; ``world`` or ``hosts`` do not fit ``ranks``.
    """
    tensors: dict[str, Tensor] = {}
    for kind, name, tensor in ordered(state):  # parameters come first, and say shape and dtype
        known = tensors.setdefault(name, Tensor(name, tuple(tensor.shape), dtype_name(tensor)))
        if known.shape != tuple(tensor.shape):
            raise LayoutError(f"{name} ({kind.name.lower()}) has shape {tuple(tensor.shape)}, its tensor {known.shape}")
    kinds = {kind: _kind_dtype(kind, state.tensors[kind], tensors) for kind in sorted(state.tensors)}
    space = Space(tuple(tensors.values()), kinds, dict(state.aliases), state.derived)
    world = world or max(ranks) + 1
    if min(ranks) < 0 or max(ranks) >= world or len(set(ranks)) < len(ranks):
        raise LayoutError(f"ranks {list(ranks)} are not so many different processes of a world of {world}")
    if hosts is not None and len(hosts) != world:
        raise LayoutError(f"hosts are given for {len(hosts)} processes of {world}")
    rows: list[list[Any]] = [[] for _ in range(world)]
    buffers: list[list[Buffer]] = [[] for _ in range(world)]
    for kind, name, tensor in ordered(state):
        for member, (start, size) in boxes_of(tensor, len(ranks), mesh).items():
            if member >= len(ranks):
                raise LayoutError(f"{name} is on rank {member} of its mesh, and there are {len(ranks)} ranks")
            rank = ranks[member]
            at = len(buffers[rank])
            numel = int(np.prod(size, dtype=np.int64))
            buffers[rank].append(Buffer(f"{name} ({kind.name.lower()})", numel, dtype_name(tensor), tensor.device.type))
            rows[rank].append((space.index[name], int(kind), start, size, at, 0, dense(size)))
    held = (RankLayout(Pieces.of(mine, space.ndim), tuple(own)) for mine, own in zip(rows, buffers, strict=True))
    return ExplicitLayout(space, tuple(held), tuple(hosts or (0,) * world))


def _kind_dtype(kind: Kind, held: Mapping[str, torch.Tensor], tensors: Mapping[str, Tensor]) -> str:
    """Of all states of a kind; ``""`` where each has that of its tensor."""
    odd = [name for name in sorted(held) if dtype_name(held[name]) != tensors[name].dtype]
    dtypes = {dtype_name(tensor): name for name, tensor in held.items()}
    if odd and len(dtypes) > 1:
        told = few(f"{dtype} ({name})" for dtype, name in sorted(dtypes.items()))
        raise LayoutError(f"{kind.name.lower()} is held in several dtypes, not those of the parameters: {told}")
    return next(iter(dtypes)) if odd else ""


def buffers_of(state: LiveState) -> list[torch.Tensor]:
    """This rank's local tensors, flat, in the order of the buffers of its `layout_of`.

    Raises:
        LayoutError: a local tensor does not lie in rows, so that it cannot be seen flat.
    """
    found = []
    for kind, name, tensor in ordered(state):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if not local.is_contiguous():
            raise LayoutError(f"the local part of {name} ({kind.name.lower()}) has strides {local.stride()}, not rows")
        found.append(local.detach().view(-1))
    return found


def ordered(state: LiveState) -> list[tuple[Kind, str, torch.Tensor]]:
    """By kind, then by name: the order of buffers on every rank."""
    return [
        (kind, name, state.tensors[kind][name])
        for kind in sorted(state.tensors)
        for name in sorted(state.tensors[kind])
    ]


def dtype_name(tensor: torch.Tensor) -> str:
    """``float32``."""
    return str(tensor.dtype).removeprefix("torch.")


def boxes_of(
    tensor: torch.Tensor, world: int, mesh: DeviceMesh | None = None
) -> dict[int, tuple[tuple[int, ...], tuple[int, ...]]]:
    """rank of the process group -> (start, size) of what it holds; empty shards too.

    A plain tensor is whole on all ranks.

    Raises:
        LayoutError: a placement is a partial sum, or of a kind that is not known; the tensor's mesh is not a part of
            ``mesh``, or is a part of the ranks and no ``mesh`` tells of the others.
    """
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return dict.fromkeys(range(world), ((0,) * len(shape), shape))
    own = tensor.device_mesh
    cuts = [_order(tensor.placements, own.mesh.shape, dim) for dim in range(len(shape))]
    whole, levels = _within(own, mesh, world)
    found = {}
    for coordinate in product(*(range(n) for n in whole.shape)):
        start, size = [0] * len(shape), list(shape)
        for dim, order in enumerate(cuts):
            for level in order:
                each = -(-size[dim] // own.mesh.shape[level])
                low = min(size[dim], each * coordinate[levels[level]])
                high = min(size[dim], low + each)
                start[dim], size[dim] = start[dim] + low, high - low
        found[int(whole[coordinate])] = tuple(start), tuple(size)
    return found


def _within(own: DeviceMesh, mesh: DeviceMesh | None, world: int) -> tuple[torch.Tensor, list[int]]:
    """(ranks of the whole mesh, its dimension for each of those of a tensor's own mesh)."""
    if own.mesh.numel() == world:
        return own.mesh, list(range(own.mesh.ndim))
    names, every = own.mesh_dim_names or (), (mesh.mesh_dim_names if mesh else None) or ()
    if mesh is None or not names or not set(names) <= set(every):
        raise LayoutError(
            f"a tensor lies on the mesh {names or own.mesh.tolist()} of {own.mesh.numel()} of {world} ranks, which is "
            f"no part of the mesh {every or 'that was given (none)'}: give layout_of the mesh of all ranks"
        )
    return mesh.mesh, [every.index(name) for name in names]


def _order(placements: Sequence[Placement], mesh: Sequence[int], dim: int) -> list[int]:
    """Mesh dimensions that cut a tensor dimension, in the order in which they do so.

    From left to right, but a `_StridedShard` comes after as many of those to its right as its split factor says: FSDP
    cuts what tensor parallelism has cut already, though it stands before it in the mesh.
    """
    order: list[int] = []
    for level in reversed(range(len(placements))):
        placement = placements[level]
        if isinstance(placement, _StridedShard):
            if placement.dim != dim:
                continue
            after, factor = 0, 1
            while factor < placement.split_factor and after < len(order):
                factor *= mesh[order[after]]
                after += 1
            if factor != placement.split_factor:
                raise LayoutError(f"{placement} does not fit a mesh of {tuple(mesh)} with placements {placements}")
            order.insert(after, level)
        elif isinstance(placement, Shard):
            if placement.dim == dim:
                order.insert(0, level)
        elif not isinstance(placement, Replicate):
            raise LayoutError(f"placement {placement}: a tensor that is a partial sum has no layout; reduce it first")
    return order
