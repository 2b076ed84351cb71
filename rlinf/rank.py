"""RankHost: the Ray actor around one worker. A thin shell: what a rank does stands in `Worker` and `Executor`.

A rank has three threads of work: its program, its mail (so that rows arrive while it computes), and a watch that tells
the driver how far it is. This module imports nothing heavy, so that a rank can set its environment (threads,
GPUs) before the libraries that read it are loaded.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf.channel.mailbox import Mailbox
from rlinf.cluster import pin
from rlinf.failure import Failure, RankError
from rlinf.vitals import STACKS, Stacks, cpu_seconds, stacks_of
from rlinf.worker import RankContext

if TYPE_CHECKING:
    from rlinf.channel.spec import Address
    from rlinf.m2flow.compiler import Compiled
    from rlinf.m2flow.executor import Executor, Report, Turn
    from rlinf.m2flow.graph import Graph
    from rlinf.m2flow.waits import State
    from rlinf.wire import ChannelWire

WATCH = "watch"  # a thread beside the program's own
RENDEZVOUS_TIMEOUT_S = 600.0


class _Notes(logging.Handler):
    """Keeps warnings of a rank until the driver takes them; each text once."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._seen: set[str] = set()
        self._new: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text not in self._seen:
            self._seen.add(text)
            self._new.append(text)

    def take(self) -> list[str]:
        new, self._new = self._new, []
        return new


