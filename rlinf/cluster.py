"""The Ray cluster: join or start it, know its devices, hold them for this run, launch ranks on them.

A *device* is a GPU or, on a node without GPUs, a set of cores. One `NodeHold` actor per node holds the node's
resources through Ray's own accounting, so two runs never share devices unknowingly; ranks then run beside it and are
told exactly which GPU or cores are theirs, which lets several groups share a device in turns.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlinf.config import ClusterConfig
from rlinf.errors import PlacementError
from rlinf.reaper import Reaper
from rlinf.vitals import Stacks, cpu_seconds, stacks_from_outside


@dataclass(frozen=True)
class NodeInfo:
    """An alive node: Ray's id, address, and what it has in all (memory in bytes)."""

    node_id: str
    ip: str
    cpus: int
    gpus: int
    memory: int


@dataclass(frozen=True)
class Device:
    """One device of the cluster.

    Attributes:
        index: its number in plans.
        node: the node that it is on.
        kind: ``gpu`` or ``cpu``.
        slot: which of the node's ``slots`` devices it is.
        slots: how many devices the node is cut into.
    """

    index: int
    node: NodeInfo
    kind: str
    slot: int
    slots: int

    @property
    def threads(self) -> int:
        """CPU threads that belong to the device."""
        return max(self.node.cpus // self.slots, 1)

    @property
    def memory(self) -> int | None:
        """Bytes that belong to the device; ``None``: Ray does not tell of GPUs."""
        return self.node.memory // self.slots if self.kind == "cpu" else None

    def __str__(self) -> str:
        what = f"gpu {self.slot}" if self.kind == "gpu" else f"{self.threads} cores ({self.slot + 1}/{self.slots})"
        return f"{self.node.ip} {what}"


def devices_of(nodes: Sequence[NodeInfo], cfg: ClusterConfig) -> tuple[Device, ...]:
    """The devices of the nodes, in the order of the nodes. Pure.

    Raises:
        PlacementError: a node has fewer GPUs or cores than ``cluster.devices_per_node``.
    """
    found: list[Device] = []
    for node in nodes:
        use_gpus = cfg.gpus == "auto" and node.gpus > 0
        have = node.gpus if use_gpus else node.cpus
        slots = cfg.devices_per_node or (node.gpus if use_gpus else 1)
        if slots > have:
            what = "GPUs" if use_gpus else "cores"
            raise PlacementError(
                f"cluster.devices_per_node={slots}, but node {node.ip} has {have} {what}: lower it to {have} or less"
            )
        kind = "gpu" if use_gpus else "cpu"
        found += [Device(len(found) + slot, node, kind, slot, slots) for slot in range(slots)]
    return tuple(found)


class NodeHold:
    """Holds a node's resources for this run, and tells what they are."""

    def describe(self) -> dict[str, Any]:
        import ray

        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        return {
            "gpus": [str(gpu) for gpu in gpus],
            "cores": sorted(os.sched_getaffinity(0)),
        }

    def cpu_seconds(self, pids: Sequence[int]) -> list[float]:
        """Of processes of the node, which need not answer for it; see `rlinf.vitals`."""
        return [cpu_seconds(pid) for pid in pids]

    def stacks(self, pids: Sequence[int]) -> list[Stacks]:
        """Likewise."""
        return [stacks_from_outside(pid) for pid in pids]


@dataclass
class Cluster:
    """A connection to Ray; make it by `connect`, end it by `close`.

    Attributes:
        nodes: the nodes that this run uses.
        devices: their devices.
        reaper: ends what this process's own cluster leaves behind, see `rlinf.reaper`.
        connected: whether `connect` joined or started it (not whoever called before), and so `close` leaves it.
    """

    cfg: ClusterConfig
    nodes: tuple[NodeInfo, ...]
    devices: tuple[Device, ...]
    connected: bool
    reaper: Reaper | None = None
    _holds: dict[str, Any] = field(default_factory=dict)
    _held: dict[str, dict[str, Any]] = field(default_factory=dict)
    _actors: list[Any] = field(default_factory=list)

    @classmethod
    def connect(cls, cfg: ClusterConfig, note: Callable[[str], None] = lambda text: None) -> Cluster:
        """Join the cluster at ``cfg.address``, RAY_ADDRESS or started here by ``ray start``; else start one.

        Raises:
            PlacementError: the address does not answer, or fewer than ``cfg.nodes`` nodes are there after
                ``cfg.wait_s`` seconds.
        """
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Ranks choose their GPUs themselves (they share them in turns), so Ray must not hide them.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        asked = cfg.address or os.environ.get("RAY_ADDRESS")
        import ray

        connect = not ray.is_initialized()
        reaper = None
        try:
            if connect:
                if asked:
                    _probe(asked, cfg.wait_s)
                elsewhere = None if asked == "local" else asked or _started_here(note)
                reaper = None if elsewhere else Reaper()
                _init(elsewhere, cfg)
            nodes = _await_nodes(cfg, note)
            return cls(cfg, nodes, devices_of(nodes, cfg), connect, reaper)
        except BaseException:
            cls(cfg, (), (), connect, reaper).close()
            raise

    def hold(self, note: Callable[[str], None] = lambda text: None) -> None:
        """Reserve the nodes' resources for this run.

        Raises:
            PlacementError: others hold them, and did not give them back within ``cluster.wait_s``.
        """
        import ray

        for node in self.nodes:
            mine = [device for device in self.devices if device.node == node]
            gpus = len(mine) if mine[0].kind == "gpu" else 0
            cpus = min(node.cpus, max(gpus, 1)) if gpus else node.cpus
            actor = ray.remote(NodeHold).options(
                num_cpus=cpus, num_gpus=gpus, scheduling_strategy=_on(node.node_id), max_restarts=0
            )
            self._holds[node.node_id] = actor.remote()
        for node in self.nodes:
            hold = self._holds[node.node_id]
            try:
                self._held[node.node_id] = ray.get(hold.describe.remote(), timeout=self.cfg.wait_s)
            except ray.exceptions.GetTimeoutError:
                free = {k: v for k, v in ray.available_resources().items() if k in ("CPU", "GPU")}
                raise PlacementError(
                    f"node {node.ip} has {node.cpus} CPUs and {node.gpus} GPUs, but they are not free after "
                    f"{self.cfg.wait_s:.0f} s (free in the whole cluster: {free}): another job holds them; "
                    "wait for it, or raise cluster.wait_s"
                ) from None
        if self.reaper is not None:
            self.reaper.remember()
        note(", ".join(str(device) for device in self.devices))

    def launch(self, cls: type, *args: Any, devices: Sequence[Device] = (), **options: Any) -> Any:
        """Start ``cls(*args)`` as an actor on the node of ``devices``, else on the first node."""
        import ray

        node = devices[0].node if devices else self.nodes[0]
        # No runtime_env of the actor's own: with one, Ray starts Python twice for each rank.
        remote = ray.remote(num_cpus=0, num_gpus=0, max_restarts=0, scheduling_strategy=_on(node.node_id), **options)
        actor: Any = remote(cls).remote(*args)
        self._actors.append(actor)
        return actor

    def holder(self, devices: Sequence[Device]) -> Any:
        """The `NodeHold` of the node that `launch` starts an actor on."""
        return self._holds[(devices[0].node if devices else self.nodes[0]).node_id]

    def environment(self, devices: Sequence[Device]) -> dict[str, str]:
        """What a rank's environment must say before its libraries load: threads, and its GPUs or cores."""
        node = devices[0].node if devices else self.nodes[0]
        held = self._held[node.node_id]
        threads = sum(device.threads for device in devices) or 1
        gpus = [held["gpus"][device.slot] for device in devices if device.kind == "gpu"]
        env = {
            "OMP_NUM_THREADS": str(threads),
            "TOKENIZERS_PARALLELISM": "false",
            "CUDA_VISIBLE_DEVICES": ",".join(gpus),
        }
        if devices and not gpus:
            env["RLINF_CORES"] = ",".join(map(str, _cores(held["cores"], devices)))
        return env

    def close(self) -> None:
        """End every actor of this run, and leave the cluster; a cluster that `connect` started ends with that."""
        import ray

        if ray.is_initialized():
            for actor in [*self._actors, *self._holds.values()]:
                with contextlib.suppress(Exception):  # already dead, or the cluster is
                    ray.kill(actor)
        self._actors.clear()
        self._holds.clear()
        if self.connected:
            ray.shutdown()  # also of a start that failed half-way
        if self.reaper is not None:
            self.reaper.close()


def pin(pids: Sequence[int] = ()) -> int:
    """Bind this process to the cores that `Cluster.environment` names. Returns the number of threads to use.

    Args:
        pids: of children that are bound to them too; those that begin later are anyway.
    """
    cores = os.environ.get("RLINF_CORES")
    if cores:
        wanted = {int(core) for core in cores.split(",")}
        for pid in (os.getpid(), *pids):
            with contextlib.suppress(OSError):  # a child that has just ended
                for thread in os.listdir(f"/proc/{pid}/task"):
                    with contextlib.suppress(OSError):  # a thread that has
                        os.sched_setaffinity(int(thread), wanted)
    return int(os.environ.get("OMP_NUM_THREADS", "1"))


def _init(address: str | None, cfg: ClusterConfig) -> None:
    """Join the cluster at ``address``; ``None`` starts one here.

    Raises:
        PlacementError: it does not answer, or Ray cannot start.
    """
    import ray

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        ray.init(
            address=address or "local",
            log_to_driver=False,
            logging_level=logging.ERROR,
            include_dashboard=None if address else False,
            runtime_env=cfg.runtime_env or None,
        )
    except (ConnectionError, TimeoutError, ValueError, RuntimeError) as error:
        raise _no_cluster(address, error) from error
    finally:
        _restore(handlers)


def _no_cluster(address: str | None, error: Exception) -> PlacementError:
    if address is None:
        return PlacementError(
            f"Ray could not start a cluster here ({error}): look into /tmp/ray/session_latest/logs, check "
            "cluster.runtime_env, or start one with `ray start --head`"
        )
    return PlacementError(
        f"no Ray cluster answers at {address} ({error}): start it with `ray start --head`, correct cluster.address or "
        "RAY_ADDRESS, or unset both to start one here"
    )


def _probe(address: str, wait_s: float) -> None:
    """Ray itself would try an address where nobody listens for minutes.

    Raises:
        PlacementError: nobody accepts a connection at ``host:port``.
    """
    found = re.fullmatch(r"(?:ray://)?([^:/]+):(\d+)", address)
    if found is None:
        return  # "auto", "local", or a form that Ray knows better
    try:
        socket.create_connection((found[1], int(found[2])), timeout=wait_s).close()
    except OSError as error:
        raise _no_cluster(address, error) from error


def _started_here(note: Callable[[str], None]) -> str | None:
    """The address of the cluster that ``ray start`` last started on this machine, if it still answers."""
    from ray._private.utils import read_ray_address

    address = read_ray_address()
    if not address:
        return None
    try:
        _probe(address, 2.0)
    except PlacementError:
        note(f"the Ray cluster last started here, {address}, is gone: starting one")
        return None
    return address


def _restore(handlers: dict[signal.Signals, Any]) -> None:
    """Ray puts its own handler on SIGTERM, which aborts the process: give the signals back to whoever had them."""
    if threading.current_thread() is threading.main_thread():
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _cores(available: Sequence[int], devices: Sequence[Device]) -> tuple[int, ...]:
    """The cores of a CPU node's slots: contiguous runs of nearly equal size."""
    chosen: list[int] = []
    for device in devices:
        start = device.slot * len(available) // device.slots
        end = (device.slot + 1) * len(available) // device.slots
        chosen += available[start:end]
    return tuple(chosen)


def _on(node_id: str) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)


