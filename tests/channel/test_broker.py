"""The broker's door: members of other hosts, strangers, and messages that are none."""

from __future__ import annotations

import pickle
import socket
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from rlinf.channel.broker import Broker
from rlinf.channel.errors import BrokerDied, ChannelError, EndOfStream, PeerDied
from rlinf.channel.member import Member
from rlinf.channel.spec import ChannelSpec
from rlinf.channel.wire import Frames, frame, prove

pytestmark = pytest.mark.timeout(120)
SPEC = ChannelSpec("c", ("p",), ("c",), transport="tcp")


@pytest.fixture
def broker() -> Iterator[Broker]:
    with Broker() as broker:
        yield broker


def test_members_of_another_host_come_by_tcp(broker: Broker) -> None:
    away = replace(broker.address, host="another host", local="\0no such socket")
    with Member(away, "p", ip="127.0.0.1") as producer, Member(away, "c", ip="127.0.0.1") as consumer:
        end, other = producer.channel(SPEC), consumer.channel(SPEC)
        end.put(torch.arange(5))
        end.close()
        assert other.get(timeout=20).tolist() == [0, 1, 2, 3, 4]
        with pytest.raises(EndOfStream):
            other.get(timeout=20)


def test_a_stranger_who_says_nothing_holds_up_nobody(broker: Broker) -> None:
    with socket.create_connection((broker.address.ip, broker.address.port)), Member(broker.address, "c") as member:
        assert "not here yet: p" in member.channel(SPEC).explain()


def test_who_does_not_know_the_secret_is_refused_on_either_side(broker: Broker) -> None:
    with pytest.raises(ChannelError, match="did not prove that it knows this run's secret"):
        Member(replace(broker.address, secret=b"another run's"), "c")
    with Member(broker.address, "c"):  # and the others go on
        pass


def test_where_no_broker_listens_is_said(broker: Broker) -> None:
    broker.close()
    with pytest.raises(BrokerDied, match=r"the broker at 127.0.0.1:\d+ cannot be reached"):
        Member(broker.address, "c")


def test_a_member_that_sends_nonsense_is_put_out_by_name_and_the_others_go_on(broker: Broker) -> None:
    with Member(broker.address, "c") as member:
        channel = member.channel(replace(SPEC, transport=""))
        bad = Member(broker.address, "p")
        bad.channel(replace(SPEC, transport=""))
        bad.link.send("no such message", "c")
        with pytest.raises(PeerDied, match=r"p sent a wrong message \(ValueError: no message 'no such message'\)"):
            channel.get(timeout=20)
        bad.close(linger_s=0)
        with Member(broker.address, "p") as good:
            good.channel(replace(SPEC, transport="")).put("still here")
            assert channel.get(timeout=20) == "still here"
            channel.done()


class Harmful:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("this ran",)


def test_a_message_cannot_run_code() -> None:
    data = pickle.dumps((Harmful(),))
    with pytest.raises(ChannelError, match="messages are made of plain values"):
        list(Frames().feed(len(data).to_bytes(4, "little") + data))


def test_messages_are_cut_out_of_any_pieces() -> None:
    messages = [("a", 1), ("b", (None, 2.5)), ("c", b"x" * 1000)]
    stream, frames, found = b"".join(frame(message) for message in messages), Frames(), []
    for at in range(0, len(stream), 7):
        found += list(frames.feed(stream[at : at + 7]))
    assert found == messages


def test_both_sides_of_a_connection_prove_the_secret() -> None:
    import threading

    here, there = socket.socketpair()
    with here, there:
        thread = threading.Thread(target=prove, args=(there, b"secret", True))
        thread.start()
        prove(here, b"secret", False)
        thread.join(20)
        here.sendall(b"after")
        assert there.recv(5) == b"after"
