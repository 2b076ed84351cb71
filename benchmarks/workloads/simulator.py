"""A workflow around a simulator: a pole on a cart, balanced by a small policy that learns by REINFORCE.

The simulator steps in Python, on one core, and so does the learner: neither becomes faster by more of them. Episodes go
on to the learner as they end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rlinf.batch import Batch
from rlinf.config import TrainConfig
from rlinf.m2flow.graph import Workflow
from rlinf.worker import Worker, stage

WIDTH = 256  # of the policy's two hidden layers
Arrays = list[np.ndarray]


@dataclass(frozen=True)
class Settings:
    """
    Attributes:
        episodes: of an iteration.
        steps: of an episode.
    """

    episodes: int = 64
    steps: int = 300


class Starts:
    """States that episodes begin in, a little off the middle."""

    writes = ("start",)

    def __init__(self, settings: Settings) -> None:
        self.settings, self.made = settings, 0

    def setup(self) -> None: ...

    def next_batch(self) -> Batch:
        rows = torch.arange(self.made, self.made + self.settings.episodes)
        start = torch.rand(len(rows), 4, generator=torch.Generator().manual_seed(self.made)) * 0.1 - 0.05
        self.made += len(rows)
        return Batch({"row_id": rows, "start": start})

    def state(self) -> dict[str, Any]:
        return {"made": self.made}

    def load_state(self, state: dict[str, Any]) -> None:
        self.made = int(state["made"])


def policy() -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(4, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, 2))


def arrays(model: torch.nn.Module) -> Arrays:
    return [parameter.detach().numpy().copy() for parameter in model.parameters()]


class Simulator(Worker):
    cfg: Settings

    def setup(self) -> None:
        self.weights = arrays(policy())

    @stage(reads=("start",), writes=("observations", "actions", "returns"))
    def simulate(self, batch: Batch) -> Iterator[Batch]:
        """Episodes one by one, always of the same length: a pole that has fallen starts again."""
        for row, start in zip(batch["row_id"].tolist(), batch["start"].numpy(), strict=True):
            seen, done, rewards = self._episode(np.random.default_rng(row), start.astype(np.float64))
            returns = np.cumsum(rewards[::-1])[::-1].astype(np.float32)
            yield Batch(
                {
                    "row_id": torch.tensor([row]),
                    "observations": torch.from_numpy(seen.astype(np.float32))[None],
                    "actions": torch.from_numpy(done)[None],
                    "returns": torch.from_numpy((returns - returns.mean()) / (returns.std() + 1e-6))[None],
                }
            )

    def _episode(self, rng: np.random.Generator, start: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        w1, b1, w2, b2, w3, b3 = self.weights
        seen, done = np.zeros((self.cfg.steps, 4)), np.zeros(self.cfg.steps, np.int64)
        rewards, state = np.ones(self.cfg.steps), start
        for step in range(self.cfg.steps):
            seen[step] = state
            scores = w3 @ np.tanh(w2 @ np.tanh(w1 @ state + b1) + b2) + b3
            done[step] = rng.random() < 1 / (1 + math.exp(scores[0] - scores[1]))
            state = moved(state, int(done[step]))
            if abs(state[0]) > 2.4 or abs(state[2]) > 0.21:
                rewards[step], state = -10.0, start
        return seen, done, rewards

    def receive_weights(self, version: int, publications: Any) -> None:
        self.weights = publications[0]


def moved(state: np.ndarray, push: int) -> np.ndarray:
    """A fiftieth of a second of the cart and its pole (Barto, Sutton, Anderson, 1983), by Euler's method."""
    x, speed, angle, spin = state
    force, mass, pole, half = (10.0 if push else -10.0), 1.1, 0.05, 0.5
    sine, cosine = math.sin(angle), math.cos(angle)
    swing = (force + pole * spin * spin * sine) / mass
    turned = (9.8 * sine - cosine * swing) / (half * (4 / 3 - 0.1 * cosine * cosine / mass))
    pushed = swing - pole * turned * cosine / mass
    return np.array([x + 0.02 * speed, speed + 0.02 * pushed, angle + 0.02 * spin, spin + 0.02 * turned])


class Learner(Worker):
    def setup(self) -> None:
        self.model = policy()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4)

    @stage(reads=("observations", "actions", "returns"), updates=True, streams=True)
    def learn(self, rows: Batch | Iterable[Batch]) -> None:
        """Gradients of each piece as it comes, one step at the end."""
        self.optimizer.zero_grad()
        for batch in [rows] if isinstance(rows, Batch) else rows:
            logits = self.model(batch["observations"])
            taken = torch.log_softmax(logits, -1).gather(-1, batch["actions"][..., None])[..., 0]
            (-(taken * batch["returns"]).sum()).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def publish_weights(self, target: str, inline: bool, slot: int = 0) -> Any:
        return arrays(self.model)


def simulator(cfg: TrainConfig) -> Workflow:
    flow = Workflow("simulator")
    settings = Settings()
    simulates, learns = flow.worker(Simulator, settings), flow.worker(Learner)
    learns.learn(simulates.simulate(flow.source(Starts(settings))))
    flow.sync(learns, simulates)
    return flow
