"""Profiles of what was not measured: batch, lengths, slow stages and memory, by hand."""

from __future__ import annotations

import math

import pytest

from rlinf.errors import ConfigError
from rlinf.scheduler.cost import CostModel
from rlinf.scheduler.profile import Profile
from rlinf.scheduler.tail import mean, steps
from rlinf.scheduler.whatif import change
from tests.scheduler.test_cost import GRAPH, PROFILE


def seconds(profile: Profile, stage: str, rows: int) -> float:
    return CostModel(profile, GRAPH, {0: "big"}).stage(stage, "big", 1, 1).seconds(rows)


def test_nothing_asked_changes_nothing() -> None:
    assert change(PROFILE, GRAPH) == PROFILE


def test_another_batch_is_another_number_of_rows() -> None:
    changed = change(PROFILE, GRAPH, rows=128)
    model = CostModel(changed, GRAPH, {0: "big"})
    assert changed.rows == {"host.source0": 128}
    assert {node.name: model.rows(node) for node in GRAPH.nodes}["actor.train"] == 512
    assert changed.stages == PROFILE.stages


def test_a_slow_stage_is_slow_in_all_of_its_points() -> None:
    changed = change(PROFILE, GRAPH, slow={"actor.train": 3.0})
    assert seconds(changed, "actor.train", 256) == pytest.approx(72.0)
    assert seconds(changed, "critic.train", 256) == pytest.approx(16.0)


def test_longer_sequences_take_more_steps_and_tokens_and_what_works_on_them_more_for_each_row() -> None:
    changed = change(PROFILE, GRAPH, lengths=2.0)
    before = CostModel(PROFILE, GRAPH, {0: "big"}).stage("maker.make", "big", 1, 1)
    assert before.pace is not None
    assert before.tail is not None
    longer = changed.stages["maker.make"].tail
    assert longer is not None
    assert longer.lengths == (200, 400, 600, 800, 2000)
    pace, n = before.pace, 64 * 4
    ratio = (pace.fixed + pace.per_step * 2 * steps(before.tail, n) + pace.per_token * 2 * mean(before.tail) * n) / (
        pace.seconds(before.tail, n)
    )
    assert seconds(changed, "maker.make", 64) == pytest.approx(20 * ratio)
    assert 1.5 < ratio <= 2
    fixed = 0.5 - 16 * 4.5 / 240  # of the reference, which works on these rows
    assert seconds(changed, "reference.logprobs", 256) == pytest.approx(fixed + 2 * (5.0 - fixed))
    assert seconds(changed, "critic.values", 256) == pytest.approx(10.0)  # of one point all grows
    assert changed.stages["maker.make"].row_bytes == 8000
    assert changed.stages["reference.logprobs"].points[1].transient == 6_000_000_000


def test_other_memory_is_that_of_every_kind() -> None:
    assert {kind.memory for kind in change(PROFILE, GRAPH, memory=5).kinds.values()} == {5}


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        ({"slow": {"actor.trian": 2.0}}, r"no stage 'actor.trian' in the profile; it has .*actor.train"),
        ({"lengths": 0.0}, r"lengths were 0.0: expected a number above 0"),
        ({"rows": -1}, r"rows were -1"),
        ({"slow": {"actor.train": math.inf}}, r"actor.train were inf"),
    ],
)
def test_what_makes_no_sense_is_refused(asked: dict[str, object], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        change(PROFILE, GRAPH, **asked)  # type: ignore[arg-type]
