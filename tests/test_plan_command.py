"""A plan on paper: what the command prints, and what it refuses, without starting anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rlinf.m2flow.costs import save_costs
from rlinf.m2flow.simulate import Cost, Costs
from rlinf.plan import main

BASE = ("+workflow=ppo", "model=tiny", "data=digits")


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([*BASE, *arguments]) == 0
    return capsys.readouterr().out


def test_graph_plan_programs_and_time_line_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "plan=disaggregated", "--devices", "4")
    for part in (
        "WORKFLOW ppo",
        "<- rollout.generate: prompt_ids, response_ids",
        "weights of actor -> rollout",
        "PLAN on 4 x unit (what if)",
        "piped, 8 rows at a time:",
        "rollout: devices 0-1, dp=2",
        "acquire devices 2-3 (turn 1 of",
        "send weights to rollout at version i",
        "receive weights of actor at version i",
        "pull the first 8 rows a rank from rollout.generate",
        "run actor.train on 8 rows at a time, step the optimiser",
        "TIME LINE of 1 iteration, predicted:",
        "devices 0-1: rollout",
        "idle",
        "counts one unit",
    ):
        assert part in text, part


def test_swapping_and_staleness_stand_in_the_programs(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "plan=disaggregated", "plan.swap=always", "plan.staleness=2", "--devices", "2")
    assert "onload" in text
    assert "offload" in text
    assert "receive weights of actor at version i-2 (0 at least)" in text
    assert "TIME LINE of 5 iterations, predicted:" in text


def test_measured_costs_give_seconds_and_follow_the_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    nodes = {
        "rollout.generate": Cost(0.0, 1.0),
        "reward.score": Cost(),
        "critic.values": Cost(),
        "actor.train": Cost(2.0, 0.0),
        "critic.train": Cost(),
        "host.source0": Cost(),
        "host.gae": Cost(),
    }
    save_costs(Costs(nodes=nodes, rows={"host.source0": 99}), tmp_path / "costs.yaml")
    arguments = ("plan=collocated", "--costs", str(tmp_path / "costs.yaml"), "--devices", "1")
    text = said(capsys, "data.prompts_per_step=6", "--iterations", "3", *arguments)
    assert "TIME LINE of 3 iterations, predicted: 24 s, 8 s each" in text
    assert "It has none of host.transcripts, reference.logprobs: they take no time here" in text
    assert "one unit" not in text


def test_this_machine_is_planned_for_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "plan=collocated", "cluster.gpus=never")
    assert "if it runs on this machine alone" in text


GRPO = ("+workflow=grpo", "model=tiny", "data=digits", "cluster.gpus=never")


def profile_of(folder: Path, **identity: str) -> str:
    """By hand: generation takes 8 s for 4 prompts on any number of devices, training 8 s for 32 rows on one."""
    points = {
        "rollout.generate": [{"kind": "big", "dp": n, "rows": max(4 // n, 1), "seconds": 8.0} for n in (1, 2, 4)],
        "actor.train": [{"kind": "big", "rows": 1, "seconds": 0.25}, {"kind": "big", "rows": 32, "seconds": 8.0}],
    }
    found = {
        "identity": {"workflow": "grpo", "model": "mine", **identity},
        "kinds": {"big": {"memory": 2**36}},
        "rows": {"host.source0": 4},
        "stages": {name: {"points": own} for name, own in points.items()},
    }
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(found))
    return str(path)


def test_the_best_plan_is_found_and_explained_from_a_profile(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    mine = profile_of(tmp_path)
    assert main([*GRPO, "--explain", "--force", "--profile", mine, "--devices", "2"]) == 0
    text = capsys.readouterr().out
    for part in (
        *("WORKFLOW grpo, on 2 x big (what if)", f"Costs of the profile {mine}.", "THE PLAN", "ITS TIME LINE"),
        *("expected: ", " s an iteration", "THE BEST OF EACH FAMILY", "collocated:", "disaggregated:"),
        "WHAT WOULD CHANGE THE CHOICE",
    ):
        assert part in text, part
    assert "THE PLAN THAT WAS ASKED FOR" not in text


def test_a_plan_that_is_named_stands_beside_the_best(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    mine = profile_of(tmp_path)
    assert main([*GRPO, "plan=disaggregated", "--explain", "--force", "--profile", mine, "--devices", "2"]) == 0
    assert "THE PLAN THAT WAS ASKED FOR (disaggregated)" in capsys.readouterr().out


def test_what_if_changes_times_as_it_says(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    mine = ("plan=collocated", "--force", "--profile", profile_of(tmp_path), "--devices", "1")

    def line(*arguments: str) -> str:
        assert main([*GRPO, *mine, *arguments]) == 0
        return next(line for line in capsys.readouterr().out.splitlines() if line.startswith("TIME LINE"))

    assert line() == "TIME LINE of 1 iteration, predicted: 16 s"
    assert line("--slow", "actor.train=2") == "TIME LINE of 1 iteration, predicted: 24 s"
    assert line("--slow", "rollout.generate=0.5", "--slow", "actor.train=2").endswith("20 s")
    assert line("--batch", "8") == "TIME LINE of 1 iteration, predicted: 32 s"


def test_without_a_choice_plan_auto_is_what_would_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    mine = ("--force", "--profile", profile_of(tmp_path))
    assert main([*GRPO, *mine, "--devices", "2"]) == 0
    best = capsys.readouterr().out
    assert "PLAN on 2 x big (what if)" in best
    assert main([*GRPO, *mine, "--devices", "1"]) == 0
    assert "devices 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--devices", "small=2"), "--devices small=2: the profile knows the kinds big"),
        (("--devices", "2", "--slow", "actor.trian=2"), "actor.trian"),
        (("--devices", "2", "--slow", "actor.train"), "--slow actor.train: expected name=factor"),
        (("--devices", "2", "--slow", "actor.train=-1"), "-1"),
        (("--devices", "2", "--lengths", "0"), "0"),
        (("--devices", "2", "--memory", "0"), "--memory 0: expected GiB, above 0"),
        (("--devices", "2", "plan.objective=speed", "--explain"), "plan.objective='speed' is not one of"),
    ],
)
def test_a_what_if_that_makes_no_sense_is_refused(
    arguments: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main([*GRPO, "--force", "--profile", profile_of(tmp_path), *arguments]) == 2
    found = capsys.readouterr()
    assert found.err.startswith("error: ")
    assert text in found.err


@pytest.mark.parametrize(
    ("identity", "text"),
    [({}, "is of model 'mine'"), ({"workflow": "ppo"}, "is of workflow 'ppo', and this is for 'grpo'")],
)
def test_a_profile_of_something_else_is_refused(
    identity: dict[str, str], text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main([*GRPO, "--profile", profile_of(tmp_path, **identity), "--devices", "2"]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"rows": {"host.source0": 0}}, "rows: found {'host.source0': 0}, expected 1 or more"),
        ({"stages": {"actor.train": {"points": [{"kind": "big", "rows": 1, "seconds": 0}]}}}, "seconds"),
        ({"stages": {"actor.train": {"points": [{"kind": "big", "rows": 1, "seconds": -2}]}}}, "-2"),
        ({"colour": "red"}, "colour: there is no such key"),
        ({"kinds": {}}, "kinds"),
    ],
)
def test_a_profile_that_makes_no_sense_is_refused(
    change: dict[str, object], text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = Path(profile_of(tmp_path))
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **change}))
    assert main([*GRPO, "--force", "--profile", str(path), "--devices", "2"]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("plan=hybrd",), r"there is no plan 'hybrd': did you mean hybrid?"),
        (("plan.knd=hybrid",), "did you mean 'plan.kind'?"),
        (("plan=hybrid", "--devices", "1"), "leaves nothing of 1 device"),
        (("plan.staleness=-1", "--devices", "1"), "staleness is -1"),
        (("plan.file=/nowhere.yaml",), "the plan /nowhere.yaml cannot be read"),
        (("--costs", "/nowhere.yaml", "--devices", "1"), "the costs /nowhere.yaml cannot be read"),
        (("workflow.target=",), "no workflow was chosen"),
    ],
)
def test_what_is_wrong_is_said_with_exit_code_2(
    arguments: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*BASE, *arguments]) == 2
    found = capsys.readouterr()
    assert found.err.startswith("error: ")
    assert text in found.err


def test_costs_of_another_workflow_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    save_costs(Costs(nodes={"a.b": Cost()}), tmp_path / "costs.yaml")
    assert main([*BASE, "--devices", "1", "--costs", str(tmp_path / "costs.yaml")]) == 2
    assert "has costs of a.b; workflow ppo has" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [("--devices", "0"), ("--devices", "two"), ("--iterations", "-1"), ("--cost", "x")])
def test_wrong_options_end_with_exit_code_2(wrong: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*BASE, *wrong])
    assert ended.value.code == 2


def test_neither_ray_nor_engines_nor_models_are_loaded() -> None:
    code = (
        "import sys; from rlinf.plan import main; "
        f"code = main({[*BASE, 'plan=hybrid', '--devices', '4']!r}); "
        "print([m for m in ('ray', 'vllm', 'transformers') if m in sys.modules]); sys.exit(code)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "[]"
