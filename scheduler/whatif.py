"""A profile of what was not measured, from one of what was: another batch, other lengths, slower stages, less memory.

Pure. Times of other batches follow from the curves of the cost model; here only what was measured changes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from rlinf.errors import ConfigError
from rlinf.m2flow.graph import TRAIN, Graph
from rlinf.scheduler.curve import Curve
from rlinf.scheduler.profile import Kind, Point, Profile, StageProfile, Tail
from rlinf.scheduler.stage_time import stage_time


def change(
    profile: Profile,
    graph: Graph,
    rows: int | None = None,
    lengths: float = 1.0,
    slow: Mapping[str, float] | None = None,
    memory: int | None = None,
) -> Profile:
    """A profile for another workload or other devices.

    Args:
        profile: as it was measured.
        graph: the workflow.
        rows: that each source makes in an iteration; ``None``: as many as were measured.
        lengths: times as long as they were, the sequences that are generated. Stages that generate take as many steps
            and tokens more; of the stages that work on these rows what grows with the rows grows likewise.
        slow: stage -> times as long as it takes.
        memory: bytes of a device of every kind; ``None``: as it was.

    Raises:
        ConfigError: a stage that the profile does not have, or a number that makes no sense.
    """
    slow = slow or {}
    if strange := sorted(set(slow) - set(profile.stages)):
        raise ConfigError(f"there is no stage {strange[0]!r} in the profile; it has {', '.join(profile.stages)}")
    for what, value in (("rows", rows), ("lengths", lengths), ("memory", memory), *slow.items()):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ConfigError(f"what if {what} were {value!r}: expected a number above 0")
    behind = _behind(profile, graph) if lengths != 1 else ()
    samples = {node.name: node.samples or 1 for node in graph.phase(TRAIN)}
    return profile.model_copy(
        update={
            "rows": {name: rows or count for name, count in profile.rows.items()},
            "stages": {
                name: _slower(_longer(name, stage, lengths, behind, samples.get(name, 1)), slow.get(name, 1.0))
                for name, stage in profile.stages.items()
            },
            "kinds": {name: Kind(memory=memory or kind.memory) for name, kind in profile.kinds.items()},
        }
    )


def _behind(profile: Profile, graph: Graph) -> set[str]:
    """Stages that work on the rows of one that generates."""
    made = {node.index for node in graph.phase(TRAIN) if node.name in profile.stages and profile.stages[node.name].tail}
    return {node.name for node in graph.phase(TRAIN) if made & graph.ancestors(node.index)}


def _longer(name: str, stage: StageProfile, factor: float, behind: Collection[str], samples: int) -> StageProfile:
    if stage.tail is not None and factor != 1:
        tail = Tail(lengths=tuple(factor * length for length in stage.tail.lengths), slots=stage.tail.slots)
        return stage.model_copy(
            update={
                "points": tuple(_generated(name, stage, point, tail, samples) for point in stage.points),
                "row_bytes": factor * stage.row_bytes,
                "tail": tail,
            }
        )
    if name in behind:
        return stage.model_copy(
            update={
                "points": tuple(_worked(stage, point, factor) for point in stage.points),
                "row_bytes": factor * stage.row_bytes,
            }
        )
    return stage


def _generated(name: str, stage: StageProfile, point: Point, tail: Tail, samples: int) -> Point:
    """A call of as many sequences of other lengths: as much longer as the pace of its layout says."""
    time = stage_time(name, stage, point.kind, point.dp, point.tp, samples)
    assert time.pace is not None
    assert stage.tail is not None
    sequences = point.rows * samples
    ratio = time.pace.seconds(tail, sequences) / time.pace.seconds(stage.tail, sequences)
    growth = max(tail.lengths[-1] / stage.tail.lengths[-1], 0.0)
    return point.model_copy(
        update={
            "seconds": point.seconds * ratio,
            "spread": point.spread * ratio,
            "transient": round(point.transient * growth),
        }
    )


def _worked(stage: StageProfile, point: Point, factor: float) -> Point:
    """A call on longer rows: its fixed part stays."""
    alike = [
        p for p in stage.points if (p.kind, p.dp, p.tp, p.beside) == (point.kind, point.dp, point.tp, point.beside)
    ]
    fixed = min(Curve.through([(p.rows, p.seconds) for p in alike]).fixed, point.seconds)
    seconds = fixed + factor * (point.seconds - fixed) or point.seconds
    return point.model_copy(update={"seconds": seconds, "transient": round(point.transient * factor)})


def _slower(stage: StageProfile, factor: float) -> StageProfile:
    if factor == 1:
        return stage
    points = (
        point.model_copy(update={"seconds": point.seconds * factor, "spread": point.spread * factor})
        for point in stage.points
    )
    return stage.model_copy(update={"points": tuple(points)})
