"""How one of an engine's workers takes over weights: which parameters are written in place, which are loaded anew."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import nn

from rlinf.vps.layout import DTYPES, Buffer, ExplicitLayout, Pieces, RankLayout, dense
from rlinf.vps.pull import Pull, Sources
from rlinf.vps.space import Kind
from rlinf.vps.trace import Traced, view_of
from rlinf.vps.verify import Check, Published

ALIGNED = 64  # bytes


@dataclass(frozen=True)
class Group:
    """Tensors that complete a layer together.

    Attributes:
        layer: name of the layer.
        tensors: indices into the space.
    """

    layer: str
    tensors: tuple[int, ...]


class Way:
    """How one worker takes over what one source publishes.

    Attributes:
        in_place: parameters that are written where they lie; at first none.
        reloaded: the layers that are loaded anew; at first all.
        groups: what is loaded into them, in this order.
    """

    def __init__(self, model: nn.Module, traced: Traced, source: ExplicitLayout) -> None:
        """Plan.

        Args:
            model: the worker's part of the model, at work.
            traced: what its loader does.
            source: of all source ranks.

        Raises:
            LayoutError: the source lacks something.
        """
        self._model = model
        self._traced = traced
        self._source = source
        self._names = [buffer.name for buffer in traced.layout.buffers]
        self._owners = _owners(model)
        self._dtypes = [getattr(torch, DTYPES[code]) for code in source.dtypes(Kind.PARAMETER)]
        self._all = Pull(source, traced.layout)  # finds out here and now what does not fit
        self.in_place: frozenset[str] = frozenset()
        self._seen = False
        self._staging = torch.empty(0, dtype=torch.uint8)
        self._last: Group | None = None
        self._split()

    def _split(self) -> None:
        pieces = self._traced.layout.pieces
        written = np.array([name in self.in_place for name in self._names], bool)[pieces.buffer]
        self._written = Pull(self._source, RankLayout(pieces.take(written), self._traced.layout.buffers))
        rest = pieces.take(~written)
        self._as_tensors = _as_tensors(rest, self._source)
        self._staged = Pull(self._source, self._as_tensors)
        self.groups = _groups(rest, self._names)
        self.reloaded = self._model
        if self.in_place:
            kept = {id(layer) for name in self.in_place for layer in self._owners[name]}
            self.reloaded = _Layers([layer for layer in self._model.modules() if id(layer) not in kept])

    def write(self, sources: Sources) -> None:
        """Write the parameters that lie in memory as the loader fills them."""
        targets = {i: _flat(self._parameter(name)) for i, name in enumerate(self._names) if name in self.in_place}
        for tensor in self._written.tensors:
            self._written.run(sources, targets, tensor)

    def stage(self, group: Group, sources: Sources) -> list[tuple[str, torch.Tensor]]:
        """A group's tensors, right in all that this worker's loader reads of them. They last until the next group."""
        if self._last is not None and _waits(self._model.get_submodule(self._last.layer)):
            self._staging = torch.empty(0, dtype=torch.uint8)  # its layer is not complete: vLLM holds on to them
        self._last = group
        tensors = {t: self._source.space.tensors[t] for t in group.tensors}
        found = {t: self._staged.whole(sources, t, tensor.shape) for t, tensor in tensors.items()}
        sizes = {t: tensors[t].numel * self._dtypes[t].itemsize for t, values in found.items() if values is None}
        room = sum(-(-size // ALIGNED) * ALIGNED for size in sizes.values())
        if room > len(self._staging):
            self._staging = torch.empty(room, dtype=torch.uint8)
        used = 0
        for t, size in sizes.items():
            flat = self._staging[used : used + size].view(self._dtypes[t])
            self._staged.run(sources, {t: flat}, t)
            found[t] = flat.view(tensors[t].shape)
            used += -(-size // ALIGNED) * ALIGNED
        return [(tensors[t].name, values) for t, values in found.items() if values is not None]

    def finish(self, sources: Sources) -> None:
        """After the reload: renew what layers compute from parameters that were not loaded into them.

        After the first one, also see which parameters need no reload from now on.
        """
        shared = {name for name, owners in self._owners.items() if len(owners) > 1}
        for name in sorted(self.in_place if self._seen else shared):
            for layer in self._owners[name]:
                _process(layer)
        if not self._seen:
            self._seen = True
            self.in_place = self._as_loaded(sources)
            self._split()

    def wrong_in_stage(self, group: Group, weights: Sequence[tuple[str, torch.Tensor]], sources: Sources) -> list[str]:
        """Which of the tensors that `stage` gave are not what was published, in what this worker's loader reads."""
        index = self._source.space.index
        targets = {index[name]: values.reshape(-1) for name, values in weights}
        return Check(self._published, self._as_tensors).wrong(sources, targets, group.tensors)

    def wrong_in_place(self, sources: Sources) -> list[str]:
        """Which parameters that are written in place, and which tied ones, do not hold what was published."""
        targets = {i: _flat(self._parameter(name)) for i, name in enumerate(self._names) if name in self.in_place}
        found = Check(self._published, self._traced.layout).wrong(sources, targets)
        for name, first in self._traced.aliases.items():
            one, other = self._parameter(name), self._parameter(first)
            if one.shape == other.shape and one.data_ptr() != other.data_ptr() and not torch.equal(one, other):
                found.append(f"{name} is tied to {first}, and holds other values")
        return found

    @cached_property
    def _published(self) -> Published:
        return Published(self._source)

    def _as_loaded(self, sources: Sources) -> frozenset[str]:
        """Parameters that hold what the layout says, and keep it when their layer is processed once more.

        A layer is taken whole or not at all, for it is reloaded whole.
        """
        right = {name for i, name in enumerate(self._names) if self._holds(i, sources)}
        layers = {id(layer): layer for name in right for layer in self._owners[name]}
        for layer in layers.values():
            before = {name: p.data_ptr() for name, p in layer.named_parameters(recurse=False)}
            _process(layer)
            if before != {name: p.data_ptr() for name, p in layer.named_parameters(recurse=False)}:
                right -= {name for name in right if layer in self._owners[name]}
        right = {name for name in right if self._holds(self._names.index(name), sources)}
        incomplete = {id(layer) for name in self._names if name not in right for layer in self._owners.get(name, ())}
        return frozenset(name for name in right if not any(id(layer) in incomplete for layer in self._owners[name]))

    def _holds(self, buffer: int, sources: Sources) -> bool:
        parameter = self._parameter(self._names[buffer])
        declared = self._traced.layout.buffers[buffer]
        seen = (view_of(parameter), len(_flat(parameter)), str(parameter.dtype).removeprefix("torch."))
        if seen != (self._traced.views[buffer], declared.numel, declared.dtype):
            return False
        now = _flat(parameter)
        expected = now.clone()
        pieces = self._traced.layout.pieces
        for tensor in np.unique(pieces.tensor[pieces.buffer == buffer]).tolist():
            self._all.run(sources, {buffer: expected}, tensor)
        return torch.equal(now, expected)

    def _parameter(self, name: str) -> torch.Tensor:
        return self._model.get_parameter(name).data


