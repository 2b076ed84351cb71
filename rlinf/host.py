"""Which processes can map one another's memory."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path


@cache
def this_host() -> str:
    """The same for all processes that can map one another's memory, and for no others.

    It is made of the machine's boot and the namespace of process ids: containers on one machine may have one each.
    Processes whose environment variable ``RLINF_HOST`` is another are kept apart too; it must be set before the first
    call.
    """
    if given := os.environ.get("RLINF_HOST"):
        return given
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{os.readlink('/proc/self/ns/pid')}"
