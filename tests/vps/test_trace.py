"""What the tracer says of a loader, held against what the loader does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from rlinf.vps.affine import View, boxes_of_labels, boxes_of_view
from rlinf.vps.layout import dense
from rlinf.vps.paper_engine import EngineRank, engine_rank
from rlinf.vps.space import LayoutError, Space
from rlinf.vps.trace import Traced, space_of, trace

SIZES: dict[str, Any] = {
    "vocab_size": 371,  # padded by the engine to 384
    "hidden_size": 96,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "max_position_embeddings": 128,
    "initializer_range": 0.5,
}
TP = [EngineRank(tp, rank) for tp in (1, 2, 3, 4) for rank in range(tp)]
EP = [EngineRank(tp, rank, expert_parallel=True) for tp in (2, 3, 4) for rank in range(tp)]
PP = [EngineRank(2, 1, pp=2, pp_rank=0), EngineRank(2, 0, pp=2, pp_rank=1)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, torch.Tensor]]]:
    """A tied head over one KV head; norms of queries over two KV heads; seven experts."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig

    configs = {
        "llama": LlamaConfig(num_key_value_heads=1, tie_word_embeddings=True, **SIZES),
        "qwen3": Qwen3Config(num_key_value_heads=2, head_dim=8, tie_word_embeddings=False, **SIZES),
        "qwen3-moe": Qwen3MoeConfig(
            num_key_value_heads=1, head_dim=8, moe_intermediate_size=96, num_experts=7, num_experts_per_tok=2, **SIZES
        ),
    }
    found = {}
    torch.manual_seed(5)
    for name, config in configs.items():
        directory = tmp_path_factory.mktemp(name)
        AutoModelForCausalLM.from_config(config).save_pretrained(directory)
        found[name] = directory, load_file(directory / "model.safetensors")
    return found


def space(state: dict[str, torch.Tensor], dtype: str = "float32") -> Space:
    return space_of({name: tuple(tensor.shape) for name, tensor in state.items()}, dtype)


def filled(traced: Traced, of: Space, state: dict[str, torch.Tensor], empty: float) -> dict[str, torch.Tensor]:
    """The rank's buffers, as the layout alone fills them from a checkpoint."""
    held = traced.layout.pieces
    buffers = [torch.full((buffer.numel,), empty) for buffer in traced.layout.buffers]
    for row in range(len(held)):
        source = state[of.tensors[held.tensor[row]].name].reshape(of.shape(int(held.tensor[row])))
        box = source[tuple(slice(a, a + n) for a, n in zip(held.start[row], held.size[row], strict=True))]
        into = buffers[held.buffer[row]]
        into.as_strided(held.size[row].tolist(), held.stride[row].tolist(), int(held.offset[row])).copy_(box)
    return {buffer.name: values for buffer, values in zip(traced.layout.buffers, buffers, strict=True)}


@pytest.mark.parametrize(
    ("name", "rank"),
    [("llama", rank) for rank in [*TP, *PP]]
    + [("qwen3", rank) for rank in [*TP, *PP] if rank.tp != 3]  # the engine does not cut two heads in three
    + [("qwen3-moe", rank) for rank in [*TP, *EP, *PP]],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, vars(value).values())),
)
def test_a_layout_applied_to_a_checkpoint_is_what_the_loader_makes_of_it(
    models: dict[str, Any], name: str, rank: EngineRank
) -> None:
    directory, state = models[name]
    with engine_rank(directory, rank) as model:
        assert all(parameter.is_meta for parameter in model.parameters())
        traced = trace(model, space(state))
    padding = 0.0  # what the loader fills a padded vocabulary with
    with engine_rank(directory, rank, meta=False) as model:
        for parameter in model.parameters():
            parameter.data.fill_(padding)
        model.load_weights(iter(state.items()))  # type: ignore[operator]
        loaded = {key: parameter.detach() for key, parameter in model.named_parameters()}
    found = filled(traced, space(state), state, padding)
    assert list(found) == list(loaded)
    for key, parameter in loaded.items():
        assert torch.equal(found[key].view(parameter.shape), parameter), key


def test_a_bfloat16_engine_of_float32_weights_has_the_same_layout_in_its_own_dtype(models: dict[str, Any]) -> None:
    directory, state = models["qwen3"]
    with engine_rank(directory, EngineRank(2, 1)) as model:
        expected = trace(model, space(state)).layout
    with engine_rank(directory, EngineRank(2, 1), "bfloat16") as model:
        found = trace(model, space(state)).layout
    assert {buffer.dtype for buffer in found.buffers} == {"bfloat16"}
    assert np.array_equal(found.pieces.offset, expected.pieces.offset)


def test_a_checkpoint_that_lacks_a_tensor_is_refused_and_the_parameter_named(models: dict[str, Any]) -> None:
    directory, state = models["qwen3"]
    rest = {name: tensor for name, tensor in state.items() if "layers.1.self_attn.k_proj" not in name}
    with (
        engine_rank(directory, EngineRank()) as model,
        pytest.raises(LayoutError, match=r"layers\.1\.self_attn\.qkv_proj\.weight: 1536 of 12288.*neither loaded"),
    ):
        trace(model, space(rest))


