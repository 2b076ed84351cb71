"""What actor and critic have in common: a trainer, its checkpoint, its place on the device, its iterations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

from torch import nn

from rlinf.batch import ROW, Batch
from rlinf.models.packed import Packed
from rlinf.models.parallelize import reshard
from rlinf.swap import Swap, store_for
from rlinf.training.collective import Ranks
from rlinf.training.minibatch import check_once, minibatches
from rlinf.training.scoring import cut, dummy
from rlinf.training.state import load_training_state, training_state
from rlinf.training.trainer import Part, StepReport, Trainer
from rlinf.worker import Worker


class TrainedWorker(Worker):
    """A worker with a `Trainer`. Its ``setup`` sets the attributes.

    Attributes:
        version: training iterations that the weights have seen.
        ranks: the group.
        trainer: model and optimiser.
        named: the module within the trainer's model after which parameters are named.
    """

    collective = True
    version: int
    ranks: Ranks
    trainer: Trainer
    named: nn.Module

    def optimiser_steps(self, rows: Batch | Iterable[Batch]) -> Iterator[Iterator[Part]]:
        """One training iteration: for each optimiser step of each epoch, this rank's parts of its minibatch.

        Where an iteration is one minibatch, the parts of its first epoch come as the rows do. Otherwise, and in later
        epochs, a minibatch is one part. Iterate each step to its end before the next. After the last one ``version``
        counts one more. A collective.

        Args:
            rows: of this rank; on all ranks in equally many pieces.
        """
        algorithm = self.cfg.algorithm
        arrived: list[Batch] = []
        everyone: list[int] = []  # row ids of all ranks

        def as_they_come() -> Iterator[Part]:
            for batch in [rows] if isinstance(rows, Batch) else rows:
                arrived.append(batch)
                everyone.extend(self.ranks.gather_rows(batch[ROW].tolist() if batch.n else []))
                check_once(everyone)
                yield batch, self._cut(batch, range(batch.n))

        arriving = as_they_come()
        first = 0 if algorithm.mini_batch_size else 1
        if first:
            yield arriving
        for _ in arriving:
            pass
        batch = Batch.concat(arrived)
        place = {row: i for i, row in enumerate(batch[ROW].tolist() if batch.n else [])}
        plan = [
            members
            for epoch in range(first, algorithm.epochs)
            for members in minibatches(
                everyone, algorithm.mini_batch_size, seed=self.ctx.seed, iteration=self.version, epoch=epoch
            )
        ]
        for done, members in enumerate(plan):
            yield iter([(batch, self._cut(batch, [place[row] for row in members if row in place]))])
            self.ctx.report(done + 1, len(plan))
        self.version += 1

    def _cut(self, batch: Batch, rows: Sequence[int]) -> list[Packed]:
        return cut(batch, rows, self.cfg.tokens_per_micro_batch, self.ctx.device, self.trainer.model.shares_prompts)

    def record_step(self, report: StepReport) -> None:
        """Metrics that every optimiser step has."""
        self.metrics.mean("grad_norm", report.grad_norm)
        self.metrics.last("lr", report.lr)
        if self.ctx.rank == 0:  # all ranks skip the same steps, and metrics are summed over ranks
            self.metrics.sum("skipped_steps", float(report.skipped))

    @property
    def dummy(self) -> Packed:
        """A micro-batch of nothing."""
        return dummy(self.ctx.device)

    def state(self) -> dict[str, Any]:
        return {"version": self.version, **training_state(self.trainer, self.named)}

    def load_state(self, state: dict[str, Any]) -> None:
        load_training_state(self.trainer, self.named, state, self.ctx.rank)
        self.version = int(state["version"])

    @cached_property
    def swap(self) -> Swap:
        return Swap(self.trainer.tensors, store_for(self.ctx.device, self.ctx.offload_dir))

    def onload(self) -> None:
        self.swap.on()

    def offload(self) -> None:
        reshard(self.trainer.model)
        self.swap.off()

    def nbytes(self) -> int:
        return self.trainer.nbytes()
