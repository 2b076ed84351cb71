"""WorkerGroup: the ranks of one worker as Ray actors, and how the driver waits for them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlinf.cluster import Cluster, Device
from rlinf.deadline import Deadline
from rlinf.failure import Failure, RankError, RunFailed, interruption
from rlinf.rank import WATCH, RankHost
from rlinf.worker import RankContext, Worker


@dataclass
class WorkerGroup:
    """The ranks of one worker.

    Attributes:
        name: the group's name in the workflow.
        ranks: Ray actor handles by rank.
        places: (host name, pid) by rank; (address, 0) of one that has not yet said who it is.
    """

    name: str
    ranks: list[Any]
    places: list[tuple[str, int]]
    meet: tuple[str, int] = ("", 0)

    @classmethod
    def launch(
        cls,
        cluster: Cluster,
        name: str,
        worker: type[Worker],
        cfg: Any,
        ctx: RankContext,
        devices: Sequence[Sequence[Device]],
    ) -> WorkerGroup:
        """Start one actor for each entry of ``devices`` (the devices of that rank)."""
        from ray import cloudpickle

        host = _methods_in_groups(RankHost)
        ranks = []
        for rank, mine in enumerate(devices):
            kind = "cuda" if mine and mine[0].kind == "gpu" else "cpu"
            ranks.append(
                cluster.launch(
                    host,
                    cluster.environment(mine),
                    module_paths(),
                    cloudpickle.dumps((worker, cfg, replace(ctx, rank=rank, device=kind))),
                    devices=mine,
                    concurrency_groups={WATCH: 1},
                )
            )
        return cls(name, ranks, [((mine or cluster.devices)[0].node.ip, 0) for mine in devices])

    def describe(self, rank: int) -> str:
        """A rank for messages."""
        host, pid = self.places[rank]
        return f"{self.name} rank {rank} (node {host}, {f'pid {pid}' if pid else 'its process has not started'})"

    def introduce(self, found: Sequence[tuple[str, int, str, int]]) -> None:
        """Take over what the ranks' `RankHost.identify` said."""
        self.places = [(host_name, pid) for host_name, pid, _, _ in found]
        self.meet = (found[0][2], found[0][3])


def module_paths() -> list[str]:
    """Folders that a workflow's own modules may be in: where the run was started, and PYTHONPATH."""
    return [os.getcwd(), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]


def _methods_in_groups(cls: type) -> type:
    import ray

    for name in ("watch", "state", "stacks"):
        setattr(cls, name, ray.method(concurrency_group=WATCH)(getattr(cls, name)))
    return cls


def gather(
    calls: Mapping[Any, tuple[WorkerGroup, int]],
    tick: Callable[[], None] = lambda: None,
    every_s: float = 0.5,
    grace_s: float = 3.0,
    limit: Deadline | None = None,
) -> list[Any]:
    """Results of calls on ranks, in the order of ``calls``; the first failure ends the wait.

    Args:
        calls: Ray reference -> (group, rank).
        tick: called about every ``every_s`` seconds while waiting.
        grace_s: after a failure, how long to listen for an earlier cause.
        limit: until when all must have answered.

    Raises:
        StartError: they have not.
        RunFailed: naming the failure that caused the others.
    """
    import ray

    pending = list(calls)
    results: dict[Any, Any] = {}
    failures: list[Failure] = []
    deadline = float("inf")
    while pending and time.monotonic() < deadline:
        ready, pending = ray.wait(pending, num_returns=1, timeout=every_s)
        for ref in ready:
            group, rank = calls[ref]
            try:
                results[ref] = ray.get(ref)
            except Exception as error:
                if (signalled := interruption(error)) is not None:
                    raise signalled from None
                failures.append(_failure(error, group, rank))
                deadline = min(deadline, time.monotonic() + grace_s)
        if failures and not all(failure.echo for failure in failures):
            # A cause is at hand; whatever failed in the same moment is still looked at.
            deadline = min(deadline, time.monotonic() + 0.5)
        if limit is not None and pending and not failures:
            limit.check(group.describe(rank) for group, rank in map(calls.__getitem__, pending))
        tick()
    if failures:
        raise RunFailed(failures)
    return [results[ref] for ref in calls]


def _failure(error: Exception, group: WorkerGroup, rank: int) -> Failure:
    import ray

    cause = getattr(error, "cause", None)
    for candidate in (error, cause):
        if isinstance(candidate, RankError):
            return candidate.failure
    host, pid = group.places[rank]
    if isinstance(error, ray.exceptions.RayActorError):
        reason = " ".join(str(error).split())
        return Failure(group.name, rank, host, pid, "", f"its process died ({reason})", "", time.time(), died=True)
    return Failure.of(error, group.name, rank, host, pid, "")


def quiet(call: Callable[[], Any]) -> None:
    """For the way out, where an error must not hide the one that ended the run."""
    with contextlib.suppress(Exception):
        call()
