"""Frontiers of what can be had of sets of parts: the arrays behind `rlinf.scheduler.planner`. Pure.

A *label* is one tree over a set of parts, as a row of numbers. Labels of all sets lie in one table, each with the two
labels that it is made of. A set's labels are made of all pairs of labels of the sets that its cuts part it into, at
once, and those that another one beats in every respect are dropped.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from rlinf.scheduler.problem import Problem

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LEAF, SHARED, SWAPPED, PIPED = range(4)  # what a label's root is; swapped: shared, and all below leaves its devices
STREAM, REST, BUSY, SWAPS, PIPES, FORM, FIXED = range(7)  # columns; then devices, held and peak of each kind
NONE, APART, BELOW = 0.0, 1.0, 2.0  # form: no groups with devices are piped; they are at the root; they are below it
_EQUAL = 1e-11  # of the largest value of a column: differences below are those of the order of additions


class Search:
    """All that can be had, for one granularity.

    Args:
        problem: a sane one.
        size: granularity.
        pieces: that an iteration has in it.
        family: of the plans that count; ``None``: all.
        by: what is best: ``time``, ``memory`` or ``devices``.
        bound: seconds beyond which nothing is of interest; ``None``: none.

    Attributes:
        op, left, right, part, option: of each label: its root, the labels below it, or the part and its option.
    """

    def __init__(
        self, problem: Problem, size: int, pieces: int, family: str | None, by: str, bound: float | None
    ) -> None:
        self.problem, self.size, self.pieces, self.family = problem, size, pieces, family
        self.kinds = sorted(problem.devices)
        count = len(self.kinds)
        self._device, self._held, self._peak = (slice(FIXED + i * count, FIXED + (i + 1) * count) for i in range(3))
        self.width = FIXED + 3 * count
        self.limit = np.asarray([float(len(problem.devices[kind])) for kind in self.kinds])
        sizes = [problem.capacity.get(kind) for kind in self.kinds]
        self.capacity = np.asarray([np.inf if size is None else float(size) for size in sizes])
        self.by = by
        self.tight = by == "memory" or bool((self._all() > self.capacity).any())
        self.table = np.empty((0, self.width))
        self.op: list[int] = []
        self.left: list[int] = []
        self.right: list[int] = []
        self.part: list[int] = []
        self.option: list[int] = []
        self.rest_matters = any(option.rest or option.swap for part in problem.parts for option in part.options)
        self.reads, self.rests = self._links()
        self.on_devices = sum(1 << i for i, part in enumerate(problem.parts) if any(o.kind for o in part.options))
        self.bound = self._bound(bound)
        self.found: dict[tuple[int, bool], Ints] = {}
        whole = (1 << len(problem.parts)) - 1
        self.cuts = self._all_cuts(whole)
        for some in sorted(self.cuts, key=int.bit_count):
            self._fill(some, whole)
        self.whole = self.found[whole, False]

    # Results

    def best(self) -> int | None:
        """The best label; ``None``: there is none."""
        labels = self.whole
        if self.family is not None and len(labels):
            wanted = {"collocated": NONE, "disaggregated": APART, "hybrid": BELOW}[self.family]
            labels = labels[self.table[labels, FORM] == wanted]
        if not len(labels):
            return None
        rows = self.table[labels]
        seconds = np.asarray([float(f"{x:.11e}") for x in self._seconds(rows)])
        devices = rows[:, self._device].sum(axis=1)
        memory = rows[:, self._peak].max(axis=1, initial=0.0)
        simple = [rows[:, SWAPS], rows[:, PIPES]]
        keys = {
            "time": [seconds, devices, *simple, memory],
            "memory": [memory, seconds, devices, *simple],
            "devices": [devices, seconds, *simple, memory],
        }[self.by]
        return int(labels[np.lexsort(keys[::-1])[0]])

    def count(self, label: int, column: int) -> int:
        return int(self.table[label, column])

    def seconds(self, label: int) -> float:
        return float(self._seconds(self.table[label : label + 1])[0])

    def times(self, label: int) -> tuple[float, float]:
        """(stream, rest)."""
        return float(self.table[label, STREAM]), float(self.table[label, REST])

    def devices(self, label: int, kind: str) -> int:
        return int(self.table[label, self._device][self.kinds.index(kind)])

    def memory(self, label: int) -> dict[str, int]:
        """Kind -> bytes of its fullest device, of those that are used."""
        row = self.table[label]
        return {kind: round(row[self._peak][i]) for i, kind in enumerate(self.kinds) if row[self._device][i] > 0}

    # Sets and cuts

    def _links(self) -> tuple[list[int], list[int]]:
        """Of each part, those that it reads, straight or by way of others; and those whose rest is before or behind."""
        place = {part.name: i for i, part in enumerate(self.problem.parts)}
        reads, rests = [0] * len(place), [0] * len(place)
        for source, target in self.problem.reads:
            reads[place[target]] |= 1 << place[source]
        for _ in place:
            for i, mine in enumerate(reads):
                for j in _members(mine):
                    reads[i] |= reads[j]
        for source, target in self.problem.rest_reads:
            rests[place[target]] |= 1 << place[source]
            rests[place[source]] |= 1 << place[target]
        return reads, rests

    def _all_cuts(self, whole: int) -> dict[int, list[tuple[int, int]]]:
        """Set -> its cuts (first, second), of all sets that cuts of the whole come to."""
        found: dict[int, list[tuple[int, int]]] = {}
        todo = [whole]
        while todo:
            some = todo.pop()
            if some in found:
                continue
            found[some] = []
            lowest = some & -some
            first = (some - 1) & some
            while first:
                second = some ^ first
                # Of two sides that do not read one another either could be the first one: that with the lowest part.
                if not self._any(self.reads, first, second) and (
                    first & lowest or self._any(self.reads, second, first)
                ):
                    found[some].append((first, second))
                    todo += [first, second]
                first = (first - 1) & some
        return found

    @staticmethod
    def _any(links: list[int], some: int, others: int) -> bool:
        return any(links[i] & others for i in _members(some))

    # Labels

    def _all(self) -> Floats:
        """More than any device could hold of everything."""
        total = np.zeros(len(self.kinds))
        for part in self.problem.parts:
            for i, kind in enumerate(self.kinds):
                total[i] += max((o.resident + o.transient for o in part.options if o.kind == kind), default=0)
        return total

    def _bound(self, bound: float | None) -> float:
        """All in turns is a plan, where memory is no matter, and none that is slower is of interest."""
        found = np.inf if bound is None else bound
        if self.by == "time" and self.family in (None, "collocated") and not self.tight:
            fits = [
                [o for o in part.options if not o.kind or o.devices <= len(self.problem.devices[o.kind])]
                for part in self.problem.parts
            ]
            if all(fits):
                turns = sum(min(o.stream[self.size] + o.rest for o in options) for options in fits)
                found = min(found, turns)
        return float(found * (1 + 1e-9))

    def _seconds(self, rows: Floats) -> Floats:
        alone = rows[:, STREAM] + rows[:, REST]
        k = self.problem.staleness
        return np.maximum(rows[:, BUSY], alone / (k + 1)) if k else alone

    def _leaves(self, index: int, swapped: bool) -> tuple[Floats, list[int]]:
        rows, options = [], []
        for number, option in enumerate(self.problem.parts[index].options):
            row = np.zeros(self.width)
            rest = option.rest + (option.swap if swapped else 0.0)
            stream = option.stream[self.size]
            row[STREAM], row[REST], row[BUSY] = stream, rest, stream + rest
            if option.kind:
                kind = self.kinds.index(option.kind)
                row[self._device.start + kind] = option.devices
                row[self._held.start + kind] = 0.0 if swapped else option.resident
                row[self._peak.start + kind] = option.resident + option.transient
            rows.append(row)
            options.append(number)
        return np.asarray(rows), options

    def _fill(self, some: int, whole: int) -> None:
        """The frontier of a set, as it is and swapped."""
        if not some & (some - 1):
            index = some.bit_length() - 1
            for swapped in (False, True) if self.tight else (False,):
                rows, options = self._leaves(index, swapped)
                kept = self._kept(rows)
                added = self._add(rows[kept], [LEAF] * len(kept), [-1] * len(kept), [-1] * len(kept))
                self.part[added.start :] = [index] * len(kept)
                self.option[added.start :] = [options[i] for i in kept]
                self.found[some, swapped] = np.arange(added.start, added.stop)
            return
        a, b, flags = self._pairs(some, False)
        made = [(SHARED, self._shared(a, b, flags), a, b), (PIPED, self._piped(a, b, flags), a, b)]
        if self.tight:
            a, b, flags = self._pairs(some, True)
            shared = self._shared(a, b, flags)
            self.found[some, True] = self._keep([(SHARED, shared, a, b), (PIPED, self._piped(a, b, flags), a, b)])
            if (some & self.on_devices).bit_count() > 1:
                away = shared.copy()
                away[:, SWAPS] += 1
                made.append((SWAPPED, away, a, b))
        self.found[some, False] = self._keep(made)

    def _pairs(self, some: int, swapped: bool) -> tuple[Ints, Ints, Floats]:
        """All pairs of labels of all cuts; and of each pair: it is a pipe, rests add, both sides have devices."""
        firsts, seconds, flags = [], [], []
        for first, second in self.cuts[some]:
            x, y = self.found[first, swapped], self.found[second, swapped]
            firsts.append(np.repeat(x, len(y)))
            seconds.append(np.tile(y, len(x)))
            flag = (
                float(self._any(self.reads, second, first)),
                float(self._any(self.rests, second, first)),
                float(bool(first & self.on_devices) and bool(second & self.on_devices)),
            )
            flags.append(np.broadcast_to(flag, (len(x) * len(y), 3)))
        return np.concatenate(firsts), np.concatenate(seconds), np.concatenate(flags)

    def _joined(self, a: Ints, b: Ints, flags: Floats) -> tuple[Floats, Floats, Floats]:
        x, y = self.table[a], self.table[b]
        made = x + y
        both = flags[:, 2] > 0
        below = np.where(x[:, FORM] > y[:, FORM], x[:, FORM], y[:, FORM])
        made[:, FORM] = np.where(both, np.where(below > 0, BELOW, NONE), below)
        return x, y, made

    def _shared(self, a: Ints, b: Ints, flags: Floats) -> Floats:
        x, y, made = self._joined(a, b, flags)
        device, held, peak = self._device, self._held, self._peak
        made[:, device] = np.maximum(x[:, device], y[:, device])
        made[:, peak] = np.maximum(x[:, peak] + y[:, held], y[:, peak] + x[:, held])
        return made

    def _piped(self, a: Ints, b: Ints, flags: Floats) -> Floats:
        x, y, made = self._joined(a, b, flags)
        held, peak = self._held, self._peak
        larger, m = np.maximum(x[:, STREAM], y[:, STREAM]), self.pieces
        made[:, STREAM] = np.where(flags[:, 0] > 0, made[:, STREAM] / m + (1 - 1 / m) * larger, larger)
        made[:, REST] = np.where(flags[:, 1] > 0, made[:, REST], np.maximum(x[:, REST], y[:, REST]))
        made[:, BUSY] = np.maximum(x[:, BUSY], y[:, BUSY])
        made[:, held] = np.maximum(x[:, held], y[:, held])
        made[:, peak] = np.maximum(x[:, peak], y[:, peak])
        made[:, PIPES] += 1
        made[:, FORM] = np.where(flags[:, 2] > 0, APART, made[:, FORM])
        return made

    def _keep(self, made: list[tuple[int, Floats, Ints, Ints]]) -> Ints:
        """Add those that nothing beats, of candidates with these roots and what is below them."""
        rows = np.concatenate([candidates for _, candidates, _, _ in made])
        op = np.repeat([op for op, _, _, _ in made], [len(candidates) for _, candidates, _, _ in made])
        left, right = (np.concatenate([one[side] for one in made]) for side in (2, 3))
        kept = self._kept(rows)
        added = self._add(rows[kept], op[kept].tolist(), left[kept].tolist(), right[kept].tolist())
        return np.arange(added.start, added.stop)

    def _add(self, rows: Floats, op: list[int], left: list[int], right: list[int]) -> slice:
        start = len(self.table)
        self.table = np.concatenate([self.table, rows])
        self.op += op
        self.left += left
        self.right += right
        self.part += [-1] * len(rows)
        self.option += [-1] * len(rows)
        return slice(start, len(self.table))

    def _kept(self, rows: Floats) -> Ints:
        """Which rows are feasible, quick enough, and not beaten in every respect."""
        good = (rows[:, self._device] <= self.limit).all(axis=1) & (self._seconds(rows) <= self.bound)
        if self.tight:
            good &= (rows[:, self._peak] <= self.capacity).all(axis=1)
        if self.family == "collocated":
            good &= rows[:, FORM] == NONE
        left = np.flatnonzero(good)
        columns = [STREAM, *([REST] if self.rest_matters else []), *([BUSY] if self.problem.staleness else [])]
        columns += range(self._device.start, self._device.stop)
        if self.tight:
            columns += [SWAPS, *range(self._held.start, self._peak.stop)]
        values = rows[left][:, columns]
        forms = rows[left, FORM] if self.family in ("disaggregated", "hybrid") else None
        return left[undominated(values, forms)]


def undominated(values: Floats, alike: Floats | None = None) -> Ints:
    """Rows that no other one is below or equal to in every column; of equal ones the first. In ascending order.

    Args:
        values: ``[n, columns]``.
        alike: ``[n]``; only rows in which it is the same are compared.
    """
    if not len(values):
        return np.zeros(0, dtype=np.int64)
    slack = _EQUAL * np.abs(values).max(axis=0)
    scale = np.where(slack > 0, slack / _EQUAL, 1.0)
    order = np.argsort((values / scale).sum(axis=1), kind="stable")
    kept = []
    values, labels = values[order], order
    alike = alike[order] if alike is not None else None
    while len(labels):
        kept.append(labels[0])
        worse = (values >= values[0] - slack).all(axis=1)
        if alike is not None:
            worse &= alike == alike[0]
        worse[0] = True
        values, labels = values[~worse], labels[~worse]
        alike = alike[~worse] if alike is not None else None
    return np.sort(np.asarray(kept, dtype=np.int64))


def _members(some: int) -> Iterator[int]:
    while some:
        lowest = some & -some
        yield lowest.bit_length() - 1
        some ^= lowest