class Odd(nn.Module):
    """Loads by means that a test chooses."""

    def __init__(self, shape: tuple[int, ...], load: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full(shape, -1.0), requires_grad=False)
        self.load = load

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            self.load(self.weight, tensor)


def _interleaved(weight: torch.Tensor, tensor: torch.Tensor) -> None:
    weight[0::2].copy_(tensor[:3])
    weight[1::2].copy_(tensor[3:])


def _split_heads(weight: torch.Tensor, tensor: torch.Tensor) -> None:
    weight.data.copy_(tensor.view(2, 3, 4).transpose(0, 1).reshape(6, 4))  # a copy in between


def _joined(weight: torch.Tensor, tensor: torch.Tensor) -> None:
    weight.data.copy_(torch.cat([tensor[4:], tensor[:4]]).to(torch.bfloat16).float())


def _repeated(weight: torch.Tensor, tensor: torch.Tensor) -> None:
    weight.data.copy_(tensor[:1].expand(6, 4))


def _flattened(weight: torch.Tensor, tensor: torch.Tensor) -> None:
    weight.view(-1)[3:].copy_(tensor.reshape(-1)[:21])
    weight.view(-1)[:3].fill_(0)


def _turned(weight: torch.Tensor, tensor: torch.Tensor) -> None:
    weight.view(4, 6).copy_(tensor.t())


ODD = [_interleaved, _split_heads, _joined, _repeated, _flattened, _turned]


@pytest.mark.parametrize("load", ODD, ids=lambda load: load.__name__[1:])
def test_loaders_that_do_more_than_slice_are_followed_and_nothing_is_written(load: Any) -> None:
    state = {"w": torch.arange(24.0).view(6, 4)}
    traced = trace(model := Odd((6, 4), load), space(state))
    assert torch.equal(model.weight, torch.full((6, 4), -1.0))
    loaded = Odd((6, 4), load)
    loaded.load_weights(iter(state.items()))
    assert torch.equal(filled(traced, space(state), state, 0.0)["weight"].view(6, 4), loaded.weight)


@pytest.mark.parametrize(
    ("load", "text"),
    [
        (lambda w, t: w.data.copy_(t * 2), "computes .*mul.* of w"),
        (lambda w, t: w.data.add_(t), "changes weight by .*add"),
        (
            lambda w, t: w[:5].copy_(t[:5]),
            r"weight: 4 of 24 elements are neither loaded.*first at \[5, 0\]",
        ),
        (lambda w, t: (w.data.copy_(t), w[1:2].copy_(t[:1])), r"4 of 24 elements are written more than once"),
    ],
)
def test_what_is_no_layout_is_an_error_that_names_the_parameter(load: Any, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        trace(Odd((6, 4), load), space({"w": torch.zeros(6, 4)}))


def test_a_buffer_that_the_loader_fills_is_named_with_its_source_and_keeps_its_values() -> None:
    class Biased(Odd):
        def __init__(self) -> None:
            super().__init__((6, 4), None)
            self.register_buffer("bias", torch.ones(6, 4))

        def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
            for _, tensor in weights:
                self.weight.data.copy_(tensor)
                self.bias[2:].copy_(tensor[2:])

    model = Biased()
    with pytest.raises(LayoutError, match="the loader fills bias, a buffer of the engine's model, with w"):
        trace(model, space({"w": torch.zeros(6, 4)}))
    assert (model.bias == 1).all()


@given(st.data())
def test_boxes_of_a_view_are_its_elements_one_by_one(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    labels = torch.arange(int(np.prod(shape))).view(shape)
    view = labels
    for _ in range(data.draw(st.integers(0, 4))):
        match data.draw(st.integers(0, 4)):
            case 0:
                d = data.draw(st.integers(0, view.ndim - 1))
                low = data.draw(st.integers(0, view.shape[d]))
                view = view.narrow(d, low, data.draw(st.integers(0, view.shape[d] - low)))
            case 1:
                view = view.permute(data.draw(st.permutations(range(view.ndim))))
            case 2 if view.is_contiguous():
                view = view.view(-1)
            case 3:
                d = data.draw(st.integers(0, view.ndim - 1))
                view = view.unflatten(d, (-1, 2)) if view.shape[d] and view.shape[d] % 2 == 0 else view
            case 4:
                view = view[:: data.draw(st.integers(1, 3))]
    stride = dense(view.shape)
    source = View(tuple(view.shape), view.stride(), view.storage_offset())
    target = View(tuple(view.shape), stride, 7)
    for boxes in (boxes_of_view(shape, source, target), boxes_of_labels(shape, view.numpy(), target)):
        found = np.full(7 + view.numel(), -1)
        for start, size, offset, step in boxes:
            inner = labels.numpy()[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))]
            assert inner.shape == size
            for index in np.ndindex(size):
                place = offset + sum(i * s for i, s in zip(index, step, strict=True))
                assert found[place] == -1
                found[place] = inner[index]
        assert found[7:].tolist() == view.flatten().tolist()
