"""From a command line to a checked, typed config: Hydra does the composing, this module says clearly what is wrong."""

from __future__ import annotations

import dataclasses
import difflib
import re
import typing
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import Any

from rlinf.config import TrainConfig
from rlinf.errors import ConfigError

CONFIG_MODULE = "rlinf.configs"


def register() -> None:
    """Make the schema known to Hydra, as the config named ``schema``."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="schema", node=TrainConfig)


def compose(overrides: Sequence[str]) -> TrainConfig:
    """Compose a config from overrides as on the command line, e.g. ``["+workflow=ppo", "model=tiny"]``.

    Raises:
        ConfigError: with the nearest name where something is misspelt.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module
    from hydra.core.global_hydra import GlobalHydra

    register()
    GlobalHydra.instance().clear()
    with initialize_config_module(CONFIG_MODULE, version_base="1.3"):
        try:
            return typed(hydra_compose("config", overrides=[spelled(o) for o in overrides]))
        except Exception as error:
            raise explain(error) from error


def spelled(argument: str) -> str:
    """Hydra wants ``+workflow=ppo``, since no workflow is the default; ``workflow=ppo`` means the same."""
    return "+" + argument if re.fullmatch(r"workflow=[\w/-]+", argument) else argument


def typed(node: Any) -> TrainConfig:
    """An OmegaConf tree as dataclasses. Interpolations are resolved, missing values are errors."""
    from omegaconf import OmegaConf

    _check_keys(node, TrainConfig)
    missing = sorted(key for key in OmegaConf.missing_keys(node) if not key.startswith("hydra"))
    if missing:
        raise ConfigError(f"no value is set for {', '.join(missing)}: give one, e.g. {missing[0]}=...")
    config = OmegaConf.to_object(node)
    assert isinstance(config, TrainConfig)
    return config


def groups() -> dict[str, list[str]]:
    """Config groups and their choices."""
    found: dict[str, list[str]] = {}
    for entry in resources.files(CONFIG_MODULE).iterdir():
        if entry.is_dir() and not entry.name.startswith("_"):
            found[entry.name] = sorted(f.name[:-5] for f in entry.iterdir() if f.name.endswith(".yaml"))
    return found


def keys(cls: type = TrainConfig, prefix: str = "") -> Iterator[str]:
    """All dotted keys of the schema."""
    hints = typing.get_type_hints(cls)
    for entry in dataclasses.fields(cls):
        key = prefix + entry.name
        yield key
        if dataclasses.is_dataclass(hints[entry.name]):
            yield from keys(hints[entry.name], key + ".")


def explain(error: Exception) -> ConfigError:
    """Hydra's or OmegaConf's error, with what was meant."""
    if isinstance(error, ConfigError):
        return error
    text = str(error).strip()
    if found := re.search(r"Could not find '([\w/]+)/([\w.-]+)'", text):
        choices = groups().get(found[1], [])
        near = difflib.get_close_matches(found[2], choices, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        return ConfigError(f"there is no {found[1]} {found[2]!r}: {hint}there are {', '.join(choices)}")
    if found := re.search(r"Could not (?:override|delete[^']*) '([^']+)'", text):
        return _unknown(found[1])
    if found := re.search(r"Error merging override (\S+?)=(.*)", text):
        reason = str(error.__cause__ or text).split("\n")[0]
        return ConfigError(f"{found[1]}={found[2]}: {reason}")
    return ConfigError(text.split("\n")[0] or type(error).__name__)


def _unknown(key: str) -> ConfigError:
    return ConfigError(f"there is no config key {key!r}{_nearest(key)}; docs/config.md lists all")


def _check_keys(node: Any, cls: type, prefix: str = "") -> None:
    """Hydra's ``+key=`` opens a schema, and ``~key`` takes from it: neither may pass."""
    hints = typing.get_type_hints(cls)
    known = {entry.name for entry in dataclasses.fields(cls)}
    for name in node:
        key = f"{prefix}{name}"
        if name not in known and key != "hydra":
            raise _unknown(key)
        if name in known and dataclasses.is_dataclass(hints[name]):
            _check_keys(node[name], typing.cast(type, hints[name]), key + ".")
    gone = sorted(known - set(node))
    if gone:
        raise ConfigError(f"{prefix}{gone[0]} cannot be taken out of the config: set it to a value instead")


def _nearest(key: str) -> str:
    known = list(keys())
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if not near:
        last = key.rsplit(".", 1)[-1]
        near = [k for k in known if difflib.SequenceMatcher(None, k.rsplit(".", 1)[-1], last).ratio() > 0.8][:1]
    return f"; did you mean {near[0]!r}?" if near else ""
