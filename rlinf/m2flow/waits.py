"""Who waits for whom: what a standstill is explained by. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rlinf.m2flow.timeline import Doing

RankId = tuple[str, int]
Edges = Mapping[RankId, Collection[RankId]]
WORKS = 0.02  # CPU seconds in a second that a rank at work uses; the threads of its libraries alone use less


@dataclass(frozen=True)
class Wait:
    """What a rank waits for.

    Attributes:
        doing: the kind of wait.
        what: as it is shown, e.g. ``rows of host.gae for actor.train``.
        on: ranks all of which must go on before it ends. None: whatever it waits for was lost.
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
        moves: grows with each thing that happens on it: operations, messages that come, progress within a stage.
        cpu_s: CPU seconds that it and its children have used.
        holds: it is its turn on its devices.
        silent: it did not say so itself: it is stopped, or in native code that keeps Python's lock.
    """

    rank: RankId
    doing: str
    wait: Wait | None
    moves: int
    cpu_s: float
    holds: bool = False
    silent: bool = False

    @property
    def works(self) -> bool:
        """It does something, and waits for nobody."""
        return self.wait is None and bool(self.doing)

    def moved(self, before: State) -> bool:
        """Whether something has happened since."""
        return self.moves != before.moves

    def computed(self, before: State, seconds: float) -> bool:
        """Whether it is at work and has used the CPU since, ``seconds`` ago.

        A rank at work need not say anything for long: one that computes uses the CPU, one that hangs does not. A rank
        that waits may use some, in the threads of its libraries. What it says itself and what its node says of it
        are not measured alike.
        """
        return self.works and self.silent == before.silent and self.cpu_s - before.cpu_s > WORKS * seconds


def explain(states: Iterable[State], seconds: Mapping[RankId, float] | None = None, shown: int = 0) -> list[str]:
    """Lines: first the cause (circles, or those whom all wait for) and a chain to it, then what each rank does.

    Args:
        states: of all ranks.
        seconds: for how long each has been where it is, where that is known.
        shown: so many ranks at most; 0: all.
    """
    by_rank = {state.rank: state for state in states}
    seconds = seconds or {}
    circles, roots, awaited = find_circles(by_rank), find_roots(by_rank), _awaited(by_rank)
    lines = [f"these wait for one another for ever: {_chained(by_rank, (*c, c[0]), seconds)}" for c in circles]
    for head, those in (
        (f"{'what else' if circles else 'all that'} waits, waits in the end for", [r for r in roots if r in awaited]),
        ("nobody waits for", [r for r in roots if r not in awaited]),
    ):
        if those:
            lines.append(f"{head} {_some([f'{name(r)}, which {_at(by_rank, r, seconds)}' for r in those], '; ')}")
    if roots and len(chain := find_chain(by_rank, roots[0])) > 2:
        lines.append(f"such as {_chained(by_rank, chain, seconds)}")
    order = sorted(by_rank.values(), key=lambda state: (not state.works, state.wait is None, state.rank))
    each = [f"  {name(state.rank)} {_at(by_rank, state.rank, seconds)}" for state in order]
    return [*lines, *each[: shown or None], *([f"  and {len(each) - shown} more"] if 0 < shown < len(each) else [])]


def find_circles(states: Mapping[RankId, State]) -> list[tuple[RankId, ...]]:
    """Ranks each of which waits for the next one, and the last for the first.

    Where circles have ranks in common, one of them stands for all.
    """
    edges = _edges(states)
    found = []
    for knot in _knots(edges):
        first = min(knot)
        inside = {rank: [on for on in edges[rank] if on in knot] for rank in knot}
        found.append(_path(inside, first, {rank for rank in knot if first in inside[rank]}))
    return sorted(found)


def find_roots(states: Mapping[RankId, State]) -> list[RankId]:
    """Ranks that wait for nobody, and that others wait for or that do not come to an end themselves.

    First those that others wait for, and among them those that are at work.
    """
    awaited = _awaited(states)
    ends = [rank for rank, on in _edges(states).items() if not on]
    causes = [rank for rank in ends if rank in awaited or states[rank].wait is not None or states[rank].doing]
    return sorted(causes, key=lambda rank: (rank not in awaited, not states[rank].works, rank))


def find_chain(states: Mapping[RankId, State], root: RankId) -> tuple[RankId, ...]:
    """From the rank that is farthest from a root to the root: each waits for the next one."""
    waiting: dict[RankId, list[RankId]] = {rank: [] for rank in states}
    for rank, on in _edges(states).items():
        for other in on:
            waiting[other].append(rank)
    after = {root: root}
    todo, last = deque([root]), root
    while todo:
        last = todo.popleft()
        for rank in waiting[last]:
            if rank not in after:
                after[rank] = last
                todo.append(rank)
    path = [last]
    while path[-1] != root:
        path.append(after[path[-1]])
    return tuple(path)


def first_cause(states: Mapping[RankId, State]) -> RankId:
    """The rank that a standstill is put down to: one of a circle, else the first root, else any."""
    circles = find_circles(states)
    return circles[0][0] if circles else [*find_roots(states), *sorted(states)][0]


def name(rank: RankId) -> str:
    """``actor rank 0``."""
    return f"{rank[0]} rank {rank[1]}"


def _edges(states: Mapping[RankId, State]) -> dict[RankId, tuple[RankId, ...]]:
    return {
        rank: tuple(sorted(on for on in state.wait.on if on in states)) if state.wait else ()
        for rank, state in sorted(states.items())
    }


def _awaited(states: Mapping[RankId, State]) -> set[RankId]:
    """Ranks that others wait for."""
    return {on for others in _edges(states).values() for on in others}


def _knots(edges: Edges) -> list[set[RankId]]:
    """Strongly connected parts that hold a circle, by Kosaraju: in the order in which a walk leaves them, backwards."""
    order: list[RankId] = []
    seen: set[RankId] = set()
    for start in edges:
        if start in seen:
            continue
        seen.add(start)
        stack = [(start, iter(edges[start]))]
        while stack:
            rank, following = stack[-1]
            step = next((on for on in following if on not in seen), None)
            if step is None:
                order.append(rank)
                stack.pop()
            else:
                seen.add(step)
                stack.append((step, iter(edges[step])))
    backwards: dict[RankId, list[RankId]] = {rank: [] for rank in edges}
    for rank, others in edges.items():
        for on in others:
            backwards[on].append(rank)
    found = []
    left = set(edges)
    for start in reversed(order):
        part: set[RankId] = set()
        todo = [start]
        while todo:
            rank = todo.pop()
            if rank in left:
                left.discard(rank)
                part.add(rank)
                todo += backwards[rank]
        if len(part) > 1 or (part and start in edges[start]):
            found.append(part)
    return found


def _path(edges: Edges, start: RankId, goals: Collection[RankId]) -> tuple[RankId, ...]:
    """The shortest way from a rank to one of some others."""
    before = {start: start}
    todo = deque([start])
    while todo:
        rank = todo.popleft()
        if rank in goals:
            path = [rank]
            while path[-1] != start:
                path.append(before[path[-1]])
            return tuple(reversed(path))
        for on in edges[rank]:
            if on not in before:
                before[on] = rank
                todo.append(on)
    raise ValueError(f"no way leads from {start} to any of {sorted(goals)}")


def _chained(states: Mapping[RankId, State], path: Sequence[RankId], seconds: Mapping[RankId, float]) -> str:
    """``a waits for x from b, which waits for y from c, which is in c.z``."""
    text = name(path[0])
    for place, (rank, on) in enumerate(pairwise(path)):
        wait = states[rank].wait
        assert wait is not None
        text += f"{', which' if place else ''} waits for {wait.what}{_from(states, wait.doing, [on])}"
    return text if path[-1] == path[0] else f"{text}, which {_at(states, path[-1], seconds)}"


def _at(states: Mapping[RankId, State], rank: RankId, seconds: Mapping[RankId, float]) -> str:
    """What a rank does: ``has been in actor.train for 310 s``."""
    state = states[rank]
    if state.wait is not None:
        return f"waits for {state.wait.what}{_from(states, state.wait.doing, state.wait.on)}"
    if not state.doing:
        return "has done its part, or not begun"
    where = f"has been in {state.doing} for {seconds[rank]:.0f} s" if rank in seconds else f"is in {state.doing}"
    return f"{where}, and does not answer" if state.silent else where


def _from(states: Mapping[RankId, State], doing: Doing, on: Sequence[RankId]) -> str:
    if not on:
        return ", which nobody owes it any more"
    if doing != Doing.LEASE:
        return f" from {_some([name(rank) for rank in sorted(on)])}"
    holding = [rank for rank in sorted(on) if rank in states and states[rank].holds]
    word, ranks = ("held by", holding) if holding else ("after", sorted(on))
    return f", {word} {_some([name(rank) for rank in ranks])}"


def _some(texts: Sequence[str], joint: str = ", ", shown: int = 4) -> str:
    return joint.join(texts[:shown]) + (f" and {len(texts) - shown} more" if len(texts) > shown else "")
