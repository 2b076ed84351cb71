"""docs/config.md says what the schema says."""

import dataclasses

import pytest

from rlinf import config, config_docs
from rlinf.config_docs import groups, main, render

KEYS = {key.name: key for group in groups() for key in group.keys}


def test_every_key_of_every_group_has_a_meaning():
    assert [name for name, key in KEYS.items() if not key.meaning] == []


def test_every_field_of_the_root_and_of_its_groups_is_there():
    for field in dataclasses.fields(config.TrainConfig):
        inner = getattr(config, str(field.type), None)
        if inner is None:
            assert field.name in KEYS
        else:
            for below in dataclasses.fields(inner):
                wanted = f"{field.name}.{below.name}"
                assert any(name == wanted or name.startswith(f"{wanted}.") for name in KEYS), wanted


@pytest.mark.parametrize(
    ("name", "type_", "default"),
    [
        ("steps", "int", "10"),
        ("data.kind", "str", "(required)"),
        ("model.path", "str | None", "null"),
        ("actor.optimizer.betas", "tuple[float, float]", "[0.9, 0.999]"),
        ("actor.model", "group", "${model}"),
        ("actor.temperature", "float", "${rollout.temperature}"),
        ("logger.tensorboard", "bool", "true"),
        ("cluster.runtime_env", "dict[str, Any]", "{}"),
    ],
)
def test_types_and_defaults_read_as_yaml(name, type_, default):
    assert (KEYS[name].type, KEYS[name].default) == (type_, default)


def test_a_comment_is_the_meaning_wherever_it_stands():
    source = """
@dataclass
class A:
    # above, in
    # two lines
    x: int = 1
    y: str = "# not a comment"  # beside
    z: dict = field(
        default_factory=dict,
    )  # after
    bare: int = 2
"""
    found = config_docs._comments(source)
    assert found["A", "x"] == "above, in two lines"
    assert found["A", "y"] == "beside"
    assert found["A", "z"] == "after"
    assert found["A", "bare"] == ""


def test_choices_carry_the_comment_that_their_file_opens_with(tmp_path):
    (tmp_path / "logger").mkdir()
    (tmp_path / "logger" / "quiet.yaml").write_text("# @package _global_\n# Says <nothing>,\n# at all.\na: 1 # no\n")
    assert "- `quiet`: Says &lt;nothing&gt;, at all.\n" in render(tmp_path)


def test_cells_do_not_break_the_table():
    rows = [line for line in render().splitlines() if line.startswith("| ")]
    assert {line.replace("\\|", "").count("|") for line in rows} == {5}


def test_written_pages_are_fresh_and_others_stale(tmp_path, capsys):
    page = tmp_path / "docs" / "config.md"
    assert main(["--check", str(page)]) == 1
    assert main(["--write", str(page)]) == 0
    assert main(["--check", str(page)]) == 0
    page.write_text(page.read_text() + "more")
    assert main(["--check", str(page)]) == 1
    assert "is stale: run" in capsys.readouterr().err
    assert main([]) == 0
    assert capsys.readouterr().out == render()
