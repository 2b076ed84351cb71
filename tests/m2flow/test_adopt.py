"""Workers that run take over another plan between iterations: what is made stays, where and when change."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf.batch import Batch
from rlinf.channel.mailbox import Mailbox
from rlinf.cluster import Cluster, Device, NodeInfo
from rlinf.config import ClusterConfig
from rlinf.errors import NeedsNewWorld, PlacementError
from rlinf.fleet import Fleet, beyond
from rlinf.m2flow.compiler import Compiled, compile_plan
from rlinf.m2flow.executor import Executor, Turn
from rlinf.m2flow.graph import HOST, TRAIN, Graph, Workflow
from rlinf.m2flow.host import Host
from rlinf.m2flow.lease import LeaseServer, Ticket
from rlinf.m2flow.plan import Piped, Plan, Shared, Stage
from rlinf.preflight import preflight
from rlinf.train import load_graph
from rlinf.worker import RankContext, Worker, stage
from tests.m2flow.test_executor import Local
from tests.m2flow.test_plan_invariance import Made, check_same, config, plan_of

STEPS = 4
KINDS = ("collocated", "disaggregated", "hybrid", "swapped", "apart")
Changes = Mapping[int, tuple[str, int]]  # before which step -> kind of plan, rows at a time


# The same run, by executors over threads


def run(workflow: str, out: Path, first: str, changes: Changes, staleness: int = 0) -> Made:
    """Real workers, one thread each, that change their plan."""
    ready = preflight(config(workflow, out, "plan=collocated"), load_graph)
    graph = ready.graph

    def compiled_of(kind: str, m: int) -> Compiled:
        return compile_plan(graph, plan_of(kind, tuple(graph.workers), m), staleness)

    compiled = compiled_of(first, 0)
    wire = Local(compiled.tickets)
    executors = []
    for group in compiled.layout:
        ctx = RankContext(group, output_dir=ready.output_dir, seed=ready.cfg.seed)
        worker: Worker = Host(graph, ctx) if group == HOST else graph.workers[group].cls(graph.workers[group].cfg, ctx)
        worker.setup()
        wire.boxes[group, 0] = Mailbox()
        executors.append(Executor(graph, compiled, worker, wire.boxes[group, 0], wire))
        if group in compiled.swapped:
            executors[-1].offload()
    made, failures = Made(), []

    def loop(executor: Executor, step: int, metrics: dict[str, float]) -> None:
        try:
            report = executor.run(Turn(TRAIN, step, step, 0 if staleness else step, STEPS if staleness else step))
            if report.rows:
                made.samples.append(report.rows)
            metrics.update({f"{node}/{name}": m.value for node, ms in report.metrics.items() for name, m in ms.items()})
        except BaseException as error:
            failures.append(error)
            for box in wire.boxes.values():
                box.cancel()

    try:
        for step in range(STEPS):
            if step in changes:
                compiled = compiled_of(*changes[step])
                wire.tickets = compiled.tickets
                for executor in executors:
                    executor.adopt(compiled)
                    assert executor.away == (executor.worker.ctx.group in compiled.swapped)
            wire.begin(TRAIN, step)
            metrics: dict[str, float] = {}
            threads = [threading.Thread(target=loop, args=(executor, step, metrics)) for executor in executors]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            if failures:
                raise failures[0]
            made.metrics.append({k: v for k, v in sorted(metrics.items()) if "per_second" not in k})
        for executor in executors:
            if (group := executor.worker.ctx.group) in ("actor", "critic"):
                executor.worker.onload()
                made.weights[group] = {k: v.clone() for k, v in executor.worker.state()["model"].items()}
    finally:
        for executor in executors:
            executor.worker.teardown()
    return made


@pytest.fixture(scope="module", params=["ppo", "grpo"])
def stays(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Made]:
    made = run(request.param, tmp_path_factory.mktemp(request.param), "collocated", {})
    assert made.weights
    assert len({row["reward"] for rows in made.samples for row in rows}) > 1
    return request.param, made


@pytest.mark.parametrize("first", KINDS)
def test_a_run_that_changes_its_plan_twice_makes_what_one_makes_that_stays(
    stays: tuple[str, Made], tmp_path: Path, first: str
) -> None:
    workflow, expected = stays
    at = KINDS.index(first)
    second, third = KINDS[(at + 1) % len(KINDS)], KINDS[(at + 3) % len(KINDS)]
    check_same(run(workflow, tmp_path, first, {1: (second, 2), 3: (third, 4)}), expected)


def test_weights_that_were_sent_ahead_are_taken_over_under_the_next_plan(tmp_path: Path) -> None:
    """With staleness, versions are under way when the plan changes: the same samples carry the same versions."""
    expected = run("grpo", tmp_path / "stays", "disaggregated", {}, staleness=1)
    found = run("grpo", tmp_path / "changes", "disaggregated", {2: ("hybrid", 4), 3: ("swapped", 0)}, staleness=1)
    check_same(found, expected)
    versions = [{row["weight_version"] for row in rows} for rows in found.samples]
    assert versions == [{0}, {0}, {1}, {2}]


# The same run, by a fleet over Ray


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    import ray

    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        found = Cluster.connect(ClusterConfig(devices_per_node=2))
        found.hold()
        yield found
    finally:
        ray.shutdown()


@contextmanager
def fleet_of(cluster: Cluster, graph: Graph, plan: Plan, out: Path, staleness: int = 0) -> Iterator[Fleet]:
    import ray

    fleet = Fleet(cluster, graph, compile_plan(graph, plan, staleness))
    fleet.launch(seed=0, deterministic=True, output_dir=out)
    fleet.setup()
    try:
        yield fleet
    finally:
        for group in fleet.groups.values():
            for rank in group.ranks:
                ray.kill(rank)


def weights_of(worker: Worker) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in worker.state()["model"].items()}


def cores_of(worker: Worker) -> set[int]:
    """Of all threads, those of torch too."""
    torch.ones(1 << 20).sum()
    return {core for thread in os.listdir("/proc/self/task") for core in os.sched_getaffinity(int(thread))}


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_ranks_on_ray_change_turns_pieces_swaps_and_devices_and_make_the_same(cluster: Cluster, tmp_path: Path) -> None:
    def made_by(out: Path, changes: Changes) -> tuple[Made, list[dict[str, set[int]]]]:
        ready = preflight(config("ppo", out, "plan=collocated"), load_graph)
        names = tuple(ready.graph.workers)
        made, places = Made(), []
        with fleet_of(cluster, ready.graph, plan_of("swapped", names, 0), out) as fleet:
            for step in range(STEPS):
                if step in changes:
                    fleet.adopt(compile_plan(ready.graph, plan_of(changes[step][0], names, changes[step][1])))
                places.append({name: fleet.apply(name, cores_of, [()])[0] for name in ("rollout", "critic", "actor")})
                reports = fleet.execute(TRAIN, step)
                made.samples += [report.rows for report in reports if report.rows]
                made.metrics.append(
                    {
                        f"{node}/{name}": metric.value
                        for report in reports
                        for node, metrics in report.metrics.items()
                        for name, metric in metrics.items()
                        if "per_second" not in name
                    }
                )
            for role in ("actor", "critic"):
                (made.weights[role],) = fleet.apply(role, weights_of, [()])
        return made, places

    expected, stayed = made_by(tmp_path / "stays", {})
    found, moved = made_by(tmp_path / "changes", {1: ("disaggregated", 4), 3: ("hybrid", 2)})
    check_same(found, expected)
    cores = sorted(os.sched_getaffinity(0))
    first, second = set(cores[: len(cores) // 2]), set(cores[len(cores) // 2 :])
    assert stayed == [{"rollout": first, "critic": first, "actor": first}] * STEPS
    apart = {"rollout": first, "critic": second, "actor": second}
    assert moved == [stayed[0], apart, apart, {**apart, "actor": first}]


class Numbers:
    writes = ("x",)

    def setup(self) -> None: ...

    def next_batch(self) -> Batch:
        return Batch({"row_id": torch.arange(4), "x": torch.ones(4)})

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: dict[str, Any]) -> None: ...


class Strict(Worker):
    """Fails when its state is not where it is used, or moved where it is already."""

    here = True

    def onload(self) -> None:
        assert not self.here
        self.here = True

    def offload(self) -> None:
        assert self.here
        self.here = False


class Maker(Strict):
    @stage(reads=("x",), writes=("y",))
    def make(self, batch: Batch) -> Batch:
        assert self.here
        if self.cfg == "fails":
            raise ValueError("made nothing")
        return Batch({"y": batch["x"]})


class User(Strict):
    @stage(reads=("y",), updates=True)
    def use(self, batch: Batch) -> None:
        assert self.here


def strict(dp: int = 1, cfg: str = "") -> Graph:
    flow = Workflow("strict")
    flow.worker(User, dp=dp).use(flow.worker(Maker, cfg).make(flow.source(Numbers())))
    return flow.build()


IN_TURNS = Shared((Stage("maker", (0,)), Stage("user", (0,))))
SWAPPED = Shared(IN_TURNS.parts, swap=True)
APART = Piped((Stage("maker", (1,)), Stage("user", (0,))), 2)


@pytest.mark.ray
def test_state_is_on_its_device_or_off_it_as_each_plan_expects(cluster: Cluster, tmp_path: Path) -> None:
    graph = strict()
    with fleet_of(cluster, graph, SWAPPED, tmp_path) as fleet:
        for step, plan in enumerate([SWAPPED, IN_TURNS, SWAPPED, SWAPPED, APART, IN_TURNS, APART, SWAPPED]):
            fleet.adopt(compile_plan(graph, plan))
            fleet.execute(TRAIN, step)
            # Each is brought there for a call where it is not.
            assert fleet.apply("user", lambda worker: worker.here, [()]) == [True]


@pytest.mark.ray
def test_what_cannot_be_adopted_is_refused_and_the_run_goes_on_as_it_was(cluster: Cluster, tmp_path: Path) -> None:
    graph = strict()
    with fleet_of(cluster, graph, IN_TURNS, tmp_path, staleness=1) as fleet:
        now = fleet.compiled
        two = Shared((Stage("maker", (0,)), Stage("user", (0, 1), dp=2)))
        with pytest.raises(NeedsNewWorld, match="user runs as dp=1 x tp=1, and the plan needs dp=2 x tp=1"):
            fleet.adopt(compile_plan(graph, two, staleness=1))
        with pytest.raises(PlacementError, match=r"staleness 0 .* the run has 1"):
            fleet.adopt(compile_plan(graph, APART))
        under_way = fleet.begin(TRAIN, 0, 0, 1)
        with pytest.raises(RuntimeError, match="1 executions are under way"):
            fleet.adopt(compile_plan(graph, APART, staleness=1))
        fleet.finish(under_way)
        assert fleet.compiled is now
        assert fleet.takes(APART)
        assert not fleet.takes(two)
        fleet.adopt(compile_plan(graph, APART, staleness=1))
        fleet.execute(TRAIN, 1)


@pytest.mark.ray
def test_a_plan_for_other_ranks_goes_to_the_one_who_can_make_them(cluster: Cluster, tmp_path: Path) -> None:
    asked: list[Compiled] = []

    class Recorded:
        def new_world(self, fleet: Fleet, compiled: Compiled) -> None:
            asked.append(compiled)

    graph = strict(dp=0)
    with fleet_of(cluster, graph, IN_TURNS, tmp_path) as fleet:
        fleet.worlds = Recorded()
        wide = compile_plan(graph, Shared((Stage("maker", (0,)), Stage("user", (0, 1), dp=2))))
        fleet.adopt(wide)
        fleet.adopt(compile_plan(graph, APART))  # for which those that run will do
    assert asked == [wide]


def layouts(**devices: tuple[int, ...]) -> dict[str, Stage]:
    return {name: Stage(name, where, dp=max(len(where), 1)) for name, where in devices.items()}


@pytest.mark.parametrize(
    ("kind", "now", "then", "lacks"),
    [
        ("cpu", (0, 1), (1, 0), ""),
        ("cpu", (0, 1), (0, 2), "rank 1 runs on device 1, and the plan needs it on 2: a process keeps its node"),
        ("cpu", (0,), (0, 1), "runs as dp=1 x tp=1, and the plan needs dp=2 x tp=1"),
        ("gpu", (0, 1), (0, 1), ""),
        ("gpu", (0, 1), (1, 0), "rank 0 runs on device 0, and the plan needs it on 1: a process keeps its GPU"),
    ],
)
def test_ranks_keep_their_number_their_node_and_their_gpu(
    kind: str, now: tuple[int, ...], then: tuple[int, ...], lacks: str
) -> None:
    nodes = [NodeInfo(str(i), f"10.0.0.{i}", 2, 2, 0) for i in range(2)]
    devices = [Device(2 * i + slot, node, kind, slot, 2) for i, node in enumerate(nodes) for slot in range(2)]
    found = beyond(devices, layouts(actor=now, reward=()), layouts(actor=then, reward=()))
    assert found == (f"actor {lacks}" if lacks else "")
    assert "['actor'] run" in beyond(devices, layouts(actor=now), layouts(actor=now, critic=now))


def test_turns_are_not_exchanged_while_some_are_open() -> None:
    server = LeaseServer({TRAIN: (Ticket(frozenset({0}), 1),)})
    server.begin(TRAIN, 1)
    with pytest.raises(RuntimeError, match="execution 1 is under way"):
        server.adopt({TRAIN: ()})
    asyncio.run(server.release(1, 0, 0))
    server.adopt({TRAIN: (Ticket(frozenset({0}), 1), Ticket(frozenset({0}), 1))})
    server.begin(TRAIN, 2)
    assert [ahead.ticket for ahead in server.blockers(2, 1)] == [0]
