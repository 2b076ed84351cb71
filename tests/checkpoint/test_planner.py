"""What a rank reads of a checkpoint: every element that it holds, once, wherever it was saved."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from rlinf.checkpoint import load_state, save_state
from rlinf.checkpoint.planner import Box, reads
from rlinf.errors import CheckpointError
from tests.checkpoint.test_state import ranks


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """A tensor in boxes that meet nowhere and leave nothing out: cut again and again along some dimension."""
    boxes: list[Box] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 5)) if shape else 0):
        at = draw(st.integers(0, len(boxes) - 1))
        start, size = boxes[at]
        dim = draw(st.integers(0, len(shape) - 1))
        if size[dim] < 2:
            continue
        cut = draw(st.integers(1, size[dim] - 1))
        rest = tuple(s + cut * (d == dim) for d, s in enumerate(start))
        boxes[at] = start, tuple(cut if d == dim else n for d, n in enumerate(size))
        boxes.append((rest, tuple(n - cut if d == dim else n for d, n in enumerate(size))))
    return draw(st.permutations(boxes))


SHAPES = st.lists(st.integers(1, 7), max_size=3).map(tuple)


@given(st.data(), st.dictionaries(st.sampled_from("abcd"), SHAPES, min_size=1))
def test_every_element_that_is_wanted_is_read_once_from_where_it_lies(
    data: st.DataObject, shapes: dict[str, tuple[int, ...]]
) -> None:
    chunks = {name: data.draw(cuts(shape)) for name, shape in shapes.items()}
    wanted = {name: data.draw(st.sampled_from(data.draw(cuts(shape)))) for name, shape in shapes.items()}
    count = {name: np.zeros(shape, int) for name, shape in shapes.items()}
    for name, chunk, start, size in reads(shapes, chunks, wanted):
        held_start, held_size = chunks[name][chunk]
        for a, n, b, m in zip(start, size, held_start, held_size, strict=True):
            assert b <= a < a + n <= b + m
        count[name][tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))] += 1
    for name, (start, size) in wanted.items():
        inside = np.zeros(shapes[name], int)
        inside[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))] = 1
        assert (count[name] == inside).all()


def test_an_empty_part_reads_nothing() -> None:
    assert reads({"w": (5,)}, {"w": [((0,), (5,))]}, {"w": ((5,), (0,))}) == []


@pytest.mark.parametrize(
    ("chunks", "text"),
    [
        ([((0, 0), (2, 3))], r"w \(parameter\): box from \[2, 0\] of \[2, 3\] is held by no rank \(a hole\)"),
        ([((0, 0), (4, 3)), ((1, 0), (1, 3))], r"w .*box from \[1, 0\] of \[1, 3\] is held by ranks 0, 1"),
        ([((0, 0), (5, 3))], r"w .*outside of shape \[4, 3\]"),
    ],
)
def test_what_does_not_add_up_is_named(chunks: list[Box], text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        reads({"w": (4, 3)}, {"w": chunks}, {"w": ((0, 0), (1, 3))})


def test_a_checkpoint_with_a_hole_is_refused_and_nothing_is_touched(tmp_path: Path) -> None:
    save_state({"a": torch.ones(3), "w": torch.arange(12.0).reshape(4, 3)}, tmp_path)
    index = FileSystemReader(tmp_path).read_metadata()
    index.state_dict_metadata["w"].chunks[0].sizes = torch.Size([2, 3])
    (tmp_path / ".metadata").write_bytes(pickle.dumps(index))
    template = {"a": torch.zeros(3), "w": torch.full((4, 3), -1.0)}
    with pytest.raises(CheckpointError, match=r"w \(parameter\): box from \[2, 0\].*the checkpoint is damaged"):
        load_state(template, tmp_path)
    assert not template["a"].any()
    assert (template["w"] == -1).all()


# Many layouts, real processes

FULL = {
    "w": torch.arange(77, dtype=torch.float32).reshape(11, 7),
    "short": torch.arange(2, dtype=torch.float64),
    "half": torch.arange(30, dtype=torch.float32).reshape(10, 3).to(torch.bfloat16),
    "count": torch.arange(5, dtype=torch.int64),
    "mask": torch.arange(9) % 2 == 0,
    "wave": torch.arange(4).to(torch.complex64),
}
SCALAR = torch.tensor(41, dtype=torch.int64)


def spread(how: str) -> dict[str, torch.Tensor]:
    world = dist.get_world_size()
    if how == "rows":
        mesh, placements = init_device_mesh("cpu", (world,)), [Shard(0)]
    elif how == "replicas of rows":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replica", "shard"))
        placements = [Replicate(), Shard(0)]
    else:  # tensor parallelism cut the rows before FSDP did
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
        placements = [_StridedShard(0, split_factor=world // 2), Shard(0)]
    found: dict[str, torch.Tensor] = {}
    for name, tensor in FULL.items():
        if isinstance(placements[0], _StridedShard):
            outer = distribute_tensor(tensor.clone(), mesh["tp"], [Shard(0)]).to_local()
            inner = distribute_tensor(outer.clone(), mesh["dp"], [Shard(0)]).to_local()
            shape, stride = tensor.shape, tensor.stride()
            found[name] = DTensor.from_local(inner, mesh, placements, run_check=False, shape=shape, stride=stride)
        else:
            found[name] = distribute_tensor(tensor.clone(), mesh, placements)
    return found


def write(directory: Path, how: str) -> None:
    save_state({**spread(how), "scalar": SCALAR.clone()}, directory)


def read(directory: Path, how: str) -> None:
    expected, template = spread(how), spread(how)
    for tensor in template.values():
        tensor.to_local().zero_()
    loaded = load_state({**template, "scalar": torch.zeros((), dtype=torch.int64)}, directory)
    for name, tensor in expected.items():
        assert torch.equal(loaded[name].to_local(), tensor.to_local()), name
    assert loaded["scalar"] == SCALAR


@pytest.mark.parametrize(
    ("writers", "readers"),
    [((3, "rows"), (4, "strided")), ((4, "strided"), (3, "rows")), ((4, "replicas of rows"), (2, "rows"))],
)
def test_from_any_layout_to_any_other(tmp_path: Path, writers: tuple[int, str], readers: tuple[int, str]) -> None:
    ranks(tmp_path, writers[0], write, tmp_path / "group", writers[1])
    ranks(tmp_path, readers[0], read, tmp_path / "group", readers[1])
    alone = {**{name: torch.zeros_like(tensor) for name, tensor in FULL.items()}, "scalar": torch.zeros_like(SCALAR)}
    loaded = load_state(alone, tmp_path / "group")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in FULL.items())
