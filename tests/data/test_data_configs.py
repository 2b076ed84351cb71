"""The shipped data configs compose, pass their checks, and give prompts that their scorer can score."""

from __future__ import annotations

import json
import re

import pytest

from rlinf import data, rewards
from rlinf.compose import compose, groups
from rlinf.errors import DataError

RIGHT = {
    "sums": "It is {answer}.",
    "digits": "1234",
    "chain_sum": "Thus <answer>{answer}</answer>",
    "gsm_symbolic": "Thus\n{answer}",
    "jsonl": r"\boxed{{{answer}}}",
}


@pytest.mark.parametrize("name", groups()["data"])
def test_every_data_config_gives_prompts_whose_right_answer_scores_one(name, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"question": f"{i}+1?", "answer": i + 1}) + "\n" for i in range(20)))
    overrides = [f"data.train={file}", "data.validation_size=4"] if name == "jsonl" else []
    cfg = compose(["workflow=grpo", "model=tiny", f"data={name}", *overrides])
    if cfg.data.kind == "reasoning_gym":
        cfg.data.train_size, cfg.data.validation_size, cfg.data.max_prompt_tokens = 20, 4, 2048
    data.check(cfg.data)
    rewards.check(cfg.reward)
    stream = data.Prompts(cfg.data, cfg.model, "train", cfg.seed)
    stream.setup()
    batch = stream.next_batch()
    score = rewards.load_scorer(cfg.reward.scorer, cfg.reward.params)
    for question, answer, metadata in zip(batch["question"], batch["answer"], batch["metadata"], strict=True):
        assert score(RIGHT[name].format(answer=answer), answer, question, metadata) == 1.0
        assert score("", answer, question, metadata) < 0.1


def test_the_default_data_are_single_digit_sums_with_twenty_held_out():
    cfg = compose(["workflow=grpo", "model=tiny"])
    made = [data.Prompts(cfg.data, cfg.model, split, 0) for split in ("train", "validation")]
    for stream in made:
        stream.setup()
    assert [stream.size for stream in made] == [80, 20]
    assert all(re.fullmatch(r"What is \d\+\d\?", q) for q in made[1].next_batch()["question"])


def test_the_file_of_a_jsonl_run_must_be_given():
    cfg = compose(["workflow=grpo", "model=tiny", "data=jsonl"])
    with pytest.raises(DataError, match=r"data\.train is not set"):
        data.check(cfg.data)
