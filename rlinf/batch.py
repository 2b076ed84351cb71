"""Batch: what flows between workers.

Read in this order: `Ragged` (one field whose rows have different lengths), then `Batch` (named fields over the
same rows). Rows are packed end to end and never padded; tensors leave the process as raw buffers beside the pickle
stream, so that a shared-memory transport can hand them on without a copy.

Two fields have a meaning everywhere:

- ``row_id`` (int64 ``[n]``): unique in the run and independent of how the work is spread over ranks. Streams are
  joined, routed and ordered by it.
- ``group_id`` (int64 ``[n]``): the ``row_id`` of the prompt that a sample came from.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Union

import numpy as np
import torch

ROW = "row_id"
GROUP = "group_id"


@dataclass(frozen=True)
class Ragged:
    """Rows of different lengths, end to end.

    Attributes:
        values: ``[sum(lengths), ...]``.
        lengths: int64 ``[n]``.
    """

    values: torch.Tensor
    lengths: torch.Tensor

    def __post_init__(self) -> None:
        if self.lengths.dtype != torch.int64 or self.lengths.dim() != 1:
            raise TypeError(f"lengths must be int64 [n], found {self.lengths.dtype} {tuple(self.lengths.shape)}")
        if int(self.lengths.sum()) != self.values.shape[0]:
            raise ValueError(f"lengths sum to {int(self.lengths.sum())}, values hold {self.values.shape[0]} items")

    @staticmethod
    def of(rows: Iterable[Any], dtype: torch.dtype | None = None) -> Ragged:
        """Build from an iterable of 1-D (or deeper) tensors, arrays or lists.

        An empty iterable needs ``dtype`` (float32 otherwise).
        """
        tensors = [row if isinstance(row, torch.Tensor) else torch.as_tensor(row, dtype=dtype) for row in rows]
        lengths = torch.tensor([t.shape[0] for t in tensors], dtype=torch.int64)
        if not tensors:
            return Ragged(torch.empty(0, dtype=dtype or torch.float32), lengths)
        values = torch.cat(tensors)
        return Ragged(values if dtype is None else values.to(dtype), lengths)

    @property
    def offsets(self) -> torch.Tensor:
        """int64 ``[n + 1]``: row ``i`` is ``values[offsets[i]:offsets[i + 1]]``."""
        return torch.cat([self.lengths.new_zeros(1), self.lengths.cumsum(0)])

    @property
    def row_index(self) -> torch.Tensor:
        """int64 ``[sum(lengths)]``: the row that each value belongs to."""
        return torch.repeat_interleave(torch.arange(len(self)), self.lengths)

    def with_values(self, values: torch.Tensor) -> Ragged:
        """The same rows with other values."""
        return Ragged(values, self.lengths)

    def rows(self) -> list[torch.Tensor]:
        """Views of the rows."""
        return list(torch.split(self.values, self.lengths.tolist()))

    def select(self, index: torch.Tensor) -> Ragged:
        """The rows at ``index`` (int64 ``[m]``), in that order."""
        lengths = self.lengths[index]
        starts = self.offsets[:-1][index]
        total = int(lengths.sum())
        ends = lengths.cumsum(0)
        within = torch.arange(total) - torch.repeat_interleave(ends - lengths, lengths)
        return Ragged(self.values[torch.repeat_interleave(starts, lengths) + within], lengths)

    def __len__(self) -> int:
        return self.lengths.shape[0]

    def __getitem__(self, row: int) -> torch.Tensor:
        start = int(self.lengths[:row].sum())
        return self.values[start : start + int(self.lengths[row])]


Field = Union[Ragged, torch.Tensor, list]


class Batch(Mapping[str, Field]):
    """Named fields over the same ``n`` rows: `Ragged`, a tensor ``[n, ...]``, or a list of ``n`` Python values."""

    __slots__ = ("_fields", "_rows")

    def __init__(self, fields: Mapping[str, Field], rows: int | None = None) -> None:
        lengths = {name: len(field) for name, field in fields.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"fields of one batch must have the same number of rows, found {lengths}")
        found = next(iter(lengths.values()), rows or 0)
        if rows is not None and found != rows:
            raise ValueError(f"expected {rows} rows, found {found}")
        self._fields = dict(fields)
        self._rows = found

    @property
    def n(self) -> int:
        """Number of rows. (``len(batch)`` counts the fields, as of any mapping.)"""
        return self._rows

    def __getitem__(self, name: str) -> Any:
        try:
            return self._fields[name]
        except KeyError:
            raise KeyError(f"no field {name!r}; this batch holds {sorted(self._fields)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __repr__(self) -> str:
        return f"Batch(n={self.n}, fields={sorted(self._fields)})"

    def only(self, names: Iterable[str]) -> Batch:
        """These fields alone."""
        return Batch({name: self[name] for name in names}, rows=self.n)

    def plus(self, **fields: Field) -> Batch:
        """With these fields added or replaced."""
        return Batch({**self._fields, **fields}, rows=self.n)

    def select(self, index: torch.Tensor | Sequence[int]) -> Batch:
        """The rows at ``index``, in that order."""
        where = torch.as_tensor(index, dtype=torch.int64)
        picked: dict[str, Field] = {}
        for name, field in self._fields.items():
            if isinstance(field, Ragged):
                picked[name] = field.select(where)
            elif isinstance(field, torch.Tensor):
                picked[name] = field[where]
            else:
                picked[name] = [field[i] for i in where.tolist()]
        return Batch(picked, rows=where.shape[0])

    def sorted(self) -> Batch:
        """In the order of ``row_id``."""
        return self.select(torch.argsort(self[ROW], stable=True))

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        """Rows of all batches, which must have the same fields. Batches without rows are passed over."""
        full = [batch for batch in batches if batch.n] or list(batches[:1])
        if not full:
            return Batch({})
        names = set(full[0])
        for batch in full[1:]:
            if set(batch) != names:
                raise ValueError(f"batches to join differ in fields: {sorted(names ^ set(batch))}")
        joined: dict[str, Field] = {}
        for name in full[0]:
            parts = [batch[name] for batch in full]
            if isinstance(parts[0], Ragged):
                joined[name] = Ragged(torch.cat([p.values for p in parts]), torch.cat([p.lengths for p in parts]))
            elif isinstance(parts[0], torch.Tensor):
                joined[name] = torch.cat(parts)
            else:
                joined[name] = [value for part in parts for value in part]
        return Batch(joined)

    def join(self, other: Batch) -> Batch:
        """Add the other batch's fields, row by row, matched by ``row_id``.

        Raises:
            ValueError: the two do not hold the same rows.
        """
        mine, theirs = self[ROW], other[ROW]
        order = torch.argsort(theirs)
        at = torch.searchsorted(theirs[order], mine).clamp(max=max(len(theirs) - 1, 0))
        if len(mine) != len(theirs) or not torch.equal(theirs[order][at], mine):
            missing = sorted(set(mine.tolist()) ^ set(theirs.tolist()))
            raise ValueError(f"the batches hold different rows; {len(missing)} differ, among them {missing[:8]}")
        return self.plus(**{k: v for k, v in other.select(order[at])._fields.items() if k not in self})

    @property
    def nbytes(self) -> int:
        """Bytes in tensors (Python values are not counted)."""
        total = 0
        for field in self._fields.values():
            tensors = (field.values, field.lengths) if isinstance(field, Ragged) else (field,)
            total += sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))
        return total

    # Tensors leave as numpy arrays: pickle protocol 5 then carries their memory out of band.
    def __reduce__(self) -> tuple[Any, ...]:
        packed = {
            name: ("ragged", pack_tensor(f.values), pack_tensor(f.lengths))
            if isinstance(f, Ragged)
            else (("tensor", pack_tensor(f)) if isinstance(f, torch.Tensor) else ("list", f))
            for name, f in self._fields.items()
        }
        return _unpack_batch, (packed, self._rows)


def pack_tensor(tensor: torch.Tensor) -> tuple[np.ndarray, str]:
    """A tensor as an array (bfloat16 as its bits) and the name of its dtype."""
    flat = tensor.detach().cpu().contiguous()
    name = str(flat.dtype).removeprefix("torch.")
    return (flat.view(torch.int16) if flat.dtype == torch.bfloat16 else flat).numpy(), name


def unpack_tensor(array: np.ndarray, name: str, copy: bool = True) -> torch.Tensor:
    """The reverse of `pack_tensor`.

    Args:
        copy: arrays out of shared memory are read-only; copy those, since torch does not know read-only tensors.
            Without a copy nobody may write to the tensor.
    """
    if copy and not array.flags.writeable:
        array = array.copy()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if name == "bfloat16" else tensor


def _unpack_batch(packed: dict[str, tuple[Any, ...]], rows: int) -> Batch:
    fields: dict[str, Field] = {}
    for name, (kind, *parts) in packed.items():
        if kind == "ragged":
            fields[name] = Ragged(unpack_tensor(*parts[0]), unpack_tensor(*parts[1]))
        else:
            fields[name] = unpack_tensor(*parts[0]) if kind == "tensor" else parts[0]
    return Batch(fields, rows=rows)
