"""The command ``python -m rlinf.plan +workflow=ppo plan=...``: a plan on paper, before anything is started.

It prints the workflow's stages with the fields that flow between them, the plan, the program of each group, and the
time line that the programs would have. With ``--explain`` it looks for the best plan instead, and says why it is. Costs
are those of a profile (given, or kept), of a run's ``costs.yaml``, or units. Ray, vLLM and models' weights are not
loaded; torch is, because the workflow's file imports the workers' classes.

Exit codes: 0 done; 2 the config, the plan, the profile or the costs are wrong.
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
    from rlinf.whatif import Asked, Basis


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    given = _parser().parse_intermixed_args(argv)
    try:
        from rlinf.compose import compose

        cfg = compose(given.overrides)
        for line in lines(cfg, _asked(given), given.costs, given.iterations, given.explain):
            print(line)
    except RlinfError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader has seen enough
        sys.stdout = None  # type: ignore[assignment]
    return 0


def lines(
    cfg: TrainConfig,
    asked: Asked | None = None,
    costs: Path | None = None,
    iterations: int | None = None,
    explain: bool = False,
) -> Iterator[str]:
    """What the command prints.

    Args:
        cfg: as for training.
        asked: profile and devices to plan with; ``None``: those of this machine.
        costs: file of measured costs; ``None``: those of the profile.
        iterations: in the time line; ``None``: as many as it takes to see the pace.
        explain: look for the best plan, and say why it is.

    Raises:
        RlinfError: the config, the plan, the profile or the costs are wrong.
    """
    from rlinf.train import load_graph
    from rlinf.whatif import Asked, basis

    graph = load_graph(cfg)
    found = basis(graph, cfg, asked or Asked())
    yield f"WORKFLOW {graph.name}, on {found.about}"
    if explain:
        yield from _explained(graph, cfg, found)
    else:
        yield from _described(graph, cfg, found, costs, iterations)


def _explained(graph: Graph, cfg: TrainConfig, basis: Basis) -> Iterator[str]:
    from rlinf.planning import objective_of
    from rlinf.scheduler.auto import find
    from rlinf.scheduler.explain import Look, explained
    from rlinf.scheduler.judge import judge
    from rlinf.scheduler.shipped import AUTO

    ground = basis.ground
    yield basis.note
    yield ""
    best = find(ground, objective_of(cfg.plan))
    other = None
    if cfg.plan.kind != AUTO or cfg.plan.file:
        other = judge(graph, _plan(graph, cfg, basis), ground.model, ground.staleness, ground.in_flight)
    yield from explained(best, ground, Look(_width(), basis.unit), other)


def _described(
    graph: Graph, cfg: TrainConfig, basis: Basis, costs: Path | None, iterations: int | None
) -> Iterator[str]:
    from rlinf.m2flow.compiler import compile_plan
    from rlinf.m2flow.graph import EVALUATE, TRAIN
    from rlinf.m2flow.plan import describe
    from rlinf.m2flow.readable import graph_lines, program_lines

    plan = _plan(graph, cfg, basis)
    compiled = compile_plan(graph, plan, cfg.plan.staleness, cfg.plan.in_flight)
    yield from _indented(graph_lines(graph))
    yield ""
    yield f"PLAN on {basis.about}"
    yield from _indented(describe(plan))
    yield ""
    yield "PROGRAMS of an iteration (i counts the iterations before it)"
    yield from _indented(program_lines(graph, compiled, TRAIN))
    if graph.phase(EVALUATE):
        yield ""
        yield "PROGRAMS of an evaluation"
        yield from _indented(program_lines(graph, compiled, EVALUATE))
    yield ""
    if costs is not None:
        known, note = _costs(graph, cfg, costs)
        yield from _timeline(graph, compiled, known, "s", iterations)
        yield note
    else:
        known = basis.ground.model.costs(plan, compiled)
        yield from _timeline(graph, compiled, known, basis.unit, iterations)
        yield basis.note


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rlinf.plan",
        description="Print what a plan comes to, without starting anything: stages, placement, programs, time line.",
        allow_abbrev=False,
    )
    parser.add_argument("overrides", nargs="*", help="config as for rlinf.train: +workflow=ppo plan=hybrid ...")
    parser.add_argument("--explain", action="store_true", help="find the best plan, and say why the others are not")
    parser.add_argument("--costs", type=Path, metavar="FILE", help="costs.yaml of a run, instead of a profile")
    parser.add_argument("--iterations", type=_positive, metavar="N", help="iterations in the time line")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="a profile (python -m rlinf.profile --out FILE)")
    parser.add_argument("--force", action="store_true", help="take it although it is of something else")
    what_if = parser.add_argument_group("what if")
    what_if.add_argument(
        "--devices", type=_devices, metavar="N|KIND=N,...", help="so many devices instead of this machine's"
    )
    what_if.add_argument("--batch", type=_positive, metavar="N", help="so many rows of each source in an iteration")
    what_if.add_argument("--lengths", type=float, default=1.0, metavar="X", help="what is generated is X times as long")
    what_if.add_argument(
        "--slow", action="append", default=[], metavar="STAGE=X", help="a stage takes X times as long (several times)"
    )
    what_if.add_argument("--memory", type=float, metavar="GIB", help="of each device")
    return parser


def _asked(given: argparse.Namespace) -> Asked:
    from rlinf.whatif import Asked, pairs

    if given.memory is not None and not 0 < given.memory < float("inf"):
        raise ConfigError(f"--memory {given.memory:g}: expected GiB, above 0")
    return Asked(
        profile=given.profile,
        force=given.force,
        devices=given.devices or {},
        rows=given.batch,
        lengths=given.lengths,
        slow=pairs(given.slow, "--slow"),
        memory=None if given.memory is None else round(given.memory * 2**30),
    )


def _devices(text: str) -> dict[str, int]:
    found = {}
    for part in text.split(","):
        name, _, count = part.rpartition("=")
        found[name.strip()] = _positive(count.strip())
    return found


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a number from 1")
    return int(text)


def _plan(graph: Graph, cfg: TrainConfig, basis: Basis) -> Plan:
    """The plan that the config names, or the best one."""
    from rlinf.arithmetic import batch_sizes
    from rlinf.checkpoint import Identity
    from rlinf.planning import objective_of
    from rlinf.preflight import Ready
    from rlinf.scheduler.auto import find
    from rlinf.scheduler.shipped import choose, looked_for

    ground = basis.ground
    if looked_for(cfg.plan, len(ground.kind_of)):
        return find(ground, objective_of(cfg.plan)).best.plan
    capacity = [ground.bytes_of(device) for device in sorted(ground.kind_of)]
    if not any(capacity):
        return choose(graph, cfg.plan, lambda plan: {}, capacity)
    identity = Identity(cfg.workflow.name or graph.name, cfg.model.name)
    ready = Ready(cfg, graph, batch_sizes(cfg), identity, Path(cfg.output_dir or cfg.output_root), None)
    return choose(graph, cfg.plan, ready.needs, capacity)


def _costs(graph: Graph, cfg: TrainConfig, path: Path) -> tuple[Costs, str]:
    """Costs of a run, and what to know about them."""
    from dataclasses import replace

    from rlinf.m2flow.costs import load_costs
    from rlinf.whatif import source_rows

    measured = load_costs(path)
    names = {node.name for node in graph.nodes}
    if not names & set(measured.nodes):
        raise ConfigError(
            f"{path} has costs of {', '.join(sorted(measured.nodes)) or 'no stage'}; workflow {graph.name} has "
            f"{', '.join(sorted(names))}: give the costs.yaml of a run of this workflow"
        )
    lacking = sorted(node.name for node in graph.phase("train") if node.name not in measured.nodes)
    note = f"Costs of {path}." + (f" It has none of {', '.join(lacking)}: they take no time here." if lacking else "")
    return replace(measured, rows={**measured.rows, **source_rows(graph, cfg)}), note


def _timeline(graph: Graph, compiled: Compiled, costs: Costs, unit: str, iterations: int | None) -> Iterator[str]:
    from rlinf.m2flow.gantt import chart, device_lines, seconds
    from rlinf.m2flow.graph import TRAIN
    from rlinf.m2flow.simulate import simulate

    count = iterations or 1 + 2 * compiled.staleness
    spans = simulate(graph, compiled, TRAIN, costs, count)
    end = max((span.end for own in spans.values() for span in own), default=0.0)
    each = f", {seconds(end / count, unit)} each" if count > 1 else ""
    yield f"TIME LINE of {count} iteration{'s' * (count > 1)}, predicted: {seconds(end, unit)}{each}"
    yield from chart(graph, compiled, spans, _width(), unit)
    yield from device_lines(graph, compiled, spans)


def _width() -> int:
    return shutil.get_terminal_size((100, 24)).columns


def _indented(found: Sequence[str]) -> list[str]:
    return [f"  {line}" for line in found]


if __name__ == "__main__":
    sys.exit(main())
