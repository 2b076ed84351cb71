"""Where models come from."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rlinf.config import ModelConfig
from rlinf.errors import ModelError
from rlinf.models import ModelInfo, cache, describe, load_tokenizer, resolve
from rlinf.models.parallelize import check_tp
from tests.models.small import write_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield resolve(ModelConfig(name="tiny"))


def test_tiny_is_small_and_has_head_sizes_that_engines_run_and_two_ranks_can_share(tiny):
    info = describe(tiny)
    assert info.parameters == sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(tiny).parameters()) < 5e6
    assert (info.head_dim, info.kv_heads, info.eos_ids, info.tied) == (64, 2, (1,), False)
    check_tp(info, 2)


def test_tiny_is_the_same_model_wherever_it_is_made(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    torch.manual_seed(123)
    before = torch.get_rng_state()
    other = resolve(ModelConfig(name="tiny"))
    assert other.is_relative_to(tmp_path)
    assert torch.equal(torch.get_rng_state(), before), "making a model must not disturb the caller's randomness"
    first, second = load_file(tiny / "model.safetensors"), load_file(other / "model.safetensors")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_tinys_tokenizer_takes_any_text_and_makes_a_digit_one_token(tiny):
    tokenizer = load_tokenizer(tiny)
    text = "".join(map(chr, range(1, 128))) + " 12+30=?\n Größe"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert len(tokenizer.encode("0123456789", add_special_tokens=False)) == 10
    assert len({tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}) == 3
    chat = [{"role": "user", "content": "2+3?"}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|bos|><|user|>2+3?<|eos|><|assistant|>"


def test_tiny_mostly_says_digits_and_stops(tiny):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny), load_tokenizer(tiny)
    ids = tokenizer.encode("What is 4+5?", return_tensors="pt")
    probabilities = model(ids).logits[0].softmax(-1).mean(0)
    digits = tokenizer.encode("0123456789", add_special_tokens=False)
    assert probabilities[digits].sum() > 0.3
    assert 0.05 < probabilities[tokenizer.eos_token_id] < 0.6


def test_of_two_processes_at_once_one_builds_and_both_get_a_whole_directory(tmp_path):
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "tests.models.building"]
    processes = [subprocess.Popen(command, env=environment, cwd=Path(__file__).parents[2]) for _ in range(2)]
    assert [process.wait(120) for process in processes] == [0, 0]
    assert len((tmp_path / "builders").read_text().split()) == 1
    left = [path.name for path in (tmp_path / "rlinf" / "models").iterdir() if path.is_dir()]
    assert left == ["m-1"], "nothing half-made may stay"


def test_a_build_that_fails_or_was_killed_leaves_nothing_that_looks_like_a_model(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    root = tmp_path / "rlinf" / "models"

    def broken(directory):
        (directory / "config.json").write_text("{}")
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        cache.build_once("m-1", broken)
    assert not [path for path in root.iterdir() if path.is_dir()]
    (root / ".m-1.killed").mkdir()  # what a killed builder leaves
    made = cache.build_once("m-1", lambda directory: (directory / "config.json").write_text("{}"))
    assert sorted(path.name for path in root.iterdir() if path.is_dir()) == ["m-1"]
    assert (made / "config.json").is_file()


def test_describe_reads_the_sizes_of_a_known_config(tmp_path):
    info = describe(write_model(tmp_path / "m", tied=True))
    layer = 32 * 32 * 2 + 32 * 16 * 2 + 32 * 48 * 3 + 2 * 32
    assert info == ModelInfo(
        architecture="LlamaForCausalLM",
        layers=2,
        hidden=32,
        heads=4,
        kv_heads=2,
        head_dim=8,
        vocab=264,
        parameters=264 * 32 + 2 * layer + 32,
        eos_ids=(1,),
        tied=True,
        max_positions=256,
    )


def test_a_tp_size_that_splits_a_head_is_refused_with_the_sizes_that_work(tmp_path):
    info = describe(write_model(tmp_path / "m"))
    check_tp(info, 1)
    check_tp(info, 2)
    for tp in (3, 4, 0):
        with pytest.raises(ModelError, match=r"tp=\d.*2 key-value heads.*\[1, 2\]"):
            check_tp(info, tp)


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("config.json", "config.json"),
        ("model.safetensors", "weights"),
        ("tokenizer.json", "tokenizer"),
    ],
)
def test_a_directory_that_lacks_something_is_refused_by_name(tmp_path, lost, message):
    directory = write_model(tmp_path / "m")
    (directory / lost).unlink()
    with pytest.raises(ModelError, match=message):
        resolve(ModelConfig(name="x", path=str(directory)))


def test_a_lost_shard_is_named(tmp_path):
    directory = write_model(tmp_path / "m")
    (directory / "model.safetensors.index.json").write_text('{"weight_map": {"a": "one.safetensors"}}')
    save_file({"a": torch.zeros(1)}, directory / "two.safetensors")
    with pytest.raises(ModelError, match=r"one\.safetensors"):
        resolve(ModelConfig(name="x", path=str(directory)))


@pytest.mark.parametrize("path", ["./nowhere", "/nowhere/at/all", "~/no such model"])
def test_a_path_that_is_not_there_is_not_taken_for_a_hub_name(path):
    with pytest.raises(ModelError, match="no such directory"):
        resolve(ModelConfig(name="x", path=path))


def test_an_unknown_name_without_a_path_says_which_there_are():
    with pytest.raises(ModelError, match="smollm2"):
        resolve(ModelConfig(name="smollm"))
