"""check: what can be said about a `DataConfig` before any model is loaded."""

from __future__ import annotations

from rlinf.config import DataConfig
from rlinf.data.sources import source_of
from rlinf.data.template import PLACEHOLDER
from rlinf.errors import DataError

CHAT_TEMPLATES = ("auto", "plain")


def check(cfg: DataConfig) -> None:
    """Find a wrong value, an unknown kind or task, a missing file, an empty file, a missing column.

    Reads the first row of a file at most.

    Raises:
        DataError: names the key or the file, what was found and what was expected.
    """
    for key, least in (("prompts_per_step", 1), ("max_prompt_tokens", 1), ("train_size", 0), ("validation_size", 0)):
        if getattr(cfg, key) < least:
            raise DataError(f"data.{key}={getattr(cfg, key)}; expected at least {least}")
    if PLACEHOLDER not in cfg.template:
        raise DataError(f"data.template={cfg.template!r} has no {PLACEHOLDER}; every prompt would be the same text")
    if cfg.chat_template not in CHAT_TEMPLATES:
        raise DataError(f"data.chat_template={cfg.chat_template!r}; expected one of {', '.join(CHAT_TEMPLATES)}")
    source_of(cfg).check(cfg)
