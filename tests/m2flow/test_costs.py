"""What was measured comes back as costs: lines through calls of many sizes, whatever a few slow ones say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.errors import ConfigError
from rlinf.m2flow.compiler import Compiled, compile_plan
from rlinf.m2flow.costs import fit, fit_line, load_costs, save_costs, unit_costs
from rlinf.m2flow.graph import TRAIN, Graph
from rlinf.m2flow.simulate import Cost, Costs, simulate
from rlinf.m2flow.timeline import Doing, Execution, Span
from tests.m2flow.test_pipelines import graph_of, plans

SECONDS = st.floats(0.0, 100.0)
SOURCE = "host.source0"


def made(m: int = 4, kind: str = "apart") -> tuple[Graph, Compiled]:
    graph = graph_of(2, 1, 2)
    return graph, compile_plan(graph, plans(graph, m)[kind])


def seen(graph: Graph, compiled: Compiled, costs: Costs, step: int = 1) -> Execution:
    """An iteration as it would be measured if everything cost exactly that."""
    return Execution(TRAIN, step, simulate(graph, compiled, TRAIN, costs))


@given(fixed=SECONDS, per_row=SECONDS, sizes=st.lists(st.integers(1, 1000), min_size=2, max_size=40))
def test_a_line_is_found_again(fixed: float, per_row: float, sizes: list[int]) -> None:
    found = fit_line(sizes, [fixed + per_row * n for n in sizes])
    for n in set(sizes):
        assert found.fixed + found.per_row * n == pytest.approx(fixed + per_row * n, rel=1e-6, abs=1e-6)
    if len(set(sizes)) > 1:
        assert found.fixed == pytest.approx(fixed, rel=1e-5, abs=1e-3 * (per_row + 1e-3))


@given(
    fixed=st.floats(0.01, 10.0),
    per_row=st.floats(0.01, 10.0),
    slow=st.lists(st.floats(1.0, 1e4), min_size=6, max_size=6),
)
def test_a_few_slow_calls_do_not_move_a_line(fixed: float, per_row: float, slow: list[float]) -> None:
    sizes = [1, 2, 4, 8, 16, 32] * 6
    seconds = [fixed + per_row * n for n in sizes]
    for i, factor in enumerate(slow):  # the whole first iteration
        seconds[i] *= factor
    found = fit_line(sizes, seconds)
    assert found.per_row == pytest.approx(per_row, rel=1e-6)
    assert found.fixed == pytest.approx(fixed, rel=1e-4, abs=1e-6)


@given(st.lists(st.tuples(st.integers(1, 64), SECONDS), max_size=60))
def test_costs_are_never_negative(calls: list[tuple[int, float]]) -> None:
    found = fit_line([rows for rows, _ in calls], [seconds for _, seconds in calls])
    assert found.fixed >= 0
    assert found.per_row >= 0


def test_of_calls_of_one_size_nothing_is_taken_as_fixed() -> None:
    assert fit_line([8, 8, 8], [4.0, 4.0, 400.0]) == Cost(0.0, 0.5)


def test_many_calls_are_thinned_and_rare_sizes_stay() -> None:
    sizes = [8] * 5000 + [4]
    found = fit_line(sizes, [2.0 + 3.0 * n for n in sizes])
    assert found == Cost(pytest.approx(2.0), pytest.approx(3.0))


@settings(max_examples=30)
@given(
    costs=st.fixed_dictionaries(
        {name: st.floats(0.01, 10.0) for name in ("maker.make", "scores.score", "learner.values", "learner.train")}
    ),
    sync=st.tuples(st.floats(0.01, 5.0), st.floats(0.01, 5.0)),
    rows=st.integers(2, 9),
    kind=st.sampled_from(["collocated", "apart", "disaggregated", "hybrid"]),
)
def test_what_a_simulation_was_told_is_fitted_from_its_spans(
    costs: dict[str, float], sync: tuple[float, float], rows: int, kind: str
) -> None:
    graph, compiled = made(kind=kind)
    pair = ("learner", "maker")
    told = Costs(
        nodes={name: Cost(0.0, per_row) for name, per_row in costs.items()},
        sync={pair: sync[0]},
        receive={pair: sync[1]},
        rows={SOURCE: rows},
    )
    runs = [seen(graph, compiled, told, step) for step in (1, 2, 3)]
    found = fit(graph, compiled, runs)
    assert found.rows == {SOURCE: rows}
    assert found.sync[pair] == pytest.approx(sync[0])
    assert found.receive[pair] == pytest.approx(sync[1])
    for name, per_row in costs.items():
        assert found.nodes[name].per_row == pytest.approx(per_row, rel=1e-6)
        assert found.nodes[name].fixed == pytest.approx(0.0, abs=1e-6)
    again = seen(graph, compiled, found)
    assert again.end == pytest.approx(runs[0].end)


def test_what_a_stage_that_streams_does_at_its_end_is_spread_over_its_rows() -> None:
    graph, compiled = made()
    told = Costs(nodes={"learner.train": Cost(0.0, 1.0)}, rows={SOURCE: 6})
    run = seen(graph, compiled, told)
    spans = {}
    for rank, own in run.spans.items():
        last = [span for span in own if span.name == "learner.train"][-1:]
        step = [Span(Doing.RUN, span.name, span.end, span.end + 6.0) for span in last if rank[0] == "learner"]
        spans[rank] = [*own, *step]
    found = fit(graph, compiled, [replace(run, spans=spans)])
    assert found.nodes["learner.train"] == Cost(pytest.approx(0.0), pytest.approx(1.5))  # 6 s for 12 rows of a rank


def test_a_source_costs_what_it_takes_at_once() -> None:
    graph, compiled = made()
    run = Execution(TRAIN, 1, {("host", 0): [Span(Doing.RUN, SOURCE, 3.0, 3.5)]})
    assert fit(graph, compiled, [run]).nodes == {SOURCE: Cost(0.5, 0.0)}


def test_rows_of_tensor_parallel_ranks_are_counted_once() -> None:
    graph = graph_of(1, 1, 1, tp=2)
    compiled = compile_plan(graph, plans(graph, 0)["apart"])
    told = Costs(nodes={"scores.score": Cost(0.0, 1.0)}, rows={SOURCE: 6})
    assert fit(graph, compiled, [seen(graph, compiled, told)]).rows == {SOURCE: 6}


def test_weights_that_are_taken_over_in_flight_are_no_part_of_a_stage() -> None:
    graph, compiled = made()
    spans = [Span(Doing.RUN, "maker.make", 0.0, 5.0, 4), Span(Doing.SYNC, "receive weights from learner", 2.0, 3.0)]
    found = fit(graph, compiled, [Execution(TRAIN, 1, {("maker", 0): spans})])
    assert found.nodes["maker.make"] == Cost(0.0, 1.0)
    assert found.receive == {("learner", "maker"): 1.0}


def test_a_clock_that_was_set_back_is_no_negative_cost() -> None:
    graph, compiled = made()
    run = Execution(TRAIN, 1, {("learner", 0): [Span(Doing.RUN, "learner.train", 9.0, 3.0, 4)]})
    assert fit(graph, compiled, [run]).nodes["learner.train"] == Cost(0.0, 0.0)


def test_nothing_measured_is_no_cost() -> None:
    graph, compiled = made()
    assert fit(graph, compiled, []) == Costs()


def test_a_unit_is_a_row_of_a_worker() -> None:
    graph, _ = made()
    found = unit_costs(graph, {SOURCE: 6})
    assert found.nodes["scores.score"] == Cost(0.0, 1.0)
    assert found.nodes["maker.make"] == Cost(0.0, 4.0)  # it makes four of each
    assert "host.relative" not in found.nodes
    assert found.rows == {SOURCE: 6}


def test_costs_are_kept_as_yaml(tmp_path: Path) -> None:
    costs = Costs(
        nodes={"a.b": Cost(0.25, 1e-7)},
        onload={"a": 1.5},
        offload={"a": 2.5},
        sync={("a", "b"): 0.5},
        receive={("a", "b"): 0.75},
        rows={SOURCE: 4},
    )
    save_costs(costs, tmp_path / "costs.yaml")
    assert load_costs(tmp_path / "costs.yaml") == costs


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes: {a.b: {fixed: 1, per_rows: 2}}", r"nodes\.a\.b: there is no key 'per_rows'; did you mean 'per_row'\?"),
        ("nodes: {a.b: {fixed: -1}}", r"nodes\.a\.b\.fixed: found -1, expected a number, 0 or more"),
        ("nodes: {a.b: 3}", r"nodes\.a\.b: found 3, expected the keys fixed, per_row"),
        ("node: {}", r"no key 'node'; did you mean 'nodes'\?"),
        ("sync: [{from: a}]", r"sync\[0\]: found \['from'\], expected from, to, send, receive"),
        ("sync: 3", r"sync: found 3, expected a list"),
        ("onload: {a: yes}", r"onload\.a: found True, expected a number"),
        ("- 1", r"found \[1\], expected the keys"),
        ("a: [", "not YAML"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "costs.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_costs(path)


def test_a_file_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"costs\.yaml cannot be read: No such file"):
        load_costs(tmp_path / "costs.yaml")
