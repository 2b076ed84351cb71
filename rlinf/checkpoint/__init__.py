"""Checkpoints that survive a crash at any moment, and that other world sizes can read.

Read in this order:

- `tree`: a state (nested dicts) as a flat table of tensors and one of plain values;
- `state`: `save_state` and `load_state`, called by all ranks of a worker group: torch's distributed checkpoint for
  tensors, JSON for plain values;
- `planner`: who reads which box of what was saved, by the layouts of `rlinf.vps`;
- `durable`: fsync of a tree, and file errors as `CheckpointError`;
- `store`: `Checkpoints`, the driver's side: written aside, committed, found again, pruned;
- `lock`: one run to an output directory.

On disk: ``<output_dir>/checkpoints/step-000012/`` holds a folder for each worker group, ``meta.json`` and, written
last, ``COMMITTED``. A checkpoint's ``.metadata`` files are pickles of torch's: resume only from what you trust.
"""

from rlinf.checkpoint.lock import OutputLock, writable
from rlinf.checkpoint.state import load_state, save_state
from rlinf.checkpoint.store import FORMAT, Checkpoints, Identity, Meta

__all__ = ["FORMAT", "Checkpoints", "Identity", "Meta", "OutputLock", "load_state", "save_state", "writable"]
