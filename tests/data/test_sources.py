"""Where rows come from, and what is said about those that are wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from rlinf.config import DataConfig
from rlinf.data import check
from rlinf.data.sources import source_of
from rlinf.data.tasks import arithmetic, arithmetic_space
from rlinf.errors import DataError


def rows(cfg: DataConfig, split: str = "train") -> list:
    return list(source_of(cfg).rows(cfg, split, 0))


def jsonl(path: Path, *lines: object) -> DataConfig:
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return DataConfig(kind="jsonl", train=str(path))


GOOD = {"question": "1+1?", "answer": 2}


def test_jsonl_rows_keep_other_columns_as_metadata_and_pass_over_blank_lines(tmp_path):
    cfg = jsonl(tmp_path / "a.jsonl", GOOD | {"level": 3}, "\n", {"question": "é?", "answer": "x"})
    first, second = rows(cfg)
    assert (first.question, first.answer, first.metadata) == ("1+1?", 2, {"level": 3})
    assert second.text == "é?"
    assert second.where.endswith("row 3")


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ((GOOD, '{"question": "x", "answer"\n'), ["row 2", "malformed JSON"]),
        ((GOOD, {"question": "x", "anser": 1}), ["row 2", "'answer'", "Did you mean 'anser'", "data.answer_key"]),
        ((GOOD, {"prompt": "x", "answer": 1}), ["row 2", "no column 'question'", "data.question_key"]),
        ((GOOD, {"question": 7, "answer": 1}), ["row 2", "'question'", "int 7"]),
        ((GOOD, {"question": " ", "answer": 1}), ["row 2", "'question' is empty"]),
        ((GOOD, {"question": "x", "answer": None}), ["row 2", "'answer' is None"]),
        ((GOOD, '{"question": "x", "answer": NaN}\n'), ["row 2", "'answer' is nan"]),
        ((GOOD, [1, 2]), ["row 2", "list [1, 2]"]),
        ((GOOD, {"question": [{"role": "user"}], "answer": 1}), ["row 2", "message 0", "content"]),
        ((GOOD, {"question": [{"role": "system", "content": "x"}], "answer": 1}), ["row 2", "none of role 'user'"]),
    ],
)
def test_a_bad_row_names_file_row_and_column(tmp_path, lines, said):
    cfg = jsonl(tmp_path / "bad.jsonl", *lines)
    with pytest.raises(DataError) as error:
        rows(cfg)
    for text in ["bad.jsonl", *said]:
        assert text in str(error.value)


def test_text_that_is_not_utf8_is_an_error_with_its_place(tmp_path):
    (tmp_path / "bad.jsonl").write_bytes(json.dumps(GOOD).encode() + b"\n\xff\xfe\n")
    with pytest.raises(DataError, match="not UTF-8"):
        rows(DataConfig(kind="jsonl", train=str(tmp_path / "bad.jsonl")))


def test_answers_may_be_left_out_on_purpose(tmp_path):
    cfg = jsonl(tmp_path / "a.jsonl", {"question": "x"})
    cfg.answer_key = ""
    assert rows(cfg)[0].answer is None


def test_chat_questions_are_taken_and_their_text_is_the_last_user_message(tmp_path):
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    (row,) = rows(jsonl(tmp_path / "a.jsonl", {"question": chat, "answer": 1}))
    assert row.question == chat
    assert row.text == "c"


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_check_finds_a_missing_an_empty_and_an_unset_file(tmp_path, kind):
    with pytest.raises(DataError, match=r"gone\.x does not exist"):
        check(DataConfig(kind=kind, train=str(tmp_path / "gone.x")))
    (tmp_path / "empty").touch()
    with pytest.raises(DataError, match="empty"):
        check(DataConfig(kind=kind, train=str(tmp_path / "empty")))
    with pytest.raises(DataError, match=r"data\.train is not set"):
        check(DataConfig(kind=kind))
    with pytest.raises(DataError, match="is a folder"):
        check(DataConfig(kind=kind, train=str(tmp_path)))


def test_check_finds_a_file_of_blank_lines_and_a_wrong_validation_file(tmp_path):
    (tmp_path / "blank.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match="holds no rows"):
        check(DataConfig(kind="jsonl", train=str(tmp_path / "blank.jsonl")))
    cfg = jsonl(tmp_path / "a.jsonl", GOOD)
    cfg.validation = str(tmp_path / "gone.jsonl")
    with pytest.raises(DataError, match=r"data\.validation=.*does not exist"):
        check(cfg)


def test_parquet_rows_and_its_errors(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"q": ["x", "y"], "a": [1, 2], "tag": ["s", "t"]}), path)
    cfg = DataConfig(kind="parquet", train=str(path), question_key="q", answer_key="a")
    assert [(r.question, r.answer, r.metadata) for r in rows(cfg)] == [("x", 1, {"tag": "s"}), ("y", 2, {"tag": "t"})]
    with pytest.raises(DataError, match=r"a\.parquet: no column 'question'"):
        check(DataConfig(kind="parquet", train=str(path), answer_key="a"))
    pyarrow.parquet.write_table(pyarrow.table({"question": ["x", None], "answer": [1, 2]}), path)
    with pytest.raises(DataError, match=r"row 2: column 'question'"):
        rows(DataConfig(kind="parquet", train=str(path)))
    path.write_text("no parquet")
    with pytest.raises(DataError, match="not a readable parquet file"):
        check(DataConfig(kind="parquet", train=str(path)))


def test_hugging_face_data_sets_load_from_a_saved_folder_and_from_data_files(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    made = datasets.Dataset.from_dict({"question": ["x", "y"], "answer": ["1", "2"]})
    datasets.DatasetDict({"train": made}).save_to_disk(str(tmp_path / "saved"))
    cfg = DataConfig(kind="hf", name=str(tmp_path / "saved"))
    check(cfg)
    assert [r.answer for r in rows(cfg)] == ["1", "2"]
    cfg.train = "trian"
    with pytest.raises(DataError, match=r"no split 'trian'; it has \['train'\]"):
        check(cfg)

    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "train.jsonl").write_text(json.dumps(GOOD) + "\n")
    cfg = DataConfig(kind="hf", name=str(tmp_path / "files"), params={"cache_dir": str(tmp_path / "cache")})
    assert [r.question for r in rows(cfg)] == ["1+1?"]
    cfg.question_key = "problem"
    with pytest.raises(DataError, match="no column 'problem'"):
        check(cfg)


def test_hugging_face_data_sets_that_are_not_there():
    with pytest.raises(DataError, match=r"data\.name is not set"):
        check(DataConfig(kind="hf"))
    with pytest.raises(DataError, match="does not exist"):
        check(DataConfig(kind="hf", name="./no/such/folder"))


USER_MODULE = """
def plain(n):
    for i in range(n):
        yield {"question": f"q{i}", "answer": i, "level": i}

