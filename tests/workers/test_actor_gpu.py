"""What only a GPU shows: bfloat16 compute over float32 weights, and state that leaves the device."""

from __future__ import annotations

import pytest
import torch

from rlinf.worker import RankContext
from tests.models.small import samples, write_model
from tests.workers.ranks import PROMPTS, RESPONSES, actor, sent

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def test_an_actor_trains_in_bfloat16_over_float32_weights_near_the_cpu(tmp_path):
    directory = write_model(tmp_path / "model")
    batch = samples(PROMPTS, RESPONSES)
    on_gpu, on_cpu = (actor(directory, RankContext(device=device, deterministic=False)) for device in ("cuda:0", "cpu"))
    gap = on_gpu.logprobs(batch)["old_logprobs"].values - on_cpu.logprobs(batch)["old_logprobs"].values
    assert gap.abs().mean() < 0.1
    on_gpu.train(batch)
    assert {tensor.dtype for tensor in sent(on_gpu).values()} == {torch.float32}
    assert on_gpu.metrics.take()["skipped_steps"].value == 0


def test_offload_frees_the_device_and_onload_brings_back_the_same_state(tmp_path):
    worker = actor(write_model(tmp_path / "model"), RankContext(device="cuda:0", deterministic=False))
    batch = samples(PROMPTS, RESPONSES)
    worker.train(batch)
    before = sent(worker)
    held = torch.cuda.memory_allocated()
    worker.offload()
    assert held - torch.cuda.memory_allocated() >= 0.9 * worker.nbytes()
    worker.onload()
    assert all(torch.equal(before[name], tensor) for name, tensor in sent(worker).items())
    worker.train(batch)
