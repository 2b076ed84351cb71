"""Plans and programs: pure, and safe under every order in which ranks run."""

from __future__ import annotations

import asyncio
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf.errors import PlacementError
from rlinf.m2flow.compiler import (
    Acquire,
    Compiled,
    Offload,
    Onload,
    Pull,
    Release,
    Run,
    SendWeights,
    Ticket,
    compile_plan,
)
from rlinf.m2flow.graph import TRAIN, Workflow
from rlinf.m2flow.lease import Ahead, LeaseBook, LeaseServer, ahead_of
from rlinf.m2flow.plan import Shared, Stage, from_dict, stages, to_dict
from rlinf.scheduler.shipped import collocated
from tests.m2flow.test_graph import Generator, Prompts, Scorer, flow_of_four


def compiled(devices: int = 1) -> Compiled:
    graph = flow_of_four().build()
    return compile_plan(graph, collocated(graph, devices))


def test_each_node_runs_once_and_after_a_pull_from_all_it_reads() -> None:
    graph = flow_of_four().build()
    programs = compile_plan(graph, collocated(graph, 1)).programs[TRAIN]
    runs = [op.node for program in programs.values() for op in program if isinstance(op, Run)]
    assert sorted(runs) == [node.index for node in graph.nodes]
    for program in programs.values():
        pulled = set()
        for op in program:
            if isinstance(op, Pull):
                assert set(op.sources) == set(graph.nodes[op.node].reads.values())
                pulled.add(op.node)
            if isinstance(op, Run) and graph.nodes[op.node].reads:
                assert op.node in pulled


def test_a_lease_surrounds_device_work_and_nothing_waits_for_rows_inside_it() -> None:
    for program in compiled().programs[TRAIN].values():
        held: list[int] = []
        for op in program:
            if isinstance(op, Acquire):
                assert not held
                held.append(op.ticket)
            elif isinstance(op, Release):
                assert held.pop() == op.ticket
            elif isinstance(op, Pull):
                assert not held
        assert not held


def test_weights_are_sent_before_the_receiver_runs() -> None:
    programs = compiled().programs[TRAIN]
    assert any(isinstance(op, SendWeights) for op in programs["policy"])
    kinds = [type(op).__name__ for op in programs["generator"]]
    assert kinds.index("ReceiveWeights") < kinds.index("Run")


def test_scorers_take_no_device() -> None:
    assert not any(isinstance(op, Acquire) for op in compiled().programs[TRAIN]["scorer"])


@pytest.mark.parametrize("devices", [1, 2, 1024])
@pytest.mark.parametrize("seed", range(5))
def test_programs_end_under_shuffled_timing_and_never_share_a_device(devices: int, seed: int) -> None:
    graph = flow_of_four().build()
    plan = collocated(graph, devices)
    result = compile_plan(graph, plan)
    book = LeaseBook(result.tickets[TRAIN])
    rng = random.Random(seed)
    done: dict[int, int] = {}
    at = {(g, r): 0 for g, stage in result.layout.items() for r in range(stage.ranks)}
    holders: dict[int, set[str]] = {}
    pending = list(at)
    while pending:
        able = [key for key in pending if _can(graph, result, book, at, key, done)]
        assert able, "deadlock"
        group, rank = rng.choice(able)
        op = result.programs[TRAIN][group][at[group, rank]]
        if isinstance(op, Acquire):
            for device in result.tickets[TRAIN][op.ticket].devices:
                holders.setdefault(device, set()).add(f"t{op.ticket}")
                assert len(holders[device]) == 1
        elif isinstance(op, Release):
            book.release(op.ticket, rank)
            if book.done(op.ticket):
                for device in result.tickets[TRAIN][op.ticket].devices:
                    holders[device].discard(f"t{op.ticket}")
        elif isinstance(op, Run):
            done[op.node] = done.get(op.node, 0) + 1
        at[group, rank] += 1
        pending = [key for key in pending if at[key] < len(result.programs[TRAIN][key[0]])]
    assert book.finished


def _can(graph, result, book, at, key, done) -> bool:
    op = result.programs[TRAIN][key[0]][at[key]]
    if isinstance(op, Acquire):
        return not book.blockers(op.ticket)
    if isinstance(op, Pull):
        return all(done.get(s, 0) == result.layout[graph.nodes[s].worker].ranks for s in op.sources)
    return True


