"""The best plan by simulation, why it is, and what would change it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from rlinf.errors import PlacementError
from rlinf.m2flow.plan import Piped, Shared, Stage, stages
from rlinf.scheduler.auto import Ground, find, pick
from rlinf.scheduler.explain import Look, explained, reasons, uncertainty
from rlinf.scheduler.judge import COLLOCATED, DISAGGREGATED, FAMILIES, Judged, judge
from rlinf.scheduler.planner import MEMORY, TIME, fewest
from rlinf.scheduler.profile import load_profile
from rlinf.scheduler.sensitivity import Flip, flips
from rlinf.scheduler.whatif import change
from tests.e2e import slowing
from tests.m2flow.test_plans import ppo_like

PROFILE = load_profile(Path(__file__).parent / "profiles" / "ppo.yaml")
PPO = Ground(ppo_like(), PROFILE, {"big": (0, 1, 2, 3)}, {"big": 80_000_000_000})
SLOWING = Ground(slowing.graph_of(0), slowing.known(), {"cpu": (0, 1)})


def test_groups_on_one_device_each_are_piped_as_the_times_say() -> None:
    # 0.32 s of making and then 0.16 s of rating beside 0.32 s of judging; then 0.16 s of learning
    best = find(SLOWING).best
    assert best.seconds == pytest.approx(0.64, rel=0.01)
    assert best.family == DISAGGREGATED
    where = {stage.worker: stage.devices for stage in stages(best.plan)}
    assert where["maker"] == where["rater"] != where["judge"] == where["learner"]
    # with a rater 5 times as slow, 0.8 s of it beside the others, the first row's 0.04 s and the last's 0.02 s
    slow = replace(SLOWING, profile=change(SLOWING.profile, SLOWING.graph, slow={"rater.rate": 5.0}))
    best = find(slow).best
    assert best.seconds == pytest.approx(0.86, rel=0.01)
    where = {stage.worker: stage.devices for stage in stages(best.plan)}
    assert where["maker"] == where["judge"] == where["learner"] != where["rater"]


def test_the_best_is_the_fastest_that_was_simulated_and_no_plan_that_ships_is_faster() -> None:
    for ground in (PPO, SLOWING, replace(PPO, staleness=1), replace(PPO, granularity=16)):
        found = find(ground)
        least = min(one.seconds for one in found.judged)
        assert found.best.seconds <= least * 1.01
        each = [round(one.seconds, 9) for one in found.judged]
        assert each == sorted(each)
        assert set(found.families) == set(FAMILIES)
        for name, one in found.families.items():
            assert isinstance(one, str) or one.family == name
        for plan in found.shipped.values():
            own = judge(ground.graph, plan, ground.model, ground.staleness, ground.in_flight)
            fits = all(size <= (ground.bytes_of(device) or size) for device, size in own.memory.items())
            assert not fits or own.seconds >= least * (1 - 1e-9)


def test_other_objectives_take_less_memory_or_fewer_devices() -> None:
    fast, small, few = (find(PPO, objective).best for objective in (TIME, MEMORY, fewest(0.5)))
    assert max(small.memory.values()) < max(fast.memory.values())
    assert small.seconds >= fast.seconds
    assert len(few.memory) < len(fast.memory)
    assert few.seconds <= 1.5 * fast.seconds * 1.001


def test_of_plans_that_are_as_fast_the_simplest_is_taken() -> None:
    one = judge(
        SLOWING.graph, Shared(tuple(Stage(n, (0,)) for n in ("maker", "rater", "judge", "learner"))), SLOWING.model
    )
    other = replace(one, plan=Piped((one.plan.parts[0], Shared(one.plan.parts[1:])), 1), seconds=one.seconds * 0.995)
    assert pick([other, one], TIME) is one
    assert pick([replace(other, seconds=one.seconds * 0.9), one], TIME) is not one


def test_without_room_it_says_what_would_be_enough() -> None:
    with pytest.raises(PlacementError, match=r"no plan fits on 4 x big of 2\.00 GiB.*enough would be memory of"):
        find(replace(PPO, capacity={"big": 2 * 2**30}))


def test_families_that_a_workflow_or_devices_cannot_have_are_said_to_be_none() -> None:
    found = find(replace(SLOWING, places={"cpu": (0,)}))
    assert found.best.family == COLLOCATED
    assert found.best.seconds == pytest.approx(0.96, rel=0.02)
    assert isinstance(found.families[DISAGGREGATED], str)


def test_the_explanation_holds_the_plan_its_rivals_and_why_they_lost() -> None:
    found = find(SLOWING)
    asked = judge(SLOWING.graph, find(replace(SLOWING, places={"cpu": (0,)})).best.plan, SLOWING.model)
    text = "\n".join(explained(found, SLOWING, Look(90), asked))
    for part in (
        *("THE PLAN", "expected: 0.64 s", "ITS TIME LINE", "idle", "THE BEST OF EACH FAMILY"),
        *("disaggregated: the plan above", "collocated: 0.96 s, +", "THE PLAN THAT WAS ASKED FOR (collocated)"),
        "WHAT WOULD CHANGE THE CHOICE",
    ):
        assert part in text, part
    assert max(map(len, text.splitlines())) < 200


def test_reasons_add_up_to_the_difference_where_a_device_does_one_thing_after_another() -> None:
    found = find(PPO)
    for one in found.families.values():
        if isinstance(one, Judged) and one.plan != found.best.plan:
            lines = reasons(one, found.best)
            assert lines
            assert all(line[:2] in ("- ", "+ ") for line in lines)
            assert lines == sorted(lines, key=lambda line: line[0] == "+")  # what it loses comes first


def test_uncertainty_is_that_of_the_stages() -> None:
    assert uncertainty(find(SLOWING).best, SLOWING) == 0.0  # all points were known
    assert uncertainty(find(PPO).best, PPO) > 0.0  # the maker's had a spread, other layouts were not measured


def changed(ground: Ground, flip: Flip, factor: float) -> Ground:
    """With the cost in question some times as high."""
    if flip.what == "lengths":
        profile = change(ground.profile, ground.graph, lengths=factor)
    elif flip.what.startswith("rows"):
        profile = change(ground.profile, ground.graph, rows=round(max(ground.profile.rows.values()) * factor))
    else:
        profile = change(ground.profile, ground.graph, slow={flip.what: factor})
    return replace(ground, profile=profile)


def test_past_a_factor_that_changes_the_choice_the_whole_search_finds_a_faster_plan() -> None:
    found = find(PPO)
    seen = [flip for flip in flips(found, PPO) if isinstance(flip, Flip)]
    assert seen
    for flip in seen[:3]:
        assert flip.family != found.best.family
        ground = changed(PPO, flip, flip.factor * (1.15 if flip.factor > 1 else 1 / 1.15))
        mine = judge(ground.graph, found.best.plan, ground.model)
        assert find(ground).best.seconds < mine.seconds * 0.995, str(flip)


def test_other_numbers_of_devices_are_tried() -> None:
    lines = [str(line) for line in flips(find(PPO), PPO)]
    assert any(re.match(r"2 devices instead of 4: .*, 0\.\d\d times as fast", line) for line in lines)
    assert any(re.match(r"8 devices instead of 4: .*, 1\.\d\d times as fast", line) for line in lines)


def test_granularity_and_swaps_are_those_that_are_asked_for() -> None:
    for one in find(replace(PPO, granularity=16)).judged:
        assert {node.granularity for node in walk(one.plan) if isinstance(node, Piped)} <= {16}
    assert any(name.endswith("swapped") for name in find(PPO).shipped)
    assert not any(name.endswith("swapped") for name in find(replace(PPO, swap="never")).shipped)


def test_plans_that_ship_are_left_out_where_their_tensor_parallel_degree_was_not_measured() -> None:
    maker = PROFILE.stages["maker.make"]
    wide = maker.model_copy(update={"points": tuple(p for p in maker.points if p.tp == 2 and not p.beside)})
    ground = replace(PPO, profile=PROFILE.model_copy(update={"stages": {**PROFILE.stages, "maker.make": wide}}))
    assert find(PPO).shipped
    found = find(ground)
    assert not found.shipped
    degrees = {stage.tp for one in found.judged for stage in stages(one.plan) if stage.worker == "maker"}
    assert degrees == {2}


def walk(plan: Piped | Shared | Stage) -> list[Piped | Shared | Stage]:
    return [plan] if isinstance(plan, Stage) else [plan, *(node for part in plan.parts for node in walk(part))]
