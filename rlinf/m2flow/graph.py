"""The macro flow: which workers there are, which stages run, and which fields flow between them.

A user writes plain calls on a `Workflow`; nothing runs. Each call records a `Node`, and a `Stream` remembers for each
field which node writes it, so dependencies follow from fields and not from the order of lines. `Workflow.build`
checks the whole and freezes it into a `Graph`, in which an edge carries just the fields that its consumer reads.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from typing import Any, Protocol, runtime_checkable

from rlinf.batch import GROUP, ROW
from rlinf.errors import WorkflowError
from rlinf.m2flow.rows import Lineage
from rlinf.m2flow.stage import StageSpec
from rlinf.worker import Worker

HOST = "host"  # the built-in group that runs sources and maps
TRAIN, EVALUATE = "train", "evaluate"
_IMPLICIT = (ROW, GROUP)


@runtime_checkable
class Source(Protocol):
    """Where rows come from. Cheap to make and picklable; loads in ``setup``."""

    @property
    def writes(self) -> tuple[str, ...]: ...

    def setup(self) -> None: ...
    def next_batch(self) -> Any: ...
    def state(self) -> dict[str, Any]: ...
    def load_state(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class WorkerSpec:
    """A worker group of the workflow: its name, class and config; ``dp`` 0 means as many as the devices allow."""

    name: str
    cls: type[Worker]
    cfg: Any
    dp: int = 1
    tp: int = 1


@dataclass(frozen=True)
class Node:
    """One use of a stage, a source or a map.

    Attributes:
        index: its position in ``Graph.nodes``, a topological order.
        name: ``group.stage``, unique in the graph.
        worker: the group that runs it.
        spec: the stage's declaration.
        reads: field -> index of the node that it comes from.
        carried: fields of the input that an expanding stage hands on to its rows.
        options: keyword options given in the call.
        phase: `TRAIN` or `EVALUATE`.
        call: the source or map object; ``None`` for a worker's method.
        starts: training iterations that pass before its first one.
        samples: rows that an input row becomes; ``None``: not known before.
    """

    index: int
    name: str
    worker: str
    spec: StageSpec
    reads: Mapping[str, int]
    writes: tuple[str, ...]
    carried: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    phase: str = TRAIN
    call: Any = None
    starts: int = 0
    samples: int | None = 1


@dataclass(frozen=True)
class Edge:
    """Rows of ``source`` go to ``target`` with these fields (``row_id`` and ``group_id`` go along always)."""

    source: int
    target: int
    fields: tuple[str, ...]


@dataclass(frozen=True)
class Sync:
    """Weights go from one group to another after each update."""

    source: str
    target: str


@dataclass(frozen=True)
class Graph:
    """A checked macro flow: plain data."""

    name: str
    workers: Mapping[str, WorkerSpec]
    nodes: tuple[Node, ...]
    syncs: tuple[Sync, ...]

    def __post_init__(self) -> None:
        order = TopologicalSorter({node.index: set(node.reads.values()) for node in self.nodes})
        try:
            order.prepare()
        except CycleError as error:
            names = " -> ".join(self.nodes[i].name for i in error.args[1])
            raise WorkflowError(f"the workflow has a cycle without a loop: {names}") from None

    @property
    def edges(self) -> tuple[Edge, ...]:
        found: dict[tuple[int, int], list[str]] = {}
        for node in self.nodes:
            for name, source in node.reads.items():
                found.setdefault((source, node.index), []).append(name)
        return tuple(Edge(source, target, tuple(sorted(fields))) for (source, target), fields in sorted(found.items()))

    def phase(self, phase: str) -> tuple[Node, ...]:
        return tuple(node for node in self.nodes if node.phase == phase)

    def lineage(self, index: int) -> Lineage:
        """Where the rows that a node takes come from; of a source, those that it makes."""
        factors: list[int | None] = []
        node = self.nodes[index]
        while node.reads:
            node = self.nodes[next(iter(node.reads.values()))]  # all that a node reads has the same rows
            if node.samples != 1:
                factors.append(node.samples)
        return Lineage(node.index, None if None in factors else tuple(n for n in reversed(factors) if n is not None))

    def yields(self, node: Node) -> bool:
        """Whether a stage hands its rows on one after the other, and not a piece at its end."""
        cls = self.workers[node.worker].cls if node.worker in self.workers else None
        return bool(node.spec.expands) or inspect.isgeneratorfunction(getattr(cls, node.spec.name, None))

    def version(self, worker: str, done: int) -> int:
        """How often a group's state has been updated once ``done`` training iterations are over."""
        starts = [node.starts for node in self.nodes if node.worker == worker and node.spec.updates]
        return max(done - min(starts, default=0), 0)

    def ancestors(self, index: int) -> set[int]:
        """All nodes that a node depends on."""
        seen: set[int] = set()
        todo = list(self.nodes[index].reads.values())
        while todo:
            at = todo.pop()
            if at not in seen:
                seen.add(at)
                todo.extend(self.nodes[at].reads.values())
        return seen

    def independent(self, first: str, second: str) -> bool:
        """Whether two nodes, by name, may run at the same time."""
        index = {node.name: node.index for node in self.nodes}
        a, b = index[first], index[second]
        return a not in self.ancestors(b) and b not in self.ancestors(a)


