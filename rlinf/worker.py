"""Worker: one rank of a role, and the lifecycle that every role keeps.

A worker is a plain object: it can be made and called in a test without Ray. `rlinf.cluster` hosts it in a Ray actor.

Life: ``__init__`` (cheap, keeps the config) -> ``setup`` (builds models, engines, processes) -> stages, in the order
of its program, with ``onload``/``offload`` where the plan swaps -> ``teardown``. ``state``/``load_state`` are what a
checkpoint keeps; ``publish_weights``/``receive_weights`` are the two ends of a weight sync.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf.m2flow.stage import StageSpec, Unit, stage
from rlinf.metrics import Recorder

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from rlinf.vps.publication import Publication

__all__ = ["RankContext", "StageSpec", "Unit", "Worker", "stage"]


def _silent(done: float, total: float) -> None:
    """Progress that nobody watches."""


@dataclass(frozen=True)
class RankContext:
    """Who and where a rank is.

    Attributes:
        group: name of the worker group.
        rank: rank in the group; ``rank = dp_rank * tp + tp_rank``.
        world_size: ranks of the group, ``dp * tp``.
        dp: data-parallel size.
        tp: tensor-parallel ranks of a replica (1 where a rank spans its replica's devices).
        device: torch device of the rank.
        seed: the run's seed; derive from it with `rlinf.seeding.derive`.
        deterministic: ask for deterministic kernels.
        output_dir: where the run writes.
        offload_dir: where state that leaves a CPU device goes; ``None``: into memory.
        threads: CPU threads that the rank may use.
        report: ``report(done, total)`` shows progress within the stage that runs now.
    """

    group: str = "worker"
    rank: int = 0
    world_size: int = 1
    dp: int = 1
    tp: int = 1
    device: str = "cpu"
    seed: int = 0
    deterministic: bool = True
    output_dir: Path = Path(".")
    offload_dir: Path | None = None
    threads: int = 1
    report: Callable[[float, float], None] = field(default=_silent, compare=False)

    @property
    def dp_rank(self) -> int:
        return self.rank // self.tp

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The ``("dp", "tp")`` mesh. Needs the process group, which a `collective` worker has from ``setup`` on."""
        from torch.distributed.device_mesh import init_device_mesh

        kind = self.device.split(":")[0]
        return init_device_mesh(kind, (self.dp, self.tp), mesh_dim_names=("dp", "tp"))


class Worker:
    """Base of all roles. Subclasses declare stages with `stage`.

    Attributes:
        collective: the ranks of the group form a torch process group (when there are more than one).
        spans_tp: one rank drives all ``tp`` devices of a replica (an engine with workers of its own), so that the
            group has ``dp`` ranks; otherwise each device has a rank.
        uses_device: it computes on the group's devices, so that it must hold their lease while it runs.
        metrics: record metrics here; they are reduced over ranks and shown under the group's name.
    """

    collective: bool = False
    spans_tp: bool = False
    uses_device: bool = True

    def __init__(self, cfg: Any, ctx: RankContext) -> None:
        self.cfg = cfg
        self.ctx = ctx
        self.metrics = Recorder()

    def setup(self) -> None:
        """Build what the stages need. Called once, on all ranks at the same time."""

    def teardown(self) -> None:
        """Stop processes and free what would outlive this process."""

    def onload(self) -> None:
        """Bring the state back to the device."""

    def offload(self) -> None:
        """Free the device; the state stays in host memory."""

    def nbytes(self) -> int:
        """Bytes of device memory that the state of this rank takes when loaded."""
        return 0

    def state(self) -> dict[str, Any]:
        """Everything a checkpoint must keep: a tree of dicts with tensors (DTensors too) and plain values.

        Called on all ranks at once. The tree has the same keys on every rank.
        """
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over a tree shaped as `state` gives it; tensors may be the very ones that `state` returned."""

    def publish_weights(self, target: str, inline: bool, slot: int = 0) -> Publication:
        """Lay open what this rank has of the weights, under Hugging Face names; sender of a sync.

        Called when nobody reads any more what was published for this target in this slot before.

        Args:
            target: the group that is going to read it.
            inline: some reader is on another host, and needs the bytes themselves (`Publication.carried`).
            slot: which of the target's publications this one takes the place of.
        """
        raise TypeError(f"{type(self).__name__} has no weights to send; flow.sync's first argument must have")

    def receive_weights(self, version: int, publications: Sequence[Publication]) -> None:
        """Take over weights; receiver of a sync.

        Args:
            version: how many updates of the sender they have seen.
            publications: of all ranks of the sender, by rank. They may be read until this returns.
        """
        raise TypeError(f"{type(self).__name__} cannot receive weights; flow.sync's second argument must")

    @classmethod
    def stages(cls) -> dict[str, StageSpec]:
        """The declared stages by name."""
        found = {}
        for name in dir(cls):
            spec = getattr(getattr(cls, name, None), "__stage__", None)
            if spec is not None:
                found[name] = spec
        return found
