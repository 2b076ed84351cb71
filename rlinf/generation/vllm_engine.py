"""vLLM's engine, stepped in this process: requests go in, the step loop hands completions out as they finish.

With ``tp=1`` the model lives in this process too; with more, vLLM's own worker processes each hold a shard. New weights
are read by each worker from the memory of those who publish them (`rlinf.vps.vllm`).
"""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Generator, Sequence
from typing import Any

import torch

from rlinf.errors import ConfigError, ModelError
from rlinf.generation.checkpoint import check_checkpoint
from rlinf.generation.engine import Completion, Engine, EngineSpec, Request
from rlinf.vps.brief import Told
from rlinf.vps.memory import Memory
from rlinf.vps.publication import Publication, joined
from rlinf.vps.space import LayoutError, few

# vLLM silently raises a lower temperature to this, and refuses a higher one than that.
LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.01, 2.0
# vLLM loads the extension in each of its processes, and by that the weight-transfer engine of this name.
WEIGHT_TRANSFER, WORKER_EXTENSION = "vps", "rlinf.vps.vllm.WorkerExtension"
# Samples share whole blocks of their prompt. The default on CPU, 128 tokens, is longer than many a prompt.
CPU_BLOCK_TOKENS = 32


class VllmEngine(Engine):
    """See the module."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._on_gpu = not spec.device.startswith("cpu")
        self._torn = False
        self._asleep = False
        self._agreed: str | None = None  # hash of the source's layout that the workers have planned for
        self._memories: tuple[Memory | None, ...] = ()
        self._told = Told()
        _set_environment(spec)

        from vllm.config import WeightTransferConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        args = EngineArgs(
            model=str(spec.model_dir),
            skip_tokenizer_init=True,  # tokens in, tokens out
            trust_remote_code=spec.trust_remote_code,
            dtype=spec.dtype,  # type: ignore[arg-type]
            max_model_len=-1,  # the model's own, or what the KV cache can hold
            max_num_seqs=spec.max_num_seqs,
            tensor_parallel_size=spec.tp,
            distributed_executor_backend="uni" if spec.tp == 1 else "mp",
            enforce_eager=spec.enforce_eager,
            enable_prefix_caching=True,
            logprobs_mode="processed_logprobs",
            weight_transfer_config=WeightTransferConfig(backend=WEIGHT_TRANSFER),
            worker_extension_cls=WORKER_EXTENSION,
            disable_log_stats=True,
            use_tqdm_on_load=False,
            **self._memory_arguments(),
        )
        set_num_threads = torch.set_num_threads
        self._engine: Any = LLMEngine.from_engine_args(args, enable_multiprocessing=False)
        torch.set_num_threads = set_num_threads  # vLLM puts a function in its place that does nothing

    def _memory_arguments(self) -> dict[str, Any]:
        if self._on_gpu:
            return {"gpu_memory_utilization": self._spec.gpu_memory_utilization, "enable_sleep_mode": True}
        return {"kv_cache_memory_bytes": self._spec.kv_cache_bytes, "block_size": CPU_BLOCK_TOKENS}

    def _rpc(self, method: str, **arguments: Any) -> list[Any]:
        return self._engine.collective_rpc(method, kwargs=arguments)

    @property
    def context_length(self) -> int:
        return self._engine.model_config.max_model_len

    def generate(
        self, requests: Sequence[Request], *, temperature: float, max_new_tokens: int
    ) -> Generator[Completion]:
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        if self._torn:
            raise ModelError("the last weight sync failed half-way; this engine's weights are of two versions")
        if temperature and not LOWEST_TEMPERATURE <= temperature <= HIGHEST_TEMPERATURE:
            raise ConfigError(
                f"temperature={temperature}: vLLM samples at 0 (greedy) or from {LOWEST_TEMPERATURE} to "
                f"{HIGHEST_TEMPERATURE}; choose one of these, or rollout.engine=hf"
            )
        running = {str(request.key): request.key for request in requests}
        try:
            for request in requests:
                params = SamplingParams(
                    temperature=temperature,
                    max_tokens=max_new_tokens,
                    seed=request.seed,
                    stop_token_ids=list(self._spec.eos_ids),
                    logprobs=0,  # of the sampled token alone
                    flat_logprobs=True,
                    detokenize=False,
                    output_kind=RequestOutputKind.FINAL_ONLY,
                )
                prompt = tokens_input(list(request.prompt))
                self._engine.add_request(str(request.key), prompt, params)
            while running:
                for output in self._step():
                    if output.finished:
                        yield _completion(running.pop(output.request_id), output.outputs[0])
                if running and not self._engine.has_unfinished_requests():
                    raise ModelError(
                        f"vLLM has nothing left to do, and gave no answer to {len(running)} of {len(requests)} "
                        f"requests, among them row {min(running.values())}; look at this rank's log"
                    )
        finally:
            if running:
                self._engine.abort_request(list(running))

    def _step(self) -> list[Any]:
        # A thread that is new to torch takes over torch's thread count only now; vLLM's kernels, which ask OpenMP,
        # would see the count change between planning and running an attention, and abort.
        torch.get_num_threads()
        if not self._spec.enforce_eager:
            return self._engine.step()
        # enforce_eager leaves out a small function that ranks log-probabilities: compiling it takes 14 s.
        with torch.compiler.set_stance("force_eager"):
            return self._engine.step()

    def load_weights(self, publications: Sequence[Publication]) -> None:
        if self._spec.tp > 1:  # processes of vLLM's own read from this host's memory alone
            publications, self._memories = zip(*(publication.here() for publication in publications), strict=True)
        asleep = self._asleep
        if asleep:
            self.wake()
        self._prepare(publications)
        self._torn = True
        self._rpc("start_weight_update")
        self._rpc("update_weights", update_info={})
        self._rpc("finish_weight_update")
        for worker, wrong in enumerate(self._rpc("wrong_weights")):
            if wrong:
                raise LayoutError(
                    f"worker {worker} of the engine holds other weights than were published: {few(wrong)}"
                )
        # Requests in flight are put back, and what they have so far is read again with the new weights.
        if not self._engine.reset_prefix_cache(reset_running_requests=True):
            raise ModelError("vLLM kept its prefix cache over a weight sync")
        self._torn = False
        if asleep:
            self.sleep()

    def _prepare(self, publications: Sequence[Publication]) -> None:
        """Let each worker plan what it takes, once for a source, and attach it. Nothing is changed.

        Raises:
            LayoutError: the source's model is another one, or a rank of it has ended.
        """
        source = joined(publications)
        known, lacking = source.hash == self._agreed, list[str]()
        if not known:
            lacking = check_checkpoint(source.space, self._spec.model_dir)
        self._agreed = None
        told = [self._told.brief(rank, publication) for rank, publication in enumerate(publications)]
        wrong = self._rpc("prepare_weights", source=None if known else source, publications=told)
        if error := next(filter(None, wrong), None):
            left = f"; what was published leaves out {few(lacking)}" if lacking else ""
            raise LayoutError(f"the engine cannot take over these weights: {error}{left}")
        self._agreed = source.hash

    def sync_seconds(self) -> dict[str, float]:
        """Of the last `load_weights`, in the slowest worker: ``copy`` what was taken, ``load`` vLLM's own part."""
        found = self._rpc("weight_sync_seconds")
        return {part: max(seconds[part] for seconds in found) for part in found[0]}

    def sleep(self) -> None:
        if self._asleep:
            return
        if self._on_gpu:
            self._engine.sleep(level=1)
        else:  # vLLM has no such thing on a CPU
            self._engine.reset_prefix_cache(reset_running_requests=True)
            self._rpc("leave", folder=self._spec.offload_dir)
        self._asleep = True

    def wake(self) -> None:
        if not self._asleep:
            return
        if self._on_gpu:
            self._engine.wake_up()
        else:
            self._rpc("come_back")
        self._asleep = False

    def nbytes(self) -> int:
        if self._on_gpu:
            return int(torch.cuda.get_device_properties(0).total_memory * self._spec.gpu_memory_utilization)
        weights = sum(file.stat().st_size for file in self._spec.model_dir.glob("*.safetensors"))
        return weights // self._spec.tp + self._spec.kv_cache_bytes

    def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.engine_core.shutdown()
            del engine
            gc.collect()


