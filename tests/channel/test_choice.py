"""Which way a pair of members takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlinf.channel.choice import choose, explain
from rlinf.channel.errors import ChannelError
from rlinf.channel.spec import Place

HERE = Place("host a", "host a/ns/12/99", ip="10.0.0.1")
BESIDE = replace(HERE, process="host a/ns/13/99")
AWAY = Place("host b", "host b/ns/12/99", ip="10.0.0.2")
HIDDEN = replace(AWAY, ip="")
GPU, GPU_BESIDE, GPU_AWAY = (replace(place, device="cuda") for place in (HERE, BESIDE, AWAY))


@pytest.mark.parametrize(
    ("source", "target", "host", "device"),
    [
        (HERE, HERE, "inprocess", ""),
        (HERE, BESIDE, "shared", ""),
        (HERE, AWAY, "tcp", ""),
        (replace(HERE, ray="r"), replace(HIDDEN, ray="r"), "ray_store", ""),
        (GPU, GPU, "inprocess", "inprocess"),
        (GPU, GPU_BESIDE, "shared", "cuda_ipc"),
        (GPU, GPU_AWAY, "tcp", "nccl"),
        (GPU, BESIDE, "shared", "staged"),
        (HERE, GPU_BESIDE, "shared", ""),
        (replace(GPU, ray="r"), replace(HIDDEN, ray="r", device="cuda"), "ray_store", "staged"),
    ],
)
def test_the_best_that_is_possible_is_taken(source: Place, target: Place, host: str, device: str) -> None:
    ways = choose(source, target)
    assert (ways.host, ways.device) == (host, device)


@pytest.mark.parametrize(
    ("source", "target", "asked", "shown"),
    [
        (HERE, BESIDE, "tcp", "tcp"),
        (HERE, AWAY, "gloo", "gloo"),
        (GPU, GPU_BESIDE, "nccl", "shared, GPU tensors nccl"),
        (GPU, GPU_BESIDE, "tcp", "tcp, GPU tensors cuda_ipc"),
        (HERE, BESIDE, "cuda_ipc", "shared"),  # no tensors on GPUs, so nothing to carry by it
        (GPU, GPU, "tcp", "tcp, GPU tensors staged"),
    ],
)
def test_what_is_asked_for_is_taken_where_it_is_possible(source: Place, target: Place, asked: str, shown: str) -> None:
    assert str(choose(source, target, asked)) == shown


def test_what_is_not_possible_is_refused_with_what_is() -> None:
    with pytest.raises(ChannelError, match=r"'shared' cannot serve cpu .* possible are tcp, gloo"):
        choose(HERE, AWAY, "shared")
    with pytest.raises(ChannelError, match=r"nothing leads from .*ip="):
        choose(HERE, HIDDEN)


def test_explain_counts_pairs_and_names_who_is_missing() -> None:
    text = explain(("p0", "p1"), ("c0", "c1", "c2"), {"p0": HERE, "p1": AWAY, "c0": BESIDE, "c1": HERE})
    assert text.splitlines() == [
        "inprocess: 1 pairs: p0 -> c1",
        "shared: 1 pairs: p0 -> c0",
        "tcp: 2 pairs: p1 -> c0, p1 -> c1",
        "not here yet: c2",
    ]
