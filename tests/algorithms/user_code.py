"""A loss and an advantage of a user's own, as the config names them by import path."""

import torch

from rlinf.batch import Batch
from rlinf.m2flow.stage import stage


def reinforce(inputs, cfg):
    return -inputs.advantages * inputs.logprobs, {"surprise": -inputs.logprobs}


def misshapen(inputs, cfg):
    return inputs.logprobs.mean(), {}


def constant_advantage(cfg):
    @stage(reads=("response_ids",), writes=("advantages",))
    def ones(batch, metrics):
        ids = batch["response_ids"]
        return Batch({"advantages": ids.with_values(torch.ones(ids.values.shape[0]))})

    return ones


def not_a_map(cfg):
    return lambda batch, metrics: batch
