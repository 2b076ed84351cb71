"""The simplest plan: every group on all devices, one stage after the other."""

from __future__ import annotations

from rlinf.errors import PlacementError
from rlinf.m2flow.graph import Graph
from rlinf.m2flow.plan import Shared, Stage


def collocated(graph: Graph, devices: int) -> Shared:
    """Every group on all devices that its layout can use, stages in the order of the workflow.

    ``dp`` 0 becomes ``devices // tp``.

    Raises:
        PlacementError: a group asks for more devices than there are.
    """
    parts = []
    for spec in graph.workers.values():
        if not spec.cls.uses_device:
            parts.append(Stage(spec.name, (), 1, 1))
            continue
        dp = spec.dp or max(devices // spec.tp, 1)
        if dp * spec.tp > devices:
            raise PlacementError(
                f"{spec.name} asks for dp={dp} x tp={spec.tp} = {dp * spec.tp} devices, and there are {devices}: "
                f"lower {spec.name}.dp or {spec.name}.tp, or give more devices (on CPU nodes, "
                f"cluster.devices_per_node={dp * spec.tp} cuts a node's cores into that many)"
            )
        parts.append(Stage(spec.name, tuple(range(dp * spec.tp)), dp, spec.tp, spec.cls.spans_tp))
    return Shared(tuple(parts))
