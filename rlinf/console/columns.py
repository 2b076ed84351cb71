"""Which values of a step are shown. Everything that is measured is in metrics.jsonl; here is what fits a line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Column:
    """One value on a line.

    Attributes:
        label: what it is called there.
        keys: names under which it is looked for; the first that the step has is shown.
        form: format specification.
    """

    label: str
    keys: tuple[str, ...]
    form: str = ".3f"

    @property
    def width(self) -> int:
        return 8 if "e" in self.form else 7

    def find(self, values: Mapping[str, float]) -> float | None:
        return next((values[key] for key in self.keys if key in values), None)

    def show(self, value: float) -> str:
        """The value, right-aligned; NaN (nothing to measure) is a dash."""
        return ("-" if math.isnan(value) else format(value, self.form)).rjust(self.width)


COLUMNS = (
    Column("reward", ("reward/reward_mean", "reward/mean", "env/return_mean", "env/reward_mean")),
    Column("actor waits", ("actor/waits",), ".0f"),  # steps, this one too
    Column("kl", ("actor/kl_ref", "gae/kl", "grpo/kl", "advantages/kl", "actor/kl", "actor/kl_old"), ".1e"),
    Column("entropy", ("actor/entropy", "actor/entropy_mean")),
    Column("length", ("rollout/response_length_mean", "rollout/response_length", "env/length_mean"), ".1f"),
    Column("cut", ("rollout/truncated", "rollout/truncated_fraction"), ".0%"),
    Column("tok/s", ("perf/tokens_per_s", "rollout/tokens_per_second"), ".0f"),
)
EVALUATED = tuple(column for column in COLUMNS if column.label in ("reward", "length", "cut"))


def pick(columns: tuple[Column, ...], values: Mapping[str, float]) -> list[tuple[str, str]]:
    """(label, text) of each column that the step has a value for."""
    found = [(column, column.find(values)) for column in columns]
    return [(column.label, column.show(value)) for column, value in found if value is not None]


def seconds(values: Mapping[str, float], phases: Mapping[str, float], measured: float) -> float:
    """How long a step took: as it says, else by the clock, else the sum of its phases."""
    return values.get("time/step", measured if measured > 0 else sum(phases.values()))


def duration(value: float) -> str:
    """``0:05``, ``12:34``, ``1:02:03``."""
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def short(phases: Mapping[str, float]) -> list[tuple[str, float]]:
    """Phases by the last part of their names where that is unique, the longest first.

    Those under a twentieth of the longest are left out.
    """
    ends = [name.replace("/", ".").rsplit(".", 1)[-1] for name in phases]
    named = [
        (end if ends.count(end) == 1 else name, took) for end, (name, took) in zip(ends, phases.items(), strict=True)
    ]
    least = max(phases.values(), default=0.0) / 20
    return sorted(((name, took) for name, took in named if took > 0 and took >= least), key=lambda pair: -pair[1])


def brief(took: float) -> str:
    """Seconds of a phase: ``8.4``, ``0.04``."""
    return f"{took:.1f}" if took >= 0.1 else f"{took:.2f}"
