"""Four ranks over Gloo with DTensors of every kind; each says what it really holds."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

from rlinf.models.parallelize import parallelize
from rlinf.vps.dtensor import boxes_of, buffers_of, layout_of, live_state
from rlinf.vps.space import LayoutError
from tests.models.small import SIZES

SHAPES = [(8, 6), (5, 7), (3, 2), (1, 5), (2,), (6, 1, 3)]


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 6)
        self.up = torch.nn.Linear(6, 12)
        self.down = torch.nn.Linear(12, 6)
        self.head = torch.nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("kept", torch.arange(3.0))
        self.register_buffer("made", torch.ones(2), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(self.up(self.embed(ids)).relu()))


def trained_llama(mesh) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """As an actor has it; sizes that neither two tensor-parallel parts nor two shards of each divide."""
    torch.manual_seed(0)
    sizes = {**SIZES, "vocab_size": 265, "intermediate_size": 50}
    model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True))
    parallelize(model, mesh, torch.float32, backbone=model.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    model(torch.arange(7)[None]).logits.square().mean().backward()
    optimizer.step()
    return model, optimizer


def trained(mesh) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Net()
    if mesh is not None:
        if mesh["tp"].size() > 1:
            parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if mesh["dp"].size() > 1:
            fully_shard(net, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, foreach=False)
    net(torch.arange(7)).square().mean().backward()
    optimizer.step()
    return net, optimizer


def cases(rank: int) -> dict:
    flat, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    found: dict = {"boxes": []}
    for shape in SHAPES:
        labels = torch.arange(float(torch.Size(shape).numel())).view(shape)
        placements = [(flat, [Shard(d)]) for d in range(len(shape))] + [(flat, [Replicate()])]
        for a in [Replicate(), *(Shard(d) for d in range(len(shape)))]:
            placements += [(square, [a, b]) for b in [Replicate(), *(Shard(d) for d in range(len(shape)))]]
        for mesh, where in placements:
            tensor = distribute_tensor(labels, mesh, where)
            start, size = boxes_of(tensor, 4)[rank]
            expected = labels[tuple(slice(s, s + n) for s, n in zip(start, size, strict=True))]
            same = tensor.to_local().shape == expected.shape and torch.equal(tensor.to_local(), expected)
            found["boxes"].append((same, f"{shape} {where} {tensor.to_local().tolist()} {expected.tolist()}"))
    part = distribute_tensor(labels, square_of_names()["a"], [Shard(0)])
    try:
        boxes_of(part, 4)
    except LayoutError as error:
        found["part"] = str(error)
    for name, dp, tp, make in (
        ("fsdp", 4, 1, trained),
        ("tp", 1, 4, trained),
        ("both", 2, 2, trained),
        ("llama", 2, 2, trained_llama),
    ):
        mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
        net, optimizer = make(mesh)
        state = live_state(net, optimizer)
        layout = layout_of(state, mesh=mesh, ranks=range(4))
        full = {
            kind: {n: (t.full_tensor() if hasattr(t, "full_tensor") else t).clone() for n, t in tensors.items()}
            for kind, tensors in state.tensors.items()
        }
        placements = {str(t.placements) for t in state.tensors[0].values() if hasattr(t, "placements")}
        found[name] = (layout.hash, layout, [b.clone() for b in buffers_of(state)], full, placements)
    return found


def square_of_names() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))


def run_rank(rank: int, work: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{work}/rendezvous", rank=rank, world_size=4)
    try:
        everyone: list = [None] * 4
        dist.all_gather_object(everyone, cases(rank))
        if rank == 0:
            torch.save(everyone, work / "results.pt")
    except BaseException:
        (work / f"error-{rank}").write_text(traceback.format_exc())
        raise
    finally:
        dist.destroy_process_group()
