"""The ways between GPUs. They skip without one; two are needed for those that cross."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rlinf.vps.layout import Buffer, ExplicitLayout, Pieces, RankLayout, dense
from rlinf.vps.plan import plan
from rlinf.vps.schedule import schedule
from rlinf.vps.space import Kind, Space, Tensor
from rlinf.vps.transfer.peers import Peers
from rlinf.vps.transfer.reshard import Reshard

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
SHAPE = (512, 768)


def sharded(dim: int) -> ExplicitLayout:
    """A matrix over two ranks, by rows or by columns."""
    space, ranks = Space((Tensor("w", SHAPE),)), []
    for rank in range(2):
        start, size = [0, 0], list(SHAPE)
        size[dim] //= 2
        start[dim] = rank * size[dim]
        pieces = Pieces.of([(0, int(Kind.PARAMETER), start, size, 0, 0, dense(size))], 2)
        ranks.append(RankLayout(pieces, (Buffer("w", size[0] * size[1], "float32", "cuda"),)))
    return ExplicitLayout(space, tuple(ranks), (0, 0))


def relayout(rank: int, work: Path, way: str) -> None:
    device = f"cuda:{rank % torch.cuda.device_count()}"
    torch.cuda.set_device(device)
    store = dist.FileStore(f"{work}/store", 2)
    backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{work}/group", rank=rank, world_size=2)
    try:
        whole = torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32).view(SHAPE)
        old = whole.chunk(2, 0)[rank].contiguous().view(-1).to(device)
        made = schedule(plan(sharded(0), sharded(1)))
        new, report = Reshard(made, rank, Peers(store, rank, 2), verify=True, way=way, device=device).run([old])
        assert torch.equal(new[0].cpu(), whole.chunk(2, 1)[rank].reshape(-1))
        assert set(report.nbytes) == {way, "local"}
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("way", ["cuda_ipc", "nccl", "gloo"])
def test_a_matrix_goes_from_rows_to_columns(tmp_path: Path, way: str) -> None:
    if way == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs a GPU for each rank")
    mp.spawn(relayout, (tmp_path, way), nprocs=2)
