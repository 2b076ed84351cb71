"""metricsamples.jsonl and samples.jsonl."""

import json
import math
import resource

import numpy as np
import pytest
import torch

from rlinf.tracking import Samples
from rlinf.tracking.files import JsonlTracker


def lines(path):
    def strict(name):
        raise ValueError(f"{name} is no JSON")

    return [json.loads(line, parse_constant=strict) for line in path.read_text().splitlines()]


def steps(path):
    return [line["step"] for line in lines(path)]


def test_a_line_a_step_on_disk_at_once(tmp_path):
    tracker = JsonlTracker(tmp_path / "m.jsonl", 1)
    tracker.log(1, {"a": 0.5, "none": math.nan, "big": math.inf})
    (line,) = lines(tmp_path / "m.jsonl")  # not closed yet
    assert line.pop("time") > 0
    assert line == {"step": 1, "a": 0.5, "none": None, "big": None}


def test_more_values_of_the_last_step_join_its_line(tmp_path):
    tracker = JsonlTracker(tmp_path / "m.jsonl", 1)
    tracker.log(1, {"a": 1.0})
    tracker.log(2, {"a": 2.0})
    tracker.log(2, {"eval": 3.0})
    tracker.log(3, {"a": 4.0})
    assert steps(tmp_path / "m.jsonl") == [1, 2, 3]
    assert lines(tmp_path / "m.jsonl")[1].items() >= {"a": 2.0, "eval": 3.0}.items()


def test_a_resumed_run_drops_what_it_does_again_and_a_torn_line(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text("".join(json.dumps({"step": s, "run": 1}) + "\n" for s in range(6)) + '{"step": 6, "ru')
    tracker = JsonlTracker(path, 4)
    assert steps(path) == [0, 1, 2, 3]
    tracker.log(3, {"eval": 1.0})  # evaluated again before it goes on
    tracker.log(4, {"run": 2.0})
    assert steps(path) == [0, 1, 2, 3, 4]
    assert lines(path)[3] == {"step": 3, "run": 1, "eval": 1.0}


def test_a_torn_line_of_a_kept_step_is_dropped(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "x"')
    JsonlTracker(path, 3).log(3, {})
    assert steps(path) == [1, 3]


def test_a_run_that_begins_anew_keeps_nothing(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n')
    JsonlTracker(path, 1)
    assert steps(path) == []


def test_a_full_disk_leaves_whole_lines(tmp_path):
    path = tmp_path / "m.jsonl"
    tracker = JsonlTracker(path, 1)
    tracker.log(1, {"a": 1.0})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, hard))
    try:
        with pytest.raises(OSError, match="large"):
            tracker.log(2, {"a": 2.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert steps(path) == [1]
    tracker.log(3, {"a": 3.0})
    assert steps(path) == [1, 3]


def test_transcripts_have_their_columns_in_order_and_any_answer(tmp_path):
    samples = Samples(tmp_path, 1)
    row = {
        "truncated": torch.tensor(True),
        "answer": {"value": np.float32("nan"), "parts": (1, object)},
        "reward": np.float32(0.5),
        "response": "5 ✓ \ud800",
        "question": "2+3?",
        "row_id": torch.tensor(7),
        "group_id": 1,
        "weight_version": np.int64(3),
        "note": torch.tensor([1, 2]),
    }
    samples.write(2, [row, {"row_id": 8}])
    first, second = lines(tmp_path / "samples.jsonl")
    assert list(first) == [
        *(
            "step",
            "row_id",
            "group_id",
            "question",
            "response",
            "reward",
            "answer",
            "weight_version",
            "truncated",
            "note",
        )
    ]
    assert first["answer"] == {"value": None, "parts": [1, "<class 'object'>"]}
    assert (first["row_id"], first["reward"], first["truncated"], first["note"]) == (7, 0.5, True, [1, 2])
    assert second == {"step": 2, "row_id": 8}


def test_transcripts_resume_without_doubles(tmp_path):
    path = tmp_path / "samples.jsonl"
    samples = Samples(tmp_path, 1)
    for step in (1, 2, 3):
        samples.write(step, [{"row_id": 1}, {"row_id": 2}])
    samples.close()
    Samples(tmp_path, 3).write(3, [{"row_id": 9}])
    assert [(line["step"], line["row_id"]) for line in lines(path)] == [(1, 1), (1, 2), (2, 1), (2, 2), (3, 9)]


def test_transcripts_that_cannot_be_written_are_said_once(tmp_path):
    said = []
    (tmp_path / "samples.jsonl").mkdir()
    samples = Samples(tmp_path, 1, warn=said.append)
    samples.write(1, [{"row_id": 1}])
    samples.close()
    assert len(said) == 1
    assert "samples.jsonl" in said[0]
