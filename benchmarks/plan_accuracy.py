"""Whether plans take what was predicted, and whether the chosen one is the best: on real workers, two cores apart.

- *accuracy*: PPO and GRPO with two models. Stages are profiled once; then a collocated plan, a disaggregated and a
  hybrid one, the best of their kinds, run, and an iteration's median is set beside the prediction.
- *choice*: four workloads, most of whose iteration goes to generating, to training, to a scorer that waits, or to a
  simulator on one core. The plan that is chosen is measured beside the plans that ship.

Learning rates are so small that responses stay as long as they were while profiled.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))

from rlinf.cluster import Cluster  # noqa: E402
from rlinf.compose import compose  # noqa: E402
from rlinf.config import PlanConfig  # noqa: E402
from rlinf.fleet import Fleet  # noqa: E402
from rlinf.m2flow.compiler import compile_plan  # noqa: E402
from rlinf.m2flow.graph import TRAIN  # noqa: E402
from rlinf.m2flow.plan import Piped, Plan, describe, nodes  # noqa: E402
from rlinf.preflight import Ready, preflight  # noqa: E402
from rlinf.scheduler.auto import Ground, find  # noqa: E402
from rlinf.scheduler.identity import kinds_of  # noqa: E402
from rlinf.scheduler.judge import Judged, judge  # noqa: E402
from rlinf.scheduler.profile import Profile, load_profile, save_profile  # noqa: E402
from rlinf.scheduler.profiler import profile  # noqa: E402
from rlinf.scheduler.shipped import KINDS  # noqa: E402
from rlinf.train import load_graph  # noqa: E402

DEVICES = 2
STILL = ("actor.optimizer.lr=1e-9", "critic.optimizer.lr=1e-9", "cluster.address=local", "logger.tensorboard=false")
TINY = ("model=tiny", "data=digits", "rollout.engine=hf", "data.prompts_per_step=32", "rollout.samples_per_prompt=4")
SMOLLM2 = ("model=smollm2", "data.prompts_per_step=4", "rollout.samples_per_prompt=4", "rollout.max_new_tokens=16")
ACCURACY = {
    "ppo, tiny": ("+workflow=ppo", *TINY, "rollout.max_new_tokens=24"),
    "grpo, tiny": ("+workflow=grpo", *TINY, "rollout.max_new_tokens=24", "algorithm.kl_coef=0.01"),
    "grpo, SmolLM2": ("+workflow=grpo", *SMOLLM2, "algorithm.kl_coef=0.01"),
    "ppo, SmolLM2": ("+workflow=ppo", *SMOLLM2),
}
CHOICE = {
    "generating": ("+workflow=grpo", *TINY, "rollout.max_new_tokens=64"),
    "training": ("+workflow=grpo", *TINY, "rollout.max_new_tokens=6", "algorithm.epochs=8", "algorithm.kl_coef=0.01"),
    "scoring": (
        *("+workflow=grpo", *TINY, "rollout.max_new_tokens=24"),
        *("reward.scorer=benchmarks.workloads.scorer:score", "+reward.params.seconds=0.02"),
    ),
    "simulating": (
        *("+workflow=ppo", *TINY, "workflow.target=benchmarks.workloads.simulator.simulator"),
        "workflow.name=simulator",
    ),
}


@dataclass
class Run:
    """A plan of a case.

    Attributes:
        case: name of what ran.
        name: of the plan.
        plan: that.
        predicted: seconds of an iteration.
        measured: seconds of each iteration.
    """

    case: str
    name: str
    plan: Plan
    predicted: float
    measured: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return statistics.median(self.measured)

    @property
    def error(self) -> float:
        return self.predicted / self.seconds - 1

    @property
    def piped(self) -> bool:
        return any(isinstance(node, Piped) for node in nodes(self.plan))


@dataclass(frozen=True)
class Effort:
    """How much to measure."""

    budget_s: float
    rounds: int
    iterations: int
    warm_up: int
    profiles: Path


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def prepared(case: str, overrides: Sequence[str], effort: Effort, folder: Path) -> tuple[Ready, Ground]:
    """The run, and what its plans are made from: a profile that is there, or is taken now."""
    cfg = compose([*overrides, *STILL, f"cluster.devices_per_node={DEVICES}", f"output_dir={folder / 'run'}"])
    ready = preflight(cfg, load_graph)
    path = effort.profiles / f"{case.replace(', ', '-')}.yaml"
    if path.exists():
        found = load_profile(path)
        say(f"{case}: by the profile {path}")
    else:
        found = profile(ready, effort.budget_s, lambda text: say(f"{case}: {text}"))
        save_profile(found, path)
    return ready, ground_of(ready, found)


def ground_of(ready: Ready, found: Profile) -> Ground:
    from rlinf.preflight import local_devices

    places, kinds = kinds_of(local_devices(ready.cfg))
    return Ground(ready.graph, found, places, {name: kind.memory for name, kind in kinds.items()})


def measure(ready: Ready, run: Run, effort: Effort, folder: Path) -> None:
    """Adds seconds of iterations to a run, with workers of its own."""
    cluster = Cluster.connect(ready.cfg.cluster, say)
    fleet = None
    try:
        cluster.hold()
        fleet = Fleet(cluster, ready.graph, compile_plan(ready.graph, run.plan))
        fleet.launch(ready.cfg.seed, ready.cfg.deterministic, folder)
        fleet.setup()
        for number in range(effort.warm_up + effort.iterations):
            began = time.perf_counter()
            fleet.execute(TRAIN, number)
            if number >= effort.warm_up:
                run.measured.append(time.perf_counter() - began)
    finally:
        fleet.close() if fleet else cluster.close()
    say(f"{run.case}, {run.name}: {run.seconds:.3f} s, predicted {run.predicted:.3f} s ({run.error:+.1%})")


def measured(ready: Ready, runs: list[Run], effort: Effort, folder: Path) -> list[Run]:
    for _ in range(effort.rounds):
        for number, run in enumerate(runs):
            (into := folder / str(number)).mkdir(exist_ok=True)
            measure(ready, run, effort, into)
    return runs


def accuracy(case: str, overrides: Sequence[str], effort: Effort, folder: Path) -> list[Run]:
    """Three plans: all in turns, and the best disaggregated and hybrid ones."""
    ready, ground = prepared(case, overrides, effort, folder)
    found = find(ground)
    in_turns = [one for one in found.judged if not any(isinstance(node, Piped) for node in nodes(one.plan))]
    wanted = {"in turns": in_turns[0], **{name: found.families[name] for name in ("disaggregated", "hybrid")}}
    runs = [Run(case, name, one.plan, one.seconds) for name, one in wanted.items() if isinstance(one, Judged)]
    return measured(ready, runs, effort, folder)


def choice(case: str, overrides: Sequence[str], effort: Effort, folder: Path) -> list[Run]:
    """The chosen plan, which is the first, and those that ship, as their files give them."""
    ready, ground = prepared(case, overrides, effort, folder)
    best = find(ground).best
    runs = [Run(case, "chosen", best.plan, best.seconds)]
    for kind, make in KINDS.items():
        cfg = PlanConfig(kind=kind, granularity=0 if kind == "collocated" else 8)
        plan = make(ready.graph, DEVICES, cfg, False)
        runs.append(Run(case, kind, plan, judge(ready.graph, plan, ground.model).seconds))
    return measured(ready, runs, effort, folder)


def ranking(runs: Sequence[Run]) -> list[bool]:
    """Of each two plans of a case that differ by over a tenth: whether the faster one was predicted to be.

    Two that are predicted to take the same are one plan under two names: they differ by the noise of the machine.
    """
    pairs = [(a, b) for a, b in combinations(runs, 2) if a.case == b.case and a.predicted != b.predicted]
    return [
        (a.predicted < b.predicted) == (a.seconds < b.seconds)
        for a, b in pairs
        if abs(a.seconds - b.seconds) > 0.1 * min(a.seconds, b.seconds)
    ]


def shown(title: str, runs: Sequence[Run]) -> None:
    table = Table(title=title)
    for column in ("case", "plan", "predicted s", "measured s (median, lowest to highest)", "error"):
        table.add_column(column)
    for run in runs:
        spread = f"{run.seconds:.3f} ({min(run.measured):.3f}-{max(run.measured):.3f}, {len(run.measured)})"
        table.add_row(
            run.case, f"{run.name}: {described(run.plan)}", f"{run.predicted:.3f}", spread, f"{run.error:+.1%}"
        )
    Console(width=160).print(table)


def described(plan: Plan) -> str:
    return "; ".join(line.strip() for line in describe(plan))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=240, metavar="S", help="seconds of a profile")
    parser.add_argument("--rounds", type=int, default=2, help="in which each plan of a case gets workers, in turns")
    parser.add_argument("--iterations", type=int, default=6, help="measured in each")
    parser.add_argument("--warm-up", type=int, default=2, help="iterations before them")
    parser.add_argument("--profiles", type=Path, help="folder of profiles, used where they are there and kept if not")
    parser.add_argument("--only", action="append", default=[], metavar="CASE", help="one case (several times)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        profiles = given.profiles or folder / "profiles"
        profiles.mkdir(parents=True, exist_ok=True)
        effort = Effort(given.budget, given.rounds, given.iterations, given.warm_up, profiles)
        found: dict[str, list[Run]] = {"accuracy": [], "choice": []}
        for part, (cases, look) in {"accuracy": (ACCURACY, accuracy), "choice": (CHOICE, choice)}.items():
            for case, overrides in cases.items():
                if not given.only or case in given.only:
                    (into := folder / case.replace(", ", "-")).mkdir()
                    found[part] += look(case, overrides, effort, into)
    result = summary(found["accuracy"], found["choice"])
    if found["accuracy"]:
        shown("Predicted and measured", found["accuracy"])
    if found["choice"]:
        shown("The chosen plan beside those that ship", found["choice"])
    print(json.dumps({"benchmark": "plan_accuracy", **result}))


def summary(accurate: Sequence[Run], chosen: Sequence[Run]) -> dict[str, float]:
    """What the figures come to; parts that were not measured are left out."""
    found: dict[str, float] = {}
    for name, piped in (("shared_error", False), ("piped_error", True)):
        if errors := [abs(run.error) for run in accurate if run.piped == piped]:
            found[name] = statistics.median(errors)
    if right := ranking([*accurate, *chosen]):
        found["ranking_right"] = sum(right) / len(right)
    regrets, gains = [], []
    for case in dict.fromkeys(run.case for run in chosen):
        best, *ships = [run for run in chosen if run.case == case]
        regrets.append(best.seconds / min(run.seconds for run in ships) - 1)
        gains += [run.seconds / best.seconds for run in ships if run.name == "collocated" and best.piped]
    if regrets:
        found |= {"regret": max(regrets), "best_speedup": max(gains, default=1.0)}
    return {name: round(value, 4) for name, value in found.items()}


if __name__ == "__main__":
    main()
