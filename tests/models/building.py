"""A slow builder of a model directory, for processes that must start fast: imports neither torch nor transformers."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from rlinf.models.cache import build_once


def build(directory: Path) -> None:
    with (Path(os.environ["XDG_CACHE_HOME"]) / "builders").open("a") as log:
        log.write(f"{os.getpid()}\n")
    (directory / "config.json").write_text("{")
    time.sleep(0.3)  # long enough for the other process to look
    (directory / "config.json").write_text("{}")


if __name__ == "__main__":
    target = build_once("m-1", build)
    sys.exit((target / "config.json").read_text() != "{}")
