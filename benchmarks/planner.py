"""How long the planner takes: PPO's workflow on 8 to 1,024 devices, every cut, layout and granularity, on one core.

Six stages of five groups: a rollout engine, a reward without a device, a reference, a critic that scores and learns,
and an actor. Groups can have 1, 2, 4 or 8 tensor-parallel ranks and any power of two of replicas; rows go 8, 16, 32, 64
at a time or all at once. Costs are by hand: work that is shared out, with a part that is not. RLinf's planner is
reported to take 5.98 s for three nodes on 1,024 devices (arXiv:2509.15965).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time

from rich.console import Console
from rich.table import Table

from rlinf.scheduler.judge import family
from rlinf.scheduler.planner import Choice, flat, solve
from rlinf.scheduler.problem import Option, Part, Problem

DEVICES = (8, 64, 256, 1024)
ROWS, SIZES, DEGREES = 4096, (0, 8, 16, 32, 64), (1, 2, 4, 8)
GIB = 2**30
READS = (("rollout", "reward"), ("rollout", "reference"), ("rollout", "critic"))
# Group: seconds of all rows on one device that stream, and that wait for all of them; resident GiB on one device.
WORK = {
    "rollout": (4000.0, 0.0, 60),
    "reference": (400.0, 0.0, 15),
    "critic": (400.0, 900.0, 60),
    "actor": (0.0, 1200.0, 60),
}
FIXED = {
    "rollout": 8.0,
    "reference": 0.2,
    "critic": 0.4,
    "actor": 0.5,
}  # seconds of an iteration that no layout shortens


def ppo(devices: int, capacity: int | None) -> Problem:
    parts = [Part("reward", (Option("", 1, 1, dict.fromkeys(SIZES, 4.0)),))]
    for name, (stream, rest, held) in WORK.items():
        options = []
        for tp in DEGREES:
            dp = 1
            while dp * tp <= devices:
                gain = dp * tp**0.9  # tensor parallelism is not free
                pieces = {size: max(ROWS // dp // size, 1) if size else 1 for size in SIZES}
                streams = {size: stream / gain + 0.02 * count + FIXED[name] for size, count in pieces.items()}
                waits = (rest / gain + FIXED[name]) if rest else 0.0
                resident = int(held * GIB / (tp if name in ("rollout", "reference") else dp * tp))
                only = dict.fromkeys(SIZES, 0.0) if not stream else streams
                options.append(Option("gpu", dp, tp, only, waits, resident, 4 * GIB, 2.0))
                dp *= 2
        parts.append(Part(name, tuple(options)))
    order = ["rollout", "reward", "reference", "critic", "actor"]
    return Problem(
        parts=tuple(sorted(parts, key=lambda part: order.index(part.name))),
        reads=frozenset(READS),
        devices={"gpu": tuple(range(devices))},
        capacity={"gpu": capacity},
        pieces={size: max(ROWS // (size * max(devices // 2, 1)), 1) if size else 1 for size in SIZES},
    )


def timed(problem: Problem, repeats: int) -> tuple[list[float], Choice]:
    took = []
    for _ in range(repeats):
        began = time.perf_counter()
        found = solve(problem)
        took.append(time.perf_counter() - began)
    return took, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    table = Table(title="Planning PPO's iteration, one core")
    for column in ("devices", "memory", "layouts", "median s", "lowest to highest", "plan", "s an iteration"):
        table.add_column(column, justify="right")
    medians: dict[str, float] = {}
    for devices in DEVICES:
        for capacity in (None, 80 * GIB, 48 * GIB):
            problem = ppo(devices, capacity)
            took, found = timed(problem, repeats)
            name = f"seconds_{devices}" + (f"_{capacity // GIB}_gib" if capacity else "")
            medians[name] = statistics.median(took)
            table.add_row(
                str(devices),
                f"{capacity / GIB:.0f} GiB" if capacity else "any",
                str(sum(len(part.options) for part in problem.parts)),
                f"{medians[name]:.4f}",
                f"{min(took):.4f}-{max(took):.4f}",
                family(flat(found.plan)),
                f"{found.seconds:.1f}",
            )
    Console(width=120).print(table)
    print("RLinf's planner is reported to take 5.98 s for three nodes on 1,024 devices.")
    print(json.dumps({name: round(value, 5) for name, value in medians.items()}))


if __name__ == "__main__":
    main()
