"""A reader's check finds what is not as it was published, whichever plan brought it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.vps.layout import Buffer, ExplicitLayout, Pieces, RankLayout, dense
from rlinf.vps.space import Kind, LayoutError, Space, Tensor
from rlinf.vps.verify import Check, Published
from tests.generation.oracle import Source
from tests.vps.labelled import buffers, layouts, spaces
from tests.vps.test_publication import weights


def tensors(layout: ExplicitLayout) -> list[list[torch.Tensor]]:
    return [[torch.from_numpy(buffer).float() for buffer in mine] for mine in buffers(layout, True)]


@given(spaces().flatmap(lambda s: st.tuples(layouts(s, 3), layouts(s, 2))), st.data())
@settings(max_examples=60, deadline=None)
def test_any_reader_of_any_source_is_right_until_one_element_is_not(sides, data: st.DataObject) -> None:
    source, readers = sides
    sources, published = tensors(source), Published(source)
    for rank, held in enumerate(tensors(readers)):
        check, mine = Check(published, readers.of(rank)), readers.of(rank).pieces
        parameters = mine.take(mine.kind == int(Kind.PARAMETER))
        if set(readers.space.kinds) != {Kind.PARAMETER}:
            continue  # a sync is of parameters
        assert check.wrong(sources, dict(enumerate(held))) == []
        if not len(parameters):
            continue
        row = data.draw(st.integers(0, len(parameters) - 1))
        held[int(parameters.buffer[row])][int(parameters.offset[row])] += 0.5
        (found,) = check.wrong(sources, dict(enumerate(held)))
        assert found.startswith(f"{readers.space.tensors[int(parameters.tensor[row])].name} (in b")


def test_of_a_tied_tensor_every_place_is_checked() -> None:
    space = Space((Tensor("embed", (4, 2)),), aliases={"head": "embed"})
    row = (0, int(Kind.PARAMETER), (0, 0), (4, 2))
    source = ExplicitLayout(
        space, (RankLayout(Pieces.of([(*row, 0, 0, dense((4, 2)))], 2), (Buffer("m", 8, "float32"),)),), (0,)
    )
    twice = RankLayout(
        Pieces.of([(*row, 0, 0, (2, 1)), (*row, 1, 0, (2, 1))], 2),
        (Buffer("embed.weight", 8, "float32"), Buffer("head.weight", 8, "float32")),
    )
    values = torch.randn(8)
    held = {0: values.clone(), 1: values.clone()}
    check = Check(Published(source), twice)
    assert check.wrong([[values]], held) == []
    held[1][3] += 1
    assert check.wrong([[values]], held) == [
        "embed (in head.weight): box from [0, 0] of [4, 2] is not what source ranks [0] published (its digest differs)"
    ]


def test_a_reader_of_another_dtype_is_held_against_what_was_published_in_that_dtype() -> None:
    space = Space((Tensor("w", (5,)),))
    piece = Pieces.of([(0, int(Kind.PARAMETER), (0,), (5,), 0, 0, (1,))], 1)
    source = ExplicitLayout(space, (RankLayout(piece, (Buffer("m", 5, "float32"),)),), (0,))
    check = Check(Published(source), RankLayout(piece, (Buffer("w", 5, "bfloat16"),)))
    values = torch.randn(5)
    assert check.wrong([[values]], {0: values.to(torch.bfloat16)}) == []
    assert len(check.wrong([[values]], {0: values.roll(1).to(torch.bfloat16)})) == 1


@pytest.mark.parametrize("common", [True, False])
@pytest.mark.parametrize("name", list(weights()))
def test_a_byte_that_changes_in_the_published_memory_is_found_in_its_tensor_and_rank(name: str, common: bool) -> None:
    source = Source(given_ := weights(), 2, common=common)
    published = source.publish(given_, verify=True)
    rank = 0 if name == "scale" else 1
    (row,) = [i for i, t in enumerate(published[rank].layout.pieces.tensor) if t == source._space.index[name]]
    pieces = published[rank].layout.pieces
    flat = published[rank].buffers()[int(pieces.buffer[row])]
    for each, publication in enumerate(published):
        publication.verify(each, publication.buffers())
    flat[int(pieces.offset[row])] += 1
    with pytest.raises(LayoutError, match=rf"{name}: box from .* is not what source rank {rank} holds"):
        published[rank].verify(rank, published[rank].buffers())
    published[1 - rank].verify(1 - rank, published[1 - rank].buffers())
