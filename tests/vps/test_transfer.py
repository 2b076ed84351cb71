"""Real processes move real state; whoever dies on the way, the old state stays and the dead one is named."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlinf.vps.layout import Buffer, ExplicitLayout, Pieces, RankLayout
from rlinf.vps.mesh import Mesh, MeshLayout
from rlinf.vps.space import Kind, Space, Tensor
from rlinf.vps.transfer.choice import Place, choose, explain
from rlinf.vps.transfer.peers import TransferError
from tests.vps.test_mesh import config
from tests.vps.transfer_ranks import Job, Outcome, run_rank

WORLD = 4
STATES = {Kind.PARAMETER: "bfloat16", Kind.EXP_AVG: "float32"}
FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(["tests.vps.transfer_ranks"])


class Ranks:
    def __init__(self, work: Path) -> None:
        self.pipes, self.processes = [], []
        for rank in range(WORLD):
            mine, theirs = FORK.Pipe()
            process = FORK.Process(target=run_rank, args=(rank, WORLD, work, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def run(self, job: Job) -> list[Outcome | None]:
        """By rank; None of one that died."""
        for pipe in self.pipes:
            pipe.send(job)
        found: list[Outcome | None] = []
        for pipe in self.pipes:
            try:
                assert pipe.poll(60), "a rank hangs"
                found.append(pipe.recv())
            except EOFError:
                found.append(None)
        return found

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            if process.is_alive():
                pipe.send(None)
            process.join(20)
            assert process.exitcode is not None


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    made = Ranks(tmp_path_factory.mktemp("ranks"))
    yield made
    made.close()


def layouts(dtypes: Any = None) -> list[MeshLayout]:
    meshes = (
        Mesh(dp=4, fsdp=True),
        Mesh(tp=2, pp=2, fused=True),
        Mesh(tp=2, dp=2, ep=2, zero1=True),
        Mesh(tp=4, vocab_multiple=4),
        Mesh(),
        Mesh(tp=3, fused=True),
    )
    return [MeshLayout(config(), mesh, dtypes or STATES, WORLD) for mesh in meshes]


@pytest.mark.parametrize("way", ["shared", "gloo"])
@pytest.mark.parametrize("pair", [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 0)])
def test_state_arrives_by_every_way(ranks: Ranks, way: str, pair: tuple[int, int]) -> None:
    every = layouts()
    src, dst = (every[i] for i in pair)
    found = ranks.run(Job(src, dst, way))
    assert all(outcome is not None and outcome.right for outcome in found), found
    came = {name for outcome in found if outcome and outcome.ways for name in outcome.ways}
    assert way in came
    assert came <= {way, "local"}


def test_without_a_wish_ranks_of_one_host_share_memory_that_they_have_already(ranks: Ranks) -> None:
    src, dst = layouts()[:2]
    for _ in range(2):
        found = ranks.run(Job(src, dst, in_arena=True))
        assert all(outcome and outcome.right and set(outcome.ways or {}) <= {"shared", "local"} for outcome in found)


@pytest.mark.parametrize("way", ["shared", "gloo"])
@pytest.mark.parametrize(("before", "after"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_values_are_cast_on_the_way(ranks: Ranks, way: str, before: str, after: str) -> None:
    src = layouts({Kind.PARAMETER: before})[0]
    dst = layouts({Kind.PARAMETER: after})[1]
    assert all(outcome and outcome.right for outcome in ranks.run(Job(src, dst, way)))


@pytest.mark.parametrize("in_arena", [True, False])
@pytest.mark.parametrize("way", ["shared", "gloo"])
def test_low_memory_frees_the_old_state(ranks: Ranks, way: str, in_arena: bool) -> None:
    src, dst = layouts()[:2]
    found = ranks.run(Job(src, dst, way, low_memory=True, in_arena=in_arena))
    assert all(outcome and outcome.right and outcome.old_bytes == 0 for outcome in found), found


def test_a_value_that_changes_on_the_way_is_seen_and_nobody_goes_over(ranks: Ranks) -> None:
    src, dst = layouts()[:2]
    for outcome in ranks.run(Job(src, dst, spoil=2)):
        assert outcome is not None
        assert "is not the old: their digests differ (the old state is as it was)" in outcome.error
        assert outcome.old_intact


def tied(places: dict[int, int]) -> ExplicitLayout:
    """An embedding that is a head too: whole, by rank so many times, in transposed storage where it is repeated."""
    space = Space((Tensor("embed.weight", (6, 4)),), aliases={"head.weight": "embed.weight"})
    held = []
    for rank in range(WORLD):
        rows = [(0, 0, (0, 0), (6, 4), i, 0, (4, 1) if i == 0 else (1, 6)) for i in range(places.get(rank, 0))]
        held.append(RankLayout(Pieces.of(rows, 2), tuple(Buffer(f"b{i}", 24, "float32") for i in range(len(rows)))))
    return ExplicitLayout(space, tuple(held), (0,) * WORLD)


@pytest.mark.parametrize("there", [{0: 1, 2: 1}, {1: 2}, {2: 2, 3: 1}])
def test_ranks_that_hold_nothing_take_part_and_all_places_of_a_tied_tensor_are_right(
    ranks: Ranks, there: dict[int, int]
) -> None:
    for src, dst in ((tied({0: 1}), tied(there)), (tied(there), tied({3: 1}))):
        assert all(outcome and outcome.right for outcome in ranks.run(Job(src, dst)))


@pytest.mark.parametrize(("there", "spoil", "other"), [({0: 1, 2: 1}, 2, 0), ({1: 1, 2: 1, 3: 1}, 3, 1)])
def test_a_place_of_a_tied_tensor_that_differs_is_named_though_the_digest_counts_another(
    ranks: Ranks, there: dict[int, int], spoil: int, other: int
) -> None:
    for outcome in ranks.run(Job(tied({0: 1}), tied(there), spoil=spoil)):
        assert outcome is not None
        assert f"embed.weight (parameter) is tied, and its place on rank {spoil} is not that on rank {other}" in (
            outcome.error
        )
        assert outcome.old_intact


def test_ranks_with_another_plan_are_named_before_anything_moves(ranks: Ranks) -> None:
    src, dst = layouts()[:2]
    for outcome in ranks.run(Job(src, dst, other_plan=3)):
        assert outcome is not None
        assert "rank 3 has another plan (its two layouts) than rank 0; nothing was moved" in outcome.error


@pytest.mark.parametrize(  # votes are the same whatever the way
    ("phase", "way"),
    [("publish", "shared"), ("pull", "shared"), ("pull", "gloo"), ("digest", "shared"), ("verify", "shared")],
)
def test_a_rank_that_is_killed_is_named_within_the_deadline_and_the_old_state_stays(
    tmp_path: Path, phase: str, way: str
) -> None:
    ranks = Ranks(tmp_path)
    src, dst = layouts()[:2]
    found = ranks.run(Job(src, dst, way, die_in=phase, victim=1, deadline_s=3.0))
    ranks.close()
    assert found[1] is None
    for rank in (0, 2, 3):
        outcome = found[rank]
        assert outcome is not None
        assert outcome.error.startswith("TransferError")
        assert "1" in outcome.error.split("rank(s)")[-1] or "rank 1" in outcome.error, outcome.error
        assert outcome.old_intact


def test_no_memory_is_left_behind(tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    ranks = Ranks(tmp_path)
    src, dst = layouts()[:2]
    ranks.run(Job(src, dst, in_arena=True, die_in="verify", victim=0, deadline_s=3.0))
    ranks.close()
    assert {name for name in set(os.listdir("/dev/shm")) - before if "rlinf" in name or "vps" in name} == set()


CPU, GPU = Place("a", "cpu"), Place("a", "cuda")


def test_the_way_follows_from_where_ranks_and_tensors_are() -> None:
    assert choose(CPU, CPU, True) == "local"
    assert choose(CPU, CPU, False) == "shared"
    assert choose(GPU, GPU, False) == "cuda_ipc"
    assert choose(GPU, Place("b", "cuda"), False) == "nccl"
    assert choose(CPU, Place("b", "cpu"), False) == "gloo"
    assert choose(CPU, GPU, False) == "gloo"
    assert choose(CPU, CPU, False, "gloo") == "gloo"
    with pytest.raises(TransferError, match="'nccl' cannot serve cpu on a to cpu on a; possible are shared, gloo"):
        choose(CPU, CPU, False, "nccl")
    assert explain([CPU, CPU, Place("b", "cpu")]) == "4 pairs by gloo, 2 pairs by shared"
