"""Profiles are found again by what they are of, and by nothing less."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

import rlinf
from rlinf.cluster import NodeInfo, devices_of
from rlinf.config import ClusterConfig
from rlinf.m2flow.graph import Graph
from rlinf.scheduler import cache, identity
from rlinf.scheduler.profile import Identity, Kind, Point, Profile, StageProfile, save_profile
from rlinf.train import load_graph

PLACES = {"cpu": (0, 1)}
BASE = ("+workflow=ppo", "model=tiny", "data=digits")


def digest(*overrides: str) -> str:
    cfg = rlinf.load_config([*BASE, *overrides])
    return identity.config_digest(cfg, load_graph(cfg))


def profile_of(config: str) -> Profile:
    return Profile(
        identity=Identity(workflow="ppo", model="a model", config=config),
        kinds={"cpu": Kind()},
        rows={"host.source0": 2},
        stages={"host.source0": StageProfile(points=(Point(rows=2, seconds=0.5),))},
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(cache.FOLDER, str(tmp_path / "profiles"))
    return tmp_path / "profiles"


def test_a_profile_is_found_by_what_it_is_of(folder: Path) -> None:
    notes: list[str] = []
    kept = profile_of(digest())
    path = cache.keep(kept, PLACES, notes.append)
    assert path is not None
    assert path.parent == folder
    assert cache.find(kept.identity, PLACES, notes.append) == kept
    for other, places in (
        (kept.identity.model_copy(update={"model": "another"}), PLACES),
        (kept.identity.model_copy(update={"workflow": "grpo"}), PLACES),
        (kept.identity.model_copy(update={"config": digest("rollout.max_new_tokens=7")}), PLACES),
        (kept.identity, {"cpu": (0, 1, 2)}),
        (kept.identity, {"cpu x 2": (0, 1)}),
    ):
        assert cache.find(other, places, notes.append) is None
    assert notes == []


def test_another_processor_is_other_hardware(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = profile_of(digest())
    cache.keep(kept, PLACES, print)
    monkeypatch.setattr(identity, "processor", lambda: "another")
    assert cache.find(kept.identity, PLACES, print) is None


@pytest.mark.parametrize(
    "overrides",
    [
        ("plan=disaggregated",),
        ("plan.granularity=8", "plan.budget_s=5"),
        ("steps=77",),
        ("seed=3",),
        ("output_dir=elsewhere",),
        ("logger.tensorboard=false",),
        ("checkpoint.every=1",),
        ("evaluation.every=1",),
        ("cluster.wait_s=1",),
        ("workflow.name=mine",),
    ],
)
def test_what_does_not_change_a_stage_does_not_change_the_digest(overrides: Sequence[str]) -> None:
    assert digest(*overrides) == digest()


@pytest.mark.parametrize(
    "overrides",
    [
        ("rollout.max_new_tokens=7",),
        ("rollout.samples_per_prompt=2",),
        ("data.prompts_per_step=3",),
        ("model.dtype=bfloat16",),
        ("actor.tokens_per_micro_batch=99",),
        ("actor.dp=1",),
        ("algorithm.kl_coef=0.5",),
        ("algorithm.epochs=2",),
        ("reward.processes=2",),
        ("deterministic=false",),
        ("vps.verify=true",),
        ("cluster.offload_dir=/somewhere",),
    ],
)
def test_what_changes_a_stage_changes_the_digest(overrides: Sequence[str]) -> None:
    assert digest(*overrides) != digest()


def test_a_workflow_with_other_stages_has_another_digest() -> None:
    cfg = rlinf.load_config(BASE)
    graph = load_graph(cfg)
    fewer = Graph(graph.name, graph.workers, graph.nodes[:4], graph.syncs)
    assert identity.config_digest(cfg, fewer) != identity.config_digest(cfg, graph)


def test_a_broken_file_is_named_and_passed_over(folder: Path) -> None:
    notes: list[str] = []
    kept = profile_of(digest())
    path = cache.keep(kept, PLACES, notes.append)
    assert path is not None
    path.write_text("stages: {actor.train: 3}\n")
    assert cache.find(kept.identity, PLACES, notes.append) is None
    assert str(path) in notes[0]
    assert "measured anew" in notes[0]
    path.write_bytes(b"\xff\xfe: [")
    assert cache.find(kept.identity, PLACES, notes.append) is None
    assert len(notes) == 2


def test_a_file_whose_identity_was_changed_by_hand_is_refused(folder: Path) -> None:
    notes: list[str] = []
    kept = profile_of(digest())
    path = cache.place_of(kept.identity, PLACES)
    for changed in ({"config": ""}, {"model": "another"}):
        save_profile(kept.model_copy(update={"identity": kept.identity.model_copy(update=changed)}), path)
        assert cache.find(kept.identity, PLACES, notes.append) is None
        assert "changed by hand" in notes[-1]
        assert str(path) in notes[-1]
    save_profile(kept, path)
    assert cache.find(kept.identity, PLACES, notes.append) == kept


def test_a_folder_that_cannot_be_written_to_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(cache.FOLDER, str(tmp_path / "file"))  # root may write to any folder, but not into a file
    assert cache.keep(profile_of("a"), PLACES, notes.append) is None
    assert str(tmp_path / "file") in notes[0]
    assert cache.FOLDER in notes[0]
    assert cache.find(profile_of("a").identity, PLACES, notes.append) is None


def test_sets_of_cores_go_by_their_number_and_have_their_share_of_memory() -> None:
    nodes = [NodeInfo("a", "10.0.0.1", 4, 0, 1000), NodeInfo("b", "10.0.0.2", 8, 0, 900)]
    places, kinds = identity.kinds_of(devices_of(nodes, ClusterConfig(devices_per_node=4)))
    assert places == {"cpu": (0, 1, 2, 3), "cpu x 2": (4, 5, 6, 7)}
    assert {name: kind.memory for name, kind in kinds.items()} == {"cpu": 250, "cpu x 2": 225}


def test_gpus_are_told_by_their_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, GPU-aa, NVIDIA H200, 143771'\necho '1, GPU-bb, NVIDIA H100, 81559'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert identity.list_gpus() == [("NVIDIA H200", 143771 << 20), ("NVIDIA H100", 81559 << 20)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-bb")
    assert identity.list_gpus() == [("NVIDIA H100", 81559 << 20)]
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert identity.list_gpus() == []
