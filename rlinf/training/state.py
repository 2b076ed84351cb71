"""What a checkpoint keeps of a trainer: a tree by parameter name, with sharded tensors as DTensors.

Torch's distributed checkpoint saves such a tree from every rank, and loads it at another world size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rlinf.errors import CheckpointError
from rlinf.training.trainer import Trainer

MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name; a tied parameter once, under its first name."""
    tensors: dict[str, torch.Tensor] = dict(module.named_parameters())
    every = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    tensors.update({name: value for name, value in module.state_dict().items() if name not in every})
    return {name: tensor.detach() for name, tensor in tensors.items()}


def training_state(trainer: Trainer, inner: nn.Module) -> dict[str, Any]:
    """The tree: ``model``, ``optimizer``, ``steps`` and ``rng``. A collective; the same keys on every rank.

    Tensors are the live ones: to load into them in place and then give the tree to `load_training_state` is right.

    Args:
        trainer: whose state it is.
        inner: the module within its model that parameters are named after.
    """
    return {
        "model": named_tensors(inner),
        "optimizer": {
            name: {key: trainer.optimizer.state[parameter][key] for key in MOMENTS}
            for name, parameter in inner.named_parameters()
        },
        "steps": trainer.steps,
        "rng": trainer.ranks.gather(_rng(trainer.ranks.device)),
    }


@torch.no_grad()
def load_training_state(trainer: Trainer, inner: nn.Module, state: dict[str, Any], rank: int) -> None:
    """Take over a tree of the same model, saved at any world size.

    The states of the random generators are taken over only if the world had the same size.

    Raises:
        CheckpointError: names or shapes are not those of this model.
    """
    own = training_state(trainer, inner)
    for part in ("model", "optimizer"):
        if strange := sorted(set(own[part]) ^ set(state[part])):
            raise CheckpointError(
                f"the checkpoint is of another model: {len(strange)} tensors are in one of the two alone, "
                f"among them {strange[:4]}"
            )
    for name, tensor in own["model"].items():
        _take(name, tensor, state["model"][name])
    for name, moments in own["optimizer"].items():
        for key, tensor in moments.items():
            _take(f"{key} of {name}", tensor, state["optimizer"][name][key])
    trainer.steps = int(state["steps"])
    if len(state["rng"]) == len(own["rng"]):
        _set_rng(state["rng"][rank], trainer.ranks.device)


def _take(name: str, into: torch.Tensor, value: torch.Tensor) -> None:
    if into.shape != value.shape:
        raise CheckpointError(f"{name} has shape {tuple(value.shape)} in the checkpoint, {tuple(into.shape)} here")
    if into is not value:
        into.copy_(value)


def _rng(device: str) -> list[str]:
    """States of the random generators of this rank, CPU then GPU, in hexadecimal (plain values in a checkpoint)."""
    states = [torch.get_rng_state()]
    if device.startswith("cuda"):
        states.append(torch.cuda.get_rng_state(device))
    return [state.numpy().tobytes().hex() for state in states]


def _set_rng(states: list[str], device: str) -> None:
    cpu, *gpu = (torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8) for text in states)
    torch.set_rng_state(cpu)
    if gpu and device.startswith("cuda"):
        torch.cuda.set_rng_state(gpu[0], device)
