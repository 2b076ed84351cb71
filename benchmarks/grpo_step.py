"""Seconds of one GRPO step of SmolLM2 on this machine, by phase, and beside TRL's.

    python benchmarks/grpo_step.py [--peer trl] [--steps 5] [--warmup 2]

The work: 4 prompts x 8 samples x at most 32 new tokens of sums of two digits, float32, no KL, one update a step,
learning rate 1e-5. A step is all of it: weight sync, generation, scoring, training. With ``--peer trl`` TRL's
GRPOTrainer does the same work on the same cores after ours has ended, in an environment of its own that this script
makes. Medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
PROMPTS, SAMPLES, TOKENS = 4, 8, 32


def ours(steps: int, warmup: int, overrides: list[str]) -> dict[str, Any]:
    """Step seconds and phases of this platform."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(
                sys.executable,
                "-m",
                "rlinf.train",
                "+workflow=grpo",
                f"steps={steps + warmup}",
                f"output_dir={folder}/run",
            ),
            *(f"data.prompts_per_step={PROMPTS}", f"rollout.samples_per_prompt={SAMPLES}"),
            *(f"rollout.max_new_tokens={TOKENS}", "actor.optimizer.lr=1e-5", "logger.tensorboard=false"),
            *("evaluation.before=false", "evaluation.after=false", "checkpoint.every=0", "checkpoint.export=false"),
            *overrides,
        ]
        subprocess.run(command, check=True, cwd=folder, stdout=sys.stderr)
        lines = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    measured = [line for line in lines if "time/step" in line][warmup:]
    names = sorted({key for line in measured for key in line if key.startswith("time/") and key != "time/step"})
    return {
        "seconds": [line["time/step"] for line in measured],
        "tokens": [line["rollout/tokens"] for line in measured],
        "phases": {n.removeprefix("time/"): statistics.median(line.get(n, 0.0) for line in measured) for n in names},
    }


def trl(steps: int, warmup: int) -> dict[str, Any]:
    """Step seconds of TRL's GRPOTrainer on the same work."""
    sys.path.insert(0, str(ROOT))
    from benchmarks.peers.environment import TRL, peer_python
    from rlinf.config import ModelConfig
    from rlinf.models import resolve

    script = ROOT / "benchmarks" / "peers" / "trl_grpo.py"
    done = subprocess.run(
        [
            peer_python("trl", TRL),
            script,
            resolve(ModelConfig(name="smollm2")),
            "--steps",
            str(steps),
            "--warmup",
            str(warmup),
        ],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=["trl"], help="run this peer on the same work, after ours")
    parser.add_argument("--steps", type=int, default=5, help="steps that are measured")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("overrides", nargs="*", help="config overrides, e.g. rollout.max_num_seqs=32")
    args = parser.parse_args()

    mine = ours(args.steps, args.warmup, args.overrides)
    peer = trl(args.steps, args.warmup) if args.peer else None
    table = Table(title=f"GRPO step, SmolLM2 float32, {PROMPTS} x {SAMPLES} x {TOKENS} tokens, {os.cpu_count()} cores")
    for column in ("", "median s", "min s", "max s", "tokens a step"):
        table.add_column(column, justify="left" if not column else "right")
    for name, run in (("rlinf", mine), ("TRL", peer)):
        if run:
            taken = run["seconds"]
            row = (statistics.median(taken), min(taken), max(taken), statistics.median(run["tokens"]))
            table.add_row(name, *(f"{value:.1f}" for value in row))
    for name, seconds in sorted(mine["phases"].items(), key=lambda pair: -pair[1]):
        if seconds >= 0.01:
            table.add_row(f"  {name}", f"{seconds:.2f}")
    Console(width=100).print(table)
    seconds = statistics.median(mine["seconds"])
    theirs = statistics.median(peer["seconds"]) if peer else None
    result = {
        "benchmark": "grpo_step",
        "seconds_per_step": round(seconds, 3),
        "peer_seconds_per_step": round(theirs, 3) if theirs else None,
        "ratio": round(theirs / seconds, 3) if theirs else None,
        "phases": {name: round(value, 3) for name, value in mine["phases"].items()},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
