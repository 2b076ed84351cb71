"""Names in the config that stand for functions: the built-in ones, or a user's own by import path."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from rlinf.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])


def unknown(key: str, found: object, known: Mapping[str, Any] | tuple[str, ...], extra: str = "") -> ConfigError:
    """The error for a value of ``key`` that is none of ``known``; it names the nearest one."""
    names = sorted(known)
    near = difflib.get_close_matches(str(found), names, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return ConfigError(f"{key}={found!r} is not known: expected one of {', '.join(names)}{extra}{hint}")


def resolve(key: str, name: str, known: Mapping[str, F]) -> F:
    """The function that ``name`` stands for.

    Args:
        key: the config key, for the error message.
        name: one of ``known``, or an import path, ``package.module:function`` (a dot in place of the colon will do).
        known: the built-in functions.

    Raises:
        ConfigError: no such name; or the module cannot be imported, or holds no such function.
    """
    if name in known:
        return known[name]
    module_name, _, attribute = name.partition(":") if ":" in name else name.rpartition(".")
    if not module_name or not attribute:
        raise unknown(key, name, known, extra=", or an import path such as my_module:my_function")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"{key}={name!r}: module {module_name!r} cannot be imported ({error}); it must be on PYTHONPATH"
        ) from error
    found = getattr(module, attribute, None)
    if not callable(found):
        public = tuple(n for n, value in vars(module).items() if callable(value) and not n.startswith("_"))
        near = difflib.get_close_matches(attribute, public, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{key}={name!r}: module {module_name!r} has no function {attribute!r}{hint}")
    return found  # type: ignore[return-value]
