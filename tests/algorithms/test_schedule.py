import math

import pytest

from rlinf.algorithms.schedule import lr_factor
from rlinf.config import OptimizerConfig
from rlinf.errors import ConfigError


def curve(steps: int, **keys) -> list[float]:
    cfg = OptimizerConfig(**keys)
    return [lr_factor(step, cfg) for step in range(steps)]


def test_constant_without_warmup_is_one_everywhere():
    assert curve(4) == [1.0, 1.0, 1.0, 1.0]


def test_constant_needs_no_total_steps_and_ignores_the_floor():
    assert curve(6, warmup_steps=4, min_lr_ratio=0.1) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_whole_linear_curve_by_hand():
    # Warm-up 2, then from 1 at step 2 to 0.2 at step 6 in four equal steps of 0.2, then flat.
    found = curve(9, schedule="linear", warmup_steps=2, total_steps=6, min_lr_ratio=0.2)
    assert found == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])


def test_whole_cosine_curve_by_hand():
    # Half angles 0, 60, 90, 120, 180 degrees need thirds and halves: six steps after one of warm-up.
    found = curve(9, schedule="cosine", warmup_steps=1, total_steps=7)
    root = math.sqrt(3) / 2
    assert found == pytest.approx([1.0, 1.0, (1 + root) / 2, 0.75, 0.5, 0.25, (1 - root) / 2, 0.0, 0.0], abs=1e-12)


def test_warmup_is_counted_once_in_total_steps():
    long = curve(12, schedule="linear", warmup_steps=4, total_steps=10)
    assert long[9] == pytest.approx(1 / 6)  # the last step before total_steps still trains
    assert long[10] == 0.0


def test_matches_torch_schedulers_after_warmup():
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    oracle = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8, eta_min=0.1)
    expected = []
    for _ in range(9):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        oracle.step()
    assert curve(9, schedule="cosine", total_steps=8, min_lr_ratio=0.1) == pytest.approx(expected)


def test_warmup_as_long_as_the_run_is_allowed():
    assert curve(3, schedule="cosine", warmup_steps=2, total_steps=2) == [0.5, 1.0, 0.0]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"schedule": "cosin", "total_steps": 4}, "did you mean 'cosine'"),
        ({"schedule": "linear"}, "total_steps above 0"),
        ({"schedule": "linear", "warmup_steps": 5, "total_steps": 4}, "more than optimizer.total_steps=4"),
        ({"min_lr_ratio": 2.0}, "must lie in"),
        ({"warmup_steps": -1}, "warmup_steps=-1"),
    ],
)
def test_contradictions_are_config_errors_that_say_what_to_change(keys, message):
    with pytest.raises(ConfigError, match=message):
        curve(1, **keys)
