"""Plans: as data, by kind, and what the compiler refuses, by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rlinf.config import PlanConfig
from rlinf.errors import ConfigError, PlacementError
from rlinf.m2flow.compiler import check_memory, compile_plan, resident_bytes
from rlinf.m2flow.graph import Graph, Workflow
from rlinf.m2flow.plan import (
    Piped,
    Plan,
    Shared,
    Stage,
    describe,
    devices,
    from_dict,
    load_plan,
    meeting,
    save_plan,
    stages,
    to_dict,
)
from rlinf.m2flow.stage import Unit
from rlinf.scheduler.shipped import choose
from rlinf.worker import Worker, stage
from tests.m2flow.test_executor import Numbers
from tests.m2flow.test_pipelines import Maker, Relative, Scores, graph_of

STAGES = st.builds(
    Stage, st.sampled_from("abcdef"), st.lists(st.integers(0, 9), max_size=4, unique=True).map(tuple), st.just(1)
)
PLANS = st.recursive(
    STAGES,
    lambda inner: st.one_of(
        st.builds(Shared, st.lists(inner, min_size=1, max_size=3).map(tuple), st.booleans()),
        st.builds(Piped, st.lists(inner, min_size=1, max_size=3).map(tuple), st.integers(0, 64)),
    ),
    max_leaves=8,
)


@given(PLANS)
def test_a_plan_survives_yaml(plan: Plan) -> None:
    assert from_dict(yaml.safe_load(yaml.safe_dump(to_dict(plan)))) == plan


@given(PLANS)
def test_each_group_has_a_line_and_each_device_is_told(plan: Plan) -> None:
    lines = describe(plan)
    assert sum(not line.strip().startswith(("shared", "piped")) for line in lines) == len(list(stages(plan)))
    assert devices(plan) == {device for leaf in stages(plan) for device in leaf.devices}


def test_a_plan_by_hand_needs_only_what_differs_from_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(
        """
        shared:
          - piped:
              - {stage: rollout, devices: [0], spans: true}
              - {stage: critic, devices: [1]}
            granularity: 4
          - {stage: reward}
        order: [critic.values]
        """
    )
    assert load_plan(tmp_path / "plan.yaml") == Shared(
        (Piped((Stage("rollout", (0,), spans=True), Stage("critic", (1,))), 4), Stage("reward", ())),
        order=("critic.values",),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", r"one of the keys stage, shared, piped; found \[\]|found '\[\]'"),
        ("{piped: [{stage: a}], granulrity: 4}", "no key 'granulrity'; did you mean 'granularity'"),
        ("{piped: [{stage: a, devices: 0}]}", r"piped\[0\].devices: found 0, expected a list of device numbers"),
        ("{shared: [{stage: a, dp: 0}]}", r"shared\[0\].dp: found 0, expected a number from 1"),
        ("{shared: []}", r"shared: found \[\], expected a list of nodes"),
        ("{stage: a, shared: [{stage: b}]}", "one of the keys"),
        ("{stage: a, devices: [true]}", "devices: found"),
        ("{a: b: c", "is not YAML"),
    ],
)
def test_what_is_no_plan_is_named_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "plan.yaml").write_text(text)
    with pytest.raises(PlacementError, match=message):
        load_plan(tmp_path / "plan.yaml")


def test_a_plan_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PlacementError, match=r"none.yaml cannot be read: No such file"):
        load_plan(tmp_path / "none.yaml")


def test_two_groups_meet_at_the_lowest_node_that_holds_both() -> None:
    inner = Piped((Stage("a", (0,)), Stage("b", (1,))), 2)
    plan = Shared((inner, Stage("c", (0, 1))))
    assert meeting(plan, "a", "b") == inner
    assert meeting(plan, "c", "b") == plan
    with pytest.raises(PlacementError, match="no place where a and z meet"):
        meeting(plan, "a", "z")


# What the compiler refuses


def test_piped_parts_with_a_device_in_common_are_refused_by_name() -> None:
    plan = Piped((Stage("maker", (0,)), Shared((Stage("scores", (0,)), Stage("learner", (1,))))), 4)
    with pytest.raises(PlacementError, match=r"maker and scores and learner are piped and both on device 0"):
        compile_plan(graph_of(), plan)


class InGroups(Worker):
    @stage(reads=("z",), writes=("a",), unit=Unit.GROUP)
    def relate(self, batch): ...


def test_a_granularity_that_cuts_a_group_is_refused_with_the_stage_and_the_size() -> None:
    flow = Workflow("w")
    make, score = flow.worker(Maker), flow.worker(Scores)
    flow.worker(InGroups).relate(score.score(make.make(flow.source(Numbers()))))
    graph = flow.build()

    def plan(m: int) -> Plan:
        return Piped((Stage("maker", (0,)), Stage("scores", (1,)), Stage("ingroups", (2,))), m)

    with pytest.raises(PlacementError, match=r"granularity of 6 rows cuts the groups of ingroups.relate: 4 rows"):
        compile_plan(graph, plan(6))
    compile_plan(graph, plan(8))


@pytest.mark.parametrize(
    ("order", "text"),
    [
        (("scores.score", "maker.make"), r"maker at maker.make waits for its turn on devices \[0\]; "
         "scores at scores.score waits for rows of maker.make"),
        (("learner.train", "scores.score"), "waits for"),
    ],
)  # fmt: skip
def test_an_order_that_never_ends_is_found_without_running_it(order: tuple[str, ...], text: str) -> None:
    parts = tuple(Stage(name, (0,)) for name in ("maker", "scores", "learner"))
    with pytest.raises(PlacementError, match=f"never ends.*{text}"):
        compile_plan(graph_of(), Shared(parts, order=order))


def test_an_order_that_ends_is_taken() -> None:
    class More(Scores):
        @stage(reads=("y",), writes=("z2",))
        def again(self, batch): ...

    flow = Workflow("w")
    make, score, more = flow.worker(Maker), flow.worker(Scores), flow.worker(More)
    rows = make.make(flow.source(Numbers()))
    score.score(rows)
    more.again(rows)
    parts = tuple(Stage(name, (0,)) for name in ("maker", "scores", "more"))
    compile_plan(flow.build(), Shared(parts, order=("more.again", "scores.score")))
    with pytest.raises(PlacementError, match=r"names 'more.agin', which is no stage"):
        compile_plan(flow.build(), Shared(parts, order=("more.agin",)))
    with pytest.raises(PlacementError, match=r"names more.again twice"):
        compile_plan(flow.build(), Shared(parts, order=("more.again", "more.again")))


@pytest.mark.parametrize(
    ("stage_", "text"),
    [
        (Stage("maker", (0, 0), dp=2), "gives maker a device twice"),
        (Stage("maker", ()), r"gives maker devices \[\]; Maker needs devices"),
        (Stage("maker", (0,), spans=True), "says spans=True of maker; of Maker it is False"),
        (Stage("maker", (0, 1)), "gives maker 2 devices for dp=1 x tp=1"),
    ],
)
def test_a_stage_that_does_not_fit_its_worker_is_refused(stage_: Stage, text: str) -> None:
    with pytest.raises(PlacementError, match=text):
        compile_plan(graph_of(), Shared((stage_, Stage("scores", (0,)), Stage("learner", (0,)))))


def test_staleness_is_not_negative() -> None:
    parts = tuple(Stage(name, (0,)) for name in ("maker", "scores", "learner"))
    with pytest.raises(PlacementError, match="staleness is -1"):
        compile_plan(graph_of(), Shared(parts), staleness=-1)


# Memory

NEEDS = {"maker": 5, "scores": 3, "learner": 4}
ON_ONE = tuple(Stage(name, (0,)) for name in NEEDS)


def test_what_stays_adds_up_and_what_is_swapped_counts_once() -> None:
    assert resident_bytes(Shared(ON_ONE), NEEDS) == {0: 12}
    assert resident_bytes(Shared(ON_ONE, swap=True), NEEDS) == {0: 5}
    assert resident_bytes(Shared((ON_ONE[0], Shared(ON_ONE[1:], swap=True))), NEEDS) == {0: 9}
    apart = Piped((Stage("maker", (0,)), Stage("scores", (1,))), 1)
    assert resident_bytes(Shared((apart, Stage("learner", (0, 1), 2))), NEEDS) == {0: 9, 1: 7}


def test_memory_over_capacity_is_refused_with_the_device_and_the_groups() -> None:
    needs = {name: size * 2**30 for name, size in NEEDS.items()}
    with pytest.raises(
        PlacementError, match=r"device 0 would hold 12.00 of 8.00 GiB: maker 5.00 GiB, scores 3.00 GiB, learner 4.00"
    ):
        check_memory(Shared(ON_ONE), needs, [8 * 2**30])
    check_memory(Shared(ON_ONE, swap=True), needs, [8 * 2**30])
    check_memory(Shared(ON_ONE), needs, [None])


# The plans that ship


class Reward(Scores):
    uses_device = False


class Reference(Worker):
    @stage(reads=("y",), writes=("r",))
    def logprobs(self, batch): ...


class Critic(Worker):
    @stage(reads=("y",), writes=("v",))
    def values(self, batch): ...

    @stage(reads=("v", "a"), updates=True, streams=True)
    def train(self, batch): ...


class Actor(Worker):
    @stage(reads=("y", "a", "r"), updates=True, streams=True)
    def train(self, batch): ...

    def publish_weights(self, target, inline, slot=0): ...


def ppo_like(actor_dp: int = 0) -> Graph:
    """A maker, a reward without a device, a reference, a critic that scores and learns, an actor that learns."""
    flow = Workflow("w")
    make, reward, actor = flow.worker(Maker, dp=0), flow.worker(Reward), flow.worker(Actor, dp=actor_dp)
    reference, critic = flow.worker(Reference, dp=0), flow.worker(Critic, dp=0)
    rows = reward.score(make.make(flow.source(Numbers())))
    rows = flow.map(Relative(), critic.values(reference.logprobs(rows)))
    actor.train(rows)
    critic.train(rows)
    flow.sync(actor, make)
    return flow.build()


def chosen(cfg: PlanConfig, n: int, graph: Graph | None = None, **needs: int) -> Plan:
    return choose(graph or ppo_like(), cfg, lambda plan: needs, [100] * n)


def test_disaggregated_gives_makers_devices_of_their_own() -> None:
    plan = chosen(PlanConfig("disaggregated", granularity=8, maker_devices=3), 5)
    assert isinstance(plan, Piped)
    assert plan.granularity == 8
    where = {leaf.worker: leaf.devices for leaf in stages(plan)}
    assert where == {"maker": (0, 1, 2), "actor": (3, 4), "reference": (3, 4), "critic": (3, 4), "reward": ()}
    assert isinstance(meeting(plan, "maker", "actor"), Piped)
    assert isinstance(meeting(plan, "critic", "actor"), Shared)


@pytest.mark.parametrize(("n", "reference", "critic"), [(2, (1,), (1,)), (4, (2,), (3,)), (8, (4, 5), (6, 7))])
def test_hybrid_scores_beside_the_makers_in_parallel_branches_and_learns_on_all(
    n: int, reference: tuple[int, ...], critic: tuple[int, ...]
) -> None:
    plan = chosen(PlanConfig("hybrid", granularity=8), n)
    where = {leaf.worker: leaf.devices for leaf in stages(plan)}
    assert where["maker"] == tuple(range(n // 2))
    assert (where["reference"], where["critic"]) == (reference, critic)
    assert where["actor"] == tuple(range(n))
    assert isinstance(meeting(plan, "maker", "critic"), Piped)
    assert isinstance(meeting(plan, "maker", "actor"), Shared)
    assert isinstance(meeting(plan, "reference", "critic"), Shared if n == 2 else Piped)


@pytest.mark.parametrize("kind", ["collocated", "disaggregated", "hybrid"])
@pytest.mark.parametrize("n", [2, 3, 7, 64, 1024])
def test_every_kind_compiles_at_any_number_of_devices(kind: str, n: int) -> None:
    graph = ppo_like()
    plan = chosen(PlanConfig(kind, granularity=8), n, graph)
    assert devices(plan) <= set(range(n))
    compile_plan(graph, plan)
    compile_plan(graph, plan, staleness=1)


@pytest.mark.parametrize("kind", ["disaggregated", "hybrid"])
def test_one_device_cannot_be_split(kind: str) -> None:
    with pytest.raises(PlacementError, match=rf"plan={kind} .*leaves nothing of 1 device for.*devices_per_node=2"):
        chosen(PlanConfig(kind), 1)


def test_groups_are_swapped_only_where_memory_asks_for_it() -> None:
    def swaps(cfg: PlanConfig, need: int) -> bool:
        plan = chosen(cfg, 1, maker=need, actor=need)
        assert isinstance(plan, Shared)
        return plan.swap

    assert not swaps(PlanConfig("collocated"), 50)
    assert swaps(PlanConfig("collocated"), 51)
    assert swaps(PlanConfig("collocated", swap="always"), 1)
    with pytest.raises(PlacementError, match="device 0 would hold"):
        swaps(PlanConfig("collocated", swap="never"), 51)
    with pytest.raises(PlacementError, match="device 0 would hold"):
        swaps(PlanConfig("collocated"), 101)


def test_a_plan_file_is_taken_and_checked_against_the_devices(tmp_path: Path) -> None:
    plan = chosen(PlanConfig("hybrid", granularity=2), 4)
    save_plan(plan, tmp_path / "mine.yaml")
    cfg = PlanConfig(file=str(tmp_path / "mine.yaml"))
    assert chosen(cfg, 4) == plan
    with pytest.raises(PlacementError, match=r"mine.yaml names device 2; there are 2, numbered from 0"):
        chosen(cfg, 2)


@pytest.mark.parametrize(
    ("cfg", "text"),
    [
        (PlanConfig("hybird"), "plan.kind='hybird' is not one of auto, collocated, disaggregated, hybrid"),
        (PlanConfig(swap="yes"), "plan.swap='yes' is not one of auto, always, never"),
        (PlanConfig(granularity=-1), "plan.granularity=-1"),
    ],
)
def test_a_value_that_no_plan_has_is_refused(cfg: PlanConfig, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        chosen(cfg, 2)
