"""The planner against brute force on thousands of random problems; what must hold of any; and what it refuses."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from rlinf.errors import PlacementError
from rlinf.m2flow.plan import Piped, Plan, Shared, Stage
from rlinf.scheduler.judge import FAMILIES
from rlinf.scheduler.judge import family as family_of
from rlinf.scheduler.planner import MEMORY, TIME, Choice, Objective, fewest, flat, solve
from rlinf.scheduler.problem import Option, Part, Problem
from tests.scheduler import brute

LAYOUTS = {1: 4, 2: 3, 3: 3, 4: 2, 5: 1}  # of a part, at most, by the number of parts


def drawn(rng: random.Random) -> Problem:
    """Up to 5 parts on up to 6 devices of one or two kinds."""
    count = rng.choices([1, 2, 3, 4, 5], [1, 3, 5, 3, 1])[0]
    kinds = {"a": tuple(range(rng.randint(1, 6)))}
    if rng.random() < 0.25 and len(kinds["a"]) < 5:
        kinds["b"] = tuple(range(10, 10 + rng.randint(1, 6 - len(kinds["a"]))))
    names = [f"p{i}" for i in range(count)]
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    pieces = {0: 1} | ({rng.choice([2, 4]): rng.choice([2, 4, 8])} if rng.random() < 0.6 else {})
    return Problem(
        parts=tuple(Part(name, options(rng, kinds, pieces, LAYOUTS[count])) for name in names),
        reads=frozenset(pair for pair in pairs if rng.random() < 0.4),
        rest_reads=frozenset((a, b) if rng.random() < 0.5 else (b, a) for a, b in pairs if rng.random() < 0.3),
        devices=kinds,
        capacity={kind: rng.choice([None, None, 6, 12, 20]) for kind in kinds},
        pieces=pieces,
        staleness=rng.choice([0, 0, 0, 1, 2]),
    )


def options(
    rng: random.Random, kinds: dict[str, tuple[int, ...]], pieces: dict[int, int], most: int
) -> tuple[Option, ...]:
    def stream() -> dict[int, float]:
        return {size: float(rng.randint(0, 9)) for size in pieces}

    if rng.random() < 0.2:
        return (Option("", 1, 1, stream(), 0.5),)
    found: dict[tuple[str, int, int], Option] = {}
    for _ in range(rng.randint(1, most)):
        kind, tp = rng.choice(list(kinds)), rng.choice([1, 1, 2])
        dp = rng.randint(1, max(len(kinds[kind]) // tp, 1))
        rest = rng.choice([0.1, 1.0, 3.0]) * rng.random() + 0.01
        found[kind, dp, tp] = Option(
            kind, dp, tp, stream(), rest, rng.randint(0, 6), rng.randint(0, 4), rng.choice([0.0, 0.5, 2.0])
        )
    return tuple(found.values())


def solved(problem: Problem, objective: Objective = TIME, family: str | None = None) -> Choice | None:
    try:
        return solve(problem, objective, family)
    except PlacementError:
        return None


def assert_true(choice: Choice, problem: Problem) -> None:
    """The plan has the time, memory and devices that it is said to have, and fits."""
    value = brute.value(choice.plan, problem, choice.granularity)
    assert brute.seconds(value, problem) == pytest.approx(choice.seconds, rel=1e-9)
    assert brute.feasible(value, problem)
    assert len(brute.devices_of(choice.plan)) == choice.devices == sum(dict(value.devices).values())
    assert dict(value.peak) == choice.memory


@pytest.mark.parametrize("block", range(30))
def test_no_plan_of_all_is_faster(block: int) -> None:
    found = 0
    for seed in range(100 * block, 100 * (block + 1)):
        problem = drawn(random.Random(seed))
        best = min((brute.seconds(value, problem) for value in brute.every(problem)), default=None)
        choice = solved(problem)
        assert (choice is None) == (best is None), seed
        if choice is not None and best is not None:
            assert choice.seconds == pytest.approx(best, rel=1e-9), seed
            assert_true(choice, problem)
            found += 1
    assert found > 40  # most problems have a plan


@pytest.mark.parametrize("block", range(6))
def test_each_family_and_objective_has_its_best(block: int) -> None:
    for seed in range(100_000 + 40 * block, 100_000 + 40 * (block + 1)):
        problem = drawn(random.Random(seed))
        every = list(brute.every(problem))
        for family in FAMILIES:
            mine = [value for value in every if value.family == family]
            choice = solved(problem, TIME, family)
            assert (choice is None) == (not mine), (seed, family)
            if choice is None:
                continue
            best = min(brute.seconds(value, problem) for value in mine)
            assert choice.seconds == pytest.approx(best, rel=1e-9), (seed, family)
            assert family_of(flat(choice.plan)) == family, (seed, family)
            assert_true(choice, problem)
            small = solve(problem, MEMORY, family)
            least = min(max(dict(value.peak).values(), default=0) for value in mine)
            assert max(small.memory.values(), default=0) == least, (seed, family)
            assert_true(small, problem)
            few = solve(problem, fewest(0.3), family)
            near = [value for value in mine if brute.seconds(value, problem) <= best * 1.3 * (1 + 1e-9)]
            assert few.devices == min(sum(dict(value.devices).values()) for value in near), (seed, family)
            assert few.seconds <= best * 1.3 * (1 + 1e-9)
            assert_true(few, problem)


def more_devices(problem: Problem) -> Problem:
    return replace(problem, devices={kind: (*own, max(own) + 100) for kind, own in problem.devices.items()})


def more_memory(problem: Problem) -> Problem:
    return replace(
        problem, capacity={kind: None if size is None else size + 3 for kind, size in problem.capacity.items()}
    )


def more_layouts(problem: Problem) -> Problem:
    first, *rest = problem.parts
    more = Option("a", 1, 1, dict.fromkeys(problem.pieces, 3.5), 0.25, 1, 1, 0.5)
    kept = tuple(option for option in first.options if (option.kind, option.dp, option.tp) != ("a", 1, 1))
    same = [option for option in first.options if option not in kept]
    return replace(problem, parts=(replace(first, options=(*kept, *(same or [more]))), *rest))


@pytest.mark.parametrize("more", [more_devices, more_memory, more_layouts])
def test_more_never_makes_the_best_plan_slower(more: Callable[[Problem], Problem]) -> None:
    for seed in range(200_000, 200_300):
        problem = drawn(random.Random(seed))
        before, after = solved(problem), solved(more(problem))
        if before is not None:
            assert after is not None, seed
            assert after.seconds <= before.seconds * (1 + 1e-9), seed


def test_names_and_the_order_of_parts_and_layouts_change_nothing() -> None:
    for seed in range(300_000, 300_300):
        rng = random.Random(seed)
        problem = drawn(rng)
        named = {part.name: f"q{rng.random()}" for part in problem.parts}
        parts = [
            replace(part, name=named[part.name], options=tuple(rng.sample(part.options, len(part.options))))
            for part in problem.parts
        ]
        other = replace(
            problem,
            parts=tuple(rng.sample(parts, len(parts))),
            reads=frozenset((named[a], named[b]) for a, b in problem.reads),
            rest_reads=frozenset((named[a], named[b]) for a, b in problem.rest_reads),
        )
        one, two = solved(problem), solved(other)
        assert (one is None) == (two is None), seed
        if one is not None and two is not None:
            assert (two.devices, two.granularity, two.swaps) == (one.devices, one.granularity, one.swaps), seed
            assert two.seconds == pytest.approx(one.seconds, rel=1e-9), seed
            assert solve(problem) == one  # and the same again


# Counted by hand


def gpu(dp: int, stream: float, rest: float = 0.0, held: int = 0, work: int = 0, swap: float = 0.0) -> Option:
    return Option("gpu", dp, 1, {0: stream, 4: stream}, rest, held, work, swap)


def asked(*parts: Part, capacity: int | None = None, count: int = 2, pieces: int = 4, staleness: int = 0) -> Problem:
    return Problem(
        parts=parts,
        reads=frozenset((parts[i].name, parts[i + 1].name) for i in range(len(parts) - 1)),
        devices={"gpu": tuple(range(count))},
        capacity={"gpu": capacity},
        pieces={0: 1, 4: pieces},
        staleness=staleness,
    )


def test_a_pipe_where_halves_are_not_half_as_slow() -> None:
    # two devices gain little: 9 + 9 in turns; piped on one each, (10 + 10) / 4 + 3 / 4 * 10
    found = solve(asked(Part("a", (gpu(1, 10.0), gpu(2, 9.0))), Part("b", (gpu(1, 10.0), gpu(2, 9.0)))))
    assert found.plan == Piped((Stage("a", (0,)), Stage("b", (1,))), 4)
    assert (found.seconds, found.granularity, found.devices) == (12.5, 4, 2)


def test_turns_where_they_are() -> None:
    found = solve(asked(Part("a", (gpu(1, 10.0), gpu(2, 5.0))), Part("b", (gpu(1, 10.0), gpu(2, 5.0)))))
    assert found.plan == Shared((Stage("a", (0, 1), 2), Stage("b", (0, 1), 2)))
    assert found.seconds == 10.0


def test_a_group_without_a_device_works_beside_the_others() -> None:
    found = solve(asked(Part("a", (gpu(1, 8.0),)), Part("scorer", (Option("", 1, 1, {0: 8.0, 4: 8.0}),)), count=1))
    assert found.plan == Piped((Stage("a", (0,)), Stage("scorer", ())), 4)
    assert found.seconds == 8 / 4 * 2 + 0.75 * 8
    assert family_of(found.plan) == "collocated"


def test_a_swap_only_where_memory_forces_it() -> None:
    parts = (Part("a", (gpu(1, 4.0, held=6, swap=1.0),)), Part("b", (gpu(1, 4.0, held=6, work=2, swap=1.0),)))
    roomy = solve(asked(*parts, capacity=14, count=1))
    assert roomy.plan == Shared((Stage("a", (0,)), Stage("b", (0,))))
    assert (roomy.seconds, roomy.memory) == (8.0, {"gpu": 14})
    tight = solve(asked(*parts, capacity=13, count=1))
    assert tight.plan == Shared((Stage("a", (0,)), Stage("b", (0,))), swap=True)
    assert (tight.seconds, tight.memory, tight.swaps) == (10.0, {"gpu": 8}, 1)
    assert solve(asked(*parts, capacity=14, count=1), MEMORY).plan == tight.plan


def test_what_waits_for_all_rows_is_not_hidden_by_a_pipe() -> None:
    problem = asked(Part("a", (gpu(1, 8.0),)), Part("b", (gpu(1, 0.0, rest=8.0),)))
    assert solve(problem).seconds == 16.0


def test_with_staleness_the_busiest_devices_set_the_pace() -> None:
    parts = (Part("a", (gpu(1, 8.0), gpu(2, 6.0))), Part("b", (gpu(1, 0.0, rest=8.0), gpu(2, 0.0, rest=6.0))))
    now, ahead = solve(asked(*parts)), solve(asked(*parts, staleness=1))
    assert (now.seconds, family_of(now.plan)) == (12.0, "collocated")
    assert (ahead.seconds, family_of(ahead.plan)) == (8.0, "disaggregated")


def test_devices_of_two_kinds() -> None:
    both = (gpu(1, 8.0), Option("old", 1, 1, {0: 12.0, 4: 12.0}))
    problem = replace(asked(Part("a", both), Part("b", both), count=1), devices={"gpu": (3,), "old": (7,)})
    found = solve(problem)
    # (8 + 12) / 4 + 3 / 4 * 12 = 14 on both, 16 on the faster one in turns
    assert found.seconds == 14.0
    assert {(stage.worker, stage.devices) for stage in leaves(found.plan)} in (
        {("a", (3,)), ("b", (7,))},
        {("a", (7,)), ("b", (3,))},
    )


def test_the_fewest_devices_that_are_fast_enough() -> None:
    problem = asked(Part("a", (gpu(1, 10.0), gpu(2, 9.0), gpu(4, 8.5))), count=4)
    assert [solve(problem, fewest(part)).devices for part in (0.0, 0.06, 0.2)] == [4, 2, 1]


def test_flat_takes_nodes_apart_that_say_the_same() -> None:
    a, b, c = (Stage(name, ()) for name in "abc")
    assert flat(Piped((Piped((a, b), 4), c), 4)) == Piped((a, b, c), 4)
    assert flat(Shared((a, Shared((b, c))))) == Shared((a, b, c))
    assert flat(Shared((a, Shared((b, c), True)))) == Shared((a, Shared((b, c), True)))
    assert flat(Shared((Piped((a, b), 4), c))) == Shared((Piped((a, b), 4), c))


def leaves(plan: Plan) -> list[Stage]:
    return [plan] if isinstance(plan, Stage) else [leaf for part in plan.parts for leaf in leaves(part)]


# Refused

GOOD = asked(Part("a", (gpu(1, 1.0),)), Part("b", (gpu(1, 1.0),)))


@pytest.mark.parametrize(
    ("problem", "what"),
    [
        (replace(GOOD, parts=()), "nothing to plan"),
        (replace(GOOD, reads=frozenset([("a", "b"), ("b", "a")])), r"in a cycle: (a -> b -> a|b -> a -> b)"),
        (replace(GOOD, reads=frozenset([("a", "c")])), r"reads names 'c', which is no part; there are a, b"),
        (replace(GOOD, parts=(GOOD.parts[0], GOOD.parts[0])), "a is there twice"),
        (replace(GOOD, parts=(Part("a", ()),), reads=frozenset()), "a has no layout"),
        (asked(Part("a", (gpu(1, -1.0),))), r"a on gpu, dp=1 tp=1: stream\[0\] takes -1.0 s; expected 0 or more"),
        (asked(Part("a", (gpu(1, float("nan")),))), "takes nan s"),
        (asked(Part("a", (gpu(1, 0.0),))), "all its stages together take no time"),
        (asked(Part("a", (gpu(1, 1.0, held=-5),))), "holds -5 and 0 bytes"),
        (asked(Part("a", (Option("gpu", 1, 1, {0: 1.0}),))), "no time for a granularity of 4 rows, only for"),
        (asked(Part("a", (Option("tpu", 1, 1, {0: 1.0, 4: 1.0}),))), "there are no such devices, only gpu"),
        (replace(GOOD, pieces={}), "has no granularity"),
        (replace(GOOD, pieces={0: 0}), "granularity of 0 rows with 0 pieces"),
        (replace(GOOD, staleness=-1), "staleness is -1"),
    ],
)
def test_a_problem_that_makes_no_sense_is_refused(problem: Problem, what: str) -> None:
    with pytest.raises(PlacementError, match=what):
        solve(problem)


def test_without_a_plan_it_says_what_would_be_enough() -> None:
    gib = 2**30
    parts = (Part("a", (gpu(1, 1.0, held=6 * gib),)), Part("b", (gpu(1, 1.0, held=9 * gib, work=gib),)))
    with pytest.raises(
        PlacementError,
        match=r"no plan fits on 1 x gpu of 8\.00 GiB; b alone takes 1 device of 10\.00 GiB at least; "
        r"enough would be memory of 10\.00 GiB",
    ):
        solve(asked(*parts, capacity=8 * gib, count=1))
    wide = (Part("a", (gpu(4, 1.0),)),)
    with pytest.raises(PlacementError, match=r"a alone takes 4 devices .*enough would be 4 devices as they are"):
        solve(asked(*wide, count=2))
    with pytest.raises(PlacementError, match="there is no disaggregated plan"):
        solve(asked(*parts, count=1), TIME, "disaggregated")
