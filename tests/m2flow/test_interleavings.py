"""Any plan that the compiler accepts, run in any order of its ranks' steps: it ends, uses each row once, and keeps to
the memory that it was said to need. The machine here knows the operations alone, not the simulator."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.m2flow.compiler import (
    Acquire,
    Compiled,
    Offload,
    Onload,
    Pull,
    ReceiveWeights,
    Release,
    Run,
    SendWeights,
    compile_plan,
    resident_bytes,
)
from rlinf.m2flow.graph import TRAIN, Graph
from rlinf.m2flow.lease import LeaseBook
from rlinf.m2flow.plan import Piped, Plan, Shared, Stage, nodes, stages
from tests.m2flow.test_plans import ppo_like

NEEDS = {"maker": 7, "reference": 2, "critic": 5, "actor": 11}
ROWS = 6  # of the source; the maker makes four of each


@st.composite
def placements(draw: st.DrawFn, groups: tuple[str, ...], where: tuple[int, ...]) -> Plan:
    if len(groups) == 1:
        dp = draw(st.integers(1, len(where)))
        return Stage(groups[0], where[:dp], dp)
    cut = draw(st.integers(1, len(groups) - 1))
    halves = groups[:cut], groups[cut:]
    if len(where) > 1 and draw(st.booleans()):
        at = draw(st.integers(1, len(where) - 1))
        parts = tuple(
            draw(placements(half, devices)) for half, devices in zip(halves, (where[:at], where[at:]), strict=True)
        )
        return Piped(parts, draw(st.sampled_from([0, 4, 8, 24])))
    return Shared(tuple(draw(placements(half, where)) for half in halves), draw(st.booleans()))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    groups = draw(st.permutations(list(NEEDS)))
    devices = tuple(range(draw(st.integers(1, 5))))
    return Shared((draw(placements(tuple(groups), devices)), Stage("reward", ())))


class Machine:
    """Ranks take steps in any order; a step that must wait is not taken."""

    def __init__(self, graph: Graph, compiled: Compiled, plan: Plan, rng: random.Random) -> None:
        self.graph, self.compiled, self.rng = graph, compiled, rng
        self.book = LeaseBook(compiled.tickets[TRAIN])
        self.at = {(g, r): 0 for g, stage in compiled.layout.items() for r in range(stage.ranks)}
        self.todo: dict[tuple[str, int, int], list[int]] = {}
        self.made: dict[int, set[int]] = {node.index: set() for node in graph.nodes}
        self.ended: Counter[int] = Counter()
        self.used: Counter[tuple[int, int]] = Counter()
        self.sent: Counter[str] = Counter()
        swapped = {s.worker for n in nodes(plan) if isinstance(n, Shared) and n.swap for s in stages(n) if s.devices}
        self.resident = {key for key in self.at if key[0] not in swapped and compiled.layout[key[0]].devices}
        self.most = resident_bytes(plan, NEEDS)

    def run(self) -> None:
        waiting = [key for key in self.at if self.compiled.programs[TRAIN][key[0]]]
        while waiting:
            for key in self.rng.sample(waiting, len(waiting)):
                if self.step(key):
                    break
            else:
                raise AssertionError(f"nobody can go on: {[(k, self.op(k)) for k in waiting]}")
            waiting = [key for key in waiting if self.at[key] < len(self.compiled.programs[TRAIN][key[0]])]
            self.check_memory()

    def op(self, key):
        return self.compiled.programs[TRAIN][key[0]][self.at[key]]

    def mine(self, key, index: int) -> list[int]:
        """Rows of a rank: those of the maker by the groups of four where they stay together."""
        node, stage = self.graph.nodes[index], self.compiled.layout[key[0]]
        count = ROWS if node.worker == "maker" or not node.reads else 4 * ROWS
        together = node.spec.unit in ("group", "trajectory") and node.worker != "maker"
        return [row for row in range(count) if (row // 4 if together else row) % stage.dp == key[1]]

    def there(self, index: int, rows: list[int]) -> bool:
        """Rows of a node that takes them piece by piece, or the end of all that make them."""
        for source in set(self.graph.nodes[index].reads.values()):
            all_ended = self.ended[source] == self.compiled.layout[self.graph.nodes[source].worker].ranks
            if not (all_ended or (self.compiled.granularity[index] and set(rows) <= self.made[source])):
                return False
        return True

    def piece(self, index: int, left: list[int]) -> list[int]:
        m = self.compiled.granularity[index]
        return left[:m] if m else left

    def step(self, key) -> bool:
        match self.op(key):
            case Acquire(ticket):
                if self.book.blockers(ticket):
                    return False
            case Release(ticket):
                self.book.release(ticket, key[1])
            case Onload():
                self.resident.add(key)
            case Offload():
                self.resident.discard(key)
            case SendWeights(target):
                self.sent[target] += 1
            case ReceiveWeights(source):
                if self.sent[key[0]] < self.compiled.layout[source].ranks:
                    return False
            case Pull(index):
                if not self.there(index, self.piece(index, self.mine(key, index))):
                    return False
            case Run(index):
                node = self.graph.nodes[index]
                left = self.todo.setdefault((*key, index), self.mine(key, index))
                piece = self.piece(index, left)
                if node.reads and not self.there(index, piece):
                    return False
                for row in piece:
                    self.used[index, row] += 1
                n = 4 if node.worker == "maker" else 1
                self.made[index] |= {row * n + j for row in piece for j in range(n)}
                del left[: len(piece)]
                if left:
                    return True
                self.ended[index] += 1
        self.at[key] += 1
        return True

    def check_memory(self) -> None:
        held: Counter[int] = Counter()
        for group, rank in self.resident:
            held.update(dict.fromkeys(self.compiled.layout[group].devices_of(rank), NEEDS[group]))
        assert all(size <= self.most[device] for device, size in held.items())


@settings(max_examples=150, deadline=None)
@given(plans(), st.randoms(use_true_random=False))
def test_every_accepted_plan_ends_uses_each_row_once_and_keeps_to_its_memory(plan: Plan, rng: random.Random) -> None:
    graph = ppo_like(1)
    compiled = compile_plan(graph, plan)
    machine = Machine(graph, compiled, plan, rng)
    machine.run()
    assert machine.book.finished
    for node in graph.nodes:
        count = ROWS if node.worker == "maker" or not node.reads else 4 * ROWS
        assert [machine.used[node.index, row] for row in range(count)] == [1] * count
