"""Generation: engines that turn prompts into sampled responses with the log-probability of every sampled token.

In reading order:

- `engine`: `Request` in, `Completion` out; the `Engine` interface, its `EngineSpec`, and `build_engine` with the
  registry that new engines join.
- `hf_engine`: a sampling loop over a transformers model; runs every causal language model that transformers has.
- `vllm_engine`: vLLM's engine, stepped in this process.
- `manifest`: which names and shapes a model's weights have, and the check that a sync delivers each exactly once.
- `weight_transfer`: how chunks of weights reach vLLM's workers; `weight_receiver`: the half that runs there.
"""

from rlinf.generation.engine import Completion, Engine, EngineSpec, Request, build_engine, register_engine

__all__ = ["Completion", "Engine", "EngineSpec", "Request", "build_engine", "register_engine"]
