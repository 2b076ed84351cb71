"""Training: from a loss over micro-batches to an optimiser step that does not depend on how the batch was cut.

In reading order:

- `minibatch`: which samples go to which optimiser step (pure; independent of the number of ranks).
- `collective`: the few things that ranks tell one another.
- `trainer`: `Trainer`, a model with its optimiser; `Trainer.step` runs one optimiser step.
- `grad_norm`: the global norm over plain tensors and DTensors.
- `state`: what a checkpoint keeps, by parameter name.
- `weights`: full tensors, to send to an engine or to write as a model directory.
"""

from rlinf.training.collective import Ranks
from rlinf.training.grad_norm import clip_gradients, global_grad_norm
from rlinf.training.minibatch import minibatches
from rlinf.training.state import load_training_state, training_state
from rlinf.training.trainer import StepReport, Trainer
from rlinf.training.weights import check_names, export, full_weights

__all__ = [
    "Ranks",
    "StepReport",
    "Trainer",
    "check_names",
    "clip_gradients",
    "export",
    "full_weights",
    "global_grad_norm",
    "load_training_state",
    "minibatches",
    "training_state",
]
