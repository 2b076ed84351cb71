"""Names and shapes of a model's weights, and the check that a delivery holds each of them exactly once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from rlinf.errors import ModelError
from rlinf.generation.engine import Chunk

SHOWN = 5


def checkpoint_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor in a model directory, from the headers of its safetensors files."""
    from safetensors import safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                shapes[name] = tuple(tensors.get_slice(name).get_shape())
    return shapes


class Manifest:
    """What a full delivery of a model's weights must hold.

    Args:
        shapes: by Hugging Face name.
        optional: names that may be delivered or left out, such as a head that shares the embedding's weights.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], optional: Iterable[str] = ()) -> None:
        self.optional = frozenset(optional)
        self.shapes = dict(shapes)

    def check(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        """Hand the chunks through; the end is reached only if each tensor came once and in its shape.

        Raises:
            ModelError: names the tensor that is unknown, repeated, of another shape, or missing.
        """
        seen: set[str] = set()
        for chunk in chunks:
            for name, tensor in chunk:
                self._check_one(name, tuple(tensor.shape), seen)
                seen.add(name)
            yield chunk
        missing = sorted(self.shapes.keys() - seen - self.optional)
        if missing:
            raise ModelError(
                f"weight sync delivered {len(seen)} tensors and left out {len(missing)} that the engine's model has: "
                f"{_few(missing)}; the sender must deliver every parameter under its Hugging Face name"
            )

    def _check_one(self, name: str, shape: tuple[int, ...], seen: set[str]) -> None:
        if name in seen:
            raise ModelError(f"weight sync delivered {name!r} twice; every parameter comes once")
        expected = self.shapes.get(name)
        if expected is None and name not in self.optional:
            raise ModelError(
                f"weight sync delivered {name!r}, which the engine's model does not have "
                f"(its names look like {_few(sorted(self.shapes))}); sender and engine must be of the same model"
            )
        if expected is not None and shape != expected:
            raise ModelError(f"weight sync delivered {name!r} in shape {shape}; the engine's model has {expected}")


def _few(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
