"""What a run leaves of its time: a trace that Perfetto reads, a page with every span, and why devices stand still."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.m2flow.compiler import Compiled, compile_plan
from rlinf.m2flow.costs import load_costs
from rlinf.m2flow.executor import Report
from rlinf.m2flow.gantt import chart, device_lines
from rlinf.m2flow.graph import TRAIN, Graph
from rlinf.m2flow.idle import BETWEEN, OVER, TURN, device_times
from rlinf.m2flow.page import RANKS, Shown, page_data, save_page
from rlinf.m2flow.record import KEPT, SHOWN, Record, expect
from rlinf.m2flow.simulate import Cost, Costs, simulate
from rlinf.m2flow.timeline import Doing, Execution, Span
from rlinf.m2flow.trace import events, save_trace
from tests.m2flow.test_executor import execute
from tests.m2flow.test_pipelines import graph_of, plans

COSTS = Costs(
    nodes={
        "maker.make": Cost(1.0, 2.0),
        "scores.score": Cost(0.0, 0.25),
        "learner.values": Cost(0.0, 0.25),
        "learner.train": Cost(0.5, 0.5),
    },
    sync={("learner", "maker"): 1.0},
    rows={"host.source0": 6},
)


def made(m: int = 4, kind: str = "disaggregated", staleness: int = 0, dp: int = 2) -> tuple[Graph, Compiled]:
    graph = graph_of(dp, 1, dp)
    return graph, compile_plan(graph, plans(graph, m)[kind], staleness)


def runs(graph: Graph, compiled: Compiled, count: int = 3, at: float = 1.8e9) -> list[Execution]:
    """Iterations one after the other, as a clock would tell of them."""
    spans, _ = expect(graph, compiled, TRAIN, COSTS)
    end = max(span.end for own in spans.values() for span in own)
    return [
        Execution(
            TRAIN,
            i + 1,
            {
                rank: [replace(s, start=s.start + at + i * end, end=s.end + at + i * end) for s in own]
                for rank, own in spans.items()
            },
        )
        for i in range(count)
    ]


def reports(execution: Execution) -> list[Report]:
    return [Report(group, rank, spans=list(spans)) for (group, rank), spans in execution.spans.items()]


# Trace


def check_trace(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The rules of the format, as its description has them; returns the complete events."""
    assert found["displayTimeUnit"] in ("ms", "ns")
    named, spans = set(), []
    for event in found["traceEvents"]:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["name"], str)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
            ((key, value),) = event["args"].items()
            assert isinstance(value, int if key == "sort_index" else str)
            named.add((event["name"], event["pid"], event["tid"]))
        else:
            assert event["ph"] == "X"
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            assert event["cat"]
            assert isinstance(event["args"], dict)
            spans.append(event)
    threads: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in spans:
        threads.setdefault((event["pid"], event["tid"]), []).append(event)
    for (pid, tid), own in threads.items():
        assert ("process_name", pid, 0) in named
        assert ("thread_name", pid, tid) in named
        around: list[float] = []  # complete events of a thread are apart or nested
        for event in sorted(own, key=lambda event: (event["ts"], -event["dur"])):
            while around and around[-1] <= event["ts"] + 1e-6:
                around.pop()
            assert not around or event["ts"] + event["dur"] <= around[-1] + 2e-3, (pid, tid, event)
            around.append(event["ts"] + event["dur"])
    return spans


@pytest.mark.parametrize("kind", ["collocated", "apart", "disaggregated", "hybrid"])
@pytest.mark.parametrize("staleness", [0, 2])
def test_a_trace_is_in_the_format_and_has_every_span(kind: str, staleness: int, tmp_path: Path) -> None:
    graph, compiled = made(kind=kind, staleness=staleness)
    executions = runs(graph, compiled)
    save_trace(graph, compiled, executions, tmp_path / "trace.json")
    found = check_trace(json.loads((tmp_path / "trace.json").read_text()))
    of_ranks = [event for event in found if event["pid"]]
    expected = [span for run in executions for own in run.spans.values() for span in own]
    assert len(of_ranks) == len(expected)
    assert sum(event["dur"] for event in of_ranks) == pytest.approx(1e6 * sum(s.end - s.start for s in expected))
    assert sum(event["args"].get("rows", 0) for event in of_ranks) == sum(span.rows for span in expected)
    assert {event["cat"] for event in of_ranks} == {"run", "wait", "sync"}
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


