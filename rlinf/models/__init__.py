"""Models: where they come from, what they are, how they are spread over ranks, and how they are run on samples.

In reading order:

- `source`: `resolve` turns the model config into an ordinary Hugging Face directory; `load_tokenizer`.
  `smollm2` and `tiny` are the models that are made here, `cache` keeps them.
- `info`: `describe` reads a directory's sizes without loading weights.
- `packed`: samples as one row of tokens without padding, and how rows are cut into micro-batches.
- `attention`: attention over packed samples, with prompts shared between the samples of a group.
- `heads`: `PolicyModel` gives log-probabilities and entropies of response tokens, `ValueModel` their values.
- `parallelize`: tensor parallelism by the model's own plan, FSDP2; `load` puts it all together.
"""

from rlinf.models.info import ModelInfo, describe
from rlinf.models.source import check_directory, load_tokenizer, resolve

__all__ = ["ModelInfo", "check_directory", "describe", "load_tokenizer", "resolve"]
