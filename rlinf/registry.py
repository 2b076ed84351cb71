"""Registry: built-in parts by name, and a user's own function by import path, through one door.

A name without a dot or colon is looked up; ``my_module:function`` or ``my_module.function`` is imported. Whoever
misspells a name is told the nearest one.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from rlinf.errors import RlinfError

T = TypeVar("T")


def nearest(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` when a known name is close, followed by the known names."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"{hint} Known: {', '.join(names)}."


def is_import_path(name: str) -> bool:
    """Whether ``name`` points into a module rather than into a registry."""
    return ":" in name or "." in name


def load_callable(path: str, what: str, error: type[RlinfError]) -> Callable[..., object]:
    """Import ``module:attribute`` or ``module.attribute``.

    Raises:
        RlinfError: of type ``error``; the module cannot be imported, lacks the attribute, or it cannot be called.
    """
    module_name, _, attribute = path.partition(":") if ":" in path else path.rpartition(".")
    if not module_name or not attribute:
        raise error(f"{what} {path!r} is not an import path; expected module:function or module.function")
    try:
        found: object = importlib.import_module(module_name)
    except ImportError as cause:
        raise error(
            f"{what} {path!r}: cannot import {module_name!r} ({type(cause).__name__}: {cause}); is its folder on "
            "PYTHONPATH, or the command run from it?"
        ) from cause
    except Exception as cause:
        raise error(f"{what} {path!r}: importing {module_name!r} raised {type(cause).__name__}: {cause}") from cause
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise error(f"{what} {path!r}: {module_name!r} has no {part!r}.{nearest(part, _public(found))}")
        found = getattr(found, part)
    if not callable(found):
        raise error(f"{what} {path!r} is a {type(found).__name__}; expected a function")
    return found


def _public(module: object) -> list[str]:
    return [name for name in dir(module) if not name.startswith("_")]


class Registry(Generic[T]):
    """Named parts of one kind.

    Args:
        what: what a part is called in messages, e.g. ``"scorer"``.
        error: the error raised for an unknown name.
    """

    def __init__(self, what: str, error: type[RlinfError]) -> None:
        self.what = what
        self.error = error
        self._parts: dict[str, T] = {}

    def add(self, name: str, part: T) -> T:
        """Register a part; a second one of the same name is an error."""
        if name in self._parts:
            raise ValueError(f"{self.what} {name!r} is registered twice")
        if is_import_path(name):
            raise ValueError(f"{self.what} name {name!r} reads as an import path; leave out '.' and ':'")
        self._parts[name] = part
        return part

    def get(self, name: str) -> T:
        """The part of that name.

        Raises:
            RlinfError: of the registry's type; unknown, with the nearest name.
        """
        if name not in self._parts:
            raise self.error(
                f"unknown {self.what} {name!r}.{nearest(name, self._parts)} "
                "A function of your own is named by its import path, my_module:function."
            )
        return self._parts[name]

    def names(self) -> list[str]:
        """The registered names, sorted."""
        return sorted(self._parts)
