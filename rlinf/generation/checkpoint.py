"""What a model directory holds, for weights that take its place."""

from __future__ import annotations

import json
from pathlib import Path

from rlinf.vps.space import LayoutError, Space, few

HEAD = "lm_head.weight"


def checkpoint_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor in a model directory, from the headers of its safetensors files."""
    from safetensors import safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                shapes[name] = tuple(tensors.get_slice(name).get_shape())
    return shapes


def check_checkpoint(space: Space, directory: Path) -> list[str]:
    """Make sure that tensors are called, and shaped, as those of a model directory.

    Returns:
        Names that the directory has and the space lacks. A head that shares the embedding's weights is none of them.

    Raises:
        LayoutError: a tensor is unknown to the directory, or has another shape there.
    """
    shapes = checkpoint_shapes(directory)
    if unknown := [tensor.name for tensor in space.tensors if tensor.name not in shapes]:
        raise LayoutError(
            f"the source publishes {few(unknown)}, which the model in {directory} does not have (its names look like "
            f"{few(sorted(shapes))}); sender and engine must be of the same model"
        )
    for tensor in space.tensors:
        if tensor.shape != shapes[tensor.name]:
            raise LayoutError(
                f"the source publishes {tensor.name} in shape {tensor.shape}; the model in {directory} has "
                f"{shapes[tensor.name]}"
            )
    tied = json.loads((directory / "config.json").read_text()).get("tie_word_embeddings", False)
    return sorted(shapes.keys() - space.index.keys() - ({HEAD} if tied else set()))
