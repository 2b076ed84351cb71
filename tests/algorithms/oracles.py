"""Independent implementations, token by token in plain Python and numpy, that the tests hold the room against."""

from __future__ import annotations

import math

import numpy as np


def gae(rewards: list[float], values: list[float], gamma: float, lam: float, last: float = 0.0) -> list[float]:
    """O(T^2): the definition, written out for one row."""
    after = [*values[1:], last][: len(values)]
    deltas = [r + gamma * b - v for r, v, b in zip(rewards, values, after, strict=True)]
    return [math.fsum((gamma * lam) ** k * deltas[t + k] for k in range(len(deltas) - t)) for t in range(len(deltas))]


def grpo(rewards: list[float], groups: list[int], std: bool) -> list[float]:
    found = []
    for reward, group in zip(rewards, groups, strict=True):
        mates = np.array([r for r, g in zip(rewards, groups, strict=True) if g == group])
        if len(set(mates.tolist())) == 1:
            found.append(0.0)
        else:
            found.append((reward - mates.mean()) / (mates.std(ddof=1) + 1e-6 if std else 1.0))
    return found


def ppo_total(rows: list[dict[str, list[float]]], cfg) -> tuple[float, float]:
    """Sum and denominator of the policy loss; each row holds lp, old, adv, ent, ref."""
    total, denominator = 0.0, 0.0
    for row in rows:
        losses = []
        for lp, old, adv, ent, ref in zip(row["lp"], row["old"], row["adv"], row["ent"], row["ref"], strict=True):
            ratio = math.exp(lp - old)
            held = min(max(ratio, 1 - cfg.clip_low), 1 + cfg.clip_high)
            objective = min(ratio * adv, held * adv)
            if cfg.dual_clip is not None and adv < 0:
                objective = max(objective, cfg.dual_clip * adv)
            d = lp - ref
            kl = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[cfg.kl_estimator]
            losses.append(-objective + cfg.kl_coef * kl - cfg.entropy_coef * ent)
        if cfg.aggregation == "token_mean":
            total += math.fsum(losses)
            denominator += len(losses)
        elif losses:
            total += math.fsum(losses) / len(losses)
            denominator += 1
    return total, denominator
