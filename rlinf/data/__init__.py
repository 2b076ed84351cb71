"""Data: from a file, a task generator or a user's function to tokenised prompts.

Read in this order:

- `rlinf.data.row`: `Row` (question, answer, metadata), and how a mapping of columns becomes one or is refused;
- `rlinf.data.sources`: the registry of sources, a user's function among them; `rlinf.data.files` (JSONL, parquet,
  Hugging Face) and `rlinf.data.tasks` (arithmetic, reasoning-gym) fill it;
- `rlinf.data.splits`: train and validation without a question in common;
- `rlinf.data.template`: the one way from a question to prompt tokens;
- `rlinf.data.prompts`: `Prompts`, the endless, resumable stream that a workflow starts from;
- `rlinf.data.checks`: `check`, what can be said about a `DataConfig` before any model is loaded.
"""

from rlinf.data.checks import check
from rlinf.data.prompts import VALIDATION_ROWS, Prompts
from rlinf.data.report import DataReport
from rlinf.data.row import Row
from rlinf.data.sources import SOURCES, Source

__all__ = ["SOURCES", "VALIDATION_ROWS", "DataReport", "Prompts", "Row", "Source", "check"]
