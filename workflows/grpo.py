"""GRPO: advantages relative to the other samples of a prompt, no critic (Shao et al., 2024, arXiv:2402.03300)."""

from rlinf.algorithms.advantages import advantage_map
from rlinf.config import TrainConfig
from rlinf.data import Prompts
from rlinf.m2flow.graph import Workflow
from rlinf.transcripts import transcripts
from rlinf.workers.actor import Actor
from rlinf.workers.reference import Reference
from rlinf.workers.reward import Reward
from rlinf.workers.rollout import Rollout


def grpo(cfg: TrainConfig) -> Workflow:
    flow = Workflow("grpo")
    rollout, reward = flow.worker(Rollout, cfg.rollout), flow.worker(Reward, cfg.reward)
    actor = flow.worker(Actor, cfg.actor)

    samples = reward.score(rollout.generate(flow.source(Prompts(cfg.data, cfg.model, "train", cfg.seed))))
    if cfg.algorithm.kl_coef > 0:
        samples = flow.worker(Reference, cfg.reference).logprobs(samples)
    actor.train(flow.map(advantage_map(cfg.algorithm), samples))
    flow.map(transcripts(cfg.logger.samples), samples)
    flow.sync(actor, rollout)

    held_out = flow.source(Prompts(cfg.data, cfg.model, "validation", cfg.seed))
    flow.evaluate(reward.score(rollout.generate(held_out, temperature=cfg.evaluation.temperature, samples=1)))
    return flow
