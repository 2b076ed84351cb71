"""What was measured, on its way into a profile: plain data, and plain functions on spans and calls. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from rlinf.errors import WorkflowError
from rlinf.m2flow.compiler import Compiled, Run
from rlinf.m2flow.costs import RECEIVE, SEND
from rlinf.m2flow.graph import TRAIN, Graph, Node
from rlinf.m2flow.rows import grouped
from rlinf.m2flow.timeline import Doing, Execution, RankId
from rlinf.scheduler.measure import Facts, Took, Which
from rlinf.scheduler.profile import Held, Identity, Kind, Point, Profile, StageProfile, SyncPoint, Tail, Transfer

SETTLED = 0.1  # of a call's time: as much as calls that are alike may differ, and how much slower a first one may be
QUANTILES = 20  # steps between the shortest and the longest sequence
_LEAST = 1e-6  # seconds; a clock that was set back


class Setting(NamedTuple):
    """Where a group was when its stages were measured: kind of its devices (``""``: on none), and layout."""

    kind: str
    dp: int
    tp: int


class Key(NamedTuple):
    """Calls of one size of a stage in one setting; ``beside``: with others at work on other devices."""

    stage: str
    setting: Setting
    rows: int
    beside: bool = False


@dataclass
class Sample:
    """Calls that are alike.

    Attributes:
        seconds: of each call, of the slowest rank, in the order in which they were made.
        transient: the most bytes that a rank's device held in one beyond what stays; ``None``: nobody looked.
    """

    seconds: list[float] = field(default_factory=list)
    transient: int | None = None

    @property
    def warm(self) -> list[float]:
        """Seconds of the calls without the first ones that were slower than those that followed.

        Memory is still mapped and caches fill then; two calls are left at least.
        """
        first = 0
        while len(self.seconds) - first > 2 and self.seconds[first] > (1 + SETTLED) * _median(
            self.seconds[first + 1 :]
        ):
            first += 1
        return self.seconds[first:]

    @property
    def median(self) -> float:
        return _median(self.warm)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles."""
        low, high = np.percentile(self.warm, (25, 75))
        return float(high - low) / 2

    @property
    def settled(self) -> bool:
        """Several calls took about as long, the last two among them: it does not become faster any more."""
        if len(self.seconds) < 2:
            return False
        low, high = sorted(self.seconds[-2:])
        return high <= (1 + SETTLED) * low and self.spread <= SETTLED * self.median