def _completion(key: int, sample: Any) -> Completion:
    if str(sample.finish_reason) not in ("stop", "length"):
        raise ModelError(f"vLLM gave row {key} up ({sample.finish_reason}); look at this rank's log")
    return Completion(
        key=key,
        tokens=list(sample.token_ids),
        logprobs=list(sample.logprobs.logprobs),
        truncated=sample.finish_reason == "length",
    )


def _set_environment(spec: EngineSpec) -> None:
    """What vLLM takes from the environment alone. What the user has set there stays."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine lives in this process
    # Every start warns of a dozen things that are meant to be so; VLLM_LOGGING_LEVEL=INFO shows them.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if spec.enforce_eager and spec.tp > 1:
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # in the worker processes; here see VllmEngine._step
    if spec.device.startswith("cpu"):
        if spec.tp > 1:
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", _cores(spec.tp))
        return
    if torch.device(spec.device).index not in (None, 0):
        raise ConfigError(
            f"vLLM takes the first GPUs that the process sees, not {spec.device}; set CUDA_VISIBLE_DEVICES for the rank"
        )
    if spec.tp > 1:
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    if spec.batch_invariant and torch.cuda.get_device_capability() >= (9, 0):
        os.environ.setdefault("VLLM_BATCH_INVARIANT", "1")


def _cores(tp: int) -> str:
    """This process's cores, cut into ``tp`` sets (``0,1|2,3``); they share cores if there are fewer than sets."""
    cores = sorted(os.sched_getaffinity(0))
    sets = [cores[rank::tp] or [cores[rank % len(cores)]] for rank in range(tp)]
    return "|".join(",".join(map(str, own)) for own in sets)