MOMENTS = st.lists(
    st.tuples(st.sampled_from(list(Doing)), st.floats(0, 1e3), st.floats(-10, 1e3)), min_size=1, max_size=30
)


@settings(max_examples=60)
@given(MOMENTS)
def test_a_trace_is_in_the_format_whatever_the_clocks_did(moments: list[tuple[Doing, float, float]]) -> None:
    graph, compiled = made()
    spans = [Span(doing, "scores.score", start, start + more) for doing, start, more in moments]
    run = Execution(TRAIN, 1, {("scores", 0): spans, ("maker", 1): sorted(spans, key=lambda s: s.start)})
    check_trace({"displayTimeUnit": "ms", "traceEvents": list(events(graph, compiled, [run, run]))})


def test_what_lies_within_a_stage_is_nested_in_it() -> None:
    graph, compiled = made()
    spans = [Span(Doing.RUN, "maker.make", 1.0, 9.0, 6), Span(Doing.SYNC, "receive weights from learner", 2.0, 4.0)]
    spans.append(Span(Doing.ROWS, "maker.make", 9.0, 10.0))
    run = Execution(TRAIN, 1, {("maker", 0): spans})
    found = check_trace({"displayTimeUnit": "ms", "traceEvents": list(events(graph, compiled, [run]))})
    assert [(e["ts"], e["dur"]) for e in found if e["pid"]] == [(0.0, 8e6), (1e6, 2e6), (8e6, 1e6)]


# Page


