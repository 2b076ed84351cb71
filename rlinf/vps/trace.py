"""What an engine's own weight loader does, learned by running it on tensors that are recorded instead of copied.

The loader slices, fuses, replicates and pads by views of the checkpoint's tensors, and ends in copies into views of
its parameters. Both views are known by storage, offset and strides, so each copy is an exact map from logical boxes to
places in a buffer, whatever the model. Nothing is allocated: the checkpoint's tensors are on the meta device, and no
copy is carried out. Where a loader moves elements by more than a view (it concatenates, or makes a tensor contiguous),
that tensor is loaded once more with each element's own flat coordinate as its value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rlinf.vps.affine import Box, View, boxes_of_labels, boxes_of_view
from rlinf.vps.layout import Buffer, Pieces, RankLayout
from rlinf.vps.space import Kind, LayoutError, Space, Tensor

aten = torch.ops.aten
FILLS = frozenset({aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default})
# These move elements and change none. A cast is left out altogether, so that labels stay exact whatever the dtype.
CASTS = frozenset({aten._to_copy.default})
MOVING = CASTS | {
    aten.clone.default,
    aten.cat.default,
    aten.stack.default,
    aten.index_select.default,
    aten.index.Tensor,
    aten._unsafe_view.default,
    aten.repeat.default,
    aten.roll.default,
    aten.copy_.default,
}


@dataclass(frozen=True)
class Traced:
    """What a loader does on one rank.

    Attributes:
        layout: where each element of the space lies in the rank's parameters; one buffer for each parameter.
        views: how each parameter lies in its buffer.
        aliases: another name of a parameter (a head tied to the embedding) -> its name among the buffers.
    """

    layout: RankLayout
    views: tuple[View, ...]
    aliases: Mapping[str, str]


def trace(model: nn.Module, space: Space, aliases: Mapping[str, str] | None = None) -> Traced:
    """Learn where a model's ``load_weights`` puts each element of a space.

    Args:
        model: with its parameters as its loader fills them (not as kernels want them; see `as_loaded`), on any device,
            the meta device too. They are not written to.
        space: names, shapes and dtypes of what is loaded, as in a checkpoint.
        aliases: names of parameters that share another's memory, where the model itself does not show it.

    Raises:
        LayoutError: an element of a parameter is neither loaded nor padding, is written twice, or is computed from
            what is loaded; a buffer is filled with what is loaded. It names the parameter or buffer.
    """
    every = dict(model.named_parameters(remove_duplicate=False))
    tied = dict(aliases or {}) or tied_names(model)
    parameters = {name: p for name, p in every.items() if name not in tied}
    record = _Record(parameters, dict(model.named_buffers()), space)
    meta = [torch.empty(t.shape, dtype=getattr(torch, t.dtype), device="meta") for t in space.tensors]
    record.run(model, dict(enumerate(meta)))
    for tensor in sorted(record.again):
        record.pieces = [piece for piece in record.pieces if piece[0] != tensor]
        labels = torch.arange(space.tensors[tensor].numel).reshape(space.tensors[tensor].shape)
        record.run(model, {tensor: labels})
    record.check_cover()
    buffers = tuple(
        Buffer(name, _elements(p), str(p.dtype).removeprefix("torch."), str(p.device)) for name, p in parameters.items()
    )
    rows = [
        (t, int(Kind.PARAMETER), start, size, b, offset, stride)
        for t, b, (start, size, offset, stride) in record.pieces
    ]
    return Traced(RankLayout(Pieces.of(rows, space.ndim), buffers), tuple(record.views), tied)


def tied_names(model: nn.Module) -> dict[str, str]:
    """Further names of a parameter -> its first name."""
    first: dict[int, str] = {}
    tied = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            tied[name] = first[id(parameter)]
    return tied


class _Record(TorchDispatchMode):
    """Notes copies from sources to parameters, and stands in for them."""

    def __init__(
        self, parameters: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor], space: Space
    ) -> None:
        super().__init__()
        self._buffers = {_storage(buffer): name for name, buffer in buffers.items()}
        self.names = list(parameters)
        self.targets = {_storage(p): i for i, p in enumerate(parameters.values())}
        self.sizes = [_elements(p) for p in parameters.values()]
        self.views = [view_of(p) for p in parameters.values()]
        # Some parameters are wider than what is loaded into them, for the sake of a kernel, and say by how much.
        self.loaded = [getattr(p, "weight_loader_numel", None) for p in parameters.values()]
        self.space = space
        self.pieces: list[tuple[int, int, Box]] = []  # (tensor, parameter, where)
        self.padding: list[tuple[int, View]] = []
        self.again: set[int] = set()  # tensors whose elements went through more than views
        self._sources: dict[int, int] = {}
        self._kept: list[torch.Tensor] = []  # a storage's address must not be used again while it is known

    def run(self, model: nn.Module, sources: Mapping[int, torch.Tensor]) -> None:
        """Load tensors of the space; those with values are labels."""
        self._kept = list(sources.values())
        self._sources = {_storage(tensor): number for number, tensor in sources.items()}
        weights = [(self.space.tensors[number].name, tensor) for number, tensor in sources.items()]
        with torch.no_grad(), self:
            model.load_weights(iter(weights))  # type: ignore[operator]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [x for x in _flat(args) if isinstance(x, torch.Tensor)]
        target = self.targets.get(_storage(tensors[0])) if tensors else None
        if target is not None and func in FILLS:
            self.padding.append((target, view_of(tensors[0])))
            return args[0]
        from_sources = sorted({self._sources[s] for x in tensors if (s := _storage(x)) in self._sources})
        if target is not None and func is aten.copy_.default and from_sources:
            self._note(target, args[0], args[1], from_sources[0])
            return args[0]
        if target is not None and func._schema.is_mutable:
            raise LayoutError(
                f"the loader changes {self.names[target]} by {func}, which is neither a copy of what is loaded nor a "
                "fill: its layout cannot be told from its loader"
            )
        buffer = self._buffers.get(_storage(tensors[0])) if tensors else None
        if buffer is not None and from_sources and func._schema.is_mutable:
            raise LayoutError(
                f"the loader fills {buffer}, a buffer of the engine's model, with "
                f"{self.space.tensors[from_sources[0]].name}: only parameters take part in a weight sync, and this "
                "would keep its old values"
            )
        if from_sources and func in CASTS and not tensors[0].is_meta:
            return tensors[0]
        out = func(*args, **(kwargs or {}))
        if from_sources:
            self._follow(func, out, from_sources)
        return out

    def _follow(self, func: Any, out: Any, sources: list[int]) -> None:
        """What was made of a source, in a storage of its own, stands for the source from now on."""
        for made in _flat(out):
            if not isinstance(made, torch.Tensor) or _storage(made) in self._sources:
                continue
            if func not in MOVING or len(sources) > 1:
                names = ", ".join(self.space.tensors[number].name for number in sources)
                raise LayoutError(f"the loader computes {func} of {names}: where its elements go cannot be told")
            self._sources[_storage(made)] = sources[0]
            self._kept.append(made)
            if made.is_meta:
                self.again.add(sources[0])

    def _note(self, target: int, into: torch.Tensor, source: torch.Tensor, number: int) -> None:
        shape, put = self.space.tensors[number].shape, view_of(into)
        if source.is_meta:
            read = view_of(source).broadcast(put.size)
            self.pieces += ((number, target, box) for box in boxes_of_view(shape, read, put))
        else:
            labels = source.expand(put.size).numpy()
            self.pieces += ((number, target, box) for box in boxes_of_labels(shape, labels, put))

    def check_cover(self) -> None:
        """Each element of each parameter has one source, or is padding."""
        written: list[list[View]] = [[] for _ in self.names]
        for _, target, (_, size, offset, stride) in self.pieces:
            written[target].append(View(tuple(size), tuple(stride), offset))
        for target, view in self.padding:
            written[target].append(view)
        for target, views in enumerate(written):
            self._check_one(target, views)

    def _check_one(self, target: int, views: Sequence[View]) -> None:
        times = np.zeros(self.sizes[target], np.int8)
        for view in views:
            _strided(times, view)[...] += 1
        own = _strided(times, self.views[target])
        if self.loaded[target] == int((own > 0).sum()):
            own = np.maximum(own, 1)
        for wrong, what in ((own < 1, "neither loaded nor padding"), (own > 1, "written more than once")):
            if wrong.any():
                at = [int(i) for i in np.argwhere(wrong)[0]]
                raise LayoutError(
                    f"{self.names[target]}: {int(wrong.sum())} of {own.size} elements are {what} by the engine's "
                    f"loader, the first at {at}; what is sent must be all that the engine's checkpoint has"
                )


def _flat(values: Any) -> Iterator[Any]:
    for value in values if isinstance(values, (tuple, list)) else (values,):
        if isinstance(value, (tuple, list)):
            yield from _flat(value)
        else:
            yield value


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _elements(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def view_of(tensor: torch.Tensor) -> View:
    """How a tensor lies in its storage."""
    return View(tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))


def _strided(flat: np.ndarray, view: View) -> np.ndarray:
    strides = tuple(s * flat.itemsize for s in view.stride)
    return np.lib.stride_tricks.as_strided(flat[view.offset :], view.size, strides)


def space_of(shapes: Mapping[str, tuple[int, ...]], dtype: str) -> Space:
    """The space of a checkpoint whose tensors are of one dtype."""
    return Space(tuple(Tensor(name, tuple(shape), dtype) for name, shape in shapes.items()))


@contextmanager
def as_loaded(model: nn.Module) -> Iterator[Mapping[str, str]]:
    """While it lasts, a model that serves has its parameters as its loader fills them, on the meta device.

    Gives the names of tied parameters, for within they are apart. What kernels work with comes back at the end.
    """
    from vllm.model_executor.model_loader.reload.layerwise import (
        _get_original_loader,
        _place_kernel_tensors,
        get_layerwise_info,
    )
    from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta
    from vllm.model_executor.model_loader.reload.utils import get_layer_params_buffers, get_layer_tensors

    tied = tied_names(model)
    layers = list(model.modules())
    for layer in layers:
        info = get_layerwise_info(layer)
        info.kernel_tensors = get_layer_params_buffers(layer)
        info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
        restore_layer_on_meta(layer, info)
        for tensor in get_layer_tensors(layer).values():
            if hasattr(tensor, "weight_loader"):  # an earlier reload has left one that waits for a reload
                tensor.weight_loader = _get_original_loader(tensor)
    try:
        yield tied
    finally:
        for layer in layers:
            info = get_layerwise_info(layer)
            _place_kernel_tensors(layer, info)
            info.reset()
