"""From spans and calls to what a profile says, by hand."""

from __future__ import annotations

import pytest
import torch

from rlinf.batch import Batch, Ragged
from rlinf.errors import WorkflowError
from rlinf.m2flow.compiler import compile_plan
from rlinf.m2flow.plan import Shared, Stage
from rlinf.m2flow.timeline import Doing, Execution, Span
from rlinf.scheduler import measure
from rlinf.scheduler.measure import Facts, Took, Which
from rlinf.scheduler.profile import Identity, Kind
from rlinf.scheduler.readings import (
    Key,
    Readings,
    Sample,
    Setting,
    accompanied,
    row_bytes,
    smaller,
    stage_calls,
    sync_points,
    tail,
    together,
    transfer,
    unit_of,
    which,
)
from rlinf.worker import RankContext
from tests.scheduler import timed

CPU = Setting("cpu", 2, 1)


def test_transfer_is_the_line_through_two_sizes() -> None:
    line = transfer((1000, 5000), (0.3, 1.1))  # 4000 bytes take 0.8 s
    assert (line.fixed, line.per_byte) == (pytest.approx(0.1), pytest.approx(2e-4))
    assert transfer((1000, 5000), (0.3, 0.2)).per_byte == 0  # noise does not make bytes faster than none


def test_a_call_of_several_ranks_is_as_long_as_the_slowest_and_as_large_as_the_largest() -> None:
    (first, second) = together(
        [[Took(10, 12, 3, 100), Took(12, 13, 3)], [Took(11, 12, 4, 50), Took(12.5, 14, 4)]],
    )
    assert (first.start, first.seconds, first.rows, first.transient) == (10, 2, 4, 100)
    assert (second.start, second.seconds, second.rows, second.transient) == (12, 1.5, 4, None)


def test_calls_count_as_accompanied_where_others_were_at_work_for_four_fifths_of_them() -> None:
    others = [Took(0, 4, 1), Took(3, 5, 1), Took(6, 9, 1)]  # busy from 0 to 5 and from 6 to 9
    inside, most, half, outside = Took(1, 5, 1), Took(1, 6, 1), Took(4, 7, 1), Took(9, 11, 1)
    assert accompanied([inside, most, half, outside], others) == [inside, most]  # all, 4 of 5, 2 of 3, nothing
    assert accompanied([inside], []) == []


@pytest.mark.parametrize(
    ("full", "unit", "wanted"),
    [(16, 1, [1, 8, 4]), (16, 8, [8]), (8, 8, []), (7, 2, [2]), (12, 4, [4]), (1, 1, []), (0, 1, [])],
)
def test_smaller_calls_are_a_unit_a_half_and_a_quarter_in_whole_units(full: int, unit: int, wanted: list[int]) -> None:
    assert smaller(full, unit) == wanted


@pytest.mark.parametrize(
    ("seconds", "settled"),
    [
        ([1.0], False),
        ([1.0, 1.09], True),
        ([1.0, 1.11], False),  # the last two
        ([1.0, 1.1, 1.2], True),  # quartiles 1.05 and 1.15: 0.05 of 1.1
        ([1.0, 1.5, 2.0, 2.0], False),  # 1.375 and 2: 0.31 of 1.75
        ([1.0, 3.0, 1.0, 1.0, 1.0], True),  # one call that was disturbed
        ([14.1, 11.1], False),
        ([14.1, 11.1, 9.5, 8.5], False),  # still becoming faster
        ([14.1, 11.1, 9.5, 8.5, 8.3], True),
    ],
)
def test_a_sample_is_settled_when_its_middle_half_is_close_together_and_its_last_two(
    seconds: list[float], settled: bool
) -> None:
    assert Sample(seconds).settled is settled


def test_first_calls_that_were_slower_do_not_count() -> None:
    becoming = Sample([14.1, 11.1, 9.5, 8.5, 8.3])
    assert becoming.warm == [8.5, 8.3]
    assert (becoming.median, becoming.spread) == (pytest.approx(8.4), pytest.approx(0.05))
    assert Sample([14.1, 11.1]).median == pytest.approx(12.6)  # two are left at least
    assert Sample([1.05, 1.0, 9.0, 1.0]).warm == [1.05, 1.0, 9.0, 1.0]  # not only first ones are slow at times
    assert Sample([1.0, 1.5, 2.0]).spread == pytest.approx(0.25)


