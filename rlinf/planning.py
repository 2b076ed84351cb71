"""``plan=auto`` of a run: the profile that is given, kept or taken now; the best plan by it; and why.

The runner asks for the plan when it knows its devices. A profile is looked for in this order: ``plan.profile``; the
one that was kept for the same workflow, model, config and hardware; else the stages are measured now, and that is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlinf.errors import ConfigError
from rlinf.m2flow.gantt import seconds
from rlinf.scheduler import cache
from rlinf.scheduler.auto import Found, Ground, find
from rlinf.scheduler.cache import Places
from rlinf.scheduler.explain import Look, explained, reasons
from rlinf.scheduler.identity import identity_of, kinds_of
from rlinf.scheduler.judge import Judged
from rlinf.scheduler.planner import MEMORY, TIME, Objective, fewest
from rlinf.scheduler.profile import Profile, check_identity, load_profile
from rlinf.scheduler.replan import Planned
from rlinf.scheduler.shipped import looked_for
from rlinf.scheduler.table import profile_lines
from rlinf.whatif import placed

if TYPE_CHECKING:
    from rlinf.cluster import Device
    from rlinf.config import PlanConfig
    from rlinf.preflight import Ready

Show = Callable[[str], None]
_REASONS = 3  # lines for each family that lost; the file has all


def plan_for(ready: Ready, devices: Sequence[Device], show: Show) -> Planned | None:
    """The plan of a run, with what is expected of it; ``None``: its config names one, or there is no choice.

    Args:
        ready: the run. ``plan.txt`` in its folder gets the whole explanation.
        devices: of its cluster, which nobody holds.
        show: tells a person.

    Raises:
        RunFailed: a stage failed while it was measured.
        RlinfError: the profile is of something else, or no plan fits; its message tells what would.
    """
    cfg = ready.cfg.plan
    if not looked_for(cfg, len(devices)):
        return None
    objective = objective_of(cfg)
    places, kinds = kinds_of(devices)
    profile = _profile(ready, places, show)
    places = placed(profile, places, cfg.force)
    ground = Ground(
        ready.graph,
        profile,
        places,
        {name: kinds[name].memory if name in kinds else profile.kinds[name].memory for name in places},
        cfg.staleness,
        cfg.in_flight,
        cfg.granularity,
        cfg.swap,
    )
    found = find(ground, objective)
    lines = list(explained(found, ground, Look()))
    (ready.output_dir / "plan.txt").write_text("\n".join(lines) + "\n")
    return Planned(
        plan=found.best.plan,
        model=ground.model,
        judged=found.best,
        capacity=ground.bytes_of,
        granularities=ground.granularities,
        swaps=(False,) if cfg.swap == "never" else (),
        devices=tuple(sorted(ground.kind_of)),
        reasons=(*summary(found), f"  the whole reasoning: {ready.output_dir / 'plan.txt'}"),
    )


def summary(found: Found) -> list[str]:
    """What is expected of the plan, and of the best of the other families: a few lines."""
    best = found.best
    lines = [f"expected: {seconds(best.seconds)} an iteration, devices idle {best.idle_share:.0%} ({best.family})"]
    for name, one in found.families.items():
        if isinstance(one, Judged) and one.plan != best.plan:
            lines.append(f"  {name}: {seconds(one.seconds)} ({one.seconds / best.seconds - 1:+.0%})")
            lines += [f"    {text}" for text in reasons(one, best)[:_REASONS]]
        elif isinstance(one, str):
            lines.append(f"  {name}: none, {one}")
    return lines


def objective_of(cfg: PlanConfig) -> Objective:
    """
    Raises:
        ConfigError: there is no such objective.
    """
    known = {"time": TIME, "memory": MEMORY, "devices": fewest(cfg.within)}
    if cfg.objective not in known:
        raise ConfigError(f"plan.objective={cfg.objective!r} is not one of {', '.join(known)}")
    return known[cfg.objective]


def _profile(ready: Ready, places: Places, show: Show) -> Profile:
    cfg, wanted = ready.cfg.plan, identity_of(ready)
    if cfg.profile is not None:
        given = load_profile(Path(cfg.profile))
        check_identity(given, wanted, places, cfg.force, cfg.profile)
        return given
    kept = cache.find(wanted, places, show)
    if kept is not None:
        show(f"plan=auto: by the profile {cache.place_of(wanted, places)}")
        return kept
    from rlinf.scheduler.profiler import profile

    show("plan=auto: there is no profile of this model, config and hardware yet; stages are measured now, once")
    found = profile(ready, cfg.budget_s, show)
    for line in profile_lines(found):
        show(line)
    if (path := cache.keep(found, places, show)) is not None:
        show(f"profile      {path}")
    return found
