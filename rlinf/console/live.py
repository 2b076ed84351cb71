"""The live view of a terminal. `frame` is a function of plain data; `LiveConsole` keeps the data and redraws."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rich.bar import Bar
from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rlinf.console.base import Console, Stage
from rlinf.console.columns import COLUMNS, EVALUATED, brief, duration, pick, short

_ROWS = 8  # recent steps in the table
_SPARKS = " ▁▂▃▄▅▆▇█"
_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red")


@dataclass
class View:
    """All that the view shows.

    Attributes:
        step, total: steps done, and to be done.
        elapsed, left: seconds since training started, and until it ends (``None``: not known yet).
        doing: worker: (phase, done, total).
        rows: newest last: (what, [(label, text)], seconds).
        rewards: of every step.
        phases: seconds by phase, of the last step.
    """

    step: int = 0
    total: int = 0
    elapsed: float = 0.0
    left: float | None = None
    doing: Mapping[str, tuple[str, float, float]] = field(default_factory=dict)
    rows: Sequence[tuple[str, Sequence[tuple[str, str]], str]] = ()
    rewards: Sequence[float] = ()
    phases: Mapping[str, float] = field(default_factory=dict)


def frame(view: View, *, ascii_only: bool = False, width: int = 100, height: int = 40) -> RenderableType:
    """Draw the view: overall progress, who does what, the last steps, the reward's course, where the time went.

    A low terminal gets fewer of the last steps, so that what moves stays on the screen; a narrow one fewer columns.
    """
    parts: list[RenderableType] = [_overall(view)]
    if view.doing:
        parts += ["", _workers(view.doing)]
    if view.rows:
        others = 9 + len(view.doing) + len(view.phases)
        parts += ["", _recent(view.rows[-max(2, min(_ROWS, height - others)) :], width - 4)]
    if len(view.rewards) > 1 and not ascii_only:
        parts += ["", _course(view.rewards)]
    if view.phases:
        parts += ["", _phases(view.phases, ascii_only)]
    return Panel(Group(*parts), title="rlinf", title_align="left", border_style="dim", padding=(0, 1))


def _overall(view: View) -> RenderableType:
    grid = Table.grid(expand=True, padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True, justify="right")
    left = "eta -" if view.left is None else f"eta {duration(view.left)}"
    grid.add_row(
        Text(f"step {view.step}/{view.total}", style="bold"),
        ProgressBar(total=max(view.total, 1), completed=view.step),
        f"{duration(view.elapsed)}  {left}",
    )
    return grid


def _workers(doing: Mapping[str, tuple[str, float, float]]) -> RenderableType:
    grid = Table.grid(expand=True, padding=(0, 1))
    grid.add_column(style="cyan", no_wrap=True)
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True, justify="right", width=5)
    for worker, (phase, done, total) in doing.items():
        known = total > 0
        bar = ProgressBar(total=total if known else 1, completed=done if known else 0, pulse=not known)
        grid.add_row(worker, phase, bar, f"{min(done / total, 1):.0%}" if known else "")
    return grid


def _recent(rows: Sequence[tuple[str, Sequence[tuple[str, str]], str]], width: int) -> RenderableType:
    table = Table(box=None, expand=True, padding=(0, 1), header_style="dim")
    widths = {"": max(len(what) for what, _, _ in rows), "time": max(4, *(len(took) for _, _, took in rows))}
    for _, cells, _ in rows:
        for label, text in cells:
            widths[label] = max(widths.get(label, len(label)), len(text.strip()))
    labels = [column.label for column in COLUMNS if column.label in widths]
    while labels and sum(widths[label] + 2 for label in ("", *labels, "time")) > width:
        labels.pop()
    table.add_column("", no_wrap=True)
    for label in labels:
        table.add_column(label, justify="right", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    for what, cells, took in rows:
        shown = dict(cells)
        style = "green" if what.startswith("eval") else None
        table.add_row(what, *(shown.get(label, "").strip() for label in labels), took, style=style)
    return table


def _course(rewards: Sequence[float]) -> RenderableType:
    known = [value for value in rewards if value == value][-60:]
    if not known:
        return ""
    low, high = min(known), max(known)
    span = (high - low) or 1.0
    marks = "".join(_SPARKS[1 + round((value - low) / span * (len(_SPARKS) - 2))] for value in known)
    return Text.assemble(("reward ", "dim"), (marks, "green"), (f"  {low:.3f} to {high:.3f}", "dim"))


def _phases(phases: Mapping[str, float], ascii_only: bool) -> RenderableType:
    ordered = short(phases)
    if not ordered:
        return ""
    total = sum(took for _, took in ordered) or 1.0
    grid = Table.grid(expand=True, padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True, justify="right")
    if ascii_only:
        texts = [f"{name} {brief(took)} s ({took / total:.0%})" for name, took in ordered]
        return Text("time  ").append("  ".join(texts))
    for i, (name, took) in enumerate(ordered):
        colour = _COLOURS[i % len(_COLOURS)]
        share = f"{brief(took)} s {took / total:4.0%}"
        grid.add_row(Text(name, style=colour), Bar(total, 0, took, color=colour), share)
    return Group(Text("time of the last step", style="dim"), grid)


class LiveConsole(Console):
    """Redraws `frame` four times a second; what is said scrolls by above it.

    Args:
        rich: the terminal; a recording one in tests.
    """

    def __init__(self, rich: RichConsole | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._rich = rich or RichConsole(highlight=False)
        self._live: Live | None = None
        self._rows: list[tuple[str, Sequence[tuple[str, str]], str]] = []
        self._rewards: list[float] = []
        self._phases: Mapping[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[Stage]:
        if self._live is not None:  # a terminal has one live display at a time
            with super().stage(name) as told:
                yield told
            return
        with self._rich.status(f"{name} ..."), super().stage(name) as told:
            yield told

    def start(self, total_steps: int, first_step: int) -> None:
        super().start(total_steps, first_step)
        if self._live is None:
            self._live = Live(console=self._rich, get_renderable=self._frame, refresh_per_second=4)
            self._live.start()

    def step(self, step: int, values: Mapping[str, float], phases: Mapping[str, float]) -> None:
        with self._lock:
            super().step(step, values, phases)
            self._rows = [*self._rows, (f"step {step}", pick(COLUMNS, values), f"{self._took[-1]:.1f} s")][-_ROWS:]
            reward = COLUMNS[0].find(values)
            if reward is not None:
                self._rewards = [*self._rewards, reward][-200:]
            self._phases = dict(phases)

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        with self._lock:
            super().evaluation(step, values)
            self._rows = [*self._rows, (f"eval {step}", pick(EVALUATED, values), "")][-_ROWS:]

    def error(self, text: str) -> None:
        self.close()  # the error is the last thing on the screen
        super().error(text)

    def close(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            with contextlib.suppress(OSError, ValueError):
                live.stop()

    def view(self) -> View:
        """The data of the next frame."""
        with self._lock:
            elapsed = self._clock() - self._begun
            return View(
                self._step,
                self._total,
                elapsed,
                self._left(),
                dict(self._doing),
                self._rows,
                self._rewards,
                self._phases,
            )

    def _frame(self) -> RenderableType:
        return frame(
            self.view(), ascii_only=self._rich.options.ascii_only, width=self._rich.width, height=self._rich.height
        )

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._rich.print(Text(text))