@given(st.lists(st.frozensets(st.integers(0, 3), max_size=3), min_size=1, max_size=12), st.randoms())
def test_leases_are_granted_in_order_on_overlapping_devices(wanted: list[frozenset[int]], rng: random.Random) -> None:
    book = LeaseBook(tuple(Ticket(devices, 1) for devices in wanted))
    granted: list[int] = []
    waiting = set(range(len(wanted)))
    held: set[int] = set()
    while waiting or held:
        able = [t for t in waiting if not book.blockers(t)]
        if able and (not held or rng.random() < 0.5):
            ticket = rng.choice(able)
            assert all(not (wanted[ticket] & wanted[other]) for other in held)
            waiting.discard(ticket)
            held.add(ticket)
            granted.append(ticket)
        else:
            assert held, "deadlock"
            ticket = rng.choice(sorted(held))
            held.discard(ticket)
            book.release(ticket, 0)
    for device in range(4):
        turns = [t for t in granted if device in wanted[t]]
        assert all(a < b for a, b in pairwise(turns))


def test_a_rank_gives_its_own_lease_back_and_once() -> None:
    book = LeaseBook((Ticket(frozenset({0}), 2),))
    book.release(0, 1)
    assert not book.done(0)
    with pytest.raises(ValueError, match="given back by rank 1 twice"):
        book.release(0, 1)
    with pytest.raises(ValueError, match="by rank 2; it is for ranks 0 to 1"):
        book.release(0, 2)
    assert ahead_of(TRAIN, book, 0) == Ahead(TRAIN, 0, (0,))
    book.release(0, 0)
    assert book.done(0)


def test_a_turn_waits_for_those_of_earlier_executions_that_have_not_given_back() -> None:
    server = LeaseServer({TRAIN: (Ticket(frozenset({0, 1}), 2), Ticket(frozenset({1}), 1))})
    for execution in (1, 2):
        server.begin(TRAIN, execution)
    asyncio.run(server.release(1, 0, 0))
    assert server.blockers(1, 1) == [Ahead(TRAIN, 0, (1,))]
    assert server.blockers(2, 0) == [Ahead(TRAIN, 0, (1,)), Ahead(TRAIN, 1, (0,))]
    asyncio.run(server.release(1, 0, 1))
    assert server.blockers(2, 0) == [Ahead(TRAIN, 1, (0,))]
    asyncio.run(server.release(1, 1, 0))
    assert server.blockers(2, 0) == []
    assert server.blockers(1, 1) == [], "an execution that is over"


def test_a_plan_survives_a_round_trip_as_plain_data() -> None:
    plan = collocated(flow_of_four().build(), 3)
    assert from_dict(to_dict(plan)) == plan


def test_dp_zero_takes_all_devices_that_the_layout_can_use() -> None:
    flow = Workflow("w")
    flow.worker(Scorer).score(flow.worker(Generator, dp=0, tp=2).generate(flow.source(Prompts())))
    placed = {stage.worker: stage for stage in stages(collocated(flow.build(), 5))}
    assert placed["generator"] == Stage("generator", (0, 1, 2, 3), 2, 2)


def test_a_placement_wider_than_the_cluster_is_refused_with_the_remedy() -> None:
    flow = Workflow("w")
    flow.worker(Generator, dp=2, tp=2).generate(flow.source(Prompts()))
    with pytest.raises(PlacementError, match=r"generator asks for dp=2 x tp=2 = 4 devices, and there are 3.*=4"):
        collocated(flow.build(), 3)


def test_a_plan_must_place_each_worker_once() -> None:
    graph = flow_of_four().build()
    whole = collocated(graph, 1)
    with pytest.raises(PlacementError, match="judge"):
        compile_plan(graph, Shared(tuple(p for p in whole.parts if p.worker != "judge")))
    with pytest.raises(PlacementError, match="places judge twice"):
        compile_plan(graph, Shared((*whole.parts, Stage("judge", (0,)))))


def test_swapped_plans_load_and_offload_around_each_turn() -> None:
    graph = flow_of_four().build()
    programs = compile_plan(graph, Shared(collocated(graph, 1).parts, swap=True)).programs[TRAIN]
    for before, op, after in zip(programs["policy"], programs["policy"][1:], programs["policy"][2:], strict=False):
        if isinstance(before, Acquire):
            assert isinstance(op, Onload)
        if isinstance(after, Release):
            assert isinstance(op, Offload)
    assert any(isinstance(op, Onload) for op in programs["policy"])
