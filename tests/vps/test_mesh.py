"""Described meshes hold the model exactly, and any two of them can be turned into one another."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.vps.cover import check_cover
from rlinf.vps.mesh import Mesh, MeshLayout, flat_range
from rlinf.vps.plan import plan
from rlinf.vps.space import Kind, LayoutError
from tests.vps.labelled import buffers, carry, same

STATES = {Kind.PARAMETER: "bfloat16", Kind.MASTER: "float32", Kind.EXP_AVG: "float32"}


def config(kind: str = "qwen3_moe", **more) -> dict:
    """Odd sizes: 3 layers, 6 heads over 2 key-value heads, 5 experts, 11 tokens; a head has one row."""
    return {
        "model_type": kind,
        "num_hidden_layers": 3,
        "hidden_size": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 1,
        "intermediate_size": 5,
        "vocab_size": 11,
        "num_experts": 5,
        "moe_intermediate_size": 3,
        "mlp_only_layers": [1],
        "tie_word_embeddings": True,
        **more,
    }


@st.composite
def meshes(draw: st.DrawFn, most: int = 12) -> Mesh:
    tp, pp = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    dp = draw(st.integers(1, max(1, most // (tp * pp))))
    cp = draw(st.sampled_from([1, 1, 2])) if tp * pp * dp * 2 <= most else 1
    stage = tp * dp * cp
    ep, etp = draw(st.sampled_from([(e, t) for e in range(1, 6) for t in range(1, 4) if stage % (e * t) == 0]))
    interleave = draw(st.sampled_from([1, 1, 2]))
    pieces = pp * interleave
    cuts = sorted(draw(st.lists(st.integers(0, 3), min_size=pieces - 1, max_size=pieces - 1)))
    uneven = tuple(int(n) for n in np.diff([0, *cuts, 3])) if draw(st.booleans()) else ()
    return Mesh(
        tp,
        pp,
        dp,
        cp,
        ep,
        etp,
        layers=uneven,
        interleave=interleave,
        fsdp=draw(st.booleans()),
        zero1=draw(st.booleans()),
        vocab_multiple=draw(st.sampled_from([1, 4])),
        fused=draw(st.booleans()),
        ranks_per_host=draw(st.sampled_from([2, 8])),
    )


def declared(mesh: Mesh, name: str, kind: Kind, tied: bool) -> np.ndarray | int:
    """How many ranks are to hold each row of a tensor: by overlap of fractions, not by the layout's intervals."""
    expert = ".experts." in name
    shared = mesh.fsdp or (mesh.zero1 and kind is not Kind.PARAMETER)
    copies = 1 if shared else mesh.stage // (mesh.ep * mesh.etp if expert else mesh.tp)
    if name == "model.embed_tokens.weight" and tied and mesh.pp > 1:
        copies *= 2
    if name.split(".")[-2] in ("k_proj", "v_proj"):  # of 2 heads of one row
        return copies * np.array(
            [sum(h * mesh.tp < (i + 1) * 2 and i * 2 < (h + 1) * mesh.tp for i in range(mesh.tp)) for h in range(2)]
        )
    if "norm" in name or name.endswith("mlp.gate.weight"):
        return copies * mesh.tp
    return copies


@given(meshes(), st.booleans())
@settings(max_examples=40, deadline=None)
def test_every_coordinate_is_held_by_as_many_ranks_as_is_declared(mesh: Mesh, tied: bool) -> None:
    layout = MeshLayout(config(tie_word_embeddings=tied), mesh, STATES)
    held = {(t, int(k)): np.zeros(layout.space.shape(t), int) for t in range(len(layout.space.tensors)) for k in STATES}
    for rank in range(mesh.world):
        pieces = layout.of(rank).pieces
        for row in range(len(pieces)):
            box = tuple(slice(a, b) for a, b in zip(pieces.start[row], pieces.end[row], strict=True))
            held[int(pieces.tensor[row]), int(pieces.kind[row])][box] += 1
    for (tensor, kind), counts in held.items():
        name = layout.space.tensors[tensor].name
        expected = np.reshape(declared(mesh, name, Kind(kind), tied), (-1, 1))
        assert (counts == expected).all(), (name, Kind(kind), counts.tolist())
    check_cover(layout)