@dataclass
class Readings:
    """All that was measured so far.

    Attributes:
        graph: the workflow.
        samples: calls of stages.
        facts: stage -> what its calls were about, of each rank.
        source_rows, source_bytes: of what each source makes in an iteration.
        held: group and setting -> what its devices hold.
        syncs: weight syncs.
        transfers: transport -> what a message takes.
        transport: that rows take between groups.
        left_out: what there was no time for.
    """

    graph: Graph
    samples: dict[Key, Sample] = field(default_factory=dict)
    facts: dict[str, list[Facts]] = field(default_factory=dict)
    source_rows: dict[str, int] = field(default_factory=dict)
    source_bytes: dict[str, int] = field(default_factory=dict)
    held: dict[tuple[str, Setting], Held] = field(default_factory=dict)
    syncs: list[SyncPoint] = field(default_factory=list)
    transfers: dict[str, Transfer] = field(default_factory=dict)
    transport: str = ""
    left_out: list[str] = field(default_factory=list)

    def add(self, key: Key, calls: Iterable[Took]) -> Sample:
        """Calls of a stage."""
        sample = self.samples.setdefault(key, Sample())
        for took in calls:
            sample.seconds.append(took.seconds)
            if took.transient is not None:
                sample.transient = max(sample.transient or 0, took.transient)
        return sample

    def expected(self, stage: str, setting: Setting, rows: int) -> float:
        """Seconds that a call is likely to take, from those of other sizes in this setting; 0: nothing is known."""
        known = sorted(
            (key.rows, sample.median)
            for key, sample in self.samples.items()
            if (key.stage, key.setting, key.beside) == (stage, setting, False) and sample.seconds
        )
        if not known:
            return 0.0
        if rows > known[-1][0]:
            return known[-1][1] * rows / known[-1][0]
        if rows < known[0][0]:
            return known[0][1] * (0.1 + 0.9 * rows / known[0][0])
        sizes, seconds = ([one[i] for one in known] for i in (0, 1))
        return float(np.interp(rows, sizes, seconds))

    def profile(self, identity: Identity, kinds: Mapping[str, Kind], note: str) -> Profile:
        """
        Raises:
            WorkflowError: a stage was never at work.
        """
        sizes = row_bytes(self.graph, self.facts)
        for name, rows in self.source_rows.items():
            sizes[name] = self.source_bytes[name] / max(rows, 1)
        stages = {}
        for node in self.graph.phase(TRAIN):
            points = self._points(node.name)
            if not points:
                raise WorkflowError(
                    f"{node.name} was never given a row while it was profiled, so nothing is known of it: give each "
                    "iteration more rows, or take a plan that needs no profile (plan=collocated)"
                )
            cfg = self.graph.workers[node.worker].cfg if node.worker in self.graph.workers else None
            stages[node.name] = StageProfile(
                points=tuple(points),
                row_bytes=sizes.get(node.name, 0.0),
                tail=tail(node, cfg, self.facts.get(node.name, ())),
            )
        groups: dict[str, tuple[Held, ...]] = {}
        for (group, _), held in self.held.items():
            groups[group] = (*groups.get(group, ()), held)
        return Profile(
            identity=identity,
            kinds=dict(kinds),
            rows=self.source_rows,
            stages=stages,
            groups=groups,
            syncs=tuple(self.syncs),
            transfers=self.transfers,
            transport=self.transport,
            note=note,
        )

    def _points(self, stage: str) -> list[Point]:
        return [
            Point(
                **key.setting._asdict(),
                rows=key.rows,
                seconds=max(sample.median, _LEAST),
                spread=sample.spread,
                transient=self._transient(key),
                beside=key.beside,
            )
            for key, sample in sorted(self.samples.items())
            if key.stage == stage and sample.seconds and key.rows
        ]

    def _transient(self, key: Key) -> int:
        """As it was looked at; else as the nearest larger call's, or in proportion to the largest smaller one's."""
        known = {
            other.rows: sample.transient
            for other, sample in self.samples.items()
            if (other.stage, other.setting) == (key.stage, key.setting) and sample.transient is not None
        }
        if larger := [rows for rows in known if rows >= key.rows]:
            return known[min(larger)]
        return round(known[max(known)] * key.rows / max(known)) if known else 0


def _median(seconds: Sequence[float]) -> float:
    return float(np.median(seconds))


Looked = Mapping[tuple[str, RankId], tuple[int, float]]
"""Stage and rank -> bytes beyond what stays, and seconds within its span that it took to find that out."""


def stage_calls(graph: Graph, execution: Execution, looked: Looked) -> dict[str, Took]:
    """Node -> its call in an execution in which it takes all of its rows at once.

    Rows are those of the replica that had the most, seconds those of the slowest rank.
    """
    names = {node.name for node in graph.phase(TRAIN)}
    calls: dict[str, list[list[Took]]] = {}
    for rank, spans in execution.spans.items():
        own: dict[str, tuple[float, int]] = {}
        for span in spans:
            if span.doing is Doing.RUN and span.name in names:
                seconds, rows = own.get(span.name, (0.0, 0))
                own[span.name] = seconds + max(span.end - span.start, 0.0), rows + span.rows
        for name, (seconds, rows) in own.items():
            transient, looking = looked.get((name, rank), (None, 0.0))
            calls.setdefault(name, []).append([Took(0.0, seconds - looking, rows, transient)])
    return {name: together(ranks)[0] for name, ranks in calls.items()}


def together(ranks: Sequence[Sequence[Took]]) -> list[Took]:
    """Calls that all ranks of a group made at once: each begins with the first of them, and is as long as the slowest.

    Args:
        ranks: of each, its calls, equally many.
    """
    found = []
    for call in zip(*ranks, strict=True):
        start, seconds = min(took.start for took in call), max(took.seconds for took in call)
        sizes = [took.transient for took in call if took.transient is not None]
        rows = max(took.rows for took in call)
        found.append(Took(start, start + max(seconds, _LEAST), rows, max(sizes, default=None)))
    return found


def accompanied(calls: Sequence[Took], others: Sequence[Took], share: float = 0.8) -> list[Took]:
    """Those calls that others were at work beside for this share of their time, or longer."""
    busy: list[list[float]] = []
    for other in sorted(others, key=lambda took: took.start):
        if busy and other.start <= busy[-1][1]:
            busy[-1][1] = max(busy[-1][1], other.end)
        else:
            busy.append([other.start, other.end])

    def beside(took: Took) -> float:
        return sum(max(min(took.end, end) - max(took.start, start), 0.0) for start, end in busy)

    return [took for took in calls if beside(took) >= share * took.seconds]


