"""Everything that can be known before a model is loaded or a process started is checked here, and shown."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rlinf.arithmetic import BatchSizes, batch_sizes, training_bytes
from rlinf.checkpoint import Checkpoints, Identity, Meta, writable
from rlinf.cluster import Device, NodeInfo, devices_of
from rlinf.config import ModelConfig, OptimizerConfig, TrainConfig
from rlinf.errors import CheckpointError, ConfigError
from rlinf.m2flow.graph import Graph
from rlinf.m2flow.plan import Plan, describe, stages
from rlinf.scheduler.shipped import choose, looked_for

GIB = 2**30


@dataclass(frozen=True)
class Ready:
    """A run that may start.

    Attributes:
        cfg: with every derived value filled in; the graph's workers have the same values.
        sizes: batch arithmetic.
        identity: what its checkpoints are of.
        resume: the checkpoint to go on from, and its meta.
        output_dir: where everything goes.
    """

    cfg: TrainConfig
    graph: Graph
    sizes: BatchSizes
    identity: Identity
    output_dir: Path
    resume: tuple[Path, Meta] | None

    def lines(self, devices: Sequence[Device] | None = None, plan: Plan | None = None) -> list[str]:
        """What will run, where, in which sizes and how much memory.

        Args:
            devices: it runs on; ``None``: those of this machine, if it did.
            plan: that was found for them; ``None``: the one that the config asks for.
        """
        here = devices is None
        found = local_devices(self.cfg) if devices is None else devices
        lines = [f"workflow {self.cfg.workflow.name}, model {self.identity.model}"]
        lines += [f"devices{' (if it runs on this machine alone)' if here else ''}: {'; '.join(map(str, found))}"]
        if plan is None and not looked_for(self.cfg.plan, len(found)):
            plan = self.plan(found)
        if plan is None:
            lines += [
                "placement: the best for what the stages take, by a profile that is kept for this model, config and "
                f"hardware, or else taken first (in {self.cfg.plan.budget_s:.0f} s or so)"
            ]
        else:
            lines += ["placement: " + describe(plan)[0], *describe(plan)[1:]]
        lines += self.sizes.lines()
        lines += [f"{node.name} waits for the first {node.starts} steps" for node in self.graph.nodes if node.starts]
        if plan is not None:
            lines += ["memory, estimated (weights, gradients and optimizer; activations come on top):"]
            lines += [f"  {text}" for text in self._memory(plan)]
        start = f"resumes {self.resume[0]} (step {self.resume[1].step})" if self.resume else "starts anew"
        return [*lines, f"{start}; output in {self.output_dir}"]

    def plan(self, devices: Sequence[Device]) -> Plan:
        """Where everything runs.

        Raises:
            RlinfError: the plan that is asked for does not exist, or does not fit.
        """
        return choose(self.graph, self.cfg.plan, self.needs, [device.memory for device in devices])

    def needs(self, plan: Plan) -> dict[str, int]:
        """Group -> bytes of each of its ranks, estimated: weights, gradients, optimizer, KV cache."""
        from rlinf.models import describe as describe_model
        from rlinf.models import resolve

        found = {}
        for stage in stages(plan):
            section = getattr(self.cfg, stage.worker, None)
            model = getattr(section, "model", None)
            if not isinstance(model, ModelConfig):
                continue
            parameters = describe_model(resolve(model)).parameters
            trains = hasattr(section, "optimizer")
            bytes_ = training_bytes(parameters, stage.ranks) if trains else 4 * parameters // max(stage.tp, 1)
            found[stage.worker] = bytes_ + int(getattr(section, "kv_cache_gib", 0) * GIB)
        return found

    def _memory(self, plan: Plan) -> list[str]:
        ranks = {stage.worker: stage.ranks for stage in stages(plan)}
        return [f"{name}: {size / GIB:.2f} GiB a rank x {ranks[name]}" for name, size in self.needs(plan).items()]


def local_devices(cfg: TrainConfig) -> tuple[Device, ...]:
    """The devices of this machine, without Ray."""
    import torch

    cpus = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return devices_of([NodeInfo("here", "this machine", cpus, torch.cuda.device_count(), memory)], cfg.cluster)


def preflight(cfg: TrainConfig, build: Callable[[TrainConfig], Graph]) -> Ready:
    """Check a config against the workflow, the data, the model and the disk.

    Args:
        cfg: as it was composed.
        build: makes the graph from the config with its schedules filled in.

    Raises:
        RlinfError: of the kind that fits, naming the key or row and the remedy.
    """
    from rlinf.data import check as check_data
    from rlinf.models import describe, resolve
    from rlinf.models.parallelize import check_tp
    from rlinf.rewards import check as check_reward
    from rlinf.tracking import check as check_logger

    sizes = batch_sizes(cfg)
    check_names(cfg)
    cfg = _with_schedules(cfg, sizes)
    graph = build(cfg)
    _check_warmup(cfg, graph)
    check_data(cfg.data)
    check_reward(cfg.reward)
    check_logger(cfg.logger)
    for role, section in (("actor", cfg.actor), ("critic", cfg.critic), ("reference", cfg.reference)):
        if role in graph.workers:
            check_tp(describe(resolve(section.model)), section.tp)
    name = cfg.workflow.name or cfg.workflow.target.replace(":", ".").rpartition(".")[2]
    identity = Identity(name, model_line(cfg))
    root = Path(cfg.output_root) / f"{name}-{cfg.model.name}"
    output_dir, resume = _place(cfg, root, identity)
    writable(next(folder for folder in (output_dir, *output_dir.absolute().parents) if folder.exists()))
    filled = replace(cfg, workflow=replace(cfg.workflow, name=name), output_dir=str(output_dir))
    return Ready(filled, graph, sizes, identity, output_dir, resume)


def model_line(cfg: TrainConfig) -> str:
    """The model, as a run prints it and as profiles and checkpoints know it.

    Raises:
        ConfigError: it is not there.
    """
    from rlinf.models import describe, resolve

    info = describe(resolve(cfg.model))
    return f"{info.architecture}, {info.layers} layers, {info.parameters:,} parameters"


def check_names(cfg: TrainConfig) -> None:
    """Names that stand for functions: they are looked up, and the loss is tried on no rows at all.

    Raises:
        ConfigError: naming the key and the nearest name.
    """
    import torch

    from rlinf.algorithms.losses import PolicyLossInputs, policy_loss
    from rlinf.algorithms.schedule import lr_factor
    from rlinf.console import check as check_console
    from rlinf.generation.engine import check_engine
    from rlinf.models.load import compute_dtype

    check_console(cfg.logger)
    check_engine(cfg.rollout.engine)
    compute_dtype(cfg.model, "cpu")
    none, rows = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    policy_loss(PolicyLossInputs(none, none, none, rows, none, none), cfg.algorithm)
    for role in (cfg.actor, cfg.critic):
        lr_factor(0, replace(role.optimizer, total_steps=max(role.optimizer.warmup_steps, cfg.steps) + 1))


def _with_schedules(cfg: TrainConfig, sizes: BatchSizes) -> TrainConfig:
    """Learning-rate schedules that span the iterations in which their role learns."""
    actor = _total(cfg.actor.optimizer, sizes, cfg.steps - cfg.algorithm.critic_warmup)
    critic = _total(cfg.critic.optimizer, sizes, cfg.steps)
    return replace(cfg, actor=replace(cfg.actor, optimizer=actor), critic=replace(cfg.critic, optimizer=critic))


def _check_warmup(cfg: TrainConfig, graph: Graph) -> None:
    """A warm-up in which nothing learns, or in which everything does, is none."""
    k = cfg.algorithm.critic_warmup
    learners = [node for node in graph.nodes if node.spec.updates]
    waits = [node.name for node in learners if node.starts]
    if k and (not waits or len(waits) == len(learners)):
        found = f"all that learn wait: {', '.join(waits)}" if waits else "no stage waits"
        raise ConfigError(
            f"algorithm.critic_warmup={k}, and in workflow {graph.name} {found}; it needs an actor that waits and a "
            "critic that learns meanwhile (as in +workflow=ppo): set algorithm.critic_warmup=0"
        )


def _total(optimizer: OptimizerConfig, sizes: BatchSizes, steps: int) -> OptimizerConfig:
    total = optimizer.total_steps or sizes.optimizer_steps * steps
    if optimizer.warmup_steps >= total and optimizer.schedule != "constant":
        raise ConfigError(
            f"warmup_steps={optimizer.warmup_steps} leaves nothing of the {total} optimizer steps "
            f"({sizes.optimizer_steps} a step x {steps} steps) for the {optimizer.schedule} schedule: lower it"
        )
    return replace(optimizer, total_steps=total)


def _place(cfg: TrainConfig, root: Path, identity: Identity) -> tuple[Path, tuple[Path, Meta] | None]:
    """Output directory, and the checkpoint to resume."""
    keep = cfg.checkpoint.keep
    fresh = Path(cfg.output_dir) if cfg.output_dir else root / time.strftime("%Y-%m-%d_%H-%M-%S")
    if cfg.resume == "never":
        if (there := Checkpoints(fresh, keep).latest()) is not None:
            raise CheckpointError(
                f"{fresh} holds a run already (its newest checkpoint is {there.name}): go on with resume=auto, "
                "or give another output_dir"
            )
        return fresh, None
    if cfg.resume == "auto":
        runs = [fresh] if cfg.output_dir else sorted(root.glob("*/"), reverse=True)
        found = next((path for run in runs if (path := Checkpoints(run, keep).latest()) is not None), None)
        if found is None:
            return fresh, None
    else:
        found = Path(cfg.resume)
    meta = Checkpoints(fresh, keep).verify(found, identity)
    if meta.step >= cfg.steps:
        raise ConfigError(f"{found} is at step {meta.step} and steps={cfg.steps}: nothing is left to do; raise steps")
    inside = found.absolute().parent.parent
    return (Path(cfg.output_dir) if cfg.output_dir else inside), (found, meta)
