"""The few things that the ranks of a training group tell one another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Ranks:
    """A ("dp", "tp") mesh of ranks, or (mesh None) a rank alone.

    All methods are collectives: every rank calls them, in the same order. The tensor-parallel ranks of a replica hold
    the same samples, so sums over samples go over "dp" alone.
    """

    def __init__(self, mesh: DeviceMesh | None, device: str = "cpu") -> None:
        self.mesh = mesh
        self.device = device

    @property
    def dp(self) -> int:
        return 1 if self.mesh is None else self.mesh["dp"].size()

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sums over "dp", in float64."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Sequence[float]) -> list[float]:
        """The largest over "dp" of each."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def gather_rows(self, row_ids: Sequence[int]) -> list[int]:
        """The row ids of all replicas.

        Raises:
            ValueError: tensor-parallel ranks of one replica were given different rows.
        """
        found = self.gather(list(row_ids))
        tp = 1 if self.mesh is None else self.mesh["tp"].size()
        for rank, rows in enumerate(found):  # rank = dp_rank * tp + tp_rank
            first = rank - rank % tp
            if rows != found[first]:
                raise ValueError(
                    f"ranks {first} and {rank} are of one tensor-parallel replica but were given different rows: "
                    f"{len(found[first])} and {len(rows)} of them"
                )
        return [row for rows in found[::tp] for row in rows]

    def gather(self, value: Any) -> list[Any]:
        """A Python value of every rank of the world, by rank."""
        if self.mesh is None:
            return [value]
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, value)
        return found

    def _reduce(self, values: Sequence[float], op: Any) -> list[float]:
        if self.mesh is None or self.dp == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op, group=self.mesh["dp"].get_group())
        return tensor.tolist()
