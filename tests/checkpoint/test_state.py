"""Saving and loading a group's state, alone and over ranks, across world sizes."""

from __future__ import annotations

import gc
import json
import resource

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from rlinf.checkpoint import load_state, save_state
from rlinf.errors import CheckpointError

FULL = {
    "w": torch.arange(35, dtype=torch.float32).reshape(7, 5),  # 7 rows: uneven over 2 ranks
    "one": torch.arange(3, dtype=torch.float32).reshape(1, 3),  # a rank has nothing of it
    "half": torch.arange(6, dtype=torch.bfloat16),
}
PLAIN = {"step": 3, "lr": 1e-5, "name": "adam", "rng": (1, [2, 3], None), "nan": float("inf"), "on": True}


def state(make) -> dict:
    return {
        "model": {name: make(t) for name, t in FULL.items()},
        "optim": {0: {"exp_avg": make(FULL["w"] * 2), "scalar": torch.tensor(7.0)}},
        "rng": torch.arange(16, dtype=torch.uint8),
        "plain": dict(PLAIN),
    }


def emptied(tree: dict) -> dict:
    for value in tree.values():
        if isinstance(value, dict):
            emptied(value)
        elif isinstance(value, DTensor):
            value.to_local().zero_()
        elif isinstance(value, torch.Tensor):
            value.zero_()
    tree.get("plain", {}).update(dict.fromkeys(PLAIN, None))
    return tree


def check(loaded: dict) -> None:
    def full(t):
        return t.full_tensor() if isinstance(t, DTensor) else t

    for name, t in FULL.items():
        assert torch.equal(full(loaded["model"][name]), t), name
    assert torch.equal(full(loaded["optim"][0]["exp_avg"]), FULL["w"] * 2)
    assert loaded["optim"][0]["scalar"].item() == 7.0
    assert loaded["rng"].tolist() == list(range(16))
    assert loaded["plain"] == PLAIN


def on_rank(rank: int, world: int, store: str, task, *args) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    try:
        task(*args)
    finally:
        gc.collect()  # errors that were looked at hold frames, and these the group, whose threads must end before exit
        dist.destroy_process_group()


def ranks(tmp_path, world: int, task, *args) -> None:
    store = tmp_path / f"store-{task.__name__}-{world}"
    mp.spawn(on_rank, (world, str(store), task, *args), nprocs=world)


def sharded(t):
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp", "tp"))
    return distribute_tensor(t.clone(), mesh, [Shard(0), Replicate()])


def by_columns(t):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(t.clone(), mesh, [Shard(t.dim() - 1)])


def save_two(directory):
    save_state(state(sharded), directory)


def load_two(directory):
    check(load_state(emptied(state(sharded)), directory))
    check(load_state(emptied(state(by_columns)), directory))


def refuse_together(directory):
    rank = dist.get_rank()
    with pytest.raises(CheckpointError, match=r"ranks differ in rng.*rank 1"):
        save_state({"rng": torch.tensor([rank])}, directory / "a")
    with pytest.raises(CheckpointError, match=r"ranks differ in seed"):
        save_state({"seed": rank}, directory / "b")
    with pytest.raises(CheckpointError, match=r"odd"):  # one rank alone cannot go on
        save_state({"odd": object() if rank == 1 else 1}, directory / "c")
    save_state({"drift": torch.tensor([float(rank)])}, directory / "d")
    with pytest.raises(CheckpointError, match=r"not there"):
        load_state({"x": 1}, directory / ("d" if rank == 0 else "nowhere") / "e")


def test_one_process_round_trip_fills_the_template_in_place(tmp_path):
    save_state(state(torch.clone), tmp_path / "actor")
    template = emptied(state(torch.clone))
    weight = template["model"]["w"]
    loaded = load_state(template, tmp_path / "actor")
    check(loaded)
    assert loaded["model"]["w"] is weight
    assert json.loads((tmp_path / "actor" / "scalars.json").read_text())["plain/step"] == 3


def test_parameters_that_require_grad_are_filled(tmp_path):
    save_state({"w": torch.nn.Parameter(torch.ones(3))}, tmp_path)
    parameter = torch.nn.Parameter(torch.zeros(3))
    load_state({"w": parameter}, tmp_path)
    assert parameter.tolist() == [1, 1, 1]
    assert parameter.requires_grad


def test_a_state_without_tensors_needs_no_tensor_files(tmp_path):
    save_state({"cursor": 5, "empty": {}}, tmp_path)
    assert load_state({"cursor": 0, "empty": {}}, tmp_path) == {"cursor": 5, "empty": {}}
    assert [p.name for p in tmp_path.iterdir()] == ["scalars.json"]


def test_two_ranks_to_two_and_to_one(tmp_path):
    ranks(tmp_path, 2, save_two, tmp_path / "actor")
    ranks(tmp_path, 2, load_two, tmp_path / "actor")
    check(load_state(emptied(state(torch.clone)), tmp_path / "actor"))


def test_one_process_to_two_ranks(tmp_path):
    save_state(state(torch.clone), tmp_path / "actor")
    ranks(tmp_path, 2, load_two, tmp_path / "actor")


def test_what_one_rank_cannot_do_fails_on_all(tmp_path):
    ranks(tmp_path, 2, refuse_together, tmp_path)


def test_another_shape_names_the_key_both_shapes_and_the_remedy(tmp_path):
    save_state({"model": {"w": torch.ones(4, 3)}}, tmp_path)
    template = {"model": {"w": torch.zeros(4, 5)}}
    with pytest.raises(
        CheckpointError, match=r"model/w: saved with shape \(4, 3\), expected \(4, 5\)(.|\n)*resume with"
    ):
        load_state(template, tmp_path)
    assert template["model"]["w"].sum() == 0


def test_another_dtype_is_not_cast_in_silence(tmp_path):
    save_state({"w": torch.ones(2, dtype=torch.bfloat16)}, tmp_path)
    with pytest.raises(CheckpointError, match=r"w: saved as torch.bfloat16, expected torch.float32"):
        load_state({"w": torch.zeros(2)}, tmp_path)


def test_missing_and_extra_keys_are_named(tmp_path):
    save_state({"a": torch.ones(1), "b": 1, "c": torch.ones(1), "d": 1}, tmp_path)
    with pytest.raises(CheckpointError) as error:
        load_state({"a": torch.ones(1), "new": torch.ones(1), "c": 3, "d": torch.ones(1)}, tmp_path)
    told = str(error.value)
    assert "missing in the checkpoint: new" in told
    assert "in the checkpoint alone: b" in told
    assert "c: a tensor was saved, a plain value is expected" in told
    assert "d: a plain value was saved, a tensor is expected" in told


def test_a_missing_group_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"critic is not there"):
        load_state({"a": 1}, tmp_path / "critic")


def test_a_disk_that_takes_no_more_is_named_with_the_path(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(CheckpointError, match=rf"{tmp_path}.*ulimit -f"):
            save_state({"w": torch.ones(10_000)}, tmp_path / "actor")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_in_place_of_a_folder_is_named(tmp_path):
    (tmp_path / "actor").write_text("")
    with pytest.raises(CheckpointError, match=r"actor.*a file stands where a folder is needed"):
        save_state({"w": torch.ones(1)}, tmp_path / "actor")
