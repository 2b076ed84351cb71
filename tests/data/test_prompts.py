"""The stream of prompts: endless, without a gap, and resumable anywhere."""

from __future__ import annotations

import functools
import json
import pickle

import pytest
import torch

from rlinf.batch import Batch
from rlinf.config import DataConfig, ModelConfig
from rlinf.data import VALIDATION_ROWS, Prompts
from rlinf.errors import DataError

TINY = ModelConfig(name="tiny")


@pytest.fixture(scope="module", autouse=True)
def one_tokenizer():
    """Load the tokenizer once for all tests of this file."""
    import rlinf.models

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rlinf.models, "load_tokenizer", functools.cache(rlinf.models.load_tokenizer))
        yield


@pytest.fixture(scope="module")
def ten(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "ten.jsonl"
    path.write_text("".join(json.dumps({"question": f"q{i}", "answer": i}) + "\n" for i in range(10)))
    return str(path)


def prompts(path: str, split: str = "train", seed: int = 0, **settings) -> Prompts:
    settings = {"train_size": 0, "validation_size": 3, "prompts_per_step": 4, **settings}
    made = Prompts(DataConfig(kind="jsonl", train=path, **settings), TINY, split, seed)
    made.setup()
    return made


def same(a: Batch, b: Batch) -> bool:
    return (
        torch.equal(a["row_id"], b["row_id"])
        and torch.equal(a["prompt_ids"].values, b["prompt_ids"].values)
        and torch.equal(a["prompt_ids"].lengths, b["prompt_ids"].lengths)
        and all(a[name] == b[name] for name in ("question", "answer", "metadata"))
    )


def test_every_epoch_holds_every_prompt_once_across_batches_that_span_its_end(ten):
    stream = prompts(ten)
    assert stream.size == 7
    batches = [stream.next_batch() for _ in range(7)]  # 28 prompts, 4 epochs
    asked = [q for b in batches for q in b["question"]]
    epochs = [asked[i : i + 7] for i in range(0, 28, 7)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert torch.cat([b["row_id"] for b in batches]).tolist() == list(range(28))
    assert all(b.n == 4 and b["prompt_ids"].values.dtype == torch.int64 for b in batches)


def test_a_batch_larger_than_the_data_takes_several_epochs(ten):
    batch = prompts(ten, prompts_per_step=20).next_batch()
    assert batch["row_id"].tolist() == list(range(20))
    assert len(set(batch["question"][:7])) == 7


def test_without_shuffling_the_order_is_the_files(ten):
    stream = prompts(ten, shuffle=False, validation_size=0, prompts_per_step=10)
    assert [stream.next_batch()["answer"] for _ in range(2)] == [list(range(10))] * 2


@pytest.mark.parametrize("steps", range(9))
def test_a_resumed_stream_goes_on_bit_for_bit_also_at_an_epochs_end(ten, steps):
    whole, first = prompts(ten, prompts_per_step=7), prompts(ten, prompts_per_step=7)
    if steps % 2:
        whole, first = prompts(ten), prompts(ten)
    for _ in range(steps):
        assert same(whole.next_batch(), first.next_batch())
    second = prompts(ten, prompts_per_step=first.cfg.prompts_per_step)
    second.load_state(json.loads(json.dumps(first.state())))
    for _ in range(4):
        assert same(whole.next_batch(), second.next_batch())


def test_another_seed_gives_another_order(ten):
    a, b = (prompts(ten, seed=s, validation_size=0, prompts_per_step=10).next_batch() for s in (0, 1))
    assert a["question"] != b["question"]
    assert sorted(a["question"]) == sorted(b["question"])


def test_validation_is_whole_fixed_and_apart_from_train(ten):
    held, train = prompts(ten, "validation"), prompts(ten, prompts_per_step=7)
    first, second = held.next_batch(), held.next_batch()
    assert same(first, second)
    assert first["row_id"].tolist() == [VALIDATION_ROWS + i for i in range(3)]
    assert not set(first["question"]) & set(train.next_batch()["question"])
    assert held.report.held_out


def test_without_validation_rows_the_batch_is_empty_but_whole(ten):
    batch = prompts(ten, "validation", validation_size=0).next_batch()
    assert batch.n == 0
    assert {"row_id", *Prompts.writes} == set(batch)


def test_a_cursor_of_other_data_is_refused_with_both_named(ten, tmp_path):
    cursor = prompts(ten).state()
    with pytest.raises(DataError, match=r"prompts 7.*has 8"):
        prompts(ten, validation_size=2).load_state(cursor)
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps({"question": f"q{i}", "answer": i + 1}) + "\n" for i in range(10)))
    changed = prompts(str(other))
    with pytest.raises(DataError) as error:
        changed.load_state(cursor)
    assert cursor["digest"] in str(error.value)
    assert changed.report.digest in str(error.value)
    with pytest.raises(DataError, match=r"shuffle True.*has False"):
        prompts(ten, shuffle=False).load_state(cursor)


