"""Graph + plan -> one program for each worker group and phase. Pure: plain data in, plain data out.

A program is the ordered list of operations that every rank of the group runs in one iteration by itself. Leases are
numbered in the order of the workflow (or of the plan, where that says otherwise), so that all ranks agree on who comes
first on a shared device. What the compiler accepts ends: it runs the programs on paper first (`rlinf.m2flow.simulate`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Union

from rlinf.errors import PlacementError
from rlinf.m2flow.graph import EVALUATE, HOST, TRAIN, Graph, Node
from rlinf.m2flow.lease import Ticket
from rlinf.m2flow.plan import Piped, Plan, Shared, Stage, devices, meeting, nodes, stages
from rlinf.m2flow.rows import grouped


@dataclass(frozen=True)
class Pull:
    """Wait for the first piece of the rows that a node reads; all of them where its granularity is 0."""

    node: int
    sources: tuple[int, ...]


@dataclass(frozen=True)
class Run:
    """Run a node on piece after piece until its rows end, and push what it writes to its consumers.

    A node that updates its worker steps the optimiser at the boundaries of its minibatches. A source tells
    the nodes ``tells`` which rows it has made: they take them piece by piece.
    """

    node: int
    targets: tuple[int, ...]
    tells: tuple[int, ...] = ()


@dataclass(frozen=True)
class Acquire:
    """Wait until it is this ticket's turn on the group's devices."""

    ticket: int


@dataclass(frozen=True)
class Onload:
    """Bring the worker's state to its device."""


@dataclass(frozen=True)
class Offload:
    """Take the worker's state off its device."""


@dataclass(frozen=True)
class Release:
    """Let the next ticket go on."""

    ticket: int


@dataclass(frozen=True)
class SendWeights:
    """Send the weights to a group, unless it has this version already."""

    target: str


@dataclass(frozen=True)
class ReceiveWeights:
    """Receive the weights from a group, unless this version is here already."""

    source: str


Op = Union[Pull, Run, Acquire, Onload, Offload, Release, SendWeights, ReceiveWeights]


@dataclass(frozen=True)
class Compiled:
    """What is executed.

    Attributes:
        programs: phase -> group -> operations.
        tickets: phase -> tickets in the order in which they are granted.
        layout: group -> its stage of the plan.
        granularity: node -> rows that it takes at a time; 0: all of an iteration.
        staleness: updates that the weights which make samples may be behind those in training.
        in_flight: a stage that makes rows takes newer weights over while it does, as soon as they are there.
    """

    programs: Mapping[str, Mapping[str, tuple[Op, ...]]]
    tickets: Mapping[str, tuple[Ticket, ...]]
    layout: Mapping[str, Stage]
    granularity: Mapping[int, int]
    staleness: int = 0
    in_flight: bool = False

    @property
    def swapped(self) -> frozenset[str]:
        """Groups that leave their devices between turns."""
        programs = (program for phase in self.programs.values() for program in phase.items())
        return frozenset(group for group, program in programs if any(isinstance(op, Offload) for op in program))


def compile_plan(graph: Graph, plan: Plan, staleness: int = 0, in_flight: bool = False) -> Compiled:
    """Compile.

    Raises:
        PlacementError: the plan leaves out a group, names one twice, or names an unknown one; parts that are piped
            have a device in common; a granularity cuts what must stay together; an order of turns never ends. The
            message names the stage.
    """
    from rlinf.m2flow.simulate import check_ends

    if staleness < 0:
        raise PlacementError(f"staleness is {staleness}; 0 is on-policy, k lets generation run k updates ahead")
    if in_flight and not staleness:
        raise PlacementError("weights in flight need a staleness of 1 or more: on-policy samples are of one version")
    layout = _layout(graph, plan)
    _check_piped(plan)
    granularity = {node.index: _granularity(graph, plan, layout, node) for node in graph.nodes}
    swapped = frozenset(
        stage.worker
        for node in nodes(plan)
        if isinstance(node, Shared) and node.swap
        for stage in stages(node)
        if stage.devices
    )
    order = [name for node in nodes(plan) if isinstance(node, Shared) for name in node.order]
    programs, tickets = {}, {}
    for phase in (TRAIN, EVALUATE):
        in_turn = _in_turn(graph, phase, order)
        programs[phase], tickets[phase] = _Phase(graph, layout, swapped, granularity).compile(in_turn)
    compiled = Compiled(programs, tickets, layout, granularity, staleness, in_flight)
    for phase in (TRAIN, EVALUATE):
        check_ends(graph, compiled, phase)
    return compiled


