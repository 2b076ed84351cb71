"""Rewards: what a response is worth.

Read in this order:

- `rlinf.rewards.scorers`: the signature that every scorer keeps, the registry, and the scorers on text;
- `rlinf.rewards.verifiers`: the scorers that rest on math-verify and reasoning-gym;
- `rlinf.rewards.server`: the subprocess that runs a scorer;
- `rlinf.rewards.pool`: `ScorerPool`, which keeps such subprocesses, kills the late ones and counts what went wrong.
"""

from rlinf.rewards.pool import Sample, Scored, ScorerPool
from rlinf.rewards.scorers import SCORERS, BuiltIn, Scorer, check, load_scorer

__all__ = ["SCORERS", "BuiltIn", "Sample", "Scored", "Scorer", "ScorerPool", "check", "load_scorer"]
