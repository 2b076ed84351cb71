"""What a person sees of a run: start-up in timed stages, then a live view in a terminal, or a line a step in a log.

Read in this order:

- `columns`: which values are shown, under which name, and how;
- `base`: `Console`, its stages, its notion of time left; and `SilentConsole`;
- `lines`: plain aligned lines;
- `live`: rich's live view (`frame` draws it from plain data).
"""

from __future__ import annotations

import os
import sys

from rlinf.config import LoggerConfig
from rlinf.console.base import Console, SilentConsole, Stage
from rlinf.console.lines import LineConsole
from rlinf.errors import ConfigError

MODES = ("auto", "live", "lines", "off")

__all__ = ["MODES", "Console", "LineConsole", "SilentConsole", "Stage", "check", "open_console"]


def check(cfg: LoggerConfig) -> None:
    """Raises `ConfigError` where ``logger.console`` asks for one that is not."""
    if cfg.console not in MODES:
        raise ConfigError(f"logger.console is {cfg.console!r}; it is one of {', '.join(MODES)}")


def open_console(cfg: LoggerConfig) -> Console:
    """The console that ``logger.console`` asks for.

    Raises:
        ConfigError: it asks for one that is not.
    """
    check(cfg)
    terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    if cfg.console == "live" or (cfg.console == "auto" and terminal):
        from rlinf.console.live import LiveConsole

        return LiveConsole()
    return SilentConsole() if cfg.console == "off" else LineConsole()
