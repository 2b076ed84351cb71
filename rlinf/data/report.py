"""DataReport: what became of the rows, said in one line."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DataReport:
    """Counts of one split, and of what it has in common with the other.

    Attributes:
        split: ``train`` or ``validation``.
        source: where the rows come from.
        read: rows read for this split (for a split held out of train: rows set aside).
        duplicates: rows left out because an earlier row of the split asks the same question.
        overlap: questions that both splits held; they stay in validation alone.
        overlong: prompts left out because they have more than ``max_prompt_tokens`` tokens.
        prompts: prompts that remain.
        longest: tokens of the longest that remains.
        max_prompt_tokens: the limit.
        held_out: validation was held out of train, for lack of rows of its own.
        digest: hash of the remaining prompts and answers; two splits with the same digest are the same data.
    """

    split: str
    source: str
    read: int
    duplicates: int
    overlap: int
    overlong: int
    prompts: int
    longest: int
    max_prompt_tokens: int
    held_out: bool
    digest: str

    def __str__(self) -> str:
        origin = " held out of train" if self.held_out and self.split == "validation" else ""
        other = "validation" if self.split == "train" else "train"
        return (
            f"{self.split}: {self.prompts} prompts of {self.read} rows{origin} from {self.source} "
            f"({self.duplicates} duplicates, {self.overlap} shared with {other}, "
            f"{self.overlong} over {self.max_prompt_tokens} tokens); "
            f"longest {self.longest} tokens, digest {self.digest[:12]}"
        )
