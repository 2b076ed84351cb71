"""The typed schema of every config group.

Each dataclass is one group of `configs/`; a key that is not here is an error. The comment after a field is its
documentation: `docs/config.md` is generated from this file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


@dataclass
class WorkflowConfig:
    name: str = ""  # what the run is called; names the default output directory; empty: the function's name
    target: str = ""  # import path of a function from the config to a Workflow, e.g. my_module.my_flow
    args: dict[str, Any] = field(default_factory=dict)  # free-form values for a workflow of your own


@dataclass
class ModelConfig:
    name: str = MISSING  # smollm2 | tiny | any label when path is given
    path: str | None = None  # a Hugging Face model directory or hub name; null: built from the name
    dtype: str = "auto"  # float32 | bfloat16 | auto (float32 on CPU, bfloat16 compute with float32 master on GPU)
    gradient_checkpointing: bool = False  # recompute activations in the backward pass
    attention: str = "auto"  # auto (flash_attention_2 where it is, else packed SDPA with shared prompts) | sdpa | ...
    trust_remote_code: bool = False  # run Python code that comes with the model directory


@dataclass
class DataConfig:
    kind: str = MISSING  # arithmetic | reasoning_gym | jsonl | parquet | hf | import path of a function yielding rows
    name: str | None = None  # reasoning_gym: task name; hf: data set name
    params: dict[str, Any] = field(default_factory=dict)  # of the task, the function, or load_dataset
    train: str | None = None  # jsonl, parquet: file; hf: split name
    validation: str | None = None  # jsonl, parquet: file; hf: split name; null: held out of train
    train_size: int = 2048  # questions to make (tasks), or at most this many to read; 0: all there are
    validation_size: int = 64  # questions held for evaluation, de-duplicated against train
    question_key: str = "question"  # column with the question (text, or a list of chat messages)
    answer_key: str = "answer"  # column with the reference answer; "": the data has none
    system: str | None = None  # system message
    template: str = "{question}"  # text of the user message; {question} is replaced
    chat_template: str = "auto"  # auto (the tokenizer's own, else plain) | plain
    max_prompt_tokens: int = 256  # longer prompts are left out, and counted
    prompts_per_step: int = 4  # prompts in one training iteration
    shuffle: bool = True  # a new order every epoch, derived from the seed


@dataclass
class RewardConfig:
    scorer: str = MISSING  # last_number | exact_match | contains | char_fraction | math_verify | reasoning_gym | a path
    params: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the scorer
    timeout_s: float = 10.0  # a scorer that takes longer is killed; the sample scores error_score and is counted
    processes: int = 1  # subprocesses that score side by side
    error_score: float = 0.0  # score of a sample whose scorer failed, timed out, or returned None
    memory_gib: float = 4.0  # address space that a scorer's process may take beyond its libraries; 0: no limit


@dataclass
class ClusterConfig:
    address: str | None = None  # Ray address; null: RAY_ADDRESS, else a running local cluster, else start one
    devices_per_node: int = 0  # CPU nodes: how many core sets a node is cut into (0: one); GPU nodes: 0 takes all GPUs
    nodes: int = 0  # nodes to wait for and use; 0: those that are there
    wait_s: float = 120.0  # how long to wait for nodes to join, and for their resources to be free, before failing
    start_timeout_s: float = 600.0  # a stage of the start (workers, models and data) that takes longer fails; 0: never
    stall_s: float = 300.0  # nothing has moved for so long: it is told who waits for what; 0: never
    stall_end_s: float = 600.0  # further seconds after which a run that stands still ends; 0: never
    offload_dir: str | None = None  # CPU: folder for the state of groups that leave a device; null: in memory
    gpus: str = "auto"  # auto (use GPUs where there are any) | never
    runtime_env: dict[str, Any] = field(default_factory=dict)  # passed to ray.init


@dataclass
class PlanConfig:
    kind: str = "auto"  # auto (measure stages, find the best) | collocated | disaggregated | hybrid; see docs/guide.md
    file: str | None = None  # a plan of your own (YAML, as every run writes one); null: the kind above
    objective: str = (
        "time"  # auto: time of an iteration | memory of a device | devices, the fewest that are fast enough
    )
    within: float = 0.05  # auto, with objective=devices: how much slower than the fastest plan they may be
    profile: str | None = None  # auto: a profile to plan with (python -m rlinf.profile); null: kept, else measured now
    force: bool = False  # auto: take plan.profile although it is of another model, config or hardware
    granularity: int = (
        0  # rows that stages on disjoint devices take at a time; 0: all at once (auto: whichever is best)
    )
    maker_devices: int = 0  # disaggregated, hybrid: devices that generate; 0: half of them
    swap: str = "auto"  # groups leave a device that they share between turns: auto (if memory asks) | always | never
    staleness: int = 0  # updates that the weights which make samples may be behind; 0: on-policy
    in_flight: bool = False  # with staleness: generation goes on with newer weights as soon as they are there
    budget_s: float = 120.0  # auto, and python -m rlinf.profile: how long measuring may take, beyond whole iterations
    replan: bool = True  # auto: plan again when stages take other times than was expected
    drift: float = 0.25  # a stage has drifted when its time is this part above or below what was expected


@dataclass
class VpsConfig:
    verify: bool = (
        False  # weight syncs carry digests, and readers check what they take over; costs a read of all weights
    )


@dataclass
class AlgorithmConfig:
    advantage: str = "gae"  # gae | grpo | import path of a function from this config to a map of your own
    gamma: float = 1.0  # discount (GAE)
    lam: float = 1.0  # lambda of GAE
    normalize: str = "batch"  # advantages whitened over: batch | none (GAE); group std division is grpo_std
    grpo_std: bool = True  # GRPO: divide by the group's standard deviation
    loss: str = "ppo_clip"  # policy loss: ppo_clip | import path of a function, e.g. my_module:my_loss
    clip_low: float = 0.2  # ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float = 0.2  # see clip_low
    dual_clip: float | None = None  # lower bound factor on the loss where the advantage is negative; null: off
    aggregation: str = "token_mean"  # token_mean | sequence_mean
    kl_coef: float = 0.0  # weight of the KL to the reference; 0 leaves the reference out of the workflow
    kl_in: str = "loss"  # loss | reward
    kl_estimator: str = "auto"  # auto (reward: k1, loss: k3) | k1 | k2 | k3; as a loss the gradient is the KL's own
    entropy_coef: float = 0.0  # weight of the entropy bonus
    value_clip: float = 0.2  # value loss clip around the old values; 0: off
    critic_warmup: int = 0  # training iterations at the start in which the critic alone learns, and the actor waits
    epochs: int = 1  # passes over a batch
    mini_batch_size: int = 0  # samples to one optimiser step; 0: the whole batch
    missing_eos_penalty: float = 0.0  # subtracted from the score of a response cut off by max_new_tokens


@dataclass
class OptimizerConfig:
    lr: float = 1e-5  # peak learning rate
    betas: tuple[float, float] = (0.9, 0.999)  # AdamW
    eps: float = 1e-8  # AdamW
    weight_decay: float = 0.0  # AdamW, decoupled
    schedule: str = "constant"  # constant | linear | cosine, after the warm-up
    warmup_steps: int = 0  # optimiser steps of linear warm-up
    min_lr_ratio: float = 0.0  # the schedule ends at lr times this
    total_steps: int = 0  # optimiser steps of the schedule; 0: those of the run (the actor's without critic_warmup)
    max_grad_norm: float = 1.0  # global norm clipping; 0: off


@dataclass
class ActorConfig:
    model: ModelConfig = MISSING  # ${model}
    algorithm: AlgorithmConfig = MISSING  # ${algorithm}
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    dp: int = 0  # data-parallel (FSDP2) ranks; 0: devices / tp
    tp: int = 1  # tensor-parallel ranks
    tokens_per_micro_batch: int = 2048  # packed tokens in one forward and backward pass
    temperature: float = 1.0  # ${rollout.temperature}
    parity_bound: float = 0.0  # ${rollout.parity_bound}
    verify_sync: bool = False  # ${vps.verify}


@dataclass
class CriticConfig:
    model: ModelConfig = MISSING  # ${model}
    algorithm: AlgorithmConfig = MISSING  # ${algorithm}
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    dp: int = 0  # as actor.dp
    tp: int = 1  # as actor.tp
    tokens_per_micro_batch: int = 2048  # as actor.tokens_per_micro_batch


@dataclass
class ReferenceConfig:
    model: ModelConfig = MISSING  # ${model}
    dp: int = 0  # as actor.dp
    tp: int = 1  # as actor.tp
    tokens_per_micro_batch: int = 4096  # as actor.tokens_per_micro_batch
    temperature: float = 1.0  # ${rollout.temperature}


@dataclass
class RolloutConfig:
    model: ModelConfig = MISSING  # ${model}
    engine: str = "vllm"  # vllm | hf
    dp: int = 0  # engine replicas; 0: devices / tp
    tp: int = 1  # tensor-parallel size of one engine
    samples_per_prompt: int = 8  # responses sampled for each prompt
    max_new_tokens: int = 32  # responses are cut off here, and marked truncated
    temperature: float = 1.0  # of training samples; log-probabilities are taken at the same temperature
    kv_cache_gib: float = 1.0  # memory of the KV cache of an engine on CPU
    gpu_memory_utilization: float = 0.5  # share of a GPU that an engine may take
    max_num_seqs: int = 64  # sequences that an engine runs side by side
    enforce_eager: bool = True  # false: compile (CPU) or capture graphs (GPU); slower to start, faster to run
    dtype: str = "auto"  # float32 | bfloat16 | auto (float32 on CPU, bfloat16 on GPU)
    parity_bound: float = 0.05  # mean |engine - trainer| log-probability per token above which the run fails; 0: off


@dataclass
class EvaluationConfig:
    before: bool = True  # evaluate before the first step; a resumed run keeps the score of its start
    after: bool = True  # evaluate after the last step
    every: int = 0  # evaluate every this many steps; 0: never in between
    temperature: float = 0.0  # 0: greedy


@dataclass
class CheckpointConfig:
    every: int = 5  # steps between checkpoints; 0: only at the end
    keep: int = 2  # newest checkpoints that are kept
    export: bool = True  # write the trained model as a Hugging Face directory at the end


@dataclass
class LoggerConfig:
    tensorboard: bool = True  # event files under <output_dir>/tensorboard
    wandb: dict[str, Any] | None = None  # arguments of wandb.init, e.g. {project: rlinf}; null: off
    mlflow: dict[str, Any] | None = None  # {tracking_uri, experiment}; null: off
    samples: int = 8  # sample transcripts written per step to <output_dir>/samples.jsonl
    console: str = "auto"  # auto (live view in a terminal, lines elsewhere) | live | lines | off


@dataclass
class TrainConfig:
    workflow: WorkflowConfig = field(default_factory=WorkflowConfig)
    model: ModelConfig = MISSING
    data: DataConfig = MISSING
    reward: RewardConfig = MISSING
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    vps: VpsConfig = field(default_factory=VpsConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    steps: int = 10  # training iterations
    seed: int = 0  # everything random derives from it
    deterministic: bool = True  # deterministic kernels: the same seed gives the same weights, bit for bit, on CPU
    output_root: str = "outputs"  # runs without output_dir get <output_root>/<workflow>-<model>/<time>
    output_dir: str | None = None  # where everything of this run goes
    resume: str = "never"  # never | auto (newest checkpoint of output_dir, or of the newest run of this name) | a path
    dry_run: bool = False  # print placement, batch sizes and memory, and start nothing (also --dry-run)
