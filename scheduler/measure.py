"""What runs on workers while they are profiled: functions for `Fleet.apply`, and what they bring back.

A watched worker keeps what its stages are given in an iteration, and what they hold meanwhile. With these rows, real
ones, its stages are then called by themselves, fewer rows at a time.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import GeneratorType
from typing import TYPE_CHECKING, Any

from rlinf.batch import GROUP, ROW, Batch, Ragged
from rlinf.worker import Worker

if TYPE_CHECKING:
    from rlinf.channel.spec import Address, Place

logger = logging.getLogger("rlinf.profile")
_ANSWER_S = 60.0  # that the other end of a channel is waited for


@dataclass
class Seen:
    """A call of a stage, as the executor made it.

    Attributes:
        given, made: batches.
        options: of the call.
        transient: bytes that the device held in it beyond what was there.
        looking: seconds of the call's span that it took to find that out.
    """

    given: list[Batch]
    options: Mapping[str, Any]
    made: list[Batch] = field(default_factory=list)
    transient: int = 0
    looking: float = 0.0


_SEEN: dict[int, dict[str, list[Seen]]] = {}  # of each watched worker of this process, by its id


@dataclass(frozen=True)
class Which:
    """A node among the calls that a worker keeps.

    Attributes:
        stage: name of the worker's method.
        number: of the node, among those of an iteration that call this method on this worker.
    """

    stage: str
    number: int = 0


@dataclass(frozen=True)
class Took:
    """A call.

    Attributes:
        start, end: seconds since the epoch.
        rows: that it worked on.
        transient: bytes that the device held in it beyond what was there; ``None``: nobody looked.
    """

    start: float
    end: float
    rows: int
    transient: int | None = None

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Facts:
    """What the calls of a node were about, in the last iteration.

    Attributes:
        given, made: rows.
        given_bytes, made_bytes: field -> bytes of it in all of these rows.
        lengths: tokens of each sequence that was made; empty where none are.
    """

    given: int = 0
    made: int = 0
    given_bytes: Mapping[str, int] = field(default_factory=dict)
    made_bytes: Mapping[str, int] = field(default_factory=dict)
    lengths: tuple[int, ...] = ()


def watch(worker: Worker, stages: Sequence[str]) -> None:
    """From now on the worker keeps what these stages are given and make, and looks at memory meanwhile."""
    _SEEN[id(worker)] = {stage: [] for stage in stages}
    for stage, kept in _SEEN[id(worker)].items():
        setattr(worker, stage, _watched(getattr(worker, stage), kept, worker.ctx.device))


def anew(worker: Worker) -> None:
    """Another iteration begins: what was kept of the last one is not needed."""
    for kept in _SEEN[id(worker)].values():
        kept.clear()


def _watched(method: Callable[..., Any], kept: list[Seen], device: str) -> Callable[..., Any]:
    def call(rows: Batch | Iterable[Batch], **options: Any) -> Any:
        seen = Seen([], options)
        kept.append(seen)
        look = _looking(seen, device, before=not isinstance(rows, Batch))
        next(look)
        if isinstance(rows, Batch):
            seen.given.append(rows)
            made = method(rows, **options)
        else:
            made = method(_through(rows, seen.given), **options)
        if isinstance(made, GeneratorType):
            return _through(made, seen.made, look)
        next(look)
        if made is not None:
            seen.made.append(made)
        return made

    return call


def _through(batches: Iterable[Batch], into: list[Batch], end: Iterator[None] | None = None) -> Iterator[Batch]:
    for batch in batches:
        into.append(batch)
        yield batch
    if end is not None:
        next(end)


def _looking(seen: Seen, device: str, before: bool) -> Iterator[None]:
    """Looks at memory from its first step to its second.

    Args:
        before: the span of the call begins after the first step: with the first piece of a stream.
    """
    began = time.perf_counter()
    with _Gauge(device) as gauge:
        seen.looking = 0.0 if before else time.perf_counter() - began
        yield
        began = time.perf_counter()
    seen.transient = gauge.transient
    seen.looking += time.perf_counter() - began
    yield


def _of(worker: Worker, which: Which) -> Seen:
    return _SEEN[id(worker)][which.stage][which.number]


def facts(worker: Worker, which: Which) -> Facts:
    """What the call of a node in the last iteration was about."""
    seen = _of(worker, which)
    given, made = Batch.concat(seen.given), Batch.concat(seen.made)
    lengths = [length for batch in seen.made for length in _lengths(batch)]
    return Facts(given.n, made.n, _sizes(given), _sizes(made), tuple(lengths))


def looked(worker: Worker, nodes: Sequence[Which]) -> list[tuple[int, float]]:
    """Of the calls of the last iteration: bytes beyond what stays, and seconds that it took to find that out."""
    return [(seen.transient, seen.looking) for seen in (_of(worker, which) for which in nodes)]


def _sizes(batch: Batch) -> dict[str, int]:
    """Field -> bytes of a message with it."""
    return {name: len(pickle.dumps(batch.only([name]), 5)) for name in batch if name not in (ROW, GROUP)}


def _lengths(batch: Batch) -> list[int]:
    """Of the sequences that a stage made: those of its first field of whole numbers."""
    for value in batch.values():
        if isinstance(value, Ragged) and not value.values.is_floating_point():
            return [int(length) for length in value.lengths.tolist()]
    return []


def calls(
    worker: Worker, which: Which, rows: int, unit: int, turn: int = 0, repeats: int = 1, look: bool = False
) -> list[Took]:
    """Call a stage on rows of the last iteration.

    Args:
        worker: a watched one, after an iteration.
        which: the node.
        rows: to give it; those that this rank has, if they are fewer.
        unit: rows that stay together.
        turn: other turns take other rows, where there are so many.
        repeats: how often.
        look: at memory.
    """
    seen = _of(worker, which)
    method = getattr(type(worker), which.stage).__get__(worker)
    streams = type(worker).stages()[which.stage].streams
    whole, found = Batch.concat(seen.given), []
    for repeat in range(repeats):
        batch = part_of(whole, rows, unit, turn + repeat)
        with _Gauge(worker.ctx.device) if look else contextlib.nullcontext() as gauge:
            start, began = time.time(), time.perf_counter()
            made = method(iter([batch]) if streams else batch, **seen.options)
            if isinstance(made, GeneratorType):
                for _ in made:
                    pass
            _finish(worker.ctx.device)
            end = start + time.perf_counter() - began
        worker.metrics.take()
        worker.metrics.take_rows()
        found.append(Took(start, end, batch.n, gauge.transient if gauge else None))
    return found


def part_of(batch: Batch, rows: int, unit: int, turn: int) -> Batch:
    """Some rows of a batch, as tensors of their own; other turns take the next ones, and begin anew at its end."""
    rows = min(rows, batch.n)
    places = (batch.n - rows) // unit + 1
    first = turn * max(rows // unit, 1) % places * unit
    picked: Batch = batch.select(range(first, first + rows))
    return picked


def draw(worker: Any, source: str) -> tuple[int, int]:
    """(rows, bytes) of what a source of the host makes."""
    made = worker.sources[source].next_batch()
    return made.n, sum(_sizes(made).values())


def limit(worker: Any, source: str, rows: int) -> None:
    """From now on a source of the host makes the first so many rows of what it would make."""
    of = worker.sources[source]

    def next_batch() -> Batch:
        made = type(of).next_batch(of)
        return made.select(range(min(rows, made.n)))

    of.next_batch = next_batch


def switch(worker: Worker) -> tuple[float, float]:
    """Seconds to take the worker's state off its device, and on again."""
    times = []
    for move in (worker.offload, worker.onload):
        began = time.perf_counter()
        move()
        _finish(worker.ctx.device)
        times.append(time.perf_counter() - began)
    return times[0], times[1]


