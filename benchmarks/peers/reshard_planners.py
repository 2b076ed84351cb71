"""Seconds that a peer's planner needs for the work of `benchmarks/reshard_plan.py`, scaled up from a sample.

    python reshard_planners.py megatron|dcp RANKS

Its own functions are called, on metadata that says what a job of that size would say; nothing is transferred. Last
line: JSON with ``seconds`` and ``sample`` (what share of the work was really done).
"""

from __future__ import annotations

import json
import os
import sys
import time
from types import SimpleNamespace
from typing import Any

import torch

LAYERS, EXPERTS, HIDDEN, WIDTH, HEADS, KV, DIM, VOCAB = 94, 128, 4096, 1536, 64, 4, 128, 151936


def megatron(ranks: int) -> dict[str, Any]:
    """`build_centralized_reshard_plan` on rank 0: it plans for all ranks; a sample of destinations is asked for."""
    from megatron.core.resharding import planner
    from megatron.core.resharding.utils import ParameterMetadata

    def metadata(rank: int, tp: int, pp: int, ep: int) -> list[ParameterMetadata]:
        stage_size = ranks // pp
        stage, inner = divmod(rank, stage_size)
        first = stage * stage_size
        tp_group = [first + inner // tp * tp + i for i in range(tp)]
        dp_group = list(range(first + inner % tp, first + stage_size, tp))
        expert = inner % ep
        expert_dp = list(range(first + expert, first + stage_size, ep))

        def one(name: str, shape: tuple[int, ...], dim: int | None, is_expert: bool = False) -> ParameterMetadata:
            made = ParameterMetadata(name, shape, torch.bfloat16, 2, is_tp=dim is not None, partition_dim=dim or 0)
            made.owner_rank, made.resolved_name = rank, name
            made.tensor_parallel_group_ranks = None if is_expert or dim is None else tp_group
            made.data_parallel_group_ranks = expert_dp if is_expert else dp_group
            return made

        found = []
        for layer in range(LAYERS * stage // pp, LAYERS * (stage + 1) // pp):
            at = f"decoder.layers.{layer}."
            found += [one(at + f"norm{i}", (HIDDEN,), None) for i in range(2)]
            found += [one(at + f"qk_norm{i}", (DIM,), None) for i in range(2)]
            # Groups of queries with their keys and values; tp8 over 4 of them is more than it can cut.
            found.append(one(at + "linear_q", (HEADS * DIM // tp, HIDDEN), 0))
            found += [one(at + f"linear_{n}", (KV * DIM // tp, HIDDEN), 0) for n in "kv"]
            found.append(one(at + "linear_proj", (HIDDEN, HEADS * DIM // tp), 1))
            found.append(one(at + "router", (EXPERTS, HIDDEN), None))
            for e in range(EXPERTS * expert // ep, EXPERTS * (expert + 1) // ep):
                found.append(one(at + f"experts.fc1.weight{e}", (2 * WIDTH, HIDDEN), None, True))
                found.append(one(at + f"experts.fc2.weight{e}", (HIDDEN, WIDTH), None, True))
        if stage == 0:
            found.append(one("embedding", (VOCAB // tp, HIDDEN), 0))
        if stage == pp - 1:
            found += [one("final_norm", (HIDDEN,), None), one("output_layer", (VOCAB // tp, HIDDEN), 0)]
        return found

    sides = [[metadata(rank, 4, 8, 8) for rank in range(ranks)], [metadata(rank, 8, 4, 16) for rank in range(ranks)]]
    sample = max(1, min(ranks, 8))
    told = [sides[0], [one if i % (ranks // sample) == 0 else [] for i, one in enumerate(sides[1])]]

    def gather(into: list[Any], mine: Any) -> None:
        into[:] = told.pop(0)

    planner.dist = SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda: ranks, all_gather_object=gather)
    planner.torch = SimpleNamespace(distributed=SimpleNamespace(broadcast_object_list=lambda plans, src: None))
    module = SimpleNamespace(pg_collection=object(), named_parameters=lambda recurse: [], named_modules=lambda: [])
    start = time.perf_counter()
    planner.build_centralized_reshard_plan(module, module)
    return {"seconds": (time.perf_counter() - start) * ranks / sample, "sample": f"{sample}/{ranks}"}


def dcp(ranks: int) -> dict[str, Any]:
    """`create_default_local_load_plan` of one rank, from metadata of all; one layer of 94 is asked for."""
    import torch.distributed as dist
    from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorProperties
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata as Stored
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    after = ranks * 3 // 4
    dist.init_process_group("fake", rank=after // 2, world_size=after, store=FakeStore())
    mesh = init_device_mesh("cpu", (after,))
    shapes = {f"norm{i}": (HIDDEN,) for i in range(2)} | {f"qk_norm{i}": (DIM,) for i in range(2)}
    shapes |= {"q": (HEADS * DIM, HIDDEN), "k": (KV * DIM, HIDDEN), "v": (KV * DIM, HIDDEN)}
    shapes |= {"o": (HIDDEN, HEADS * DIM), "router": (EXPERTS, HIDDEN)}
    for e in range(EXPERTS):
        shapes |= {f"{e}.gate": (WIDTH, HIDDEN), f"{e}.up": (WIDTH, HIDDEN), f"{e}.down": (HIDDEN, WIDTH)}
    stored, state = {}, {}
    for kind in ("parameter", "master", "exp_avg", "exp_avg_sq"):
        for name, shape in shapes.items():
            each = -(-shape[0] // ranks)
            chunks = [
                ChunkStorageMetadata(torch.Size([low, *[0] * (len(shape) - 1)]), torch.Size([high - low, *shape[1:]]))
                for low, high in ((each * i, min(shape[0], each * (i + 1))) for i in range(ranks))
                if high > low
            ]
            key, properties = f"{kind}.{name}", TensorProperties(dtype=torch.float32)
            stored[key] = Stored(properties, torch.Size(shape), chunks)
            rows = -(-shape[0] // after)
            mine = max(0, min(shape[0], rows * (after // 2 + 1)) - rows * (after // 2))
            local = torch.empty((mine, *shape[1:]), device="meta")
            stride = torch.empty(shape, device="meta").stride()
            state[key] = DTensor.from_local(
                local, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride
            )
    start = time.perf_counter()
    create_default_local_load_plan(state, Metadata(stored))
    return {"seconds": (time.perf_counter() - start) * LAYERS, "sample": f"1/{LAYERS}"}


if __name__ == "__main__":
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    print(json.dumps({"megatron": megatron, "dcp": dcp}[sys.argv[1]](int(sys.argv[2]))))
