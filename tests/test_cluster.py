"""Devices, failures and metrics, on paper."""

from __future__ import annotations

import socket

import pytest

from rlinf.cluster import NodeInfo, _cores, _started_here, devices_of
from rlinf.config import ClusterConfig
from rlinf.errors import PlacementError
from rlinf.failure import Failure, first
from rlinf.fleet import summarize
from rlinf.m2flow.executor import Report
from rlinf.m2flow.timeline import Doing, Span
from rlinf.metrics import Metric, Reduction
from tests.m2flow.test_compiler import compiled

CPU = NodeInfo("a", "10.0.0.1", 8, 0, 2**30)
GPU = NodeInfo("b", "10.0.0.2", 64, 4, 2**30)


def test_a_cpu_node_is_one_device_unless_it_is_cut() -> None:
    assert [d.threads for d in devices_of([CPU], ClusterConfig())] == [8]
    assert [d.threads for d in devices_of([CPU], ClusterConfig(devices_per_node=3))] == [2, 2, 2]


def test_a_gpu_node_has_a_device_a_gpu_and_can_be_used_as_cpus() -> None:
    assert [d.kind for d in devices_of([GPU, CPU], ClusterConfig())] == ["gpu"] * 4 + ["cpu"]
    assert [d.kind for d in devices_of([GPU], ClusterConfig(gpus="never"))] == ["cpu"]
    assert [d.index for d in devices_of([GPU, GPU], ClusterConfig())] == list(range(8))


@pytest.mark.parametrize(("node", "what"), [(CPU, "8 cores"), (GPU, "4 GPUs")])
def test_more_devices_than_a_node_has_are_refused(node: NodeInfo, what: str) -> None:
    with pytest.raises(PlacementError, match=rf"devices_per_node=9, but node {node.ip} has {what}"):
        devices_of([node], ClusterConfig(devices_per_node=9))


@pytest.mark.parametrize("slots", [1, 2, 3, 8])
def test_the_core_sets_of_a_node_are_disjoint_and_cover_it(slots: int) -> None:
    devices = devices_of([CPU], ClusterConfig(devices_per_node=slots))
    sets = [_cores(range(10, 18), [device]) for device in devices]
    assert sorted(core for cores in sets for core in cores) == list(range(10, 18))
    assert min(map(len, sets)) >= 8 // slots


def test_a_cluster_that_was_started_here_is_joined_where_it_answers_and_a_stale_address_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ray._private import utils

    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(utils, "read_ray_address", lambda: address)
        assert _started_here(said.append) == address
    assert _started_here(said.append) is None
    assert said == [f"the Ray cluster last started here, {address}, is gone: starting one"]
    monkeypatch.setattr(utils, "read_ray_address", lambda: None)
    assert _started_here(said.append) is None
    assert len(said) == 1


def failure(error: str, when: float, died: bool = False) -> Failure:
    return Failure("g", 0, "n", 1, "stage", error, "", when, died)


def test_the_first_failure_is_the_cause_not_the_echo_that_came_before_it() -> None:
    echo = failure("RuntimeError: [gloo] Connection closed by peer [10.0.0.1]:123", 1.0)
    died = failure("its process died (SIGKILL)", 3.0, died=True)
    cause = failure("ValueError: bad row", 2.0)
    assert first([echo, died]) is died
    assert first([echo, cause, died]) is cause
    assert first([cause, failure("KeyError: x", 2.5)]) is cause


def test_metrics_are_reduced_by_their_type_and_tensor_parallel_copies_count_once() -> None:
    layout = compiled().layout
    mean = {"loss": Metric(1.0, 3.0), "rows": Metric(3.0, 1.0, Reduction.SUM)}
    other = {"loss": Metric(5.0, 1.0), "rows": Metric(1.0, 1.0, Reduction.SUM)}
    reports = [
        Report("policy", 0, {"policy.train": mean}, [Span(Doing.RUN, "policy.train", 10.0, 12.0)]),
        Report(
            "policy",
            1,
            {"policy.train": other},
            [Span(Doing.RUN, "policy.train", 11.0, 15.0), Span(Doing.ROWS, "policy.train", 0, 9)],
        ),
    ]
    values, seconds = summarize(reports, compiled().__class__({}, {}, layout, {}))
    assert values == {"policy/loss": 2.0, "policy/rows": 4.0}
    assert seconds == {"policy.train": 5.0}


def test_two_stages_of_a_group_that_record_one_name_are_told_apart_and_maps_have_their_own_name() -> None:
    layout = compiled().layout
    reports = [
        Report("policy", 0, {"policy.train": {"gap": Metric(1.0)}, "policy.check": {"gap": Metric(2.0)}}),
        Report("host", 0, {"host.gae": {"kl": Metric(3.0)}}),
    ]
    values, _ = summarize(reports, compiled().__class__({}, {}, layout, {}))
    assert values == {"policy.train/gap": 1.0, "policy.check/gap": 2.0, "gae/kl": 3.0}
