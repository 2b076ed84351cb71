"""GPUs of one host: a rank tells the others where its tensors lie, and these copy from there, GPU to GPU.

Never run so far: no machine with GPUs was at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Told = list[tuple[Callable[..., torch.Tensor], tuple[Any, ...]]]


def opened(tensors: Sequence[torch.Tensor]) -> Told:
    """What another process of this host needs to see the tensors. They must live until it is done.

    The memory is what PyTorch's caching allocator holds (CUDA IPC handles of its blocks; not of expandable segments).
    """
    from torch.multiprocessing.reductions import reduce_tensor

    if tensors:
        torch.cuda.synchronize(tensors[0].device)  # others read on streams of their own
    return [reduce_tensor(tensor.detach()) for tensor in tensors]


def attach(told: Told, device: str) -> list[torch.Tensor]:
    """The tensors of another process; not to be written to. They are on that process' GPU."""
    torch.cuda.init()
    with torch.cuda.device(device):
        return [rebuild(*args) for rebuild, args in told]
