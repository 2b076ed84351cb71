"""How a rank reaches the others of its run: items by a channel, turns on devices by the run's services.

One channel joins all ranks; a rank reads under a key of its own name, in a thread beside its program, and what comes
waits in its `Mailbox`. `Services` is the one process that all of them know: it hosts the channel's broker, which sees
no item, and keeps the leases.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from rlinf.channel.broker import Broker
from rlinf.channel.mailbox import Mailbox
from rlinf.channel.member import Member
from rlinf.channel.spec import Address, ChannelSpec
from rlinf.m2flow.lease import Ahead, LeaseServer, Ticket

_ITEM, _END = "item", "end"


class Services(LeaseServer):
    """Hosted as a Ray actor that uses no CPU.

    Args:
        tickets: phase -> turns in their order.
        ip: where members of other hosts find the broker; ``127.0.0.1`` where there are none.
    """

    def __init__(self, tickets: Mapping[str, tuple[Ticket, ...]], ip: str) -> None:
        super().__init__(tickets)
        self._broker = Broker(ip)

    def address(self) -> Address:
        """Of the broker."""
        return self._broker.address


class ChannelWire:
    """One rank's ends of the channel.

    Args:
        me: (group, rank).
        mailbox: of this rank.
        everyone: group -> number of its ranks.
        address: of the broker.
        services: handle of the `Services` actor.
        ip: that ranks on other hosts reach this one by; empty: there are none.
    """

    def __init__(
        self,
        me: tuple[str, int],
        mailbox: Mailbox,
        everyone: Mapping[str, int],
        address: Address,
        services: Any,
        ip: str,
    ) -> None:
        names = tuple(_name(group, rank) for group, ranks in everyone.items() for rank in range(ranks))
        self._me, self._mailbox, self._services = me, mailbox, services
        self._member = Member(address, _name(*me), ip=ip)
        spec = ChannelSpec("mail", names, names)
        self._out, self._in = self._member.channel(spec), self._member.channel(spec)
        threading.Thread(target=self._read, name="mail", daemon=True).start()

    def send(self, group: str, ranks: list[int], key: tuple[Any, ...], source: int, item: Any) -> None:
        if away := self._away(group, ranks):
            self._out.put((_ITEM, key, source, item), keys=away)
        if len(away) < len(ranks):
            self._mailbox.put(key, source, item)

    def close(self, group: str, ranks: list[int], key: tuple[Any, ...], source: int, sent: int) -> None:
        if away := self._away(group, ranks):
            self._out.put((_END, key, source, sent), keys=away)
        if len(away) < len(ranks):
            self._mailbox.close(key, source, sent)

    def acquire(self, execution: int, ticket: int) -> None:
        import ray

        ray.get(self._services.acquire.remote(execution, ticket))

    def release(self, execution: int, ticket: int, rank: int) -> None:
        import ray

        ray.get(self._services.release.remote(execution, ticket, rank))

    def blockers(self, execution: int, ticket: int) -> list[Ahead]:
        import ray

        return ray.get(self._services.blockers.remote(execution, ticket))

    def leave(self) -> None:
        """The run ends: what nobody has taken is not needed."""
        self._member.close(linger_s=0)

    def _away(self, group: str, ranks: Sequence[int]) -> list[str]:
        return [_name(group, rank) for rank in ranks if (group, rank) != self._me]

    def _read(self) -> None:
        try:
            for what, key, source, item in self._in.stream(_name(*self._me)):
                if what == _ITEM:
                    self._mailbox.put(key, source, item)
                else:
                    self._mailbox.close(key, source, item)
                del item  # its memory is its sender's
        except Exception as error:  # of the channel, or of an item that cannot be read here
            self._mailbox.fail(error)


def _name(group: str, rank: int) -> str:
    return f"{group}/{rank}"
