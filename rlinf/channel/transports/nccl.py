"""Between GPUs that cannot map one another's memory: tensor by tensor, through an NCCL group of the two.

Never run so far: no machine with GPUs was at hand. `gloo` goes the same way through `pair`, and is tested.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rlinf.channel.errors import PeerDied
from rlinf.channel.transports.base import Held, Visit
from rlinf.channel.transports.pair import Pairs


class Nccl:
    """See `DeviceTransport`.

    Args:
        backend: ``gloo`` carries tensors on the CPU the same way, for tests.
    """

    def __init__(self, ip: str, seconds: float, backend: str = "nccl") -> None:
        self._backend = backend
        self._pairs = Pairs(backend, ip, seconds)

    def answer(self, held: Held, consumer: int, *question: Any) -> tuple[Any, ...]:
        if question[0] == "meet":
            return self._pairs.meet(consumer)
        tensors = [tensor.contiguous() for tensor in held.device]
        if tensors and tensors[0].is_cuda:
            torch.cuda.synchronize(tensors[0].device)  # the group sends on a stream of its own
        self._pairs.sender(consumer).send(tensors)
        return tuple((str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for tensor in tensors)

    def take(self, visit: Visit) -> Sequence[torch.Tensor]:
        try:
            receiver = self._pairs.receiver(visit)
            with receiver.lock:
                told = visit.ask("send")
                tensors = [
                    torch.empty(shape, dtype=getattr(torch, dtype), device=visit.device) for dtype, shape in told
                ]
                receiver.receive(list(tensors))
        except PeerDied:
            self._pairs.forget(visit.serial)
            raise
        return tensors

    def forget(self, serial: int) -> None:
        self._pairs.forget(serial)

    def close(self) -> None:
        self._pairs.close()
