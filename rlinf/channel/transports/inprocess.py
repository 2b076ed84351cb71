"""Within a process: the value itself goes from hand to hand. Nothing is copied; who changes it changes it for both."""

from __future__ import annotations

import weakref
from typing import Any

# Members of this process, by their broker's name and their serial.
_here: weakref.WeakValueDictionary[tuple[str, int], Any] = weakref.WeakValueDictionary()


def register(broker: str, serial: int, member: Any) -> None:
    _here[broker, serial] = member


def find(broker: str, serial: int) -> Any:
    """The member of this process with that serial, or ``None``."""
    return _here.get((broker, serial))
