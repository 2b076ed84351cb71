"""Process groups of two members, a producer and a consumer, beside whatever groups their programs have.

The producer opens a store, the consumer comes to it; after that each item is one message after the other. torch's
stores and Gloo know no secret: use them in networks that are the run's own.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rlinf.channel.errors import PeerDied


def _group(backend: str, store: dist.Store, rank: int, ip: str, seconds: float) -> Any:
    timeout = timedelta(seconds=seconds)
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, 2, options)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=ip)]
    options._timeout = timeout
    return gloo(store, rank, 2, options)


class Sender:
    """The producer's end: a thread of its own sends what it is told to, in order."""

    def __init__(self, backend: str, ip: str, seconds: float) -> None:
        self._store = dist.TCPStore(ip, 0, 2, True, timedelta(seconds=seconds), wait_for_workers=False)
        self.port = self._store.port
        self._backend, self._ip, self._seconds = backend, ip, seconds
        self._orders: queue.SimpleQueue[Sequence[torch.Tensor] | None] = queue.SimpleQueue()
        self.error: Exception | None = None
        threading.Thread(target=self._run, name=f"channel-{backend}", daemon=True).start()

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        self._orders.put(tensors)

    def close(self) -> None:
        self._orders.put(None)

    def _run(self) -> None:
        try:
            group = _group(self._backend, self._store, 0, self._ip, self._seconds)
            while (tensors := self._orders.get()) is not None:
                for tensor in tensors:
                    group.send([tensor], 1, 0).wait()
        except Exception as error:  # the consumer is gone; what it had goes to another one
            self.error = error


class Receiver:
    """The consumer's end.

    Raises:
        PeerDied: the producer does not come.
    """

    def __init__(self, backend: str, name: str, ip: str, port: int, here: str, seconds: float) -> None:
        self._name, self._seconds = name, seconds
        self.lock = threading.Lock()
        try:
            store = dist.TCPStore(ip, port, 2, False, timedelta(seconds=seconds))
            self._group = _group(backend, store, 1, here, seconds)
        except Exception as error:  # RuntimeError, DistNetworkError, DistStoreError
            raise PeerDied(f"{name} did not meet us at {ip}:{port} for {backend}: {error}") from error

    def receive(self, tensors: Sequence[torch.Tensor]) -> None:
        """Fill tensors with what the producer sends."""
        try:
            for tensor in tensors:
                self._group.recv([tensor], 0, 0).wait(timedelta(seconds=self._seconds))
        except RuntimeError as error:
            raise PeerDied(f"{self._name} did not send within {self._seconds:g} s, or is gone: {error}") from error


class Pairs:
    """A member's groups of two, by the other member.

    Args:
        backend: ``gloo`` or ``nccl``.
        ip: that this member is reached by.
    """

    def __init__(self, backend: str, ip: str, seconds: float) -> None:
        self._backend, self._ip, self._seconds = backend, ip or "127.0.0.1", seconds
        self._senders: dict[int, Sender] = {}
        self._receivers: dict[int, Receiver] = {}
        self._lock = threading.Lock()

    def sender(self, consumer: int, new: bool = False) -> Sender:
        with self._lock:
            if new or consumer not in self._senders:
                if old := self._senders.pop(consumer, None):
                    old.close()
                self._senders[consumer] = Sender(self._backend, self._ip, self._seconds)
            return self._senders[consumer]

    def receiver(self, visit: Any) -> Receiver:
        with self._lock:
            if visit.serial not in self._receivers:
                ip, port = visit.ask("meet")
                here = self._ip
                self._receivers[visit.serial] = Receiver(self._backend, visit.name, ip, port, here, visit.deadline_s)
            return self._receivers[visit.serial]

    def forget(self, serial: int) -> None:
        """A member is gone, or an exchange with it has failed."""
        with self._lock:
            self._receivers.pop(serial, None)
            if sender := self._senders.pop(serial, None):
                sender.close()

    def meet(self, consumer: int) -> tuple[str, int]:
        return self._ip, self.sender(consumer, new=True).port

    def close(self) -> None:
        for serial in {*self._senders, *self._receivers}:
            self.forget(serial)