def held(worker: Worker) -> int:
    """Bytes that torch holds on a GPU for this process; 0 on a CPU."""
    if not worker.ctx.device.startswith("cuda"):
        return 0
    import torch

    return int(torch.cuda.memory_allocated())


def _finish(device: str) -> None:
    """What a GPU still has in its queue is a part of the call."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.synchronize()


class _Gauge:
    """How much more memory is held at the fullest moment within it than at its beginning: ``transient`` bytes.

    On a CPU that of this process and its children, by the kernel's own high-water mark.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.transient = 0

    def __enter__(self) -> _Gauge:
        if self.device.startswith("cuda"):
            import torch

            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._before = {0: torch.cuda.memory_allocated()}
            return self
        with contextlib.suppress(AttributeError):  # of another C library
            ctypes.CDLL(None).malloc_trim(0)  # what was freed before is not held
        self._before = {pid: size for pid in _family() if (size := _begin_mark(pid)) is not None}
        return self

    def __exit__(self, *_: object) -> None:
        if self.device.startswith("cuda"):
            import torch

            self.transient = max(torch.cuda.max_memory_allocated() - self._before[0], 0)
        else:
            self.transient = sum(max(_status(pid, "VmHWM") - size, 0) for pid, size in self._before.items())


def _family() -> list[int]:
    import psutil

    return [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]