def resident_bytes(plan: Plan, needs: Mapping[str, int]) -> dict[int, int]:
    """Device -> the most bytes that lie on it at once: all that stays, and the largest of those that are swapped.

    Args:
        plan: where the groups are.
        needs: group -> bytes of each of its ranks.
    """
    if isinstance(plan, Stage):
        return dict.fromkeys(plan.devices, needs.get(plan.worker, 0))
    swaps = isinstance(plan, Shared) and plan.swap
    parts = [resident_bytes(part, needs) for part in (stages(plan) if swaps else plan.parts)]
    together = max if swaps else sum
    return {device: together(part.get(device, 0) for part in parts) for device in sorted(devices(plan))}


def over_full(plan: Plan, needs: Mapping[str, int], capacity: Sequence[int | None]) -> dict[int, int]:
    """Devices that would hold more than they can (``None``: not known), and how many bytes."""
    found = resident_bytes(plan, needs)
    return {device: size for device, size in found.items() if (most := capacity[device]) is not None and size > most}


def check_memory(plan: Plan, needs: Mapping[str, int], capacity: Sequence[int | None]) -> None:
    """Refuse a plan whose groups do not fit on their devices.

    Raises:
        PlacementError: naming the device, and the groups with their bytes.
    """
    for device, found in over_full(plan, needs, capacity).items():
        there = {stage.worker: needs.get(stage.worker, 0) for stage in stages(plan) if device in stage.devices}
        each = ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in there.items())
        raise PlacementError(
            f"device {device} would hold {found / 2**30:.2f} of {(capacity[device] or 0) / 2**30:.2f} GiB: {each}; "
            "swap what shares it (plan.swap=always, or swap: true in the plan), spread the larger ones over more "
            "devices, or use a smaller model"
        )


def _layout(graph: Graph, plan: Plan) -> dict[str, Stage]:
    layout: dict[str, Stage] = {}
    for stage in stages(plan):
        if stage.worker in layout:
            raise PlacementError(f"the plan places {stage.worker} twice")
        if stage.devices and len(stage.devices) != stage.dp * stage.tp:
            raise PlacementError(
                f"the plan gives {stage.worker} {len(stage.devices)} devices for dp={stage.dp} x tp={stage.tp}"
            )
        if len(set(stage.devices)) != len(stage.devices):
            raise PlacementError(f"the plan gives {stage.worker} a device twice: {list(stage.devices)}")
        layout[stage.worker] = stage
    if set(layout) != set(graph.workers):
        odd = sorted(set(layout) ^ set(graph.workers))
        raise PlacementError(f"plan and workflow name different workers: {odd}")
    for name, stage in layout.items():
        cls = graph.workers[name].cls
        if bool(stage.devices) != cls.uses_device:
            wants = "devices" if cls.uses_device else "no device"
            raise PlacementError(f"the plan gives {name} devices {list(stage.devices)}; {cls.__name__} needs {wants}")
        if stage.devices and stage.spans != cls.spans_tp:
            raise PlacementError(f"the plan says spans={stage.spans} of {name}; of {cls.__name__} it is {cls.spans_tp}")
    layout[HOST] = Stage(HOST, ())
    return layout


def _check_piped(plan: Plan) -> None:
    for node in nodes(plan):
        if not isinstance(node, Piped):
            continue
        owner: dict[int, Plan] = {}
        for part in node.parts:
            for device in sorted(devices(part)):
                if (other := owner.setdefault(device, part)) is not part:
                    names = [" and ".join(stage.worker for stage in stages(p)) for p in (other, part)]
                    raise PlacementError(
                        f"{names[0]} and {names[1]} are piped and both on device {device}: parts that are piped need "
                        "disjoint devices; put them under shared, or on other devices"
                    )


