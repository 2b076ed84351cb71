"""The watchdog: when nothing moves any more, it says who waits for what, and in the end ends the run.

It looks at the ranks a few times within ``stall_s``, from the driver's own tick. What counts as a movement stands in
`rlinf.m2flow.waits`: an operation, a message, progress, or CPU time of a rank that is at work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlinf.failure import Failure, RunFailed
from rlinf.m2flow.waits import RankId, State, explain, find_circle, find_roots, name

LOOKS = 4  # within the time after which a standstill is one
ANSWER_S = 5.0  # a rank that does not say how it is within this hangs


@dataclass
class Watchdog:
    """Call `look` again and again while ranks are at work, and `rest` when they are not.

    Attributes:
        stall_s: seconds in which nothing moves before it is told; 0: never.
        end_s: further seconds before the run ends; 0: never.
        folder: where stacks are written, as ``stall-1.txt``.
        ranks: Ray actors by rank.
        places: (host name, pid) by rank.
        note: shows a person some lines.
    """

    stall_s: float
    end_s: float
    folder: Path
    note: Callable[[str], None]
    ranks: Mapping[RankId, Any] = field(default_factory=dict)
    places: Mapping[RankId, tuple[str, int]] = field(default_factory=dict)
    _states: dict[RankId, State] = field(default_factory=dict)
    _looked: float = 0.0
    _moved: float = 0.0
    _told: int = 0
    _open: bool = False  # a standstill was told, and is not over

    def rest(self) -> None:
        """Nothing is under way: what comes next begins anew."""
        self._states, self._open = {}, False
        self._looked = self._moved = time.monotonic()

    def look(self) -> None:
        """See whether anything has moved.

        Raises:
            RunFailed: nothing has, for too long.
        """
        now = time.monotonic()
        if not self.stall_s or now - self._looked < self.stall_s / LOOKS:
            return
        seconds, self._looked = now - self._looked, now
        states = self._ask()
        if not self._states or self._any_moved(states, seconds):
            if self._open:
                self.note("it moves again")
            self._moved, self._open = now, False
        self._states = states
        still = now - self._moved
        if still < self.stall_s:
            return
        if not self._open:
            self._open = True
            self._tell(still)
        elif self.end_s and still > self.stall_s + self.end_s:
            raise RunFailed([self._failure(still)])

    def _any_moved(self, states: Mapping[RankId, State], seconds: float) -> bool:
        return any(
            before is None or state.moved(before, seconds)
            for rank, state in states.items()
            for before in (self._states.get(rank),)
        )

    def _ask(self) -> dict[RankId, State]:
        found = self._answers("state")
        silent = {rank: State(rank, "something that does not let it answer", None, 0, 0.0) for rank in self.ranks}
        return {**silent, **found}

    def _answers(self, method: str) -> dict[RankId, Any]:
        """What ranks answer in time; those that are gone are said by their own calls."""
        import ray

        calls = {getattr(actor, method).remote(): rank for rank, actor in self.ranks.items()}
        ready, _ = ray.wait(list(calls), num_returns=len(calls), timeout=ANSWER_S)
        found = {}
        for ref in ready:
            try:
                found[calls[ref]] = ray.get(ref)
            except ray.exceptions.RayError:
                continue
        return found

    def _tell(self, still: float) -> None:
        lines = explain(self._states.values())
        self._told += 1
        path = self.folder / f"stall-{self._told}.txt"
        stacks = self._answers("stacks")
        try:
            path.write_text("\n".join([*lines, "", *(text + "\n" for _, text in sorted(stacks.items()))]))
            where = f"stacks of all ranks: {path}"
        except OSError as error:
            where = f"(the stacks could not be written to {path}: {error.strerror})"
        more = f"; the run ends if it stays so for {self.end_s:g} s" if self.end_s else ""
        self.note("\n".join([f"nothing has moved for {still:.0f} s{more}", *lines, where]))

    def _failure(self, still: float) -> Failure:
        rank = first_cause(self._states)
        state = self._states[rank]
        node, pid = self.places.get(rank, ("", 0))
        doing = f"waits for {state.wait.what}" if state.wait else "does not come to an end"
        text = (
            f"the run stands still: nothing has moved for {still:.0f} s, and {name(rank)} {doing}. See stall-*.txt in "
            "output_dir for who waits for whom; if it only needs longer, raise cluster.stall_s"
        )
        return Failure(rank[0], rank[1], node, pid, state.doing, text, "", time.time(), user=True)


def first_cause(states: Mapping[RankId, State]) -> RankId:
    """The rank that a standstill is put down to: one of a circle, else one that others wait for, else any."""
    candidates: Sequence[RankId] = find_circle(states) or find_roots(states) or sorted(states)
    return candidates[0]