@given(meshes())
@settings(max_examples=20, deadline=None)
def test_patterns_say_the_same_as_the_ranks_pieces(mesh: Mesh) -> None:
    layout = MeshLayout(config(), mesh, STATES)
    told, found = set(), set()
    for kind, spread in layout.spread.items():
        for tensor, at in enumerate(spread.tolist()):
            pattern = layout.patterns[at]
            for row in range(len(pattern)):
                told.add((tensor, int(kind), int(pattern.rank[row]), *pattern.start[row], *pattern.size[row]))
    for rank in range(layout.world):
        held = layout.of(rank)
        for row in range(len(held.pieces)):
            p = held.pieces
            found.add((int(p.tensor[row]), int(p.kind[row]), rank, *p.start[row], *p.size[row]))
            last = p.offset[row] + ((p.size[row] - 1) * p.stride[row]).sum()
            assert last < held.buffers[p.buffer[row]].numel
    assert told == found


@given(meshes(8), meshes(8))
@settings(max_examples=15, deadline=None)
def test_from_any_mesh_to_any_other_and_back_is_the_identity(one: Mesh, other: Mesh) -> None:
    world = max(one.world, other.world)
    a, b = (
        MeshLayout(config(), mesh, {Kind.PARAMETER: "bfloat16", Kind.EXP_AVG: "float32"}, world)
        for mesh in (one, other)
    )
    assert same(carry(plan(a, b)), buffers(b, True))
    assert same(carry(plan(b, a)), buffers(a, True))


@given(meshes())
@settings(max_examples=20, deadline=None)
def test_bytes_of_each_rank_are_those_of_its_buffers(mesh: Mesh) -> None:
    layout = MeshLayout(config(), mesh, STATES, mesh.world + 1)
    assert layout.nbytes.tolist() == [layout.of(rank).nbytes for rank in range(layout.world)]


def test_one_to_many_to_one() -> None:
    single = MeshLayout(config(), Mesh(), STATES, 12)
    many = MeshLayout(config(), Mesh(tp=2, pp=2, dp=3, ep=3, etp=2, zero1=True), STATES)
    assert same(carry(plan(single, many)), buffers(many, True))
    assert same(carry(plan(many, single)), buffers(single, True))


def rows_of(layout: MeshLayout, name: str, rank: int) -> tuple[int, int] | None:
    pieces = layout.of(rank).pieces
    mine = np.flatnonzero(pieces.tensor == layout.space.find(name))
    return (int(pieces.start[mine[0], 0]), int(pieces.end[mine[0], 0])) if len(mine) else None


def test_key_value_heads_are_repeated_where_there_are_more_ranks() -> None:
    layout = MeshLayout(config("llama", head_dim=2), Mesh(tp=6))
    name = "model.layers.0.self_attn.k_proj.weight"
    assert [rows_of(layout, name, rank) for rank in range(6)] == [(0, 2)] * 3 + [(2, 4)] * 3


def test_padding_of_the_vocabulary_is_physical_only() -> None:
    layout = MeshLayout(config("llama"), Mesh(tp=4, vocab_multiple=4))
    name = "model.embed_tokens.weight"
    assert layout.padded_vocab == 16
    assert [rows_of(layout, name, rank) for rank in range(4)] == [(0, 4), (4, 8), (8, 11), None]
    for state in ({}, {"zero1": True}):  # a rank of padding alone has a buffer too
        stored = MeshLayout(config("llama"), Mesh(tp=4, vocab_multiple=4, **state))
        sizes = [[b.numel for b in stored.of(rank).buffers if b.name.startswith(name)] for rank in range(4)]
        assert sizes == [[4 * 3]] * 4


def test_a_tied_embedding_is_on_the_first_and_the_last_stage() -> None:
    layout = MeshLayout(config("llama"), Mesh(pp=3))
    assert [rows_of(layout, "lm_head.weight", rank) is not None for rank in range(3)] == [True, False, True]
    untied = MeshLayout(config("llama", tie_word_embeddings=False), Mesh(pp=3))
    assert [rows_of(untied, "lm_head.weight", rank) is not None for rank in range(3)] == [False, False, True]