def _await_nodes(cfg: ClusterConfig, note: Callable[[str], None]) -> tuple[NodeInfo, ...]:
    import ray

    deadline = time.monotonic() + cfg.wait_s
    said = 0.0
    while True:
        nodes = tuple(
            NodeInfo(
                n["NodeID"],
                n["NodeManagerAddress"],
                int(n["Resources"].get("CPU", 0)),
                int(n["Resources"].get("GPU", 0)),
                int(n["Resources"].get("memory", 0)),
            )
            for n in sorted(ray.nodes(), key=lambda n: ("node:__internal_head__" not in n["Resources"], n["NodeID"]))
            if n["Alive"] and n["Resources"].get("CPU", 0) >= 1
        )
        if nodes and len(nodes) >= cfg.nodes:
            return nodes[: cfg.nodes] if cfg.nodes else nodes
        if time.monotonic() > deadline:
            raise PlacementError(
                f"cluster.nodes={cfg.nodes}, but {len(nodes)} joined within {cfg.wait_s:.0f} s "
                f"({', '.join(n.ip for n in nodes) or 'none'}): start Ray on the missing ones, or lower cluster.nodes"
            )
        if time.monotonic() - said > 10:
            said = time.monotonic()
            note(f"waiting for nodes: {len(nodes)} of {cfg.nodes} are here")
        time.sleep(0.5)
