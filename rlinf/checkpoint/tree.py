"""A worker's state as two flat tables: tensors by path, and plain values by path.

A path joins the keys of nested dicts with ``/`` (``~`` and ``/`` within a key are escaped as in a JSON pointer), so
that it names a value in an error the way a person would.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from rlinf.errors import CheckpointError

_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def flatten(state: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Split a tree into ``(tensors, plain)``, each by path and in the order of the paths.

    Raises:
        CheckpointError: a value is neither a tensor nor plain (int, float, str, bool, None, a list or tuple of
            these), or two keys have one path.
    """
    tensors: dict[str, torch.Tensor] = {}
    plain: dict[str, Any] = {}

    def visit(path: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, child in value.items():
                visit(f"{path}/{_escape(key)}" if path else _escape(key), child)
            return
        if path in tensors or path in plain:
            raise CheckpointError(f"two keys of the state have one name, {path!r} (1 and '1', say); rename one")
        if isinstance(value, torch.Tensor):
            tensors[path] = value
        else:
            encode(path, value)  # refuses what is not plain
            plain[path] = value

    visit("", state)
    return {path: tensors[path] for path in sorted(tensors)}, {path: plain[path] for path in sorted(plain)}


def rebuild(template: dict[str, Any], leaf: Callable[[str, Any], Any]) -> dict[str, Any]:
    """A tree with the template's keys, each value made by ``leaf(path, template's value)``."""

    def build(path: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {
                key: build(f"{path}/{_escape(key)}" if path else _escape(key), child) for key, child in value.items()
            }
        return leaf(path, value)

    return build("", template)


def encode(path: str, value: Any) -> Any:
    """A plain value as strict JSON. Floats that JSON lacks, and tuples, are tagged: ``{"float": "nan"}``.

    Raises:
        CheckpointError: the value is not plain; ``path`` names it.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": repr(float(value))}
    if isinstance(value, int):
        return int(value)
    if isinstance(value, list | tuple):
        items = [encode(f"{path}[{i}]", item) for i, item in enumerate(value)]
        return {"tuple": items} if isinstance(value, tuple) else items
    raise CheckpointError(
        f"{path} of the state is a {type(value).__module__}.{type(value).__qualname__}; a checkpoint keeps tensors "
        "(as values of dicts, not in lists), int, float, str, bool, None, and lists or tuples of plain values"
    )


def decode(value: Any) -> Any:
    """The inverse of `encode`."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if isinstance(value, dict):
        (tag, inner), *_ = value.items()
        return _FLOATS[inner] if tag == "float" else tuple(decode(item) for item in inner)
    return value


def _escape(key: Any) -> str:
    return str(key).replace("~", "~0").replace("/", "~1")
