"""What a profile is of: workflow, model, settings, and the kinds of devices."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf.m2flow.graph import Graph
from rlinf.scheduler.profile import Identity, Kind

if TYPE_CHECKING:
    from rlinf.cluster import Device
    from rlinf.config import TrainConfig
    from rlinf.preflight import Ready

# What a run is called, how long it goes on and what it leaves; where and when things run. None changes a stage.
_OUTSIDE = (
    *("plan", "cluster", "evaluation", "checkpoint", "logger", "steps", "seed"),
    *("output_root", "output_dir", "resume", "dry_run"),
)
_OF_CLUSTER = ("offload_dir", "runtime_env")


def identity_of(ready: Ready) -> Identity:
    """What a profile of this run must be of."""
    return Identity(
        workflow=ready.identity.workflow, model=ready.identity.model, config=config_digest(ready.cfg, ready.graph)
    )


def config_digest(cfg: TrainConfig, graph: Graph) -> str:
    """16 hexadecimal digits of all that changes what a stage does: settings, and the stages with their fields."""
    settings: dict[str, Any] = dataclasses.asdict(cfg)
    cluster = settings["cluster"]
    for name in _OUTSIDE:
        del settings[name]
    del settings["workflow"]["name"]
    for role in ("actor", "critic"):
        del settings[role]["optimizer"]["total_steps"]  # follows from the number of steps
    settings |= {f"cluster.{name}": cluster[name] for name in _OF_CLUSTER}
    stages = [
        [
            node.name,
            sorted(node.reads),
            sorted(node.writes),
            node.samples,
            node.phase,
            sorted(map(repr, node.options.items())),
        ]
        for node in graph.phase("train")
    ]
    workers = [
        [name, f"{spec.cls.__module__}.{spec.cls.__qualname__}", spec.dp, spec.tp]
        for name, spec in graph.workers.items()
    ]
    syncs = [[sync.source, sync.target] for sync in graph.syncs]
    return digest([settings, stages, workers, syncs])


def digest(data: Any) -> str:
    """16 hexadecimal digits of plain data; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()[:16]


def kinds_of(devices: Sequence[Device]) -> tuple[dict[str, tuple[int, ...]], dict[str, Kind]]:
    """Kind -> its devices, and kind -> what is known of it. GPUs go by name, sets of cores by their number.

    A GPU has the memory that it has; a set of cores its share of the node's.
    """
    places: dict[str, list[int]] = {}
    memory: dict[str, list[int | None]] = {}
    for device in devices:
        if device.kind == "gpu":
            name, size = _gpu(device)
        else:
            name, size = "cpu" if device.threads == 1 else f"cpu x {device.threads}", device.memory
        places.setdefault(name, []).append(device.index)
        memory.setdefault(name, []).append(size)
    kinds = {}
    for name, sizes in memory.items():
        known = [size for size in sizes if size]
        kinds[name] = Kind(memory=min(known) if len(known) == len(sizes) else None)
    return {name: tuple(own) for name, own in places.items()}, kinds


def hardware(places: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """What a profile was measured on, beyond the names of its kinds: how many there are, and the host's CPU."""
    return {"devices": {kind: len(own) for kind, own in places.items()}, "processor": processor()}


def processor() -> str:
    """The model of this host's CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _gpu(device: Device) -> tuple[str, int | None]:
    """Name and bytes of memory, as the driver of its node says."""
    found = _gpus_of(device.node.node_id, device.node.ip)
    return found[device.slot] if device.slot < len(found) else ("gpu", None)


@cache
def _gpus_of(node_id: str, ip: str) -> list[tuple[str, int]]:
    import ray

    if not ray.is_initialized() or ip == ray.util.get_node_ip_address():
        return list_gpus()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
    found: list[tuple[str, int]] = ray.get(
        ray.remote(list_gpus).options(num_cpus=0, scheduling_strategy=there).remote()
    )
    return found


def list_gpus() -> list[tuple[str, int]]:
    """(name, bytes) of the GPUs of this host that this process may use. Asks their driver, and holds none of them."""
    ask = ["nvidia-smi", "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(ask, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    found = [[part.strip() for part in line.split(",")] for line in said.splitlines()]
    gpus = {key: (name, int(size) << 20) for index, uuid, name, size in found for key in (index, uuid)}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    wanted = [key.strip() for key in visible.split(",")] if visible is not None else [index for index, *_ in found]
    return [gpus[key] for key in wanted if key in gpus]
