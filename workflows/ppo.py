"""PPO with a critic (Schulman et al., 2017, arXiv:1707.06347), as used for language models (arXiv:2203.02155)."""

from rlinf.algorithms.advantages import advantage_map
from rlinf.config import TrainConfig
from rlinf.data import Prompts
from rlinf.m2flow.graph import Workflow
from rlinf.transcripts import transcripts
from rlinf.workers.actor import Actor
from rlinf.workers.critic import Critic
from rlinf.workers.reference import Reference
from rlinf.workers.reward import Reward
from rlinf.workers.rollout import Rollout


def ppo(cfg: TrainConfig) -> Workflow:
    flow = Workflow("ppo")
    rollout, reward = flow.worker(Rollout, cfg.rollout), flow.worker(Reward, cfg.reward)
    actor, critic = flow.worker(Actor, cfg.actor), flow.worker(Critic, cfg.critic)

    samples = rollout.generate(flow.source(Prompts(cfg.data, cfg.model, "train", cfg.seed)))
    samples = reward.score(samples)
    if cfg.algorithm.kl_coef > 0:
        samples = flow.worker(Reference, cfg.reference).logprobs(samples)
    samples = critic.values(samples)
    batch = flow.map(advantage_map(cfg.algorithm), samples)  # GAE
    actor.train(batch)
    critic.train(batch)
    flow.map(transcripts(cfg.logger.samples), samples)
    flow.sync(actor, rollout)

    held_out = flow.source(Prompts(cfg.data, cfg.model, "validation", cfg.seed))
    flow.evaluate(reward.score(rollout.generate(held_out, temperature=cfg.evaluation.temperature, samples=1)))
    return flow
