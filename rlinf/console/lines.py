"""Plain lines: one a step, aligned, each saying what its numbers are, so that a log file can be read and grepped."""

from __future__ import annotations

from collections.abc import Mapping

from rlinf.console.base import Console
from rlinf.console.columns import COLUMNS, EVALUATED, brief, duration, pick, short

_QUIET_S = 60.0  # a step that takes longer says how far it is


class LineConsole(Console):
    """Writes lines to a stream (standard output)."""

    _spoke = 0.0

    def start(self, total_steps: int, first_step: int) -> None:
        super().start(total_steps, first_step)
        self._spoke = self._clock()

    def progress(self, phase: str, worker: str, done: float, total: float) -> None:
        super().progress(phase, worker, done, total)
        if self._total and self._clock() - self._spoke >= _QUIET_S:
            share = f" {done / total:4.0%}" if total > 0 else ""
            self._say(f"     {self._count(self._step + 1)}  {worker} {phase}{share}")

    def step(self, step: int, values: Mapping[str, float], phases: Mapping[str, float]) -> None:
        super().step(step, values, phases)
        parts = [f"step {self._count(step)}"]
        parts += [f"{label} {text}" for label, text in pick(COLUMNS, values)]
        parts.append(f"{self._took[-1]:6.1f} s")
        left = self._left()
        if left:
            parts.append(f"eta {duration(left)}")
        line = "  ".join(parts)
        if phases:
            line += "  | " + "  ".join(f"{name} {brief(took)}" for name, took in short(phases))
        self._say(line)

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        super().evaluation(step, values)
        parts = [f"eval {self._count(step)}", *(f"{label} {text}" for label, text in pick(EVALUATED, values))]
        self._say("  ".join(parts))

    def _count(self, step: int) -> str:
        width = len(str(self._total))
        return f"{step:{width}d}/{self._total}"

    def _say(self, text: str) -> None:
        self._spoke = self._clock()
        self._write(self._out, text)
