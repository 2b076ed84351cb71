"""A plan: where each worker group runs, which groups share devices, and which stream to one another. Plain data.

A plan is a tree. `Stage` puts one group on devices in a parallel layout. `Shared` puts its parts on devices that they
take in turns. `Piped` puts its parts on disjoint devices; rows go from one to the other ``granularity`` at a time, so
that a part works on the first while another makes the next. It is printed, saved with the run as YAML, and can be
written by hand.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
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
    """Parts that take their devices in turns.

    Attributes:
        parts: what shares.
        swap: only the one at work stays in device memory.
        order: names of stages (``critic.values``) in the order of their turns, where it is not that of the workflow.
    """

    parts: tuple[Plan, ...]
    swap: bool = False
    order: tuple[str, ...] = ()


@dataclass(frozen=True)
class Piped:
    """Parts on disjoint devices, with rows streaming between them.

    Attributes:
        parts: what is piped.
        granularity: rows that a stage takes at a time from a stage of another part; 0: all of an iteration.
    """

    parts: tuple[Plan, ...]
    granularity: int = 0


Plan = Union[Stage, Shared, Piped]


def stages(plan: Plan) -> Iterator[Stage]:
    """The leaves."""
    if isinstance(plan, Stage):
        yield plan
    else:
        for part in plan.parts:
            yield from stages(part)


def devices(plan: Plan) -> frozenset[int]:
    """All devices of a plan."""
    return frozenset(device for stage in stages(plan) for device in stage.devices)


def nodes(plan: Plan) -> Iterator[Plan]:
    """Every node of the tree, the root first."""
    yield plan
    if not isinstance(plan, Stage):
        for part in plan.parts:
            yield from nodes(part)


def meeting(plan: Plan, first: str, second: str) -> Shared | Piped:
    """The lowest node of the tree that holds both groups.

    Raises:
        PlacementError: they are one group, or one is not in the plan.
    """
    for node in reversed(list(nodes(plan))):
        if not isinstance(node, Stage):
            inside = {stage.worker for stage in stages(node)}
            if first in inside and second in inside and first != second:
                return node
    raise PlacementError(f"the plan has no place where {first} and {second} meet")


def to_dict(plan: Plan) -> dict[str, Any]:
    if isinstance(plan, Stage):
        found: dict[str, Any] = {"stage": plan.worker, "devices": list(plan.devices), "dp": plan.dp, "tp": plan.tp}
        return {**found, "spans": True} if plan.spans else found
    parts = [to_dict(part) for part in plan.parts]
    if isinstance(plan, Piped):
        return {"piped": parts, "granularity": plan.granularity}
    return {"shared": parts, "swap": plan.swap, **({"order": list(plan.order)} if plan.order else {})}


_KEYS: dict[str, dict[str, Callable[[Any], bool]]] = {
    "stage": {
        "stage": lambda v: isinstance(v, str),
        "devices": lambda v: isinstance(v, list) and all(type(d) is int and d >= 0 for d in v),
        "dp": lambda v: type(v) is int and v >= 1,
        "tp": lambda v: type(v) is int and v >= 1,
        "spans": lambda v: isinstance(v, bool),
    },
    "shared": {
        "shared": lambda v: isinstance(v, list) and bool(v),
        "swap": lambda v: isinstance(v, bool),
        "order": lambda v: isinstance(v, list) and all(isinstance(name, str) for name in v),
    },
    "piped": {
        "piped": lambda v: isinstance(v, list) and bool(v),
        "granularity": lambda v: type(v) is int and v >= 0,
    },
}
_EXPECTED = {
    "stage": "a worker's name",
    "devices": "a list of device numbers",
    "dp": "a number from 1",
    "tp": "a number from 1",
    "spans": "true or false",
    "shared": "a list of nodes",
    "swap": "true or false",
    "order": "a list of stages, e.g. [critic.values, actor.train]",
    "piped": "a list of nodes",
    "granularity": "a number of rows; 0: all",
}


def from_dict(data: Any, at: str = "plan") -> Plan:
    """The reverse of `to_dict`.

    Args:
        data: a node as plain data.
        at: where it stands, for messages.

    Raises:
        PlacementError: a node that is none of the three kinds, an unknown key, or a value of a wrong type.
    """
    kinds = [kind for kind in _KEYS if isinstance(data, Mapping) and kind in data]
    if len(kinds) != 1:
        found = sorted(data) if isinstance(data, Mapping) else repr(data)
        raise PlacementError(f"{at}: a node has one of the keys stage, shared, piped; found {found}")
    kind, known = kinds[0], _KEYS[kinds[0]]
    for key, value in data.items():
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; a {kind} node has {', '.join(known)}"
            raise PlacementError(f"{at}: there is no key {key!r}{hint}")
        if not known[key](value):
            raise PlacementError(f"{at}.{key}: found {value!r}, expected {_EXPECTED[key]}")
    if kind == "stage":
        given = tuple(data.get("devices", ()))
        return Stage(data["stage"], given, data.get("dp", 1), data.get("tp", 1), data.get("spans", False))
    parts = tuple(from_dict(part, f"{at}.{kind}[{i}]") for i, part in enumerate(data[kind]))
    if kind == "piped":
        return Piped(parts, data.get("granularity", 0))
    return Shared(parts, data.get("swap", False), tuple(data.get("order", ())))


def save_plan(plan: Plan, path: Path) -> None:
    """Write a plan as YAML."""
    import yaml

    path.write_text(yaml.safe_dump(to_dict(plan), sort_keys=False))


def load_plan(path: Path) -> Plan:
    """Read what `save_plan`, or a person, wrote.

    Raises:
        PlacementError: it is not there, or not a plan; the message names the node.
    """
    import yaml

    try:
        return from_dict(yaml.safe_load(path.read_text()), str(path))
    except OSError as error:
        raise PlacementError(f"the plan {path} cannot be read: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise PlacementError(f"the plan {path} is not YAML: {' '.join(str(error).split())}") from None


def describe(plan: Plan, depth: int = 0) -> list[str]:
    """The plan as indented lines."""
    pad = "  " * depth
    if isinstance(plan, Stage):
        where = f"devices {ranges(plan.devices)}" if plan.devices else "no device"
        return [f"{pad}{plan.worker}: {where}, dp={plan.dp}, tp={plan.tp}"]
    if isinstance(plan, Piped):
        rows = f"{plan.granularity} rows at a time" if plan.granularity else "all rows at once"
        lines = [f"{pad}piped, {rows}:"]
    else:
        order = f", turns in the order {' -> '.join(plan.order)}" if plan.order else ""
        lines = [f"{pad}shared, one after the other{', swapped' if plan.swap else ', all resident'}{order}:"]
    for part in plan.parts:
        lines += describe(part, depth + 1)
    return lines


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers, briefly: ``0-3,6``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
