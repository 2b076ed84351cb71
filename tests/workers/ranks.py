"""Actors in two or four processes over Gloo: what each test then looks at is written to files by rank 0."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from rlinf.batch import Batch, Ragged
from rlinf.config import ActorConfig, AlgorithmConfig, CriticConfig, ModelConfig, OptimizerConfig
from rlinf.errors import RlinfError
from rlinf.worker import RankContext
from rlinf.workers.actor import Actor
from rlinf.workers.critic import Critic
from tests.models.small import samples
from tests.vps.reading import read

PROMPTS = [5, 3, 8, 2, 6, 1, 4]
RESPONSES = [4, 6, 0, 3, 9, 5, 1]
ITERATIONS = 2
OPTIMIZER = OptimizerConfig(lr=0.01, weight_decay=0.01, max_grad_norm=0.5)
ALGORITHM = AlgorithmConfig(
    kl_coef=0.1, kl_estimator="k2", entropy_coef=0.01, mini_batch_size=3, epochs=2, value_clip=0.2
)


def actor(directory: Path, ctx: RankContext, budget: int = 24, parity_bound: float = 0.0, **algorithm) -> Actor:
    settings = AlgorithmConfig(**{**vars(ALGORITHM), **algorithm})
    model = ModelConfig(name="small", path=str(directory))
    made = Actor(
        ActorConfig(
            model=model,
            algorithm=settings,
            optimizer=OPTIMIZER,
            tokens_per_micro_batch=budget,
            parity_bound=parity_bound,
        ),
        ctx,
    )
    made.setup()
    return made


def critic(directory: Path, ctx: RankContext) -> Critic:
    model = ModelConfig(name="small", path=str(directory))
    settings = AlgorithmConfig(**vars(ALGORITHM))  # its own, for a test may change it
    made = Critic(CriticConfig(model=model, algorithm=settings, optimizer=OPTIMIZER, tokens_per_micro_batch=24), ctx)
    made.setup()
    return made


def whole_batch() -> Batch:
    """Seven samples; the second, the fourth and the fifth are answers to one prompt."""
    batch = samples(PROMPTS, RESPONSES)
    prompts = batch["prompt_ids"].rows()
    return batch.plus(prompt_ids=Ragged.of([prompts[1] if i in (1, 3, 4) else row for i, row in enumerate(prompts)]))


def batch_of(ctx: RankContext) -> Batch:
    """This rank's rows: dealt unevenly over dp (the first two to the last rank, the others to the first)."""
    whole = whole_batch()
    if ctx.dp == 1:
        return whole
    return whole.select([2, 3, 4, 5, 6] if ctx.dp_rank == 0 else [0, 1])


def outcome(worker: Actor | Critic, batch) -> dict:
    """Train, and gather everything that should not depend on the layout."""
    for _ in range(ITERATIONS):
        worker.train(batch)
    full = {
        name: (t.full_tensor() if hasattr(t, "full_tensor") else t).clone()
        for name, t in worker.state()["model"].items()
    }
    return {"weights": full, "metrics": worker.metrics.take()}


def run_rank(rank: int, world: int, work: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{work}/rendezvous", rank=rank, world_size=world)
    try:
        results = _cases(rank, work) if world == 2 else _both_ways(rank, work)
        everyone: list = [None] * world
        dist.all_gather_object(everyone, results)
        if rank == 0:
            torch.save(everyone, work / "results.pt")
    except BaseException:
        (work / f"error-{rank}").write_text(traceback.format_exc())
        raise
    finally:
        dist.destroy_process_group()


def _cases(rank: int, work: Path) -> dict:
    found: dict = {}
    contexts = {"dp2": RankContext(rank=rank, world_size=2, dp=2), "tp2": RankContext(rank=rank, world_size=2, tp=2)}
    for layout, ctx in contexts.items():
        for model in ("llama", "llama-tied", "qwen3"):
            worker = actor(work / model, ctx)
            found[layout, model] = outcome(worker, batch_of(ctx))
            found[layout, model]["sent"] = sent(worker)
            published = worker.publish_weights("reader", inline=False)
            found[layout, model]["bytes"] = int(published.layout.pieces.size.prod(axis=1).sum()) * 4
            found[layout, model]["memory"] = published.handle
        worker.export(work / f"export-{layout}")  # the last one: qwen3
        found[layout, "critic"] = outcome(critic(work / "llama", ctx), batch_of(ctx))
        found[layout, "nbytes"] = worker.nbytes()

    saver = actor(work / "llama", contexts["dp2"])
    saver.train(batch_of(contexts["dp2"]))
    dcp.save(saver.state(), checkpoint_id=work / "checkpoint-dp2")
    loader = actor(work / "llama", contexts["tp2"])
    tree = loader.state()
    dcp.load(tree, checkpoint_id=work / "checkpoint-dp2")
    loader.load_state(tree)
    found["resumed"] = outcome_after(loader, batch_of(contexts["tp2"]))
    found["uninterrupted"] = outcome_after(saver, batch_of(contexts["dp2"]))

    scorer = actor(work / "llama", contexts["dp2"])
    mine = batch_of(contexts["dp2"])
    found["logprobs"] = (mine["row_id"], scorer.logprobs(mine if rank == 0 else mine.select([]))["old_logprobs"])
    one_sided = mine if rank == 0 else Batch({})  # a rank that got nothing
    scorer.train(one_sided)
    found["one-sided"] = {n: t.full_tensor() for n, t in scorer.state()["model"].items()}

    strict = actor(work / "llama", contexts["dp2"], parity_bound=1e-3)
    try:
        strict.train(mine)
    except RlinfError as error:
        found["parity"] = str(error)
    return found


def _both_ways(rank: int, work: Path) -> dict:
    """Data-parallel and tensor-parallel at once, on four ranks; and a checkpoint that two ranks wrote."""
    ctx = RankContext(rank=rank, world_size=4, dp=2, tp=2)
    found: dict = {model: outcome(actor(work / model, ctx), batch_of(ctx)) for model in ("llama-tied", "qwen3")}
    found["critic"] = outcome(critic(work / "llama", ctx), batch_of(ctx))
    loader = actor(work / "llama", ctx)
    tree = loader.state()
    dcp.load(tree, checkpoint_id=work / "checkpoint-dp2")
    loader.load_state(tree)
    found["resumed"] = outcome_after(loader, batch_of(ctx))
    return found


def outcome_after(worker: Actor, batch) -> dict:
    worker.train(batch)
    return sent(worker)


def sent(worker: Actor) -> dict[str, torch.Tensor]:
    """What a reader makes of that which all ranks publish. A collective."""
    found = read(worker.ranks.gather(worker.publish_weights("reader", inline=False)))
    worker.ranks.gather(None)  # nobody goes on, and ends, while another reads its memory
    return found
