"""Typed metrics: each value carries how it combines with others of its name, across micro-batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Reduction(StrEnum):
    MEAN = "mean"  # weighted mean
    SUM = "sum"
    MAX = "max"
    MIN = "min"
    STD = "std"  # population standard deviation of all values
    LAST = "last"  # equal on all ranks; any of them


@dataclass(frozen=True)
class Metric:
    """``value`` with ``weight`` (the number of tokens, samples, ... behind a mean or a standard deviation).

    ``mean`` is needed by ``STD`` alone: deviations combine about the mean of all values.
    """

    value: float
    weight: float = 1.0
    reduction: Reduction = Reduction.MEAN
    mean: float = math.nan

    def merge(self, other: Metric) -> Metric:
        if self.reduction is not other.reduction:
            raise ValueError(f"one metric has two reductions: {self.reduction} and {other.reduction}")
        match self.reduction:
            case Reduction.MEAN:
                if self.weight == 0 or other.weight == 0:
                    return other if self.weight == 0 else self
                weight = self.weight + other.weight
                return Metric((self.value * self.weight + other.value * other.weight) / weight, weight)
            case Reduction.STD:
                if self.weight == 0 or other.weight == 0:
                    return other if self.weight == 0 else self
                weight = self.weight + other.weight
                apart = (self.mean - other.mean) ** 2 * self.weight * other.weight / weight**2
                variance = (self.value**2 * self.weight + other.value**2 * other.weight) / weight + apart
                mean = (self.mean * self.weight + other.mean * other.weight) / weight
                return Metric(math.sqrt(variance), weight, Reduction.STD, mean)
            case Reduction.SUM:
                return Metric(self.value + other.value, 1.0, Reduction.SUM)
            case Reduction.MAX:
                return Metric(max(self.value, other.value), 1.0, Reduction.MAX)
            case Reduction.MIN:
                return Metric(min(self.value, other.value), 1.0, Reduction.MIN)
        return other


Metrics = dict[str, Metric]


def merge(parts: Iterable[Mapping[str, Metric]]) -> Metrics:
    """Combine metrics of several micro-batches or ranks."""
    total: Metrics = {}
    for part in parts:
        for name, metric in part.items():
            total[name] = total[name].merge(metric) if name in total else metric
    return total


class Recorder:
    """Collects the metrics of one rank until they are taken.

    A mean over nothing (an all-masked batch) is NaN and does not stop the run.
    """

    def __init__(self) -> None:
        self._metrics: Metrics = {}
        self._rows: list[dict[str, Any]] = []

    def mean(self, name: str, value: float, weight: float = 1.0) -> None:
        self._add(name, Metric(value if weight > 0 else math.nan, weight))

    def std(self, name: str, value: float, mean: float, weight: float) -> None:
        """Population standard deviation ``value`` of ``weight`` values about their ``mean``."""
        empty = weight <= 0
        self._add(name, Metric(math.nan if empty else value, weight, Reduction.STD, math.nan if empty else mean))

    def sum(self, name: str, value: float) -> None:
        self._add(name, Metric(value, 1.0, Reduction.SUM))

    def max(self, name: str, value: float) -> None:
        self._add(name, Metric(value, 1.0, Reduction.MAX))

    def min(self, name: str, value: float) -> None:
        self._add(name, Metric(value, 1.0, Reduction.MIN))

    def last(self, name: str, value: float) -> None:
        self._add(name, Metric(value, 1.0, Reduction.LAST))

    def rows(self, rows: Iterable[dict[str, Any]]) -> None:
        """Rows to be shown as they are, such as sample transcripts."""
        self._rows += rows

    def take_rows(self) -> list[dict[str, Any]]:
        taken, self._rows = self._rows, []
        return taken

    def _add(self, name: str, metric: Metric) -> None:
        self._metrics = merge((self._metrics, {name: metric}))

    def take(self) -> Metrics:
        taken, self._metrics = self._metrics, {}
        return taken
