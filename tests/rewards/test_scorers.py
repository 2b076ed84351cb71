"""What each scorer says about responses whose worth is known."""

from __future__ import annotations

from decimal import Decimal

import pytest

from rlinf.config import RewardConfig
from rlinf.errors import ConfigError
from rlinf.rewards import Sample, ScorerPool, check, load_scorer
from rlinf.rewards.scorers import answer_part, last_number_in


def score(name: str, response: str, answer: object, metadata: dict | None = None, **params: object) -> float:
    return load_scorer(name, params)(response, answer, "", metadata or {})


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("2 + 3 = 5", "5"),
        ("it is 5.", "5"),
        ("-7", "-7"),
        ("the answer is -7!", "-7"),
        ("10-7", "7"),
        ("x=-7", "-7"),
        ("(3)-7", "7"),
        ("$1,234.50 in all", "1234.50"),
        ("1,2", "2"),
        ("about .5", "0.5"),
        ("2e3", "2000"),
        ("5\n\n", "5"),
        ("**8**", "8"),
        ("1,234,567", "1234567"),
        ("v2", "2"),
        ("50%", "50"),
    ],
)
def test_the_last_number_is_found_as_it_is_written(text, number):
    assert last_number_in(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "none", "- , ."])
def test_no_number_is_none(text):
    assert last_number_in(text) is None


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("2 + 3 = 5", "5", 1.0),
        ("5", 5, 1.0),
        ("5.0", "5", 1.0),
        ("5 or 6", "5", 0.0),
        ("", "5", 0.0),
        ("five", "5", 0.0),
        ("so 72", "He sold 24.\n#### 72", 1.0),
        ("1,000", "1000", 1.0),
        ("9007199254740993", "9007199254740992", 0.0),
    ],
)
def test_last_number(response, answer, expected):
    assert score("last_number", response, answer) == expected


def test_last_number_takes_a_tolerance_and_refuses_an_answer_without_a_number():
    assert score("last_number", "3.14", "3.1416", tolerance=0.01) == 1.0
    with pytest.raises(ValueError, match="no number"):
        score("last_number", "3", "pi")


@pytest.mark.parametrize(
    ("response", "part"),
    [
        ("<answer>1</answer> no, <ANSWER> 2\n</ANSWER> done", "2"),
        ("think\n\n last line \n", "last line"),
        ("<answer>open", "<answer>open"),
        ("", ""),
    ],
)
def test_the_offered_answer_is_the_last_tag_or_the_last_line(response, part):
    assert answer_part(response) == part


def test_exact_match_and_contains():
    assert score("exact_match", "thus\n<answer> New  York </answer>", "New York") == 1.0
    assert score("exact_match", "new york", "New York") == 0.0
    assert score("exact_match", "new york", "New York", ignore_case=True) == 1.0
    assert score("exact_match", "", "x") == 0.0
    assert score("contains", "I live in New\nYork.", "New York") == 1.0
    assert score("contains", "Paris", "New York") == 0.0
    with pytest.raises(ValueError, match="empty"):
        score("contains", "x", "")


def test_char_fraction_is_a_share():
    assert score("char_fraction", "a1b2", None) == 0.5
    assert score("char_fraction", "", None) == 0.0
    assert score("char_fraction", "aab", None, characters="a") == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        (r"so it is $\frac{1}{2}$", "0.5", 1.0),
        (r"\boxed{\frac{2}{4}}", r"\frac{1}{2}", 1.0),
        (r"$x^2 + 2x + 1$", "$(x+1)^2$", 1.0),
        (r"\boxed{(1, 2)}", "$(2, 1)$", 0.0),
        ("The answer is 7.", 8, 0.0),
        (r"$\{1, 2\}$", r"\{2, 1\}", 1.0),
        ("", "3", 0.0),
        (r"\boxed{\frac{", "3", 0.0),
        ("}{$$\\sqrt", "3", 0.0),
    ],
)
def test_math_verify(response, answer, expected):
    pytest.importorskip("math_verify")
    assert score("math_verify", response, answer) == expected


def test_math_verify_and_reasoning_gym_score_in_a_pool():
    with ScorerPool(RewardConfig(scorer="math_verify")) as pool:
        scored = pool.score([Sample(r"\boxed{4}", "4", "", {}), Sample("$5$", "4", "", {}), Sample("4", "", "", {})])
    assert scored.scores == [1.0, 0.0, 0.0]
    assert scored.failed == ["", "", "exception"]


def entries(task: str, count: int = 3, **params: object) -> list[dict]:
    import reasoning_gym

    return list(reasoning_gym.create_dataset(task, size=count, seed=3, **params))


@pytest.mark.parametrize("task", ["chain_sum", "gsm_symbolic", "word_sorting", "knights_knaves", "simple_equations"])
def test_reasoning_gym_gives_full_marks_for_its_own_answers_in_each_form(task):
    for entry in entries(task):
        for response in (f"Let me think: 1, 2.\n<answer>{entry['answer']}</answer>", f"Hm.\n{entry['answer']}"):
            assert score("reasoning_gym", response, entry["answer"], entry["metadata"]) == 1.0
        assert score("reasoning_gym", "", entry["answer"], entry["metadata"]) < 0.1


def test_reasoning_gym_reads_the_number_of_a_sentence_and_scores_a_wrong_one_low():
    (entry,) = entries("chain_sum", 1)
    right = int(entry["answer"])
    assert score("reasoning_gym", f"The result is {right}.", entry["answer"], entry["metadata"]) == 1.0
    assert score("reasoning_gym", f"The result is {right + 1}.", entry["answer"], entry["metadata"]) < 0.5


def test_reasoning_gym_uses_the_task_that_is_named_and_needs_one():
    import reasoning_gym

    entry = reasoning_gym.create_dataset("countdown", size=1, seed=0)[0]
    expression = entry["metadata"]["expression"]
    assert score("reasoning_gym", expression, entry["answer"], entry["metadata"], task="countdown") == 1.0
    with pytest.raises(ValueError, match="source_dataset"):
        score("reasoning_gym", "1", "1")


def test_unknown_scorers_and_parameters_name_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean 'last_number'"):
        check(RewardConfig(scorer="last_nmber"))
    with pytest.raises(ConfigError, match=r"no parameter 'tolerence'.*Did you mean 'tolerance'"):
        check(RewardConfig(scorer="last_number", params={"tolerence": 1}))
    with pytest.raises(ConfigError, match="no parameter 'response'"):
        check(RewardConfig(scorer="last_number", params={"response": "x"}))
    with pytest.raises(ConfigError, match=r"has no 'misbehaves'.*Did you mean 'misbehave'"):
        check(RewardConfig(scorer="tests.rewards.scorers_for_tests:misbehaves"))
    with pytest.raises(ConfigError, match=r"reward\.timeout_s=0"):
        check(RewardConfig(scorer="last_number", timeout_s=0))
    check(RewardConfig(scorer="tests.rewards.scorers_for_tests:scaled", params={"factor": 2.0}))


def test_a_function_that_needs_more_than_is_there_is_refused():
    with pytest.raises(ConfigError, match="cannot be called with"):
        check(RewardConfig(scorer="shutil:move"))