class _Layers(nn.Module):
    """Some layers of a model, where vLLM asks a model for all of its own."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self._chosen = tuple(layers)  # in a tuple, and so not registered

    def modules(self, remove_duplicate: bool = True) -> Iterator[nn.Module]:
        return iter(self._chosen)


def _as_tensors(pieces: Pieces, source: ExplicitLayout) -> RankLayout:
    """The same boxes, each in its place in a buffer that holds its whole tensor."""
    tensors = source.space.tensors
    buffers = tuple(
        Buffer(tensor.name, tensor.numel, DTYPES[code] if code >= 0 else tensor.dtype)
        for tensor, code in zip(tensors, source.dtypes(Kind.PARAMETER), strict=True)
    )
    rows = []
    for tensor, start, size in zip(pieces.tensor.tolist(), pieces.start.tolist(), pieces.size.tolist(), strict=True):
        stride = dense(source.space.shape(tensor))
        offset = sum(i * s for i, s in zip(start, stride, strict=True))
        rows.append((tensor, int(Kind.PARAMETER), start, size, tensor, offset, stride))
    return RankLayout(Pieces.of(rows, source.space.ndim), buffers)


def _groups(pieces: Pieces, names: Sequence[str]) -> list[Group]:
    """Tensors by the layer that they go to, in the order of the layers."""
    layers: dict[str, dict[int, None]] = {}
    placed: set[int] = set()
    for buffer, tensor in sorted(zip(pieces.buffer.tolist(), pieces.tensor.tolist(), strict=True)):
        if tensor not in placed:
            layers.setdefault(names[buffer].rpartition(".")[0], {})[tensor] = None
            placed.add(tensor)
    return [Group(layer, tuple(tensors)) for layer, tensors in layers.items()]


def _owners(model: nn.Module) -> Mapping[str, list[nn.Module]]:
    """The layers that have a parameter, by its first name; tied ones have several."""
    first: dict[int, str] = {}
    found: dict[str, list[nn.Module]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = model.get_submodule(name.rpartition(".")[0])
        found.setdefault(first.setdefault(id(parameter), name), []).append(owner)
    return {name: list({id(layer): layer for layer in layers}.values()) for name, layers in found.items()}


def _process(layer: nn.Module) -> None:
    """What vLLM does with a layer after it was loaded (on CPU: pack a copy for its kernels)."""
    if (method := getattr(layer, "quant_method", None)) is not None:
        method.process_weights_after_loading(layer)


def forget_packed_experts(model: nn.Module) -> None:
    """Have vLLM pack experts again when they are reloaded.

    On CPU it packs them for their kernel when it makes the kernel. To a kernel that is there it gives them unpacked,
    what comes out is wrong, and nothing is said.
    """
    from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, FusedMoEMethodBase):
            method.moe_kernel = None


def _waits(layer: nn.Module) -> bool:
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    return get_layerwise_info(layer).can_load()


def _flat(parameter: torch.Tensor) -> torch.Tensor:
    count = parameter.untyped_storage().nbytes() // parameter.element_size()
    return parameter.as_strided((count,), (1,), 0)
