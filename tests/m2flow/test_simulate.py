"""Programs on paper: who is given which rows, and what a sync costs on either side."""

from __future__ import annotations

import numpy as np
import pytest

from rlinf.m2flow.compiler import compile_plan
from rlinf.m2flow.graph import TRAIN
from rlinf.m2flow.rows import pieces
from rlinf.m2flow.simulate import Cost, Costs, simulate
from rlinf.m2flow.timeline import Doing
from tests.m2flow.test_pipelines import graph_of, plans


@pytest.mark.parametrize("m", [0, 1, 4, 8])
@pytest.mark.parametrize("rows", [1, 5, 6, 7])
def test_every_rank_runs_on_the_pieces_that_the_executor_would_be_given(m: int, rows: int) -> None:
    graph = graph_of(2, 3, 2)
    compiled = compile_plan(graph, plans(graph, m)["disaggregated"])
    costs = Costs(nodes={node.name: Cost(1.0, 0.0) for node in graph.nodes}, rows={"host.source0": rows})
    found = simulate(graph, compiled, TRAIN, costs)
    score = next(node for node in graph.nodes if node.name == "scores.score")
    size = compiled.granularity[score.index]
    for rank in range(3):
        expected = pieces(np.arange(rows * 4), 4, score.spec.unit, 3, rank, size, even=False)
        runs = [span.rows for span in found["scores", rank] if span.doing is Doing.RUN]
        assert runs == [len(piece) for piece in expected if len(piece)]


@pytest.mark.parametrize(("receive", "took"), [({}, 2.0), ({("learner", "maker"): 5.0}, 5.0)])
def test_sending_and_receiving_weights_may_take_different_times(receive: dict, took: float) -> None:
    graph = graph_of()
    compiled = compile_plan(graph, plans(graph, 4)["apart"])
    costs = Costs(sync={("learner", "maker"): 2.0}, receive=receive, rows={"host.source0": 6})
    found = simulate(graph, compiled, TRAIN, costs)
    (sent,) = [span for span in found["learner", 0] if span.doing is Doing.SYNC]
    (taken,) = [span for span in found["maker", 0] if span.doing is Doing.SYNC]
    assert sent.end - sent.start == 2.0
    assert (taken.start, taken.end) == (2.0, 2.0 + took)
