"""What a standstill is put down to."""

from __future__ import annotations

import networkx
from hypothesis import given
from hypothesis import strategies as st

from rlinf.m2flow.timeline import Doing
from rlinf.m2flow.waits import RankId, State, Wait, explain, find_circle, find_roots

RANKS: list[RankId] = [(group, rank) for group in ("a", "b", "c") for rank in (0, 1)]


def state(rank: RankId, *on: RankId, doing: str = "", moves: int = 0, cpu: float = 0.0) -> State:
    wait = Wait(Doing.ROWS, f"rows for {rank[0]}", on) if on else None
    return State(rank, doing or ("wait" if on else ""), wait, moves, cpu)


GRAPHS = st.dictionaries(
    st.sampled_from(RANKS), st.lists(st.sampled_from(RANKS), max_size=3, unique=True).map(tuple), min_size=1
)


@given(GRAPHS)
def test_a_circle_is_found_where_there_is_one_and_each_waits_for_the_next(waits: dict[RankId, tuple]) -> None:
    states = {rank: state(rank, *on) for rank, on in waits.items()}
    graph = networkx.DiGraph([(rank, other) for rank, on in waits.items() for other in on])
    circle = find_circle(states)
    assert bool(circle) == (not networkx.is_directed_acyclic_graph(graph))
    assert all(after in waits[rank] for rank, after in zip(circle, (*circle[1:], *circle[:1]), strict=True))


@given(GRAPHS)
def test_roots_are_those_who_do_not_wait_and_are_waited_for_in_the_end(waits: dict[RankId, tuple]) -> None:
    states = {rank: state(rank, *on) for rank, on in waits.items()}
    graph = networkx.DiGraph([(rank, other) for rank, on in waits.items() for other in on])
    expected = {
        other
        for rank, on in waits.items()
        if on
        for other in networkx.descendants(graph, rank)
        if other in waits and not waits[other]
    }
    assert find_roots(states) == sorted(expected)


def test_a_chain_is_told_from_its_cause() -> None:
    actor, host, critic = ("actor", 0), ("host", 0), ("critic", 1)
    states = [state(actor, host), state(host, critic), state(critic, doing="critic.values")]
    assert explain(states) == [
        "all that waits, waits in the end for critic rank 1, which is in critic.values",
        "  critic rank 1 is in critic.values",
        "  actor rank 0 waits for rows for actor from host rank 0",
        "  host rank 0 waits for rows for host from critic rank 1",
    ]


def test_a_circle_is_told_first() -> None:
    lines = explain([state(("a", 0), ("b", 0)), state(("b", 0), ("a", 0)), state(("c", 0))])
    assert lines[0] == "these wait for one another for ever: a rank 0 -> b rank 0 -> a rank 0"
    assert "  c rank 0 has done its part" in lines


def test_a_rank_at_work_moves_if_it_uses_the_cpu_and_one_that_waits_does_not() -> None:
    rank, other = ("a", 0), ("b", 0)
    assert state(rank, doing="a.x", cpu=1.5).moved(state(rank, doing="a.x", cpu=1.0), 10)
    assert not state(rank, doing="a.x", cpu=1.1).moved(state(rank, doing="a.x", cpu=1.0), 10)
    assert not state(rank, other, cpu=9.0).moved(state(rank, other, cpu=1.0), 10)
    assert state(rank, other, moves=1).moved(state(rank, other), 10)
