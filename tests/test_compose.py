"""The command line: what is misspelt or of a wrong type is named, with what was meant."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rlinf.compose import compose, groups, keys
from rlinf.errors import ConfigError


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("+workflow=pppo", r"no workflow 'pppo': did you mean ppo\? there are grpo, ppo"),
        ("model=tyny", r"no model 'tyny': did you mean tiny\?"),
        ("data=sum", r"no data 'sum': did you mean sums\?"),
        ("actor.optimizr.lr=1", r"'actor\.optimizr\.lr'; did you mean 'actor\.optimizer\.lr'"),
        ("+actor.tpp=1", r"'actor\.tpp'; did you mean 'actor\.tp'"),
        ("+foo.bar=1", r"no config key 'foo'"),
        ("stepz=3", r"'stepz'; did you mean 'steps'"),
        ("steps=many", r"steps=many: Value 'many' of type 'str' could not be converted to Integer"),
        ("actor.optimizer=3", r"actor\.optimizer=3: Invalid type"),
        ("~steps", "steps cannot be taken out of the config"),
        ("steps=[1", "no viable alternative"),
    ],
)
def test_a_wrong_override_is_an_error_that_says_what_was_meant(override: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        compose(["+workflow=ppo", override] if not override.startswith("+workflow") else [override])


def test_a_workflow_may_be_named_without_the_plus_sign() -> None:
    assert compose(["workflow=grpo"]).workflow.target == "rlinf.workflows.grpo.grpo"


@pytest.mark.parametrize("workflow", groups()["workflow"])
@pytest.mark.parametrize("model", groups()["model"])
def test_every_workflow_composes_with_every_model(workflow: str, model: str) -> None:
    cfg = compose([f"+workflow={workflow}", f"model={model}"])
    assert cfg.actor.model == cfg.model
    assert cfg.actor.algorithm == cfg.algorithm
    assert cfg.actor.temperature == cfg.rollout.temperature


@pytest.mark.parametrize(("group", "choice"), [(g, c) for g, cs in groups().items() if g != "workflow" for c in cs])
def test_every_choice_of_every_group_composes(group: str, choice: str) -> None:
    compose(["+workflow=ppo", f"{group}={choice}"])


def test_the_schemas_keys_are_dotted_paths() -> None:
    assert {"steps", "actor.optimizer.lr", "rollout.model.path"} <= set(keys())


def test_a_temperature_set_once_holds_on_both_sides() -> None:
    cfg = compose(["+workflow=ppo", "rollout.temperature=0.7"])
    assert cfg.actor.temperature == cfg.reference.temperature == 0.7


def test_without_a_workflow_the_error_lists_them_and_the_exit_code_is_not_zero() -> None:
    done = subprocess.run([sys.executable, "-m", "rlinf.train"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "+workflow=grpo, +workflow=ppo" in done.stderr
    assert "Traceback" not in done.stderr


def test_help_and_the_schema_import_nothing_heavy() -> None:
    code = "import sys, rlinf.train, rlinf.rank; print({'torch', 'ray', 'vllm', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"
