"""What a rank reads of a checkpoint: every element that it holds, once, wherever it was saved."""

from __future__ import annotations

import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
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


@given(st.data(), st.dictionaries(st.sampled_from("abcd"), SHAPES, min_size=1))
def test_a_piece_that_is_not_there_is_named_whoever_wants_it(
    data: st.DataObject, shapes: dict[str, tuple[int, ...]]
) -> None:
    chunks = {name: data.draw(cuts(shape)) for name, shape in shapes.items()}
    lost = data.draw(st.sampled_from(sorted(shapes)))
    start, size = chunks[lost].pop()
    with pytest.raises(CheckpointError) as error:
        reads(shapes, chunks, {})  # a rank that wants nothing refuses with the others
    told = re.search(r"(\w+)(?: \(parameter\))?: box from \[([\d, ]*)\] of \[([\d, ]*)\]", str(error.value))
    assert told is not None, str(error.value)
    assert told[1] == lost
    begin, extent = ([int(number) for number in told[k].split(",") if number.strip()] for k in (2, 3))
    for a, n, b, m in zip(begin, extent, start, size, strict=False):  # padded by the dimensions of other tensors
        assert b <= a < a + n <= b + m


def test_an_empty_part_reads_nothing() -> None:
    assert reads({"w": (5,)}, {"w": [((0,), (5,))]}, {"w": ((5,), (0,))}) == []


def test_a_tensor_that_is_not_on_this_rank_is_not_read() -> None:
    assert reads({"w": (5,), "scale": ()}, {"w": [((0,), (5,))], "scale": [((), ())]}, {}) == []


