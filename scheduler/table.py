"""A profile as a table, for people. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rlinf.scheduler.profile import Profile


def profile_lines(profile: Profile) -> Iterator[str]:
    """What each stage takes, what groups hold, and what goes between them."""
    identity = profile.identity
    yield f"PROFILE of {identity.workflow}, model {identity.model or 'not told'}"
    yield f"  {profile.note}" if profile.note else "  it does not say how it was taken"
    made = ", ".join(f"{rows} of {source}" for source, rows in profile.rows.items())
    yield f"  rows of an iteration: {made}"
    yield ""
    yield "STAGES, a call on each replica"
    rows = []
    for name, stage in profile.stages.items():
        for point in sorted(stage.points, key=lambda point: (point.kind, point.dp, point.tp, point.beside, point.rows)):
            rows.append(
                [
                    name,
                    _layout(point.kind, point.dp, point.tp) + (", others beside" if point.beside else ""),
                    f"{point.rows} row{'s' * (point.rows != 1)}",
                    f"{_seconds(point.seconds)} ± {_seconds(point.spread)}",
                    _size(point.transient) if point.kind else "",
                ]
            )
    yield from _columns(["stage", "on", "rows", "time", "memory in it"], rows)
    tails = [(name, stage.tail) for name, stage in profile.stages.items() if stage.tail]
    for name, tail in tails:
        lengths = [tail.lengths[round(part * (len(tail.lengths) - 1))] for part in (0.5, 0.9, 1.0)]
        p50, p90, most = (f"{length:.0f}" for length in lengths)
        yield f"  {name} makes sequences of p50 {p50}, p90 {p90}, at most {most} tokens, {tail.slots} side by side"
    if profile.groups:
        yield ""
        yield "GROUPS, a device"
        held = [
            [name, _layout(one.kind, one.dp, one.tp), _size(one.resident), _seconds(one.offload), _seconds(one.onload)]
            for name, layouts in profile.groups.items()
            for one in layouts
        ]
        yield from _columns(["group", "on", "holds", "off", "on again"], held)
    if profile.syncs or profile.transfers:
        yield ""
        yield "BETWEEN GROUPS"
    for sync in profile.syncs:
        ranks = f"{sync.source_ranks} rank{'s' * (sync.source_ranks != 1)} to {sync.target_ranks}"
        took = f"sent in {_seconds(sync.send)}, taken over in {_seconds(sync.receive)}"
        yield f"  weights of {sync.source} -> {sync.target}, {ranks}: {took}"
    for name, way in profile.transfers.items():
        speed = f", {1e-9 / way.per_byte:.1f} GB/s" if way.per_byte else ""
        yield f"  rows by {name}: {_seconds(way.fixed)} a message{speed}"


def _layout(kind: str, dp: int, tp: int) -> str:
    return f"{kind}, dp={dp} tp={tp}" if kind else "no device"


def _seconds(value: float) -> str:
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.1f} ms" if value >= 1e-3 else f"{value * 1e6:.0f} us"


def _size(value: int) -> str:
    return f"{value / 2**30:.2f} GiB" if value >= 1 << 28 else f"{value / 2**20:.1f} MiB"


def _columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    for row in [head, *rows]:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
