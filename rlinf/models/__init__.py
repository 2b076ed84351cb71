"""Models: where they come from, what they are, how they are spread over ranks, and how they are run on samples.

In reading order:

- `source`: `resolve` turns the model config into an ordinary Hugging Face directory; `load_tokenizer`.
  `smollm2` and `tiny` are the models that are made here, `cache` keeps them.
- `info`: `describe` reads a directory's sizes without loading weights.
"""

from rlinf.models.info import ModelInfo, describe
from rlinf.models.source import check_directory, load_tokenizer, resolve

__all__ = ["ModelInfo", "check_directory", "describe", "load_tokenizer", "resolve"]
