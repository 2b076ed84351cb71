"""The space: every logical tensor of a model at parallel size 1, and which kinds of state lie over it. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from itertools import pairwise

from rlinf.errors import RlinfError

DTYPE_BYTES: Mapping[str, int] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


class LayoutError(RlinfError):
    """Two layouts, or a layout and its space, do not fit; names the tensor, the box and the ranks."""


class Kind(IntEnum):
    """A state over the coordinates of a tensor."""

    PARAMETER = 0
    MASTER = 1  # the fp32 copy that the optimiser steps
    EXP_AVG = 2
    EXP_AVG_SQ = 3
    GRADIENT = 4
    BUFFER = 5


OPTIMISER = (Kind.MASTER, Kind.EXP_AVG, Kind.EXP_AVG_SQ)


@dataclass(frozen=True)
class Tensor:
    """A logical tensor.

    Attributes:
        name: global, as in a Hugging Face checkpoint.
        shape: at parallel size 1, without padding.
        dtype: of the parameter (or buffer), e.g. ``bfloat16``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class Space:
    """Logical tensors, sorted by name, and what lies over them.

    Attributes:
        tensors: each coordinate once; a tied tensor is here under one name.
        kinds: state kind -> its dtype; ``""``: that of the tensor.
        aliases: another name of a tensor -> its name in ``tensors``; a destination of its own wherever it is stored.
        derived: names of state that is computed anew from other state, and never moved.

    Raises:
        LayoutError: a name occurs twice, an alias leads nowhere, or a dtype is not known.
    """

    tensors: tuple[Tensor, ...]
    kinds: Mapping[Kind, str] = field(default_factory=lambda: {Kind.PARAMETER: ""})
    aliases: Mapping[str, str] = field(default_factory=dict)
    derived: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        ordered = tuple(sorted(self.tensors, key=lambda tensor: tensor.name))
        object.__setattr__(self, "tensors", ordered)
        for first, second in pairwise(ordered):
            if first.name == second.name:
                raise LayoutError(
                    f"{first.name} is in the space twice, in shapes {first.shape} and {second.shape}: names must be "
                    "global (of the whole model), not local to a pipeline stage or a rank"
                )
        for name, target in self.aliases.items():
            if target not in self.index or name in self.index:
                raise LayoutError(f"alias {name} -> {target}: it must be a new name of a tensor of the space")
        for dtype in {tensor.dtype for tensor in ordered} | {dtype for dtype in self.kinds.values() if dtype}:
            if dtype not in DTYPE_BYTES:
                raise LayoutError(f"dtype {dtype!r} is not known; known are {', '.join(DTYPE_BYTES)}")

    @cached_property
    def index(self) -> Mapping[str, int]:
        """Place of each tensor by name; aliases are not in it."""
        return {tensor.name: i for i, tensor in enumerate(self.tensors)}

    @cached_property
    def ndim(self) -> int:
        """Dimensions of the boxes of this space: the most that a tensor has, at least 1."""
        return max((len(tensor.shape) for tensor in self.tensors), default=1) or 1

    def find(self, name: str) -> int:
        """Place of a tensor, by its name or an alias.

        Raises:
            LayoutError: nothing of that name is in the space.
        """
        found = self.index.get(self.aliases.get(name, name))
        if found is None:
            raise LayoutError(f"{name} is not a tensor of this space of {len(self.tensors)} tensors")
        return found

    def dtype(self, tensor: int, kind: Kind) -> str:
        """Logical dtype of a state."""
        return self.kinds.get(kind) or self.tensors[tensor].dtype

    def shape(self, tensor: int) -> tuple[int, ...]:
        """Shape of a tensor in the dimensions of the space: sizes of 1 are appended."""
        shape = self.tensors[tensor].shape
        return (*shape, *(1,) * (self.ndim - len(shape)))

    @cached_property
    def hash(self) -> str:
        """Digest of everything that two sides must agree on before anything is moved."""
        told = [
            [[tensor.name, tensor.shape, tensor.dtype] for tensor in self.tensors],
            sorted((int(kind), dtype) for kind, dtype in self.kinds.items()),
            sorted(self.aliases.items()),
        ]
        return hashlib.blake2b(json.dumps(told).encode(), digest_size=16).hexdigest()


def same_space(here: Space, there: Space) -> None:
    """Make sure that two sides speak of the same tensors; dtypes may differ, for they can be cast.

    Raises:
        LayoutError: names the tensors that one side lacks, or whose shapes differ.
    """
    mine, theirs = {t.name: t for t in here.tensors}, {t.name: t for t in there.tensors}
    missing, extra = sorted(mine.keys() - theirs.keys()), sorted(theirs.keys() - mine.keys())
    if missing or extra:
        raise LayoutError(
            f"the two sides are of different models: the source alone has {few(missing)}; the destination alone has "
            f"{few(extra)}"
        )
    for name, tensor in mine.items():
        if tensor.shape != theirs[name].shape:
            raise LayoutError(f"{name} has shape {tensor.shape} at the source, {theirs[name].shape} at the destination")


def few(names: Iterable[str], shown: int = 4) -> str:
    """The first names of a list, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - shown} more" if len(listed) > shown else ""
    return (", ".join(listed[:shown]) or "nothing") + more
