"""``plan=auto`` before anything starts: which profile counts, and what comes of it."""

from __future__ import annotations

from pathlib import Path

import pytest

import rlinf
from rlinf.arithmetic import batch_sizes
from rlinf.checkpoint import Identity
from rlinf.cluster import Device
from rlinf.errors import ConfigError
from rlinf.planning import objective_of, plan_for, summary
from rlinf.preflight import Ready, local_devices
from rlinf.scheduler import cache
from rlinf.scheduler.auto import Ground, find
from rlinf.scheduler.identity import identity_of, kinds_of
from rlinf.scheduler.planner import MEMORY, TIME, fewest
from rlinf.scheduler.profile import Kind, Profile, save_profile
from tests.e2e import slowing
from tests.e2e.command import SMALL


def ready(folder: Path, *overrides: str, model: str = "none") -> Ready:
    cfg = rlinf.load_config(["+workflow=grpo", *SMALL, "cluster.devices_per_node=2", "cluster.gpus=never", *overrides])
    (folder / "out").mkdir(exist_ok=True)
    return Ready(cfg, slowing.graph_of(0), batch_sizes(cfg), Identity("slowing", model), folder / "out", None)


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[Device]:
    """Two, of one core each."""
    import os

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    return list(local_devices(rlinf.load_config(["+workflow=grpo", *SMALL, "cluster.devices_per_node=2"])))


def profile(devices: list[Device], **changes: object) -> Profile:
    (kind,) = kinds_of(devices)[0]
    known = slowing.known()
    stages = {
        name: stage.model_copy(
            update={"points": tuple(point.model_copy(update={"kind": kind}) for point in stage.points)}
        )
        for name, stage in known.stages.items()
    }
    return known.model_copy(update={"kinds": {kind: Kind()}, "stages": stages, **changes})


def test_a_profile_that_is_given_makes_the_plan_and_the_explanation_is_written(
    tmp_path: Path, devices: list[Device]
) -> None:
    save_profile(profile(devices), tmp_path / "p.yaml")
    found = plan_for(ready(tmp_path, f"plan.profile={tmp_path / 'p.yaml'}"), devices, lambda line: None)
    assert found is not None
    assert found.judged.plan == found.plan
    assert found.devices == (0, 1)
    assert found.reasons[0].startswith("expected: 0.64 s")
    assert any("collocated" in line for line in found.reasons)
    assert "THE BEST OF EACH FAMILY" in (tmp_path / "out" / "plan.txt").read_text()


def test_one_that_was_kept_is_found_again(
    tmp_path: Path, devices: list[Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLINF_PROFILES", str(tmp_path / "kept"))
    run = ready(tmp_path)
    places, _ = kinds_of(devices)
    path = cache.keep(profile(devices, identity=identity_of(run)), places, lambda line: None)
    assert path is not None
    said: list[str] = []
    found = plan_for(run, devices, said.append)
    assert found is not None
    assert any(str(path) in line for line in said)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"identity": {"workflow": "other", "model": "none"}}, "is of workflow 'other', and this is for 'slowing'"),
        ({"identity": {"workflow": "slowing", "model": "big"}}, "is of model 'big', and this is for 'none'"),
        ({"identity": {"workflow": "slowing", "model": "none", "config": "0"}}, "is of settings '0'"),
    ],
)
def test_a_profile_of_something_else_is_refused_or_taken_by_force(
    tmp_path: Path, devices: list[Device], changes: dict[str, object], text: str
) -> None:
    found = Profile.model_validate({**profile(devices).model_dump(), **changes})
    save_profile(found, tmp_path / "p.yaml")
    given = f"plan.profile={tmp_path / 'p.yaml'}"
    with pytest.raises(ConfigError, match=text):
        plan_for(ready(tmp_path, given), devices, lambda line: None)
    assert plan_for(ready(tmp_path, given, "plan.force=true"), devices, lambda line: None) is not None


def test_a_profile_of_other_hardware_is_refused_or_taken_by_force(tmp_path: Path, devices: list[Device]) -> None:
    save_profile(
        slowing.known().model_copy(update={"kinds": {"gpu9": Kind()}, "stages": of_kind("gpu9")}), tmp_path / "p.yaml"
    )
    given = f"plan.profile={tmp_path / 'p.yaml'}"
    with pytest.raises(ConfigError, match="is of devices 'gpu9'"):
        plan_for(ready(tmp_path, given), devices, lambda line: None)
    found = plan_for(ready(tmp_path, given, "plan.force=true"), devices, lambda line: None)
    assert found is not None
    assert found.judged.seconds == pytest.approx(0.64, rel=0.01)


def of_kind(kind: str) -> dict[str, object]:
    return {
        name: stage.model_copy(
            update={"points": tuple(point.model_copy(update={"kind": kind}) for point in stage.points)}
        )
        for name, stage in slowing.known().stages.items()
    }


def test_a_profile_that_is_not_there_is_named(tmp_path: Path, devices: list[Device]) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml cannot be read"):
        plan_for(ready(tmp_path, "plan.profile=/nowhere.yaml"), devices, lambda line: None)


def test_on_one_device_or_with_a_plan_that_is_named_there_is_nothing_to_look_for(
    tmp_path: Path, devices: list[Device]
) -> None:
    assert plan_for(ready(tmp_path), devices[:1], lambda line: None) is None
    assert plan_for(ready(tmp_path, "plan=collocated"), devices, lambda line: None) is None
    assert plan_for(ready(tmp_path, "plan.file=mine.yaml"), devices, lambda line: None) is None


def test_objectives_are_those_of_the_config() -> None:
    def of(*overrides: str) -> object:
        return objective_of(rlinf.load_config(["+workflow=grpo", *SMALL, *overrides]).plan)

    assert of() == TIME
    assert of("plan.objective=memory") == MEMORY
    assert of("plan.objective=devices", "plan.within=0.2") == fewest(0.2)
    with pytest.raises(ConfigError, match=r"plan.objective='speed' is not one of time, memory, devices"):
        of("plan.objective=speed")


def test_the_summary_has_a_line_for_each_family() -> None:
    lines = summary(find(Ground(slowing.graph_of(0), slowing.known(), {"cpu": (0, 1)})))
    assert lines[0].startswith("expected: 0.64 s")
    assert lines[0].endswith("(disaggregated)")
    heads = [line.split(":")[0].strip() for line in lines[1:] if line.startswith("  ") and not line.startswith("    ")]
    assert set(heads) == {"collocated", "hybrid"}
