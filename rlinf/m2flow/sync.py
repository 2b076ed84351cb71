"""Weights on their way from one group to another: who waits for whom, and which version is sent when."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from rlinf.channel.mailbox import Mailbox
from rlinf.host import this_host
from rlinf.m2flow.plan import Stage
from rlinf.m2flow.timeline import Doing
from rlinf.m2flow.waits import RankId
from rlinf.vps.brief import Heard, Told
from rlinf.worker import Worker

if TYPE_CHECKING:
    from rlinf.m2flow.executor import Wire

logger = logging.getLogger(__name__)


class WeightSync:
    """One rank's end of every sync that its group is a part of.

    A reader says where it is when it is first there, and again after each version that it has taken over. It maps the
    memory of senders on its host; senders on other hosts send it their bytes. What lies where is sent once. A sender's
    publication lies in memory that its readers map, so one may be made only when all of them are done with the one
    whose memory it takes. Where readers are ``k`` versions behind, that needs ``k + 1`` slots: a sender then waits
    only for what readers did in earlier executions.

    Args:
        worker: whose weights they are.
        mailbox: of this rank.
        wire: to the other ranks.
        layout: group -> its stage of the plan.
        spend: records what the time within is spent on.
        slots: publications for one target that may be alive at once.
    """

    def __init__(
        self,
        worker: Worker,
        mailbox: Mailbox,
        wire: Wire,
        layout: Mapping[str, Stage],
        spend: Callable[..., AbstractContextManager[None]],
        slots: int = 1,
    ) -> None:
        self.worker, self.mailbox, self.wire, self.layout = worker, mailbox, wire, layout
        self.spend, self.slots = spend, slots
        self._version: dict[tuple[str, str], int] = {}  # (source, target) -> the last that was sent or taken over
        self._count: dict[tuple[str, str], int] = {}  # (source, target) -> how many have been sent or taken over
        self._ways: dict[str, tuple[list[int], list[int]]] = {}  # target -> its ranks on this host, and on others
        self._told, self._heard = Told(), Heard()

    def send(self, target: str, version: int) -> None:
        """Publish a version to a group, unless it has it already."""
        ctx = self.worker.ctx
        pair = (ctx.group, target)
        if self._version.get(pair) == version:
            return
        number, readers = self._count.get(pair, 0), self.layout[target].ranks
        freed = max(number + 1 - self.slots, 0)
        if freed or not number:
            told = ("readers", *pair, freed)
            with self._waiting(target, f"{target} to be done with the last weights", told):
                hosts = dict(self.mailbox.stream(told, readers))
            if target not in self._ways:
                self._ways[target] = self._choose(target, hosts)
        here, away = self._ways[target]
        with self.spend(Doing.SYNC, f"send weights to {target}"):
            published = self.worker.publish_weights(target, inline=bool(away), slot=number % self.slots)
            key = ("weights", *pair, version)
            # Readers of this host map the memory; the bytes themselves go to the others alone.
            if here:
                mapped = published.mapped() if away else published
                self._tell(target, key, (ctx.rank, self._told.brief((target, "here"), mapped)), here)
            if away:
                self._tell(target, key, (ctx.rank, self._told.brief((target, "away"), published.carried())), away)
        self._version[pair], self._count[pair] = version, number + 1

    def greet(self, source: str) -> None:
        """Say where this rank is, once, before `receive`."""
        pair = (source, self.worker.ctx.group)
        if pair not in self._count:
            self._count[pair] = 0
            self._tell(source, ("readers", *pair, 0), (self.worker.ctx.rank, this_host()))

    def receive(self, source: str, version: int) -> None:
        """Take a version over, unless it is here already."""
        ctx = self.worker.ctx
        pair = (source, ctx.group)
        if self._version.get(pair, -1) >= version:
            return
        number = self._count[pair]
        ranks = self.layout[source].ranks
        sent = ("weights", *pair, version)
        with self._waiting(source, f"version {version} of the weights of {source}", sent):
            by_rank = dict(self.mailbox.stream(sent, ranks))
        with self.spend(Doing.SYNC, f"receive weights from {source}"):
            whole = [self._heard.whole(f"{source} rank {rank}", by_rank[rank]) for rank in range(ranks)]
            self.worker.receive_weights(version, whole)
        self._version[pair], self._count[pair] = version, number + 1
        self._tell(source, ("readers", *pair, number + 1), (ctx.rank, this_host()))

    def newer(self, source: str) -> None:
        """Take the next version over if it is there already; the rows that are being made go on with it."""
        pair = (source, self.worker.ctx.group)
        version = self._version[pair] + 1
        if self.mailbox.complete(("weights", *pair, version), self.layout[source].ranks):
            self.receive(source, version)

    def _choose(self, target: str, hosts: Mapping[int, str]) -> tuple[list[int], list[int]]:
        """Which way serves each reader: those of this host map memory, the others get bytes."""
        here = sorted(rank for rank, host in hosts.items() if host == this_host())
        away = sorted(set(hosts) - set(here))
        logger.info(
            "weights of %s rank %d: %s ranks %s map its memory, ranks %s are on other hosts and get its bytes",
            self.worker.ctx.group,
            self.worker.ctx.rank,
            target,
            here,
            away,
        )
        return here, away

    def _waiting(self, group: str, what: str, key: tuple[Any, ...]) -> AbstractContextManager[None]:
        """While every rank of a group closes a key."""

        def lacking() -> list[RankId]:
            return [(group, rank) for rank in self.mailbox.lacking(key, range(self.layout[group].ranks))]

        return self.spend(Doing.WEIGHTS, group, what, on=lacking)

    def _tell(self, group: str, key: tuple[Any, ...], item: Any, ranks: list[int] | None = None) -> None:
        """Send one item to ranks of a group, all by default."""
        ranks = list(range(self.layout[group].ranks)) if ranks is None else ranks
        self.wire.send(group, ranks, key, self.worker.ctx.rank, item)
        self.wire.close(group, ranks, key, self.worker.ctx.rank, 1)
