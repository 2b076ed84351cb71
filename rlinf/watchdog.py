"""The watchdog: when nothing moves any more, it says who waits for what, and in the end ends the run.

It looks at the ranks a few times within ``stall_s``, from the driver's own tick. What counts as a movement stands in
`rlinf.m2flow.waits`: an operation, a message, progress, or CPU time of a rank that is at work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from rlinf.failure import Failure, RunFailed
from rlinf.m2flow.waits import RankId, State, explain, find_circles, find_roots, first_cause, name
from rlinf.vitals import Stacks

LOOKS = 4  # within the time after which a standstill is one
ANSWER_S = 5.0  # a rank that does not say how it is within this is asked for at its node
SHOWN = 16  # ranks that are shown to a person; the file has all


@dataclass(frozen=True)
class Seat:
    """Where a rank is.

    Attributes:
        actor: its `RankHost`.
        hold: the `NodeHold` of its node.
        node, pid: host name and process.
    """

    actor: Any
    hold: Any
    node: str
    pid: int


class Ranks(Protocol):
    """Whom the watchdog looks at; the real ones are `RayRanks`."""

    def states(self) -> dict[RankId, State]:
        """Of all ranks. Of a silent one, only its CPU seconds are known."""
        ...

    def stacks(self) -> dict[RankId, Stacks]: ...
    def place(self, rank: RankId) -> tuple[str, int]:
        """(host name, pid)."""
        ...


@dataclass
class RayRanks:
    """Ranks are asked themselves, all at once; those that do not answer are looked at by their nodes."""

    seats: Mapping[RankId, Seat]

    def states(self) -> dict[RankId, State]:
        found = self._answers({rank: seat.actor.state.remote() for rank, seat in self.seats.items()})
        used = self._from_outside("cpu_seconds", found)
        return found | {rank: State(rank, "", None, 0, cpu_s, silent=True) for rank, cpu_s in used.items()}

    def stacks(self) -> dict[RankId, Stacks]:
        found = self._answers({rank: seat.actor.stacks.remote() for rank, seat in self.seats.items()})
        return found | self._from_outside("stacks", found)

    def place(self, rank: RankId) -> tuple[str, int]:
        return self.seats[rank].node, self.seats[rank].pid

    def _from_outside(self, method: str, found: Mapping[RankId, Any]) -> dict[RankId, Any]:
        """What nodes say of the ranks that have not answered."""
        silent: dict[Any, list[RankId]] = {}
        for rank, seat in self.seats.items():
            if rank not in found:
                silent.setdefault(seat.hold, []).append(rank)
        calls = {
            hold: getattr(hold, method).remote([self.seats[rank].pid for rank in ranks])
            for hold, ranks in silent.items()
        }
        answers = self._answers(calls)
        unknown: Any = 0.0 if method == "cpu_seconds" else Stacks("its node does not answer", "")
        return {
            rank: value
            for hold, ranks in silent.items()
            for rank, value in zip(ranks, answers.get(hold, [unknown] * len(ranks)), strict=True)
        }

    @staticmethod
    def _answers(calls: Mapping[Any, Any]) -> dict[Any, Any]:
        """What is answered in time; those that are gone are said by their own calls."""
        import ray

        by_ref = {ref: key for key, ref in calls.items()}
        if not by_ref:
            return {}
        ready, _ = ray.wait(list(by_ref), num_returns=len(by_ref), timeout=ANSWER_S)
        found = {}
        for ref in ready:
            try:
                found[by_ref[ref]] = ray.get(ref)
            except ray.exceptions.RayError:
                continue
        return found


@dataclass
class Watchdog:
    """Call `look` again and again while ranks are at work, and `rest` when they are not.

    Attributes:
        stall_s: seconds in which nothing moves before it is told; 0: never.
        end_s: further seconds before the run ends; 0: never.
        folder: where stacks are written, as ``stall-1.txt``.
        note: shows a person some lines.
        ranks: who is looked at; ``None``: nobody yet.
        clock: seconds, of whatever beginning.
    """

    stall_s: float
    end_s: float
    folder: Path
    note: Callable[[str], None]
    ranks: Ranks | None = None
    clock: Callable[[], float] = time.monotonic
    _states: dict[RankId, State] = field(default_factory=dict)
    _looked: float = float("-inf")
    _moved: float = 0.0  # when something happened
    _alive: float = 0.0  # when that, or a rank at work used the CPU
    _since: dict[RankId, float] = field(default_factory=dict)  # since when a rank is where it is
    _computes: dict[RankId, float] = field(default_factory=dict)  # ranks at work that used the CPU, and its share
    _busy_at: float = 0.0  # after so many seconds without a word it is told that somebody computes
    _file: Path | None = None  # of the standstill that was told, and is not over

    def rest(self) -> None:
        """Nothing is under way: what comes next begins anew."""
        self._states, self._since, self._file = {}, {}, None
        self._looked = self._moved = self._alive = self.clock()

    def look(self) -> None:
        """See whether anything has moved.

        Raises:
            RunFailed: nothing has, for too long.
        """
        now = self.clock()
        if not self.stall_s or self.ranks is None or now - self._looked < self.stall_s / LOOKS:
            return
        self._take_in(self.ranks.states(), now)
        still, wordless = now - self._alive, now - self._moved
        if still < self.stall_s:
            if self._file is not None:
                self._file = None
                self.note("it moves again")
            if wordless < self.stall_s:
                self._busy_at = self.stall_s
            elif wordless >= self._busy_at and self._computes:
                self._busy_at = 2 * wordless
                self._tell_busy(wordless)
        elif self._file is None:
            self._tell(still)
        elif self.end_s and still > self.stall_s + self.end_s:
            raise RunFailed([self._failure(still)])

    def _take_in(self, states: Mapping[RankId, State], now: float) -> None:
        """Compare with what was seen last."""
        seconds, self._looked = now - self._looked, now
        before, self._states = self._states, {}
        if not before:
            self._moved = self._alive = now
        self._computes = {}
        for rank, state in states.items():
            last = before.get(rank)
            if state.silent:
                doing = (last.doing if last else "") or "something unknown"
                # Neither is it a movement to fall silent, nor to answer again.
                state = replace(last or state, doing=doing, wait=None, cpu_s=state.cpu_s, silent=True)
            self._states[rank] = state
            if last is None or state.moved(last):
                self._since[rank] = now
                self._moved = self._alive = now
            elif state.computed(last, seconds):
                self._computes[rank] = (state.cpu_s - last.cpu_s) / seconds
                self._alive = now

    def _seconds(self) -> dict[RankId, float]:
        return {rank: self._looked - since for rank, since in self._since.items()}

    def _tell_busy(self, wordless: float) -> None:
        """Somebody computes for long: whether too long, a person knows."""
        seconds = self._seconds()
        busy = sorted(self._computes, key=lambda rank: -seconds[rank])
        lines = [
            f"  {name(rank)} has been busy in {self._states[rank].doing} for {seconds[rank]:.0f} s, and uses "
            f"{self._computes[rank]:.0%} of a core"
            for rank in busy[:SHOWN]
        ]
        more = [f"  and {len(busy) - SHOWN} more"] if len(busy) > SHOWN else []
        head = f"no news for {wordless:.0f} s, but this is no standstill: there is work under way"
        self.note("\n".join([head, *lines, *more]))

    def _tell(self, still: float) -> None:
        assert self.ranks is not None
        seconds = self._seconds()
        stacks = self.ranks.stacks()
        self._file = path = self._next_file()
        whole = [f"{self._who(rank)}\n{found.whole}\n" for rank, found in sorted(stacks.items())]
        try:
            path.write_text("\n".join([*explain(self._states.values(), seconds), "", *whole]))
            where = f"stacks of all ranks: {path}"
        except OSError as error:
            where = f"(the stacks could not be written to {path}: {error.strerror})"
        more = f"; the run ends if it stays so for {self.end_s:g} s" if self.end_s else ""
        causes = [rank for circle in find_circles(self._states) for rank in circle] or find_roots(self._states)
        short = [f"  {name(rank)} is at {stacks[rank].short}" for rank in causes[:4] if rank in stacks]
        lines = explain(self._states.values(), seconds, SHOWN)
        self.note("\n".join([f"nothing has moved for {still:.0f} s{more}", *lines, *short, where]))

    def _next_file(self) -> Path:
        """One that no standstill of this folder has, of a run that was resumed either."""
        number = 1
        while (path := self.folder / f"stall-{number}.txt").exists():
            number += 1
        return path

    def _who(self, rank: RankId) -> str:
        assert self.ranks is not None
        node, pid = self.ranks.place(rank)
        return f"{name(rank)}, node {node}, pid {pid}"

    def _failure(self, still: float) -> Failure:
        assert self.ranks is not None
        rank = first_cause(self._states)
        node, pid = self.ranks.place(rank)
        cause = explain(self._states.values(), self._seconds())[0]
        text = (
            f"the run stands still: nothing has moved for {still:.0f} s; {cause}. Who waits for whom, with stacks: "
            f"{self._file}. If it only needs longer, raise cluster.stall_s (0: no limit), or call ctx.report in the "
            "stage"
        )
        return Failure(rank[0], rank[1], node, pid, self._states[rank].doing, text, "", time.time(), user=True)
