"""A plan: where each worker group runs and which groups share devices. Plain data, printed and saved with the run.

A plan is a tree. `Stage` puts one group on devices in a parallel layout; `Shared` puts its parts on the same devices,
one after the other in the order of the workflow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Union

from rlinf.errors import PlacementError


@dataclass(frozen=True)
class Stage:
    """One worker group on devices (indices into the cluster's list).

    Rank ``r`` runs on ``devices[r]`` or, where a rank ``spans`` its replica (an engine that drives ``tp`` devices
    itself), on ``devices[r * tp : (r + 1) * tp]``. A group that computes on no device (scorers) has one rank and an
    empty ``devices``.
    """

    worker: str
    devices: tuple[int, ...]
    dp: int = 1
    tp: int = 1
    spans: bool = False

    @property
    def tp_ranks(self) -> int:
        """Ranks of one replica."""
        return 1 if self.spans else self.tp

    @property
    def ranks(self) -> int:
        return self.dp * self.tp_ranks

    def devices_of(self, rank: int) -> tuple[int, ...]:
        width = self.tp if self.spans else 1
        return self.devices[rank * width : (rank + 1) * width]


@dataclass(frozen=True)
class Shared:
    """Parts on the same devices, one after the other. ``swap``: only the one at work stays in device memory."""

    parts: tuple[Plan, ...]
    swap: bool = False


Plan = Union[Stage, Shared]


def stages(plan: Plan) -> Iterator[Stage]:
    """The leaves."""
    if isinstance(plan, Stage):
        yield plan
    else:
        for part in plan.parts:
            yield from stages(part)


def to_dict(plan: Plan) -> dict[str, Any]:
    if isinstance(plan, Stage):
        return {"stage": plan.worker, "devices": list(plan.devices), "dp": plan.dp, "tp": plan.tp, "spans": plan.spans}
    return {"shared": [to_dict(part) for part in plan.parts], "swap": plan.swap}


def from_dict(data: Mapping[str, Any]) -> Plan:
    """The reverse of `to_dict`.

    Raises:
        PlacementError: a node that is neither a stage nor shared.
    """
    if "stage" in data:
        return Stage(data["stage"], tuple(data["devices"]), data["dp"], data["tp"], data["spans"])
    if "shared" in data:
        return Shared(tuple(from_dict(part) for part in data["shared"]), data["swap"])
    raise PlacementError(f"a node of a plan has the key 'stage' or 'shared', found {sorted(data)}")


def describe(plan: Plan, depth: int = 0) -> list[str]:
    """The plan as indented lines."""
    pad = "  " * depth
    if isinstance(plan, Stage):
        where = f"devices {','.join(map(str, plan.devices))}" if plan.devices else "no device"
        return [f"{pad}{plan.worker}: {where}, dp={plan.dp}, tp={plan.tp}"]
    lines = [f"{pad}shared, one after the other{', swapped' if plan.swap else ', all resident'}:"]
    for part in plan.parts:
        lines += describe(part, depth + 1)
    return lines
