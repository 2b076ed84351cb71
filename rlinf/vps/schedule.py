"""The schedule: when each pair of ranks exchanges what, in numbered rounds, under a cap on memory. Pure.

Every rank computes the same rounds from the traffic between all ranks, and takes its own part out. In a round a rank
sends to at most one other and receives from at most one other, and an exchange waits for earlier rounds alone: no wait
can close a circle. Where memory is short the state goes in waves, and the old of a wave is freed before the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlinf.vps.layout import Ints, bytes_in_boxes, elements
from rlinf.vps.plan import Moves, Plan, Wave
from rlinf.vps.rounds import Links, Rounds, Speed, busiest, makespan, rounds
from rlinf.vps.space import LayoutError

CHUNK_BYTES = 256 * 2**20  # of one exchange, where memory allows
LEAST_CHUNK = 64 * 2**10
MOST_ROUNDS = 4096  # of the busiest rank: a cap on memory may not ask for smaller messages than these need
MOST_WAVES = 64
SPLIT = 4  # a box is cut into parts of at most a message over this, so that messages can be even


@dataclass(frozen=True)
class Certificate:
    """What a schedule promises.

    Attributes:
        peak_bytes: int64 ``[world]``, of each rank: old and new state that are held at once, and staging.
        makespan: seconds until the last exchange ends; a rank goes on when its send and its receive are done.
        bound: seconds that no schedule of this plan can go below: the busiest rank's sends, or receives.
    """

    peak_bytes: Ints
    makespan: float
    bound: float

    @property
    def ratio(self) -> float:
        """Makespan over its lower bound; 1 where nothing moves."""
        return self.makespan / self.bound if self.bound else 1.0


@dataclass(frozen=True)
class Exchange:
    """One step of a rank: what it sends in this round, and what it receives.

    Attributes:
        round: within the wave.
        to, source: the peers; ``None``: nothing in that direction.
        sends, receives: the boxes, in the order in which they lie in the message.
    """

    round: int
    to: int | None
    sends: Moves | None
    source: int | None
    receives: Moves | None


@dataclass(frozen=True)
class Schedule:
    """Make it with `schedule`.

    Attributes:
        waves: the exchanges of each wave.
        chunk_bytes: no message is larger.
        low_memory: old state is freed wave by wave, so there is no way back.
    """

    plan: Plan
    waves: tuple[Rounds, ...]
    chunk_bytes: int
    low_memory: bool
    certificate: Certificate

    def wave(self, number: int) -> Wave:
        return number, len(self.waves)

    def exchanges(self, rank: int, wave: int = 0) -> Iterator[Exchange]:
        """What a rank does in a wave, round by round."""
        table = self.waves[wave]
        part = self.plan.part(rank, self.wave(wave))
        out, into = table.take(table.src == rank), table.take(table.dst == rank)
        sends = self._messages(part.sends, part.sends.dst, out, out.dst)
        receives = self._messages(part.receives, part.receives.src, into, into.src)
        for number in sorted(sends.keys() | receives.keys()):
            to, given = sends.get(number, (None, None))
            source, taken = receives.get(number, (None, None))
            yield Exchange(number, to, given, source, taken)

    def _messages(
        self, moves: Moves, peer: NDArray[np.int32], table: Rounds, peers: NDArray[np.int32]
    ) -> dict[int, tuple[int, Moves]]:
        """Round -> (peer, boxes). Boxes are cut and dealt into chunks alike on both sides of a pair."""
        found: dict[int, tuple[int, Moves]] = {}
        for other in np.unique(peers).tolist():
            rows = np.flatnonzero(peers == other)
            rows = rows[np.argsort(table.chunk[rows])]
            mine = moves.take(np.flatnonzero(peer == other))
            if len(rows) > 1:
                mine, _ = split(mine, max(1, int(mine.nbytes.sum()) // len(rows) // SPLIT))
            ends = np.cumsum(mine.nbytes)
            middle = ends - mine.nbytes / 2
            edges = np.searchsorted(middle, ends[-1] * np.arange(1, len(rows)) / len(rows))
            for row, low, high in zip(rows.tolist(), [0, *edges], [*edges, len(mine)], strict=True):
                found[int(table.round[row])] = other, mine.take(slice(int(low), int(high)))
        return found


def schedule(
    plan: Plan,
    links: Links | None = None,
    *,
    memory_cap: int | None = None,
    low_memory: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
) -> Schedule:
    """Put a plan's moves in rounds.

    Args:
        links: of the machines; shapes the order, and the certificate's times.
        memory_cap: bytes that a rank may hold at once: old state, new state, and staging of messages.
        low_memory: free old state as soon as it has been sent, in as many waves as the cap asks for.
        chunk_bytes: of the largest message.

    Raises:
        LayoutError: the cap cannot be met; names the smallest that can, and the rank that needs it.
    """
    links = links or Links()
    count, speed = 1, Speed(plan, links)
    everything = plan.traffic().between()
    least_chunk = max(LEAST_CHUNK, busiest(everything) // MOST_ROUNDS)
    best = peak = _peak(plan, count)
    if low_memory:
        while count < MOST_WAVES and (memory_cap is None or int(peak.max()) + 2 * least_chunk > memory_cap):
            count *= 2
            peak = _peak(plan, count)
            best = min(best, peak, key=lambda bytes_: int(bytes_.max()))  # more waves do not always need less
    if memory_cap is not None:
        room = (memory_cap - int(peak.max())) // 2
        if room < least_chunk:
            rank = int(best.argmax())
            least = int(best.max()) + 2 * least_chunk
            other = " (low_memory=True needs less, and has no way back)" if not low_memory else ""
            raise LayoutError(
                f"memory_cap={memory_cap} is too small: rank {rank} must hold {int(best[rank])} bytes of old and new "
                f"state at once, and two messages; the smallest cap that can be met is {least}{other}"
            )
        chunk_bytes = min(chunk_bytes, room)
    waves = []
    for number in range(count):
        traffic = everything if count == 1 else plan.traffic((number, count)).between()
        waves.append(rounds(traffic, speed, _nominal(chunk_bytes)))
    ends, bound = makespan(waves, speed, plan.world), speed.bound(everything)
    certificate = Certificate(peak + 2 * chunk_bytes, ends, bound)
    return Schedule(plan, tuple(waves), chunk_bytes, low_memory, certificate)


def split(moves: Moves, limit: int) -> tuple[Moves, Ints]:
    """Cut boxes that are larger than ``limit`` bytes, along their first dimensions. (boxes, the move of each).

    Order is kept; a single element is never cut.
    """
    origin = np.arange(len(moves))
    for dim in range(moves.start.shape[1]):
        inner = moves.size[:, dim + 1 :].prod(axis=1) * moves.width
        rows = np.maximum(1, limit // inner)
        parts = np.where(moves.nbytes > limit, -(-moves.size[:, dim] // rows), 1)
        if (parts == 1).all():
            continue
        each = np.repeat(np.arange(len(moves)), parts)
        nth = np.arange(len(each)) - np.repeat(np.cumsum(parts) - parts, parts)
        # As even as whole rows allow.
        low, high = moves.size[each, dim] * nth // parts[each], moves.size[each, dim] * (nth + 1) // parts[each]
        cut = moves.take(each)
        start, size = cut.start.copy(), cut.size.copy()
        start[:, dim] += low
        size[:, dim] = high - low
        moves = Moves(cut.src, cut.dst, cut.tensor, cut.kind, start, size, cut.width)
        origin = origin[each]
    return moves, origin


def _nominal(chunk_bytes: int) -> int:
    """Mean size of messages of which none is larger than ``chunk_bytes``: boxes cannot be dealt exactly."""
    return max(1, chunk_bytes * SPLIT // (SPLIT + 1))


def _peak(plan: Plan, waves: int) -> Ints:
    """Bytes of state that each rank holds at most: the new of the waves so far, the old of those from this one on.

    What lies in no box (padding, a further copy of a tied tensor) is held all the time.
    """

    def widened(table: Ints) -> Ints:
        return np.pad(table, [(0, 0)] * (table.ndim - 1) + [(0, plan.world - table.shape[-1])])

    old, new = (widened(elements(layout)) for layout in (plan.src, plan.dst))
    held = widened(plan.src.nbytes) + widened(plan.dst.nbytes - bytes_in_boxes(plan.dst))
    peak = held.copy()
    for number in range(waves):
        begun, freed = np.zeros(len(new), np.int64), np.zeros(len(old), np.int64)
        for flow in plan.flows:
            low, high = flow.wave((number, waves))
            begun[flow.patterns[1]] += (high - low) * flow.widths[1]
            freed[flow.patterns[0]] += (high - low) * flow.widths[0]
        held = held + begun @ new
        peak = np.maximum(peak, held)
        held = held - freed @ old
    return peak