def _begin_mark(pid: int) -> int | None:
    """Set a process's high-water mark to what it holds, which is returned; ``None``: it cannot be told."""
    try:
        Path(f"/proc/{pid}/clear_refs").write_text("5")
        return _status(pid, "VmRSS")
    except FileNotFoundError:  # a child that has just ended
        return None
    except OSError as error:
        logger.warning("memory within a stage cannot be measured here (%s): it counts as none", error)
        return None


def _status(pid: int, key: str) -> int:
    """A size from the process's status, in bytes; 0 of one that is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    return 0


def place(worker: Worker) -> tuple[Place, str]:
    """Where the worker is, as transports ask, and the address that other hosts reach it by."""
    import ray

    from rlinf.channel.spec import this_place

    ip = ray.util.get_node_ip_address()
    return this_place(worker.ctx.device, ip), ip


def open_broker(worker: Worker, ip: str) -> Address:
    """Host a broker in the worker's process, for `ping`."""
    from rlinf.channel.broker import Broker

    broker = Broker(ip)
    _BROKERS.append(broker)
    return broker.address


_BROKERS: list[Any] = []  # they live as long as the process


def ping(
    worker: Worker, address: Address, ends: tuple[str, str], mine: int, ip: str, sizes: Sequence[int], repeats: int
) -> list[float]:
    """One of two ends of a channel that send a message to and fro: seconds of one way, of each size, the best.

    Args:
        address: of the broker.
        ends: names of both.
        mine: which of them this is; the first one begins.
        ip: that other hosts reach this process by.
        sizes: of messages, in bytes.
        repeats: of each; one more comes before them, and is not counted.
    """
    import torch

    from rlinf.channel.member import Member
    from rlinf.channel.spec import ChannelSpec

    member = Member(address, ends[mine], ip=ip)
    channel = member.channel(ChannelSpec("ping", ends, ends))
    other, found = ends[1 - mine], []
    for size in sizes:
        item, ways = torch.ones(max(size // 4, 1)), []
        for _ in range(repeats + 1):
            began = time.perf_counter()
            if mine == 0:
                channel.put(item, key=other)
            channel.get(ends[mine], timeout=_ANSWER_S)
            if mine == 1:
                channel.put(item, key=other)
            ways.append((time.perf_counter() - began) / 2)
        found.append(min(ways[1:]))
    channel.done()
    member.close(linger_s=_ANSWER_S if mine else 0)
    return found