def split_aware(split, seed):
    return [{"question": f"{split} {seed}", "answer": 1}]

def bad():
    return [{"question": "x", "answer": 1}, {"question": "x"}]

def scalar():
    return 3

constant = 7
"""


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    (tmp_path / "my_rows_module.py").write_text(USER_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "my_rows_module"
    sys.modules.pop("my_rows_module", None)


def test_a_users_function_gives_rows_by_import_path(user_module):
    cfg = DataConfig(kind=f"{user_module}:plain", params={"n": 2})
    check(cfg)
    assert [(r.question, r.answer, r.metadata) for r in rows(cfg)] == [("q0", 0, {"level": 0}), ("q1", 1, {"level": 1})]
    assert not source_of(cfg).own_validation(cfg)
    cfg = DataConfig(kind=f"{user_module}.split_aware")
    assert rows(cfg, "validation")[0].question == "validation 0"
    assert source_of(cfg).own_validation(cfg)


@pytest.mark.parametrize(
    ("function", "params", "said"),
    [
        (":plain", {}, "missing a required argument: 'n'"),
        (":plain", {"n": 1, "m": 2}, "unexpected keyword argument 'm'"),
        (":plian", {}, "Did you mean 'plain'"),
        (":constant", {}, "is a int; expected a function"),
        (":bad", {}, "train row 1: no column 'answer'"),
        (":scalar", {}, "returned int; expected an iterable"),
    ],
)
def test_what_is_wrong_with_a_users_function_is_said(user_module, function, params, said):
    cfg = DataConfig(kind=user_module + function, params=params)

    def check_and_read() -> None:
        check(cfg)
        rows(cfg)

    with pytest.raises(DataError, match=said):
        check_and_read()


def test_a_module_that_is_not_there_is_named():
    with pytest.raises(DataError, match="cannot import 'no_such_module'"):
        check(DataConfig(kind="no_such_module:rows"))


def test_an_unknown_kind_names_the_nearest():
    with pytest.raises(DataError, match=r"unknown data.kind 'jsnl'. Did you mean 'jsonl'"):
        check(DataConfig(kind="jsnl"))


def test_an_unknown_task_or_parameter_names_the_nearest():
    with pytest.raises(DataError, match="Did you mean 'chain_sum'"):
        check(DataConfig(kind="reasoning_gym", name="chainsum"))
    with pytest.raises(DataError, match=r"no parameter 'min_term'.*Did you mean 'min_terms'"):
        check(DataConfig(kind="reasoning_gym", name="chain_sum", params={"min_term": 2}))
    with pytest.raises(DataError, match=r"refused data\.params"):
        check(DataConfig(kind="reasoning_gym", name="chain_sum", params={"min_terms": 5, "max_terms": 2}))


def test_a_reasoning_gym_task_gives_the_same_rows_for_the_same_seed():
    cfg = DataConfig(kind="reasoning_gym", name="chain_sum", train_size=5, validation_size=5)
    assert rows(cfg) == rows(cfg)
    assert [r.question for r in rows(cfg)] != [r.question for r in rows(cfg, "validation")]


def test_single_digit_sums_are_the_hundred_questions():
    made = rows(DataConfig(kind="arithmetic", train_size=0))
    expected = {f"What is {a}+{b}?": str(a + b) for a in range(10) for b in range(10)}
    assert {r.question: r.answer for r in made} == expected
    assert len(made) == 100


def test_arithmetic_enumerates_distinct_questions_with_the_right_answers():
    space = arithmetic_space(1, "*+-", 3)
    made = [arithmetic(i, 1, "*+-", 3) for i in range(space)]
    assert space == 9000 == len({r.question for r in made})
    by_question = {r.question: r.answer for r in made}
    assert by_question["What is 2+3*4?"] == "14"
    assert by_question["What is 9-5-4?"] == "0"


@pytest.mark.parametrize("digits", [2, 12])
def test_a_sample_of_a_large_space_is_distinct_and_seeded(digits):
    cfg = DataConfig(kind="arithmetic", params={"digits": digits}, train_size=50, validation_size=10)
    first = [r.question for r in rows(cfg)]
    assert len(set(first)) == 60
    assert first == [r.question for r in rows(cfg)]
    assert first != [r.question for r in source_of(cfg).rows(cfg, "train", 1)]


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"digit": 1}, "Did you mean 'digits'"),
        ({"digits": 0}, "at least 1"),
        ({"digits": "2"}, "whole number"),
        ({"terms": 1}, "at least 2"),
        ({"operators": "+/"}, r"operators='\+/'"),
        ({"operators": ""}, "operators=''"),
    ],
)
def test_arithmetic_refuses_wrong_parameters(params, said):
    with pytest.raises(DataError, match=said):
        check(DataConfig(kind="arithmetic", params=params))


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"prompts_per_step": 0}, "data.prompts_per_step=0"),
        ({"max_prompt_tokens": 0}, "data.max_prompt_tokens=0"),
        ({"validation_size": -1}, "data.validation_size=-1"),
        ({"template": "Answer."}, r"no \{question\}"),
        ({"chat_template": "own"}, "expected one of auto, plain"),
    ],
)
def test_check_refuses_settings_that_make_no_sense(setting, said):
    with pytest.raises(DataError, match=said):
        check(DataConfig(kind="arithmetic", **setting))
