"""What plans on paper are made from: a profile, given or kept and changed as asked, and devices, there or not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rlinf.errors import ConfigError, RlinfError

if TYPE_CHECKING:
    from rlinf.config import TrainConfig
    from rlinf.m2flow.graph import Graph
    from rlinf.scheduler.auto import Ground
    from rlinf.scheduler.profile import Identity, Profile

Places = dict[str, tuple[int, ...]]
Wanted = Callable[[], "Identity | None"]
"""What a profile must be of, when it is asked for: telling reads the model's config."""
UNIT = "unit"  # kind of the devices of a profile that nobody measured


@dataclass(frozen=True)
class Asked:
    """What if.

    Attributes:
        profile: file; ``None``: the one that is kept for this model, config and hardware.
        force: take it although it is of something else.
        devices: kind (``""``: the only one) -> how many; empty: those of this machine.
        rows: of each source in an iteration; ``None``: as measured.
        lengths: of what is generated, times as long.
        slow: stage -> times as long as measured.
        memory: bytes of a device; ``None``: as it is.
    """

    profile: Path | None = None
    force: bool = False
    devices: Mapping[str, int] = field(default_factory=dict)
    rows: int | None = None
    lengths: float = 1.0
    slow: Mapping[str, float] = field(default_factory=dict)
    memory: int | None = None


@dataclass(frozen=True)
class Basis:
    """What to plan with.

    Attributes:
        ground: profile and devices.
        unit: of time.
        about: the devices, in words.
        note: where the costs are from.
    """

    ground: Ground
    unit: str
    about: str
    note: str


def basis(graph: Graph, cfg: TrainConfig, asked: Asked) -> Basis:
    """What to plan with.

    Raises:
        ConfigError: the profile is not there, or of something else; a kind of devices that it does not have; a change
            that makes no sense.
    """
    from rlinf.scheduler.auto import Ground
    from rlinf.scheduler.whatif import change

    places, memory, about = ({}, {}, "") if asked.devices else _local(cfg)
    wanted = partial(_identity, graph, cfg)
    profile, note = _given(asked, wanted, places) or _kept(wanted, places) or (None, "")
    measured = profile is not None
    if profile is None:
        profile, note = _units(graph, cfg, asked.devices or places), _UNITS
    if asked.devices:
        places, about = _wanted(profile, asked.devices)
        memory = {kind: profile.kinds[kind].memory for kind in places}
    places = placed(profile, places, asked.force or not measured)
    memory = {kind: memory.get(kind, profile.kinds[kind].memory) for kind in places}
    if asked.memory is not None:
        memory = dict.fromkeys(places, asked.memory)
    changed = change(profile, graph, asked.rows, asked.lengths, asked.slow)
    cut = cfg.plan
    ground = Ground(graph, changed, places, memory, cut.staleness, cut.in_flight, cut.granularity, cut.swap)
    return Basis(ground, "s" if measured else "units", about, note + _changes(asked))


def placed(profile: Profile, places: Mapping[str, tuple[int, ...]], force: bool) -> Places:
    """Devices by kinds that the profile has.

    Args:
        profile: to plan with.
        places: kind -> devices.
        force: devices of other kinds count as its own ones, where it has just one kind.

    Raises:
        ConfigError: it lacks a kind.
    """
    found: dict[str, tuple[int, ...]] = {}
    for kind, own in places.items():
        name = next(iter(profile.kinds)) if force and kind not in profile.kinds and len(profile.kinds) == 1 else kind
        if name not in profile.kinds:
            raise ConfigError(
                f"the profile knows devices of the kinds {', '.join(profile.kinds)}, and this is for {kind}: "
                "take a profile there (python -m rlinf.profile ...), or say which devices (--devices KIND=N)"
            )
        found[name] = tuple(sorted((*found.get(name, ()), *own)))
    return found


_UNITS = (
    "No profile is kept for this model, config and hardware: a row of a stage, worked on or made, counts one unit. "
    "Measure it with python -m rlinf.profile, or give one by --profile."
)


def _given(asked: Asked, wanted: Wanted, places: Places) -> tuple[Profile, str] | None:
    from rlinf.scheduler.profile import check_identity, load_profile

    if asked.profile is None:
        return None
    found = load_profile(asked.profile)
    if (identity := wanted()) is not None:
        check_identity(found, identity, places, asked.force, str(asked.profile))
    return found, f"Costs of the profile {asked.profile}."


