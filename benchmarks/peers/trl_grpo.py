"""TRL's GRPOTrainer on single-digit sums, step by step on the clock. Run it with TRL's own Python:

    .peers/trl/bin/python benchmarks/peers/trl_grpo.py MODEL_DIRECTORY --steps 3 --warmup 1

It trains in float32 on the CPU, with whatever speeds it up there (no gradient checkpointing, no accumulation, no
reference model), and prints one JSON line:

- ``seconds``: wall clock of each step after the warm-up: generation, scoring, forward, backward, optimiser;
- ``rewards``: mean score of the samples of each of them;
- ``tokens``: tokens of their responses, up to and including EOS.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import sys
import tempfile
import time
from typing import Any

QUESTION = "What is {a}+{b}? Answer with a number."
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def last_number(completions: list[list[dict[str, str]]], answer: list[int], **_columns: Any) -> list[float]:
    """1 where the last number of the response is the answer. (TRL passes every other column as a keyword.)"""
    scores = []
    for messages, expected in zip(completions, answer, strict=True):
        numbers = _NUMBER.findall(messages[-1]["content"])
        scores.append(float(bool(numbers) and float(numbers[-1]) == expected))
    return scores


def sums(count: int, seed: int) -> list[dict[str, Any]]:
    """Questions about sums of two digits, as chat messages, with their answers."""
    rng = random.Random(seed)
    pairs = [(rng.randrange(10), rng.randrange(10)) for _ in range(count)]
    return [{"prompt": [{"role": "user", "content": QUESTION.format(a=a, b=b)}], "answer": a + b} for a, b in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="a Hugging Face model directory")
    parser.add_argument("--steps", type=int, default=3, help="steps that are timed")
    parser.add_argument("--warmup", type=int, default=1, help="steps before them")
    parser.add_argument("--prompts", type=int, default=4, help="prompts in a step")
    parser.add_argument("--samples", type=int, default=8, help="responses to a prompt")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.steps < 1 or args.warmup < 0 or args.samples < 2:
        parser.error("needs --steps of 1 or more, --warmup of 0 or more, --samples of 2 or more")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # The result alone goes to standard output; everything that the libraries print goes to standard error.
    result, sys.stdout = sys.stdout, sys.stderr
    print(json.dumps(measure(args)), file=result, flush=True)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Train, and give the figures named at the top of the file."""
    import torch
    import transformers
    import trl
    from datasets import Dataset

    torch.set_num_threads(args.threads)

    class Clock(transformers.TrainerCallback):
        """Wall clock of each step: the trainer generates inside the step."""

        def __init__(self) -> None:
            self.seconds: list[float] = []
            self._start = 0.0

        def on_step_begin(self, *_args: Any, **_kwargs: Any) -> None:
            self._start = time.perf_counter()

        def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
            self.seconds.append(time.perf_counter() - self._start)

    clock = Clock()
    steps = args.warmup + args.steps
    batch = args.prompts * args.samples
    with tempfile.TemporaryDirectory() as folder:
        config = trl.GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            fp16=False,
            model_init_kwargs={"dtype": "float32"},
            gradient_checkpointing=False,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=1,
            num_generations=args.samples,
            max_completion_length=args.max_new_tokens,
            num_iterations=1,
            temperature=1.0,
            beta=0.0,
            learning_rate=args.learning_rate,
            lr_scheduler_type="constant",
            warmup_steps=0,
            max_steps=steps,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=args.seed,
        )
        trainer = trl.GRPOTrainer(
            model=args.model,
            reward_funcs=last_number,
            args=config,
            train_dataset=Dataset.from_list(sums(steps * args.prompts, args.seed)),
            callbacks=[clock],
        )
        trainer.train()
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    if len(logs) != steps or len(clock.seconds) != steps:
        raise RuntimeError(f"expected {steps} steps, TRL made {len(clock.seconds)} and logged {len(logs)}")
    return {
        "peer": "trl",
        "version": trl.__version__,
        "seconds": [round(seconds, 3) for seconds in clock.seconds[args.warmup :]],
        "rewards": [float(entry["reward"]) for entry in logs[args.warmup :]],
        "tokens": [round(entry["completions/mean_length"] * batch) for entry in logs[args.warmup :]],
        "prompts": args.prompts,
        "samples": args.samples,
        "max_new_tokens": args.max_new_tokens,
        "learning_rate": args.learning_rate,
        "threads": args.threads,
    }


if __name__ == "__main__":
    main()