def _granularity(graph: Graph, plan: Plan, layout: Mapping[str, Stage], node: Node) -> int:
    """Rows that a node takes at a time: as the closest pipe says between it and those who make its rows.

    Groups without a device are in no one's way, so they take rows as finely as any pipe asks.
    """
    if not node.reads or (node.spec.whole and not node.spec.streams):
        return 0
    lineage = graph.lineage(node.index)
    if lineage.factors is None:
        return 0  # nobody knows which rows will come
    if not layout[node.worker].devices:
        found = [part.granularity for part in nodes(plan) if isinstance(part, Piped) and part.granularity]
        return min(found, default=0)
    sizes = []
    for origin in _makers(graph, layout, node):
        met = meeting(plan, origin, node.worker) if origin != node.worker else None
        if isinstance(met, Piped):
            sizes.append(met.granularity)
    size = min(filter(None, sizes), default=0)
    if size and grouped(node.spec.unit) and lineage.group and size % lineage.group:
        raise PlacementError(
            f"a granularity of {size} rows cuts the groups of {node.name}: {lineage.group} rows of a group stay "
            f"together, so it must be a multiple of {lineage.group}"
        )
    return size


def _makers(graph: Graph, layout: Mapping[str, Stage], node: Node) -> set[str]:
    """Groups with devices that make what a node reads, straight or by way of groups without."""
    found: set[str] = set()
    todo = list(node.reads.values())
    while todo:
        at = graph.nodes[todo.pop()]
        if layout[at.worker].devices:
            found.add(at.worker)
        else:
            todo.extend(at.reads.values())
    return found


def _in_turn(graph: Graph, phase: str, order: Sequence[str]) -> list[Node]:
    """A phase's nodes in the order of their turns: the workflow's, but those that are named in the order given."""
    known = {node.name: node for node in graph.nodes}
    if strange := [name for name in order if name not in known]:
        raise PlacementError(f"the plan's order names {strange[0]!r}, which is no stage; there are {sorted(known)}")
    if twice := [name for name in order if order.count(name) > 1]:
        raise PlacementError(f"the plan's order names {twice[0]} twice")
    found = list(graph.phase(phase))
    named = iter([known[name] for name in order if known[name].phase == phase])
    return [next(named) if node.name in order else node for node in found]


class _Phase:
    def __init__(
        self,
        graph: Graph,
        layout: Mapping[str, Stage],
        swapped: frozenset[str],
        granularity: Mapping[int, int],
    ) -> None:
        self.graph, self.layout, self.swapped, self.granularity = graph, layout, swapped, granularity
        self.programs: dict[str, list[Op]] = {group: [] for group in layout}
        self.tickets: list[Ticket] = []

    def compile(self, in_turn: Sequence[Node]) -> tuple[dict[str, tuple[Op, ...]], tuple[Ticket, ...]]:
        targets: dict[int, list[int]] = {node.index: [] for node in in_turn}
        tells: dict[int, list[int]] = {node.index: [] for node in in_turn}
        for node in sorted(in_turn, key=lambda node: node.index):
            for source in sorted(set(node.reads.values())):
                targets[source].append(node.index)
            if self.granularity[node.index]:
                tells[self.graph.lineage(node.index).source].append(node.index)
        active = {node.worker for node in in_turn}
        for sync in self.graph.syncs:
            if sync.target in active:
                self._sync(sync.source, sync.target)
        for node in in_turn:
            if node.reads:
                self.programs[node.worker].append(Pull(node.index, tuple(sorted(set(node.reads.values())))))
            run = Run(node.index, tuple(targets[node.index]), tuple(tells[node.index]))
            self._turn(node.worker, run)
        return {group: tuple(program) for group, program in self.programs.items()}, tuple(self.tickets)

    def _sync(self, source: str, target: str) -> None:
        """A receiver takes the weights before its first stage of the phase.

        Each has a turn of its own: what is sent lies in host memory between the two, so both need not be on a device at
        once, and a sender does not wait for a receiver that works on an earlier version.
        """
        self._turn(source, SendWeights(target))
        self._turn(target, ReceiveWeights(source))

    def _turn(self, group: str, op: Op) -> None:
        """One operation of a group, in a turn on its devices."""
        stage = self.layout[group]
        if not stage.devices:
            self.programs[group].append(op)
            return
        ticket, swap = len(self.tickets), group in self.swapped
        self.tickets.append(Ticket(frozenset(stage.devices), stage.ranks))
        before: list[Op] = [Acquire(ticket), *([Onload()] if swap else [])]
        after: list[Op] = [*([Offload()] if swap else []), Release(ticket)]
        self.programs[group] += [*before, op, *after]
