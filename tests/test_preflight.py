"""Bad input is found before a model is loaded or a process started, and loses nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlinf.algorithms.schedule import lr_factor
from rlinf.checkpoint import Checkpoints, Meta, save_state
from rlinf.compose import compose
from rlinf.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    ModelError,
    PlacementError,
    RlinfError,
    WorkflowError,
)
from rlinf.preflight import Ready, preflight
from rlinf.train import Terminated, load_graph, main

BASE = ("+workflow=ppo", "model=tiny", "data=digits")


def check(tmp_path: Path, *overrides: str) -> Ready:
    cfg = compose([*BASE, f"output_root={tmp_path}", *overrides])
    return preflight(cfg, load_graph)


def rows(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize(
    ("override", "error", "text"),
    [
        ("algorithm.mini_batch_size=5", ConfigError, r"mini_batch_size=5 does not divide the 32 samples.*are 2, 4, 8"),
        ("data.prompts_per_step=0", ConfigError, r"data\.prompts_per_step=0 must be at least 1"),
        ("algorithm.critic_warmup=-1", ConfigError, r"critic_warmup=-1 must be 0 or more"),
        ("algorithm.critic_warmup=12", ConfigError, r"critic_warmup=12 must be .* below steps=10"),
        ("cluster.start_timeout_s=-1", ConfigError, r"cluster\.start_timeout_s=-1 must be 0 or more seconds"),
        ("actor.tp=0", ConfigError, r"actor\.tp=0 must be at least 1"),
        ("actor.tp=3", ModelError, r"tp=3 would split a head.*set tp to one of \[1, 2\]"),
        ("data.kind=nonsense", DataError, "nonsense"),
        ("reward.scorer=last_numbr", ConfigError, "last_number"),
        ("logger.console=loud", ConfigError, "loud"),
        ("actor.optimizer.schedule=cosin", ConfigError, "cosine"),
        ("checkpoint.keep=0", ConfigError, "keep"),
        ("resume=/nowhere/step-000001", CheckpointError, "there is no checkpoint at"),
        ("workflow.target=rlinf.workflows.ppo.poo", ConfigError, "has no function 'poo'"),
        ("workflow.target=no_such_module.flow", ConfigError, "there is no module 'no_such_module'"),
        ("workflow.target=builtins.repr", RlinfError, "must return a Workflow, it returned str"),
        ("algorithm.loss=ppo_clap", ConfigError, "ppo_clip"),
        ("algorithm.aggregation=tokens", ConfigError, "token_mean"),
        ("algorithm.kl_in=advantage", ConfigError, "kl_in"),
        ("rollout.engine=vlm", ConfigError, "vllm"),
        ("model.dtype=float16", ConfigError, "float32"),
    ],
)
def test_a_wrong_value_is_named_with_the_remedy(tmp_path: Path, override: str, error: type, text: str) -> None:
    with pytest.raises(error, match=text):
        check(tmp_path, override)


def test_task_names_are_checked_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="chain_sum"):
        check(tmp_path, "data=chain_sum", "data.name=chain_sums")


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ((), "empty|no row"),
        (('{"question": "1+1", "answer": 2}', "{broken"), "row 2"),
        (('{"question": "1+1"}',), "answer"),
    ],
)
def test_a_bad_data_file_is_named_with_its_row(tmp_path: Path, lines: tuple[str, ...], text: str) -> None:
    from rlinf.data import Prompts

    path = tmp_path / "rows.jsonl"
    path.write_text("".join(line + "\n" for line in lines))
    cfg = compose([*BASE, "data=jsonl", f"data.train={path}", "data.validation_size=0", "reward.scorer=exact_match"])

    def read() -> None:
        preflight(cfg, load_graph)
        Prompts(cfg.data, cfg.model, "train", 0).setup()  # rows past the first are read by the run

    with pytest.raises(DataError, match=text):
        read()


def test_a_missing_data_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere"):
        check(tmp_path, "data=jsonl", "data.train=nowhere.jsonl")


def test_a_directory_that_is_no_model_is_named_with_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        check(tmp_path, f"model.path={tmp_path}")


def test_an_output_directory_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    rows(tmp_path / "file", "x")
    with pytest.raises(CheckpointError, match="file"):
        check(tmp_path, f"output_dir={tmp_path / 'file' / 'out'}")


def test_a_placement_wider_than_the_cluster_is_refused(tmp_path: Path) -> None:
    ready = check(tmp_path, "actor.dp=64")
    with pytest.raises(PlacementError, match="actor asks for dp=64 x tp=1 = 64 devices"):
        ready.lines()


def test_a_warm_up_that_leaves_no_schedule_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"warmup_steps=99 leaves nothing of the 12"):
        check(tmp_path, "actor.optimizer.schedule=cosine", "actor.optimizer.warmup_steps=99", "steps=12")


def committed(output: Path, ready: Ready, step: int, workflow: str = "") -> Path:
    store = Checkpoints(output, 2)
    path = store.begin(step)
    save_state({"x": 1}, path / "host")
    identity = ready.identity
    return store.commit(path, Meta(step, step, workflow or identity.workflow, identity.model, {"host": 1}))


def test_resume_auto_takes_the_newest_committed_checkpoint_and_passes_over_half_a_one(tmp_path: Path) -> None:
    out = tmp_path / "out"
    ready = check(tmp_path, f"output_dir={out}")
    whole = committed(out, ready, 3)
    half = out / "checkpoints" / "step-000009"
    half.mkdir()
    (half / "meta.json").write_text(json.dumps({}))
    found = check(tmp_path, f"output_dir={out}", "resume=auto").resume
    assert found is not None
    assert found[0] == whole
    with pytest.raises(CheckpointError, match="not a committed checkpoint"):
        check(tmp_path, f"output_dir={tmp_path / 'new'}", f"resume={half}")
    assert whole.exists()


def test_without_resume_a_directory_that_holds_a_run_is_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    kept = committed(out, check(tmp_path, f"output_dir={out}"), 3)
    with pytest.raises(CheckpointError, match=r"holds a run already.*resume=auto"):
        check(tmp_path, f"output_dir={out}")
    assert kept.exists()


def test_a_checkpoint_of_another_workflow_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    committed(out, check(tmp_path, f"output_dir={out}"), 3, workflow="other")
    with pytest.raises(CheckpointError, match="is of workflow 'other', this run's workflow is 'ppo'"):
        check(tmp_path, f"output_dir={out}", "resume=auto")


def test_a_run_that_is_complete_is_not_silently_resumed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    committed(out, check(tmp_path, f"output_dir={out}"), 12)
    with pytest.raises(ConfigError, match="at step 12 and steps=12: nothing is left to do; raise steps"):
        check(tmp_path, f"output_dir={out}", "resume=auto", "steps=12")


def test_a_dry_run_prints_what_would_run_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    monkeypatch.setattr("sys.argv", ["train"])
    assert main([*BASE, "--dry-run", f"output_root={tmp_path}"]) == 0
    said = capsys.readouterr().out
    for text in ("4 prompts x 8 samples = 32 samples", "actor: devices 0", "GiB a rank", "optimizer step"):
        assert text in said
    assert not ray.is_initialized()
    assert list(tmp_path.iterdir()) == []


def test_an_error_that_nobody_foresaw_leaves_the_command_as_it_is_and_not_with_exit_code_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(cfg: object) -> None:
        raise ZeroDivisionError("inside the workflow's function")

    monkeypatch.setattr("rlinf.workflows.ppo.ppo", breaks)
    monkeypatch.setattr("sys.argv", ["train"])
    with pytest.raises(ZeroDivisionError, match="inside the workflow's function"):  # Python then exits with 1
        main([*BASE, f"output_root={tmp_path}"])


@pytest.mark.parametrize(("signalled", "code"), [(KeyboardInterrupt, 130), (Terminated, 143)])
@pytest.mark.parametrize("wrapped", [True, False])
def test_a_signal_has_its_exit_code_also_where_it_comes_while_rays_own_code_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signalled: type[BaseException], code: int, wrapped: bool
) -> None:
    def stopped(cfg: object) -> None:
        if wrapped:  # as CPython does where C code returns a result although a signal handler raised
            raise SystemError("returned a result with an exception set") from signalled()
        raise signalled

    monkeypatch.setattr("rlinf.train.train", stopped)
    monkeypatch.setattr("sys.argv", ["train"])
    assert main([*BASE, f"output_root={tmp_path}"]) == code


def test_the_learning_rate_schedule_spans_the_run(tmp_path: Path) -> None:
    ready = check(tmp_path, "steps=7", "algorithm.mini_batch_size=16", "algorithm.epochs=2")
    assert ready.cfg.actor.optimizer.total_steps == 7 * 2 * 2


def test_the_actors_schedule_begins_after_the_critics_warm_up_and_ends_with_the_run(tmp_path: Path) -> None:
    linear = ("actor.optimizer.schedule=linear", "critic.optimizer.schedule=linear")
    ready = check(tmp_path, "steps=7", "algorithm.critic_warmup=3", "algorithm.mini_batch_size=16", *linear)
    # The workers' own configs: those of the graph, not only the one that is shown.
    actor, critic = (ready.graph.workers[name].cfg.optimizer for name in ("actor", "critic"))
    assert [lr_factor(step, actor) for step in range(9)] == [1 - step / 8 for step in range(8)] + [0]
    assert [lr_factor(step, critic) for step in range(15)] == [1 - step / 14 for step in range(14)] + [0]
    assert "actor.train waits for the first 3 steps" in ready.lines()


def test_a_warm_up_of_a_critic_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"critic_warmup=3, and in workflow grpo all that learn wait: actor\.train"):
        check(tmp_path, "workflow.target=rlinf.workflows.grpo.grpo", "algorithm=grpo", "algorithm.critic_warmup=3")


def test_the_workflows_take_the_advantages_that_the_config_names(tmp_path: Path) -> None:
    grpo = ("workflow.target=rlinf.workflows.grpo.grpo", "algorithm=grpo")
    own = check(tmp_path, *grpo, "algorithm.advantage=tests.algorithms.user_code:constant_advantage")
    assert "host.ones" in {node.name for node in own.graph.nodes}
    with pytest.raises(WorkflowError, match=r"critic\.train reads 'returns', which no earlier stage writes"):
        check(tmp_path, "algorithm.advantage=grpo")
    with pytest.raises(WorkflowError, match=r"host\.gae reads 'values', which no earlier stage writes"):
        check(tmp_path, *grpo, "algorithm.advantage=gae")


def test_the_reference_is_left_out_where_nothing_reads_it(tmp_path: Path) -> None:
    assert "reference" in check(tmp_path).graph.workers
    assert "reference" not in check(tmp_path, "algorithm.kl_coef=0").graph.workers
