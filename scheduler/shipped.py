"""The plans that ship: collocated, disaggregated and hybrid, for any workflow at any number of devices.

A group's role follows from the graph: *makers* get weights by a sync, or make new rows; *learners* have a stage that
updates them; the rest, and learners that score rows too (a critic), *scores*. Groups without a device are in all plans.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rlinf.config import PlanConfig
from rlinf.errors import ConfigError, PlacementError
from rlinf.m2flow.compiler import check_memory, over_full
from rlinf.m2flow.graph import TRAIN, Graph, WorkerSpec
from rlinf.m2flow.plan import Piped, Plan, Shared, Stage, load_plan
from rlinf.m2flow.plan import devices as devices_of

AUTO = "auto"


def looked_for(cfg: PlanConfig, devices: int) -> bool:
    """Whether there is a choice that a profile is needed for: on one device all groups take turns, in any case."""
    return cfg.kind == AUTO and not cfg.file and devices > 1


def choose(
    graph: Graph, cfg: PlanConfig, needs: Callable[[Plan], Mapping[str, int]], capacity: Sequence[int | None]
) -> Plan:
    """The plan that a config asks for, where it needs no profile (`looked_for`).

    Args:
        graph: the workflow.
        cfg: which plan.
        needs: group -> bytes of each of its ranks under a plan, estimated.
        capacity: bytes of each device; ``None``: not known, so that everything fits.

    Raises:
        ConfigError: there is no such kind of plan, or a value that none has.
        PlacementError: it does not fit the devices.
    """
    found = _wanted(graph, cfg, needs, capacity)
    check_memory(found, needs(found), capacity)
    return found


def _wanted(
    graph: Graph, cfg: PlanConfig, needs: Callable[[Plan], Mapping[str, int]], capacity: Sequence[int | None]
) -> Plan:
    devices = len(capacity)
    if cfg.swap not in ("auto", "always", "never"):
        raise ConfigError(f"plan.swap={cfg.swap!r} is not one of auto, always, never")
    if cfg.granularity < 0 or cfg.maker_devices < 0:
        raise ConfigError(f"plan.granularity={cfg.granularity}, plan.maker_devices={cfg.maker_devices}: 0 or more")
    if cfg.file:
        plan = load_plan(Path(cfg.file))
        if over := sorted(devices_of(plan) - set(range(devices))):
            raise PlacementError(f"the plan {cfg.file} names device {over[0]}; there are {devices}, numbered from 0")
        return plan
    if cfg.kind == AUTO:
        if devices > 1:
            raise PlacementError(f"plan=auto on {devices} devices follows from a profile; it was asked for without one")
        cfg = replace(cfg, kind="collocated", granularity=cfg.granularity or _group(graph))
    if cfg.kind not in KINDS:
        raise ConfigError(
            f"plan.kind={cfg.kind!r} is not one of {', '.join((AUTO, *KINDS))}; plan.file=... takes one of your own"
        )

    stays = KINDS[cfg.kind](graph, devices, cfg, cfg.swap == "always")
    if cfg.swap == "auto" and over_full(stays, needs(stays), capacity):
        return KINDS[cfg.kind](graph, devices, cfg, True)
    return stays


def collocated(graph: Graph, devices: int, cfg: PlanConfig | None = None, swap: bool = False) -> Plan:
    """Every group on all devices that its layout can use, stages in the order of the workflow.

    ``dp`` 0 becomes ``devices // tp``. With a granularity, groups without a device work on rows as they come.

    Raises:
        PlacementError: a group asks for more devices than there are.
    """
    every = range(devices)
    if cfg is not None and cfg.granularity and (beside := _without(graph)) and _on_devices(graph):
        return Piped((_together(graph, _on_devices(graph), every, swap), *beside), cfg.granularity)
    return Shared(tuple(_place(spec, every) for spec in graph.workers.values()), swap)


def disaggregated(graph: Graph, devices: int, cfg: PlanConfig, swap: bool) -> Plan:
    """Makers on devices of their own; the others share the rest. Rows stream between the two.

    Raises:
        PlacementError: there are fewer than two devices.
    """
    makers, others = _makers(graph), [name for name in _on_devices(graph) if name not in _makers(graph)]
    if not others:
        return collocated(graph, devices, cfg, swap)
    first, second = _split(devices, cfg, "disaggregated")
    parts = (_together(graph, makers, first, swap), _together(graph, others, second, swap))
    return Piped((*parts, *_without(graph)), cfg.granularity)


def hybrid(graph: Graph, devices: int, cfg: PlanConfig, swap: bool) -> Plan:
    """First makers, and beside them what scores their rows, each on devices of its own; then learners on all.

    A workflow in which nothing scores on a device has no use for a second set beside the makers: they get all devices.

    Raises:
        PlacementError: there are fewer than two devices.
    """
    makers, scores = _makers(graph), _scores(graph)
    learners = [name for name in _on_devices(graph) if name not in makers and name not in scores]
    every = range(devices)
    if scores:
        first, second = _split(devices, cfg, "hybrid")
        apart = _apart(scores, second)
        beside = [_together(graph, names, where, swap) for names, where in apart]
        front: Plan = Piped((_together(graph, makers, first, swap), *beside), cfg.granularity)
    else:
        front = _together(graph, makers, every, swap)
    back = [_place(graph.workers[name], every) for name in learners]
    return Shared((front, *back, *_without(graph)), swap)


KINDS: dict[str, Callable[[Graph, int, PlanConfig, bool], Plan]] = {
    "collocated": collocated,
    "disaggregated": disaggregated,
    "hybrid": hybrid,
}


def _place(spec: WorkerSpec, where: Sequence[int]) -> Stage:
    """A group on the first of these devices that its layout can use."""
    if not spec.cls.uses_device:
        return Stage(spec.name, (), 1, 1)
    dp = spec.dp or max(len(where) // spec.tp, 1)
    if dp * spec.tp > len(where):
        raise PlacementError(
            f"{spec.name} asks for dp={dp} x tp={spec.tp} = {dp * spec.tp} devices, and there are {len(where)}: "
            f"lower {spec.name}.dp or {spec.name}.tp, or give more devices (on CPU nodes, "
            f"cluster.devices_per_node={dp * spec.tp} cuts a node's cores into that many)"
        )
    return Stage(spec.name, tuple(where[: dp * spec.tp]), dp, spec.tp, spec.cls.spans_tp)


def _together(graph: Graph, names: Sequence[str], where: Sequence[int], swap: bool) -> Plan:
    placed = tuple(_place(graph.workers[name], where) for name in names)
    return placed[0] if len(placed) == 1 else Shared(placed, swap)


def _apart(names: Sequence[str], where: Sequence[int]) -> list[tuple[list[str], Sequence[int]]]:
    """Groups spread over devices: each on its own where there are enough, else all on all."""
    if len(where) < len(names):
        return [(list(names), where)]
    each = len(where) // len(names)
    cuts = [where[i * each : (i + 1) * each] for i in range(len(names) - 1)] + [where[(len(names) - 1) * each :]]
    return [([name], cut) for name, cut in zip(names, cuts, strict=True)]


def _split(devices: int, cfg: PlanConfig, kind: str) -> tuple[range, range]:
    """Devices for makers, and the others."""
    first = cfg.maker_devices or devices // 2
    if devices < 2 or first >= devices:
        raise PlacementError(
            f"plan={kind} with plan.maker_devices={cfg.maker_devices} leaves nothing of {devices} "
            f"device{'s' * (devices != 1)} for the other groups: give more devices (on CPU nodes, "
            "cluster.devices_per_node=2 cuts a node's cores in two), or take plan=collocated"
        )
    return range(first), range(first, devices)


def _on_devices(graph: Graph) -> list[str]:
    return [name for name, spec in graph.workers.items() if spec.cls.uses_device]


def _without(graph: Graph) -> tuple[Stage, ...]:
    return tuple(_place(spec, ()) for spec in graph.workers.values() if not spec.cls.uses_device)


def _group(graph: Graph) -> int:
    """Rows that stay together, the most of all stages; 1 where none do. So finely can rows go to those who wait."""
    return max((graph.lineage(node.index).group for node in graph.phase(TRAIN)), default=1) or 1


def _makers(graph: Graph) -> list[str]:
    found = {sync.target for sync in graph.syncs}
    found |= {node.worker for node in graph.nodes if node.spec.expands}
    known = [name for name in _on_devices(graph) if name in found]
    return known or _on_devices(graph)[:1]


def _scores(graph: Graph) -> list[str]:
    makers = _makers(graph)
    scoring = {node.worker for node in graph.phase(TRAIN) if node.reads and node.writes and not node.spec.expands}
    return [name for name in _on_devices(graph) if name in scoring and name not in makers]
