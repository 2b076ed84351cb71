"""Graphs and programs in words, for people who read a plan. Pure."""

from __future__ import annotations

from rlinf.m2flow.compiler import (
    Acquire,
    Compiled,
    Offload,
    Onload,
    Op,
    Pull,
    ReceiveWeights,
    Release,
    Run,
    SendWeights,
)
from rlinf.m2flow.graph import EVALUATE, Graph, Node
from rlinf.m2flow.plan import ranges


def graph_lines(graph: Graph) -> list[str]:
    """Stages in order, each with where its fields come from."""
    lines = []
    for node in graph.nodes:
        lines.append(f"{node.name}{_traits(node)}")
        for edge in graph.edges:
            if edge.target == node.index:
                lines.append(f"  <- {graph.nodes[edge.source].name}: {', '.join(edge.fields)}")
    lines += [f"weights of {sync.source} -> {sync.target}, after each update" for sync in graph.syncs]
    return lines


def program_lines(graph: Graph, compiled: Compiled, phase: str) -> list[str]:
    """What each group does in one execution of a phase, in order; groups that do nothing are left out.

    Versions of weights are told by ``i``, the number of training iterations before this one.
    """
    lines = []
    for group, program in compiled.programs[phase].items():
        if program:
            stage = compiled.layout[group]
            where = f", devices {ranges(stage.devices)}" if stage.devices else ""
            lines.append(f"{group}: {stage.ranks} rank{'s' * (stage.ranks != 1)}{where}")
            lines += [f"  {_words(graph, compiled, phase, group, op)}" for op in program]
    return lines


def _traits(node: Node) -> str:
    spec, found = node.spec, []
    if spec.expands:
        found.append(f"{node.samples} row{'s' * (node.samples != 1)} of each" if node.samples else "makes new rows")
    if spec.whole:
        found.append("takes all rows at once")
    if spec.streams:
        found.append("takes rows as they come")
    if spec.updates:
        found.append("updates its worker")
    if node.starts:
        found.append(f"waits for the first {node.starts} iterations")
    if node.phase == EVALUATE:
        found.append("at evaluation")
    return f"  ({', '.join(found)})" if found else ""


def _words(graph: Graph, compiled: Compiled, phase: str, group: str, op: Op) -> str:
    def names(indices: tuple[int, ...]) -> str:
        return ", ".join(graph.nodes[i].name for i in indices)

    match op:
        case Acquire(ticket):
            turn = compiled.tickets[phase][ticket]
            return (
                f"acquire devices {ranges(sorted(turn.devices))} (turn {ticket + 1} of {len(compiled.tickets[phase])})"
            )
        case Release(ticket):
            return f"release (turn {ticket + 1})"
        case Onload():
            return "onload"
        case Offload():
            return "offload"
        case Pull(node, sources):
            size = compiled.granularity[node]
            rows = f"the first {size} rows a rank" if size else "all rows"
            return f"pull {rows} from {names(sources)}"
        case Run(node, targets, tells):
            found = graph.nodes[node]
            size = compiled.granularity[node]
            text = f"run {found.name}{f' on {size} rows at a time' if size else ''}"
            text += f", push to {names(targets)}" if targets else ""
            text += f", tell {names(tells)} which rows come" if tells else ""
            return text + (", step the optimiser at the end of each minibatch" if found.spec.updates else "")
        case SendWeights(target):
            return f"send weights to {target} at {_version(graph, group, 0)}"
        case ReceiveWeights(source):
            behind = compiled.staleness
            flight = ", newer ones between rows" if compiled.in_flight else ""
            return f"receive weights of {source} at {_version(graph, source, behind)}{flight}"


def _version(graph: Graph, group: str, behind: int) -> str:
    """Of a group's weights, in terms of the number i of iterations before this one."""
    less = 1_000_000 - graph.version(group, 1_000_000) + behind
    return f"version i-{less} (0 at least)" if less else "version i"