def which(graph: Graph, compiled: Compiled) -> dict[str, Which]:
    """Nodes of an iteration that are methods of workers -> which of their worker's calls they are."""
    found: dict[str, Which] = {}
    for group in graph.workers:
        own = [graph.nodes[op.node] for op in compiled.programs[TRAIN][group] if isinstance(op, Run)]
        for node in own:
            same = [other.name for other in own if other.spec.name == node.spec.name]
            found[node.name] = Which(node.spec.name, same.index(node.name))
    return found


def unit_of(graph: Graph, node: Node) -> int:
    """Rows of a node's input that may not be parted."""
    group = graph.lineage(node.index).group
    return group if group and grouped(node.spec.unit) else 1


def smaller(full: int, unit: int) -> list[int]:
    """Rows of calls smaller than ``full``: the smallest, a half and a quarter of it, in whole units."""
    wanted = [unit, *(full // part // unit * unit for part in (2, 4))]
    return [rows for rows in dict.fromkeys(wanted) if 0 < rows < full]


def row_bytes(graph: Graph, facts: Mapping[str, Sequence[Facts]]) -> dict[str, float]:
    """Node -> bytes of what it hands on, for each row that it makes, as its own calls or its readers' show it.

    Args:
        graph: the workflow.
        facts: node -> of each rank.
    """
    found: dict[str, float] = {}
    for node in graph.phase(TRAIN):
        total = 0.0
        for name in (*node.writes, *node.carried):
            seen = [(one.made_bytes.get(name), one.made) for one in facts.get(node.name, ())]
            for reader in graph.phase(TRAIN):
                if reader.reads.get(name) == node.index:
                    seen += [(one.given_bytes.get(name), one.given) for one in facts.get(reader.name, ())]
            per_row = [size / rows for size, rows in seen if size is not None and rows]
            total += float(np.mean(per_row)) if per_row else 0.0
        if total:
            found[node.name] = total
    return found


def tail(node: Node, cfg: object, facts: Sequence[Facts]) -> Tail | None:
    """Of a stage that makes sequences, several side by side: its worker's config says how many (``max_num_seqs``)."""
    slots = getattr(cfg, "max_num_seqs", 0)
    lengths = [length for one in facts for length in one.lengths if length > 0]
    if not node.spec.expands or not slots or not lengths:
        return None
    quantiles = np.quantile(lengths, np.linspace(0, 1, QUANTILES + 1))
    return Tail(lengths=tuple(float(length) for length in quantiles), slots=slots)


def sync_points(graph: Graph, compiled: Compiled, executions: Iterable[Execution]) -> list[SyncPoint]:
    """Weight syncs between groups in these layouts: the median of the slowest rank of each side."""
    took: dict[tuple[str, str, str], list[float]] = {}
    for execution in executions:
        slowest: dict[tuple[str, str, str], float] = {}
        for (group, _), spans in execution.spans.items():
            for span in spans:
                if span.doing is Doing.SYNC:
                    side = SEND if span.name.startswith(SEND) else RECEIVE
                    other = span.name.removeprefix(side)
                    key = (side, group, other) if side == SEND else (side, other, group)
                    slowest[key] = max(slowest.get(key, _LEAST), span.end - span.start)
        for key, seconds in slowest.items():
            took.setdefault(key, []).append(seconds)
    found = []
    for sync in graph.syncs:
        send, receive = (took.get((side, sync.source, sync.target)) for side in (SEND, RECEIVE))
        if send and receive:
            found.append(
                SyncPoint(
                    source=sync.source,
                    target=sync.target,
                    source_ranks=compiled.layout[sync.source].ranks,
                    target_ranks=compiled.layout[sync.target].ranks,
                    send=float(np.median(send)),
                    receive=float(np.median(receive)),
                )
            )
    return found


def transfer(sizes: Sequence[int], seconds: Sequence[float]) -> Transfer:
    """The line through the messages of two sizes."""
    per_byte = max((seconds[1] - seconds[0]) / (sizes[1] - sizes[0]), 0.0)
    return Transfer(fixed=max(seconds[0] - per_byte * sizes[0], 0.0), per_byte=per_byte)