def _kept(wanted: Wanted, places: Places) -> tuple[Profile, str] | None:
    from rlinf.scheduler import cache

    if not places or (identity := wanted()) is None:
        return None
    notes: list[str] = []
    found = cache.find(identity, places, notes.append)
    return None if found is None else (found, f"Costs of the profile {cache.place_of(identity, places)}.")


def _identity(graph: Graph, cfg: TrainConfig) -> Identity | None:
    """What a profile must be of; ``None``: the model is not at hand, so that nobody can tell."""
    from rlinf.preflight import model_line
    from rlinf.scheduler.identity import config_digest
    from rlinf.scheduler.profile import Identity

    try:
        model = model_line(cfg)
    except RlinfError:
        return None
    name = cfg.workflow.name or cfg.workflow.target.replace(":", ".").rpartition(".")[2]
    return Identity(workflow=name, model=model, config=config_digest(cfg, graph))


def _local(cfg: TrainConfig) -> tuple[Places, dict[str, int | None], str]:
    from rlinf.preflight import local_devices
    from rlinf.scheduler.identity import kinds_of

    devices = local_devices(cfg)
    places, kinds = kinds_of(devices)
    memory = {name: kind.memory for name, kind in kinds.items()}
    return places, memory, f"{'; '.join(map(str, devices))} (if it runs on this machine alone)"


def _wanted(profile: Profile, devices: Mapping[str, int]) -> tuple[Places, str]:
    """
    Raises:
        ConfigError: the profile does not have such a kind, or has several and none was named.
    """
    places, at = {}, 0
    for name, count in devices.items():
        if (not name and len(profile.kinds) > 1) or (name and name not in profile.kinds):
            raise ConfigError(
                f"--devices {f'{name}=' if name else ''}{count}: the profile knows the kinds "
                f"{', '.join(profile.kinds)}; say of which, e.g. --devices {next(iter(profile.kinds))}={count}"
            )
        kind = name or next(iter(profile.kinds))
        places[kind] = tuple(range(at, at + count))
        at += count
    sizes = [f"{len(own)} x {kind}" for kind, own in places.items()]
    return places, f"{', '.join(sizes)} (what if)"


def _units(graph: Graph, cfg: TrainConfig, devices: Mapping[str, object]) -> Profile:
    """Each row of a stage counts one, of one that makes new rows each of those."""
    from rlinf.m2flow.costs import unit_costs
    from rlinf.m2flow.graph import TRAIN
    from rlinf.scheduler.profile import Identity, Kind, Point, Profile, StageProfile

    rows = source_rows(graph, cfg)
    costs = unit_costs(graph, rows)
    kinds = [kind or UNIT for kind in devices]
    stages = {}
    for node in graph.phase(TRAIN):
        if node.name in costs.nodes:
            on = kinds if graph.workers[node.worker].cls.uses_device else [""]
            seconds = costs.nodes[node.name].seconds(1)
            stages[node.name] = StageProfile(points=tuple(Point(kind=kind, rows=1, seconds=seconds) for kind in on))
    return Profile(
        identity=Identity(workflow=graph.name, model=""),
        kinds={kind: Kind() for kind in kinds},
        rows={name: count for name, count in rows.items() if count},
        stages=stages,
    )


def source_rows(graph: Graph, cfg: TrainConfig) -> dict[str, int]:
    """Rows that each source makes: of training, those of the config."""
    from rlinf.data import Prompts

    found = {}
    for node in graph.nodes:
        if not node.reads:
            held_out = isinstance(node.call, Prompts) and node.call.split == "validation"
            found[node.name] = cfg.data.validation_size if held_out else cfg.data.prompts_per_step
    return found


def _changes(asked: Asked) -> str:
    found = [
        *([f"{asked.rows} rows an iteration"] if asked.rows else []),
        *([f"lengths {asked.lengths:g} times as long"] if asked.lengths != 1 else []),
        *(f"{name} {factor:g} times as long" for name, factor in asked.slow.items()),
        *([f"{asked.memory / 2**30:g} GiB a device"] if asked.memory else []),
    ]
    return f" What if: {', '.join(found)}." if found else ""


def pairs(texts: Sequence[str], option: str) -> dict[str, float]:
    """``["a=2", "b=0.5"]`` as a mapping.

    Raises:
        ConfigError: one is not of this form.
    """
    found = {}
    for text in texts:
        name, _, value = text.rpartition("=")
        try:
            found[name] = float(value)
        except ValueError:
            name = ""
        if not name:
            raise ConfigError(f"{option} {text}: expected name=factor, e.g. actor.train=2")
    return found
