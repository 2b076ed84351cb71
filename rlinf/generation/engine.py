"""What an engine is given, what it gives back, and how one is chosen by name."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlinf.errors import ConfigError

if TYPE_CHECKING:
    from rlinf.vps.publication import Publication


@dataclass(frozen=True)
class Request:
    """One sample to draw.

    Attributes:
        key: the sample's row id; comes back with its completion.
        group: samples of one prompt share it.
        prompt: token ids of the prompt; at least one.
        seed: of this sample alone, so that it does not depend on what it is batched with.
    """

    key: int
    group: int
    prompt: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class Completion:
    """A sampled response.

    Attributes:
        key: of its request.
        tokens: sampled token ids; ends with an end-of-sequence id unless ``truncated``.
        logprobs: log-probability of each token under the distribution that it was drawn from (softmax of the logits
            over the temperature). A greedy token's is that of the unscaled distribution, temperature 1.
        truncated: cut off by the limit on new tokens.
    """

    key: int
    tokens: Sequence[int]
    logprobs: Sequence[float]
    truncated: bool


@dataclass(frozen=True)
class EngineSpec:
    """What an engine is built from.

    Attributes:
        model_dir: a Hugging Face model directory.
        eos_ids: every token id that ends a response.
        max_positions: longest sequence that the model was made for.
        dtype: ``float32`` or ``bfloat16``.
        device: torch device of the rank.
        tp: tensor-parallel size inside the engine.
        max_num_seqs: sequences run side by side.
        kv_cache_bytes: memory of the KV cache on CPU.
        gpu_memory_utilization: share of the GPU that the engine may take.
        enforce_eager: neither compile nor capture graphs.
        trust_remote_code: run Python code that comes with the model.
        batch_invariant: a sample must not depend, to the last bit, on what it is batched with. The ``hf`` engine
            keeps it; ``vllm`` promises it on GPUs where it has batch-invariant kernels, and elsewhere not.
        attention: attention implementation of transformers (``hf`` engine).
        offload_dir: where weights go while a CPU engine sleeps; ``None``: into memory.
    """

    model_dir: Path
    eos_ids: tuple[int, ...]
    max_positions: int
    dtype: str = "float32"
    device: str = "cpu"
    tp: int = 1
    max_num_seqs: int = 64
    kv_cache_bytes: int = 1 << 30
    gpu_memory_utilization: float = 0.5
    enforce_eager: bool = True
    trust_remote_code: bool = False
    batch_invariant: bool = False
    attention: str = "sdpa"
    offload_dir: Path | None = None


class Engine(ABC):
    """Samples responses from a model whose weights can be replaced between calls. One thread uses it at a time."""

    @property
    @abstractmethod
    def context_length(self) -> int:
        """Tokens of prompt and response together that a sequence may have."""

    @abstractmethod
    def generate(
        self, requests: Sequence[Request], *, temperature: float, max_new_tokens: int
    ) -> Generator[Completion]:
        """Yield a completion for each request, as they finish, in any order.

        An iterator that is closed before its end stops the requests that still run.

        Args:
            requests: with distinct keys; each prompt and ``max_new_tokens`` fit in `context_length`.
            temperature: of the sampling; 0 is greedy.
            max_new_tokens: a response is cut off here.
        """

    @abstractmethod
    def load_weights(self, publications: Sequence[Publication]) -> None:
        """Replace all weights; what was cached of the old ones is dropped.

        What is published is read until this returns, and not after. A delivery that does not fit changes nothing;
        after another failure half of the weights may be new, and the engine refuses to generate.

        Args:
            publications: of all source ranks.

        Raises:
            LayoutError: the source's model is another one (a name is unknown or missing, or a shape is wrong), or a
                rank of it has ended.
        """

    @abstractmethod
    def sleep(self) -> None:
        """Free the device; the weights stay in host memory. On CPU there is nothing to free."""

    @abstractmethod
    def wake(self) -> None:
        """Take the device again."""

    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of device memory that weights and caches of this process take when awake."""

    @abstractmethod
    def close(self) -> None:
        """Free everything, and end the processes that the engine started. Safe to call twice."""


_ENGINES = {
    "vllm": "rlinf.generation.vllm_engine:VllmEngine",
    "hf": "rlinf.generation.hf_engine:HFEngine",
}


def register_engine(name: str, target: str) -> None:
    """Add an engine: ``target`` is ``module:Class``, a subclass of `Engine` made from an `EngineSpec`.

    Raises:
        ConfigError: the name is taken.
    """
    if name in _ENGINES:
        raise ConfigError(f"engine {name!r} is registered already, as {_ENGINES[name]}; choose another name")
    _ENGINES[name] = target


def check_engine(name: str) -> str:
    """Where the engine registered as ``name`` is.

    Raises:
        ConfigError: no engine has that name.
    """
    if name not in _ENGINES:
        raise ConfigError(f"rollout.engine={name!r} is not one of {sorted(_ENGINES)}")
    return _ENGINES[name]


def build_engine(name: str, spec: EngineSpec) -> Engine:
    """The engine registered as ``name``, with the weights of ``spec.model_dir``.

    Raises:
        ConfigError: no engine has that name, or its package is not installed.
    """
    module, _, attribute = check_engine(name).partition(":")
    try:
        cls = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"rollout.engine={name!r} needs the package {error.name!r}, which is not installed"
        ) from error
    return cls(spec)
