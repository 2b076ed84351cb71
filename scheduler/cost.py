"""The cost model: a profile -> what every operation of a plan takes, and what lies on devices. Pure.

Of a stage in one layout time and memory never fall with its rows, and measured points are met (`rlinf.scheduler.curve`;
for stages that generate, against the steps and tokens that their rows come to, `rlinf.scheduler.tail`). Layouts:

- Replicas work on rows of their own, so that a layout that was not measured takes what the one with the nearest number
  of them takes for as many rows each. More devices are then never slower. Where more of them were measured to be
  slower, they are.
- Of a tensor-parallel degree that was not measured nobody knows what it gains: it counts as the next smaller one.
- What a group holds is a part that each device has and one that replicas share (``a + b / dp``); of one measured
  layout it does not fall with more devices, and fewer hold proportionally more.

Uncertainty is a part of the time: the spread of the nearest measured point; a tenth for each doubling beyond what was
measured; a quarter where the layout was not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median

import numpy as np

from rlinf.errors import ConfigError
from rlinf.m2flow.compiler import Compiled
from rlinf.m2flow.graph import TRAIN, Graph, Node
from rlinf.m2flow.memory import Sizes
from rlinf.m2flow.plan import Piped, Plan, nodes
from rlinf.m2flow.simulate import Costs, StageCost, simulate
from rlinf.m2flow.timeline import Doing, RankId, Span
from rlinf.scheduler.profile import Held, Profile, SyncPoint
from rlinf.scheduler.stage_time import Carried, StageTime, nearest_degree, stage_time


@dataclass(frozen=True)
class CostModel:
    """What plans of a workflow cost. A `rlinf.scheduler.judge.Model`.

    Attributes:
        profile: what was measured.
        graph: the workflow.
        kind_of: device -> its kind.
    """

    profile: Profile
    graph: Graph
    kind_of: Mapping[int, str]

    def costs(self, plan: Plan, compiled: Compiled) -> Costs:
        """Of every operation of an iteration.

        Stages that are slower while others work beside them are so for the part of their time in which others do.

        Raises:
            ConfigError: nothing is known of a stage on the kind of its devices.
        """
        found = self._costs(compiled, {})
        if not any(isinstance(node, Piped) for node in nodes(plan)) or not any(self._slows.values()):
            return found
        for _ in range(2):  # the second time with about the right times
            spans = simulate(self.graph, compiled, TRAIN, found)
            found = self._costs(compiled, shares_beside(compiled, spans))
        return found

    def sizes(self, compiled: Compiled) -> Sizes:
        """Bytes on devices."""
        resident = {}
        for group, stage in compiled.layout.items():
            if stage.devices:
                resident[group] = max(
                    self.resident(group, kind, stage.dp, stage.tp) for kind in self._kinds(compiled, group)
                )
        transient = {}
        for node in self.graph.phase(TRAIN):
            if node.name in self.profile.stages and compiled.layout[node.worker].devices:
                rows = self.share(node, compiled.layout[node.worker].dp)
                at_once = rows if node.spec.streams else min(compiled.granularity[node.index] or rows, rows)
                transient[node.name] = max(round(time.memory(at_once)) for time in self._times(compiled, node))
        return Sizes(resident, transient)

    def rows(self, node: Node) -> int:
        """That come into a node in an iteration; of a source, that it makes."""
        lineage = self.graph.lineage(node.index)
        source = self.graph.nodes[lineage.source].name
        if source not in self.profile.rows:
            raise ConfigError(
                f"the profile does not say how many rows {source} makes in an iteration; it has "
                f"{dict(self.profile.rows)}: give it under rows"
            )
        return self.profile.rows[source] * math.prod(lineage.factors or ())

    def share(self, node: Node, dp: int) -> int:
        """The most rows that one of so many replicas gets."""
        from rlinf.m2flow.rows import grouped

        lineage = self.graph.lineage(node.index)
        unit = lineage.group if lineage.group and grouped(node.spec.unit) else 1
        return -(-self.rows(node) // (unit * dp)) * unit

    def stage(self, name: str, kind: str, dp: int, tp: int, beside: float = 0.0) -> StageTime:
        """A stage in a layout.

        Args:
            name: of the node.
            kind: of the devices; ``""``: none.
            dp, tp: the layout.
            beside: part of its time in which others work on other devices.

        Raises:
            ConfigError: the profile has nothing of it on this kind.
        """
        found = self._cached(name, kind, dp, tp)
        return replace(found, slower=1 + beside * self._slows.get((name, kind), 0.0)) if beside else found

    def resident(self, group: str, kind: str, dp: int, tp: int) -> int:
        """Bytes that a device holds of a group."""
        known = self._held(group, kind, tp)
        if not known:
            return 0
        by_dp = {held.dp: held.resident for held in known}
        if dp in by_dp:
            return by_dp[dp]
        if len(by_dp) > 1:
            inverse, bytes_ = zip(*((1 / n, size) for n, size in by_dp.items()), strict=True)
            b, a = np.polyfit(inverse, bytes_, 1)
            a, b = (float(np.mean(bytes_)), 0.0) if b < 0 else (max(float(a), 0.0), float(b))
            below = [size for n, size in by_dp.items() if n > dp]
            above = [size for n, size in by_dp.items() if n < dp]
            return round(min(max(a + b / dp, *below, 0.0), *above, math.inf))
        ((n, size),) = by_dp.items()
        return size if dp > n else math.ceil(size * n / dp)

    def switch(self, group: str, kind: str, dp: int, tp: int) -> tuple[float, float]:
        """Seconds to take a group off its devices, and on again: as measured, in proportion to what it holds."""
        known = self._held(group, kind, tp)
        if not known:
            return 0.0, 0.0
        near = min(known, key=lambda held: (abs(math.log2(held.dp / dp)), held.dp))
        scale = self.resident(group, kind, dp, tp) / near.resident if near.resident else 1.0
        return near.offload * scale, near.onload * scale

    def sync(self, source: str, target: str, source_ranks: int, target_ranks: int) -> SyncPoint | None:
        """A weight sync: as measured between the most similar layouts."""
        known = [point for point in self.profile.syncs if (point.source, point.target) == (source, target)]
        return min(
            known,
            key=lambda point: (
                abs(math.log2(point.source_ranks / source_ranks)) + abs(math.log2(point.target_ranks / target_ranks))
            ),
            default=None,
        )

    def degrees(self, group: str, kind: str) -> list[int]:
        """Tensor-parallel degrees that all of a group's stages were measured in."""
        each = [
            {point.tp for point in self.profile.stages[node.name].points if point.kind == kind}
            for node in self.graph.phase(TRAIN)
            if node.worker == group and node.name in self.profile.stages
        ]
        return sorted(set.intersection(*each)) if each else [1]

    def _held(self, group: str, kind: str, tp: int) -> Sequence[Held]:
        known = [held for held in self.profile.groups.get(group, ()) if held.kind == kind]
        degree = nearest_degree({held.tp for held in known}, tp)
        return [held for held in known if held.tp == degree]

    @cached_property
    def _known(self) -> dict[tuple[str, str, int, int], StageTime]:
        return {}

    def _cached(self, name: str, kind: str, dp: int, tp: int) -> StageTime:
        key = (name, kind, dp, tp)
        if key not in self._known:
            samples = next((node.samples for node in self.graph.nodes if node.name == name), 1)
            self._known[key] = stage_time(name, self.profile.stages[name], kind, dp, tp, samples or 1)
        return self._known[key]

    @cached_property
    def _slows(self) -> dict[tuple[str, str], float]:
        """Stage and kind -> how much longer it takes beside others, in parts of its time."""
        found = {}
        for name, stage in self.profile.stages.items():
            for kind in {point.kind for point in stage.points if point.beside}:
                ratios = [
                    point.seconds / self._cached(name, kind, point.dp, point.tp).seconds(point.rows)
                    for point in stage.points
                    if point.kind == kind and point.beside
                ]
                found[name, kind] = max(median(ratios) - 1, 0.0)
        return found

    def _kinds(self, compiled: Compiled, group: str) -> list[str]:
        return sorted({self.kind_of[device] for device in compiled.layout[group].devices}) or [""]

    def _times(self, compiled: Compiled, node: Node, beside: float = 0.0) -> list[StageTime]:
        stage = compiled.layout[node.worker]
        return [self.stage(node.name, kind, stage.dp, stage.tp, beside) for kind in self._kinds(compiled, node.worker)]

    def _costs(self, compiled: Compiled, beside: Mapping[str, float]) -> Costs:
        off, on = {}, {}
        for group in compiled.swapped:
            stage = compiled.layout[group]
            moved = [self.switch(group, kind, stage.dp, stage.tp) for kind in self._kinds(compiled, group)]
            off[group], on[group] = (max(times) for times in zip(*moved, strict=True))
        send, receive = {}, {}
        for sync in self.graph.syncs:
            ranks = (compiled.layout[name].ranks for name in (sync.source, sync.target))
            if point := self.sync(sync.source, sync.target, *ranks):
                send[sync.source, sync.target], receive[sync.source, sync.target] = point.send, point.receive
        nodes = {
            node.name: self._node(compiled, node, beside.get(node.name, 0.0))
            for node in self.graph.phase(TRAIN)
            if node.name in self.profile.stages
        }
        return Costs(nodes, on, off, send, receive, dict(self.profile.rows))

    def _node(self, compiled: Compiled, node: Node, beside: float) -> StageCost:
        rows = self.share(node, compiled.layout[node.worker].dp)
        cost = max(self._times(compiled, node, beside), key=lambda time: time.seconds(max(rows, 1)))
        if compiled.granularity[node.index] and node.spec.streams:
            cost = replace(cost, whole=rows)
        fixed, per_row = self._way(compiled, node)
        return Carried(cost, fixed, per_row) if fixed or per_row else cost

    def _way(self, compiled: Compiled, node: Node) -> tuple[float, float]:
        """Seconds of a piece and of a row that a node's rows take on their way from other groups."""
        way = self.profile.transfers.get(self.profile.transport)
        if way is None or node.worker not in self.graph.workers:
            return 0.0, 0.0
        makers = [self.graph.nodes[index] for index in sorted(set(node.reads.values()))]
        others = [maker.name for maker in makers if maker.worker != node.worker]
        stages = self.profile.stages
        bytes_ = sum(stages[name].row_bytes for name in others if name in stages)
        return way.fixed * len(others), way.per_byte * bytes_


