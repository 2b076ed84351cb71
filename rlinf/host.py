"""Which processes can map one another's memory."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path


@cache
def this_host() -> str:
    """The same for all processes that can map one another's memory, and for no others.

    It is made of the machine's boot and the namespace of process ids: containers on one machine may have one each.
    """
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{os.readlink('/proc/self/ns/pid')}"
