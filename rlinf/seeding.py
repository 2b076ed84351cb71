"""Seeds that do not depend on which rank does the work, nor on the order in which it is done."""

from __future__ import annotations

import hashlib


def derive(seed: int, *path: int | str) -> int:
    """A seed in ``[0, 2**63)`` for one use of randomness, e.g. ``derive(seed, "sample", row_id)``."""
    text = "/".join(str(part) for part in (seed, *path))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
