"""State that leaves its device and comes back: the same objects, the same bits, and memory that is really free."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlinf.errors import RlinfError
from rlinf.swap import PageStore, Swap, drop, store_for

MIB = 2**20


def resident() -> int:
    """Bytes of this process that are in memory, shared ones too."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def some() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    sizes = (4 * MIB, 1 * MIB + 13, 100_003, 7, 0)
    return [torch.randn(size, generator=generator) for size in sizes]


@pytest.mark.parametrize("on_disk", [False, True])
def test_the_same_bits_come_back_to_the_same_place_and_memory_falls(tmp_path: Path, on_disk: bool) -> None:
    tensors = some()
    views = [tensor[1:] for tensor in tensors]
    expected, places = [tensor.clone() for tensor in tensors], [tensor.data_ptr() for tensor in tensors]
    swap = Swap(lambda: [*tensors, *views], store_for("cpu", tmp_path if on_disk else None))
    large = sum(tensor.nbytes for tensor in tensors)
    for round_ in range(3):
        before = resident()
        swap.off()
        swap.off()
        assert swap.away
        assert before - resident() > 0.9 * large
        swap.on()
        swap.on()
        assert [tensor.data_ptr() for tensor in tensors] == places
        for tensor, view, want in zip(tensors, views, expected, strict=True):
            assert torch.equal(tensor, want)
            assert torch.equal(view, want[1:])
            tensor += round_  # what is written between two turns stays
            want += round_
    assert list(tmp_path.iterdir()) == []  # the file has no name


def test_tensors_outlive_their_store() -> None:
    tensors = some()
    expected = [tensor.clone() for tensor in tensors]
    Swap(lambda: tensors, PageStore()).off()
    gc.collect()
    assert all(torch.equal(tensor, want) for tensor, want in zip(tensors, expected, strict=True))
    tensors.clear()  # the allocator gets memory of its own back
    again = [torch.ones(4 * MIB) for _ in range(4)]
    assert all(bool((tensor == 1).all()) for tensor in again)


def test_tensors_that_are_gone_are_forgotten_and_new_ones_taken() -> None:
    held = {"a": torch.randn(2 * MIB), "b": torch.randn(2 * MIB)}
    swap = Swap(lambda: held.values(), store := PageStore())
    for number in range(20):  # as an engine that makes its parameters anew at each sync
        swap.off()
        swap.on()
        held["b"] = torch.full((2 * MIB,), float(number))
    swap.off()
    swap.on()
    assert (held["b"] == 19).all()
    assert len(store._placed) == 2
    assert os.fstat(store._file).st_blocks * 512 <= 2 * 8 * MIB + MIB  # of the others nothing is kept


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite"])
def test_where_there_is_no_room_the_state_stays_and_the_error_says_what_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    tensors = some()
    expected = [tensor.clone() for tensor in tensors]
    swap = Swap(lambda: tensors, store_for("cpu", tmp_path))
    monkeypatch.setattr(os, call, full)
    with pytest.raises(RlinfError, match=rf"0.02 GiB of state .*{tmp_path}: No space left.*cluster.offload_dir"):
        swap.off()
    assert not swap.away
    assert all(torch.equal(tensor, want) for tensor, want in zip(tensors, expected, strict=True))
    monkeypatch.undo()
    swap.off()
    swap.on()
    assert all(torch.equal(tensor, want) for tensor, want in zip(tensors, expected, strict=True))


def test_what_is_dropped_is_free_and_reads_as_zeros() -> None:
    cache = torch.ones(16 * MIB)
    before = resident()
    drop([cache])
    assert before - resident() > 0.9 * cache.nbytes
    assert float(cache[PAGES : 2 * PAGES].sum()) == 0


PAGES = 4096


def test_a_killed_process_leaves_nothing(tmp_path: Path) -> None:
    shared = set(os.listdir("/dev/shm"))
    code = f"""
import os, signal, torch
from pathlib import Path
from rlinf.swap import Swap, store_for
swaps = [Swap(lambda: [torch.ones(1 << 20)], store_for("cpu", folder)) for folder in (None, Path({str(tmp_path)!r}))]
for swap in swaps:
    swap.off()
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert list(tmp_path.iterdir()) == []
    assert set(os.listdir("/dev/shm")) <= shared


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gets_its_memory_back_and_the_same_bits() -> None:
    tensors = [tensor.cuda() for tensor in some()]
    expected = [tensor.clone() for tensor in tensors]
    swap = Swap(lambda: tensors, store_for("cuda"))
    for _ in range(2):
        before = torch.cuda.memory_allocated()
        swap.off()
        assert before - torch.cuda.memory_allocated() > 0.9 * sum(tensor.nbytes for tensor in tensors)
        swap.on()
        assert all(torch.equal(tensor, want) for tensor, want in zip(tensors, expected, strict=True))
