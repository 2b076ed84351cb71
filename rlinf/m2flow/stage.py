"""What a worker's method declares about itself, so that the platform knows when and how it may run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar, Union

F = TypeVar("F", bound=Callable[..., Any])
Fields = Union[Sequence[str], Callable[[Any], Sequence[str]]]
Count = Union[int, Callable[[Any], int]]
Expands = Union[bool, Callable[[Any, Mapping[str, Any]], int]]


class Unit(StrEnum):
    """The smallest piece of a stream that a stage can work on without changing its result."""

    SEQUENCE = "sequence"
    GROUP = "group"  # all samples of one prompt
    TRAJECTORY = "trajectory"
    MINIBATCH = "minibatch"


@dataclass(frozen=True)
class StageSpec:
    """The declaration of a stage.

    Attributes:
        name: the method's name.
        reads: fields that it needs; may be a function of the worker's config.
        optional: fields that it uses where some earlier stage writes them.
        writes: fields that it adds; may be a function of the worker's config.
        unit: what may not be cut.
        whole: it must see all rows of an iteration at once.
        updates: it changes the worker's state (a training step).
        expands: its rows are new ones (n samples for each prompt). It returns them with a field ``parent`` (int64,
            the position of the input row), and other fields of the input are carried over to them. A function of the
            worker's config and the call's options says how many each input row becomes: then sample ``j`` of the row
            ``p`` of ``n`` must have the row id ``p * n + j`` and the group id ``p``, and stages behind it can start
            before all rows are there.
        streams: it is called once an iteration, with a `Batch` or an iterator of batches (the rows in the order of
            their ids), and works on what is there while the rest is being made.
        starts: training iterations that pass before its first one, while other stages run; may be a function of the
            worker's config. For stages that update and write no field.
    """

    name: str
    reads: Fields
    optional: tuple[str, ...] = ()
    writes: Fields = ()
    unit: Unit = Unit.SEQUENCE
    whole: bool = False
    updates: bool = False
    expands: Expands = False
    starts: Count = 0
    streams: bool = False

    def reads_for(self, cfg: Any) -> tuple[str, ...]:
        return tuple(self.reads(cfg) if callable(self.reads) else self.reads)

    def writes_for(self, cfg: Any) -> tuple[str, ...]:
        return tuple(self.writes(cfg) if callable(self.writes) else self.writes)

    def samples_for(self, cfg: Any, options: Mapping[str, Any]) -> int | None:
        """Rows that an input row becomes; ``None`` where only the stage itself knows."""
        if callable(self.expands):
            return self.expands(cfg, options)
        return None if self.expands else 1

    def starts_for(self, cfg: Any) -> int:
        return self.starts(cfg) if callable(self.starts) else self.starts


def stage(
    *,
    reads: Fields,
    optional: Sequence[str] = (),
    writes: Fields = (),
    unit: Unit = Unit.SEQUENCE,
    whole: bool = False,
    updates: bool = False,
    expands: Expands = False,
    starts: Count = 0,
    streams: bool = False,
) -> Callable[[F], F]:
    """Declare a `Worker` method as a stage; see `StageSpec` for the arguments.

    The method takes a `Batch` with the fields it reads (and keyword options given where the workflow calls it) and
    returns a `Batch` with the fields it writes, row for row, or ``None`` if it writes nothing. A generator may yield
    several such batches as they become ready.
    """

    def declare(method: F) -> F:
        spec = StageSpec(
            method.__name__, reads, tuple(optional), writes, unit, whole, updates, expands, starts, streams
        )
        method.__stage__ = spec  # type: ignore[attr-defined]
        return method

    return declare
