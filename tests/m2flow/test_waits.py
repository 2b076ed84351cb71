"""What a standstill is put down to."""

from __future__ import annotations

from itertools import pairwise

import networkx
from hypothesis import given
from hypothesis import strategies as st

from rlinf.m2flow.timeline import Doing
from rlinf.m2flow.waits import (
    RankId,
    State,
    Wait,
    explain,
    find_chain,
    find_circles,
    find_roots,
    first_cause,
)

RANKS: list[RankId] = [(group, rank) for group in ("a", "b", "c") for rank in (0, 1)]
GRAPHS = st.dictionaries(
    st.sampled_from(RANKS), st.lists(st.sampled_from(RANKS), max_size=3, unique=True).map(tuple), min_size=1
)


def state(rank: RankId, *on: RankId, doing: str = "", moves: int = 0, cpu: float = 0.0, **more: bool) -> State:
    wait = Wait(Doing.ROWS, f"rows for {rank[0]}", on) if on else None
    return State(rank, doing or ("wait" if on else ""), wait, moves, cpu, **more)


def graph_of(waits: dict[RankId, tuple]) -> networkx.DiGraph:
    graph = networkx.DiGraph()
    graph.add_nodes_from(waits)
    graph.add_edges_from((rank, other) for rank, on in waits.items() for other in on if other in waits)
    return graph


@given(GRAPHS)
def test_one_circle_is_found_in_each_knot_of_them_and_each_rank_waits_for_the_next(waits: dict[RankId, tuple]) -> None:
    states = {rank: state(rank, *on) for rank, on in waits.items()}
    graph = graph_of(waits)
    knots = [part for part in networkx.strongly_connected_components(graph) if graph.subgraph(part).edges]
    circles = find_circles(states)
    assert sorted(min(circle) for circle in circles) == sorted(map(min, knots))
    for circle in circles:
        assert len(set(circle)) == len(circle)
        assert all(after in waits[rank] for rank, after in pairwise((*circle, circle[0])))


@given(GRAPHS, st.sets(st.sampled_from(RANKS)))
def test_roots_wait_for_nobody_and_are_waited_for_or_at_work(waits: dict[RankId, tuple], busy: set[RankId]) -> None:
    at_work = {rank for rank in busy & set(waits) if not waits[rank]}
    states = {rank: state(rank, *on, doing="work" if rank in at_work else "") for rank, on in waits.items()}
    graph = graph_of(waits)
    roots = find_roots(states)
    assert set(roots) == {
        rank
        for rank in graph
        if not graph.out_degree(rank) and (graph.in_degree(rank) or rank in at_work or states[rank].wait)
    }
    # Whoever waits, waits in the end for one of them, or is caught in a circle.
    for rank in graph:
        if waits[rank]:
            ends = {rank, *networkx.descendants(graph, rank)}
            assert ends & set(roots) or any(ends & set(circle) for circle in find_circles(states))
    circles = find_circles(states)
    assert first_cause(states) == (circles[0][0] if circles else roots[0] if roots else min(states))


@given(GRAPHS)
def test_the_chain_to_a_root_is_the_shortest_way_of_the_farthest_rank(waits: dict[RankId, tuple]) -> None:
    states = {rank: state(rank, *on) for rank, on in waits.items()}
    graph = graph_of(waits)
    for root in find_roots(states):
        chain = find_chain(states, root)
        assert chain[-1] == root
        assert all(after in waits[rank] for rank, after in pairwise(chain))
        distances = networkx.single_source_shortest_path_length(graph.reverse(), root)
        assert len(chain) - 1 == max(distances.values())


def test_as_many_ranks_as_a_large_cluster_has_are_no_trouble() -> None:
    every = [("g", i) for i in range(20_000)]
    chain = {rank: state(rank, *every[i + 1 : i + 2]) for i, rank in enumerate(every)}
    assert find_circles(chain) == []
    assert find_chain(chain, find_roots(chain)[0]) == tuple(every)
    ring = chain | {every[-1]: state(every[-1], every[0])}
    assert find_circles(ring) == [tuple(every)]


