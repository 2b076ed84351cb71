"""Who waits for whom: what a standstill is explained by. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rlinf.m2flow.timeline import Doing

RankId = tuple[str, int]


@dataclass(frozen=True)
class Wait:
    """What a rank waits for.

    Attributes:
        doing: the kind of wait.
        what: as it is shown, e.g. ``rows of host.gae for actor.train``.
        on: ranks of which any could end it by going on.
    """

    doing: Doing
    what: str
    on: tuple[RankId, ...]


@dataclass(frozen=True)
class State:
    """A rank at one moment.

    Attributes:
        rank: which.
        doing: the stage or operation that it is at; empty: none.
        wait: what it waits for; ``None``: it is at work, or has nothing to do.
        moves: grows with each thing that happens on it: operations, rows that come, progress within a stage.
        cpu_s: CPU seconds that it and its children have used.
    """

    rank: RankId
    doing: str
    wait: Wait | None
    moves: int
    cpu_s: float

    def moved(self, before: State, seconds: float) -> bool:
        """Whether anything has happened since, ``seconds`` ago.

        A rank at work need not say so: one that computes uses the CPU, one that hangs does not. A rank that waits may
        use some, in the threads of its libraries.
        """
        works = self.wait is None and bool(self.doing)
        return self.moves != before.moves or (works and self.cpu_s - before.cpu_s > 0.02 * seconds)


def explain(states: Iterable[State]) -> list[str]:
    """Lines: first the cause (a circle, or those whom all wait for), then what each rank does."""
    by_rank = {state.rank: state for state in states}
    circle, roots = find_circle(by_rank), find_roots(by_rank)
    lines = []
    if circle:
        lines.append(f"these wait for one another for ever: {' -> '.join(map(name, (*circle, circle[0])))}")
    if roots:
        lines.append(f"all that waits, waits in the end for {'; '.join(_at_work(by_rank, rank) for rank in roots)}")
    for state in sorted(by_rank.values(), key=lambda s: (s.wait is not None, s.rank)):
        if state.wait is not None:
            lines.append(f"  {name(state.rank)} waits for {state.wait.what}{_from(state.wait.on)}")
        elif state.doing:
            lines.append(f"  {name(state.rank)} is in {state.doing}")
        else:
            lines.append(f"  {name(state.rank)} has done its part")
    return lines


def find_circle(states: Mapping[RankId, State]) -> tuple[RankId, ...]:
    """Ranks each of which waits for the next one, and the last for the first; empty: there is no such circle."""
    done: set[RankId] = set()
    for start in sorted(states):
        path: list[RankId] = []
        stack = [(start, iter(_next(states, start)))] if start not in done else []
        if stack:
            path.append(start)
        while stack:
            rank, following = stack[-1]
            step = next(following, None)
            if step is None:
                done.add(rank)
                stack.pop()
                path.pop()
            elif step in path:
                return tuple(path[path.index(step) :])
            elif step not in done:
                path.append(step)
                stack.append((step, iter(_next(states, step))))
    return ()


def find_roots(states: Mapping[RankId, State]) -> list[RankId]:
    """Ranks that do not wait, and that others wait for, straight or by way of others."""
    reached: set[RankId] = set()
    todo = [on for state in states.values() if state.wait for on in state.wait.on]
    while todo:
        rank = todo.pop()
        if rank not in reached:
            reached.add(rank)
            todo += _next(states, rank)
    return sorted(rank for rank in reached if rank in states and states[rank].wait is None)


def name(rank: RankId) -> str:
    """``actor rank 0``."""
    return f"{rank[0]} rank {rank[1]}"


def _next(states: Mapping[RankId, State], rank: RankId) -> Sequence[RankId]:
    wait = states[rank].wait if rank in states else None
    return sorted(wait.on) if wait else ()


def _at_work(states: Mapping[RankId, State], rank: RankId) -> str:
    doing = states[rank].doing
    return f"{name(rank)}, which {f'is in {doing}' if doing else 'has done its part, or not begun'}"


def _from(on: Sequence[RankId], shown: int = 4) -> str:
    if not on:
        return ""
    more = f" and {len(on) - shown} more" if len(on) > shown else ""
    return f" from {', '.join(map(name, sorted(on)[:shown]))}{more}"