class Page(HTMLParser):
    """Tags that are open and closed in order, and the texts of scripts."""

    VOID = frozenset({"meta", "input", "br", "link", "img"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.scripts: dict[str, str] = {}
        self.addresses: list[str] = []
        self.feed(text)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        self.id = dict(attrs).get("id") or ""
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.stack and self.stack[-1] == "script":
            self.scripts[self.id] = self.scripts.get(self.id, "") + data


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_page_is_one_file_of_html_with_every_span(staleness: int, tmp_path: Path) -> None:
    graph, compiled = made(staleness=staleness)
    executions = runs(graph, compiled)
    around = executions[0].spans if staleness else {}
    shown = [Shown(run, executions[0], "why", (around, {})) for run in executions]
    save_page(graph, compiled, shown, ["a </script><b> title", "more"], tmp_path / "timeline.html")
    text = (tmp_path / "timeline.html").read_text()
    page = Page(text)
    assert page.addresses == []
    assert not re.search(r"https?://|@import|url\(", text)
    data = json.loads(page.scripts["data"])
    assert data["about"] == ["a </script><b> title", "more"]
    for run, side in zip(executions, data["executions"], strict=True):
        assert side["label"] == run.label
        back = [
            (data["ranks"][s[0]]["group"], data["ranks"][s[0]]["rank"], data["kinds"][s[1]], s[3], s[4], s[5])
            for s in side["measured"]["spans"]
        ]
        zero = run.start
        expected = [
            (group, rank, s.doing.value, pytest.approx(s.start - zero), pytest.approx(s.end - zero), s.rows)
            for (group, rank), own in run.spans.items()
            for s in own
        ]
        assert back == expected
        assert {data["names"][s[2]] for s in side["measured"]["spans"] if data["kinds"][s[1]] == "run"} >= {
            "maker.make",
            "learner.train",
        }
    assert [path.name for path in tmp_path.iterdir()] == ["timeline.html"]


def test_a_page_of_very_many_ranks_shows_the_first_of_each_group() -> None:
    graph, compiled = made(kind="collocated", dp=RANKS)
    data = page_data(graph, compiled, [], ["title"])
    assert len(data["ranks"]) <= RANKS
    assert {rank["group"] for rank in data["ranks"]} == set(compiled.layout)
    assert len(data["ranks"]) + data["left_out"] == sum(stage.ranks for stage in compiled.layout.values())


# Idle


def test_a_device_stands_still_for_what_its_next_rank_waits_for() -> None:
    graph, compiled = made(kind="apart", dp=1)
    makers, scores, learners = ("maker", 0), ("scores", 0), ("learner", 0)
    spans = {
        makers: [
            Span(Doing.WEIGHTS, "learner", 0, 2),
            Span(Doing.LEASE, "maker", 2, 3),
            Span(Doing.RUN, "maker.make", 4, 10, 6),
        ],
        scores: [Span(Doing.ROWS, "scores.score", 0, 7), Span(Doing.RUN, "scores.score", 7, 9, 24)],
        learners: [Span(Doing.WEIGHTS, "maker", 0, 1), Span(Doing.RUN, "learner.train", 11, 12, 24)],
    }
    times = {time.groups: time for time in device_times(graph, compiled, spans)}
    maker, score, learner = (times[(group,)] for group in ("maker", "scores", "learner"))
    assert (maker.busy, maker.idle) == (6, {"weights of learner": 2, TURN: 1, BETWEEN: 1, OVER: 2})
    assert (score.busy, score.idle) == (2, {"rows of maker.make": 7, OVER: 3})
    assert (learner.busy, learner.idle) == (1, {"maker, which still reads the last weights": 1, BETWEEN: 10})
    assert score.idle_share == pytest.approx(10 / 12)


def test_what_is_done_for_other_iterations_meanwhile_is_work() -> None:
    graph, compiled = made(kind="apart", dp=1)
    spans = {("scores", 0): [Span(Doing.RUN, "scores.score", 0, 2, 1), Span(Doing.RUN, "scores.score", 6, 8, 1)]}
    around = {("scores", 0): [Span(Doing.RUN, "scores.score", 2, 5, 1)]}
    (time,) = [t for t in device_times(graph, compiled, spans, around) if t.groups == ("scores",)]
    assert (time.busy, time.idle) == (7, {BETWEEN: 1})


@settings(max_examples=25)
@given(kind=st.sampled_from(["collocated", "apart", "disaggregated", "hybrid"]), m=st.sampled_from([0, 1, 4, 8]))
def test_a_device_is_busy_or_idle_and_nothing_else(kind: str, m: int) -> None:
    graph, compiled = made(m, kind)
    (run,) = runs(graph, compiled, 1, at=0.0)
    for time in device_times(graph, compiled, run.spans):
        assert time.busy + sum(time.idle.values()) == pytest.approx(run.end)
        assert BETWEEN not in time.idle  # on paper every gap has a reason


# What is expected


@pytest.mark.parametrize("staleness", [1, 2])
def test_of_a_run_that_is_under_way_one_iteration_is_expected(staleness: int) -> None:
    graph, compiled = made(staleness=staleness)
    own, around = expect(graph, compiled, TRAIN, COSTS)
    every = simulate(graph, compiled, TRAIN, COSTS, iterations=3 * staleness + 1)
    for rank, spans in every.items():
        assert sorted([*own[rank], *around[rank]], key=lambda s: s.start) == sorted(spans, key=lambda s: s.start)
    rows = sum(span.rows for span in own["learner", 0] if span.name == "learner.train")
    assert rows == 12  # of 24 on two ranks, once


# Record


def test_a_record_writes_all_files_and_expects_what_was_before(tmp_path: Path) -> None:
    graph, compiled = made()
    notes: list[str] = []
    record = Record(graph, compiled, tmp_path, ["title"], notes.append)
    for run in runs(graph, compiled, 4):
        record.add(TRAIN, run.step, reports(run))
    record.write()
    assert notes == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["costs.yaml", "timeline.html", "trace.json"]
    check_trace(json.loads((tmp_path / "trace.json").read_text()))
    assert load_costs(tmp_path / "costs.yaml").rows == {"host.source0": 6}
    first, *later = json.loads(Page(record.page.read_text()).scripts["data"])["executions"]
    assert first["predicted"] is None
    assert "nothing was measured before" in first["why"]
    for side in later:
        assert side["predicted"]["seconds"] == pytest.approx(side["measured"]["seconds"])


def test_a_record_is_there_after_the_first_iteration(tmp_path: Path) -> None:
    graph, compiled = made()
    record = Record(graph, compiled, tmp_path, ["title"], print)
    record.add(TRAIN, 1, reports(runs(graph, compiled, 1)[0]))
    assert record.page.exists()


def test_a_record_keeps_no_more_than_it_shows(tmp_path: Path) -> None:
    graph, compiled = made()
    record = Record(graph, compiled, tmp_path, ["title"], print)
    for run in runs(graph, compiled, KEPT + 5):
        record.add(TRAIN, run.step, reports(run))
    record.write()
    assert [run.step for run in record.executions] == list(range(6, KEPT + 6))
    data = json.loads(Page(record.page.read_text()).scripts["data"])
    assert [side["label"] for side in data["executions"]] == [f"step {KEPT + 5 - i}" for i in range(SHOWN)][::-1]


def test_very_many_spans_are_kept_for_fewer_iterations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, compiled = made()
    executions = runs(graph, compiled, 6)
    each = sum(map(len, executions[0].spans.values()))
    monkeypatch.setattr("rlinf.m2flow.record.SPANS", 3 * each)
    record = Record(graph, compiled, tmp_path, ["title"], print)
    for run in executions:
        record.add(TRAIN, run.step, reports(run))
    assert [run.step for run in record.executions] == [4, 5, 6]


def test_a_record_that_cannot_be_written_is_one_note(tmp_path: Path) -> None:
    graph, compiled = made()
    notes: list[str] = []
    record = Record(graph, compiled, tmp_path / "gone", ["title"], notes.append)
    for run in runs(graph, compiled, 3):
        record.add(TRAIN, run.step, reports(run))
        record.write()
    (note,) = notes
    assert "gone" in note
    assert "the run goes on without it" in note


def test_a_real_execution_is_recorded(tmp_path: Path) -> None:
    graph = graph_of(2, 1, 2)
    plan = plans(graph, 4)["hybrid"]
    found: list[Report] = []
    execute(graph, 0, plan=plan, reports=found)
    notes: list[str] = []
    record = Record(graph, compile_plan(graph, plan), tmp_path, ["title"], notes.append)
    record.add(TRAIN, 1, found)
    record.write()
    assert notes == []
    check_trace(json.loads((tmp_path / "trace.json").read_text()))
    assert load_costs(tmp_path / "costs.yaml").rows == {"host.source0": 6}


# Text


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("kind", ["collocated", "apart", "disaggregated", "hybrid"])
def test_a_chart_fits_the_width_and_shows_every_stage(width: int, kind: str) -> None:
    graph, compiled = made(kind=kind)
    (run,) = runs(graph, compiled, 1, at=0.0)
    lines = chart(graph, compiled, run.spans, width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for name in ("maker.make", "scores.score", "learner.values", "learner.train"):
        (letter,) = re.findall(rf"(\w) {re.escape(name)}", text)
        assert any(letter in line.partition("|")[2] for line in lines if line.endswith("|"))


def test_ranks_that_do_the_same_are_one_line() -> None:
    graph, compiled = made(dp=3)
    (run,) = runs(graph, compiled, 1, at=0.0)
    lines = chart(graph, compiled, run.spans, 100)
    assert any(line.startswith("maker 0-2 on 0-2") for line in lines)
    assert any(line.startswith("devices 0-2: maker") for line in device_lines(graph, compiled, run.spans))
