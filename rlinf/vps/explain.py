"""What a relayout costs, in words and numbers: bytes that stay, go within a host, and go between hosts."""

from __future__ import annotations

import numpy as np

from rlinf.vps.layout import Ints
from rlinf.vps.schedule import Schedule

SHOWN = 16  # ranks with a line of their own


def explain(made: Schedule) -> str:
    """Lines of text: the totals, the certificate, and a table by rank."""
    world, hosts = made.plan.world, made.plan.hosts
    traffic = made.plan.traffic()
    stays = traffic.src == traffic.dst
    near = (hosts[traffic.src] == hosts[traffic.dst]) & ~stays
    far = ~stays & ~near
    promise = made.certificate

    def total(rows: np.ndarray) -> str:
        return nbytes(int(traffic.nbytes[rows].sum()))

    def by_rank(ranks: np.ndarray, rows: np.ndarray) -> Ints:
        return np.bincount(ranks[rows], traffic.nbytes[rows], world).astype(np.int64)

    rounds = [int(table.round.max(initial=-1)) + 1 for table in made.waves]
    lines = [
        f"relayout over {world} ranks on {len(np.unique(hosts))} hosts: "
        f"{total(stays)} stay, {total(near)} go within a host, {total(far)} between hosts",
        f"{sum(rounds)} rounds in {len(rounds)} wave(s), messages of at most {nbytes(made.chunk_bytes)}"
        f"{'; old state is freed as it goes: no way back' if made.low_memory else ''}",
        f"certificate: peak {nbytes(int(promise.peak_bytes.max(initial=0)))} (rank "
        f"{int(promise.peak_bytes.argmax())}), {promise.makespan:.3g} s, lower bound {promise.bound:.3g} s "
        f"(ratio {promise.ratio:.3f})",
        f"{'rank':>6} {'stays':>10} {'in host':>10} {'sent':>10} {'received':>10} {'peak':>10}",
    ]
    columns = (
        by_rank(traffic.dst, stays),
        by_rank(traffic.dst, near),
        by_rank(traffic.src, ~stays),
        by_rank(traffic.dst, ~stays),
        promise.peak_bytes,
    )
    for rank in range(min(world, SHOWN)):
        lines.append(f"{rank:>6} " + " ".join(f"{nbytes(int(column[rank])):>10}" for column in columns))
    if world > SHOWN:
        lines.append(f"  ... and {world - SHOWN} more ranks")
    return "\n".join(lines)


def nbytes(count: int) -> str:
    """``1.5 GiB``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
