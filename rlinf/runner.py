"""The run: start the fleet in stages, iterate, evaluate, keep checkpoints, and say at the end where things are."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rlinf.checkpoint import Checkpoints, Meta, OutputLock
from rlinf.cluster import Cluster, Device
from rlinf.console import Console, open_console
from rlinf.deadline import Deadline
from rlinf.failure import RunFailed
from rlinf.fleet import Calls, Fleet, Glimpse, flatten_rows, summarize
from rlinf.m2flow.compiler import compile_plan
from rlinf.m2flow.executor import Report
from rlinf.m2flow.graph import EVALUATE, HOST, TRAIN
from rlinf.m2flow.plan import save_plan
from rlinf.m2flow.record import Record
from rlinf.planning import plan_for
from rlinf.preflight import Ready
from rlinf.replanning import Replanning
from rlinf.scheduler.replan import Planned
from rlinf.tracking import Samples, Trackers, open_trackers, redact
from rlinf.watchdog import Watchdog

SCORE = "reward/mean"
Planner = Callable[[Sequence[Device]], "Planned | None"]
"""The devices of the cluster -> the plan for them with what is expected of it; ``None``: the config names the plan."""


@dataclass(frozen=True)
class Outcome:
    """What a run came to.

    Attributes:
        steps: training iterations that are done.
        before, after: mean validation reward before the first step and at the last evaluation of the whole run,
            interruptions and all; ``None`` without one.
        checkpoint: the newest checkpoint.
        export: the trained model as a Hugging Face directory.
        output_dir: metrics, samples, logs.
    """

    steps: int
    before: float | None
    after: float | None
    checkpoint: Path | None
    export: Path | None
    output_dir: Path


def run(ready: Ready, planner: Planner | None = None) -> Outcome:
    """Run to the end.

    Args:
        ready: what to run.
        planner: finds the plan, so that the run can be planned again; ``None``: `rlinf.planning.plan_for`.

    Raises:
        RunFailed: a worker failed; it has been shown, and every process of the run has ended.
        RlinfError: something is wrong that its message tells how to mend.
    """
    cfg = ready.cfg
    console = open_console(cfg.logger)
    try:
        with OutputLock(ready.output_dir):
            return _Run(ready, console, planner).run()
    except RunFailed as failure:
        first = failure.first
        others = f"\n({failure.others} more ranks failed after it)" if failure.others > 0 else ""
        trace = "" if first.user else f"\n{first.trace}"
        log = ready.output_dir / "logs" / f"{first.group}-{first.rank}.log"
        console.error(f"{first.title}{trace}{others}\nits log: {log}")
        raise
    finally:
        console.close()


class _Run:
    def __init__(self, ready: Ready, console: Console, planner: Planner | None) -> None:
        self.ready = ready
        self.planner = planner
        self.cfg = ready.cfg
        self.console = console
        self.checkpoints = Checkpoints(ready.output_dir, self.cfg.checkpoint.keep)
        self.saved: Path | None
        self.saved, meta = ready.resume or (None, None)
        self.step = meta.step if meta else 0
        self.before, self.after = (meta.before, meta.after) if meta else (None, None)
        self.fleet: Fleet
        self.trackers: Trackers
        self.samples: Samples
        self.record: Record
        self.replanning: Replanning

    def run(self) -> Outcome:
        ready, cfg, console = self.ready, self.cfg, self.console
        config = redact(dataclasses.asdict(cfg))
        ready.output_dir.mkdir(parents=True, exist_ok=True)
        with console.stage("cluster"):
            cluster = Cluster.connect(cfg.cluster, console.note)
        self.fleet = Fleet(cluster, ready.graph, None, self._watch)  # type: ignore[arg-type]
        limits = cfg.cluster.stall_s, cfg.cluster.stall_end_s
        self.fleet.watchdog = Watchdog(*limits, ready.output_dir, console.note)
        try:
            planner = self.planner or partial(plan_for, ready, show=console.note)
            planned = planner(cluster.devices)
            plan = planned.plan if planned else ready.plan(cluster.devices)
            self.fleet.compiled = compile_plan(ready.graph, plan, cfg.plan.staleness, cfg.plan.in_flight)
            save_plan(plan, ready.output_dir / "plan.yaml")
            (ready.output_dir / "config.json").write_text(json.dumps(config, indent=1, default=str) + "\n")
            lines = [*ready.lines(cluster.devices, plan), *(planned.reasons if planned else ())]
            console.header(lines)
            self.record = Record(ready.graph, self.fleet.compiled, ready.output_dir, lines, console.note)
            self.replanning = Replanning(planned, cfg.plan, self.fleet, self.record, ready.output_dir, console.note)
            with console.stage("devices"):
                cluster.hold(console.note)
            with self._starting("workers"):
                self.fleet.launch(cfg.seed, cfg.deterministic, ready.output_dir)
            with self._starting("models and data"):
                self.fleet.setup()
                reports = self.fleet.call(HOST, "reports")[0]
            for text in reports:
                console.note(text)
            if ready.resume:
                with self._starting(f"checkpoint {ready.resume[0].name}"):
                    self.fleet.load(ready.resume[0])
            self.samples = Samples(ready.output_dir, self.step + 1, console.note)
            self.trackers = open_trackers(cfg.logger, ready.output_dir, config, self.step + 1, console.note)
            try:
                return self._iterate()
            finally:
                self.trackers.close()
                self.samples.close()
                self.record.write()
        finally:
            self.fleet.close()

    @contextmanager
    def _starting(self, name: str) -> Iterator[None]:
        """A stage of the start in which ranks are waited for."""
        with self.console.stage(name):
            self.fleet.limit = Deadline.of(name, self.cfg.cluster.start_timeout_s)
            yield
            self.fleet.limit = None

    def _iterate(self) -> Outcome:
        cfg = self.cfg
        evaluates = bool(self.ready.graph.phase(EVALUATE))
        self.console.start(cfg.steps, self.step)
        if evaluates and cfg.evaluation.before and self.step == 0:  # later it would not be before
            self._evaluate()
        while self.step < cfg.steps:
            self._train(self._next_stop())
            last = self.step == cfg.steps
            if evaluates and ((last and cfg.evaluation.after) or self._due(self.step, cfg.evaluation.every)):
                self._evaluate()
            if last or self._due(self.step, cfg.checkpoint.every):
                self._save()
        export = self._export() if cfg.checkpoint.export else None
        outcome = Outcome(self.step, self.before, self.after, self.saved, export, self.ready.output_dir)
        self.record.write()
        self._say(outcome)
        return outcome

    @staticmethod
    def _due(step: int, every: int) -> bool:
        return bool(every) and step % every == 0

    def _next_stop(self) -> int:
        """The next step after which nothing may be under way: something is evaluated or saved, or it is the last."""
        cfg = self.cfg
        evaluates = bool(self.ready.graph.phase(EVALUATE))
        for step in range(self.step + 1, cfg.steps):
            if (evaluates and self._due(step, cfg.evaluation.every)) or self._due(step, cfg.checkpoint.every):
                return step
        return cfg.steps

    def _train(self, until: int) -> None:
        """Training iterations up to ``until``, as many under way at once as staleness allows."""
        since = begun = self.step
        under_way: deque[Calls] = deque()
        start = time.monotonic()
        while self.step < until:
            if self.replanning.pending and not under_way:
                self.replanning.change(self.step)
            pausing = self.replanning.pending is not None  # what is under way comes to its end
            while not pausing and begun < until and begun - self.step <= self.cfg.plan.staleness:
                under_way.append(self.fleet.begin(TRAIN, begun, since, until))
                begun += 1
            reports = self.fleet.finish(under_way.popleft())
            now = time.monotonic()
            self._record(reports, now - start)
            self.replanning.iteration(reports, now - start, self.cfg.steps - self.step)
            start = now

    def _record(self, reports: list[Report], seconds: float) -> None:
        """A training iteration is over."""
        values, phases = summarize(reports, self.fleet.compiled)
        self.step += 1
        values["time/step"] = seconds
        values |= {f"time/{name}": value for name, value in phases.items()}
        if "rollout/tokens" in values:
            values["perf/tokens_per_s"] = values["rollout/tokens"] / seconds
        values["weight_version"] = self._version()
        values |= self.replanning.values
        self.trackers.log(self.step, values)
        self.samples.write(self.step, flatten_rows(reports))
        self.console.step(self.step, values, phases)
        self.record.add(TRAIN, self.step, reports)

    def _evaluate(self) -> None:
        reports = self.fleet.execute(EVALUATE, self.step)
        values, _ = summarize(reports, self.fleet.compiled)
        self.trackers.log(self.step, {f"eval/{name}": value for name, value in values.items()})
        self.console.evaluation(self.step, values)
        self.record.add(EVALUATE, self.step, reports)
        score = values.get(SCORE)
        if score is not None:
            self.before = score if self.step == 0 else self.before
            self.after = score

    def _save(self) -> None:
        path = self.checkpoints.begin(self.step)
        try:
            sizes = self.fleet.save(path)
            meta = Meta(
                step=self.step,
                weight_version=self._version(),
                workflow=self.ready.identity.workflow,
                model=self.ready.identity.model,
                world_sizes=sizes,
                before=self.before,
                after=self.after,
                config_digest=hashlib.sha256(repr(self.cfg).encode()).hexdigest()[:16],
            )
            self.saved = self.checkpoints.commit(path, meta)
        except BaseException:
            self.checkpoints.abandon(path)
            raise

    def _version(self) -> int:
        """Of the weights that are sent, else of all."""
        graph = self.ready.graph
        return max((graph.version(sync.source, self.step) for sync in graph.syncs), default=self.step)

    def _export(self) -> Path | None:
        for sync in self.ready.graph.syncs:
            if hasattr(self.ready.graph.workers[sync.source].cls, "export"):
                path = self.ready.output_dir / "export"
                self.fleet.call(sync.source, "export", path.absolute())
                return path
        return None

    def _watch(self, glimpse: Glimpse) -> None:
        for note in glimpse.notes:
            self.console.note(f"{glimpse.group}: {note}")
        if glimpse.doing and not glimpse.doing.startswith("wait"):
            self.console.progress(glimpse.doing, glimpse.group, glimpse.done, glimpse.total)

    def _say(self, outcome: Outcome) -> None:
        self.console.close()  # these lines are the last on the screen
        note = self.console.note
        note(f"checkpoint   {outcome.checkpoint}")
        if outcome.export:
            note(f"model        {outcome.export} (a Hugging Face directory)")
        beside = ["samples.jsonl", "logs/", *(["tensorboard/"] if self.cfg.logger.tensorboard else [])]
        note(f"metrics      {outcome.output_dir / 'metrics.jsonl'}; beside it {', '.join(beside)}")
        if self.record.page.exists():
            note(f"timeline     {self.record.page} (beside it trace.json for ui.perfetto.dev, costs.yaml)")
        if outcome.after is not None:
            before = "" if outcome.before is None else f"{outcome.before:.3f} -> "
            note(f"validation reward {before}{outcome.after:.3f} in {outcome.steps} steps")
