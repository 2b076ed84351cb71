"""Generation: engines that turn prompts into sampled responses with the log-probability of every sampled token.

In reading order:

- `engine`: `Request` in, `Completion` out; the `Engine` interface, its `EngineSpec`, and `build_engine` with the
  registry that new engines join.
- `hf_engine`: a sampling loop over a transformers model; runs every causal language model that transformers has.
- `vllm_engine`: vLLM's engine, stepped in this process.
- `checkpoint`: which names and shapes the weights of a model directory have.

New weights come as publications (`rlinf.vps.publication`); `rlinf.vps.vllm` is the half that runs in vLLM's workers.
"""

from rlinf.generation.engine import Completion, Engine, EngineSpec, Request, build_engine, register_engine

__all__ = ["Completion", "Engine", "EngineSpec", "Request", "build_engine", "register_engine"]
