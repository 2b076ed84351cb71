"""Rounds: who exchanges with whom, when. Pure, and the same on every rank, for all ranks compute them from one table.

In a round a rank sends to at most one other and receives from at most one other, and goes on when both are done. Long
exchanges must therefore meet long ones. Two constructions are tried, and the one that ends first is taken: shifts
(round ``k``: to the rank that is ``k`` further), which cost next to nothing and fit what is spread evenly over all
pairs; and matchings, busiest ranks first, which fit anything, but cost pairs times rounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from rlinf.vps.layout import Ints
from rlinf.vps.plan import Plan, Traffic

FEW, MANY = 256, 384  # messages of the busiest rank, by how many it speaks with: long ones can then meet long ones
GOOD = 1.02  # times the bound: no other construction is tried
MOST_WORK = 5 * 10**8  # pairs times rounds: some seconds. Traffic of more is between all pairs, and shifts fit it
GRAINS = 64  # differences in load of less than a part of these are none

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Links:
    """Bytes a second that a rank can send, and receive at the same time: within a host, and to another."""

    in_host: float = 50e9
    cross_host: float = 50e9


@dataclass(frozen=True)
class Rounds:
    """Exchanges of one wave, columnar, by round; int32 ``[q]`` but for ``nbytes``, int64.

    Attributes:
        round: its number; in a round a rank sends once and receives once at most.
        src, dst: who to whom.
        chunk: which part of what the pair exchanges, from 0.
        chunks: how many parts the pair exchanges.
        nbytes: about how large it is (parts are as even as their boxes allow).
    """

    round: NDArray[np.int32]
    src: NDArray[np.int32]
    dst: NDArray[np.int32]
    chunk: NDArray[np.int32]
    chunks: NDArray[np.int32]
    nbytes: Ints

    def __len__(self) -> int:
        return len(self.round)

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_]) -> Rounds:
        return Rounds(*(getattr(self, column.name)[rows] for column in fields(self)))

    def each(self) -> Iterator[slice]:
        """The rows of each round."""
        begins = np.flatnonzero(np.diff(self.round, prepend=-1))
        return (slice(low, high) for low, high in pairwise([*begins.tolist(), len(self)]))


@dataclass(frozen=True)
class Speed:
    """How long exchanges take."""

    plan: Plan
    links: Links

    def seconds(self, src: NDArray[np.int32], dst: NDArray[np.int32], nbytes: Ints) -> Floats:
        hosts = self.plan.hosts
        return nbytes / np.where(hosts[src] == hosts[dst], self.links.in_host, self.links.cross_host)

    def bound(self, traffic: Traffic) -> float:
        """Seconds of the busiest rank's sends, or receives."""
        took = self.seconds(traffic.src, traffic.dst, traffic.nbytes)
        return float(max((np.bincount(at, took).max(initial=0.0) for at in (traffic.src, traffic.dst)), default=0.0))


