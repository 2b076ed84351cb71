"""What ranks tell one another besides the state: small values, with a deadline that names who is missing."""

from __future__ import annotations

import pickle
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from rlinf.errors import RlinfError


class TransferError(RlinfError):
    """A relayout did not come about; the old state is as it was."""


class Peers:
    """Ranks that meet at a store of torch (TCPStore, FileStore, or that of a process group).

    Values are pickled: the store must be one that only the ranks of this job can write to.

    Args:
        store: of all ranks.
        rank, world: of this one, and of all.
        deadline_s: how long a rank is waited for.
    """

    def __init__(self, store: dist.Store, rank: int, world: int, deadline_s: float = 60.0) -> None:
        self.store = store
        self.rank = rank
        self.world = world
        self.deadline_s = deadline_s
        self._met = 0
        self._last = ""

    def gather(self, phase: str, value: Any) -> list[Any]:
        """The values of all ranks, by rank. Every rank calls it, in the same order of phases.

        Raises:
            TransferError: names the ranks that did not come within the deadline, and the phase.
        """
        self._met += 1
        at = f"vps/{self._met}/{phase}/"
        self.store.set(f"{at}{self.rank}", pickle.dumps(value))  # type: ignore[arg-type]  # bytes are taken too
        deadline = time.monotonic() + self.deadline_s
        keys = [f"{at}{rank}" for rank in range(self.world)]
        try:
            for key in keys:
                self.store.wait([key], timedelta(seconds=max(0.001, deadline - time.monotonic())))
        except Exception as error:  # stores raise RuntimeError, DistStoreError or ValueError, by their kind
            missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
            if not missing:
                raise
            raise TransferError(
                f"rank {self.rank} waited {self.deadline_s:g} s in phase {phase!r} for rank(s) "
                f"{', '.join(map(str, missing))}, which did not come: look at their logs; the old state is as it was"
            ) from error
        found = [pickle.loads(self.store.get(key)) for key in keys]
        if self._met > 1:  # everyone has read the values before the last ones
            self.store.delete_key(f"vps/{self._met - 1}/{self._last}/{self.rank}")
        self._last = phase
        return found
