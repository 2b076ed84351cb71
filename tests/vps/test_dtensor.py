"""What the layout says of live tensors is what ranks really hold."""

from __future__ import annotations

import pytest
import torch
import torch.multiprocessing as mp

from rlinf.vps.cover import check_cover
from rlinf.vps.dtensor import LiveState, buffers_of, layout_of, live_state
from rlinf.vps.plan import locate, plan
from rlinf.vps.space import Kind, LayoutError
from tests.vps.dtensor_ranks import Net, run_rank, trained


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    work = tmp_path_factory.mktemp("dtensor")
    try:
        mp.spawn(run_rank, (work,), nprocs=4)
    except Exception:
        pytest.fail("\n".join(file.read_text() for file in work.glob("error-*")) or "ranks died without a word")
    return torch.load(work / "results.pt", weights_only=False)


def test_shards_and_replicas_over_one_and_two_dimensions_uneven_and_empty(ranks: list[dict]) -> None:
    wrong = [what for rank in ranks for same, what in rank["boxes"] if not same]
    assert not wrong
    assert len(ranks[0]["boxes"]) > 50


@pytest.mark.parametrize("name", ["fsdp", "tp", "both"])
def test_every_rank_says_the_same_of_all(ranks: list[dict], name: str) -> None:
    assert len({rank[name][0] for rank in ranks}) == 1
    check_cover_of_kinds(ranks[0][name][1])


def check_cover_of_kinds(layout) -> None:
    """A buffer is no parameter and has no moments: such states are not there, and all others are."""
    for kind, spread in layout.spread.items():
        assert (spread >= 0).any(), kind
    with pytest.raises(LayoutError, match="no rank holds the parameter of kept"):
        check_cover(layout)


def test_a_mesh_of_some_ranks_needs_the_mesh_of_all(ranks: list[dict]) -> None:
    assert "of 2 of 4 ranks, which is no part of the mesh that was given (none)" in ranks[0]["part"]


def test_fsdp_within_tensor_parallel_parts_is_strided(ranks: list[dict]) -> None:
    assert any("_StridedShard" in text or "_S(" in text for text in ranks[0]["both"][4])


@pytest.mark.parametrize("name", ["fsdp", "tp", "both"])
def test_pieces_of_all_ranks_put_together_are_the_full_tensors(ranks: list[dict], name: str) -> None:
    _, layout, _, full, _ = ranks[0][name]
    found = {kind: {n: torch.full_like(t, torch.nan) for n, t in tensors.items()} for kind, tensors in full.items()}
    for rank, told in enumerate(ranks):
        pieces = layout.of(rank).pieces
        for row in range(len(pieces)):
            tensor = layout.space.tensors[pieces.tensor[row]]
            into = found[Kind(int(pieces.kind[row]))][tensor.name]
            ndim = len(tensor.shape)
            box = tuple(slice(a, b) for a, b in zip(pieces.start[row][:ndim], pieces.end[row][:ndim], strict=True))
            size, stride = pieces.size[row][:ndim].tolist(), pieces.stride[row][:ndim].tolist()
            into[box] = told[name][2][pieces.buffer[row]].as_strided(size, stride, int(pieces.offset[row]))
    for kind, tensors in full.items():
        for tensor_name, expected in tensors.items():
            assert torch.equal(found[kind][tensor_name], expected), (kind, tensor_name)


@pytest.mark.parametrize(("before", "after"), [("fsdp", "tp"), ("tp", "both"), ("both", "fsdp")])
def test_moves_between_them_carry_weights_and_moments(ranks: list[dict], before: str, after: str) -> None:
    src, dst = ranks[0][before][1], ranks[0][after][1]
    made = plan(src, dst)
    for rank in range(4):
        expected = ranks[rank][after][2]
        into = [torch.full_like(buffer, torch.nan) for buffer in expected]
        part = made.part(rank)
        for moves in (part.receives, part.local):
            here = locate(dst.of(rank).pieces, moves)
            for row, move in enumerate(here.move.tolist()):
                source = int(moves.src[move])
                there = locate(src.of(source).pieces, moves.take(slice(move, move + 1)))
                size = moves.size[move].tolist()
                have = ranks[source][before][2][there.buffer[0]]
                have = have.as_strided(size, there.stride[0].tolist(), int(there.offset[0]))
                into[here.buffer[row]].as_strided(size, here.stride[row].tolist(), int(here.offset[row])).copy_(have)
        for found, wanted in zip(into, expected, strict=True):
            assert torch.allclose(found, wanted, atol=1e-6)  # the two worlds trained on their own


def test_state_is_sorted_into_kinds_aliases_scalars_and_derived() -> None:
    state = live_state(*trained(None))
    assert set(state.tensors) == {Kind.PARAMETER, Kind.EXP_AVG, Kind.EXP_AVG_SQ, Kind.BUFFER}
    assert state.aliases == {"head.weight": "embed.weight"}
    assert state.derived == {"made"}
    assert set(state.tensors[Kind.BUFFER]) == {"kept"}
    assert set(state.scalars) == {f"{name}.step" for name in state.tensors[Kind.PARAMETER]}
    assert [b.numel() for b in buffers_of(state)] == [b.numel for b in layout_of(state).of(0).buffers]


def test_state_that_nobody_classified_is_an_error() -> None:
    net, optimizer = trained(None)
    optimizer.state[net.up.weight]["momentum"] = torch.zeros(12, 6)
    with pytest.raises(LayoutError, match=r"nobody classified: momentum of up\.weight"):
        live_state(net, optimizer)
    other = torch.optim.AdamW(Net().parameters())
    other.state[next(iter(other.param_groups[0]["params"]))]["exp_avg"] = torch.zeros(7, 6)
    with pytest.raises(LayoutError, match="that is no parameter"):
        live_state(net, other)


def test_processes_are_numbered_over_both_sides() -> None:
    state = LiveState({Kind.PARAMETER: {"w": torch.arange(4.0)}})
    layout = layout_of(state, ranks=[2, 3], world=5)
    assert [len(layout.of(rank).pieces) for rank in range(5)] == [0, 0, 1, 1, 0]


def test_a_tensor_that_does_not_lie_in_rows_is_named() -> None:
    state = LiveState({Kind.PARAMETER: {"w": torch.ones(3, 4).T}})
    with pytest.raises(LayoutError, match=r"w \(parameter\) has strides"):
        buffers_of(state)
