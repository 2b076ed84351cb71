"""A state becomes flat tables and comes back the same."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf.checkpoint.tree import decode, encode, flatten, rebuild
from rlinf.errors import CheckpointError

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple),
    max_leaves=8,
)


def same(a, b):
    if isinstance(a, float) and isinstance(b, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and a == b


@given(plain)
def test_plain_values_survive_strict_json(value):
    text = json.dumps(encode("x", value), allow_nan=False)
    assert same(decode(json.loads(text)), value)


@given(st.dictionaries(st.text(alphabet="a~/1", min_size=1, max_size=4), st.integers(), max_size=6))
def test_keys_with_separators_do_not_collide(level):
    _, table = flatten({"a": level, "b": {"/": level}})
    assert len(table) == 2 * len(level)
    assert rebuild({"a": level, "b": {"/": level}}, lambda path, _: table[path]) == {"a": level, "b": {"/": level}}


def test_tensors_and_plain_values_are_told_apart():
    tensors, table = flatten({"model": {"w": torch.ones(2)}, "opt": {0: {"step": 3, "m": torch.zeros(1)}}})
    assert list(tensors) == ["model/w", "opt/0/m"]
    assert table == {"opt/0/step": 3}


@pytest.mark.parametrize("value", [object(), {1, 2}, [torch.ones(1)], torch.float32, b"bytes"])
def test_a_value_that_cannot_be_kept_is_named(value):
    with pytest.raises(CheckpointError, match="opt/odd"):
        flatten({"opt": {"odd": value}})


def test_int_and_text_keys_that_read_the_same_are_refused():
    with pytest.raises(CheckpointError, match="opt/1"):
        flatten({"opt": {1: 2, "1": 3}})
