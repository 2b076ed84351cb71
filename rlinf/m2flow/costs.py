"""What stages cost, from what was measured: spans of several iterations -> `Costs`, kept as YAML. Pure but for files.

One slow call (a first iteration that compiles, a neighbour on the machine) does not move a fit: every figure is a
median, and a stage's line is Theil and Sen's, the median of the slopes between all pairs of calls of different sizes.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from rlinf.errors import ConfigError
from rlinf.m2flow.compiler import Compiled
from rlinf.m2flow.graph import Graph, Node
from rlinf.m2flow.simulate import Cost, Costs
from rlinf.m2flow.timeline import Doing, Execution, Span

SEND, RECEIVE = "send weights to ", "receive weights from "  # how spans of a sync are named
_POINTS = 400  # calls that a line is fitted to; more of them would add time and nothing else


def fit(graph: Graph, compiled: Compiled, executions: Iterable[Execution]) -> Costs:
    """Costs of everything that was done in these executions.

    Of a stage whose calls all had the same number of rows nobody knows what of it is fixed: then nothing is.

    Args:
        graph: the workflow.
        compiled: the programs that were executed.
        executions: of any phases; seconds in them are as measured on every rank.
    """
    runs: dict[str, list[list[Span]]] = {}  # node -> of each rank and execution
    moves: dict[tuple[Doing, str], list[float]] = {}  # on- and offload by group
    syncs: dict[tuple[str, str, str], list[float]] = {}  # which side, source, target
    taken: dict[str, list[int]] = {}  # node -> rows of each execution
    for execution in executions:
        rows: dict[str, int] = {}
        for (group, rank), spans in execution.spans.items():
            for name, own in _by_node(spans).items():
                runs.setdefault(name, []).append(own)
                if rank % compiled.layout[group].tp_ranks == 0:  # the ranks of a replica work on the same rows
                    rows[name] = rows.get(name, 0) + sum(span.rows for span in own)
            for span in spans:
                if span.doing in (Doing.ONLOAD, Doing.OFFLOAD):
                    moves.setdefault((span.doing, group), []).append(_seconds(span))
                elif span.doing is Doing.SYNC:
                    syncs.setdefault(_sync_key(group, span.name), []).append(_seconds(span))
        for name, count in rows.items():
            taken.setdefault(name, []).append(count)
    nodes = {node.name: _cost(node, runs[node.name]) for node in graph.nodes if node.name in runs}
    return Costs(
        nodes=nodes,
        onload={group: median(found) for (doing, group), found in moves.items() if doing is Doing.ONLOAD},
        offload={group: median(found) for (doing, group), found in moves.items() if doing is Doing.OFFLOAD},
        sync={(source, to): median(found) for (side, source, to), found in syncs.items() if side == SEND},
        receive={(source, to): median(found) for (side, source, to), found in syncs.items() if side == RECEIVE},
        rows=_source_rows(graph, taken),
    )


def fit_line(rows: Sequence[int], seconds: Sequence[float]) -> Cost:
    """``fixed + rows * per_row``, both 0 or more, through the middle of calls with one row or more.

    Args:
        rows: of each call.
        seconds: of each call.
    """
    x, y = _thin(np.asarray(rows, dtype=np.float64), np.asarray(seconds, dtype=np.float64))
    if not len(x):
        return Cost()
    proportional = Cost(0.0, float(np.median(y / x)))
    apart = x[None, :] - x[:, None]
    pairs = apart > 0
    if not pairs.any():
        return proportional
    slope = float(np.median((y[None, :] - y[:, None])[pairs] / apart[pairs]))
    if slope < 0:
        return Cost(float(np.median(y)), 0.0)
    fixed = float(np.median(y - slope * x))
    return Cost(fixed, slope) if fixed >= 0 else proportional


def unit_costs(graph: Graph, rows: Mapping[str, int]) -> Costs:
    """Every row of a worker's stage counts one, of one that makes new rows each of those; maps and data nothing."""
    nodes = {node.name: Cost(0.0, float(node.samples or 1)) for node in graph.nodes if node.worker in graph.workers}
    return Costs(nodes=nodes, rows=rows)


def save_costs(costs: Costs, path: Path) -> None:
    """Write costs as YAML: seconds.

    Raises:
        TypeError: a node's cost is not a `Cost`; a curve has its place in a profile.
    """
    import yaml

    lines = {}
    for name, cost in costs.nodes.items():
        if not isinstance(cost, Cost):
            raise TypeError(f"{name} costs {cost!r}; only a line can be written")
        lines[name] = {"fixed": cost.fixed, "per_row": cost.per_row}

    sync = [
        {"from": source, "to": target, "send": float(send), "receive": float(costs.receive.get((source, target), send))}
        for (source, target), send in sorted(costs.sync.items())
    ]
    data = {
        "nodes": lines,
        "onload": dict(costs.onload),
        "offload": dict(costs.offload),
        "sync": sync,
        "rows": dict(costs.rows),
    }
    head = "# Measured: seconds of each call (fixed + per_row x rows) on one rank, and rows of each source.\n"
    path.write_text(head + yaml.safe_dump(data, sort_keys=False))


