"""A profile: what the stages of a workflow were measured to take, as plain data. A YAML file, which a person can write.

It says nothing of plans. `rlinf.scheduler.profiler` measures one; `rlinf.scheduler.cost` makes a model of it; with
that, plans are made on any machine, also on one that could not run them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NoReturn

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rlinf.errors import ConfigError


class _Plain(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=False)


class Identity(_Plain):
    """What a profile is of.

    Attributes:
        workflow: its name.
        model: as a run prints it: architecture, layers, parameters.
        config: digest of all settings that change what a stage does; ``""``: written by hand, for any.
    """

    workflow: str
    model: str
    config: str = ""


class Kind(_Plain):
    """A kind of device.

    Attributes:
        memory: bytes of a device; ``None``: not known, everything fits.
    """

    memory: int | None = Field(default=None, gt=0)


class Point(_Plain):
    """Calls of one size of a stage, in one layout.

    Attributes:
        kind: of the devices; ``""`` where the group computes on none.
        dp, tp: the group's layout; all its replicas were at work at once, each on ``rows`` rows.
        rows: that a replica took in a call.
        seconds: of a call, of the slowest rank: the median of several.
        spread: half the distance between the quartiles, of ``seconds``.
        transient: bytes that a rank's device held in it beyond what stays.
        beside: other groups were at work meanwhile, on other devices of the same host.
    """

    kind: str = ""
    dp: int = Field(default=1, ge=1)
    tp: int = Field(default=1, ge=1)
    rows: int = Field(ge=1)
    seconds: float = Field(gt=0)
    spread: float = Field(default=0.0, ge=0)
    transient: int = Field(default=0, ge=0)
    beside: bool = False


class Tail(_Plain):
    """Why a stage that generates takes as long as it does: its longest sequences.

    Attributes:
        lengths: of the sequences that it makes, in tokens: quantiles in even steps, from the shortest to the longest.
        slots: sequences that a replica works on side by side.
    """

    lengths: tuple[float, ...] = Field(min_length=1)
    slots: int = Field(ge=1)

    @model_validator(mode="after")
    def _ascend(self) -> Tail:
        if any(length <= 0 for length in self.lengths) or list(self.lengths) != sorted(self.lengths):
            raise ValueError("lengths are quantiles: above 0, in ascending order")
        return self


class StageProfile(_Plain):
    """One stage.

    Attributes:
        points: measured calls.
        row_bytes: of what it writes, for each row that it makes.
        tail: of a stage that generates.
    """

    points: tuple[Point, ...] = Field(min_length=1)
    row_bytes: float = Field(default=0.0, ge=0)
    tail: Tail | None = None


class Held(_Plain):
    """A group in one layout: the bytes that each of its devices holds, and seconds to take them off and on again."""

    kind: str
    dp: int = Field(default=1, ge=1)
    tp: int = Field(default=1, ge=1)
    resident: int = Field(default=0, ge=0)
    onload: float = Field(default=0.0, ge=0)
    offload: float = Field(default=0.0, ge=0)


class SyncPoint(_Plain):
    """A weight sync between two groups of so many ranks: seconds to send, and to take over."""

    source: str
    target: str
    source_ranks: int = Field(default=1, ge=1)
    target_ranks: int = Field(default=1, ge=1)
    send: float = Field(gt=0)
    receive: float = Field(gt=0)


class Transfer(_Plain):
    """Rows on their way by one transport: seconds of a message, and of each byte of it."""

    fixed: float = Field(default=0.0, ge=0)
    per_byte: float = Field(default=0.0, ge=0)


class Profile(_Plain):
    """See the module's docstring.

    Attributes:
        identity: what it is of.
        kinds: the devices that it was measured on, by name.
        rows: source -> rows that it makes in an iteration.
        stages: name (``actor.train``) -> what it takes. A stage that is not there takes no time.
        groups: name -> what it holds, in each layout.
        syncs: weight syncs.
        transfers: transport -> what it takes.
        transport: that rows take between groups here.
        note: when and how it was taken.
    """

    identity: Identity
    kinds: Mapping[str, Kind] = Field(min_length=1)
    rows: Mapping[str, int]
    stages: Mapping[str, StageProfile] = Field(min_length=1)
    groups: Mapping[str, tuple[Held, ...]] = {}
    syncs: tuple[SyncPoint, ...] = ()
    transfers: Mapping[str, Transfer] = {}
    transport: str = ""
    note: str = ""

    @model_validator(mode="after")
    def _consistent(self) -> Profile:
        for name, stage in self.stages.items():
            for point in stage.points:
                if point.kind and point.kind not in self.kinds:
                    raise ValueError(f"stages.{name} has a point of kind {point.kind!r}; kinds are {[*self.kinds]}")
        for name, held in self.groups.items():
            for layout in held:
                if layout.kind not in self.kinds:
                    raise ValueError(f"groups.{name} is on kind {layout.kind!r}; kinds are {[*self.kinds]}")
        if self.transport and self.transport not in self.transfers:
            raise ValueError(f"transport {self.transport!r} is not one of transfers: {[*self.transfers]}")
        if bad := {name: count for name, count in self.rows.items() if count < 1}:
            raise ValueError(f"rows: found {bad}, expected 1 or more of each source")
        return self


def save_profile(profile: Profile, path: Path) -> None:
    """Write a profile as YAML, in place of an older one at once: a reader sees the one or the other.

    Raises:
        OSError: the folder cannot be written to.
    """
    import os
    import tempfile

    path.parent.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(profile.model_dump(mode="json", exclude_defaults=True), sort_keys=False, width=120)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def load_profile(path: Path) -> Profile:
    """Read what `save_profile`, or a person, wrote.

    Raises:
        ConfigError: it is not there, or not a profile; the message names the key, what was found and what is expected.
    """
    try:
        data = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"the profile {path} cannot be read: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"the profile {path} is not YAML: {' '.join(str(error).split())}") from None
    try:
        return Profile.model_validate(data)
    except ValidationError as error:
        _refuse(path, error)


def check_identity(profile: Profile, wanted: Identity, kinds: Collection[str], force: bool, at: str) -> None:
    """Refuse a profile of something else.

    Args:
        profile: what is there.
        wanted: what it is for.
        kinds: devices that plans are made for.
        force: take it all the same.
        at: where it comes from, for the message.

    Raises:
        ConfigError: it is of another workflow, model, config or hardware.
    """
    if force:
        return
    found = profile.identity
    pairs = [
        ("workflow", found.workflow, wanted.workflow),
        ("model", found.model, wanted.model),
        ("settings", found.config, wanted.config if found.config else ""),
        *[("devices", ", ".join(sorted(profile.kinds)), kind) for kind in sorted(kinds) if kind not in profile.kinds],
    ]
    for what, there, here in pairs:
        if there != here:
            raise ConfigError(
                f"the profile {at} is of {what} {there!r}, and this is for {here!r}: take a new one "
                "(python -m rlinf.profile ...), or have it used all the same (plan.force=true; --force)"
            )


def _refuse(path: Path, error: ValidationError) -> NoReturn:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"]) or "the whole"
    found: Any = first.get("input")
    shown = "" if isinstance(found, Mapping) else f" (found {found!r})"
    what = "there is no such key" if first["type"] == "extra_forbidden" else first["msg"].removeprefix("Value error, ")
    more = f"; {error.error_count() - 1} more mistakes" if error.error_count() > 1 else ""
    raise ConfigError(f"the profile {path}: {where}: {what}{shown}{more}") from None
