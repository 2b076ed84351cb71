"""Moving 1.07 GB of state over four ranks of one host, beside memcpy, Gloo, torch DCP and DTensor's redistribute.

Two cases: a matrix from Shard(0) to Shard(1); weights with both moments from FSDP over 4 to tp2 x dp2. Every way moves
the same state in the same processes, in turns; seconds are those of the slowest rank, medians over the repeats.

    python benchmarks/reshard.py [--repeats 5] [--gib 1.0]

Ways: ``arena`` (the state lies in shared memory from the start, and goes to memory that is kept between relayouts),
``gloo`` (packed messages, in the schedule's rounds), ``dcp`` (save to /dev/shm, load in the new layout), ``dtensor``
(redistribute over Gloo, tensor by tensor); ``memcpy``: each rank copies as many bytes as its new state has.

Last line: JSON with ``memcpy_ratio`` (memcpy's seconds over the arena's), ``dcp_ratio`` and ``dtensor_ratio`` (theirs
over the arena's), ``peak_over_certificate`` (measured proportional memory of all ranks over old and new state as the
certificate counts them), each the worst of both cases.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import socket
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlinf.vps.layout import Buffer, ExplicitLayout, Pieces, RankLayout, dense
from rlinf.vps.plan import plan
from rlinf.vps.schedule import schedule
from rlinf.vps.space import Kind, Space, Tensor
from rlinf.vps.transfer.peers import Peers
from rlinf.vps.transfer.reshard import Reshard
from rlinf.vps.transfer.shared import Arena

WORLD = 4
CASES = ("shard0-shard1", "fsdp4-tp2xdp2")
WAYS = ("memcpy", "arena", "gloo", "dcp", "dtensor")
Box = tuple[tuple[int, int], tuple[int, int]]


def space_of(case: str, gib: float) -> Space:
    total = int(gib * 2**30 / 4)
    if case == CASES[0]:
        side = int(total**0.5) // 64 * 64
        return Space((Tensor("w", (side, side)),))
    kinds = {Kind.PARAMETER: "", Kind.EXP_AVG: "", Kind.EXP_AVG_SQ: ""}
    width = 2048
    rows = int(total / 3 / 8 / width) // 64 * 64
    shapes = [(rows, width) if i % 2 == 0 else (width, rows) for i in range(8)]
    return Space(tuple(Tensor(f"layer{i}", shape) for i, shape in enumerate(shapes)), kinds)


def box_of(case: str, shape: tuple[int, ...], number: int, rank: int, after: bool) -> Box:
    """What a rank has of a matrix: rows over four ranks before; columns, or rows or columns over two, after."""
    dim, part, parts = 0, rank, WORLD
    if after:
        dim, part, parts = (1, rank, WORLD) if case == CASES[0] else (number % 2, rank % 2, 2)
    start, size = [0, 0], list(shape)
    size[dim] = shape[dim] // parts
    start[dim] = size[dim] * part
    return (start[0], start[1]), (size[0], size[1])


def layout_of(case: str, space: Space, after: bool) -> ExplicitLayout:
    ranks = []
    for rank in range(WORLD):
        rows: list[Any] = []
        buffers = []
        for kind in sorted(space.kinds):
            for number, tensor in enumerate(space.tensors):
                start, size = box_of(case, tensor.shape, number, rank, after)
                rows.append((number, int(kind), start, size, len(buffers), 0, dense(size)))
                buffers.append(Buffer(f"{tensor.name} {kind.name}", size[0] * size[1], "float32"))
        ranks.append(RankLayout(Pieces.of(rows, 2), tuple(buffers)))
    return ExplicitLayout(space, tuple(ranks), (0,) * WORLD)


class Rank:
    """One rank's state, and the ways to move it."""

    def __init__(self, rank: int, store: dist.Store, case: str, gib: float, kept: bool) -> None:
        self.rank, self.case = rank, case
        self.space = space_of(case, gib)
        self.src, self.dst = layout_of(case, self.space, False), layout_of(case, self.space, True)
        self.made = schedule(plan(self.src, self.dst))
        self.peers = Peers(store, rank, WORLD)
        self._reshard = Reshard(self.made, rank, self.peers, verify=False)
        self.old = Arena(self.src.of(rank).buffers)
        for number, tensor in enumerate(self.old.tensors):
            tensor.copy_(torch.arange(len(tensor), dtype=torch.float32).add_(number + rank))
        self.new = Arena(self.dst.of(rank).buffers) if kept else None
        self._plain = [torch.ones(len(tensor)) for tensor in self.new.tensors] if self.new else []

    def memcpy(self) -> None:
        assert self.new is not None
        for into, source in zip(self.new.tensors, self._plain, strict=True):
            into.copy_(source)

    def arena(self) -> None:
        ready = iter(self.new.tensors) if self.new else None
        allocate = (lambda numel, dtype: next(ready)) if ready else None
        self._result, _ = self._reshard.run(list(self.old.tensors), self.old, allocate)

    def gloo(self) -> None:
        assert self.new is not None
        ready = iter(self.new.tensors)
        Reshard(self.made, self.rank, self.peers, verify=False, way="gloo").run(
            list(self.old.tensors), self.old, lambda numel, dtype: next(ready)
        )

    def dcp(self) -> None:
        import torch.distributed.checkpoint as checkpoint

        folder = f"/dev/shm/rlinf-reshard-{os.getppid()}"
        checkpoint.save(self._dtensors(False), checkpoint_id=folder)
        checkpoint.load(self._dtensors(True), checkpoint_id=folder)
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(folder)

    def dtensor(self) -> None:
        wanted = self._placements(True)
        for name, tensor in self._dtensors(False).items():
            tensor.redistribute(placements=wanted[name.split(".")[0]])

    def _placements(self, after: bool) -> dict[str, list[Any]]:
        from torch.distributed.tensor import Replicate, Shard

        found: dict[str, list[Any]] = {}
        for number, tensor in enumerate(self.space.tensors):
            dim = number % 2
            if self.case == CASES[0]:
                found[tensor.name] = [Shard(1)] if after else [Shard(0)]
            else:
                found[tensor.name] = [Replicate(), Shard(dim)] if after else [Shard(0), Shard(0)]
        return found

    def _dtensors(self, after: bool) -> dict[str, Any]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor

        if not hasattr(self, "_mesh"):
            self._mesh = init_device_mesh("cpu", (WORLD,) if self.case == CASES[0] else (2, 2))
        arena, layout = (self.new, self.dst) if after else (self.old, self.src)
        assert arena is not None
        held, found = layout.of(self.rank), {}
        for number, tensor in enumerate(arena.tensors):
            logical = self.space.tensors[int(held.pieces.tensor[number])]
            local = tensor.view(held.pieces.size[number].tolist())
            name = f"{logical.name}.{number // len(self.space.tensors)}"
            found[name] = DTensor.from_local(
                local,
                self._mesh,
                self._placements(after)[logical.name],
                run_check=False,
                shape=torch.Size(logical.shape),
                stride=dense(logical.shape),
            )
        return found

    def right(self) -> bool:
        """Three rows of a matrix of each kind of cut are as the rule says that the state was made by."""
        assert self.new is not None
        # Each rank's rows begin with its own numbers: row r of rank k holds arange(columns) + r * columns + number + k.
        for number in range(min(2, len(self.space.tensors))):
            shape = self.space.tensors[number].shape
            start, size = box_of(self.case, shape, number, self.rank, True)
            rows = torch.arange(start[0], start[0] + size[0])
            owner, local = rows // (shape[0] // WORLD), rows % (shape[0] // WORLD)
            columns = torch.arange(start[1], start[1] + size[1], dtype=torch.float32)
            found = self.new.tensors[number].view(size)
            for at in (0, size[0] // 2, size[0] - 1):
                # float32 as the state was made: the sum of an exact integer and a small one.
                base = (local[at] * shape[1] + columns.long()).float() + (number + owner[at]).float()
                if not torch.equal(found[at], base):
                    return False
        return True


def serve(rank: int, port: int, gib: float, pipe: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, WORLD, rank == 0)
    dist.init_process_group("gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=WORLD)
    state: Rank | None = None
    number = 0
    while (order := pipe.recv()) is not None:
        what, *more = order
        if what == "case":
            state = None
            number += 1
            state = Rank(rank, dist.PrefixStore(f"state {number}", store), more[0], gib, more[1])
            pipe.send(int((state.made.certificate.peak_bytes - 2 * state.made.chunk_bytes)[rank]))
            continue
        assert state is not None
        if what == "right":
            pipe.send(state.right())
            continue
        dist.barrier()
        start = time.perf_counter()
        getattr(state, what)()
        pipe.send(time.perf_counter() - start)
    dist.destroy_process_group()


def proportional(pids: list[int]) -> int:
    """Bytes of memory of these processes; what they share is counted once."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--gib", type=float, default=1.0)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pipes, processes = [], []
    for rank in range(WORLD):
        mine, theirs = context.Pipe()
        process = context.Process(target=serve, args=(rank, port, args.gib, theirs), daemon=True)
        process.start()
        pipes.append(mine)
        processes.append(process)

    def tell(*order: Any) -> list[Any]:
        for pipe in pipes:
            pipe.send(order)
        return [pipe.recv() for pipe in pipes]

    worst = {"memcpy": float("inf"), "dcp": float("inf"), "dtensor": float("inf"), "peak": 0.0}
    print(f"{'case':<14} {'way':<8} {'seconds':>8} {'GB/s':>6} {'spread':>15} {'over arena':>10}")
    for case in CASES:
        peak, promised = measured_peak(tell, case, args.gib, [process.pid or 0 for process in processes])
        tell("case", case, True)
        held = layout_of(case, space_of(case, args.gib), True)
        nbytes = sum(held.of(rank).nbytes for rank in range(WORLD))
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        for repeat in range(args.repeats + 1):
            for way in WAYS:
                seconds = max(tell(way))
                if way in ("arena", "gloo", "dcp"):
                    assert all(tell("right")), f"{way}: the new state is not the old"
                if repeat:  # the first is to warm up
                    times[way].append(seconds)
        middle = {way: statistics.median(found) for way, found in times.items()}
        for way in WAYS:
            spread = f"{min(times[way]):.3f}..{max(times[way]):.3f}"
            print(
                f"{case:<14} {way:<8} {middle[way]:>8.3f} {nbytes / middle[way] / 1e9:>6.2f} {spread:>15} "
                f"{middle[way] / middle['arena']:>9.2f}x",
                flush=True,
            )
        print(f"{case:<14} peak {peak / 2**30:.3f} GiB measured, {promised / 2**30:.3f} GiB promised", flush=True)
        for other in ("memcpy", "dcp", "dtensor"):
            worst[other] = min(worst[other], middle[other] / middle["arena"])
        worst["peak"] = max(worst["peak"], peak / promised)
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(None)
        process.join(30)
    figures = {f"{key}_ratio": worst[key] for key in ("memcpy", "dcp", "dtensor")}
    print(json.dumps({"benchmark": "reshard", **figures, "peak_over_certificate": worst["peak"]}))


def measured_peak(tell: Any, case: str, gib: float, pids: list[int]) -> tuple[int, int]:
    """(most bytes of all ranks during one relayout into new memory, what the certificate says)."""
    tell("case", CASES[0], False)  # everything that is loaded once is loaded
    tell("arena")
    promised = tell("case", case, False)
    old = layout_of(case, space_of(case, gib), False)
    before = proportional(pids) - sum(old.of(rank).nbytes for rank in range(WORLD))
    most, ended = [0], threading.Event()

    def look() -> None:
        while not ended.wait(0.01):
            most.append(proportional(pids))

    watch = threading.Thread(target=look)
    watch.start()
    tell("arena")
    most.append(proportional(pids))
    ended.set()
    watch.join()
    return max(most) - before, sum(promised)


if __name__ == "__main__":
    main()