def test_it_pickles_before_setup_and_loads_nothing_until_then():
    missing = Prompts(DataConfig(kind="jsonl", train="/no/such/file"), ModelConfig(name="no model"), "train", 0)
    again = pickle.loads(pickle.dumps(missing))
    with pytest.raises(DataError, match="does not exist"):
        again.setup()
    with pytest.raises(RuntimeError, match="setup"):
        again.next_batch()


def test_overlong_prompts_are_counted_after_templating(tmp_path):
    path = tmp_path / "long.jsonl"
    texts = ["short", "x" * 100, "also short"]
    path.write_text("".join(json.dumps({"question": t, "answer": 0}) + "\n" for t in texts))
    fits = prompts(str(path), validation_size=0)
    assert fits.report.overlong == 0
    # One token a byte: the limit lies between the text's own length and that of the rendered prompt.
    assert fits.report.longest > 100
    cut = prompts(str(path), validation_size=0, max_prompt_tokens=100)
    assert (cut.report.overlong, cut.size) == (1, 2)
    assert "1 over 100 tokens" in str(cut.report)
    with pytest.raises(DataError, match=r"all 3 train prompts.*data\.max_prompt_tokens=4"):
        prompts(str(path), validation_size=0, max_prompt_tokens=4)


def test_the_report_counts_repeats_and_overlap_in_one_line(tmp_path):
    train, held = tmp_path / "t.jsonl", tmp_path / "v.jsonl"
    train.write_text("".join(json.dumps({"question": q, "answer": 0}) + "\n" for q in "abacd"))
    held.write_text("".join(json.dumps({"question": q, "answer": 0}) + "\n" for q in "cxx"))
    report = prompts(str(train), validation=str(held)).report
    assert (report.read, report.duplicates, report.overlap, report.prompts) == (5, 1, 1, 3)
    assert str(report).startswith("train: 3 prompts of 5 rows from jsonl")
    assert "\n" not in str(report)
    report = prompts(str(train), "validation", validation=str(held)).report
    assert (report.read, report.duplicates, report.overlap, report.prompts) == (3, 1, 1, 2)


def test_no_prompt_begins_twice(ten):
    from rlinf.models import load_tokenizer, resolve

    bos = load_tokenizer(resolve(TINY)).bos_token_id
    for ids in prompts(ten).next_batch()["prompt_ids"].rows():
        assert ids.tolist().count(bos) == 1


def test_questions_that_all_stand_in_validation_leave_none_for_training():
    cfg = DataConfig(
        kind="reasoning_gym",
        name="chain_sum",
        params={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        train_size=500,
        validation_size=64,
    )
    train, held = Prompts(cfg, TINY, "train", 0), Prompts(cfg, TINY, "validation", 0)
    train.setup()
    held.setup()
    assert train.report.overlap > 0
    assert train.report.duplicates > 0
    cfg.prompts_per_step = train.size
    assert not set(train.next_batch()["question"]) & set(held.next_batch()["question"])
