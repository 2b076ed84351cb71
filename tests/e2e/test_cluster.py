"""A Ray cluster of two nodes that somebody else started, joined by its address."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlinf import reaper
from rlinf.cluster import Cluster
from rlinf.config import ClusterConfig
from rlinf.errors import PlacementError
from tests.e2e.command import SMALL, Command

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Any]:
    from ray.cluster_utils import Cluster as RayCluster

    cluster = RayCluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    # What its ranks publish cannot be mapped by those of the head, as if it were another machine.
    cluster.add_node(num_cpus=1, env_vars={"RLINF_HOST": "another"})
    cluster.wait_for_nodes()
    yield cluster
    cluster.shutdown()


def test_ppo_runs_over_two_nodes_and_leaves_the_cluster_as_it_was(two_nodes: Any, tmp_path: Path) -> None:
    run = Command(
        tmp_path,
        "+workflow=ppo",
        *SMALL,
        "steps=2",
        "algorithm.kl_coef=0",
        "output_dir=out",
        "plan=collocated",
        "cluster.nodes=2",
        env={"RAY_ADDRESS": two_nodes.address},
    )
    assert run.wait() == 0, run.said()
    assert "actor: devices 0-1, dp=2" in run.said()
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "time/step" in line] == [1, 2]
    assert (tmp_path / "out" / "export" / "model.safetensors").exists()
    assert len(two_nodes.list_all_nodes()) == 2
    assert run.leftovers() == []
    second = Command(
        tmp_path,
        "+workflow=ppo",
        *SMALL,
        "output_dir=other",
        "cluster.nodes=3",
        "cluster.wait_s=2",
        env={"RAY_ADDRESS": two_nodes.address},
    )
    assert second.wait() == 2
    assert "cluster.nodes=3, but 2 joined within 2 s" in second.said()


def test_nodes_that_another_job_holds_are_waited_for_then_named_and_the_job_goes_on(two_nodes: Any) -> None:
    import ray

    first = Cluster.connect(ClusterConfig(address=two_nodes.address))
    try:
        first.hold()
        second = Cluster.connect(ClusterConfig(wait_s=1))  # in the session that is there already
        assert [node.ip for node in second.nodes] == [node.ip for node in first.nodes]
        with pytest.raises(
            PlacementError, match=r"has 1 CPUs and 0 GPUs, but they are not free after 1 s .*another job"
        ):
            second.hold()
        second.close()
        assert first.environment(first.devices[:1])["OMP_NUM_THREADS"] == "1"
        assert all(ray.get(hold.describe.remote(), timeout=10) for hold in first._holds.values())
    finally:
        first.close()


def test_an_address_where_no_cluster_answers_is_an_error_that_says_so() -> None:
    with pytest.raises(PlacementError, match=r"no Ray cluster answers at 127\.0\.0\.1:1"):
        Cluster.connect(ClusterConfig(address="127.0.0.1:1", wait_s=2))


def test_a_cluster_that_cannot_start_leaves_no_process_and_no_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    started: list[psutil.Process] = []

    def fails(**options: Any) -> None:
        # What Ray leaves when it fails half-way: children that go on.
        started.append(psutil.Popen(["sleep", "600"], start_new_session=True))
        raise RuntimeError("no port is free")

    before = {process.pid for process in psutil.Process().children(recursive=True)}
    monkeypatch.setattr(ray, "init", fails)
    with pytest.raises(PlacementError, match=r"could not start a cluster here \(no port is free\)"):
        Cluster.connect(ClusterConfig(address="local"))
    assert len(started) == 1
    assert {process.pid for process in psutil.Process().children(recursive=True)} - before <= {started[0].pid}
    assert started[0].wait(10) == -signal.SIGKILL
    assert reaper.MARK not in os.environ


def test_a_cluster_that_was_started_in_vain_is_left_again() -> None:
    import ray

    with pytest.raises(PlacementError, match=r"cluster\.nodes=2, but 1 joined within 1 s"):
        Cluster.connect(ClusterConfig(address="local", nodes=2, wait_s=1))
    assert not ray.is_initialized()