def test_interleaved_stages_take_layers_in_turns() -> None:
    layout = MeshLayout(config("llama", num_hidden_layers=8), Mesh(pp=2, interleave=2))
    mine = [[i for i in range(8) if rows_of(layout, f"model.layers.{i}.mlp.down_proj.weight", r)] for r in range(2)]
    assert mine == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_fsdp_cuts_as_torch_chunk_does_and_leaves_the_last_ranks_empty() -> None:
    import torch

    layout = MeshLayout(config("llama"), Mesh(dp=7, fsdp=True))
    chunks = [len(chunk) for chunk in torch.arange(11).chunk(7)]
    found = [rows_of(layout, "model.embed_tokens.weight", rank) for rank in range(7)]
    assert [high - low for low, high in filter(None, found)] == chunks
    assert found[len(chunks) :] == [None] * (7 - len(chunks))


@given(st.lists(st.integers(1, 4), max_size=3), st.data())
def test_a_flat_range_is_its_boxes_in_order(shape: list[int], data: st.DataObject) -> None:
    numel = int(np.prod(shape, dtype=np.int64))
    low = data.draw(st.integers(0, numel))
    high = data.draw(st.integers(low, numel))
    labels = np.arange(numel).reshape(shape)
    boxes = flat_range(((0,) * len(shape), tuple(shape)), low, high)
    parts = [labels[tuple(slice(s, s + n) for s, n in zip(*box, strict=True))].ravel() for box in boxes]
    assert np.concatenate([np.empty(0, int), *parts]).tolist() == list(range(low, high))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize(
    ("mesh", "text"),
    [
        (Mesh(tp=2, ep=3), r"ep=3 x etp=1 does not divide the 2 ranks of a stage"),
        (Mesh(pp=2, layers=(1, 1)), r"2 numbers, none below 0, that add up to 3 are needed"),
        (Mesh(pp=2, layers=(4, -1)), r"layers=\(4, -1\): 2 numbers, none below 0"),
        (Mesh(tp=0), "tp=0: a mesh needs 1 or more"),
        (Mesh(dp=-1), "dp=-1: a mesh needs 1 or more"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(mesh: Mesh, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        MeshLayout(config(), mesh)


def test_too_few_processes_are_refused() -> None:
    with pytest.raises(LayoutError, match="3 processes are too few for a mesh of 4 ranks"):
        MeshLayout(config(), Mesh(tp=4), processes=3)


def test_a_layout_with_other_degrees_has_another_hash() -> None:
    layout = MeshLayout(config(), Mesh(tp=2))
    assert layout.hash == MeshLayout(config(), Mesh(tp=2)).hash
    assert layout.hash != replace(layout, mesh=Mesh(dp=2)).hash


def test_models_of_the_same_shapes_whose_heads_differ_have_other_hashes() -> None:
    """They are cut in other places: ranks that agreed on a hash would send what nobody waits for."""
    name = "model.layers.0.self_attn.q_proj.weight"
    one, other = (
        MeshLayout(config("llama", num_attention_heads=h, num_key_value_heads=h // 2, head_dim=d), Mesh(tp=3))
        for h, d in ((8, 4), (4, 8))
    )
    assert one.space.hash == other.space.hash
    assert [rows_of(one, name, rank) for rank in range(3)] != [rows_of(other, name, rank) for rank in range(3)]
    assert one.hash != other.hash


def test_projections_that_are_fused_lie_one_after_the_other_in_one_buffer() -> None:
    layout = MeshLayout(config("llama"), Mesh(tp=2, fused=True))
    held = layout.of(1)
    names = ["model.layers.0.self_attn." + part + "_proj.weight" for part in "kqv"]
    rows = [int(np.flatnonzero(held.pieces.tensor == layout.space.find(name))[0]) for name in names]
    assert len(set(held.pieces.buffer[rows].tolist())) == 1
    assert held.pieces.offset[rows].tolist() == [0, 1 * 3, (1 + 3) * 3]
    assert held.buffers[held.pieces.buffer[rows[0]]].numel == (1 + 3 + 1) * 3


def test_a_layout_of_no_state_is_refused() -> None:
    with pytest.raises(LayoutError, match="dtypes_of is empty"):
        MeshLayout(config(), Mesh(), {})
