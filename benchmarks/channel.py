"""A channel between two processes of one host: beside a plain copy, Ray's object path and Ray's queue, in one run.

- *large*: 256 MiB of tensors, from before the put to after the get, when the consumer can read all of them. Against a
  copy of the same bytes by one core, and against the same item as the argument of a call of a Ray actor.
- *small*: from just before the put to just after the get, one item at a time, by the clock both processes have.
- *ragged*: a nested structure with a `Batch` of 1,000 ragged sequences, likewise.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from rlinf.batch import Batch, Ragged
from rlinf.channel.broker import Broker
from rlinf.channel.member import Member
from rlinf.channel.spec import Address, ChannelSpec

SPEC = ChannelSpec("measured", ("producer",), ("consumer",))
MIB = 2**20
LARGE, TENSORS = 256 * MIB, 8
SMALL = 200  # items of a round


def large() -> dict[str, torch.Tensor]:
    return {str(i): torch.full((LARGE // TENSORS // 4,), float(i)) for i in range(TENSORS)}


def ragged() -> dict[str, Any]:
    """About 20 MB in 1,000 rows: token ids, log-probabilities, a text each."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(200, 2800, (1000,), generator=generator).tolist()
    batch = Batch(
        {
            "row_id": torch.arange(1000),
            "response_ids": Ragged.of([torch.arange(n) for n in lengths], torch.int64),
            "logprobs": Ragged.of([torch.rand(n) for n in lengths], torch.float32),
            "response": [f"text of row {i}" for i in range(1000)],
        }
    )
    return {"step": 3, "nested": [{"batch": batch}]}


def tensors_of(item: Any) -> list[torch.Tensor]:
    if isinstance(item, torch.Tensor):
        return [item]
    if isinstance(item, Ragged):
        return [item.values, item.lengths]
    if isinstance(item, dict | Batch):
        return [t for value in item.values() for t in tensors_of(value)]
    if isinstance(item, list):
        return [t for value in item[:1] for t in tensors_of(value)]
    return []


def consume(address: Address, pipe: Connection) -> None:
    """The other process: takes items, and says when it had each."""
    torch.set_num_threads(1)
    with Member(address, "consumer") as member:
        channel = member.channel(SPEC)
        for item in channel:
            got = time.monotonic()
            pipe.send((got, sum(t.numel() for t in tensors_of(item))))
            del item


class Receiver:
    """The same, as a Ray actor."""

    def take(self, item: Any) -> tuple[float, int]:
        got = time.monotonic()
        return got, sum(t.numel() for t in tensors_of(item))


def by_channel(channel: Any, pipe: Connection, item: Any) -> float:
    begun = time.monotonic()
    channel.put(item)
    got, _ = pipe.recv()
    return got - begun


def by_ray(receiver: Any, item: Any) -> float:
    import ray

    begun = time.monotonic()
    got, _ = ray.get(receiver.take.remote(item))
    return got - begun


def by_queue(queue: Any, number: int) -> float:
    begun = time.monotonic()
    queue.put(number)
    queue.get()
    return time.monotonic() - begun


def by_copy(item: Any, into: Sequence[torch.Tensor]) -> float:
    begun = time.monotonic()
    for target, source in zip(into, tensors_of(item), strict=True):
        target.copy_(source)
    return time.monotonic() - begun


def measure(rounds: int) -> dict[str, list[float]]:
    """Seconds of each way in each round; the ways take turns."""
    import ray
    from ray.util.queue import Queue

    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    found: dict[str, list[float]] = {}
    items = {"large": large(), "ragged": ragged()}
    copies = {name: [t.clone() for t in tensors_of(item)] for name, item in items.items()}
    try:
        with Broker() as broker, Member(broker.address, "producer") as member:
            process = context.Process(target=consume, args=(broker.address, there))
            process.start()
            channel = member.channel(SPEC)
            receiver = ray.remote(Receiver).options(num_cpus=0).remote()
            queue = Queue(actor_options={"num_cpus": 0})
            for number in range(rounds + 1):  # the first makes pools and connections
                row = {}
                for name, item in items.items():
                    row[f"{name} copy"] = min(by_copy(item, copies[name]) for _ in range(2))
                    row[f"{name} channel"] = by_channel(channel, here, item)
                    row[f"{name} ray"] = by_ray(receiver, item)
                row["small channel"] = statistics.median(by_channel(channel, here, i) for i in range(SMALL))
                row["small queue"] = statistics.median(by_queue(queue, i) for i in range(SMALL // 4))
                if number:
                    for name, seconds in row.items():
                        found.setdefault(name, []).append(seconds)
            channel.close()
            process.join(30)
    finally:
        ray.shutdown()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)  # a copy by one core, as the channel's is
    found = measure(args.rounds)

    def ratio(way: str, other: str) -> float:
        return statistics.median(b / a for a, b in zip(found[way], found[other], strict=True))

    table = Table(title="milliseconds: median (lowest to highest)")
    table.add_column("what")
    table.add_column("ms")
    for name, seconds in sorted(found.items()):
        ms = [1e3 * value for value in seconds]
        table.add_row(name, f"{statistics.median(ms):.3f} ({min(ms):.3f} to {max(ms):.3f})")
    Console(width=100 if not sys.stdout.isatty() else None).print(table)
    result = {
        "benchmark": "channel",
        "memcpy_ratio": ratio("large channel", "large copy"),
        "ray_ratio": ratio("large channel", "large ray"),
        "small_us": 1e6 * statistics.median(found["small channel"]),
        "queue_ratio": ratio("small channel", "small queue"),
        "ragged_memcpy_ratio": ratio("ragged channel", "ragged copy"),
    }
    print(json.dumps({key: round(v, 3) if isinstance(v, float) else v for key, v in result.items()}))


if __name__ == "__main__":
    main()
