"""Ranks that share no memory: the schedule's rounds, each exchange one packed message, over a torch process group.

Gloo carries CPU memory between hosts; NCCL carries GPU memory. In a round a rank has one send and one receive on the
way, so no number of ranks can pile up operations.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rlinf.vps.layout import Ints, Pieces
from rlinf.vps.plan import Moves
from rlinf.vps.schedule import Schedule
from rlinf.vps.transfer.copying import copies, run
from rlinf.vps.transfer.peers import TransferError

_ALIGNED = 16  # bytes; where a box begins in a message
_FLOATS = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64, 1: torch.uint8}


class Messages:
    """One rank's exchanges.

    Args:
        group: of all ranks, by their numbers; ``None``: the default one.
        device: where messages lie: ``cpu`` for Gloo, this rank's GPU for NCCL.
        deadline_s: how long an exchange may take.
    """

    def __init__(self, made: Schedule, rank: int, group: Any, device: str, deadline_s: float) -> None:
        self.made = made
        self.rank = rank
        self.group = group
        self.device = torch.device(device)
        self.deadline = timedelta(seconds=deadline_s)

    def exchange(
        self,
        wave: int,
        old: Sequence[torch.Tensor | None],
        new: Sequence[torch.Tensor | None],
        served: Collection[int],
    ) -> int:
        """Carry out the rounds of a wave with the ranks that are ``served``. Returns the bytes received.

        Raises:
            TransferError: names the peer that did not answer within the deadline.
        """
        plan, received = self.made.plan, 0
        for step in self.made.exchanges(self.rank, wave):
            waits: list[tuple[int, str, Any]] = []
            message, arriving = None, None
            if step.to is not None and step.sends is not None and len(step.sends) and step.to in served:
                message = self._packed(step.sends, plan.src.of(self.rank).pieces, old)
                waits.append((step.to, "send", dist.P2POp(dist.isend, message, self._global(step.to), self.group)))
            source = step.source
            if source is not None and step.receives is not None and len(step.receives) and source in served:
                arriving = torch.empty(_ends(step.receives)[-1], dtype=torch.uint8, device=self.device)
                waits.append((source, "receive", dist.P2POp(dist.irecv, arriving, self._global(source), self.group)))
            self._settle(step.round, waits)
            if arriving is not None and step.receives is not None:
                self._unpack(step.receives, arriving, plan.dst.of(self.rank).pieces, new)
                received += int(step.receives.nbytes.sum())
        return received

    def _global(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def _settle(self, number: int, waits: list[tuple[int, str, Any]]) -> None:
        if not waits:
            return
        peer = waits[0][0]
        try:
            works = dist.batch_isend_irecv([op for _, _, op in waits])
            for i, work in enumerate(works):
                peer = waits[min(i, len(waits) - 1)][0]
                work.wait(self.deadline)
        except RuntimeError as error:
            doing = " and ".join(f"{what} with rank {other}" for other, what, _ in waits)
            raise TransferError(
                f"rank {self.rank}: round {number} ({doing}) did not end; rank {peer} did not answer within "
                f"{self.deadline.total_seconds():g} s, or is gone: {error}"
            ) from error

    def _packed(self, moves: Moves, pieces: Pieces, old: Sequence[torch.Tensor | None]) -> torch.Tensor:
        message = torch.empty(_ends(moves)[-1], dtype=torch.uint8, device=self.device)
        parts = _parts(moves, message)
        for copy in copies(moves, pieces, _message_of(moves)):
            source = old[copy.source]
            assert source is not None
            run(copy, source, parts[copy.target].view(_wire(source, int(moves.width[copy.target]))))
        return message

    def _unpack(self, moves: Moves, message: torch.Tensor, pieces: Pieces, new: Sequence[torch.Tensor | None]) -> None:
        parts = _parts(moves, message)
        for copy in copies(moves, _message_of(moves), pieces):
            target = new[copy.target]
            assert target is not None
            run(copy, parts[copy.source].view(_wire(target, int(moves.width[copy.source]))), target)


def _wire(tensor: torch.Tensor, width: int) -> torch.dtype:
    """The dtype on the way: the narrower of the two sides'. What is of that width here goes as it is."""
    return tensor.dtype if tensor.element_size() == width else _FLOATS[width]


def _ends(moves: Moves) -> Ints:
    """Where each box ends in a message, in bytes."""
    return (-(-moves.nbytes // _ALIGNED) * _ALIGNED).cumsum()


def _parts(moves: Moves, message: torch.Tensor) -> list[torch.Tensor]:
    ends = _ends(moves)
    return [
        message[end - -(-size // _ALIGNED) * _ALIGNED :][:size]
        for end, size in zip(ends.tolist(), moves.nbytes.tolist(), strict=True)
    ]


def _message_of(moves: Moves) -> Pieces:
    """A message as a rank's pieces: each box in rows, in a buffer of its own."""
    sizes = moves.size
    inner = np.cumprod(sizes[:, ::-1], axis=1)[:, ::-1]
    stride = np.concatenate([inner[:, 1:], np.ones((len(sizes), 1), np.int64)], axis=1)
    where = np.arange(len(moves), dtype=np.int32)
    zero = np.zeros(len(moves), np.int64)
    return Pieces(moves.tensor, moves.kind, moves.start, sizes, where, zero, np.where(sizes > 1, stride, 0))