def load_costs(path: Path) -> Costs:
    """Read what `save_costs`, or a person, wrote.

    Raises:
        ConfigError: it is not there, or not costs; the message names the key.
    """
    import yaml

    try:
        data = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"the costs {path} cannot be read: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"the costs {path} are not YAML: {' '.join(str(error).split())}") from None
    top = _table(data, str(path), ("nodes", "onload", "offload", "sync", "rows"))
    nodes = {}
    for name, entry in _table(top.get("nodes"), f"{path}: nodes").items():
        at = f"{path}: nodes.{name}"
        cost = _numbers(_table(entry, at, ("fixed", "per_row")), at)
        nodes[name] = Cost(cost.get("fixed", 0.0), cost.get("per_row", 0.0))
    sync, receive = {}, {}
    entries = top.get("sync") or []
    if not isinstance(entries, list):
        raise ConfigError(f"{path}: sync: found {entries!r}, expected a list of from, to, send, receive")
    for i, entry in enumerate(entries):
        at = f"{path}: sync[{i}]"
        found = dict(_table(entry, at, ("from", "to", "send", "receive")))
        if not ("from" in found and "to" in found):
            raise ConfigError(f"{at}: found {sorted(found)}, expected from, to, send, receive")
        pair = (str(found.pop("from")), str(found.pop("to")))
        took = _numbers(found, at)
        sync[pair] = took.get("send", 0.0)
        receive[pair] = took.get("receive", sync[pair])
    rows = _numbers(_table(top.get("rows"), f"{path}: rows"), f"{path}: rows")
    return Costs(
        nodes=nodes,
        onload=_numbers(_table(top.get("onload"), f"{path}: onload"), f"{path}: onload"),
        offload=_numbers(_table(top.get("offload"), f"{path}: offload"), f"{path}: offload"),
        sync=sync,
        receive=receive,
        rows={name: round(count) for name, count in rows.items()},
    )


def _seconds(span: Span) -> float:
    return max(span.end - span.start, 0.0)  # a clock that was set back


def _by_node(spans: Sequence[Span]) -> dict[str, list[Span]]:
    """Runs of each node, without what they hold of other things: weights that are taken over in flight."""
    found: dict[str, list[Span]] = {}
    others = [span for span in spans if span.doing in (Doing.SYNC, Doing.WEIGHTS)]
    for span in spans:
        if span.doing is Doing.RUN:
            inside = sum(_seconds(other) for other in others if span.start <= other.start and other.end <= span.end)
            found.setdefault(span.name, []).append(replace(span, end=span.end - inside) if inside else span)
    return found


def _sync_key(group: str, name: str) -> tuple[str, str, str]:
    if name.startswith(SEND):
        return SEND, group, name.removeprefix(SEND)
    return RECEIVE, name.removeprefix(RECEIVE), group


def _cost(node: Node, runs: list[list[Span]]) -> Cost:
    """Of a node from its spans, a list for each rank and execution."""
    calls = [span for own in runs for span in own if span.rows]
    if not calls:  # a source counts no rows
        return Cost(median(sum(map(_seconds, own)) for own in runs), 0.0)
    line = fit_line([span.rows for span in calls], [_seconds(span) for span in calls])
    ends = []  # what a stage that streams does once it has all rows, for each of them
    for own in runs:
        if node.spec.streams and (count := sum(span.rows for span in own)):
            ends.append(_seconds(own[-1]) / count if not own[-1].rows else 0.0)
    return Cost(line.fixed, line.per_row + (median(ends) if ends else 0.0))


def _source_rows(graph: Graph, taken: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Rows that sources make, from those that the stages closest to them took."""
    found: dict[str, tuple[int, int]] = {}  # source -> (factors between, rows)
    for node in graph.nodes:
        lineage = graph.lineage(node.index)
        if not node.reads or lineage.factors is None or not any(taken.get(node.name, ())):
            continue
        source, distance = graph.nodes[lineage.source].name, len(lineage.factors)
        if source not in found or distance < found[source][0]:
            found[source] = (distance, round(median(taken[node.name]) / math.prod(lineage.factors)))
    return {source: rows for source, (_, rows) in found.items()}


def _thin(x: Any, y: Any) -> tuple[Any, Any]:
    """As many calls of each size as there is room for, spread evenly."""
    if len(x) <= _POINTS:
        return x, y
    order = sorted(range(len(x)), key=lambda i: x[i])
    sizes = [list(same) for _, same in groupby(order, key=lambda i: x[i])]
    each = max(_POINTS // len(sizes), 1)
    picked = [same[round(i)] for same in sizes for i in np.linspace(0, len(same) - 1, min(each, len(same)))]
    picked = picked[:: -(-len(picked) // _POINTS)]
    return x[picked], y[picked]


def _table(data: Any, at: str, keys: Sequence[str] = ()) -> Mapping[str, Any]:
    data = {} if data is None else data
    if not isinstance(data, Mapping):
        raise ConfigError(f"{at}: found {data!r}, expected {'the keys ' + ', '.join(keys) if keys else 'a table'}")
    for key in data:
        if keys and key not in keys:
            near = difflib.get_close_matches(str(key), keys, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(keys)}"
            raise ConfigError(f"{at}: there is no key {key!r}{hint}")
    return data


def _numbers(table: Mapping[str, Any], at: str) -> dict[str, float]:
    for key, value in table.items():
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise ConfigError(f"{at}.{key}: found {value!r}, expected a number, 0 or more")
    return {key: float(value) for key, value in table.items()}
