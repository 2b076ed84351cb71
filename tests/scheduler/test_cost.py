"""The cost model: a profile by hand, and figures that follow from it by hand; and what holds of any profile."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf.errors import ConfigError
from rlinf.m2flow.compiler import compile_plan
from rlinf.m2flow.graph import Graph
from rlinf.m2flow.plan import Piped, Plan, Shared, Stage
from rlinf.m2flow.timeline import Doing, Span
from rlinf.scheduler.cost import CostModel, shares_beside
from rlinf.scheduler.judge import judge
from rlinf.scheduler.profile import Held, Identity, Kind, Point, Profile, StageProfile, load_profile
from rlinf.scheduler.stage_time import stage_time
from tests.m2flow.test_plans import ppo_like

PROFILE = load_profile(Path(__file__).parent / "profiles" / "ppo.yaml")
GRAPH = ppo_like()
BIG = CostModel(PROFILE, GRAPH, dict.fromkeys(range(8), "big"))
MIXED = CostModel(PROFILE, GRAPH, {0: "big", 1: "small"})


def on(worker: str, *devices: int, tp: int = 1) -> Stage:
    return Stage(worker, devices, dp=max(len(devices) // tp, 1), tp=tp)


def in_turns(*devices: int, swap: bool = False) -> Plan:
    return Shared((*(on(name, *devices) for name in ("maker", "reference", "critic", "actor")), on("reward")), swap)


def apart(granularity: int) -> Plan:
    return Piped(
        (on("maker", 0), Shared((on("reference", 1), on("critic", 1), on("actor", 1))), on("reward")), granularity
    )


def test_measured_points_are_met_in_their_layouts() -> None:
    for name, stage in PROFILE.stages.items():
        for point in stage.points:
            if not point.beside:
                assert BIG.stage(name, point.kind, point.dp, point.tp).seconds(point.rows) == pytest.approx(
                    point.seconds
                )


def test_between_points_a_stage_is_a_line_in_its_rows() -> None:
    logprobs = BIG.stage("reference.logprobs", "big", 1, 1)
    assert logprobs.seconds(136) == pytest.approx(2.75)
    assert logprobs.seconds(8) == pytest.approx(0.5 - 8 * 4.5 / 240)
    assert logprobs.seconds(512) == pytest.approx(5.0 + 256 * 4.5 / 240)
    assert logprobs.memory(136) == pytest.approx(2e9)


def test_a_layout_that_was_not_measured_takes_what_the_nearest_one_does() -> None:
    train = {dp: BIG.stage("actor.train", "big", dp, 1) for dp in (1, 2, 4, 8)}
    assert train[8].seconds(64) == pytest.approx(7.0)  # of 4
    assert train[2].seconds(256) == pytest.approx(24.0)  # as near to 1 as to 4: the smaller one
    assert (train[4].measured, train[8].measured) == (True, False)
    assert BIG.stage("maker.make", "big", 1, 4).seconds(64) == pytest.approx(12.0)  # of tp=2
    assert BIG.stage("actor.train", "big", 1, 2).seconds(256) == pytest.approx(24.0)


def test_uncertainty_grows_with_spread_distance_and_another_layout() -> None:
    make = BIG.stage("reference.logprobs", "big", 1, 1)
    assert make.uncertainty(64) == pytest.approx(0.0)
    assert make.uncertainty(1024) == pytest.approx(0.2)
    assert BIG.stage("reference.logprobs", "big", 2, 1).uncertainty(64) == pytest.approx(0.25)
    assert BIG.stage("maker.make", "big", 1, 1).uncertainty(8) == pytest.approx(0.3 / 6)


def test_what_groups_hold_is_measured_shared_out_or_bounded() -> None:
    def actor(dp: int) -> int:
        return BIG.resident("actor", "big", dp, 1)

    assert (actor(1), actor(4)) == (32_000_000_000, 11_000_000_000)
    assert actor(2) == pytest.approx(4e9 + 28e9 / 2)  # a + b / dp through both
    assert actor(8) == pytest.approx(4e9 + 28e9 / 8)
    critic = [BIG.resident("critic", "big", dp, 1) for dp in (1, 2, 8)]
    assert critic == [32_000_000_000, 16_000_000_000, 16_000_000_000]
    assert BIG.resident("reference", "big", 1, 1) == 0
    assert BIG.resident("maker", "big", 1, 2) == 4_000_000_000
    assert BIG.switch("actor", "big", 4, 1) == pytest.approx((0.7, 1.0))
    assert BIG.switch("critic", "big", 1, 1) == pytest.approx((2.0, 3.0))


def test_weight_syncs_are_those_of_the_most_similar_layouts() -> None:
    assert [BIG.sync("actor", "maker", n, 1).send for n in (1, 4, 8)] == [0.5, 0.4, 0.4]  # type: ignore[union-attr]
    assert BIG.sync("critic", "maker", 1, 1) is None


def test_an_iteration_in_turns_is_the_sum_of_what_was_measured() -> None:
    # sync, then all 64 prompts, and what comes of them; rows of each stage from another group have their way to go
    way = 0.001 + 256 * 4000e-9 * 1e-0 * 1e-0
    judged = judge(GRAPH, in_turns(0), BIG)
    stages = 20 + 5 + 5 + 24 + 16
    moves = 0.5 + 0.25
    assert judged.seconds == pytest.approx(stages + moves, abs=6 * way)
    assert judged.seconds > stages + moves


def test_a_swap_costs_its_moves() -> None:
    plain, swapped = (judge(GRAPH, in_turns(0, swap=swap), BIG).seconds for swap in (False, True))
    # maker: receives, makes; actor: sends, trains; critic: values, trains; each time off and on
    assert swapped - plain == pytest.approx(2 * 1.5 + 2 * 5.0 + 2 * 5.0)


def test_memory_is_what_stays_and_what_a_call_takes() -> None:
    memory = judge(GRAPH, in_turns(0), BIG).memory[0]
    assert memory == 8_000_000_000 + 32_000_000_000 + 32_000_000_000 + 8_000_000_000
    streamed = judge(GRAPH, apart(16), BIG).memory
    assert streamed[0] == 12_000_000_000
    assert streamed[1] == 64_000_000_000 + 8_000_000_000


def test_beside_others_a_stage_is_slower_for_that_part_of_its_time() -> None:
    plan = apart(16)
    spans = judge(GRAPH, plan, BIG).spans
    share = shares_beside(compile_plan(GRAPH, plan), spans)["maker.make"]
    assert 0 < share < 1
    made = judge(GRAPH, plan, BIG).stages["maker.make"]
    assert made == pytest.approx(20 * (1 + 0.25 * share), rel=0.02)
    assert judge(GRAPH, in_turns(0), BIG).stages["maker.make"] == pytest.approx(20, abs=0.01)


def test_shares_beside_counted_by_hand() -> None:
    compiled = compile_plan(GRAPH, apart(16))
    spans = {
        ("maker", 0): [Span(Doing.RUN, "maker.make", 0, 10)],
        ("critic", 0): [Span(Doing.RUN, "critic.values", 4, 6), Span(Doing.RUN, "critic.train", 9, 14)],
        ("reference", 0): [Span(Doing.ROWS, "reference.logprobs", 0, 5), Span(Doing.RUN, "reference.logprobs", 5, 7)],
        ("reward", 0): [Span(Doing.RUN, "reward.score", 0, 10)],
    }
    assert shares_beside(compiled, spans) == pytest.approx(
        {"maker.make": 0.4, "critic.values": 1.0, "critic.train": 0.2, "reference.logprobs": 1.0}
    )


def test_a_training_stage_that_gets_its_rows_in_pieces_takes_as_long_in_all() -> None:
    whole = BIG.stage("actor.train", "big", 1, 1)
    pieces = replace(whole, whole=256)
    assert sum(pieces.seconds(32) for _ in range(8)) == pytest.approx(whole.seconds(256))


def test_of_mixed_devices_the_slower_ones_count() -> None:
    assert judge(GRAPH, Shared((*in_turns(0).parts[1:], on("maker", 1))), MIXED).stages["maker.make"] == pytest.approx(
        40, abs=0.01
    )  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=r"no time of actor.train on small, only on big"):
        judge(GRAPH, in_turns(1), MIXED)


def test_what_the_profile_lacks_is_named() -> None:
    with pytest.raises(ConfigError, match=r"how many rows host.source0 makes.*under rows"):
        CostModel(PROFILE.model_copy(update={"rows": {"other": 3}}), GRAPH, {0: "big"}).rows(GRAPH.nodes[1])


def profiles(points: dict[int, tuple[float, int]], dp: int) -> StageProfile:
    return StageProfile(
        points=tuple(
            Point(kind="k", dp=dp, rows=rows, seconds=seconds, transient=size)
            for rows, (seconds, size) in points.items()
        )
    )


POINTS = st.dictionaries(
    st.integers(1, 300), st.tuples(st.floats(0.001, 100), st.integers(0, 10**10)), min_size=1, max_size=6
)


@given(POINTS, st.integers(1, 8))
def test_time_and_memory_never_fall_with_rows_and_time_never_grows_with_devices(
    points: dict[int, tuple[float, int]], dp: int
) -> None:
    stage = profiles(points, dp)
    time = stage_time("s", stage, "k", 3, 1)
    for sizes in (range(1, 12), range(50, 900, 50)):
        for a, b in pairwise(sizes):
            assert time.seconds(b) >= time.seconds(a) * (1 - 1e-9)
            assert time.memory(b) >= time.memory(a) * (1 - 1e-9)
            assert time.uncertainty(a) >= 0
    whole = [stage_time("s", stage, "k", n, 1).seconds(-(-600 // n)) for n in range(1, 20)]
    assert all(b <= a * (1 + 1e-9) for a, b in pairwise(whole))


@given(st.dictionaries(st.integers(1, 16), st.integers(1, 10**11), min_size=1, max_size=4))
def test_more_devices_never_hold_more_each_where_none_was_measured_to(sizes: dict[int, int]) -> None:
    falling = dict(zip(sorted(sizes), sorted(sizes.values(), reverse=True), strict=True))
    profile = Profile(
        identity=Identity(workflow="w", model="m"),
        kinds={"k": Kind()},
        rows={"host.source0": 1},
        stages={"actor.train": profiles({1: (1.0, 0)}, 1)},
        groups={"actor": tuple(Held(kind="k", dp=n, resident=size) for n, size in falling.items())},
    )
    model = CostModel(profile, GRAPH, {0: "k"})
    held = [model.resident("actor", "k", dp, 1) for dp in range(1, 33)]
    assert all(b <= a for a, b in pairwise(held))
    assert {n: held[n - 1] for n in falling} == falling


def test_rows_that_are_handed_on_are_ready_one_after_the_other() -> None:
    make = BIG.stage("maker.make", "big", 1, 1)
    ready = make.ready(64)
    assert len(ready) == 64
    assert all(np.diff(ready) >= 0)
    assert ready[-1] == 1
    assert 0 < ready[0] < 0.2
    graph: Graph = GRAPH
    assert graph.yields(graph.nodes[1])
