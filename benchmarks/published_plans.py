"""On paper: RLinf's published settings, by profiles written by hand. Is the plan found here the one that they run?

RLinf publishes stage times of one setting, GRPO on Qwen2.5-7B with 64 GPUs, all groups collocated: training 95.7 s,
log-probabilities 15 s, generation 230 s an iteration (its example configuration, beside the placement that it runs:
16, 16 and 32 GPUs, piped). Those times are taken as they are. What they come to on other numbers of GPUs, and for the
other models, follows from them by what is known of the models:

- training and log-probabilities: by active parameters and tokens, over the GPUs; a tenth of a second a call besides;
- generation: a step of an engine reads the weights that it needs and the KV cache of its active sequences, at the
  bandwidth at which 7B takes 230 s; lengths are log-normal, cut off at the longest that is allowed;
- memory: 16 bytes a parameter of training over its ranks, 2 of an engine over its degree and its KV cache.

So the rows but 7B's are estimates, and what they say is whether the form of the plan is the same.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from rlinf.compose import compose
from rlinf.scheduler.auto import Found, Ground, find
from rlinf.scheduler.explain import GIB
from rlinf.scheduler.judge import Judged
from rlinf.scheduler.profile import Held, Identity, Kind, Point, Profile, StageProfile, SyncPoint, Tail
from rlinf.train import load_graph

H100 = 80 * GIB
TRAIN_S, LOGPROB_S, MAKE_S = 95.7, 15.0, 230.0  # of 7B, on 64 GPUs
MEDIAN, SIGMA = 7000.0, 0.7  # tokens of a response
FIXED_S = 0.1  # of a call
SWITCH = 25e9  # bytes a second between a GPU and its host
LINK = 50e9  # bytes a second between GPUs


@dataclass(frozen=True)
class Model:
    """
    Attributes:
        parameters, active: all of them, and those that a token needs, in billions.
        kv: bytes of a token.
        tp_make, tp_train: ranks of a replica.
    """

    parameters: float
    active: float
    kv: float
    tp_make: int
    tp_train: int


@dataclass(frozen=True)
class Setting:
    """One line of the table; ``published`` is the form of the plan that they run."""

    name: str
    model: Model
    workflow: str
    devices: int
    prompts: int
    samples: int
    longest: int
    slots: int
    published: str


B1 = Model(1.54, 1.54, 2 * 2 * 128 * 28 * 2, 1, 2)
B7 = Model(7.6, 7.6, 2 * 4 * 128 * 28 * 2, 2, 4)
B32 = Model(32.8, 32.8, 2 * 8 * 128 * 64 * 2, 4, 8)
A3B = Model(30.5, 3.3, 2 * 4 * 128 * 48 * 2, 4, 8)
SETTINGS = (
    Setting("Qwen2.5-1.5B, GRPO", B1, "grpo", 128, 512, 16, 27648, 128, "disaggregated"),
    Setting("Qwen2.5-7B, GRPO", B7, "grpo", 64, 256, 8, 27648, 128, "disaggregated"),
    Setting("Qwen2.5-32B, GRPO", B32, "grpo", 128, 512, 16, 27648, 160, "collocated"),
    Setting("Qwen2.5-7B, PPO", B7, "ppo", 32, 256, 8, 27648, 128, ""),
    Setting("Qwen3-30B-A3B, GRPO", A3B, "grpo", 32, 96, 16, 20480, 64, "collocated"),
    Setting("Qwen3-30B-A3B, GRPO", A3B, "grpo", 64, 96, 16, 20480, 64, "collocated"),
    Setting("Qwen3-30B-A3B, GRPO", A3B, "grpo", 128, 96, 16, 20480, 64, "collocated"),
)


def lengths(longest: int, count: int = 33) -> tuple[float, ...]:
    """Quantiles of the log-normal, cut off."""
    from statistics import NormalDist

    at = (np.arange(count) + 0.5) / count
    return tuple(min(MEDIAN * float(np.exp(SIGMA * NormalDist().inv_cdf(u))), float(longest)) for u in at)


def mean(longest: int) -> float:
    return float(np.mean(lengths(longest)))


def step_bytes(model: Model) -> tuple[float, float]:
    """(of the weights, of an active sequence's KV cache) that each GPU of an engine reads for a token."""
    return 2e9 * model.active / model.tp_make, model.kv * MEDIAN / model.tp_make


def made(setting: Setting, sequences: int, speed: float) -> float:
    """Seconds that an engine takes for so many sequences, at bytes a second: drawn once, and counted step by step."""
    drawn = np.sort(np.random.default_rng(0).choice(lengths(setting.longest, 2049), sequences))
    active = np.minimum(setting.slots, sequences - np.arange(sequences))
    ends = drawn if sequences <= setting.slots else _in_slots(drawn, setting.slots)
    spans = np.diff(np.sort(ends), prepend=0.0)
    weights, cache = step_bytes(setting.model)
    return float((spans * (weights + cache * active)).sum() / speed)


def _in_slots(drawn: np.ndarray, slots: int) -> np.ndarray:
    """When each sequence ends, in steps, where one begins as another ends."""
    import heapq

    free, ends = [0.0] * slots, []
    for length in np.random.default_rng(1).permutation(drawn):
        ends.append(heapq.heappop(free) + float(length))
        heapq.heappush(free, ends[-1])
    return np.asarray(ends)


def profile(setting: Setting) -> Profile:
    """See the module's docstring."""
    model, seven = setting.model, SETTINGS[1]
    speed = made(seven, seven.prompts * seven.samples * B7.tp_make // seven.devices, 1.0) / MAKE_S
    rows = setting.prompts * setting.samples
    scale = model.active / B7.active * mean(setting.longest) / mean(seven.longest)
    row = {  # GPU seconds of a response
        "train": TRAIN_S * seven.devices / (seven.prompts * seven.samples) * scale,
        "logprobs": LOGPROB_S * seven.devices / (seven.prompts * seven.samples) * scale,
    }
    replicas = [2**n for n in range(11) if 2**n * model.tp_make <= setting.devices and 2**n <= setting.prompts]
    counts = sorted({-(-setting.prompts // n) for n in replicas} | {1})
    generate = [
        Point(kind="h100", tp=model.tp_make, rows=n, seconds=made(setting, n * setting.samples, speed)) for n in counts
    ]

    def points(work: float) -> StageProfile:
        each = [
            Point(kind="h100", tp=model.tp_train, rows=n, seconds=FIXED_S + n * work / model.tp_train)
            for n in (1, rows)
        ]
        return StageProfile(points=tuple(each))

    stages = {
        "rollout.generate": StageProfile(
            points=tuple(generate), tail=Tail(lengths=lengths(setting.longest), slots=setting.slots)
        ),
        "reference.logprobs": points(row["logprobs"]),
        "actor.train": points(row["train"]),
        "reward.score": StageProfile(points=(Point(rows=rows, seconds=1.0),)),
    }
    learners = ["actor"]
    if setting.workflow == "ppo":
        stages |= {"critic.values": points(row["logprobs"]), "critic.train": points(row["train"])}
        learners.append("critic")
    return Profile(
        identity=Identity(workflow=setting.workflow, model=setting.name),
        kinds={"h100": Kind(memory=H100)},
        rows={"host.source0": setting.prompts},
        stages=stages,
        groups=_held(setting, learners),
        syncs=(
            SyncPoint(
                source="actor",
                target="rollout",
                source_ranks=model.tp_train,
                target_ranks=model.tp_make,
                send=2e9 * model.parameters / model.tp_train / LINK,
                receive=2e9 * model.parameters / model.tp_make / LINK,
            ),
        ),
    )


def _held(setting: Setting, learners: list[str]) -> dict[str, tuple[Held, ...]]:
    model = setting.model
    found: dict[str, tuple[Held, ...]] = {}

    def held(size: float, dp: int, tp: int) -> Held:
        each = size / SWITCH
        return Held(kind="h100", dp=dp, tp=tp, resident=round(size), onload=each, offload=each)

    engine = 2e9 * model.parameters / model.tp_make + 0.3 * H100
    found["rollout"] = (held(engine, 1, model.tp_make),)
    found["reference"] = (held(2e9 * model.parameters / model.tp_train, 1, model.tp_train),)
    for name in learners:
        replicas = [2**n for n in range(11) if 2**n * model.tp_train <= setting.devices]
        # weights and gradients on each replica, the optimiser's twelve bytes over all ranks
        sizes = [(n, (4e9 + 12e9 / n) * model.parameters / model.tp_train) for n in replicas]
        found[name] = tuple(held(size, n, model.tp_train) for n, size in sizes)
    return found


def planned(setting: Setting) -> tuple[Found, float]:
    """The best plans, and the seconds that finding them took."""
    sizes = (f"data.prompts_per_step={setting.prompts}", f"rollout.samples_per_prompt={setting.samples}")
    cfg = compose([f"+workflow={setting.workflow}", *sizes, "algorithm.kl_coef=0.001", "algorithm.normalize=none"])
    ground = Ground(load_graph(cfg), profile(setting), {"h100": tuple(range(setting.devices))}, {"h100": H100})
    began = time.perf_counter()
    return find(ground), time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, metavar="N", help="the line of this number, from 0")
    only = parser.parse_args().only
    table = Table(title="The best plan of each form, seconds an iteration")
    for column in ("setting", "GPUs", "collocated", "disaggregated", "hybrid", "published", "found", "took s", "plan"):
        table.add_column(column)
    same = []
    for number, setting in enumerate(SETTINGS):
        if only not in (None, number):
            continue
        found, took = planned(setting)
        each = [
            f"{one.seconds:.0f}" if isinstance(one, Judged) else "-"
            for one in (found.families[name] for name in ("collocated", "disaggregated", "hybrid"))
        ]
        if setting.published:
            same.append(setting.published == found.best.family)
        where = "; ".join(
            f"{stage.worker} {len(layout.devices)}"
            for stage in found.best.compiled.layout.values()
            if (layout := stage).devices
        )
        table.add_row(
            *(setting.name, str(setting.devices), *each, setting.published or "not known", found.best.family),
            *(f"{took:.1f}", where),
        )
    Console(width=160).print(table)
    print(json.dumps({"benchmark": "published_plans", "same": sum(same), "of": len(same)}))


if __name__ == "__main__":
    main()
