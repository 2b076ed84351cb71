"""Members in processes of their own, for the tests of channels."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from rlinf.channel.member import Member
from rlinf.channel.spec import Address

CONTEXT = multiprocessing.get_context("spawn")


def _serve(pipe: Connection, address: Address, name: str, ip: str) -> None:
    import torch

    torch.set_num_threads(1)
    member = Member(address, name, ip=ip, deadline_s=10.0)
    state: dict[str, Any] = {}
    pipe.send("ready")
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            answer = function(member, state, *args)
        except BaseException as error:
            answer = error
        pipe.send(answer)


class Remote:
    """A process with one member. Functions at the top of a module run in it: ``function(member, state, *args)``."""

    def __init__(self, address: Address, name: str, ip: str = "") -> None:
        self._pipe, there = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=_serve, args=(there, address, name, ip), daemon=True)
        self.process.start()
        there.close()
        assert self._pipe.recv() == "ready"

    def begin(self, function: Callable[..., Any], *args: Any) -> None:
        self._pipe.send((function, args))

    def end(self, timeout: float = 30.0) -> Any:
        assert self._pipe.poll(timeout), "no answer"
        answer = self._pipe.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        self.begin(function, *args)
        return self.end()

    def kill(self) -> None:
        os.kill(self.process.pid or 0, signal.SIGKILL)
        self.process.join(10)

    def close(self) -> None:
        with suppress(OSError):
            self._pipe.close()
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
