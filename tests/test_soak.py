"""Hundreds of iterations of every piece of a run, after which there is no more of anything than after fifty."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import io
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from rlinf.batch import Batch
from rlinf.checkpoint import Checkpoints, Meta, load_state, save_state
from rlinf.config import LoggerConfig, ModelConfig, RewardConfig, RolloutConfig
from rlinf.console import LineConsole
from rlinf.m2flow.executor import Executor, Turn
from rlinf.m2flow.graph import TRAIN, Graph, Workflow
from rlinf.m2flow.lease import LeaseServer, Ticket
from rlinf.rewards import Sample, ScorerPool
from rlinf.tracking import Samples, Trackers, open_trackers
from rlinf.tracking.background import Background
from rlinf.vps.publication import publish
from rlinf.worker import RankContext, stage
from rlinf.workers.rollout import Rollout
from tests.m2flow.test_executor import Numbers, Sink, Source2, Twice, executors_of
from tests.models.small import samples, write_model
from tests.workers.ranks import actor, critic

ITERATIONS = 240
LOOKS = 16  # in the last three quarters, at even distances
GROWTH = 3 * 2**20  # bytes of resident memory, from the second quarter to the last

Step = Callable[[int], None]


@dataclass(frozen=True)
class Seen:
    """What there is of everything that may leak."""

    objects: dict[str, int]  # live ones that came since the start: tensors, and those of our own classes
    files: int
    threads: int
    children: int
    mapped: int  # pieces of shared memory
    memory: int


def look() -> Seen:
    gc.collect()
    kinds = Counter(
        "Tensor" if issubclass(type(found), torch.Tensor) else type(found).__qualname__
        for found in gc.get_objects()
        if issubclass(type(found), torch.Tensor) or type(found).__module__.startswith("rlinf")
    )
    ctypes.CDLL(None).malloc_trim(0)  # what is free goes back, so that the rest is what is in use
    me = psutil.Process()
    maps = Path("/proc/self/maps").read_text().splitlines()
    return Seen(
        dict(kinds),
        me.num_fds(),
        threading.active_count(),
        len(me.children(recursive=True)),
        sum("/dev/shm" in line or "/memfd:" in line for line in maps),
        me.memory_info().rss,
    )


def assert_flat(step: Step, iterations: int = ITERATIONS) -> None:
    """Run the steps: from the second quarter on, there is the same of everything, and no more memory in use."""
    gc.collect()
    gc.freeze()  # what was there before is not looked at: a look is short
    try:
        every = (iterations - iterations // 4) // LOOKS
        seen: list[Seen] = []
        for i in range(iterations):
            step(i)
            if i >= iterations // 4 and (i - iterations // 4) % every == 0:
                seen.append(look())
    finally:
        gc.unfreeze()
    assert len(seen) >= LOOKS
    for what in ("objects", "files", "threads", "children", "mapped"):
        counts = [getattr(each, what) for each in seen]
        assert counts == [counts[0]] * len(counts), f"{what}: {counts[0]} became {counts[-1]}"
    early, late = seen[: len(seen) // 3], seen[-len(seen) // 3 :]
    grown = min(each.memory for each in late) - min(each.memory for each in early)
    assert grown < GROWTH, f"{grown / 2**20:.1f} MiB more in the last quarter than in the second"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("soak") / "model")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("make", [actor, critic])
def test_training_over_many_micro_batches(model: Path, make: Any) -> None:
    worker = make(model, RankContext())
    worker.cfg.algorithm.mini_batch_size, worker.cfg.algorithm.epochs = 0, 1
    batch = samples([2, 3, 2, 2], [3, 2, 3, 2])
    worker.cfg.tokens_per_micro_batch = 1  # one for each sample

    def step(i: int) -> None:
        worker.train(batch)
        worker.metrics.take()

    assert_flat(step)


def test_generation_and_weight_syncs(model: Path) -> None:
    cfg = RolloutConfig(
        model=ModelConfig(name="small", path=str(model)), engine="hf", samples_per_prompt=2, max_new_tokens=3
    )
    worker = Rollout(cfg, RankContext())
    worker.setup()
    published, _publisher = publish(dict(worker.engine._model.named_parameters()))
    batch = samples([4, 3], [1, 1])

    def step(i: int) -> None:
        worker.receive_weights(i, [published])
        assert Batch.concat(list(worker.generate(batch.only({"row_id", "prompt_ids"})))).n == 4
        worker.metrics.take()

    assert_flat(step)
    worker.teardown()


class Learner(Source2):
    @stage(reads=("y", "tag"), updates=True, whole=True)
    def train(self, batch: Batch) -> None:
        self.metrics.sum("rows", batch.n)


class Receiver(Sink):
    @stage(reads=("x",), writes=("z",))
    def use(self, batch: Batch) -> Batch:
        return Batch({"z": batch["x"]})


def moving() -> Graph:
    flow = Workflow("w")
    receiver, learner = flow.worker(Receiver, dp=2), flow.worker(Learner, dp=2)
    learner.train(flow.worker(Twice, dp=2).double(receiver.use(flow.source(Numbers()))))
    flow.sync(learner, receiver)
    return flow.build()


def test_rows_and_weights_on_their_way_between_ranks() -> None:
    executors, wire = executors_of(moving(), devices=2)

    def step(i: int) -> None:
        rows: list[float] = []
        wire.begin(TRAIN, i)

        def run(executor: Executor) -> None:
            report = executor.run(Turn(TRAIN, i, i, i, i))
            rows.extend(m["rows"].value for name, m in report.metrics.items() if name == "learner.train")

        threads = [threading.Thread(target=run, args=(executor,)) for executor in executors]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert sum(rows) == 12
        wire.books.clear()  # the plain wire's own; `LeaseServer` has a test below

    assert_flat(step)


def test_turns_on_devices() -> None:
    turns = (Ticket(frozenset({0, 1}), 2), Ticket(frozenset({0}), 1), Ticket(frozenset({0, 1}), 2))
    server = LeaseServer({TRAIN: turns})

    async def holder(execution: int, ticket_ranks: tuple[tuple[int, int], ...]) -> None:
        for ticket, rank in ticket_ranks:
            await server.acquire(execution, ticket)
            await server.release(execution, ticket, rank)

    async def both(execution: int) -> None:
        server.begin(TRAIN, execution)
        await asyncio.gather(holder(execution, ((0, 0), (2, 0))), holder(execution, ((0, 1), (1, 0), (2, 1))))

    with asyncio.Runner() as runner:
        assert_flat(lambda i: runner.run(both(i)))


def test_checkpoints_with_retention(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # a busy disk would take a minute
    caplog.set_level(logging.WARNING, logger="c10d-NullHandler-dcp_logger")  # torch's; pytest would keep every record
    checkpoints = Checkpoints(tmp_path, keep=2)
    state = {"w": torch.ones(20_000), "n": 0}

    def step(i: int) -> None:
        aside = checkpoints.begin(i + 1)
        save_state(state, aside / "actor")
        path = checkpoints.commit(aside, Meta(i + 1, i + 1, "w", "m", {"actor": 1}))
        load_state(state, path / "actor")
        assert len(list(checkpoints.directory.iterdir())) == min(i + 1, 2)

    assert_flat(step)


class Last:
    def log(self, step: int, values: dict[str, float]) -> None:
        self.values = values

    def close(self) -> None: ...


@contextmanager
def tracking(output: Path) -> Iterator[Step]:
    said: list[str] = []
    cfg = LoggerConfig(tensorboard=True)
    trackers: Trackers = open_trackers(cfg, output, {"a": 1}, 1, said.append)
    transcripts = Samples(output, 1, said.append)
    background = Background("far", Last, said.append)
    console = LineConsole(io.StringIO())
    console.start(ITERATIONS, 0)
    values = {f"actor/value{i}": float(i) for i in range(30)}

    def step(i: int) -> None:
        trackers.log(i + 1, values)
        background.log(i + 1, values)
        transcripts.write(i + 1, [{"row_id": i, "response": "x" * 100}])
        console.step(i + 1, values, {"train": 0.1})

    yield step
    trackers.close()
    background.close()
    transcripts.close()
    assert said == []


def test_trackers_transcripts_and_console(tmp_path: Path) -> None:
    with tracking(tmp_path) as step:
        assert_flat(step)


def test_scorers_that_answer_fail_and_die() -> None:
    cfg = RewardConfig(scorer="tests.rewards.scorers_for_tests:misbehave", processes=2)
    good, bad, dies = (Sample(text, "4", "2+2?", {"n": [1, 2]}) for text in ("4", "raise", "exit"))
    with ScorerPool(cfg) as pool:

        def step(i: int) -> None:
            scored = pool.score([good, bad, good, dies if i % 60 == 30 else good])
            assert scored.failures.total() == 1 + (i % 60 == 30)
            if i % 60 == 30:
                pool.score([good] * 4)  # the one that died is replaced when it is needed

        assert_flat(step)
