"""A workflow and a cost model -> the problem that the planner solves. Pure.

A stage works on rows as they come where nothing that it depends on needs all rows first (``stream``); else it waits for
a whole iteration (``rest``). Sending and receiving weights is work of the latter kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rlinf.errors import PlacementError
from rlinf.m2flow.graph import TRAIN, Graph, Node, WorkerSpec
from rlinf.m2flow.rows import grouped
from rlinf.scheduler.cost import CostModel
from rlinf.scheduler.problem import Option, Part, Problem

MANY = 16  # sizes of a group; of more, those that part rows evenly


def problem(
    graph: Graph,
    model: CostModel,
    places: Mapping[str, tuple[int, ...]],
    capacity: Mapping[str, int | None],
    staleness: int = 0,
    granularities: Sequence[int] = (0,),
) -> Problem:
    """What to ask the planner.

    Args:
        graph: the workflow.
        model: of its costs.
        places: kind -> indices of its devices.
        capacity: kind -> bytes of a device; ``None``: not known.
        staleness: updates that generation may be behind.
        granularities: rows that a rank takes at a time; 0: all at once.

    Raises:
        ConfigError: the profile lacks something.
        PlacementError: a group can run on none of the devices.
    """
    waiting = _waiting(graph)
    first = {node.worker: node.index for node in reversed(graph.phase(TRAIN))}
    groups = sorted(graph.workers, key=lambda name: first.get(name, len(graph.nodes)))
    parts = tuple(
        Part(
            name,
            _options(graph, model, graph.workers[name], places, waiting, granularities),
            graph.workers[name].cls.spans_tp,
        )
        for name in groups
    )
    for part in parts:
        if not part.options:
            raise PlacementError(_nowhere(graph.workers[part.name], model, places))
    count = sum(map(len, places.values()))
    return Problem(
        parts=parts,
        reads=_pairs(graph, groups, lambda node: node.index not in waiting),
        rest_reads=_pairs(graph, groups, lambda node: node.index in waiting)
        | frozenset((sync.source, sync.target) for sync in graph.syncs),
        devices=places,
        capacity=capacity,
        pieces={size: _pieces(graph, model, size, count) for size in granularities},
        staleness=staleness,
    )


def _nowhere(spec: WorkerSpec, model: CostModel, places: Mapping[str, tuple[int, ...]]) -> str:
    each = [
        f"{len(own)} x {kind} (its stages were profiled at tp={model.degrees(spec.name, kind) or 'none'})"
        for kind, own in places.items()
    ]
    return (
        f"{spec.name} (dp={spec.dp or 'as many as fit'}, tp={spec.tp}) can run on none of {', '.join(each)}: change "
        f"{spec.name}.dp or {spec.name}.tp, give more devices, or take a profile of this layout"
    )


def sizes(graph: Graph, model: CostModel) -> tuple[int, ...]:
    """Granularities worth a try: 0, and halves of what a replica's share comes to, down to one group of rows."""
    streaming = [n for n in graph.phase(TRAIN) if n.index not in _waiting(graph) and n.reads and _from_worker(graph, n)]
    if not streaming:
        return (0,)
    unit = max((graph.lineage(n.index).group for n in streaming if grouped(n.spec.unit)), default=1) or 1
    rows = max(model.rows(node) for node in streaming)
    found, size = [0], max(unit, 1)
    while size < rows:
        found.append(size)
        size *= 2
    return (0, *found[-6:]) if len(found) > 7 else tuple(found)


def _from_worker(graph: Graph, node: Node) -> bool:
    return any(graph.nodes[index].worker in graph.workers for index in graph.ancestors(node.index))


def _waiting(graph: Graph) -> set[int]:
    """Nodes that cannot begin before all rows of an iteration are there."""
    found: set[int] = set()
    for node in graph.phase(TRAIN):
        whole = node.spec.whole and not node.spec.streams
        unknown = bool(node.reads) and graph.lineage(node.index).factors is None
        if whole or unknown or found & set(node.reads.values()):
            found.add(node.index)
    return found


