"""No option is dropped in silence: every key of the config is read somewhere, and no function swallows keywords."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlinf import config

ROOT = Path(__file__).parents[1]
SOURCES = [
    path
    for folder in ("rlinf", "workers", "workflows", "scheduler")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path.name not in ("config.py", "config_docs.py")
]


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in SOURCES}


def test_every_key_of_the_config_is_read_somewhere(trees: dict[Path, ast.Module]) -> None:
    read = {
        node.attr
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    # Interpolations hand some on: ${vps.verify} is read as actor.verify_sync.
    text = "".join(path.read_text() for path in sorted((ROOT / "configs").rglob("*.yaml")))
    read |= {name for path in re.findall(r"\$\{([\w.]+)\}", text) for name in path.split(".")}
    groups = [group for group in vars(config).values() if dataclasses.is_dataclass(group)]
    keys = [f"{group.__name__}.{field.name}" for group in groups for field in dataclasses.fields(group)]
    assert len(keys) > 100
    assert [key for key in keys if key.split(".")[1] not in read] == []


def swallowing(tree: ast.Module) -> Iterator[str]:
    """Functions that take any keyword and do nothing with it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.args.kwarg is not None:
            used = {name.id for part in node.body for name in ast.walk(part) if isinstance(name, ast.Name)}
            if node.args.kwarg.arg not in used:
                yield node.name


def test_no_function_takes_keywords_that_it_ignores(trees: dict[Path, ast.Module]) -> None:
    assert list(swallowing(ast.parse("def f(a, **rest): return a"))) == ["f"]
    assert {path.name: found for path, tree in trees.items() if (found := list(swallowing(tree)))} == {}
