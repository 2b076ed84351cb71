"""What runs on workers while they are profiled: functions for `Fleet.apply`, and what they bring back.

A watched worker keeps what its stages are given in an iteration. With these rows, real ones, its stages are then called
by themselves: fewer rows at a time, or with their memory looked at.
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
    """A call of a stage, as the executor made it."""

    given: list[Batch]
    options: Mapping[str, Any]
    made: list[Batch] = field(default_factory=list)


_SEEN: dict[int, dict[str, list[Seen]]] = {}  # of each watched worker of this process, by its id


@dataclass(frozen=True)
class Which:
    """A node among the calls that a worker keeps.

    Attributes:
        stage: name of the worker's method.
        number: of the node, among those of an iteration that call this method on this worker.
        each: calls of the method in an iteration.
    """

    stage: str
    number: int = 0
    each: int = 1


@dataclass(frozen=True)
class Took:
    """A call.

    Attributes:
        start, end: seconds since the epoch.
        rows: that it worked on.
        transient: bytes that the device held in it beyond what was there; 0 where nobody looked.
    """

    start: float
    end: float
    rows: int
    transient: int = 0


@dataclass(frozen=True)
class Facts:
    """What the calls of a node were about.

    Attributes:
        given, made: rows of the last call.
        given_bytes, made_bytes: field -> bytes of it in all of these rows.
        lengths: tokens of each sequence that was made, in all calls; empty where none are.
    """

    given: int = 0
    made: int = 0
    given_bytes: Mapping[str, int] = field(default_factory=dict)
    made_bytes: Mapping[str, int] = field(default_factory=dict)
    lengths: tuple[int, ...] = ()


def watch(worker: Worker, stages: Sequence[str]) -> None:
    """From now on the worker keeps what these stages are given and make."""
    kept = _SEEN.setdefault(id(worker), {})
    for stage in stages:
        kept[stage] = []
        setattr(worker, stage, _watched(getattr(worker, stage), kept[stage]))


def _watched(method: Callable[..., Any], kept: list[Seen]) -> Callable[..., Any]:
    def call(rows: Batch | Iterable[Batch], **options: Any) -> Any:
        seen = Seen([], options)
        kept.append(seen)
        if isinstance(rows, Batch):
            seen.given.append(rows)
            made = method(rows, **options)
        else:
            made = method(_through(rows, seen.given), **options)
        if isinstance(made, GeneratorType):
            return _through(made, seen.made)
        if made is not None:
            seen.made.append(made)
        return made

    return call


def _through(batches: Iterable[Batch], into: list[Batch]) -> Iterator[Batch]:
    for batch in batches:
        into.append(batch)
        yield batch


def facts(worker: Worker, which: Which) -> Facts:
    """What the calls of a node were about, up to now."""
    calls = _SEEN[id(worker)][which.stage][which.number :: which.each]
    given, made = Batch.concat(calls[-1].given), Batch.concat(calls[-1].made)
    lengths = [length for seen in calls for batch in seen.made for length in _lengths(batch)]
    return Facts(given.n, made.n, _sizes(given), _sizes(made), tuple(lengths))


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
        look: at memory; the call then takes longer.
    """
    seen = _SEEN[id(worker)][which.stage][which.number :: which.each][-1]
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
        found.append(Took(start, end, batch.n, gauge.transient if gauge else 0))
    return found


def part_of(batch: Batch, rows: int, unit: int, turn: int) -> Batch:
    """Some rows of a batch, as tensors of their own; other turns take the next ones, and begin anew at its end."""
    rows = min(rows, batch.n)
    places = (batch.n - rows) // unit + 1
    first = turn * max(rows // unit, 1) % places * unit
    return batch.select(range(first, first + rows))


def draw(worker: Any, source: str) -> tuple[int, int]:
    """(rows, bytes) of what a source of the host makes."""
    made = worker.sources[source].next_batch()
    return made.n, sum(_sizes(made).values())


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
