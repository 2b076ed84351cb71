"""Models ready to compute: loaded from a directory, put on the rank's device, spread over its mesh."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rlinf.config import ModelConfig
from rlinf.errors import ConfigError, ModelError
from rlinf.models import attention
from rlinf.models.heads import PolicyModel, ValueModel, check_output_logits
from rlinf.models.info import describe
from rlinf.models.parallelize import check_tp, parallelize
from rlinf.models.quiet import quiet

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def compute_dtype(cfg: ModelConfig, device: str) -> torch.dtype:
    """The dtype of matrix products. ``auto`` is float32 on CPU and bfloat16 elsewhere.

    Raises:
        ConfigError: unknown dtype.
    """
    name = cfg.dtype
    if name == "auto":
        return torch.float32 if device.startswith("cpu") else torch.bfloat16
    if name not in ("float32", "bfloat16"):
        raise ConfigError(f"model.dtype={name!r}; use float32, bfloat16 or auto")
    return getattr(torch, name)


def attention_kind(cfg: ModelConfig, device: str, config: Any) -> str:
    """The attention implementation.

    ``auto``: flash_attention_2 where it is installed and the compute dtype is bfloat16; else our own, which lets the
    samples of a prompt share it; else, for a model whose attention is of a kind that it does not know, sdpa.
    """
    if cfg.attention != "auto":
        return cfg.attention
    from transformers.utils import is_flash_attn_2_available

    half = compute_dtype(cfg, device) is torch.bfloat16
    if device.startswith("cuda") and half and is_flash_attn_2_available():
        return "flash_attention_2"
    return attention.NAME if attention.supports(config) else "sdpa"


def autocast(cfg: ModelConfig, device: str, sharded: bool) -> AbstractContextManager[Any]:
    """The context of a forward pass: FSDP casts by itself, a model that is not sharded needs autocast."""
    dtype = compute_dtype(cfg, device)
    if sharded or dtype is torch.float32:
        return nullcontext()
    return torch.autocast(device.split(":")[0], dtype=dtype)


def load_policy(
    directory: Path, cfg: ModelConfig, device: str, mesh: DeviceMesh | None, *, trainable: bool = True
) -> PolicyModel:
    """A causal language model that scores responses.

    Trainable weights are held in float32 whatever the compute dtype; frozen ones in the compute dtype.

    Raises:
        ModelError: it cannot be loaded, or cannot be spread over the mesh.
    """
    from transformers import AutoModelForCausalLM

    lm = _load(AutoModelForCausalLM, directory, cfg, device, mesh, trainable)
    check_output_logits(lm)
    model = PolicyModel(lm)
    return _spread(model, lm.base_model, cfg, device, mesh, trainable)


def load_value(directory: Path, cfg: ModelConfig, device: str, mesh: DeviceMesh | None) -> ValueModel:
    """A backbone with a zero-initialised scalar head; float32 weights.

    Raises:
        ModelError: it cannot be loaded, or cannot be spread over the mesh.
    """
    from transformers import AutoModel

    backbone = _load(AutoModel, directory, cfg, device, mesh, trainable=True)
    return _spread(ValueModel(backbone), backbone, cfg, device, mesh, trainable=True)


def _load(kind: Any, directory: Path, cfg: ModelConfig, device: str, mesh: DeviceMesh | None, trainable: bool) -> Any:
    if mesh is not None:
        check_tp(describe(directory, cfg), mesh["tp"].size())
    from transformers import AutoConfig

    attention.register()
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=cfg.trust_remote_code)
        with quiet():
            lm = kind.from_pretrained(
                directory,
                dtype=torch.float32 if trainable else compute_dtype(cfg, device),
                attn_implementation=attention_kind(cfg, device, config),
                trust_remote_code=cfg.trust_remote_code,
            )
    except (OSError, ValueError, ImportError) as error:
        raise ModelError(f"cannot load the model in {directory}: {error}") from error
    # Dropout would make log-probabilities of the same weights differ; policies are trained without it.
    lm.eval()
    return lm


def _spread(model: Any, backbone: Any, cfg: ModelConfig, device: str, mesh: DeviceMesh | None, trainable: bool) -> Any:
    model.requires_grad_(trainable)
    if cfg.gradient_checkpointing and trainable:
        backbone.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        backbone.train()  # transformers checkpoints in training mode only
        for module in backbone.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.0  # type: ignore[assignment]
    model.to(device)
    return parallelize(model, mesh, compute_dtype(cfg, device), backbone=backbone)
