"""GPUs of one host: the consumer maps the producer's GPU memory. The tensors stay on the producer's GPU.

Never run so far: no machine with GPUs was at hand. PyTorch counts the processes that look at such memory, and keeps it
until the last one has let go, so the item itself may be given up as soon as it is mapped.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch

from rlinf.channel.transports.base import Held, Visit


class CudaIpc:
    """See `DeviceTransport`."""

    def answer(self, held: Held, consumer: int, *question: Any) -> tuple[Any, ...]:
        from rlinf.vps.transfer.ipc import opened

        return (pickle.dumps(opened(held.device)),)

    def take(self, visit: Visit) -> Sequence[torch.Tensor]:
        from rlinf.vps.transfer.ipc import attach

        (told,) = visit.ask()
        return attach(pickle.loads(told), visit.device)

    def forget(self, serial: int) -> None:
        pass

    def close(self) -> None:
        pass
