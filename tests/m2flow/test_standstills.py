"""Ranks of a plan that hang: whom the others wait for is what the programs' own waits say. Over threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from rlinf.batch import Batch
from rlinf.m2flow.executor import Executor, Turn
from rlinf.m2flow.graph import TRAIN, Graph, Workflow
from rlinf.m2flow.plan import Piped, Plan, Shared, Stage
from rlinf.m2flow.stage import StageSpec
from rlinf.m2flow.timeline import Doing
from rlinf.m2flow.waits import RankId, State, explain, find_chain, find_circles, find_roots, first_cause
from rlinf.worker import Worker, stage
from tests.m2flow.test_executor import Numbers, executors_of

STAGES = ("critic.values", "reference.logprobs", "gae", "actor.train", "critic.train", "actor.publish", "rollout.load")


class Gate:
    """Where one rank of a stage stays until the test lets it go."""

    def __init__(self) -> None:
        self.at = ("", 0)
        self.there, self.go = threading.Event(), threading.Event()

    def pass_by(self, place: str, rank: int) -> None:
        if (place, rank) == self.at:
            self.there.set()
            assert self.go.wait(30)


GATE = Gate()


class Rollout(Worker):
    @stage(reads=("x",), writes=("y",))
    def generate(self, batch: Batch):
        for i in range(batch.n):
            if i == 1:
                GATE.pass_by("rollout.generate", self.ctx.rank)
            yield Batch({"row_id": batch["row_id"][i : i + 1], "y": batch["x"][i : i + 1]})
        GATE.pass_by("rollout.end", self.ctx.rank)

    def receive_weights(self, version, publications) -> None:
        GATE.pass_by("rollout.load", self.ctx.rank)


class Critic(Worker):
    @stage(reads=("y",), writes=("v",))
    def values(self, batch: Batch) -> Batch:
        GATE.pass_by("critic.values", self.ctx.rank)
        return Batch({"v": batch["y"]})

    @stage(reads=("a",), whole=True, updates=True)
    def train(self, batch: Batch) -> None:
        GATE.pass_by("critic.train", self.ctx.rank)


class Reference(Worker):
    @stage(reads=("y",), writes=("r",))
    def logprobs(self, batch: Batch) -> Batch:
        GATE.pass_by("reference.logprobs", self.ctx.rank)
        return Batch({"r": batch["y"]})


class Actor(Worker):
    @stage(reads=("a",), whole=True, updates=True)
    def train(self, batch: Batch) -> None:
        GATE.pass_by("actor.train", self.ctx.rank)

    def publish_weights(self, target, inline, slot=0):
        GATE.pass_by("actor.publish", self.ctx.rank)
        return "w"


class Gae:
    __stage__ = StageSpec("gae", reads=("v", "r"), writes=("a",))

    def __call__(self, batch: Batch, metrics) -> Batch:
        GATE.pass_by("gae", 0)
        return Batch({"a": batch["v"] + batch["r"]})


def ppo_of(dp: int) -> Graph:
    flow = Workflow("w")
    rollout, critic, reference, actor = (flow.worker(cls, dp=dp) for cls in (Rollout, Critic, Reference, Actor))
    samples = reference.logprobs(critic.values(rollout.generate(flow.source(Numbers()))))
    advantages = flow.map(Gae(), samples)
    actor.train(advantages)
    critic.train(advantages)
    flow.sync(actor, rollout)
    return flow.build()


def shared(dp: int) -> Plan:
    devices = tuple(range(dp))
    groups = ("rollout", "critic", "reference", "actor")
    return Shared(tuple(Stage(group, devices, dp=dp) for group in groups))


def piped(dp: int) -> Plan:
    maker, other = tuple(range(dp)), tuple(range(dp, 2 * dp))
    rest = Shared(tuple(Stage(group, other, dp=dp) for group in ("critic", "reference", "actor")))
    return Piped((Stage("rollout", maker, dp=dp), rest), 1)


def settled(executors: list[Executor]) -> dict[RankId, State]:
    """States once nothing has moved for some time."""
    before, since = -1, time.monotonic()
    while time.monotonic() - since < 0.3:
        moves = sum(executor.moves for executor in executors)
        if moves != before:
            before, since = moves, time.monotonic()
        time.sleep(0.02)
    states = {}
    for executor in executors:
        rank = (executor.worker.ctx.group, executor.worker.ctx.rank)
        states[rank] = State(rank, executor.current, executor.wait(), executor.moves, 0.0, executor.holding)
    return states


@contextmanager
def hung(graph: Graph, plan: Plan, place: str, rank: int, devices: int) -> Iterator[dict[RankId, State]]:
    """What all ranks are at while one hangs; then it goes on, and all of them end."""
    global GATE
    GATE = gate = Gate()
    gate.at = place, rank
    executors, wire = executors_of(graph, devices, plan)
    wire.begin(TRAIN, 0)
    failures: list[BaseException] = []

    def run(executor: Executor) -> None:
        try:
            executor.run(Turn(TRAIN, 0, 0, 0, 0))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(executor,), daemon=True) for executor in executors]
    for thread in threads:
        thread.start()
    assert gate.there.wait(20), failures
    try:
        yield settled(executors)
    finally:
        gate.go.set()
        for thread in threads:
            thread.join(20)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)
    assert all(executor.wait() is None and not executor.holding for executor in executors)


@pytest.mark.parametrize("plan", [shared, piped])
@pytest.mark.parametrize("place", ["rollout.generate", "rollout.end", *STAGES])
def test_the_rank_that_hangs_is_the_only_cause_at_whatever_stage(place: str, plan: Callable[[int], Plan]) -> None:
    rank = 0 if place == "gae" else 1
    culprit = ("host" if place == "gae" else place.split(".")[0], rank)
    with hung(ppo_of(2), plan(2), place, rank, 4) as states:
        text = "\n".join(explain(states.values()))
        assert find_circles(states) == [], text
        assert find_roots(states) == [culprit], text
        assert first_cause(states) == culprit
        for state in states.values():
            assert state.wait is None or state.wait.on, text
            assert state.rank == culprit or not state.works, text
        waiting = {rank for rank, state in states.items() if state.wait}
        assert bool(waiting) == (len(find_chain(states, culprit)) > 1)


def test_a_chain_goes_by_rows_and_turns_to_the_rank_that_holds_the_device() -> None:
    with hung(ppo_of(2), shared(2), "critic.values", 1, 2) as states:
        lines = explain(states.values())
        turn = states["reference", 0].wait
        assert turn is not None
        assert (turn.doing, turn.what, turn.on) == (Doing.LEASE, "its turn on device 0-1", (("critic", 1),))
    assert lines[0] == "all that waits, waits in the end for critic rank 1, which is in critic.values"
    assert "  reference rank 0 waits for its turn on device 0-1, held by critic rank 1" in lines
    assert "  critic rank 0 waits for rows of host.gae for critic.train from host rank 0" in lines


def test_weights_and_readers_are_waited_for_by_name() -> None:
    with hung(ppo_of(2), shared(2), "actor.publish", 1, 2) as states:
        for rank in (0, 1):
            wait = states["rollout", rank].wait
            assert wait is not None
            assert wait.on == (("actor", 1),)
