"""Training to rollout: SmolLM2 in float32 from one or two ranks of an actor to a vLLM engine, on this machine.

A sync has three parts: ranks *publish* (each copies its share into shared memory), the engine *takes* (it copies what
it cannot use where it lies), and vLLM *loads* (its loader and its repacking for CPU kernels). Publishing and taking
are the transfer; it is held against a plain copy of the same bytes, measured in the same round. In the last line stand
the figures of the slowest layout.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from rlinf.config import ModelConfig
from rlinf.generation import EngineSpec
from rlinf.generation.vllm_engine import VllmEngine
from rlinf.models import describe, resolve
from rlinf.vps.publication import Publisher, Share, space_of_tensors

LAYOUTS = ("one rank", "dp=2", "tp=2")
PARTS = ("publish", "take", "load", "rest", "whole", "memcpy")


class Source:
    """The ranks of an actor, each with the share that FSDP or the tensor-parallel plan of the model gives it."""

    def __init__(self, weights: Mapping[str, torch.Tensor], layout: str) -> None:
        space, ranks = space_of_tensors(weights), 1 if layout == "one rank" else 2
        self.shares: list[list[Share]] = [[] for _ in range(ranks)]
        for name, tensor in weights.items():
            number = space.index[name]
            if layout == "tp=2" and "proj" not in name:  # embedding and norms are on both, and published by one
                self.shares[number % 2].append(Share(number, (0,) * tensor.ndim, tensor))
                continue
            along = int(layout == "tp=2" and ("o_proj" in name or "down_proj" in name))
            first = 0
            for own, part in zip(self.shares, tensor.tensor_split(ranks, along), strict=True):
                start = tuple(first if dim == along else 0 for dim in range(tensor.ndim))
                own.append(Share(number, start, part.contiguous()))
                first += part.shape[along]
        told: list[Any] = []

        def gather(value: Any) -> list[Any]:
            """For ranks that are made one after the other: all are on one host, and have the first one's memory."""
            told.append(value)
            return [value] if isinstance(value, str) else [told[1]]

        self.publishers = [Publisher(space, own, rank, gather) for rank, own in enumerate(self.shares)]


def one_sync(engine: VllmEngine, source: Source) -> dict[str, float]:
    """Seconds of each part. The ranks of a source publish one after the other here, in truth at the same time."""
    for share in (share for own in source.shares for share in own):
        share.values.mul_(1 + 2**-12)  # as training changes them
    begun = time.perf_counter()
    published = [p.publish(own) for p, own in zip(source.publishers, source.shares, strict=True)]
    publish = time.perf_counter() - begun
    engine.load_weights(published)
    whole = time.perf_counter() - begun
    inside = engine.sync_seconds()
    return {
        "publish": publish,
        "take": inside["copy"],
        "load": inside["load"],
        "rest": whole - publish - sum(inside.values()),
        "whole": whole,
    }


def memcpy(of: Sequence[torch.Tensor], into: Sequence[torch.Tensor]) -> float:
    """Seconds to copy the weights from memory to memory, tensor by tensor."""
    begun = time.perf_counter()
    for source, target in zip(of, into, strict=True):
        target.copy_(source)
    return time.perf_counter() - begun


Rows = dict[str, list[dict[str, float]]]


def measure(engine: VllmEngine, weights: Mapping[str, torch.Tensor], repeats: int) -> Rows:
    """Rows of seconds by layout; layouts take turns, so that a slow moment of the machine meets all of them."""
    sources = {layout: Source(weights, layout) for layout in LAYOUTS}
    copies = [tensor.clone() for tensor in weights.values()]
    found: Rows = {layout: [] for layout in LAYOUTS}
    for _ in range(repeats):
        for name, source in sources.items():
            one_sync(engine, source)  # an engine plans, and learns, when its source is new; in a run that happens once
            before = memcpy(list(weights.values()), copies)
            row = one_sync(engine, source)
            row["memcpy"] = (before + memcpy(list(weights.values()), copies)) / 2
            found[name].append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a Hugging Face model directory (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    from transformers import AutoModelForCausalLM

    directory = args.model or resolve(ModelConfig(name="smollm2"))
    info = describe(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    nbytes = sum(tensor.nbytes for tensor in weights.values())
    engine = VllmEngine(EngineSpec(directory, info.eos_ids, info.max_positions, kv_cache_bytes=1 << 26, max_num_seqs=4))
    try:
        found = measure(engine, weights, args.repeats)
    finally:
        engine.close()
    table = Table(title=f"{nbytes / 1e6:.0f} MB, {args.repeats} rounds: median seconds (lowest to highest)")
    for column in ("source", *PARTS, "transfer / memcpy"):
        table.add_column(column)
    ratios, wholes = [], []
    for name, rows in found.items():
        ratio = [row["memcpy"] / (row["publish"] + row["take"]) for row in rows]
        cells = [_spread([row[part] for row in rows]) for part in PARTS]
        table.add_row(name, *cells, _spread(ratio))
        ratios.append(statistics.median(ratio))
        wholes.append(statistics.median(row["whole"] for row in rows))
    Console(width=200 if not sys.stdout.isatty() else None).print(table)
    result = {"benchmark": "weight_sync", "seconds": max(wholes), "transfer_memcpy_ratio": min(ratios)}
    print(json.dumps({key: round(v, 4) if isinstance(v, float) else v for key, v in result.items()}))


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


if __name__ == "__main__":
    main()
