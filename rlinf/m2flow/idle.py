"""How a device's time was spent, and why it stood still: from the spans of its ranks, measured or predicted. Pure.

A device is busy while any rank on it runs a stage, moves weights, or is loaded or unloaded. Why it stands still is told
by the rank that works there next: the device could have gone on as soon as that one could.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlinf.m2flow.compiler import Compiled
from rlinf.m2flow.graph import Graph
from rlinf.m2flow.timeline import WAITS, Doing, RankId, Span

TURN, OVER, BETWEEN = "its turn", "nothing left to do", "between operations"


@dataclass(frozen=True)
class DeviceTime:
    """One device from the first to the last moment of an execution.

    Attributes:
        device: its number.
        groups: who works there.
        busy: seconds.
        idle: cause -> seconds. Causes are ``rows of X``, ``weights of X``, ``X, which still reads the last weights``,
            `TURN`, `OVER` (until the others have ended) and `BETWEEN`.
    """

    device: int
    groups: tuple[str, ...]
    busy: float
    idle: Mapping[str, float]

    @property
    def idle_share(self) -> float:
        """From 0 to 1."""
        still = sum(self.idle.values())
        return still / (self.busy + still) if still else 0.0


def device_times(
    graph: Graph,
    compiled: Compiled,
    spans: Mapping[RankId, Sequence[Span]],
    around: Mapping[RankId, Sequence[Span]] | None = None,
) -> list[DeviceTime]:
    """Of every device that has ranks, ascending.

    Args:
        graph: the workflow.
        compiled: its programs.
        spans: of every rank in an execution.
        around: what the ranks did meanwhile for other executions, none of it before or after this one.
    """
    start = min((span.start for own in spans.values() for span in own), default=0.0)
    end = max((span.end for own in spans.values() for span in own), default=0.0)
    there: dict[int, list[RankId]] = {}
    for group, stage in compiled.layout.items():
        for rank in range(stage.ranks):
            for device in stage.devices_of(rank):
                there.setdefault(device, []).append((group, rank))
    if around:
        every = {*spans, *around}
        spans = {rank: sorted([*spans.get(rank, ()), *around.get(rank, ())], key=lambda s: s.start) for rank in every}
    waits = Waits(graph, spans)
    found: list[DeviceTime] = []
    for device, ranks in sorted(there.items()):
        groups = tuple(dict.fromkeys(group for group, _ in ranks))
        busy, idle = 0.0, dict[str, float]()
        at = start
        work = [(span, rank) for rank in ranks for span in spans.get(rank, ()) if span.doing not in WAITS]
        for span, worker in sorted(work, key=lambda pair: (pair[0].start, pair[0].end)):
            if span.start > at:
                for cause, seconds in waits.causes(worker, at, span.start).items():
                    idle[cause] = idle.get(cause, 0.0) + seconds
            busy += max(span.end - max(span.start, at), 0.0)
            at = max(at, span.end)
        if end > at:
            idle[OVER] = end - at
        found.append(DeviceTime(device, groups, busy, idle))
    return found


class Waits:
    """What ranks waited for, by name."""

    def __init__(self, graph: Graph, spans: Mapping[RankId, Sequence[Span]]) -> None:
        self.graph, self.spans = graph, spans
        self.makers = {node.name: sorted(set(node.reads.values())) for node in graph.nodes}
        self.runs: dict[str, list[Span]] = {}
        for own in spans.values():
            for span in own:
                if span.doing is Doing.RUN:
                    self.runs.setdefault(span.name, []).append(span)

    def causes(self, rank: RankId, start: float, end: float) -> dict[str, float]:
        """Why a rank did nothing between two moments: cause -> seconds."""
        found: dict[str, float] = {}
        for span in self.spans[rank]:
            inside = min(span.end, end) - max(span.start, start)
            if span.doing in WAITS and inside > 0:
                cause = self.cause(rank[0], span)
                found[cause] = found.get(cause, 0.0) + inside
        rest = end - start - sum(found.values())
        return {**found, BETWEEN: rest} if rest > 1e-9 else found

    def cause(self, group: str, span: Span) -> str:
        """What a rank of a group waited for in this span."""
        if span.doing is Doing.LEASE:
            return TURN
        if span.doing is Doing.WEIGHTS:
            comes = any(sync.source == span.name and sync.target == group for sync in self.graph.syncs)
            return f"weights of {span.name}" if comes else f"{span.name}, which still reads the last weights"
        makers = [self.graph.nodes[index].name for index in self.makers.get(span.name, ())]
        return f"rows of {self._last(makers, span.end) or span.name}"

    def _last(self, makers: Sequence[str], when: float) -> str:
        """The maker that was at work for the longest until the wait was over: its rows were the last to come."""
        ends = {
            name: max((min(run.end, when) for run in self.runs.get(name, ()) if run.start <= when), default=-1.0)
            for name in makers
        }
        return " and ".join(name for name in makers if ends[name] == max(ends.values()))