def test_a_chain_is_told_from_its_cause() -> None:
    actor, host, critic, reference = ("actor", 0), ("host", 0), ("critic", 1), ("reference", 0)
    turn = Wait(Doing.LEASE, "its turn on device 1", (reference,))
    states = [
        state(actor, host),
        state(host, critic),
        State(critic, "wait", turn, 0, 0.0),
        state(reference, doing="reference.logprobs", holds=True),
    ]
    assert explain(states, dict.fromkeys([actor, reference], 310.0)) == [
        "all that waits, waits in the end for reference rank 0, which has been in reference.logprobs for 310 s",
        "such as actor rank 0 waits for rows for actor from host rank 0, which waits for rows for host from critic "
        "rank 1, which waits for its turn on device 1, held by reference rank 0, which has been in reference.logprobs "
        "for 310 s",
        "  reference rank 0 has been in reference.logprobs for 310 s",
        "  actor rank 0 waits for rows for actor from host rank 0",
        "  critic rank 1 waits for its turn on device 1, held by reference rank 0",
        "  host rank 0 waits for rows for host from critic rank 1",
    ]
    assert explain(states, shown=1)[-2:] == ["  reference rank 0 is in reference.logprobs", "  and 3 more"]


def test_a_turn_that_nobody_has_yet_comes_after_others() -> None:
    turn = Wait(Doing.LEASE, "its turn on device 0", (("b", 0),))
    lines = explain([State(("a", 0), "wait", turn, 0, 0.0), state(("b", 0), ("c", 0)), state(("c", 0), doing="c.x")])
    assert "  a rank 0 waits for its turn on device 0, after b rank 0" in lines


def test_a_circle_is_told_first() -> None:
    lines = explain([state(("a", 0), ("b", 0)), state(("b", 0), ("a", 0)), state(("c", 0)), state(("c", 1), ("c", 0))])
    assert lines[:2] == [
        "these wait for one another for ever: a rank 0 waits for rows for a from b rank 0, which waits for rows for b "
        "from a rank 0",
        "what else waits, waits in the end for c rank 0, which has done its part, or not begun",
    ]


def test_the_last_stage_is_the_cause_though_nobody_waits_for_it() -> None:
    states = {rank: state(rank) for rank in RANKS} | {("c", 0): state(("c", 0), doing="c.train")}
    assert first_cause(states) == ("c", 0)
    assert explain(states.values())[0] == "nobody waits for c rank 0, which is in c.train"


def test_what_was_lost_on_the_way_is_the_cause() -> None:
    lost = State(("b", 0), "wait", Wait(Doing.ROWS, "rows of a.x for b.y", ()), 0, 0.0)
    states = {("a", 0): state(("a", 0)), ("b", 0): lost, ("c", 0): state(("c", 0), ("b", 0))}
    assert find_roots(states) == [("b", 0)]
    assert "b rank 0, which waits for rows of a.x for b.y, which nobody owes it any more" in explain(states.values())[0]


def test_a_rank_at_work_lives_if_it_uses_the_cpu_and_one_that_waits_does_not() -> None:
    rank, other = ("a", 0), ("b", 0)
    assert state(rank, doing="a.x", cpu=1.5).computed(state(rank, doing="a.x", cpu=1.0), 10)
    assert not state(rank, doing="a.x", cpu=1.1).computed(state(rank, doing="a.x", cpu=1.0), 10)
    assert not state(rank, doing="a.x", cpu=0.5).computed(state(rank, doing="a.x", cpu=1.0), 10)
    assert not state(rank, cpu=9.0).computed(state(rank, cpu=1.0), 10), "it has nothing to do"
    assert not state(rank, other, cpu=9.0).computed(state(rank, other, cpu=1.0), 10)
    assert state(rank, other, moves=1).moved(state(rank, other))
    silent = state(rank, doing="a.x", cpu=9.0, silent=True)
    assert not silent.computed(state(rank, doing="a.x", cpu=1.0), 10), "they are not measured alike"
    assert silent.computed(state(rank, doing="a.x", cpu=1.0, silent=True), 10)
