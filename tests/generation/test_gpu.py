"""What only a GPU shows: memory that is given back, and a sync into an engine that sleeps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlinf.generation import build_engine
from tests.generation import oracle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("name", ["vllm", "hf"])
def test_a_sleeping_engine_frees_the_device_and_wakes_with_what_a_sync_brought(name: str, tmp_path: Path) -> None:
    directory = oracle.build(tmp_path / "model")
    spec = oracle.spec(directory, device="cuda:0", eos_ids=(1,), gpu_memory_utilization=0.2)
    engine = build_engine(name, spec)
    try:
        expected = {key: c.tokens for key, c in oracle.run(engine, oracle.requests(samples=1)).items()}
        awake = torch.cuda.mem_get_info()[0]
        engine.sleep()
        assert torch.cuda.mem_get_info()[0] >= awake
        oracle.deliver(engine, oracle.other(oracle.load(directory), seed=3))
        engine.wake()
        changed = {key: c.tokens for key, c in oracle.run(engine, oracle.requests(samples=1)).items()}
        assert changed != expected
        oracle.deliver(engine, dict(oracle.load(directory).named_parameters()))
        if name == "vllm":  # whose kernels on a GPU want a dense model's weights as they were loaded
            (in_place,) = engine._rpc("weights_in_place")  # type: ignore[attr-defined]
            assert any("qkv_proj" in parameter for parameter in in_place)
        again = {key: c.tokens for key, c in oracle.run(engine, oracle.requests(samples=1)).items()}
        assert again == expected
    finally:
        engine.close()
