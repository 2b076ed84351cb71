"""What source ranks publish, and what readers make of it."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf.vps.layout import RankLayout, dense
from rlinf.vps.memory import Memory
from rlinf.vps.publication import Publication, Publisher, Share, joined, publish, space_of_tensors
from rlinf.vps.pull import Pull, whole_layout
from rlinf.vps.space import LayoutError
from tests.generation.oracle import Source
from tests.vps.reading import read


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """Odd sizes, a scalar, a bias in another dtype, a buffer of integers."""
    torch.manual_seed(seed)
    return {
        "layers.0.weight": torch.randn(7, 5),
        "layers.0.bias": torch.randn(7).to(torch.bfloat16),
        "layers.1.kernel": torch.randn(3, 4, 5),
        "scale": torch.randn(()),
        "steps": torch.arange(5) + seed,
    }


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@given(st.integers(1, 9), st.integers(0, 2), st.booleans(), st.integers(0, 99))
def test_a_reader_gets_every_element_from_sources_cut_anywhere(ranks: int, cut: int, common: bool, seed: int) -> None:
    given_ = weights(seed)
    source = Source(given_, ranks, cut, common)  # memory that nobody holds is gone
    assert same(read(source.publish(given_)), given_)


def test_a_source_publishes_new_values_in_the_same_memory() -> None:
    source = Source(first := weights(), 1)
    before = source.publish(first)
    assert same(read(before), first)
    after = source.publish(weights(1))
    assert after[0].handle == before[0].handle
    assert before[0].changed
    assert after[0].changed
    assert same(read(after), weights(1))
    assert not source.publish(weights(1))[0].changed


@pytest.mark.parametrize("name", list(weights()))
def test_one_value_that_is_another_is_a_change_and_only_its_rank_says_so(name: str) -> None:
    source = Source(given_ := weights(), 2)
    source.publish(given_)
    given_[name].view(-1)[-1] += 1
    told = [published.changed for published in source.publish(given_)]
    assert told == ([True, False] if name == "scale" else [False, True])
    assert [published.changed for published in source.publish(given_)] == [False, False]


def test_a_reader_of_another_dtype_casts_on_the_way() -> None:
    published, _publisher = publish({"w": torch.tensor([1.0, 2.5, 3.14159])})
    into = torch.empty(3, dtype=torch.bfloat16)
    source = joined([published])
    Pull(source, whole_layout(source.space, {"w": into})).run([published.buffers()], {0: into}, 0)
    assert torch.equal(into, torch.tensor([1.0, 2.5, 3.14159]).to(torch.bfloat16))


def abroad(source: Source, given_: dict[str, torch.Tensor]) -> list[Publication]:
    """As they come from another host, through pickles whose buffers are read-only."""
    found = []
    for published in source.publish(given_, inline=True):
        away = replace(published, handle=replace(published.handle, host="another"))
        buffers: list[pickle.PickleBuffer] = []
        data = pickle.dumps(away, protocol=5, buffer_callback=buffers.append)
        assert published.inline is not None
        assert sum(buffer.raw().nbytes for buffer in buffers) >= published.inline.nbytes  # out of band
        found.append(pickle.loads(data, buffers=[bytes(buffer.raw()) for buffer in buffers]))
    return found


@pytest.mark.parametrize("common", [True, False])
def test_to_another_host_the_bytes_go_along_and_can_be_laid_open_there(common: bool) -> None:
    source = Source(given_ := weights(), 2, common=common)
    away = abroad(source, given_)
    whole = sum(tensor.nbytes for tensor in given_.values())
    room = len(away) * 3 * 64  # each rank's buffers are aligned, and there is one for each dtype
    assert whole <= sum(len(each.inline) for each in away if each.inline is not None) <= whole + room
    source.spoil()
    assert same(read(away), given_)
    here, memories = zip(*(published.here() for published in away), strict=True)
    assert all(memories)
    assert all(published.inline is None for published in here)
    assert same(read(here), given_)


def test_weights_of_another_host_without_their_bytes_are_an_error() -> None:
    published, _publisher = publish(weights())
    away = replace(published, handle=replace(published.handle, host="another"))
    with pytest.raises(LayoutError, match="on host another"):
        away.buffers()
    with pytest.raises(LayoutError, match="without their bytes"):
        away.here()


def test_memory_of_a_publisher_that_is_gone_is_an_error_and_not_that_of_its_successor() -> None:
    published, publisher = publish(weights())
    handle = published.handle
    del publisher
    successor = Memory.create(handle.nbytes)
    with pytest.raises(LayoutError, match=r"is gone|cannot be opened"):
        Memory.attach(handle)
    assert successor.handle != handle


def test_a_reader_that_attached_keeps_what_it_has() -> None:
    published, publisher = publish({"w": torch.arange(4.0)})
    buffers = published.buffers()
    del publisher
    assert buffers[0].tolist() == [0, 1, 2, 3]


def test_a_share_that_no_rank_publishes_is_a_hole_that_is_named() -> None:
    source = Source(given_ := {"a.weight": torch.zeros(6, 2), "b.weight": torch.zeros(4)}, 2)
    source._publishers[1] = Publisher(source._space, [])
    first = source._publishers[0].publish(source._shares(given_)[0])
    second = source._publishers[1].publish([])
    with pytest.raises(LayoutError, match=r"a\.weight.*hole"):
        read([first, second])


def test_sources_of_different_models_are_refused_by_name() -> None:
    mine, _one = publish({"w": torch.zeros(2)})
    other, _two = publish({"w": torch.zeros(3)})
    with pytest.raises(LayoutError, match=r"w has shape \(2,\) at the source, \(3,\)"):
        joined([mine, other])


def test_a_tensor_that_lies_whole_at_its_source_is_not_copied() -> None:
    given_ = {"columns": torch.randn(4, 6), "whole": torch.randn(4, 6)}
    space = space_of_tensors(given_)
    halves = given_["columns"].tensor_split(2, 1)
    shares = [
        [Share(0, (0, 0), halves[0]), Share(1, (0, 0), given_["whole"])],
        [Share(0, (0, 3), halves[1])],
    ]
    publishers = [Publisher(space, own) for own in shares]
    published = [p.publish(own) for p, own in zip(publishers, shares, strict=True)]
    sources = [p.buffers() for p in published]
    pull = Pull(joined(published), whole_layout(space, given_))
    assert pull.whole(sources, 0, (4, 6)) is None
    found = pull.whole(sources, 1, (4, 6))
    assert found is not None
    assert torch.equal(found, given_["whole"])
    assert found.untyped_storage().data_ptr() == sources[0][0].untyped_storage().data_ptr()


def test_tensors_that_ranks_put_together_in_one_memory_are_not_copied() -> None:
    source = Source(given_ := weights(), 3, 1, common=True)
    published = source.publish(given_)
    assert len({each.handle for each in published}) == 1
    memory = Memory.attach(published[0].handle)
    sources = [each.buffers(memory) for each in published]
    layout = joined(published)
    pull = Pull(layout, whole_layout(layout.space, {t.name: given_[t.name] for t in layout.space.tensors}))
    for number, tensor in enumerate(layout.space.tensors):
        found = pull.whole(sources, number, tensor.shape)
        assert found is not None
        assert torch.equal(found, given_[tensor.name])
        assert found.untyped_storage().data_ptr() == memory.data.untyped_storage().data_ptr()


def test_ranks_of_several_hosts_have_no_memory_in_common() -> None:
    space = space_of_tensors({"w": torch.zeros(4)})
    shares = [Share(0, (0,), torch.zeros(2))]
    publisher = Publisher(space, shares, 0, lambda host: [host, "another"])
    assert publisher.publish(shares).layout.buffers[0].numel == 2


def test_a_reader_of_a_part_sees_the_whole_tensor_in_place_if_that_is_where_its_part_lies() -> None:
    given_ = {"w": torch.arange(24.0).view(6, 4)}
    published, _publisher = publish(given_)
    source = joined([published])
    full = whole_layout(source.space, given_)
    rows = replace(
        full.pieces,
        start=full.pieces.start + np.array([2, 0]),
        size=full.pieces.size * 0 + np.array([3, 4]),
        offset=full.pieces.offset + 2 * dense((6, 4))[0],
    )
    pull = Pull(source, RankLayout(rows, full.buffers))
    assert pull.nbytes == 3 * 4 * 4
    found = pull.whole([published.buffers()], 0, (6, 4))
    assert found is not None
    assert torch.equal(found, given_["w"])
