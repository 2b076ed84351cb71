"""The command ``python -m rlinf.plan +workflow=ppo plan=...``: a plan on paper, before anything is started.

It prints the workflow's stages with the fields that flow between them, the plan, the program of each group, and the
time line that the programs would have. Ray, vLLM and models are not loaded; torch is, because the workflow's file
imports the workers' classes.

Exit codes: 0 done; 2 the config, the plan or the costs are wrong.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlinf.config import TrainConfig
from rlinf.errors import ConfigError, RlinfError

if TYPE_CHECKING:
    from rlinf.m2flow.compiler import Compiled
    from rlinf.m2flow.graph import Graph
    from rlinf.m2flow.plan import Plan
    from rlinf.m2flow.simulate import Costs


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    given = _parser().parse_intermixed_args(argv)
    try:
        from rlinf.compose import compose

        for line in lines(compose(given.overrides), given.devices, given.costs, given.iterations):
            print(line)
    except RlinfError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader has seen enough
        sys.stdout = None  # type: ignore[assignment]
    return 0


def lines(
    cfg: TrainConfig, devices: int | None = None, costs: Path | None = None, iterations: int | None = None
) -> Iterator[str]:
    """What the command prints.

    Args:
        cfg: as for training.
        devices: so many, of which nothing else is known; ``None``: those of this machine.
        costs: file of measured costs; ``None``: a row of a stage counts one unit.
        iterations: in the time line; ``None``: as many as it takes to see the pace.

    Raises:
        RlinfError: the config, the plan or the costs are wrong.
    """
    from rlinf.m2flow.compiler import compile_plan
    from rlinf.m2flow.graph import EVALUATE, TRAIN
    from rlinf.m2flow.plan import describe
    from rlinf.m2flow.readable import graph_lines, program_lines
    from rlinf.train import load_graph

    graph = load_graph(cfg)
    plan, about = _plan(graph, cfg, devices)
    compiled = compile_plan(graph, plan, cfg.plan.staleness, cfg.plan.in_flight)
    known, unit, note = _costs(graph, cfg, costs)
    yield f"WORKFLOW {graph.name}"
    yield from _indented(graph_lines(graph))
    yield ""
    yield f"PLAN on {about}"
    yield from _indented(describe(plan))
    yield ""
    yield "PROGRAMS of an iteration (i counts the iterations before it)"
    yield from _indented(program_lines(graph, compiled, TRAIN))
    if graph.phase(EVALUATE):
        yield ""
        yield "PROGRAMS of an evaluation"
        yield from _indented(program_lines(graph, compiled, EVALUATE))
    yield ""
    yield from _timeline(graph, compiled, known, unit, iterations)
    yield note


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rlinf.plan",
        description="Print what a plan comes to, without starting anything: stages, placement, programs, time line.",
        allow_abbrev=False,
    )
    parser.add_argument("overrides", nargs="*", help="config as for rlinf.train: +workflow=ppo plan=hybrid ...")
    parser.add_argument("--devices", type=_positive, metavar="N", help="plan for N devices instead of this machine's")
    parser.add_argument("--costs", type=Path, metavar="FILE", help="costs.yaml of a run; else a row counts one unit")
    parser.add_argument("--iterations", type=_positive, metavar="N", help="iterations in the time line")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a number from 1")
    return int(text)


def _plan(graph: Graph, cfg: TrainConfig, devices: int | None) -> tuple[Plan, str]:
    """The plan, and what it is on."""
    from rlinf.arithmetic import batch_sizes
    from rlinf.checkpoint import Identity
    from rlinf.preflight import Ready, local_devices
    from rlinf.scheduler.shipped import choose

    if devices is not None:
        plan = choose(graph, cfg.plan, lambda plan: {}, [None] * devices)
        return plan, f"{devices} device{'s' * (devices != 1)} (what if: their memory is not known, and all fits)"
    identity = Identity(cfg.workflow.name or graph.name, cfg.model.name)
    ready = Ready(cfg, graph, batch_sizes(cfg), identity, Path(cfg.output_dir or cfg.output_root), None)
    found = local_devices(cfg)
    return ready.plan(found), f"{'; '.join(map(str, found))} (if it runs on this machine alone)"


def _costs(graph: Graph, cfg: TrainConfig, path: Path | None) -> tuple[Costs, str, str]:
    """(costs, unit of time, what to know about them)."""
    from dataclasses import replace

    from rlinf.m2flow.costs import load_costs, unit_costs

    rows = _rows(graph, cfg)
    if path is None:
        note = "No costs were given (--costs takes a costs.yaml): a row of a stage, worked on or made, counts one unit."
        return unit_costs(graph, rows), "units", note
    measured = load_costs(path)
    names = {node.name for node in graph.nodes}
    if not names & set(measured.nodes):
        raise ConfigError(
            f"{path} has costs of {', '.join(sorted(measured.nodes)) or 'no stage'}; workflow {graph.name} has "
            f"{', '.join(sorted(names))}: give the costs.yaml of a run of this workflow"
        )
    lacking = sorted(node.name for node in graph.phase("train") if node.name not in measured.nodes)
    note = f"Costs of {path}." + (f" It has none of {', '.join(lacking)}: they take no time here." if lacking else "")
    return replace(measured, rows={**measured.rows, **rows}), "s", note


def _rows(graph: Graph, cfg: TrainConfig) -> dict[str, int]:
    """Rows that each source makes: of training, those of the config."""
    from rlinf.data import Prompts

    found = {}
    for node in graph.nodes:
        if not node.reads:
            held_out = isinstance(node.call, Prompts) and node.call.split == "validation"
            found[node.name] = cfg.data.validation_size if held_out else cfg.data.prompts_per_step
    return found


def _timeline(graph: Graph, compiled: Compiled, costs: Costs, unit: str, iterations: int | None) -> Iterator[str]:
    from rlinf.m2flow.gantt import chart, device_lines, seconds
    from rlinf.m2flow.graph import TRAIN
    from rlinf.m2flow.simulate import simulate

    count = iterations or 1 + 2 * compiled.staleness
    spans = simulate(graph, compiled, TRAIN, costs, count)
    end = max((span.end for own in spans.values() for span in own), default=0.0)
    each = f", {seconds(end / count, unit)} each" if count > 1 else ""
    width = shutil.get_terminal_size((100, 24)).columns
    yield f"TIME LINE of {count} iteration{'s' * (count > 1)}, predicted: {seconds(end, unit)}{each}"
    yield from chart(graph, compiled, spans, width, unit)
    yield from device_lines(graph, compiled, spans)


def _indented(found: Sequence[str]) -> list[str]:
    return [f"  {line}" for line in found]


if __name__ == "__main__":
    sys.exit(main())
