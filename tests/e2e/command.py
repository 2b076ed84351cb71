"""Run the train command as a person does, and look at what it leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from safetensors.torch import load_file

SMALL = (
    "model=tiny",
    "data=digits",
    "rollout.engine=hf",
    "data.prompts_per_step=2",
    "data.validation_size=4",
    "rollout.samples_per_prompt=4",
    "rollout.max_new_tokens=6",
    "actor.optimizer.lr=1e-3",
    "critic.optimizer.lr=1e-3",
    "logger.tensorboard=false",
    "vps.verify=true",
)
REPOSITORY = Path(__file__).parents[2]
LEAVE_S = 10.0  # a run that ends takes everything with it within this


class Command:
    """One run of ``python -m rlinf.train``, or of another command; every process that it ever had is remembered."""

    def __init__(
        self, folder: Path, *arguments: str, env: dict[str, str] | None = None, module: str = "rlinf.train"
    ) -> None:
        self.output = folder / f"said-{time.time_ns()}.txt"
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                cwd=folder,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
                | {"PYTHONPATH": str(REPOSITORY)}
                | (env or {}),
            )
        self._seen: dict[int, psutil.Process] = {}

    def look(self) -> list[psutil.Process]:
        """Descendants that are alive now; remembers them."""
        try:
            found = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            found = []
        for process in found:
            self._seen.setdefault(process.pid, process)
        return found

    def until(self, condition: Callable[[], bool], timeout_s: float = 240.0) -> None:
        """Watch until something is so, or the run ends."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            self.look()
            assert self.process.poll() is None, f"it ended with {self.process.returncode}: {self.said()}"
            assert time.monotonic() < deadline, f"timed out: {self.said()}"
            time.sleep(0.1)
        self.look()

    def rank(self, name: str) -> psutil.Process:
        """The process of a rank, by the log that it writes to, e.g. ``actor-0.log``."""
        for process in self.look():
            try:
                if os.readlink(f"/proc/{process.pid}/fd/1").endswith(name):
                    return process
            except OSError:
                continue
        raise AssertionError(f"no process writes {name}")

    def wait(self, timeout_s: float = 300.0) -> int:
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None:
            self.look()
            assert time.monotonic() < deadline, f"timed out: {self.said()}"
            time.sleep(0.1)
        return self.process.returncode

    def leftovers(self, timeout_s: float = LEAVE_S) -> list[str]:
        """Processes of the run that are still there after ``timeout_s``."""
        _, alive = psutil.wait_procs(list(self._seen.values()), timeout=timeout_s)
        return [f"{p.pid} {p.name()}" for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    def said(self) -> str:
        return self.output.read_text()


def steps_done(folder: Path) -> int:
    """The last training step in the metrics of a run."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return 0
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return max((line["step"] for line in lines if "time/step" in line), default=0)


def weights(folder: Path) -> dict[str, object]:
    return load_file(folder / "export" / "model.safetensors")


__all__ = ["LEAVE_S", "SMALL", "Command", "steps_done", "weights"]