def test_what_a_call_is_likely_to_take_lies_between_its_neighbours() -> None:
    readings = Readings(timed.graph_of())
    assert readings.expected("a", CPU, 4) == 0
    for rows, seconds in ((4, 2.0), (8, 6.0)):
        readings.add(Key("a", CPU, rows), [Took(0, seconds, rows)])
    readings.add(Key("a", CPU, 6, beside=True), [Took(0, 99, 6)])
    assert readings.expected("a", CPU, 6) == pytest.approx(4)
    assert readings.expected("a", CPU, 16) == pytest.approx(12)
    assert readings.expected("a", CPU, 2) == pytest.approx(2 * (0.1 + 0.45))
    assert readings.expected("a", Setting("cpu", 1, 1), 6) == 0


def graph_and_programs(ranks: int = 2):
    graph = timed.graph_of()
    on = tuple(range(ranks))
    plan = Shared(
        (Stage("maker", on, ranks), Stage("scorer", ()), Stage("rater", on, ranks), Stage("learner", on, ranks))
    )
    return graph, compile_plan(graph, plan)


def test_a_stage_s_call_in_an_iteration_is_all_of_its_spans_on_the_slowest_rank() -> None:
    graph, _ = graph_and_programs()
    execution = Execution(
        "train",
        1,
        {
            ("learner", 0): [
                Span(Doing.RUN, "learner.learn", 5, 7, 4),
                Span(Doing.RUN, "learner.learn", 7, 7.5, 0),  # what it does when it has all rows
                Span(Doing.ROWS, "learner.learn", 0, 5),
            ],
            ("learner", 1): [Span(Doing.RUN, "learner.learn", 5, 6, 3)],
            ("rater", 0): [Span(Doing.RUN, "rater.rate", 1, 3, 4)],
            ("rater", 1): [
                Span(Doing.RUN, "rater.rate", 1, 3.2, 4),
                Span(Doing.RUN, "rater.of another phase", 0, 9, 4),
            ],
        },
    )
    looked = {("rater.rate", ("rater", 0)): (10, 0.1), ("rater.rate", ("rater", 1)): (20, 0.5)}
    found = stage_calls(graph, execution, looked)
    assert set(found) == {"learner.learn", "rater.rate"}
    assert (found["learner.learn"].rows, found["learner.learn"].seconds) == (4, pytest.approx(2.5))
    assert found["learner.learn"].transient is None
    # Without what looking took: 1.9 s and 1.7 s.
    assert (found["rater.rate"].seconds, found["rater.rate"].transient) == (pytest.approx(1.9), 20)


def test_syncs_are_the_median_of_the_slowest_ranks() -> None:
    graph, compiled = graph_and_programs()

    def execution(sent: float, taken: float) -> Execution:
        send, receive = "send weights to maker", "receive weights from learner"
        return Execution(
            "train",
            1,
            {
                ("learner", 0): [Span(Doing.SYNC, send, 0, sent)],
                ("learner", 1): [Span(Doing.SYNC, send, 0, sent / 2)],
                ("maker", 0): [Span(Doing.SYNC, receive, 10, 10 + taken)],
            },
        )

    (found,) = sync_points(graph, compiled, [execution(1, 2), execution(3, 6), execution(2, 40)])
    assert (found.send, found.receive) == (pytest.approx(2), pytest.approx(6))
    assert (found.source, found.target, found.source_ranks, found.target_ranks) == ("learner", "maker", 2, 2)
    assert sync_points(graph, compiled, [Execution("train", 1, {})]) == []


