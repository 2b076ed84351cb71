"""Rank processes that carry out relayouts, each told what to do and when to die."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rlinf.vps.layout import Layout
from rlinf.vps.plan import plan
from rlinf.vps.schedule import schedule
from rlinf.vps.transfer import reshard as module
from rlinf.vps.transfer.peers import Peers
from rlinf.vps.transfer.reshard import Reshard
from rlinf.vps.transfer.shared import Arena
from tests.vps.labelled import EMPTY, buffers


@dataclass(frozen=True)
class Job:
    """One relayout.

    Attributes:
        die_in: phase that ``victim`` kills itself in; ``pull``: after its first copy.
        spoil: rank that changes a value on the way.
    """

    src: Layout
    dst: Layout
    way: str = ""
    in_arena: bool = False
    low_memory: bool = False
    chunk_bytes: int = 4096
    die_in: str = ""
    victim: int = -1
    spoil: int = -1
    other_plan: int = -1
    deadline_s: float = 20.0


@dataclass(frozen=True)
class Outcome:
    """What a rank says afterwards."""

    right: bool = False  # the new state is where labels say
    error: str = ""
    old_intact: bool = True
    ways: dict[str, int] | None = None
    old_bytes: int = 0  # still held


def filled(layout: Layout, rank: int) -> list[torch.Tensor]:
    """This rank's buffers, with labels that fit their dtype."""
    if rank >= layout.world:
        return []
    mine = buffers(layout, True)[rank]
    dtypes = [getattr(torch, buffer.dtype) for buffer in layout.of(rank).buffers]
    # Labels are taken modulo a prime that every dtype of the tests holds exactly.
    return [torch.from_numpy(np.where(b == EMPTY, 0, b % 251)).to(d) for b, d in zip(mine, dtypes, strict=True)]


def carry_out(job: Job, rank: int, world: int, store: dist.Store) -> Outcome:
    src, dst = (job.dst, job.src) if rank == job.other_plan else (job.src, job.dst)
    made = schedule(plan(src, dst), low_memory=job.low_memory, chunk_bytes=job.chunk_bytes)
    old, arena = filled(job.src, rank), None
    if job.in_arena and old:
        arena = Arena(job.src.of(rank).buffers)
        for into, value in zip(arena.tensors, old, strict=True):
            into.copy_(value)
        old = list(arena.tensors)
    peers = Peers(store, rank, world, job.deadline_s)
    ordinary, copied = Peers.gather, 0

    def gather(self: Peers, phase: str, value: Any) -> list[Any]:
        if phase == job.die_in and rank == job.victim:
            os.kill(os.getpid(), signal.SIGKILL)
        return ordinary(self, phase, value)

    run = module.run

    def copy(*args: Any) -> None:
        nonlocal copied
        run(*args)
        copied += 1
        if job.die_in == "pull" and rank == job.victim:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == job.spoil and copied == 1:
            args[2].view(-1)[args[0].write[0]] += 1

    Peers.gather, module.run = gather, copy  # type: ignore[method-assign]
    try:
        new, report = Reshard(made, rank, peers, verify=True, way=job.way).run(old, arena)
    except Exception as error:
        intact = all(torch.equal(a, b) for a, b in zip(old, filled(job.src, rank), strict=True))
        return Outcome(error=f"{type(error).__name__}: {error}", old_intact=intact)
    finally:
        Peers.gather, module.run = ordinary, run  # type: ignore[method-assign]
    right = all(torch.equal(a, b) for a, b in zip(new, filled(job.dst, rank), strict=True))
    return Outcome(right, ways=report.nbytes, old_bytes=sum(b.untyped_storage().nbytes() for b in old if b.numel()))


def run_rank(rank: int, world: int, work: Path, pipe: Any) -> None:
    """Jobs come through the pipe, until None."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{work}/group", rank=rank, world_size=world)
    number = 0
    while (job := pipe.recv()) is not None:
        number += 1
        store = dist.FileStore(f"{work}/store-{number}", world)
        pipe.send(carry_out(job, rank, world, store))
    dist.destroy_process_group()
