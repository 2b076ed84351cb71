"""What plans cost and gain: a pipe over disjoint devices, a context switch, and the executor itself.

- *pipe*: three stages that each keep a device busy for a known time a row, 32 micro-batches of one row, on real ranks.
  The ideal is the time of the slowest stage for all rows, and of the others for one; times a row are those measured.
- *switch*: SmolLM2's actor (weights, gradients, AdamW's state) off its device and on again, against copying the same
  bytes twice; and by how much of them the process's resident memory falls.
- *executor*: the part of a GRPO step with SmolLM2, collocated, in which no stage and no weight sync is at work; and the
  seconds of the same steps beside those of the same stage functions, called one after the other in one process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from rlinf.batch import GROUP, ROW, Batch
from rlinf.cluster import Cluster
from rlinf.compose import compose
from rlinf.config import ClusterConfig
from rlinf.fleet import Fleet
from rlinf.m2flow.compiler import compile_plan
from rlinf.m2flow.executor import Report, complete
from rlinf.m2flow.graph import HOST, TRAIN, Graph, Source, Workflow
from rlinf.m2flow.host import Host
from rlinf.m2flow.plan import Piped, Plan, Shared, Stage
from rlinf.m2flow.timeline import Doing
from rlinf.preflight import preflight
from rlinf.train import load_graph
from rlinf.worker import RankContext, Worker, stage
from rlinf.workers.actor import Actor

PARTS = ("switch", "pipe", "executor", "direct")
ROWS = 32
SECONDS = {"first": 0.02, "second": 0.03, "third": 0.025}  # a row


class Numbers:
    """As many rows as micro-batches."""

    writes = ("x",)

    def setup(self) -> None: ...

    def next_batch(self) -> Batch:
        return Batch({"row_id": torch.arange(ROWS), "x": torch.zeros(ROWS)})

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: dict[str, Any]) -> None: ...


class First(Worker):
    """Hands each row on as it is ready, as generation does."""

    @stage(reads=("x",), writes=("a",))
    def step(self, batch: Batch) -> Iterator[Batch]:
        for row in range(batch.n):
            time.sleep(SECONDS["first"])
            yield Batch({"row_id": batch["row_id"][row : row + 1], "a": batch["x"][row : row + 1]})


class Second(Worker):
    @stage(reads=("a",), writes=("b",))
    def step(self, batch: Batch) -> Batch:
        time.sleep(SECONDS["second"] * batch.n)
        return Batch({"b": batch["a"]})


class Third(Worker):
    @stage(reads=("b",), writes=("c",))
    def step(self, batch: Batch) -> Batch:
        time.sleep(SECONDS["third"] * batch.n)
        return Batch({"c": batch["b"]})


def three_stages() -> Graph:
    flow = Workflow("pipe")
    first, second, third = (flow.worker(cls) for cls in (First, Second, Third))
    third.step(second.step(first.step(flow.source(Numbers()))))
    return flow.build()


def fleet_of(graph: Graph, plan: Plan, cluster: Cluster, folder: Path) -> Fleet:
    fleet = Fleet(cluster, graph, compile_plan(graph, plan))
    fleet.launch(seed=0, deterministic=True, output_dir=folder)
    fleet.setup()
    return fleet


def busy(reports: Iterable[Report], doing: Sequence[Doing]) -> list[tuple[float, float]]:
    """Stretches in which some rank does one of these, in order and apart."""
    spans = sorted((s.start, s.end) for report in reports for s in report.spans if s.doing in doing)
    found: list[tuple[float, float]] = []
    for start, end in spans:
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def pipe(repeats: int, folder: Path) -> dict[str, list[float]]:
    """Seconds of an execution piped and one after the other, and the ideal of the piped one."""
    import ray

    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    found: dict[str, list[float]] = {"piped": [], "ideal": [], "one after the other": []}
    try:
        cluster = Cluster.connect(ClusterConfig(devices_per_node=3))
        cluster.hold()
        names = ("first", "second", "third")
        plans: dict[str, Plan] = {
            "piped": Piped(tuple(Stage(name, (device,)) for device, name in enumerate(names)), 1),
            "one after the other": Shared(tuple(Stage(name, (0,)) for name in names)),
        }
        graph = three_stages()
        fleets = {how: fleet_of(graph, plan, cluster, folder / how) for how, plan in plans.items()}
        for fleet in fleets.values():
            fleet.execute(TRAIN, 0)  # the first pays for imports and connections
        for number in range(1, repeats + 1):
            for how, fleet in fleets.items():
                reports = fleet.execute(TRAIN, number)
                spans = busy(reports, [Doing.RUN])
                found[how].append(spans[-1][1] - spans[0][0])
                if how == "piped":
                    each = [_a_row(reports, name) for name in names]
                    found["ideal"].append(sum(each) + (ROWS - 1) * max(each))
        fleets["piped"].close()
    finally:
        ray.shutdown()
    return found


def _a_row(reports: Iterable[Report], group: str) -> float:
    """Seconds that a stage takes for a row, as measured; what it waits for is not counted."""
    spans = [s for r in reports if r.group == group for s in r.spans if s.doing is Doing.RUN]
    return sum(s.end - s.start for s in spans) / ROWS


def switch(repeats: int, folder: Path) -> dict[str, list[float]]:
    """Seconds of going off, coming on, and copying; and the fall of resident memory over the bytes that went."""
    cfg = compose(["+workflow=grpo", f"output_dir={folder / 'switch'}"])
    ready = preflight(cfg, load_graph)
    actor = Actor(ready.graph.workers["actor"].cfg, RankContext("actor", output_dir=folder, threads=2))
    actor.setup()
    for parameter in actor.trainer.parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    actor.trainer.optimizer.step()
    tensors = list({t.untyped_storage().data_ptr(): t.detach() for t in actor.trainer.tensors()}.values())
    nbytes = sum(tensor.nbytes for tensor in tensors)
    copies = [tensor.clone() for tensor in tensors]
    before = [float(tensor.sum()) for tensor in tensors[:8]]
    actor.offload()
    actor.onload()  # the first exchanges the pages, once in a run
    found: dict[str, list[float]] = {"off": [], "on": [], "memcpy": [], "rss fall": []}

    def copy() -> None:
        for into, tensor in zip(copies, tensors, strict=True):
            into.copy_(tensor)

    for _ in range(repeats):
        copy()  # once before: a kernel that reclaims idle pages would make the plain copy look slow
        found["memcpy"].append(_seconds(copy))
        resident = _resident()
        found["off"].append(_seconds(actor.offload))
        found["rss fall"].append((resident - _resident()) / nbytes)
        found["on"].append(_seconds(actor.onload))
    assert before == [float(tensor.sum()) for tensor in tensors[:8]]
    found["bytes"] = [float(nbytes)]
    return found


def executor(steps: int, folder: Path, overrides: Sequence[str]) -> dict[str, list[float]]:
    """Of each step: its seconds, and the share of them in which nothing is at work."""
    cfg = compose(["+workflow=grpo", "cluster.address=local", f"output_dir={folder / 'grpo'}", *overrides])
    ready = preflight(cfg, load_graph)
    cluster = Cluster.connect(cfg.cluster)
    found: dict[str, list[float]] = {"step": [], "overhead": []}
    fleet = None
    try:
        cluster.hold()
        fleet = fleet_of(ready.graph, ready.plan(cluster.devices), cluster, ready.output_dir)
        for step in range(steps + 1):
            begun = time.perf_counter()
            reports = fleet.execute(TRAIN, step)
            seconds = time.perf_counter() - begun
            work = sum(end - start for start, end in busy(reports, [Doing.RUN, Doing.SYNC]))
            if step:  # the first warms up
                found["step"].append(seconds)
                found["overhead"].append(1 - work / seconds)
    finally:
        fleet.close() if fleet else cluster.close()
    return found


def direct(steps: int, folder: Path, overrides: Sequence[str]) -> dict[str, list[float]]:
    """Seconds of each step where the stages are plain calls."""
    cfg = compose(["+workflow=grpo", f"output_dir={folder / 'direct'}", *overrides])
    graph = preflight(cfg, load_graph).graph
    (sync,) = graph.syncs
    threads = len(os.sched_getaffinity(0))
    ctx = RankContext(output_dir=folder, seed=cfg.seed, deterministic=cfg.deterministic, threads=threads)
    workers: dict[str, Worker] = {HOST: Host(graph, replace(ctx, group=HOST))}
    workers |= {name: spec.cls(spec.cfg, replace(ctx, group=name)) for name, spec in graph.workers.items()}
    for worker in workers.values():
        worker.setup()

    def step(number: int) -> None:
        published = workers[sync.source].publish_weights(sync.target, inline=False)
        workers[sync.target].receive_weights(number, [published])
        made: dict[int, Batch] = {}
        for node in graph.phase(TRAIN):
            worker = workers[node.worker]
            if isinstance(node.call, Source):
                made[node.index] = worker.sources[node.name].next_batch()  # type: ignore[attr-defined]
                continue
            given = reduce(Batch.join, [made[source] for source in sorted(set(node.reads.values()))])
            given = given.only({ROW, *([GROUP] if GROUP in given else []), *node.reads})
            call = node.call or getattr(worker, node.spec.name)
            out = call(given, worker.metrics) if node.call else call(given, **node.options)
            pieces = list(out) if isinstance(out, Iterator) else [] if out is None else [out]
            if pieces:
                made[node.index] = Batch.concat([complete(node, given, piece) for piece in pieces]).sorted()

    try:
        return {"step": [_seconds(lambda number=number: step(number)) for number in range(steps + 1)][1:]}
    finally:
        for worker in workers.values():
            worker.teardown()


def _seconds(call: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def _resident() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def measured(part: str) -> dict[str, list[float]]:
    """A part, in a process of its own: one Ray session to a process."""
    command = [sys.executable, __file__, "--part", part, *sys.argv[1:]]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4, help="of GRPO, after one that warms up")
    parser.add_argument("--part", choices=PARTS, help="one part alone, as JSON: each has a process of its own")
    parser.add_argument("overrides", nargs="*", help="of the GRPO run's config, e.g. model=tiny")
    args = parser.parse_args()
    if args.part:
        with tempfile.TemporaryDirectory() as folder:
            run = {
                "switch": lambda: switch(args.repeats, Path(folder)),
                "pipe": lambda: pipe(args.repeats, Path(folder)),
                "executor": lambda: executor(args.steps, Path(folder), args.overrides),
                "direct": lambda: direct(args.steps, Path(folder), args.overrides),
            }
            print(json.dumps(run[args.part]()))
        return
    switched, piped, executed, called = (measured(part) for part in PARTS)
    ideal = [a / b for a, b in zip(piped["ideal"], piped["piped"], strict=True)]
    both = [a + b for a, b in zip(switched["off"], switched["on"], strict=True)]
    ratio = [2 * a / b for a, b in zip(switched["memcpy"], both, strict=True)]
    table = Table(title=f"medians (lowest to highest); {switched['bytes'][0] / 1e9:.2f} GB of state are switched")
    table.add_column("what")
    table.add_column("figure")
    for what, values in (
        (f"pipe: seconds of {ROWS} rows", piped["piped"]),
        ("pipe: the ideal", piped["ideal"]),
        ("pipe: one after the other", piped["one after the other"]),
        ("pipe: ideal / measured", ideal),
        ("switch: seconds off", switched["off"]),
        ("switch: seconds on", switched["on"]),
        ("switch: seconds of one copy", switched["memcpy"]),
        ("switch: two copies / off and on", ratio),
        ("switch: fall of resident memory / bytes", switched["rss fall"]),
        ("executor: seconds of a step", executed["step"]),
        ("executor: seconds of the same, called in one process", called["step"]),
        ("executor: share in which nothing is at work", executed["overhead"]),
    ):
        table.add_row(what, f"{statistics.median(values):.4f} ({min(values):.4f} to {max(values):.4f})")
    Console(width=140 if not sys.stdout.isatty() else None).print(table)
    result = {
        "benchmark": "pipeline",
        "ideal_ratio": statistics.median(ideal),
        "switch_memcpy_ratio": statistics.median(ratio),
        "rss_fall": statistics.median(switched["rss fall"]),
        "overhead": statistics.median(executed["overhead"]),
    }
    print(json.dumps({key: round(v, 4) if isinstance(v, float) else v for key, v in result.items()}))


if __name__ == "__main__":
    main()