class RankHost:
    """The Ray actor around one `Worker`.

    Args:
        environ: environment variables of this rank.
        paths: where Python finds the modules of the workflow.
        payload: pickled (worker class, its config, its `RankContext`); unpickled once the environment is set.
    """

    def __init__(self, environ: Mapping[str, str], paths: Sequence[str], payload: bytes) -> None:
        os.environ.update(environ)
        sys.path[:0] = [path for path in paths if path not in sys.path]
        threads = pin()
        cls, cfg, ctx = pickle.loads(payload)
        self._log_to(ctx)
        self._doing = "start-up"
        self._progress: tuple[float, float] = (0.0, 0.0)
        self._moves = 0  # reports of progress, and calls that began or ended
        self._thread = 0  # that runs the program
        self._mailbox = Mailbox()
        self._notes = _Notes()
        logging.getLogger("rlinf").addHandler(self._notes)
        self.ctx = replace(ctx, threads=threads, report=self._report)
        self.worker = cls(cfg, self.ctx)
        self._executor: Executor | None = None
        self._wire: ChannelWire | None = None
        self._node = socket.gethostname()

    def _report(self, done: float, total: float) -> None:
        self._progress = (done, total)
        self._moves += 1

    @staticmethod
    def _log_to(ctx: RankContext) -> None:
        """Everything that the rank prints, native libraries included, goes to a file of its own."""
        import faulthandler

        logs = ctx.output_dir / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        sys.stdout.flush()
        sys.stderr.flush()
        with open(logs / f"{ctx.group}-{ctx.rank}.log", "ab", buffering=0) as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        faulthandler.register(STACKS, file=2)  # works in native code that keeps Python's lock, too

    def _guard(self, doing: str, call: Callable[[], Any]) -> Any:
        self._doing, self._thread = doing, threading.get_ident()
        self._moves += 1
        try:
            return call()
        except BaseException as error:
            import traceback

            with contextlib.suppress(OSError):  # the log may be on the full disk that the error is about
                traceback.print_exc()
            at = (self._executor.current if self._executor else "") or doing
            failure = Failure.of(error, self.ctx.group, self.ctx.rank, self._node, os.getpid(), at)
            raise RankError(failure) from None
        finally:
            self._doing = ""
            self._moves += 1

    def identify(self) -> tuple[str, int, str, int]:
        """(host name, pid, address, a free port): where rank 0's process group can meet."""
        import ray

        address = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((address, 0))
            return self._node, os.getpid(), address, probe.getsockname()[1]

    def connect(
        self,
        graph: Graph,
        compiled: Compiled,
        services: Any,
        broker: Address,
        several_nodes: bool,
        meet: tuple[str, int],
    ) -> None:
        """Learn the others, and form the group's process group where the worker asks for one."""
        import ray

        from rlinf.m2flow.executor import Executor
        from rlinf.wire import ChannelWire

        def connect() -> None:
            everyone = {group: stage.ranks for group, stage in compiled.layout.items()}
            ip = ray.util.get_node_ip_address() if several_nodes else ""
            self._wire = ChannelWire((self.ctx.group, self.ctx.rank), self._mailbox, everyone, broker, services, ip)
            self._executor = Executor(graph, compiled, self.worker, self._mailbox, self._wire)
            if self.worker.collective and self.ctx.world_size > 1:
                self._rendezvous(*meet)

        self._guard("joining the process group", connect)

    def _rendezvous(self, address: str, port: int) -> None:
        from datetime import timedelta

        import torch
        import torch.distributed as dist

        backend = "gloo"
        if self.ctx.device.startswith("cuda"):
            torch.cuda.set_device(self.ctx.device)
            backend = "cpu:gloo,cuda:nccl"
        dist.init_process_group(
            backend,
            init_method=f"tcp://{address}:{port}",
            rank=self.ctx.rank,
            world_size=self.ctx.world_size,
            timeout=timedelta(seconds=RENDEZVOUS_TIMEOUT_S),
        )

    def setup(self) -> int:
        """Build the worker; returns its bytes on the device. One that takes turns in memory leaves it again."""

        def setup() -> int:
            assert self._executor is not None
            self.worker.setup()
            size = self.worker.nbytes()
            if self.ctx.group in self._executor.compiled.swapped:
                self._executor.offload()
            return size

        return self._guard("setup", setup)

    def adopt(self, compiled: Compiled, environ: Mapping[str, str]) -> None:
        """Go on with these programs, on the cores that ``environ`` names; see `Fleet.adopt`."""

        def adopt() -> None:
            import psutil

            assert self._executor is not None
            os.environ.update(environ)
            pin([child.pid for child in psutil.Process().children(recursive=True)])
            self._executor.adopt(compiled)

        self._guard("adopting another plan", adopt)

    def execute(self, turn: Turn) -> Report:
        def execute() -> Report:
            assert self._executor is not None
            return self._executor.run(turn)

        return self._guard(turn.phase, execute)

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the worker, e.g. ``export``."""
        return self._guard(method, lambda: self._there(lambda: getattr(self.worker, method)(*args)))

    def apply(self, function: Callable[..., Any], *args: Any) -> Any:
        """``function(worker, *args)``, where the worker is."""
        return self._guard(function.__name__, lambda: self._there(lambda: function(self.worker, *args)))

    def _there(self, call: Callable[[], Any]) -> Any:
        """Call with the worker's state on its device."""
        executor = self._executor
        if executor is None or not executor.away:
            return call()
        executor.onload()
        try:
            return call()
        finally:
            executor.offload()

    def save(self, directory: Path) -> None:
        from rlinf.checkpoint import save_state

        self._guard("saving a checkpoint", lambda: self._there(lambda: save_state(self.worker.state(), directory)))

    def load(self, directory: Path) -> None:
        from rlinf.checkpoint import load_state

        def load() -> None:
            self.worker.load_state(load_state(self.worker.state(), directory))

        self._guard("loading a checkpoint", lambda: self._there(load))

    def teardown(self) -> None:
        self._mailbox.cancel()
        try:
            self._guard("teardown", self.worker.teardown)
        finally:
            if self._wire is not None:
                self._wire.leave()

    # Watch

    def watch(self) -> tuple[str, float, float, list[str]]:
        """(what it does, done, total, new warnings)."""
        doing = (self._executor.current if self._executor else "") or self._doing
        return (doing, *self._progress, self._notes.take())

    def state(self) -> State:
        """Where this rank stands; see `rlinf.watchdog`."""
        from rlinf.m2flow.waits import State

        executor = self._executor
        wait = executor.wait() if executor else None
        doing = (executor.current if executor else "") or self._doing
        moves = (executor.moves if executor else 0) + self._moves
        used = cpu_seconds(os.getpid()) - time.thread_time()  # to look is not to work
        holds = executor is not None and executor.holding
        return State((self.ctx.group, self.ctx.rank), doing, wait, moves, used, holds)

    def stacks(self) -> Stacks:
        """What each thread of this process is at."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        frames = {number: frame for number, frame in sys._current_frames().items() if number != threading.get_ident()}
        return stacks_of(frames, names, self._thread, os.getpid())
