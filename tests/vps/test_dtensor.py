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
    check_cover(ranks[0][name][1])


def test_a_decoder_under_fsdp_and_tensor_parallelism_is_covered_with_its_moments(ranks: list[dict]) -> None:
    assert len({rank["llama"][0] for rank in ranks}) == 1
    layout = ranks[0]["llama"][1]
    check_cover(layout)
    assert set(layout.spread) == {Kind.PARAMETER, Kind.EXP_AVG, Kind.EXP_AVG_SQ}
    assert layout.space.find("lm_head.weight") == layout.space.find("model.embed_tokens.weight")
    at = layout.space.find("model.layers.0.mlp.up_proj.weight")  # 50 rows: 25 of each part, and of those 13 and 12
    pieces = [layout.of(rank).pieces for rank in range(4)]
    mine = [p.take((p.tensor == at) & (p.kind == Kind.PARAMETER)) for p in pieces]
    assert [(int(p.start[0, 0]), int(p.size[0, 0])) for p in mine] == [(0, 13), (25, 13), (13, 12), (38, 12)]


def test_a_mesh_of_some_ranks_needs_the_mesh_of_all(ranks: list[dict]) -> None:
    assert "of 2 of 4 ranks, which is no part of the mesh that was given (none)" in ranks[0]["part"]


def test_fsdp_within_tensor_parallel_parts_is_strided(ranks: list[dict]) -> None:
    assert any("_StridedShard" in text or "_S(" in text for text in ranks[0]["both"][4])


@pytest.mark.parametrize("name", ["fsdp", "tp", "both", "llama"])
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


def test_a_moment_of_one_element_is_no_scalar() -> None:
    net = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    with pytest.raises(LayoutError, match="nobody classified: momentum_buffer of weight"):
        live_state(net, optimizer)


def test_moments_may_have_a_dtype_of_their_own() -> None:
    weights = {name: torch.ones(2, dtype=torch.bfloat16) for name in "ab"}
    moments = {name: torch.ones(2) for name in "ab"}
    layout = layout_of(LiveState({Kind.EXP_AVG: moments, Kind.PARAMETER: weights}))
    assert layout.space.kinds == {Kind.PARAMETER: "", Kind.EXP_AVG: "float32"}
    assert layout.space.dtype(0, Kind.PARAMETER) == "bfloat16"
    mixed = {"a": torch.ones(2), "b": torch.ones(2, dtype=torch.float16)}
    with pytest.raises(LayoutError, match=r"exp_avg is held in several dtypes.*float16 \(b\), float32 \(a\)"):
        layout_of(LiveState({Kind.PARAMETER: weights, Kind.EXP_AVG: mixed}))


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"ranks": [4, 5], "world": 5}, r"ranks \[4, 5\] are not so many different processes of a world of 5"),
        ({"ranks": [1, 1]}, r"ranks \[1, 1\] are not"),
        ({"ranks": [0, 1], "hosts": [0]}, "hosts are given for 1 processes of 2"),
    ],
)
def test_processes_that_cannot_be_are_refused(more: dict, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        layout_of(LiveState({Kind.PARAMETER: {"w": torch.ones(2)}}), **more)


def test_a_moment_of_another_shape_is_named() -> None:
    state = LiveState({Kind.PARAMETER: {"w": torch.ones(2, 3)}, Kind.EXP_AVG: {"w": torch.ones(2)}})
    with pytest.raises(LayoutError, match=r"w \(exp_avg\) has shape \(2,\), its tensor \(2, 3\)"):
        layout_of(state)


def test_processes_are_numbered_over_both_sides() -> None:
    state = LiveState({Kind.PARAMETER: {"w": torch.arange(4.0)}})
    layout = layout_of(state, ranks=[2, 3], world=5)
    assert [len(layout.of(rank).pieces) for rank in range(5)] == [0, 0, 1, 1, 0]


def test_a_tensor_that_does_not_lie_in_rows_is_named() -> None:
    state = LiveState({Kind.PARAMETER: {"w": torch.ones(3, 4).T}})
    with pytest.raises(LayoutError, match=r"w \(parameter\) has strides"):
        buffers_of(state)