@dataclass(frozen=True)
class Stream:
    """Rows on their way: which node writes which field, and which node made the rows."""

    flow: Workflow
    fields: Mapping[str, int]
    rows: int


class WorkerHandle:
    """Call its stages on streams: ``samples = rollout.generate(prompts, temperature=0.0)``."""

    def __init__(self, flow: Workflow, spec: WorkerSpec) -> None:
        self._flow = flow
        self.spec = spec

    def __getattr__(self, name: str) -> Callable[..., Stream]:
        stages = self.spec.cls.stages()
        if name not in stages:
            near = difflib.get_close_matches(name, stages, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; its stages are {sorted(stages)}"
            raise WorkflowError(f"{self.spec.cls.__name__}.{name} is not a stage{hint}")

        def call(stream: Stream, **options: Any) -> Stream:
            known = list(inspect.signature(getattr(self.spec.cls, name)).parameters)[2:]  # after self and the batch
            for option in options:
                if option not in known:
                    near = difflib.get_close_matches(option, known, n=1)
                    hint = f"; did you mean {near[0]!r}?" if near else f"; it has {known or 'none'}"
                    raise WorkflowError(f"{self.spec.name}.{name} has no option {option!r}{hint}")
            return self._flow._add(self.spec, stages[name], stream, options)

        return call


class Workflow:
    """Builds a macro flow by plain calls; see the module's docstring."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._workers: dict[str, WorkerSpec] = {}
        self._nodes: list[Node] = []
        self._syncs: list[Sync] = []
        self._evaluated: set[int] = set()
        self._inputs: dict[int, Mapping[str, int]] = {}

    def worker(
        self,
        cls: type[Worker],
        cfg: Any = None,
        *,
        name: str | None = None,
        dp: int | None = None,
        tp: int | None = None,
    ) -> WorkerHandle:
        """Declare a worker group. ``dp`` and ``tp`` default to those of ``cfg``, else to one rank."""
        if not (isinstance(cls, type) and issubclass(cls, Worker)):
            raise WorkflowError(f"flow.worker takes a subclass of rlinf.Worker, found {cls!r}")
        label = name or cls.__name__.lower()
        if label in self._workers or label == HOST:
            raise WorkflowError(f"there already is a worker {label!r}; give this one another name=")
        spec = WorkerSpec(
            label,
            cls,
            cfg,
            dp=getattr(cfg, "dp", 1) if dp is None else dp,
            tp=getattr(cfg, "tp", 1) if tp is None else tp,
        )
        self._workers[label] = spec
        return WorkerHandle(self, spec)

    def source(self, source: Source) -> Stream:
        """Rows from a data source; it runs beside the maps, and its cursor is part of every checkpoint."""
        if not isinstance(source, Source):
            raise WorkflowError(f"flow.source takes an object with writes, setup, next_batch, state: found {source!r}")
        spec = StageSpec(f"source{len(self._nodes)}", reads=(), writes=tuple(source.writes))
        index = self._record(HOST, spec, {}, spec.writes_for(None), source)
        return Stream(self, dict.fromkeys(source.writes, index), index)

    def map(self, function: Any, stream: Stream) -> Stream:
        """Apply a function ``f(batch, metrics) -> Batch`` that carries a ``__stage__`` declaration."""
        spec = getattr(function, "__stage__", None)
        if not isinstance(spec, StageSpec) or not callable(function):
            raise WorkflowError(f"flow.map takes a function declared with @stage(reads=..., writes=...): {function!r}")
        return self._add(WorkerSpec(HOST, Worker, None), spec, stream, {}, function)

    def join(self, *streams: Stream) -> Stream:
        """One stream with the fields of all, which must have the same rows."""
        if len({stream.rows for stream in streams}) != 1:
            raise WorkflowError("flow.join takes streams over the same rows (from one source or expanding stage)")
        fields: dict[str, int] = {}
        for stream in streams:
            for name, index in stream.fields.items():
                if fields.setdefault(name, index) != index:
                    writers = f"{self._nodes[fields[name]].name} and {self._nodes[index].name}"
                    raise WorkflowError(f"field {name!r} has two writers: {writers}; rename one or join before")
        return Stream(self, fields, streams[0].rows)

    def evaluate(self, *streams: Stream) -> None:
        """What these streams need runs at evaluation, not in training iterations."""
        for stream in streams:
            self._evaluated |= {*stream.fields.values(), stream.rows}

    def sync(self, source: WorkerHandle, target: WorkerHandle) -> None:
        """``target`` gets ``source``'s weights after each update, before it runs again."""
        for handle, method in ((source, "publish_weights"), (target, "receive_weights")):
            if getattr(handle.spec.cls, method) is getattr(Worker, method):
                raise WorkflowError(f"flow.sync: {handle.spec.cls.__name__} does not define {method}()")
        self._syncs.append(Sync(source.spec.name, target.spec.name))

    def build(self) -> Graph:
        """Check the workflow and freeze it.

        Raises:
            WorkflowError: nothing to run, a stage that trains inside evaluation, or evaluation feeding training.
        """
        if not self._nodes:
            raise WorkflowError(f"workflow {self.name!r} has no stage: call one on flow.source(...)")
        nodes = self._phases(self._settle_carried())
        for node in nodes:
            for index in node.reads.values():
                if nodes[index].phase != node.phase:
                    raise WorkflowError(
                        f"{node.name} ({node.phase}) reads from {nodes[index].name} ({nodes[index].phase}): "
                        "give evaluation a source and stage calls of its own"
                    )
            if node.phase == EVALUATE and node.spec.updates:
                raise WorkflowError(f"{node.name} changes its worker's state, so it cannot be part of evaluation")
            if node.starts < 0 or (node.starts and (node.writes or not node.spec.updates)):
                raise WorkflowError(
                    f"{node.name} would start after {node.starts} iterations; a stage that updates its worker and "
                    "writes no field may (starts= 0 or more), any other runs in each"
                )
        unused = sorted(set(self._workers) - {node.worker for node in nodes})
        if unused:
            raise WorkflowError(f"no stage of {', '.join(unused)} is used; call one, or leave the worker out")
        return Graph(self.name, dict(self._workers), tuple(nodes), tuple(self._syncs))

    def _add(
        self, worker: WorkerSpec, spec: StageSpec, stream: Stream, options: Mapping[str, Any], call: Any = None
    ) -> Stream:
        label = f"{worker.name}.{spec.name}"
        if not isinstance(stream, Stream):
            raise WorkflowError(f"{label} takes a stream (from flow.source or another stage), found {stream!r}")
        if stream.flow is not self:
            raise WorkflowError(f"{label}: the stream belongs to another workflow, {stream.flow.name!r}")
        needs = spec.reads_for(worker.cfg)
        for name in needs:
            if name not in stream.fields and name not in _IMPLICIT:
                near = difflib.get_close_matches(name, stream.fields, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise WorkflowError(
                    f"{label} reads {name!r}, which no earlier stage writes{hint} (there are {sorted(stream.fields)})"
                )
        writes = spec.writes_for(worker.cfg)
        for name in writes:
            if name in stream.fields:
                first = self._nodes[stream.fields[name]].name
                raise WorkflowError(f"field {name!r} has two writers: {first} and {label}")
        wanted = [n for n in (*needs, *spec.optional) if n in stream.fields]
        reads = {name: stream.fields[name] for name in wanted} or {ROW: stream.rows}
        index = self._record(worker.name, spec, reads, writes, call, options, spec.starts_for(worker.cfg))
        self._inputs[index] = stream.fields
        if spec.expands:
            return Stream(self, dict.fromkeys((*stream.fields, *writes), index), index)
        return Stream(self, {**stream.fields, **dict.fromkeys(writes, index)}, stream.rows)

    def _record(
        self,
        worker: str,
        spec: StageSpec,
        reads: Mapping[str, int],
        writes: Iterable[str],
        call: Any = None,
        options: Mapping[str, Any] | None = None,
        starts: int = 0,
    ) -> int:
        index = len(self._nodes)
        base = f"{worker}.{spec.name}"
        taken = sum(node.name == base or node.name.startswith(base + "#") for node in self._nodes)
        name = f"{base}#{taken + 1}" if taken else base
        writes = tuple(writes)
        given = dict(options or {})
        samples = spec.samples_for(self._workers[worker].cfg if worker in self._workers else None, given)
        node = Node(index, name, worker, spec, dict(reads), writes, (), given, TRAIN, call, starts, samples)
        self._nodes.append(node)
        return index

    def _settle_carried(self) -> list[Node]:
        """Which fields each expanding node hands on: those that later nodes read from it and it does not write."""
        nodes = list(self._nodes)
        for node in reversed(self._nodes):
            if not node.spec.expands:
                continue
            asked = {name for later in nodes for name, at in later.reads.items() if at == node.index}
            carried = tuple(sorted(asked - set(node.writes) - set(_IMPLICIT)))
            available = self._inputs[node.index]
            reads = {**nodes[node.index].reads, **{name: available[name] for name in carried}}
            nodes[node.index] = replace(nodes[node.index], reads=reads, carried=carried)
        return nodes

    def _phases(self, nodes: list[Node]) -> list[Node]:
        evaluated: set[int] = set()
        todo = list(self._evaluated)
        while todo:
            index = todo.pop()
            if index not in evaluated:
                evaluated.add(index)
                todo.extend(nodes[index].reads.values())
        return [replace(node, phase=EVALUATE) if node.index in evaluated else node for node in nodes]