def _pairs(graph: Graph, groups: Sequence[str], wanted: Callable[[Node], bool]) -> frozenset[tuple[str, str]]:
    place = {name: i for i, name in enumerate(groups)}
    found = set()
    mine = [node for node in graph.phase(TRAIN) if node.worker in place and wanted(node)]
    for node in mine:
        above = graph.ancestors(node.index)
        for other in mine:
            if other.index in above and place[other.worker] < place[node.worker]:  # there and back is one way only
                found.add((other.worker, node.worker))
    return frozenset(found)


def _pieces(graph: Graph, model: CostModel, size: int, devices: int) -> int:
    """Of an iteration, where half of the devices take so many rows each at a time."""
    rows = max((model.rows(node) for node in graph.phase(TRAIN) if node.worker in graph.workers), default=1)
    return max(-(-rows // (size * max(devices // 2, 1))), 1) if size else 1


def _options(
    graph: Graph,
    model: CostModel,
    spec: WorkerSpec,
    places: Mapping[str, tuple[int, ...]],
    waiting: set[int],
    granularities: Sequence[int],
) -> tuple[Option, ...]:
    if not spec.cls.uses_device:
        return (_option(graph, model, spec, "", 1, 1, waiting, granularities),)
    found = []
    for kind, own in places.items():
        degrees = [spec.tp] if spec.tp > 1 else model.degrees(spec.name, kind)
        for tp in degrees:
            most = len(own) // tp
            replicas = [spec.dp] if spec.dp else _replicas(graph, model, spec, most)
            found += [
                _option(graph, model, spec, kind, dp, tp, waiting, granularities) for dp in replicas if dp <= most
            ]
    return tuple(found)


def _replicas(graph: Graph, model: CostModel, spec: WorkerSpec, most: int) -> list[int]:
    """Numbers of replicas up to ``most`` that each leave fewer rows to the fullest one than the number before."""
    nodes = [node for node in graph.phase(TRAIN) if node.worker == spec.name]
    found, last = [], None
    for dp in range(1, most + 1):
        shares = tuple(model.share(node, dp) for node in nodes)
        if shares != last:
            found.append(dp)
        last = shares
    if len(found) <= MANY:
        return found
    rows = [model.rows(node) for node in nodes]
    even = [dp for dp in found if all(count % dp == 0 for count in rows)]
    return even if len(even) > 1 else [dp for dp in found if dp & (dp - 1) == 0]


def _option(
    graph: Graph,
    model: CostModel,
    spec: WorkerSpec,
    kind: str,
    dp: int,
    tp: int,
    waiting: set[int],
    granularities: Sequence[int],
) -> Option:
    stream = dict.fromkeys(granularities, 0.0)
    rest, transient = 0.0, 0.0
    turns = 0
    for node in graph.phase(TRAIN):
        if node.worker != spec.name:
            continue
        turns += 1
        if node.name not in model.profile.stages:
            continue
        time, rows = model.stage(node.name, kind, dp, tp), max(model.share(node, dp), 1)
        transient = max(transient, time.memory(rows))
        if node.index in waiting:
            rest += time.seconds(rows)
            continue
        comes = _from_worker(graph, node)
        for size in granularities:
            at_once = min(size, rows) if size and comes and not node.spec.streams else rows
            left = rows % at_once
            stream[size] += rows // at_once * time.seconds(at_once) + (time.seconds(left) if left else 0.0)
    for sync in graph.syncs:
        if spec.name in (sync.source, sync.target):
            turns += 1
            point = model.sync(sync.source, sync.target, dp * tp, dp * tp)
            if point:
                rest += point.send if spec.name == sync.source else point.receive
    off, on = model.switch(spec.name, kind, dp, tp) if kind else (0.0, 0.0)
    return Option(
        kind=kind,
        dp=dp,
        tp=tp,
        stream=stream,
        rest=rest,
        resident=model.resident(spec.name, kind, dp, tp) if kind else 0,
        transient=round(transient) if kind else 0,
        swap=turns * (off + on),
    )