@pytest.mark.parametrize(
    ("chunks", "text"),
    [
        ([((0, 0), (2, 3))], r"w \(parameter\): box from \[2, 0\] of \[2, 3\] is held by no rank \(a hole\)"),
        ([((0, 0), (4, 3)), ((1, 0), (1, 3))], r"w .*box from \[1, 0\] of \[1, 3\] is held by ranks 0, 1"),
        ([((0, 0), (5, 3))], r"w .*outside of shape \[4, 3\]"),
        ([], r"w: box from \[0, 0\] of \[4, 3\] .* nothing of it was saved"),
        ([((0, 0), (0, 3))], r"w: box from \[0, 0\] of \[4, 3\] .* nothing of it was saved"),
    ],
)
def test_what_does_not_add_up_is_named(chunks: list[Box], text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        reads({"w": (4, 3)}, {"w": chunks}, {"w": ((0, 0), (1, 3))})


# Damaged checkpoints


def reindexed(directory: Path, change: Callable[[Metadata], None]) -> None:
    index = FileSystemReader(directory).read_metadata()
    change(index)
    (directory / ".metadata").write_bytes(pickle.dumps(index))


def without_a_piece(directory: Path) -> None:
    def remove(index: Metadata) -> None:
        stored = index.state_dict_metadata["w"]
        assert isinstance(stored, TensorStorageMetadata)
        stored.chunks.pop()

    reindexed(directory, remove)


def without_its_place(directory: Path) -> None:
    def forget(index: Metadata) -> None:
        index.storage_data = {k: v for k, v in index.storage_data.items() if (k.fqn, k.offset[:1]) != ("w", (8,))}

    reindexed(directory, forget)


def without_a_file(directory: Path) -> None:
    (directory / "__2_0.distcp").unlink()


def with_half_a_file(directory: Path) -> None:
    content = (directory / "__2_0.distcp").read_bytes()
    (directory / "__2_0.distcp").write_bytes(content[: len(content) // 2])


DAMAGE = {
    without_a_piece: r"w \(parameter\): box from \[8, 0\] of \[3, 7\] is held by no rank.*the checkpoint is damaged",
    without_its_place: r"w: box from \[8, 0\] of \[3, 7\] is in no file.*the checkpoint is damaged",
    without_a_file: r"__2_0\.distcp.*No such file",
    with_half_a_file: r"__2_0\.distcp has \d+ bytes, \d+ or more expected.*the checkpoint is damaged",
}


def refuse(saved: Path) -> None:
    """The first rank reads nothing of what is damaged, and refuses with the second."""
    for damage, text in DAMAGE.items():
        template = spread("rows")
        for tensor in template.values():
            local(tensor).zero_()
        plain = {"replicated": torch.zeros(13), "scalar": torch.zeros((), dtype=torch.int64)}
        with pytest.raises(CheckpointError, match=text):
            load_state({**template, **plain}, saved / damage.__name__)
        assert not any(local(tensor).any() for tensor in template.values()), damage.__name__
        assert not any(tensor.any() for tensor in plain.values()), damage.__name__


def test_a_damaged_checkpoint_is_refused_by_all_ranks_and_nothing_is_touched(saved: Path, tmp_path: Path) -> None:
    for damage in DAMAGE:
        shutil.copytree(saved / "3 rows", tmp_path / damage.__name__)
        damage(tmp_path / damage.__name__)
    ranks(tmp_path, 2, refuse, tmp_path)


# Many layouts, real processes

FULL = {
    "w": torch.arange(77, dtype=torch.float32).reshape(11, 7),
    "short": torch.arange(2, dtype=torch.float64),
    "half": torch.arange(30, dtype=torch.float32).reshape(10, 3).to(torch.bfloat16),
    "count": torch.arange(5, dtype=torch.int64),
    "mask": torch.arange(9) % 2 == 0,
    "wave": torch.arange(4).to(torch.complex64),
}
PLAIN = {"replicated": torch.arange(13, dtype=torch.float32), "scalar": torch.tensor(41, dtype=torch.int64)}
LAYOUTS = {1: ["alone"], 2: ["rows", "columns"], 3: ["rows", "first two"], 4: ["strided", "replicas of rows"]}


def spread(how: str) -> dict[str, torch.Tensor]:
    if how == "alone":
        return {name: tensor.clone() for name, tensor in FULL.items()}
    world = dist.get_world_size()
    found: dict[str, torch.Tensor] = {}
    for name, tensor in FULL.items():
        if how == "strided":  # tensor parallelism cut the rows before FSDP did
            mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
            outer = distribute_tensor(tensor.clone(), mesh["tp"], [Shard(0)]).to_local()
            inner = distribute_tensor(outer.clone(), mesh["dp"], [Shard(0)]).to_local()
            placements = [_StridedShard(0, split_factor=world // 2), Shard(0)]
            shape, stride = tensor.shape, tensor.stride()
            found[name] = DTensor.from_local(inner, mesh, placements, run_check=False, shape=shape, stride=stride)
        elif how == "replicas of rows":
            mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replica", "shard"))
            found[name] = distribute_tensor(tensor.clone(), mesh, [Replicate(), Shard(0)])
        elif how == "first two":  # ranks after them have no part in it
            found[name] = distribute_tensor(tensor.clone(), DeviceMesh("cpu", [0, 1]), [Shard(0)])
        else:
            mesh = init_device_mesh("cpu", (world,))
            found[name] = distribute_tensor(tensor.clone(), mesh, [Shard(0 if how == "rows" else tensor.ndim - 1)])
    return found


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def write(directory: Path, world: int) -> None:
    for how in LAYOUTS[world]:
        plain = {name: tensor.clone() for name, tensor in PLAIN.items()}
        save_state({**spread(how), **plain}, directory / f"{world} {how}")


def read(directory: Path, world: int) -> None:
    for how in LAYOUTS[world]:
        expected = {**spread(how), **PLAIN}
        for saved in sorted(path for path in directory.iterdir() if path.is_dir()):
            template = {**spread(how), **{name: tensor.clone() for name, tensor in PLAIN.items()}}
            for tensor in template.values():
                local(tensor).zero_()
            loaded = load_state(template, saved)
            for name, tensor in expected.items():
                assert torch.equal(local(loaded[name]), local(tensor)), f"{name} of {saved.name} in {how}"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    write(directory, 1)
    for world in (2, 3, 4):
        ranks(tmp_path_factory.mktemp("writers"), world, write, directory, world)
    return directory


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_from_any_layout_to_any_other(saved: Path, tmp_path: Path, world: int) -> None:
    assert len([path for path in saved.iterdir() if path.is_dir()]) == sum(map(len, LAYOUTS.values()))
    if world == 1:
        read(saved, world)
    else:
        ranks(tmp_path, world, read, saved, world)
