"""Rank processes that sync weights with one another, each on the host that it is told to be on."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

TENSORS, ROWS, COLUMNS = 60, 6, 16
VERSIONS = 3
NBYTES = TENSORS * ROWS * COLUMNS * 4


@dataclass
class Got:
    """What one reader saw of one version.

    Attributes:
        right: every element is what the senders' formula says.
        inline: sender rank by sender rank, whether it brought bytes.
        whole: tensors that could be used where the senders put them, without a copy.
        sizes: bytes of each sender's message.
    """

    right: bool
    inline: list[bool]
    whole: int
    sizes: list[int] = field(default_factory=list)


def value(version: int, tensor: int) -> torch.Tensor:
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS) + 1000 * tensor + 0.25 * version


class Wire:
    """Messages are pickled, as between hosts, and their sizes go along."""

    def __init__(self, queues: dict[tuple[str, int], Any]) -> None:
        self.queues = queues

    def send(self, group: str, ranks: list[int], key: Any, source: int, item: Any) -> None:
        data = pickle.dumps(item, protocol=5)
        for rank in ranks:
            self.queues[group, rank].put(("put", key, source, data))

    def close(self, group: str, ranks: list[int], key: Any, source: int, sent: int) -> None:
        for rank in ranks:
            self.queues[group, rank].put(("close", key, source, sent))


@contextmanager
def spend(*_: Any, **__: Any) -> Iterator[None]:
    yield


def run_rank(
    group: str, rank: int, host: str, sizes: dict[str, int], queues: dict, work: Path, found: Any, verify: bool
) -> None:
    os.environ["RLINF_HOST"] = host  # before anything asks where it is
    torch.set_num_threads(1)
    from rlinf.channel.mailbox import Mailbox
    from rlinf.m2flow.sync import WeightSync
    from rlinf.worker import RankContext

    mailbox, messages = Mailbox(), dict[tuple[int, int], int]()  # (version, sender) -> bytes

    def listen() -> None:
        while (message := queues[group, rank].get()) is not None:
            what, key, source, item = message
            if what == "put":
                messages[key[-1], source] = len(item)
                mailbox.put(key, source, pickle.loads(item))
            else:
                mailbox.close(key, source, item)

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    ctx = RankContext(group, rank, sizes[group], sizes[group], 1)
    layout: Any = {name: SimpleNamespace(ranks=count) for name, count in sizes.items()}
    worker = _sender(ctx, work, verify) if group == "sends" else _reader(ctx)
    sync = WeightSync(worker, mailbox, Wire(queues), layout, spend)
    try:
        for version in range(VERSIONS):
            if group == "sends":
                worker.version = version
                sync.send("reads", version)
            else:
                sync.greet("sends")
                sync.receive("sends", version)
                worker.got.sizes = [messages[version, sender] for sender in range(sizes["sends"])]
                found.put((rank, version, worker.got))
        if group == "sends":  # its memory lasts until the last reader is done
            list(mailbox.stream(("readers", "sends", "reads", VERSIONS), sizes["reads"]))
    except BaseException as error:
        found.put((rank, -1, f"{group} {rank}: {error!r}"))
        raise


def _sender(ctx: Any, work: Path, verify: bool) -> Any:
    from rlinf.vps.publication import Publisher, Share, space_of_tensors
    from rlinf.worker import Worker

    dist.init_process_group("gloo", init_method=f"file://{work}/group", rank=ctx.rank, world_size=ctx.world_size)

    def gather(mine: Any) -> list[Any]:
        every: list[Any] = [None] * ctx.world_size
        dist.all_gather_object(every, mine)
        return every

    def shares(version: int) -> list[Share]:
        each = ROWS // ctx.world_size
        first = each * ctx.rank
        return [Share(i, (first, 0), value(version, i)[first : first + each]) for i in range(TENSORS)]

    space = space_of_tensors({f"layer.{i:02d}.weight": value(0, i) for i in range(TENSORS)})
    publisher = Publisher(space, shares(0), ctx.rank, gather)

    class Sends(Worker):
        version = 0

        def publish_weights(self, target: str, inline: bool, slot: int = 0) -> Any:
            return publisher.publish(shares(self.version), inline=inline, verify=verify)

    return Sends(None, ctx)


def _reader(ctx: Any) -> Any:
    from rlinf.vps.memory import Memory
    from rlinf.vps.publication import joined
    from rlinf.vps.pull import Pull, whole_layout
    from rlinf.worker import Worker

    class Reads(Worker):
        got: Got

        def receive_weights(self, version: int, publications: Any) -> None:
            source = joined(publications)
            into = {t.name: torch.zeros(t.shape) for t in source.space.tensors}
            pull = Pull(source, whole_layout(source.space, into))
            handles = {each.handle for each in publications if each.inline is None}
            memories = {handle: Memory.attach(handle) for handle in handles}
            sources = [each.buffers(memories.get(each.handle)) for each in publications]
            for sender, each in enumerate(publications):
                each.verify(sender, sources[sender])
            for tensor in pull.tensors:
                pull.run(sources, {i: t.view(-1) for i, t in enumerate(into.values())}, tensor)
            right = all(torch.equal(t, value(version, i)) for i, t in enumerate(into.values()))
            whole = sum(pull.whole(sources, i, (ROWS, COLUMNS)) is not None for i in range(TENSORS))
            self.got = Got(right, [each.inline is not None for each in publications], whole)

    return Reads(None, ctx)
