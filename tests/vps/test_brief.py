"""What readers know already is not sent again, and what they do not know is an error."""

from __future__ import annotations

import pickle

import pytest
import torch

from rlinf.vps.brief import Brief, Heard, Told
from rlinf.vps.publication import publish
from rlinf.vps.space import LayoutError
from tests.vps.reading import read


def model(layers: int, width: int = 3) -> dict[str, torch.Tensor]:
    return {f"layers.{i:03d}.weight": torch.full((width, 2), float(i)) for i in range(layers)}


def test_a_second_message_does_not_grow_with_the_model_and_says_the_same() -> None:
    sizes = []
    for layers in (10, 200):
        published, publisher = publish(model(layers))
        told, heard = Told(), Heard()
        first, second = (pickle.loads(pickle.dumps(told.brief("readers", published))) for _ in range(2))
        assert isinstance(second, Brief)
        assert heard.whole("source", first).space == published.space
        found = read([heard.whole("source", second)])
        assert all(torch.equal(found[name], values) for name, values in model(layers).items())
        sizes.append(len(pickle.dumps(second)))
        assert publisher.memory.handle == second.handle
    assert sizes[1] - sizes[0] < 10


def test_another_layout_is_told_again_and_each_reader_is_told_all() -> None:
    one, _one = publish(model(2))
    other, _other = publish(model(2, width=4))
    told, heard = Told(), Heard()
    sent = [told.brief("readers", each) for each in (one, one, other, other, one)]
    assert [isinstance(each, Brief) for each in sent] == [False, True, False, True, False]
    assert [heard.whole("source", each).layout.nbytes for each in sent] == [48, 48, 64, 64, 48]
    assert not isinstance(told.brief("others", one), Brief)


def test_a_reader_that_missed_what_was_told_once_says_so() -> None:
    one, _one = publish(model(2))
    other, _other = publish(model(2, width=4))
    told, heard = Told(), Heard()
    told.brief("readers", one)
    with pytest.raises(LayoutError, match=r"actor rank 1 published .* knows of no layout: it missed a publication"):
        heard.whole("actor rank 1", told.brief("readers", one))
    heard.whole("actor rank 1", other)
    with pytest.raises(LayoutError, match=r"this reader knows [0-9a-f]+: it missed"):
        heard.whole("actor rank 1", told.brief("readers", one))


def test_a_reader_holds_on_to_no_message() -> None:
    published, _publisher = publish(model(2))
    told, heard = Told(), Heard()
    raw: list[memoryview] = []
    data = pickle.dumps(told.brief("readers", published), protocol=5, buffer_callback=lambda b: raw.append(b.raw()))
    message = [bytearray(each) for each in raw]
    assert message
    heard.whole("source", pickle.loads(data, buffers=message))
    for each in message:
        each[:] = b"\xff" * len(each)  # its memory is used for something else
    found = read([heard.whole("source", told.brief("readers", published))])
    assert all(torch.equal(found[name], values) for name, values in model(2).items())


def test_what_is_no_publication_goes_as_it_is() -> None:
    told, heard = Told(), Heard()
    assert [heard.whole("source", told.brief("readers", (1, 2))) for _ in range(2)] == [(1, 2)] * 2
