from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlinf.config import ModelConfig
from rlinf.errors import ModelError
from rlinf.generation.manifest import Manifest, checkpoint_shapes
from rlinf.generation.weight_transfer import shared_file
from rlinf.models import resolve
from tests.generation import oracle

SHAPES = {"a.weight": (2, 3), "b.weight": (4,)}


def deliver(*tensors: tuple[str, torch.Tensor], optional: tuple[str, ...] = ()) -> list[str]:
    chunks = ([pair] for pair in tensors)
    return [name for chunk in Manifest(SHAPES, optional).check(chunks) for name, _ in chunk]


def test_a_full_delivery_passes_through_in_its_order() -> None:
    assert deliver(("b.weight", torch.zeros(4)), ("a.weight", torch.zeros(2, 3))) == ["b.weight", "a.weight"]


def test_a_missing_name_is_named() -> None:
    with pytest.raises(ModelError, match=r"left out 1 .*b\.weight"):
        deliver(("a.weight", torch.zeros(2, 3)))


def test_an_unknown_name_is_named() -> None:
    with pytest.raises(ModelError, match=r"'c\.lora_A'"):
        deliver(("a.weight", torch.zeros(2, 3)), ("c.lora_A", torch.zeros(1)))


def test_a_name_that_comes_twice_is_named() -> None:
    with pytest.raises(ModelError, match=r"'b\.weight' twice"):
        deliver(("b.weight", torch.zeros(4)), ("b.weight", torch.zeros(4)))


def test_a_wrong_shape_is_named_even_where_it_would_broadcast() -> None:
    with pytest.raises(ModelError, match=r"'b\.weight' in shape \(1,\).*\(4,\)"):
        deliver(("b.weight", torch.zeros(1)))


def test_a_tied_head_may_come_or_not() -> None:
    full = (("a.weight", torch.zeros(2, 3)), ("b.weight", torch.zeros(4)))
    assert len(deliver(*full, optional=("head",))) == 2
    assert len(deliver(*full, ("head", torch.zeros(9)), optional=("head",))) == 3


def test_chunks_are_read_one_at_a_time() -> None:
    read = []

    def chunks():
        for name, shape in SHAPES.items():
            read.append(name)
            yield [(name, torch.zeros(shape))]

    next(Manifest(SHAPES).check(chunks()))
    assert read == ["a.weight"]


def test_checkpoint_shapes_are_those_of_the_loaded_model() -> None:
    directory = resolve(ModelConfig(name="tiny"))
    loaded = {name: tuple(p.shape) for name, p in oracle.load(directory).named_parameters()}
    assert checkpoint_shapes(directory) == loaded


def test_a_shared_file_holds_the_chunk_and_is_gone_even_after_a_failure() -> None:
    from safetensors.torch import load_file

    tied = torch.arange(6.0).view(2, 3)
    chunk = [("x", tied.T), ("y", tied.T), ("z", torch.ones(2, dtype=torch.bfloat16))]
    with shared_file(chunk) as path:
        loaded = load_file(path)
        assert all(torch.equal(loaded[name], tensor) for name, tensor in chunk)
    assert not path.exists()
    with pytest.raises(RuntimeError, match="on the way"):
        _fail_with_file(chunk, paths := [])
    assert not paths[0].exists()


def _fail_with_file(chunk: list[tuple[str, torch.Tensor]], paths: list[Path]) -> None:
    with shared_file(chunk) as path:
        paths.append(path)
        raise RuntimeError("on the way")
