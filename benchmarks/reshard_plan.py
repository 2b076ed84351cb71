"""Planning a relayout of Qwen3-235B-A22B on paper: seconds for one rank's whole plan and schedule, on one core.

Two cases, at 64 to 4,096 ranks: tp4 pp8 ep8 to tp8 pp4 ep16, and FSDP over n to FSDP over 3n/4, with bfloat16
parameters and fp32 master weights and moments. Beside it, in the same run: megatron-core's resharding planner on the
first case (parameters alone: it plans nothing else), and torch DCP's load planner on the second. Both take far too
long at size, so they get a sample of the work and are scaled up (the table says by how much).

    python benchmarks/reshard_plan.py [--ranks 64 256 1024 4096] [--repeats 3] [--no-peers]

Last line: JSON with ``seconds_1024``, ``makespan_ratio`` (schedule over its lower bound), ``megatron_ratio`` and
``dcp_ratio`` (their seconds over ours), each the worst of the table.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from rlinf.vps.hf import space_of
from rlinf.vps.mesh import Mesh, MeshLayout
from rlinf.vps.plan import plan
from rlinf.vps.schedule import Links, Schedule, schedule
from rlinf.vps.space import Kind, Space

QWEN3_235B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 94,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "num_experts": 128,
    "moe_intermediate_size": 1536,
    "tie_word_embeddings": False,
}
LLAMA_70B: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 28672,
    "vocab_size": 128256,
}
STATES = {
    Kind.PARAMETER: "bfloat16",
    Kind.MASTER: "float32",
    Kind.EXP_AVG: "float32",
    Kind.EXP_AVG_SQ: "float32",
}
LINKS = Links(in_host=50e9, cross_host=50e9)
PEERS = Path(__file__).parent / "peers" / "reshard_planners.py"


def meshes(case: str, ranks: int) -> tuple[Mesh, Mesh]:
    """Before and after."""
    if case == "fsdp":
        return Mesh(dp=ranks, fsdp=True), Mesh(dp=ranks * 3 // 4, fsdp=True)
    dp = ranks // 32
    return Mesh(tp=4, pp=8, dp=dp, ep=8), Mesh(tp=8, pp=4, dp=dp, ep=16)


def layouts(case: str, ranks: int, config: dict[str, Any], space: Space) -> tuple[MeshLayout, MeshLayout]:
    made = tuple(MeshLayout(config, mesh, STATES, ranks) for mesh in meshes(case, ranks))
    for layout in made:
        layout.__dict__["space"] = space  # the model is known before the question is asked
    return made[0], made[1]


def planned(case: str, ranks: int, space: Space) -> tuple[float, Schedule, int]:
    """(seconds from two descriptions to everything that one rank does, the schedule, its boxes)."""
    src, dst = layouts(case, ranks, QWEN3_235B, space)
    start = time.perf_counter()
    made = schedule(plan(src, dst), LINKS)
    steps = [step for wave in range(len(made.waves)) for step in made.exchanges(ranks // 2, wave)]
    seconds = time.perf_counter() - start
    boxes = sum(len(m) for step in steps for m in (step.sends, step.receives) if m is not None)
    return seconds, made, boxes


def peer(which: str, ranks: int) -> dict[str, Any]:
    """Seconds of a peer's planner, in a process of its own."""
    sys.path.insert(0, str(Path(__file__).parent))
    from peers.environment import MEGATRON, peer_python

    python = peer_python("megatron", MEGATRON) if which == "megatron" else Path(sys.executable)
    done = subprocess.run(
        [str(python), str(PEERS), which, str(ranks)], capture_output=True, text=True, env={**os.environ}
    )
    if done.returncode:
        raise RuntimeError(f"the {which} planner failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def published() -> list[str]:
    """What the certificate predicts where DynaTrain says what it measured."""
    lines = []
    cases = (
        ("Qwen3-235B-A22B", QWEN3_235B, "4.36 s", (Mesh(tp=4, pp=8, dp=4, ep=8), Mesh(tp=8, pp=4, dp=4, ep=16))),
        ("a 70B Llama", LLAMA_70B, "under 2 s", (Mesh(tp=4, pp=8, dp=4), Mesh(tp=8, pp=4, dp=4))),
    )
    for name, config, figure, sides in cases:
        space = space_of(config, STATES)
        src, dst = (MeshLayout(config, mesh, STATES, 128) for mesh in sides)
        for layout in (src, dst):
            layout.__dict__["space"] = space
        promise = schedule(plan(src, dst), LINKS).certificate
        lines.append(f"  {name}: {promise.makespan:.2f} s predicted (bound {promise.bound:.2f} s); published: {figure}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-peers", action="store_true")
    args = parser.parse_args()

    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # one core
    space = space_of(QWEN3_235B, STATES)
    print(f"Qwen3-235B-A22B: {len(space.tensors):,} tensors, four states each; one core")
    head = (
        f"{'case':<8} {'ranks':>6} {'seconds':>8} {'growth':>7} {'boxes':>8} {'rounds':>7} {'peak GiB':>9} {'ratio':>6}"
    )
    print(f"{head} {'peer':>10} {'its s':>9} {'sample':>9} {'over ours':>10}")
    worst = {"seconds_1024": 0.0, "makespan_ratio": 0.0, "megatron": float("inf"), "dcp": float("inf")}
    for case, which in (("tp-pp-ep", "megatron"), ("fsdp", "dcp")):
        before = None
        for ranks in args.ranks:
            times, other = [], None
            for _ in range(args.repeats):
                seconds, made, boxes = planned(case, ranks, space)
                times.append(seconds)
                if not args.no_peers and other is None and ranks <= 1024:
                    other = peer(which, ranks)
            seconds = statistics.median(times)
            promise = made.certificate
            growth = "" if before is None else f"x{seconds / before:.2f}"
            before = seconds
            rounds = sum(int(table.round.max(initial=-1)) + 1 for table in made.waves)
            line = (
                f"{case:<8} {ranks:>6} {seconds:>8.3f} {growth:>7} {boxes:>8,} {rounds:>7} "
                f"{promise.peak_bytes.max() / 2**30:>9.1f} {promise.ratio:>6.3f}"
            )
            if other is not None:
                line += (
                    f" {which:>10} {other['seconds']:>9.1f} {other['sample']:>9} {other['seconds'] / seconds:>9.1f}x"
                )
                worst[which] = min(worst[which], other["seconds"] / seconds)
            print(line, flush=True)
            worst["makespan_ratio"] = max(worst["makespan_ratio"], promise.ratio)
            if ranks == 1024:
                worst["seconds_1024"] = max(worst["seconds_1024"], seconds)
    print(
        "\nPredicted transfer at 50 GB/s a rank in each direction, every rank on a link of its own, no start-up cost,\n"
        "parameters in bfloat16 with fp32 master and moments (14 bytes a parameter), tp4 pp8 dp4 to tp8 pp4 dp4 on\n"
        "128 ranks, each data parallel replica held whole (no ZeRO):"
    )
    print("\n".join(published()))
    ratios = {f"{which}_ratio": None if worst[which] == float("inf") else worst[which] for which in ("megatron", "dcp")}
    figures = {key: worst[key] for key in ("seconds_1024", "makespan_ratio")} | ratios
    print(json.dumps({"benchmark": "reshard_plan", **figures}))


if __name__ == "__main__":
    main()
