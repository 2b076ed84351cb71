"""Advantages, losses, KL and the learning-rate schedule: pure functions on flat ragged tensors.

A flat ragged tensor holds the tokens of ``n`` responses end to end, ``[T]``, beside their ``lengths`` (``[n]``, sum
``T``). Nothing is padded, so there is no mask to get wrong.

Read in this order:

- `advantages`: `gae_advantages`, `grpo_advantages`, `whiten`; then `gae` and `grpo`, the maps a workflow uses.
- `losses`: `policy_loss` (and `ppo_clip`, the form of a loss of your own); `value`: `value_loss`.
- `kl`: why an estimator's value and its gradient are two things.
- `schedule`: `lr_factor`.
- `segments`, `registry`: sums within rows; names in the config that stand for functions.
"""