def shares_beside(compiled: Compiled, spans: Mapping[RankId, Sequence[Span]]) -> dict[str, float]:
    """Stage -> the part of its time in which groups work that share no device with it."""
    runs: dict[str, list[Span]] = {}
    for (group, _), own in spans.items():
        if compiled.layout[group].devices:
            runs.setdefault(group, []).extend(span for span in own if span.doing is Doing.RUN)
    on = {group: frozenset(compiled.layout[group].devices) for group in runs}
    total: dict[str, float] = {}
    beside: dict[str, float] = {}
    for group, own in runs.items():
        busy = _merged(span for other, found in runs.items() if not on[other] & on[group] for span in found)
        for span in own:
            total[span.name] = total.get(span.name, 0.0) + span.end - span.start
            beside[span.name] = beside.get(span.name, 0.0) + _inside(span, busy)
    return {name: beside[name] / took for name, took in total.items() if took > 0}


def _merged(spans: Iterable[Span]) -> tuple[list[float], list[float]]:
    """Beginnings and ends of the stretches that these cover together, ascending."""
    starts: list[float] = []
    ends: list[float] = []
    for span in sorted(spans, key=lambda span: span.start):
        if ends and span.start <= ends[-1]:
            ends[-1] = max(ends[-1], span.end)
        else:
            starts.append(span.start)
            ends.append(span.end)
    return starts, ends


def _inside(span: Span, busy: tuple[list[float], list[float]]) -> float:
    starts, ends = busy
    first, last = np.searchsorted(ends, span.start), np.searchsorted(starts, span.end)
    return sum(max(min(span.end, ends[i]) - max(span.start, starts[i]), 0.0) for i in range(int(first), int(last)))
