"""Processes that are killed, whatever they were at: the others go on, or are told who died; nothing is left behind."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from rlinf.channel.broker import Broker
from rlinf.channel.channel import Channel
from rlinf.channel.errors import BrokerDied, EndOfStream, PeerDied
from rlinf.channel.member import Member
from rlinf.channel.spec import ChannelSpec
from tests.channel.processes import Remote

pytestmark = pytest.mark.timeout(120)
IP = "127.0.0.1"


@pytest.fixture
def remote() -> Iterator[Callable[..., Remote]]:
    made: list[Remote] = []

    def start(broker: Broker, name: str, ip: str = "") -> Remote:
        made.append(Remote(broker.address, name, ip))
        return made[-1]

    yield start
    for each in made:
        each.close()


def spec_of(**changes: Any) -> ChannelSpec:
    return ChannelSpec(**{"name": "c", "producers": ("p",), "consumers": ("c0", "c1"), **changes})


# What the processes do when they are killed


def produce(member: Member, state: dict[str, Any], spec: ChannelSpec, count: int, end: str = "") -> None:
    channel = state.setdefault("channel", member.channel(spec))
    for number in range(count):
        channel.put({"number": number, "x": torch.full((20_000,), float(number))})
    if end:
        channel.close() if end == "all" else channel.close(None)


def consume(member: Member, state: dict[str, Any], spec: ChannelSpec, what: str) -> Any:
    channel: Channel = state.setdefault("channel", member.channel(spec))
    if what == "idle":
        return None
    if what == "holds one":
        state["item"] = channel.get(timeout=20)
    elif what == "acknowledged and still looks":
        state["item"] = channel.get(timeout=20)
        channel.done()
    elif what == "holds a batch":
        state["item"] = channel.get_batch(at_least=3, at_most=3, timeout=20)
    elif what == "gave back":
        channel.give_back(*channel.receive(timeout=20))
    elif what == "waits":
        threading.Thread(target=channel.get, args=("never",), daemon=True).start()
        time.sleep(0.2)  # so that it waits when it is killed; either way the outcome is the same
    return None


def take(channel: Channel, count: int) -> list[int]:
    return [channel.get(timeout=20).get("number") for _ in range(count)]


@pytest.mark.parametrize("transport", ["shared", "tcp"])
@pytest.mark.parametrize(
    "state", ["idle", "holds one", "acknowledged and still looks", "holds a batch", "gave back", "waits"]
)
def test_a_killed_consumer_costs_no_item_and_doubles_none(
    remote: Callable[..., Remote], state: str, transport: str
) -> None:
    spec, processed = spec_of(transport=transport), []
    with Broker() as broker, Member(broker.address, "p", ip=IP) as member:
        channel = member.channel(spec)
        for number in range(10):
            channel.put({"number": number, "x": torch.full((20_000,), float(number))})
        channel.close()
        first = remote(broker, "c0", IP)
        first(consume, spec, state)
        first.kill()
        with Member(broker.address, "c1", ip=IP) as other:
            for item in other.channel(spec):
                assert bool((item["x"] == item["number"]).all())
                processed.append(item["number"])
                del item
            expected = range(1 if state.startswith("acknowledged") else 0, 10)
            assert processed == list(expected)
            counts = channel.statistics()
            assert counts["acknowledged"] == counts["items"] == 10
            assert counts["given_back"] == {"holds one": 1, "holds a batch": 3, "gave back": 1}.get(state, 0)
            assert counts["in_hand_items"] == 0
        deadline = time.monotonic() + 20
        while member.memory["used"] and time.monotonic() < deadline:  # the last finalisers tell of themselves
            time.sleep(0.01)
        assert member.memory["used"] == 0


@pytest.mark.parametrize("transport", ["shared", "tcp", "gloo"])
@pytest.mark.parametrize("end", ["", "key", "all"])
def test_a_killed_producer_is_named_where_its_items_are_missed(
    remote: Callable[..., Remote], transport: str, end: str
) -> None:
    spec = spec_of(transport=transport, consumers=("c0",))
    with Broker() as broker, Member(broker.address, "c0", ip=IP, deadline_s=10.0) as member:
        channel, other = member.channel(spec), remote(broker, "p", IP)
        other(produce, spec, 3, end)
        first = channel.get(timeout=20)
        other.kill()
        assert bool((first["x"] == 0).all())  # what is in hand can be read to its end
        with pytest.raises(PeerDied, match=r"\bp\b"):
            take(channel, 3)


def test_a_producer_that_was_killed_after_all_was_processed_and_closed_is_missed_by_nobody(
    remote: Callable[..., Remote],
) -> None:
    spec = spec_of(consumers=("c0",))
    with Broker() as broker, Member(broker.address, "c0") as member:
        channel, other = member.channel(spec), remote(broker, "p")
        other(produce, spec, 2, "all")
        assert take(channel, 2) == [0, 1]
        channel.done()
        channel.explain()
        other.kill()
        with pytest.raises(EndOfStream):
            channel.get(timeout=20)


def test_a_producer_that_comes_again_can_close_what_its_predecessor_left_open(remote: Callable[..., Remote]) -> None:
    spec = spec_of(consumers=("c0",))
    with Broker() as broker, Member(broker.address, "c0") as member:
        channel, other = member.channel(spec), remote(broker, "p")
        other(produce, spec, 0)
        other.kill()
        with pytest.raises(PeerDied, match=r"\bp died"):
            channel.get(timeout=20)
        remote(broker, "p")(produce, spec, 2, "all")
        assert take(channel, 2) == [0, 1]
        with pytest.raises(EndOfStream):
            channel.get(timeout=20)


def host(member: Member, state: dict[str, Any]) -> Any:
    state["hosted"] = Broker()
    return state["hosted"].address


@pytest.mark.parametrize("state", ["get", "get_batch", "select", "put", "close of a member"])
def test_whoever_waits_when_the_broker_is_killed_is_told(remote: Callable[..., Remote], state: str) -> None:
    spec = spec_of(capacity=1, consumers=("c0",))
    with Broker() as helper:
        other = remote(helper, "host")
        address = other(host)
        producer, consumer = Member(address, "p"), Member(address, "c0")
        end, get = producer.channel(spec), consumer.channel(spec)
        end.put(1, "full")
        threading.Timer(0.3, other.kill).start()
        if state == "close of a member":
            producer.close()
        else:
            waits: dict[str, Callable[[], Any]] = {
                "get": lambda: get.get(timeout=30),
                "get_batch": lambda: get.get_batch(at_least=5, timeout=30),
                "select": lambda: get.select(("a", "b"), timeout=30),
                "put": lambda: end.put(2, "full", timeout=30),
            }
            with pytest.raises(BrokerDied, match="the broker at"):
                waits[state]()
            with pytest.raises(BrokerDied):
                end.put(3, "again")
            producer.close()
        consumer.close()


def churn(member: Member, state: dict[str, Any], spec: ChannelSpec) -> None:
    channel = member.channel(spec)
    while True:
        channel.put({"x": torch.ones(100_000)})


def test_nothing_is_left_of_processes_killed_in_the_midst_of_their_work(remote: Callable[..., Remote]) -> None:
    spec, before = spec_of(capacity=4, consumers=("c0",)), set(os.listdir("/dev/shm"))
    with Broker() as broker:
        for _ in range(3):
            producer = remote(broker, "p")
            producer.begin(churn, spec)
            with Member(broker.address, "c0") as member:
                channel = member.channel(spec)
                for _ in range(20):
                    assert float(channel.get(timeout=20)["x"][-1]) == 1.0
                producer.kill()
                with pytest.raises(PeerDied, match=r"\bp\b"):
                    take(channel, 10)
        assert set(os.listdir("/dev/shm")) <= before
