"""vLLM's own worker processes each take their shard of the new weights, out of a file in shared memory."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from rlinf.generation import build_engine
from tests.generation import oracle


@pytest.mark.model  # slow to start, as a real model is: two processes that each import vLLM
def test_two_shards_take_new_weights_and_no_worker_is_left(tmp_path: Path) -> None:
    model = oracle.load(oracle.build(tmp_path / "model"))
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    engine = build_engine("vllm", oracle.spec(tmp_path / "model", tp=2, eos_ids=(1,)))
    try:
        weights = oracle.other(model, seed=3)
        oracle.run(engine, oracle.requests(samples=1))
        engine.load_weights(oracle.chunked(weights))
        model.load_state_dict(weights, strict=False)
        for request in oracle.requests(samples=1):
            completion = oracle.run(engine, [request])[request.key]
            assert list(completion.tokens) == oracle.greedy(model, request.prompt, 12, (1,))
    finally:
        engine.close()
    left = [c for c in psutil.Process().children(recursive=True) if c.pid not in before]
    # multiprocessing's tracker of shared memory lives as long as this process.
    assert not [c for c in left if "resource_tracker" not in " ".join(c.cmdline())]
    assert not list(Path("/dev/shm").glob("rlinf-weights-*"))
