"""Prompts: the endless, resumable stream of prompts that a workflow starts from."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

from rlinf.batch import Batch, Ragged
from rlinf.config import DataConfig, ModelConfig
from rlinf.data.checks import check
from rlinf.data.report import DataReport
from rlinf.data.row import Row
from rlinf.data.sources import Split, source_of
from rlinf.data.splits import describe, split_rows
from rlinf.data.template import Renderer
from rlinf.errors import DataError
from rlinf.seeding import derive

VALIDATION_ROWS = 2**40  # first row_id of validation; a training run does not count that far


class Prompts:
    """Prompts of one split.

    Cheap to make and to pickle; `setup` reads and tokenises. The position in the stream alone says what comes next:
    prompt ``p`` is number ``p % size`` of epoch ``p // size``'s order, which derives from the seed and the epoch. So a
    batch may span an epoch's end, and a resumed run goes on at the exact next prompt.

    Args:
        cfg: what to read and how to render it.
        model: whose tokenizer renders the prompts.
        split: ``"train"`` or ``"validation"``.
        seed: the run's seed.

    Attributes:
        report: what became of the rows; there after `setup`.
    """

    writes = ("prompt_ids", "question", "answer", "metadata")

    def __init__(self, cfg: DataConfig, model: ModelConfig, split: Split, seed: int) -> None:
        if split not in ("train", "validation"):
            raise DataError(f"split {split!r}; expected train or validation")
        self.cfg = cfg
        self.model = model
        self.split: Split = split
        self.seed = seed
        self.report: DataReport | None = None
        self._rows: list[Row] = []
        self._tokens: list[torch.Tensor] = []
        self._position = 0
        self._order: tuple[int, list[int]] = (-1, [])

    def setup(self) -> None:
        """Read, split, render, and leave out what is too long.

        Raises:
            DataError: as `check`; a bad row; nothing left.
        """
        from rlinf.models import load_tokenizer, resolve

        check(self.cfg)
        splits = split_rows(self.cfg, source_of(self.cfg), self.seed)
        train = self.split == "train"
        renderer = Renderer(load_tokenizer(resolve(self.model)), self.cfg)
        self._rows, self._tokens = [], []
        overlong, longest = 0, 0
        for row in splits.train if train else splits.validation:
            ids = renderer.tokens(row)
            longest = max(longest, len(ids))
            if len(ids) > self.cfg.max_prompt_tokens:
                overlong += 1
            else:
                self._rows.append(row)
                self._tokens.append(torch.tensor(ids, dtype=torch.int64))
        if overlong and not self._rows:
            raise DataError(
                f"all {overlong} {self.split} prompts have more than data.max_prompt_tokens="
                f"{self.cfg.max_prompt_tokens} tokens (the longest {longest}); raise it"
            )
        self.report = DataReport(
            split=self.split,
            source=describe(self.cfg, self.split),
            read=splits.train_read if train else splits.validation_read,
            duplicates=splits.train_duplicates if train else splits.validation_duplicates,
            overlap=splits.overlap,
            overlong=overlong,
            prompts=len(self._rows),
            longest=max((len(t) for t in self._tokens), default=0),
            max_prompt_tokens=self.cfg.max_prompt_tokens,
            held_out=splits.held_out,
            digest=self._digest(),
        )

    @property
    def size(self) -> int:
        """Prompts in the split."""
        return self._ready().prompts

    def next_batch(self) -> Batch:
        """Train: the next ``prompts_per_step`` prompts. Validation: all of them, in the same order every time.

        ``row_id`` is the position in the run's stream of prompts, from 0 (validation: from `VALIDATION_ROWS`); it never
        comes twice in training, though a prompt does in a later epoch. Without validation rows the batch is empty.
        """
        size = self.size
        if self.split == "validation":
            return self._batch(list(range(size)), VALIDATION_ROWS)
        first, self._position = self._position, self._position + self.cfg.prompts_per_step
        return self._batch([self._at(p, size) for p in range(first, self._position)], first)

    def state(self) -> dict[str, int | str | bool]:
        """The cursor: what `load_state` needs to go on at the next prompt."""
        report = self._ready()
        return {
            "position": self._position,
            "size": report.prompts,
            "digest": report.digest,
            "seed": self.seed,
            "shuffle": self.cfg.shuffle,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on where the cursor stands.

        Raises:
            DataError: the cursor belongs to other data or to another order of it; names both.
        """
        here = self.state()
        for key, what in (("size", "prompts"), ("digest", "content digest"), ("seed", "seed"), ("shuffle", "shuffle")):
            if state.get(key) != here[key]:
                raise DataError(
                    f"the saved {self.split} cursor is of a data set with {what} {state.get(key)}, this run's "
                    f"({describe(self.cfg, self.split)}) has {here[key]}; resume with the data, tokenizer, template "
                    "and seed of the saved run, or start a new run"
                )
        self._position = int(state["position"])

    def _ready(self) -> DataReport:
        if self.report is None:
            raise RuntimeError("Prompts.setup() has not been called")
        return self.report

    def _at(self, position: int, size: int) -> int:
        epoch, place = divmod(position, size)
        if not self.cfg.shuffle:
            return place
        if self._order[0] != epoch:
            generator = torch.Generator().manual_seed(derive(self.seed, "epoch", epoch))
            self._order = (epoch, torch.randperm(size, generator=generator).tolist())
        return self._order[1][place]

    def _batch(self, chosen: list[int], first: int) -> Batch:
        return Batch(
            {
                "row_id": torch.arange(first, first + len(chosen), dtype=torch.int64),
                "prompt_ids": Ragged.of([self._tokens[i] for i in chosen], torch.int64),
                "question": [self._rows[i].text for i in chosen],
                "answer": [self._rows[i].answer for i in chosen],
                "metadata": [self._rows[i].metadata for i in chosen],
            }
        )

    def _digest(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for row, tokens in zip(self._rows, self._tokens, strict=True):
            digest.update(json.dumps([tokens.tolist(), row.identity, row.answer], default=repr).encode())
        return digest.hexdigest()
