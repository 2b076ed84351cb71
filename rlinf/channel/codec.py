"""Any Python value as a small pickle and the memory of its tensors, which is copied once into where it can be reached.

A tensor on the CPU, of any dtype and strides, becomes an offset; one on a GPU becomes a number, and stays where it is.
Values come back with tensors as views of the memory, contiguous, and with their gradients left behind.
"""

from __future__ import annotations

import ctypes
import io
import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from rlinf.batch import Batch
from rlinf.channel.errors import ChannelError
from rlinf.channel.ranges import aligned

_WIDE = 1 << 20  # bytes from which torch's copy, which may use several threads, is worth its start
_DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
}


@dataclass
class Encoded:
    """A value, taken apart.

    Attributes:
        skeleton: pickle of all but the tensors' memory.
        host: tensors and arrays on the CPU, with the offset of each.
        host_bytes: that they need together.
        device: tensors on GPUs.
    """

    skeleton: bytes = b""
    host: list[tuple[int, torch.Tensor | np.ndarray]] = field(default_factory=list)
    host_bytes: int = 0
    device: list[torch.Tensor] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Memory for tensors on the CPU and the skeleton."""
        return self.host_bytes + len(self.skeleton)

    def write(self, area: np.ndarray) -> None:
        """Copy tensors and skeleton to an area (uint8 ``[nbytes]``): the one copy on the producer's side."""
        begin = area.ctypes.data
        for offset, value in self.host:
            nbytes = value.nbytes
            if isinstance(value, np.ndarray):
                ctypes.memmove(begin + offset, value.ctypes.data, nbytes)
            elif nbytes < _WIDE and value.is_contiguous():
                ctypes.memmove(begin + offset, value.data_ptr(), nbytes)
            else:
                into = torch.frombuffer(area, dtype=torch.uint8, count=nbytes, offset=offset)
                into.view(value.dtype).view(value.shape).copy_(value)
        ctypes.memmove(begin + self.host_bytes, self.skeleton, len(self.skeleton))


class _Pickler(pickle.Pickler):
    def __init__(self, file: Any, made: Encoded, fields: frozenset[str] | None) -> None:
        super().__init__(file, 5)
        self._made = made
        self._fields = fields

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if kind is torch.Tensor:
            return self._tensor(value)
        if kind is np.ndarray and not value.dtype.hasobject:
            offset = self._place(np.ascontiguousarray(value))
            return _host_array, (offset, value.dtype, value.shape)
        if kind is Batch:
            names = [name for name in value if self._fields is None or name in self._fields]
            return Batch, ({name: value[name] for name in names}, value.n)
        return NotImplemented

    def _tensor(self, value: torch.Tensor) -> Any:
        if value.layout is not torch.strided or value.is_quantized or value.is_nested:
            return NotImplemented  # made of other tensors, which come here
        if value.device.type == "cpu":
            plain = value.detach().resolve_conj().resolve_neg()
            shape = tuple(plain.shape)
            return _host_tensor, (self._place(plain), str(plain.dtype).removeprefix("torch."), shape)
        if value.device.type == "cuda":
            self._made.device.append(value.detach())
            return _device_tensor, (len(self._made.device) - 1,)
        raise ChannelError(f"a tensor on {value.device} cannot be put; move it to the CPU or a CUDA device first")

    def _place(self, value: torch.Tensor | np.ndarray) -> int:
        offset = self._made.host_bytes
        if value.nbytes:
            self._made.host.append((offset, value))
            self._made.host_bytes = aligned(offset + value.nbytes)
        return offset


def encode(value: Any, fields: Sequence[str] | None = None) -> Encoded:
    """Take a value apart. Nothing is copied yet.

    Args:
        fields: those of a `Batch` that go; of the value itself all must be there, of batches inside it those that are.

    Raises:
        ChannelError: a part of it cannot be pickled, or a field is missing.
    """
    if fields is not None and isinstance(value, Batch) and (missing := [name for name in fields if name not in value]):
        raise ChannelError(f"the consumers read {list(fields)}; the batch that was put has no {missing}: {value}")
    made, file = Encoded(), io.BytesIO()
    try:
        _Pickler(file, made, None if fields is None else frozenset(fields)).dump(value)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ChannelError(f"a value of type {type(value).__name__} cannot be sent: {error}") from error
    made.skeleton = file.getvalue()
    return made


class _Views:
    """Tensors and arrays that look at an area. (No part of the unpickler: a cycle would keep the area alive.)"""

    def __init__(self, area: np.ndarray) -> None:
        self._area = area

    def tensor(self, offset: int, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        count = math.prod(shape)
        if not count:
            return torch.empty(shape, dtype=_DTYPES[dtype])
        flat = torch.frombuffer(self._area, dtype=_DTYPES[dtype], count=count, offset=offset)
        return flat if len(shape) == 1 else flat.view(shape)

    def array(self, offset: int, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        nbytes = dtype.itemsize * math.prod(shape)
        if not nbytes:
            return np.empty(shape, dtype)
        # By way of a tensor: an array made of the area would hold on to whatever the area looks at, not to the area.
        flat = torch.frombuffer(self._area, dtype=torch.uint8, count=nbytes, offset=offset)
        return flat.numpy().view(dtype).reshape(shape)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, area: np.ndarray, device: Sequence[torch.Tensor]) -> None:
        super().__init__(file)
        views = _Views(area)
        self._found: dict[str, Callable[..., Any]] = {
            "_host_tensor": views.tensor,
            "_host_array": views.array,
            "_device_tensor": device.__getitem__,
        }

    def find_class(self, module: str, name: str) -> Any:
        return self._found[name] if module == __name__ else super().find_class(module, name)


def decode(area: np.ndarray, skeleton_bytes: int, device: Sequence[torch.Tensor] = ()) -> Any:
    """The value again; its tensors look at ``area``, and hold on to it.

    Args:
        area: what `Encoded.write` has written.
        skeleton_bytes: its last part.
    """
    skeleton = memoryview(area.data)[len(area) - skeleton_bytes :]
    return _Unpickler(io.BytesIO(skeleton), area, device).load()


def detached(value: Any) -> Any:
    """A copy that looks at no shared memory."""
    made = encode(value)
    area = np.empty(made.nbytes, np.uint8)
    made.write(area)
    return decode(area, len(made.skeleton), made.device)


def _host_tensor(*_: Any) -> Any:
    raise ChannelError("read by `decode` only")


def _host_array(*_: Any) -> Any:
    raise ChannelError("read by `decode` only")


def _device_tensor(*_: Any) -> Any:
    raise ChannelError("read by `decode` only")