def test_rows_of_a_node_weigh_what_its_fields_do_wherever_they_were_seen() -> None:
    graph, _ = graph_and_programs()
    facts = {
        "maker.make": [Facts(given=2, made=4, made_bytes={"tokens": 400}), Facts()],
        "learner.learn": [Facts(given=4, given_bytes={"score": 40, "rating": 16})],
    }
    assert row_bytes(graph, facts) == {"maker.make": 100, "scorer.score": 10, "rater.rate": 4}


def test_only_a_stage_that_makes_sequences_side_by_side_has_a_tail() -> None:
    graph, _ = graph_and_programs()
    maker, rater = (next(n for n in graph.nodes if n.name == name) for name in ("maker.make", "rater.rate"))
    facts = [Facts(lengths=(5, 1)), Facts(lengths=(3, 0))]
    found = tail(maker, timed.Settings(max_num_seqs=7), facts)
    assert found is not None
    assert (found.slots, found.lengths[0], found.lengths[10], found.lengths[20]) == (7, 1, 3, 5)
    assert tail(rater, timed.Settings(), facts) is None
    assert tail(maker, None, facts) is None
    assert tail(maker, timed.Settings(), [Facts()]) is None


def test_a_stage_that_was_never_at_work_is_an_error() -> None:
    readings = Readings(timed.graph_of())
    with pytest.raises(WorkflowError, match=r"host.source0 was never given a row"):
        readings.profile(Identity(workflow="w", model="m"), {"cpu": Kind()}, "")


def test_memory_that_nobody_looked_at_is_that_of_the_next_larger_call_or_in_proportion() -> None:
    graph, _ = graph_and_programs()
    readings = Readings(graph)
    for node in graph.phase("train"):
        for rows, transient in ((2, None), (4, 100), (8, None)):
            readings.add(Key(node.name, CPU, rows), [Took(0, 1, rows, transient)])
    found = readings.profile(Identity(workflow="w", model="m"), {"cpu": Kind()}, "").stages["rater.rate"].points
    assert {point.rows: point.transient for point in found} == {2: 100, 4: 100, 8: 200}


def test_the_smallest_piece_of_a_stage_is_its_unit() -> None:
    graph, compiled = graph_and_programs()
    assert [unit_of(graph, node) for node in graph.nodes] == [1] * len(graph.nodes)
    assert which(graph, compiled) == {
        "maker.make": Which("make"),
        "scorer.score": Which("score"),
        "rater.rate": Which("rate"),
        "learner.learn": Which("learn"),
    }


def test_parts_of_a_batch_are_whole_units_and_go_round() -> None:
    batch = Batch({"row_id": torch.arange(6), "x": Ragged.of([[i] * (i + 1) for i in range(6)], torch.int64)})
    taken = [measure.part_of(batch, 4, 2, turn)["row_id"].tolist() for turn in range(3)]
    assert taken == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]]
    taken = [measure.part_of(batch, 2, 2, turn)["row_id"].tolist() for turn in range(4)]
    assert taken == [[0, 1], [2, 3], [4, 5], [0, 1]]
    assert measure.part_of(batch, 99, 2, 5).n == 6


def test_a_watched_worker_makes_what_it_made_and_its_stages_can_be_called_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timed, "FIRST", 0.0)
    maker = timed.Maker(timed.Settings(), RankContext())
    maker.setup()
    measure.watch(maker, ["make"])
    batch = Batch({"row_id": torch.tensor([4, 6]), "x": torch.zeros(2)})
    for _ in range(2):  # a new iteration forgets the last one
        measure.anew(maker)
        made = Batch.concat(list(maker.make(batch)))
    assert made["row_id"].tolist() == [8, 9, 12, 13]
    facts = measure.facts(maker, Which("make"))
    assert (facts.given, facts.made, facts.lengths) == (2, 4, (2, 6, 2, 6))
    assert set(facts.given_bytes) == {"x"}
    ((transient, looking),) = measure.looked(maker, [Which("make")])
    assert transient >= 0
    assert looking > 0
    calls = measure.calls(maker, Which("make"), 1, 1, repeats=3)
    assert [(took.rows, took.transient) for took in calls] == [(1, None)] * 3
    assert all(took.seconds >= timed.FIXED + timed.ROW["make"] for took in calls)
