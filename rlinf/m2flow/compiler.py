"""Graph + plan -> one program for each worker group and phase. Pure: plain data in, plain data out.

A program is the ordered list of operations that every rank of the group runs in one iteration by itself. Leases are
numbered in the order of the workflow, so that all ranks agree on who comes first on a shared device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Union

from rlinf.errors import PlacementError
from rlinf.m2flow.graph import EVALUATE, HOST, TRAIN, Graph
from rlinf.m2flow.lease import Ticket
from rlinf.m2flow.plan import Plan, Shared, Stage, stages


@dataclass(frozen=True)
class Pull:
    """Wait for the rows that a node reads."""

    node: int
    sources: tuple[int, ...]


@dataclass(frozen=True)
class Run:
    """Run a node and push what it writes to its consumers, piece by piece."""

    node: int
    targets: tuple[int, ...]


@dataclass(frozen=True)
class Acquire:
    """Wait until it is this ticket's turn on the group's devices, and bring the worker's state there."""

    ticket: int
    onload: bool = False


@dataclass(frozen=True)
class Release:
    """Let the next ticket go on."""

    ticket: int
    offload: bool = False


@dataclass(frozen=True)
class SendWeights:
    """Send the weights to a group, unless it has this version already."""

    target: str


@dataclass(frozen=True)
class ReceiveWeights:
    """Receive the weights from a group, unless this version is here already."""

    source: str


Op = Union[Pull, Run, Acquire, Release, SendWeights, ReceiveWeights]


@dataclass(frozen=True)
class Compiled:
    """What is executed.

    Attributes:
        programs: phase -> group -> operations.
        tickets: phase -> tickets in the order in which they are granted.
        layout: group -> its stage of the plan.
    """

    programs: Mapping[str, Mapping[str, tuple[Op, ...]]]
    tickets: Mapping[str, tuple[Ticket, ...]]
    layout: Mapping[str, Stage]


def compile_plan(graph: Graph, plan: Plan) -> Compiled:
    """Compile.

    Raises:
        PlacementError: the plan leaves out a group, names one twice, or names an unknown one.
    """
    layout: dict[str, Stage] = {}
    for stage in stages(plan):
        if stage.worker in layout:
            raise PlacementError(f"the plan places {stage.worker} twice")
        if stage.devices and len(stage.devices) != stage.dp * stage.tp:
            raise PlacementError(
                f"the plan gives {stage.worker} {len(stage.devices)} devices for dp={stage.dp} x tp={stage.tp}"
            )
        layout[stage.worker] = stage
    if set(layout) != set(graph.workers):
        odd = sorted(set(layout) ^ set(graph.workers))
        raise PlacementError(f"plan and workflow name different workers: {odd}")
    layout[HOST] = Stage(HOST, ())
    swapped = _swapped(plan)
    programs, tickets = {}, {}
    for phase in (TRAIN, EVALUATE):
        programs[phase], tickets[phase] = _phase(graph, phase, layout, swapped)
    return Compiled(programs, tickets, layout)


def _swapped(plan: Plan, inside: bool = False) -> frozenset[str]:
    if isinstance(plan, Stage):
        return frozenset({plan.worker}) if inside and plan.devices else frozenset()
    assert isinstance(plan, Shared)
    return frozenset().union(*(_swapped(part, inside or plan.swap) for part in plan.parts))


def _phase(
    graph: Graph, phase: str, layout: Mapping[str, Stage], swapped: frozenset[str]
) -> tuple[dict[str, tuple[Op, ...]], tuple[Ticket, ...]]:
    nodes = graph.phase(phase)
    programs: dict[str, list[Op]] = {group: [] for group in layout}
    tickets: list[Ticket] = []
    targets: dict[int, list[int]] = {node.index: [] for node in nodes}
    for node in nodes:
        for source in sorted(set(node.reads.values())):
            targets[source].append(node.index)

    def ticket(*groups: str) -> int:
        devices = frozenset(device for group in groups for device in layout[group].devices)
        tickets.append(Ticket(devices, sum(layout[group].ranks for group in groups)))
        return len(tickets) - 1

    # On-policy: a receiver takes the newest weights before its first stage of the phase.
    active = {node.worker for node in nodes}
    for sync in graph.syncs:
        if sync.target in active:
            turn = ticket(sync.source, sync.target)
            for group, op in ((sync.source, SendWeights(sync.target)), (sync.target, ReceiveWeights(sync.source))):
                swap = group in swapped
                programs[group] += [Acquire(turn, swap), op, Release(turn, swap)]
    for node in nodes:
        program = programs[node.worker]
        run = Run(node.index, tuple(targets[node.index]))
        if node.reads:
            program.append(Pull(node.index, tuple(sorted(set(node.reads.values())))))
        if layout[node.worker].devices:
            turn, swap = ticket(node.worker), node.worker in swapped
            program += [Acquire(turn, swap), run, Release(turn, swap)]
        else:
            program.append(run)
    return {group: tuple(program) for group, program in programs.items()}, tuple(tickets)
