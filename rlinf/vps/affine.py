"""Which logical boxes lie where, from how two tensors were looked at when one was copied into the other. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
from numpy.typing import NDArray

from rlinf.vps.layout import dense

Box = tuple[tuple[int, ...], tuple[int, ...], int, tuple[int, ...]]
"""(start, size, offset, stride): element ``start + i`` of a logical tensor lies at ``offset + sum(i * stride)``."""


@dataclass(frozen=True)
class View:
    """How a tensor lies in its storage, in elements."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def at(self, index: Sequence[int], size: Sequence[int]) -> View:
        """The part that begins at ``index``."""
        shift = sum(i * s for i, s in zip(index, self.stride, strict=True))
        return replace(self, size=tuple(size), offset=self.offset + shift)

    def broadcast(self, size: Sequence[int]) -> View:
        """Seen in another size, as torch broadcasts."""
        lead = len(size) - len(self.size)
        own = ((1,) * lead + self.size, (0,) * lead + self.stride)
        return View(tuple(size), tuple(0 if n == 1 else s for n, s in zip(*own, strict=True)), self.offset)


def boxes_of_view(shape: Sequence[int], source: View, target: View) -> Iterator[Box]:
    """The boxes of a contiguous tensor that a copy moved.

    Args:
        shape: of the whole source.
        source: of the source's storage, what was read.
        target: what was written, of the same size.
    """
    dims = [d for d in zip(source.size, source.stride, target.stride, strict=True) if d[0] != 1]
    if prod(source.size):
        yield from _boxes(tuple(shape), dims, source.offset, target.offset)


def _boxes(shape: tuple[int, ...], dims: list[tuple[int, int, int]], read: int, write: int) -> Iterator[Box]:
    """``dims`` are (size, stride read, stride written); each becomes a dimension of the tensor, or is taken apart."""
    strides = dense(shape)
    first = [read // s % n for n, s in zip(shape, strides, strict=True)] if prod(shape) else []
    dims = _merged(dims, strides)
    size, stride = [1] * len(shape), [0] * len(shape)
    for at, (count, step, put) in enumerate(dims):
        along = next((d for d, s in enumerate(strides) if s == step and shape[d] > 1), None)
        rest = dims[:at] + dims[at + 1 :]
        if along is not None and size[along] == 1 and first[along] + count <= shape[along]:
            size[along], stride[along] = count, put
        elif along and not first[along] and count % shape[along] == 0:  # several dimensions, seen as one
            whole = shape[along]
            parts = [(count // whole, step * whole, put * whole), (whole, step, put)]
            yield from _boxes(shape, rest + parts, read, write)
            return
        else:
            for i in range(count):
                yield from _boxes(shape, rest, read + i * step, write + i * put)
            return
    yield tuple(first), tuple(size), write, tuple(stride)


def _merged(dims: list[tuple[int, int, int]], strides: Sequence[int]) -> list[tuple[int, int, int]]:
    """Joins dimensions that were one dimension of the tensor, cut in two by a reshape."""
    dims = sorted(dims, key=lambda dim: -dim[1])
    joined: list[tuple[int, int, int]] = []
    for count, step, put in dims:
        if joined:
            outer, wide, far = joined[-1]
            if wide == count * step and far == count * put and wide not in strides:
                joined[-1] = (outer * count, step, put)
                continue
        joined.append((count, step, put))
    return joined


def boxes_of_labels(shape: Sequence[int], labels: NDArray[np.int64], target: View) -> Iterator[Box]:
    """The same, where only the flat coordinates that arrived are known.

    Args:
        shape: of the whole source.
        labels: flat coordinates, in the size of the view that was written.
        target: what was written.
    """
    for index, part in _runs(labels, (0,) * labels.ndim):
        steps = [int(np.take(part, 1, d).flat[0] - part.flat[0]) if n > 1 else 0 for d, n in enumerate(part.shape)]
        source = View(part.shape, tuple(steps), int(part.flat[0]))
        yield from boxes_of_view(shape, source, target.at(index, part.shape))


def _runs(labels: NDArray[np.int64], index: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], NDArray[np.int64]]]:
    """Parts in which the labels grow evenly along each dimension, and where they begin."""
    if not labels.size:
        return
    for along in range(labels.ndim):
        if labels.shape[along] == 1:
            continue
        steps = np.moveaxis(np.diff(labels, axis=along), along, 0).reshape(labels.shape[along] - 1, -1)
        if (steps == steps[0, 0]).all():
            continue
        # A run goes on while the step is even within the slice, and that of the slice before.
        even = (steps == steps[:, :1]).all(axis=1)
        cuts, begin = [0], 0
        for place in range(len(steps)):
            if not even[place] or (place > begin and steps[place, 0] != steps[begin, 0]):
                begin = place + 1
                cuts.append(begin)
        for low, high in zip(cuts, [*cuts[1:], labels.shape[along]], strict=True):
            part = labels.take(range(low, high), along)
            yield from _runs(part, (*index[:along], index[along] + low, *index[along + 1 :]))
        return
    yield index, labels