def rounds(traffic: Traffic, speed: Speed, limit: int) -> Rounds:
    """Put what pairs exchange in rounds.

    Args:
        traffic: between different ranks.
        limit: bytes of an exchange on average, at most.
    """
    if not len(traffic.src):
        return _table(traffic, np.empty(0, np.int64), np.empty((0, 3), np.int64))
    world, bound = speed.plan.world, speed.bound(traffic)
    chunks = -(-traffic.nbytes // max(1, limit))
    found = _table(traffic, chunks, _shifts(traffic, chunks, world))
    ends = makespan([found], speed, world)
    if ends > GOOD * bound:
        peers = max(int(np.bincount(at).max()) for at in (traffic.src, traffic.dst))
        parts = min(MANY, max(FEW, 2 * peers))
        chunks = -(-traffic.nbytes // max(1, min(limit, busiest(traffic) // parts + 1)))
        degree = max(int(np.bincount(at, chunks).max()) for at in (traffic.src, traffic.dst))
        if degree * len(chunks) <= MOST_WORK:
            other = _table(traffic, chunks, _matchings(traffic, speed, chunks))
            found = other if makespan([other], speed, world) < ends else found
    return found


def busiest(traffic: Traffic) -> int:
    """Bytes that the busiest rank sends, or receives."""
    return max(int(np.bincount(at, traffic.nbytes).max(initial=0)) for at in (traffic.src, traffic.dst))


def makespan(waves: Sequence[Rounds], speed: Speed, world: int) -> float:
    """Seconds. An exchange begins when both of its ranks are through with all of their earlier rounds."""
    free = np.zeros(world)
    for table in waves:
        took = speed.seconds(table.src, table.dst, table.nbytes)
        for rows in table.each():
            src, dst = table.src[rows], table.dst[rows]
            end = np.maximum(free[src], free[dst]) + took[rows]
            free[src] = np.maximum(free[src], end)
            np.maximum.at(free, dst, end)
    return float(free.max(initial=0.0))


def _table(traffic: Traffic, chunks: Ints, rows: Ints) -> Rounds:
    """From rows (round, pair, chunk), by round."""
    number, pair, part = rows.T
    nbytes = traffic.nbytes[pair] * (part + 1) // chunks[pair] - traffic.nbytes[pair] * part // chunks[pair]
    number, part, of = (column.astype(np.int32) for column in (number, part, chunks[pair]))
    return Rounds(number, traffic.src[pair], traffic.dst[pair], part, of, nbytes)


def _shifts(traffic: Traffic, chunks: Ints, world: int) -> Ints:
    """Rows (round, pair, chunk): all pairs of one distance at once, and all distances again for each further chunk."""
    pair = np.repeat(np.arange(len(chunks)), chunks)
    part = np.arange(len(pair)) - np.repeat(np.cumsum(chunks) - chunks, chunks)
    shift = (traffic.dst[pair].astype(np.int64) - traffic.src[pair]) % world
    turn = part * int(chunks.max()) // chunks[pair]  # few chunks are spread over the turns of many
    order = np.lexsort((pair, shift, turn))
    number = np.unique((turn * world + shift)[order], return_inverse=True)[1].reshape(-1)
    return np.stack([number, pair[order], part[order]], 1)


def _matchings(traffic: Traffic, speed: Speed, chunks: Ints) -> Ints:
    """Rows (round, pair, chunk): a matching in each round, until nothing is left."""
    pending = _Pending(traffic, speed, chunks)
    table: list[Ints] = []
    while len(pending.rows):
        row, column = pending.matching()
        pair = pending.pair[row, column]
        table.append(np.stack([np.full(len(pair), len(table)), pair, chunks[pair] - pending.left[row, column]], 1))
        pending.done(row, column)
    return np.concatenate(table)


class _Pending:
    """What is left to exchange: a row for each source, a column for each of its destinations, nearest shift first.

    Attributes:
        rows: sources that have something left.
        pair: ``[world, K]``, index of the pair; left: of its chunks.
    """

    def __init__(self, traffic: Traffic, speed: Speed, chunks: Ints) -> None:
        world = speed.plan.world
        took = speed.seconds(traffic.src, traffic.dst, traffic.nbytes)
        count = np.bincount(traffic.src, minlength=world)
        order = np.lexsort(((traffic.dst.astype(np.int64) - traffic.src) % world, traffic.src))
        at = traffic.src[order], np.arange(len(order)) - np.repeat(np.cumsum(count) - count, count)

        def table(values: NDArray, filler: float) -> NDArray:
            made = np.full((world, int(count.max())), filler, values.dtype)
            made[at] = values[order]
            return made

        self.world = world
        self.count = count
        self.rows = np.flatnonzero(count)
        self.pair = table(np.arange(len(order)), 0)
        self.left = table(chunks, 0)
        self.dst = table(traffic.dst.astype(np.int64), world)
        self.each = table(took / chunks, 0.0)
        self.time = table(took, -np.inf)  # of all that is left of a pair
        # Lengths of exchanges in steps of the root of 2. (`frexp` is exact, so it is the same on every machine.)
        mantissa, exponent = np.frexp(took / chunks)
        step = 2 * exponent.astype(np.int64) + (mantissa >= 0.5**0.5)
        self.length = table(step - step.min(), 0)
        self.out = np.bincount(traffic.src, took, world)
        self.into = np.append(np.bincount(traffic.dst, took, world), -np.inf)
        most = max(float(self.out.max()), float(self.into.max()))
        self.grain = most / GRAINS
        self.prefer = 4 * most  # above any difference in load

    def matching(self) -> tuple[Ints, Ints]:
        """(rows, columns) of a round: no source and no destination is in it twice, and none fits beside it.

        Pairs come first whose ranks, and who themselves, have most left to do: who must get much from one other may
        not leave that to the end, when another wants the same one. Of all pairs only those take part whose exchanges
        are no longer than that of the busiest pair, and those of about its length before shorter ones. Loads that
        are nearly the same count as the same; then the shorter shift goes first, so that sources do not all choose
        one destination.
        """
        rows, dst = self.rows, self.dst[self.rows]
        want = np.floor(self.time[rows] / self.grain) * self.grain
        want += (np.floor(self.into / self.grain) * self.grain)[dst]
        busiest = int(np.argmax(self.out[rows] + want.max(axis=1)))
        length = int(self.length[rows[busiest], np.argmax(want[busiest])])
        bonus = np.zeros(int(self.length.max()) + 1)
        bonus[length + 1 :] = -np.inf
        bonus[max(0, length - 1) : length + 1] = self.prefer
        want += bonus[self.length[rows]]

        taken = np.zeros(self.world + 1)
        open_, offers = np.arange(len(rows)), want
        found: list[tuple[Ints, Ints]] = []
        while len(open_):
            column = np.argmax(offers, axis=1)
            value = offers[np.arange(len(open_)), column]
            some = value > -np.inf
            open_, column, value = open_[some], column[some], value[some]
            order = np.argsort(-(self.out[rows[open_]] + value), kind="stable")
            first = order[np.unique(dst[open_[order], column[order]], return_index=True)[1]]  # best of each destination
            found.append((rows[open_[first]], column[first]))
            taken[dst[open_[first], column[first]]] = -np.inf
            open_ = np.delete(open_, first)
            offers = want[open_] + taken[dst[open_]]
        return np.concatenate([row for row, _ in found]), np.concatenate([column for _, column in found])

    def done(self, row: Ints, column: Ints) -> None:
        """One chunk of these pairs was exchanged."""
        each = self.each[row, column]
        self.out[row] -= each
        self.into[self.dst[row, column]] -= each
        self.left[row, column] -= 1
        left = self.left[row, column]
        self.time[row, column] = np.where(left > 0, left * each, -np.inf)
        self.count[row] -= left == 0
        self.rows = self.rows[self.count[self.rows] > 0]
