"""``docs/config.md``, made from `rlinf.config`: every key with its type, default and meaning, and the group choices.

``python -m rlinf.config_docs`` prints it, ``--write FILE`` writes it, ``--check FILE`` fails when it is stale. What a
key means is the comment after it in the source, so that there is one place to keep true.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import io
import json
import sys
import tokenize
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from rlinf import config

ROOT = "TrainConfig"
_HEAD = """# Configuration

Made from `rlinf/config.py` by `python -m rlinf.config_docs --write docs/config.md`; edit the comments there.

Give a key on the command line as `key=value`, and a group as `group=choice`. A key that is not in these tables is an
error that names the nearest one. `(required)`: it has no default; a group's file or the command line gives it.
"""


@dataclass(frozen=True)
class Key:
    """One line of a table.

    Attributes:
        name: dotted, from the root of a run's config.
        type: as written in the schema.
        default: as YAML shows it.
        meaning: the comment after it.
    """

    name: str
    type: str
    default: str
    meaning: str


@dataclass(frozen=True)
class Group:
    """A table: the keys of one dataclass at one place of the config."""

    name: str
    keys: tuple[Key, ...]
    choices: tuple[tuple[str, str], ...]


def groups(configs: Path | None = None) -> list[Group]:
    """All groups, the run's own keys first. ``configs`` is where the YAML files of the choices are."""
    root = getattr(config, ROOT)
    comments = _comments(Path(config.__file__).read_text(encoding="utf-8"))
    nested = {f.name: _dataclass(f.type) for f in dataclasses.fields(root)}
    folder = configs if configs is not None else Path(config.__file__).parent / "configs"
    found = [Group("", _keys("", root, comments), ())]
    for name, cls in nested.items():
        if cls is not None:
            found.append(Group(name, _keys(f"{name}.", cls, comments), _choices(folder / name)))
    return found


def render(configs: Path | None = None) -> str:
    """The Markdown page."""
    parts = [_HEAD]
    for group in groups(configs):
        parts.append(f"## {f'`{group.name}`' if group.name else 'The run'}\n")
        if group.choices:
            parts.append(f"Choices of `{group.name}=`:\n")
            parts.append("".join(f"- `{name}`{f': {_prose(text)}' if text else ''}\n" for name, text in group.choices))
        rows = [("key", "type", "default", "meaning"), ("---",) * 4]
        rows += [(f"`{k.name}`", f"`{_cell(k.type)}`", f"`{_cell(k.default)}`", _prose(k.meaning)) for k in group.keys]
        parts.append("".join(f"| {' | '.join(row)} |\n" for row in rows))
    return "\n".join(parts)


def _keys(prefix: str, cls: type, comments: dict[tuple[str, str], str], seen: tuple[type, ...] = ()) -> tuple[Key, ...]:
    keys: list[Key] = []
    for field in dataclasses.fields(cls):
        inner = _dataclass(field.type)
        meaning = comments.get((cls.__name__, field.name), "")
        if inner is None and meaning.startswith("${"):
            keys.append(Key(prefix + field.name, str(field.type), meaning, f"follows `{meaning[2:-1]}`"))
        elif inner is None:
            keys.append(Key(prefix + field.name, str(field.type), _default(field), meaning))
        elif prefix and meaning.startswith("${"):
            keys.append(
                Key(prefix + field.name, "group", meaning, f"the keys of `{meaning[2:-1]}`, this role's own copy")
            )
        elif prefix and inner not in seen:
            keys += _keys(f"{prefix}{field.name}.", inner, comments, (*seen, cls))
    return tuple(keys)


def _default(field: dataclasses.Field[Any]) -> str:
    value = field.default
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    if value is dataclasses.MISSING or value == MISSING:
        return "(required)"
    if isinstance(value, tuple):
        value = list(value)
    return value if isinstance(value, str) and value else json.dumps(value)


def _dataclass(annotation: Any) -> type | None:
    found = getattr(config, annotation, None) if isinstance(annotation, str) else annotation
    return found if isinstance(found, type) and dataclasses.is_dataclass(found) else None


def _comments(source: str) -> dict[tuple[str, str], str]:
    """The comment of each field by (class, field): at the end of its lines, or on lines of its own before it."""
    by_line: dict[int, tuple[str, bool]] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            by_line[token.start[0]] = (token.string.lstrip("# ").rstrip(), token.line.lstrip().startswith("#"))
    found: dict[tuple[str, str], str] = {}
    for cls in ast.parse(source).body:
        if not isinstance(cls, ast.ClassDef):
            continue
        for node in cls.body:
            if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
                continue
            last = node.end_lineno or node.lineno
            lines = [by_line[n][0] for n in range(node.lineno, last + 1) if n in by_line]
            before = node.lineno - 1
            while before in by_line and by_line[before][1]:
                lines.insert(0, by_line[before][0])
                before -= 1
            found[cls.name, node.target.id] = " ".join(lines)
    return found


def _choices(folder: Path) -> tuple[tuple[str, str], ...]:
    """(name, the comment that its file opens with) of each file of a group."""
    found = []
    for path in sorted(folder.glob("*.yaml")):
        opening = []
        for line in path.read_text(encoding="utf-8").splitlines():
            if not line.startswith("#"):
                break
            if not line.startswith("# @package"):
                opening.append(line.lstrip("# ").strip())
        found.append((path.stem, " ".join(opening)))
    return tuple(found)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _prose(text: str) -> str:
    # Outside of code, <output_dir> would be taken for a tag and vanish.
    return "`".join(
        part if i % 2 else part.replace("<", "&lt;").replace(">", "&gt;")
        for i, part in enumerate(_cell(text).split("`"))
    )


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m rlinf.config_docs", description="The reference of every config key."
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--write", type=Path, metavar="FILE", help="write it to a file")
    what.add_argument(
        "--check", type=Path, metavar="FILE", help="exit with 1 when the file is not what would be written"
    )
    asked = parser.parse_args(arguments)
    page = render()
    if asked.write is not None:
        asked.write.parent.mkdir(parents=True, exist_ok=True)
        asked.write.write_text(page, encoding="utf-8")
    elif asked.check is not None:
        there = asked.check.read_text(encoding="utf-8") if asked.check.is_file() else ""
        if there != page:
            print(f"{asked.check} is stale: run `python -m rlinf.config_docs --write {asked.check}`", file=sys.stderr)
            return 1
    else:
        print(page, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
