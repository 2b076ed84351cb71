"""vLLM's own worker processes each take their shard out of what the ranks of an actor publish."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rlinf.generation import Engine, build_engine
from rlinf.models.tiny import byte_tokenizer
from rlinf.vps.publication import Publication
from rlinf.vps.space import LayoutError
from tests.generation import oracle

ACTORS = {"dp2": {"dp": 2}, "tp2": {"tp": 2}}


def write_model(directory: Path, seed: int) -> Path:
    """Six heads, for two ranks of an actor and three of an engine, whose padded vocabulary three ranks can share."""
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=371,
        hidden_size=192,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=6,
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), eos_token="<|eos|>", pad_token="<|eos|>")
    tokenizer.save_pretrained(directory)
    return directory


def publish(rank: int, work: Path) -> None:
    """Real actors, of two layouts and two sets of weights; what they publish goes to files, as to another host."""
    from rlinf.config import ActorConfig, ModelConfig
    from rlinf.worker import RankContext
    from rlinf.workers.actor import Actor

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{work}/rendezvous", rank=rank, world_size=2)
    try:
        for name, layout in ACTORS.items():
            cfg = ActorConfig(model=ModelConfig(name=name, path=str(work / name)))
            actor = Actor(cfg, RankContext(rank=rank, world_size=2, **layout))
            actor.setup()
            published = actor.publish_weights("rollout", inline=True).carried()
            away = replace(published, handle=replace(published.handle, host="another"))
            (work / f"{name}-{rank}.pkl").write_bytes(pickle.dumps(away))
    except BaseException:
        (work / f"error-{rank}").write_text(traceback.format_exc())
        raise
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tensor-parallel")
    for seed, name in enumerate(("engine", *ACTORS)):
        write_model(directory / name, seed)
    mp.spawn(publish, args=(directory,), nprocs=2)
    return directory


@pytest.fixture(scope="module", params=[1, 3], ids=lambda tp: f"tp{tp}")
def engine(request: pytest.FixtureRequest, work: Path) -> Iterator[Engine]:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    built = build_engine("vllm", oracle.spec(work / "engine", tp=request.param, eos_ids=(1,)))
    yield built
    built.close()
    left = [c for c in psutil.Process().children(recursive=True) if c.pid not in before]
    # multiprocessing's tracker of shared memory lives as long as this process.
    assert not [c for c in left if "resource_tracker" not in " ".join(c.cmdline())]


def publications(work: Path, name: str) -> list[Publication]:
    return [pickle.loads((work / f"{name}-{rank}.pkl").read_bytes()) for rank in range(2)]


def assert_speaks(engine: Engine, model: Any) -> None:
    for request in oracle.requests(samples=1):
        completion = oracle.run(engine, [request])[request.key]
        assert list(completion.tokens) == oracle.greedy(model, request.prompt, 12, (1,))


@pytest.mark.model  # slow to start, as a real model is: three processes that each import vLLM
def test_after_a_sync_from_actors_of_any_layout_an_engine_speaks_as_transformers_with_their_weights(
    engine: Engine, work: Path
) -> None:
    assert_speaks(engine, oracle.load(work / "engine"))
    for name in ("dp2", "tp2", "dp2"):  # the second time it is another source, the third one that was known
        engine.load_weights(publications(work, name))
        assert_speaks(engine, oracle.load(work / name))
    weights = dict(oracle.load(work / "engine").named_parameters())
    for _ in range(2):  # the first sync of a source reloads every layer; after it some are written in place
        oracle.deliver(engine, weights, ranks=2, cut=1, common=True)
        assert_speaks(engine, oracle.load(work / "engine"))
    in_place = engine._rpc("weights_in_place")  # type: ignore[attr-defined]
    assert all("model.embed_tokens.weight" in names and "model.norm.weight" in names for names in in_place)
    assert not any("proj" in name for names in in_place for name in names)  # which a CPU's kernels repack
    del weights["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(LayoutError, match=r"layers\.1\.mlp\.gate_up_proj.*leaves out model\.layers\.1\.mlp\.up_proj"):
        oracle.deliver(engine, weights)
    assert_speaks(engine, oracle.load(work / "engine"))
    engine.load_weights(publications(work, "tp2"))  # no worker is a call behind
    assert_speaks(engine, oracle.load(work / "tp2"))
