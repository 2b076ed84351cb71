"""How new weights reach vLLM's workers: a backend for vLLM's own weight-transfer extension point.

vLLM repacks weights for its kernels when it loads them, so that they cannot be copied in place. Its layer-wise reload
puts each layer back into the shape of the checkpoint, lets the model's own loader fill it, and repacks it into the
old storage; a layer is finished as soon as its last tensor came, so that no second copy of the model exists.

The backend is registered in each of vLLM's processes by importing `rlinf.generation.weight_receiver`, which holds the
worker extension that vLLM is told to load. That works from a checkout too, where no entry point is installed.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlinf.generation.engine import Chunk

BACKEND = "rlinf"
EXTENSION = "rlinf.generation.weight_receiver.WorkerExtension"


@contextmanager
def shared_file(chunk: Chunk) -> Iterator[Path]:
    """The chunk as a safetensors file that processes of this host can read; it is gone at the end, failure or not.

    It lies in shared memory where there is some (``/dev/shm``), else in the directory for temporary files.
    """
    from safetensors.torch import save_file

    directory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    handle, name = tempfile.mkstemp(prefix="rlinf-weights-", suffix=".safetensors", dir=directory)
    os.close(handle)
    path = Path(name)
    try:
        # Of tied tensors each is written by itself: a file holds no aliases.
        save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in chunk}, path)
        yield path
    finally:
        path.unlink(missing_ok=True)
