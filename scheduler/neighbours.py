"""Plans for the same groups in the same layouts: what ranks that run could go on under. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, combinations, islice, product

from rlinf.m2flow.graph import TRAIN, Graph, Node
from rlinf.m2flow.plan import Piped, Plan, Shared, Stage, nodes, stages
from rlinf.m2flow.plan import devices as devices_of

MANY = 400  # plans at a time
ORDERS = 6  # of turns that are tried in one place
GROUPS = 5  # on devices; of more, only those are put together that follow one another in the workflow
Blocks = tuple[tuple[Stage, ...], ...]


def neighbours(
    graph: Graph,
    plan: Plan,
    granularities: Sequence[int] = (),
    swaps: Sequence[bool] = (),
    devices: Iterable[int] = (),
    most: int = MANY,
) -> list[Plan]:
    """Other plans for the same groups, each with the ranks that it has.

    The tree that there is; all groups in turns; groups apart, in every way that the devices allow, with rows streaming
    between them; and the same of some groups, with the others behind them in turns. Each in these granularities. Then
    all again in other orders of turns. Groups keep their devices where they can. Which of these plans the ranks that
    run can take over, their fleet knows.

    Args:
        graph: the workflow.
        plan: that runs.
        granularities: rows at a time; none: those of the plan, and all at once.
        swaps: whether groups that share devices leave them between turns; none: as in the plan.
        devices: that may be used; none: those of the plan.
        most: plans that are returned, the first ones.
    """
    own = [node.granularity for node in nodes(plan) if isinstance(node, Piped)]
    sizes = list(dict.fromkeys([*own, *(granularities or (0,))])) or [0]
    kinds = list(swaps) or [any(isinstance(node, Shared) and node.swap for node in nodes(plan))]
    forms = list(dict.fromkeys([plan, *_forms(graph, plan, sorted(set(devices) or devices_of(plan)))]))
    plain = dict.fromkeys(_with(form, size, swap) for form, size, swap in product(forms, sizes, kinds))
    turned = (other for form in plain for other in _reordered(graph, form))
    found = dict.fromkeys(islice((other for other in chain(plain, turned) if other != plan), most))
    return list(found)


def _forms(graph: Graph, plan: Plan, devices: Sequence[int]) -> Iterator[Plan]:
    """Trees with granularity 0, not swapped."""
    first = {node.worker: node.index for node in reversed(graph.phase(TRAIN))}
    placed = sorted(stages(plan), key=lambda stage: first.get(stage.worker, len(graph.nodes)))
    groups = tuple(stage for stage in placed if stage.devices)
    beside = tuple(stage for stage in placed if not stage.devices)
    in_turns = [tuple(stage for block in blocks for stage in block) for blocks in _placed([groups], devices)]
    for all_groups in in_turns:
        yield Shared((*all_groups, *beside))
        if beside and all_groups:
            yield Piped((_together(all_groups), *beside))
    for blocks in _cuts(groups):
        for put in _placed(blocks, devices):
            yield Piped((*map(_together, put), *beside))
    for front in _fronts(groups):
        rest = tuple(stage for stage in groups if stage not in front)
        for blocks in _cuts(front):
            for put in _placed(blocks, devices):
                yield Shared((Piped((*map(_together, put), *beside)), *_keep(rest, devices)))


def _fronts(groups: tuple[Stage, ...]) -> Iterator[tuple[Stage, ...]]:
    """Some of the groups, two or more and not all."""
    if len(groups) > GROUPS:
        yield from (groups[:n] for n in range(2, len(groups)))
    else:
        yield from chain.from_iterable(combinations(groups, n) for n in range(2, len(groups)))


def _cuts(groups: tuple[Stage, ...]) -> Iterator[Blocks]:
    """Ways to take groups apart, into two blocks or more."""
    if len(groups) > GROUPS:
        for at in chain.from_iterable(combinations(range(1, len(groups)), n) for n in range(1, len(groups))):
            yield tuple(groups[a:b] for a, b in zip((0, *at), (*at, len(groups)), strict=True))
        return
    yield from (blocks for blocks in _partitions(groups) if len(blocks) > 1)


def _partitions(groups: tuple[Stage, ...]) -> Iterator[Blocks]:
    if not groups:
        yield ()
        return
    first, rest = groups[0], groups[1:]
    for blocks in _partitions(rest):
        yield ((first,), *blocks)
        for i, block in enumerate(blocks):
            yield ((first, *block), *blocks[:i], *blocks[i + 1 :])


def _placed(blocks: Sequence[tuple[Stage, ...]], devices: Sequence[int]) -> list[Blocks]:
    """Blocks on disjoint devices, one way to do it; none where there are not enough."""
    wide = [max(block, key=lambda stage: len(stage.devices), default=None) for block in blocks]
    taken: set[int] = set()
    where: dict[int, tuple[int, ...]] = {}
    for i, stage in enumerate(wide):  # those that can stay do
        if stage is not None and set(stage.devices) <= set(devices) - taken:
            where[i] = stage.devices
            taken.update(stage.devices)
    for i, stage in enumerate(wide):
        if stage is not None and i not in where:
            free = [device for device in devices if device not in taken][: len(stage.devices)]
            if len(free) < len(stage.devices):
                return []
            where[i] = tuple(free)
            taken.update(free)
    return [tuple(_keep(block, where.get(i, ())) for i, block in enumerate(blocks))]


def _keep(block: Iterable[Stage], devices: Sequence[int]) -> tuple[Stage, ...]:
    """Groups on some of these devices, on those that they have where these are among them."""
    return tuple(
        stage if set(stage.devices) <= set(devices) else replace(stage, devices=tuple(devices[: len(stage.devices)]))
        for stage in block
    )


def _together(block: tuple[Stage, ...]) -> Plan:
    return block[0] if len(block) == 1 else Shared(block)


def _with(plan: Plan, size: int, swap: bool) -> Plan:
    """The same tree in another granularity, swapped or not; a swap where nothing is shared is none."""
    if isinstance(plan, Stage):
        return plan
    parts = tuple(_with(part, size, swap) for part in plan.parts)
    if isinstance(plan, Piped):
        return Piped(parts, size)
    return Shared(parts, swap and sum(bool(stage.devices) for stage in stages(plan)) > 1, plan.order)


def _reordered(graph: Graph, plan: Plan) -> Iterator[Plan]:
    """The tree with another order of turns in one of its shared nodes."""
    if isinstance(plan, Stage):
        return
    if isinstance(plan, Shared):
        inside = {stage.worker for stage in stages(plan) if stage.devices}
        turns = [node for node in graph.phase(TRAIN) if node.worker in inside]
        taken = {name for node in nodes(plan) if isinstance(node, Shared) for name in node.order}
        if not taken:  # an order within it would name the same stages twice
            usual = tuple(node.name for node in turns)
            orders = (order for order in _orders(graph, turns) if order != usual)
            yield from (replace(plan, order=order) for order in islice(orders, ORDERS))
    for i, part in enumerate(plan.parts):
        for other in _reordered(graph, part):
            yield replace(plan, parts=(*plan.parts[:i], other, *plan.parts[i + 1 :]))


def _orders(graph: Graph, turns: Sequence[Node]) -> Iterator[tuple[str, ...]]:
    """Orders in which no stage comes before what it depends on, the workflow's own first."""
    if not turns:
        yield ()
        return
    for node in turns:
        if not any(other.index in graph.ancestors(node.index) for other in turns if other is not node):
            for rest in _orders(graph, [other for other in turns if other is not node]):
                yield (node.name, *rest)
