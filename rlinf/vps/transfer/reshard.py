"""A plan carried out on one rank, in two phases: the new state is made beside the old, and taken when all agree."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlinf.config import VpsConfig
from rlinf.vps.digest import Cell, Digests, digest, places, total
from rlinf.vps.layout import WIDTHS
from rlinf.vps.memory import this_host
from rlinf.vps.plan import Moves, Part
from rlinf.vps.schedule import Schedule
from rlinf.vps.space import Kind
from rlinf.vps.transfer import ipc, shared
from rlinf.vps.transfer.choice import Place, choose
from rlinf.vps.transfer.copying import Copy, copies, run
from rlinf.vps.transfer.messages import Messages
from rlinf.vps.transfer.peers import Peers, TransferError


@dataclass(frozen=True)
class Report:
    """What one rank's relayout came to.

    Attributes:
        nbytes: way -> bytes that came by it.
        seconds: phase -> seconds.
        digests: of the whole state, where it was verified.
    """

    nbytes: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    digests: Digests | None = None


class Reshard:
    """One rank's part of a relayout. Kept, it can be run again: what it worked out and mapped is still there.

    Args:
        made: the schedule; the same on all ranks.
        rank: this one's number in both layouts.
        peers: all ranks of both.
        verify: compare the digests of the old and the new state, and of all places of what is tied; see `vps.verify`.
        way: for all pairs where it is possible, instead of the best for each.
        group: of torch, with all ranks by their numbers, for messages; the default one if not given.
        device: where this rank's state lies.
    """

    def __init__(
        self,
        made: Schedule,
        rank: int,
        peers: Peers,
        *,
        verify: bool = VpsConfig.verify,
        way: str = "",
        group: Any = None,
        device: str = "cpu",
    ) -> None:
        self.made, self.rank, self.peers = made, rank, peers
        self.verify, self.way, self.group, self.device = verify, way, group, device
        self.ways: list[str] = []
        self._parts: dict[int, Part] = {}
        self._copies: dict[tuple[int, int], list[Copy]] = {}
        self._attached: dict[shared.Opened, list[torch.Tensor]] = {}

    def part(self, wave: int) -> Part:
        """This rank's part of a wave."""
        if wave not in self._parts:
            self._parts[wave] = self.made.plan.part(self.rank, self.made.wave(wave))
        return self._parts[wave]

    def copies_from(self, wave: int, source: int) -> list[Copy]:
        """What this rank takes from another one's memory (or its own)."""
        if (wave, source) not in self._copies:
            part, plan = self.part(wave), self.made.plan
            moves = part.local if source == self.rank else part.receives.take(part.receives.src == source)
            self._copies[wave, source] = copies(moves, plan.src.of(source).pieces, plan.dst.of(self.rank).pieces)
        return self._copies[wave, source]

    def attached(self, told: shared.Opened) -> list[torch.Tensor]:
        """Another rank's memory. It stays mapped for the next time: to map it costs as much as to read it."""
        if told not in self._attached:
            gone = [known for known in self._attached if known.handle.pid == told.handle.pid]
            for known in gone:
                del self._attached[known]
            self._attached[told] = shared.attach(told)
        return self._attached[told]

    def run(
        self,
        old: list[torch.Tensor],
        arena: shared.Arena | None = None,
        allocate: Callable[[int, torch.dtype], torch.Tensor] | None = None,
    ) -> tuple[list[torch.Tensor], Report]:
        """Move the state. A collective of all ranks.

        Args:
            old: this rank's buffers in the layout before, flat. Untouched, but with a schedule of low memory, which
                frees them as it goes.
            arena: that they lie in, if they do: nothing needs to be copied into shared memory then.
            allocate: (elements, dtype) -> a buffer of the new layout; plain memory of the device if not given.

        Returns:
            The buffers of the new layout, and what it took. What the layout does not cover (padding) is zero.

        Raises:
            TransferError: a rank is missing, has another plan, failed, or has other digests; it is named. The old state
                is as it was (but with a schedule of low memory).
        """
        work = _Work(self, old, arena, allocate or self._allocate)
        return work.run()

    def _allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype, device=self.device)


class _Work:
    def __init__(
        self,
        reshard: Reshard,
        old: list[torch.Tensor],
        arena: shared.Arena | None,
        allocate: Callable[[int, torch.dtype], torch.Tensor],
    ) -> None:
        self.reshard, self.old, self.allocate = reshard, old, allocate
        self.arena = arena if arena is not None and arena.holds(old) else None
        self.made, self.plan, self.rank, self.peers = reshard.made, reshard.made.plan, reshard.rank, reshard.peers
        self.before = self.plan.src.of(self.rank) if self.rank < self.plan.src.world else None
        self.after = self.plan.dst.of(self.rank) if self.rank < self.plan.dst.world else None
        self.report = Report()
        self.new: list[torch.Tensor | None] = [None] * (len(self.after.buffers) if self.after else 0)
        self.sources: dict[int, list[torch.Tensor]] = {}
        self.opened: shared.Arena | None = None

    def run(self) -> tuple[list[torch.Tensor], Report]:
        ways = self._ways()
        told = self._told("publish", lambda: self._publish(set(ways)))
        start = self._told("digest", self._digest_before) if self.reshard.verify else []
        for wave in range(len(self.made.waves)):
            self._told(f"transfer {wave}", partial(self._transfer, wave, ways, told))
            if self.made.low_memory:
                self._told(f"free {wave}", partial(self._free, wave))
        if self.reshard.verify:
            end = self._told("verify", self._digest_after)
            self._compare(total(start), total([digests for digests, _ in end]))
            self._compare_places([held for _, held in end])
        # All have heard the same, so all come to the same end: no further vote is needed.
        for number, tensor in enumerate(self.new):
            if tensor is None:
                self.new[number] = self._made(number)
        return [tensor for tensor in self.new if tensor is not None], self.report

    def _ways(self) -> list[str]:
        """How each rank's state comes here. Asked once: ranks stay where they are."""
        if not self.reshard.ways:
            met = self._told("plan", lambda: (self.plan.hash, Place(this_host(), self.reshard.device)))
            if odd := [rank for rank, (known, _) in enumerate(met) if known != met[0][0]]:
                raise TransferError(f"rank {odd[0]} has another plan (its two layouts) than rank 0; nothing was moved")
            here, asked = met[self.rank][1], self.reshard.way
            self.reshard.ways = [choose(place, here, rank == self.rank, asked) for rank, (_, place) in enumerate(met)]
        return self.reshard.ways

    def _told(self, phase: str, make: Callable[[], Any]) -> list[Any]:
        """Do something, and hear what came of it on all ranks; the failure of any is the failure of all."""
        began = time.perf_counter()
        error: Exception | None = None
        try:
            mine: tuple[str, Any] = ("done", make())
        except Exception as caught:
            error, mine = caught, ("failed", f"{type(caught).__name__}: {caught}")
        everyone = self.peers.gather(phase, mine)
        self.report.seconds[phase] = time.perf_counter() - began
        failed = [(rank, what) for rank, (how, what) in enumerate(everyone) if how == "failed"]
        if failed:
            rank, what = failed[0]
            state = "the old state is as it was" if not self.made.low_memory else "part of the old state is freed"
            raise TransferError(f"phase {phase!r} failed on rank {rank}: {what} ({state})") from error
        return [what for _, what in everyone]

    def _publish(self, ways: set[str]) -> dict[str, Any]:
        told: dict[str, Any] = {}
        if self.before is None:
            return told
        if "shared" in ways:
            self.opened = shared.opened(self.before, self.old, self.arena)
            told["shared"] = self.opened.opened
        if "cuda_ipc" in ways:
            told["cuda_ipc"] = ipc.opened(self.old)
        return told

    def _transfer(self, wave: int, ways: list[str], told: list[dict[str, Any]]) -> None:
        part = self.reshard.part(wave)
        for moves in (part.receives, part.local):
            self._begin(moves)
        if len(part.local):
            self._pull(wave, self.rank, self.old)
            self._count("local", part.local)
        attaching: dict[str, Callable[[Any], list[torch.Tensor]]] = {
            "shared": self.reshard.attached,
            "cuda_ipc": partial(ipc.attach, device=self.reshard.device),
        }
        for way, attach in attaching.items():
            for source in dict.fromkeys(part.receives.src.tolist()):
                if ways[source] == way:
                    if source not in self.sources:
                        self.sources[source] = attach(told[source][way])
                    self._pull(wave, source, self.sources[source])
                    self._count(way, part.receives.take(part.receives.src == source))
        for way, device in (("nccl", self.reshard.device), ("gloo", "cpu")):
            if way in ways:
                # Both sides of a pair choose alike, so that a message has its receiver.
                served = {rank for rank, how in enumerate(ways) if how == way}
                messages = Messages(self.made, self.rank, self.reshard.group, device, self.peers.deadline_s)
                got = messages.exchange(wave, self.old, self.new, served)
                self.report.nbytes[way] = self.report.nbytes.get(way, 0) + got
        if self.reshard.device.startswith("cuda"):
            torch.cuda.synchronize(self.reshard.device)

    def _begin(self, moves: Moves) -> None:
        """Allocate the buffers that these moves are the first to write to."""
        if self.after is None or not len(moves):
            return
        state = {(t, k) for t, k in zip(moves.tensor.tolist(), moves.kind.tolist(), strict=True)}
        pieces = self.after.pieces
        for t, k, buffer in zip(pieces.tensor.tolist(), pieces.kind.tolist(), pieces.buffer.tolist(), strict=True):
            if (t, k) in state and self.new[buffer] is None:
                self.new[buffer] = self._made(buffer)

    def _made(self, number: int) -> torch.Tensor:
        assert self.after is not None
        buffer = self.after.buffers[number]
        return self.allocate(buffer.numel, getattr(torch, buffer.dtype))

    def _pull(self, wave: int, source: int, tensors: Sequence[torch.Tensor | None]) -> None:
        for copy in self.reshard.copies_from(wave, source):
            have, get = tensors[copy.source], self.new[copy.target]
            assert have is not None
            assert get is not None
            run(copy, have, get)

    def _count(self, way: str, moves: Moves) -> None:
        self.report.nbytes[way] = self.report.nbytes.get(way, 0) + int(moves.nbytes.sum())

    def _digest_before(self) -> Digests:
        """Of the old state, in the dtypes of the new."""
        if self.before is None:
            return {}
        return digest(self.plan.src, self.rank, self.old, self._narrower())

    def _digest_after(self) -> tuple[Digests, list[tuple[Cell, int]]]:
        if self.after is None:
            return {}, []
        new = [self._made(i) if tensor is None else tensor for i, tensor in enumerate(self.new)]
        return digest(self.plan.dst, self.rank, new, self._narrower()), places(self.plan.dst, self.rank, new)

    def _narrower(self) -> dict[Kind, NDArray[np.int8]]:
        """kind -> the narrower dtype of the two sides: what survives the way, and so what can be compared."""
        src, dst = self.plan.src, self.plan.dst
        sides = {kind: (src.dtypes(kind), dst.dtypes(kind)) for kind in dst.spread}
        return {kind: np.where(WIDTHS[a] <= WIDTHS[b], a, b) for kind, (a, b) in sides.items()}

    def _compare(self, old: Digests, new: Digests) -> None:
        wrong = [kind.name.lower() for kind in new if old.get(kind) != new[kind]]
        if wrong:
            raise TransferError(f"the new {', '.join(wrong)} is not the old: their digests differ ({self._left()})")
        object.__setattr__(self.report, "digests", new)

    def _compare_places(self, held: list[list[tuple[Cell, int]]]) -> None:
        """The digest counts each coordinate once; further places of tied tensors are held against it here."""
        first: dict[Cell, tuple[int, int]] = {}
        for rank, cells in enumerate(held):
            for cell, found in cells:
                known, expected = first.setdefault(cell, (rank, found))
                if found != expected:
                    kind, tensor, start, size = cell
                    name = self.plan.dst.space.tensors[tensor].name
                    raise TransferError(
                        f"{name} ({Kind(kind).name.lower()}) is tied, and its place on rank {rank} is not that on rank "
                        f"{known}: box from {list(start)} of {list(size)} differs ({self._left()})"
                    )

    def _left(self) -> str:
        return "the old state is as it was" if not self.made.low_memory else "the old state is freed"

    def _free(self, wave: int) -> None:
        """Free old buffers that no later wave reads. There is no way back from here."""
        if self.before is None:
            return
        later = {
            (int(flow.tensor[i]), int(flow.kind[i]))
            for flow in self.plan.flows
            for i in range(flow.wave(self.made.wave(wave))[1], len(flow.tensor))
        }
        pieces = self.before.pieces
        states = zip(pieces.tensor.tolist(), pieces.kind.tolist(), pieces.buffer.tolist(), strict=True)
        needed = {buffer for t, k, buffer in states if (t, k) in later}
        for number in range(len(self.old)):
            if number in needed or self.old[number].numel() == 0:
                continue
            for arena in {id(a): a for a in (self.arena, self.opened) if a is not None}.values():
                arena.free(number)
            if self.arena is None:
                self.old[number].untyped_storage().resize_(0)
            self.old[number] = self.old[number].new_empty(0)
