"""Channels as their users have them: every structure by every way, order, pressure, ends, and deaths."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from rlinf.batch import Batch, Ragged
from rlinf.channel.broker import Broker
from rlinf.channel.channel import Channel
from rlinf.channel.errors import (
    BrokerDied,
    ChannelError,
    ChannelFailed,
    ChannelTimeout,
    EndOfStream,
    PeerDied,
)
from rlinf.channel.member import Member
from rlinf.channel.spec import ChannelSpec
from tests.channel.processes import Remote

pytestmark = pytest.mark.timeout(120)
IP = "127.0.0.1"


@pytest.fixture
def broker() -> Iterator[Broker]:
    with Broker() as broker:
        yield broker


@pytest.fixture
def remote(broker: Broker) -> Iterator[Callable[..., Remote]]:
    made: list[Remote] = []

    def start(name: str, ip: str = "") -> Remote:
        made.append(Remote(broker.address, name, ip))
        return made[-1]

    yield start
    for each in made:
        each.close()


def pair(**changes: Any) -> ChannelSpec:
    return ChannelSpec(**{"name": "c", "producers": ("p",), "consumers": ("c",), **changes})


# What runs in the other process


def opened(member: Member, state: dict[str, Any], spec: ChannelSpec) -> Channel:
    if spec.name not in state:
        state[spec.name] = member.channel(spec)
    return state[spec.name]


def put_all(member: Member, state: dict[str, Any], spec: ChannelSpec, items: list[Any], close: bool = True) -> None:
    channel = opened(member, state, spec)
    for item in items:
        channel.put(item)
    if close:
        channel.close()


def put_structure(member: Member, state: dict[str, Any], spec: ChannelSpec, name: str) -> None:
    put_all(member, state, spec, [STRUCTURES[name]()])


def put_some(member: Member, state: dict[str, Any], spec: ChannelSpec, count: int, key: Any, timeout: float) -> int:
    channel, done = opened(member, state, spec), 0
    try:
        for number in range(count):
            channel.put((member.name, number), key, timeout=timeout)
            done += 1
    except ChannelTimeout:
        pass
    return done


def take(member: Member, state: dict[str, Any], spec: ChannelSpec, count: int, acknowledge: bool = True) -> list[Any]:
    channel = opened(member, state, spec)
    found = [channel.get(timeout=20) for _ in range(count)]
    if acknowledge:
        channel.done()
    return found


def take_to_the_end(member: Member, state: dict[str, Any], spec: ChannelSpec) -> list[Any]:
    return list(opened(member, state, spec))


def leave(member: Member, state: dict[str, Any]) -> None:
    member.close(linger_s=20)


# Every structure by every way


@dataclass
class Thing:
    weights: torch.Tensor
    name: str


def _grid() -> torch.Tensor:
    return torch.arange(60.0).reshape(5, 12)


STRUCTURES: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "plain": lambda: {"a": [1, 2.5, "x", (True, None)], "b": b"bytes"},
    "tensor": _grid,
    "scalar": lambda: torch.tensor(7),
    "empty": lambda: torch.empty(0, 3),
    "bfloat16": lambda: _grid().to(torch.bfloat16),
    "bool and complex": lambda: [torch.arange(5) > 2, torch.arange(4).to(torch.complex64)],
    "transposed": lambda: _grid().t(),
    "every other": lambda: _grid()[::2, 1::3],
    "expanded": lambda: torch.arange(3).expand(1000, 3),
    "requires grad": lambda: torch.ones(4, requires_grad=True),
    "array": lambda: np.arange(12, dtype=np.int16).reshape(3, 4)[:, ::2],
    "batch": lambda: Batch(
        {
            "row_id": torch.arange(3),
            "ids": Ragged.of([[1, 2], [], [3]], torch.int64),
            "half": Ragged.of([[0.5], [1.5, 2.5], []], torch.bfloat16),
            "text": ["a", "ü", ""],
        }
    ),
    "nested": lambda: {"deep": [{"x": (_grid(), [_grid()[1]])}, Thing(_grid()[:, 2], "thing")]},
    "large": lambda: torch.arange(3_000_000, dtype=torch.int32),
}


def flat(value: Any) -> list[Any]:
    """A structure as a list of plain values, dtypes and shapes."""
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), tuple(value.shape), value.detach().tolist()]
    if isinstance(value, np.ndarray):
        return [str(value.dtype), value.shape, value.tolist()]
    if isinstance(value, Ragged):
        return [*flat(value.values), *flat(value.lengths)]
    if isinstance(value, Thing):
        return [*flat(value.weights), value.name]
    if isinstance(value, dict | Batch):
        return [x for key in value for x in (key, *flat(value[key]))]
    if isinstance(value, list | tuple):
        return [type(value).__name__, *(x for item in value for x in flat(item))]
    return [value]


@pytest.fixture(scope="module")
def partners() -> Iterator[tuple[Member, Remote]]:
    """A consumer here, a producer in another process, both reachable by TCP."""
    with Broker() as broker:
        other = Remote(broker.address, "p", IP)
        member = Member(broker.address, "c", ip=IP, deadline_s=20.0)
        yield member, other
        member.close(linger_s=0)
        other.close()


@pytest.mark.parametrize("transport", ["shared", "tcp", "gloo"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_every_structure_goes_by_every_way(partners: tuple[Member, Remote], structure: str, transport: str) -> None:
    member, other = partners
    spec = pair(name=f"{structure} by {transport}", transport=transport)
    channel = member.channel(spec)
    other(put_structure, spec, structure)
    assert channel.explain() == f"{transport}: 1 pairs: p -> c"
    assert flat(channel.get(timeout=30)) == flat(STRUCTURES[structure]())
    with pytest.raises(EndOfStream):
        channel.get(timeout=30)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_within_a_process_an_item_goes_as_it_is(broker: Broker, structure: str) -> None:
    with Member(broker.address, "p") as producer, Member(broker.address, "c") as consumer:
        item = STRUCTURES[structure]()
        end, other = producer.channel(pair()), consumer.channel(pair())
        end.explain()  # what the broker said before its answer has arrived too: that all consumers are here
        end.put(item)
        assert other.get(timeout=20) is item
        other.done()


def test_only_the_fields_that_are_read_travel(partners: tuple[Member, Remote]) -> None:
    member, other = partners
    spec = pair(name="pruned", fields=("row_id", "text"))
    channel = member.channel(spec)
    other(put_structure, spec, "batch")
    assert set(channel.get(timeout=20)) == {"row_id", "text"}


# Order, weight, pressure, ends


def test_items_come_in_order_each_once(broker: Broker, remote: Callable[..., Remote]) -> None:
    with Member(broker.address, "c") as member:
        channel = member.channel(pair(capacity=7))
        remote("p").begin(put_all, pair(capacity=7), list(range(500)))
        assert list(channel) == list(range(500))
        counts = channel.statistics()
        assert (counts["items"], counts["acknowledged"], counts["given_back"]) == (500, 500, 0)
        assert counts["deepest"] <= 7


def test_higher_priorities_come_first(broker: Broker) -> None:
    with Member(broker.address, "p") as producer, Member(broker.address, "c") as consumer:
        end, other = producer.channel(pair()), consumer.channel(pair())
        for number, priority in enumerate((0, 5, 0, 9, 5)):
            end.put(number, priority=priority)
        end.statistics()  # its answer comes after all puts
        assert [other.get(timeout=20) for _ in range(5)] == [3, 1, 4, 0, 2]
        other.done()


def test_a_batch_is_taken_by_weight(broker: Broker) -> None:
    with Member(broker.address, "p") as producer, Member(broker.address, "c") as consumer:
        end, other = producer.channel(pair()), consumer.channel(pair())
        for weight in (10, 20, 30, 40, 500):
            end.put(weight, weight=weight)
        end.statistics()  # its answer comes after all puts
        assert other.get_batch(at_least=25, at_most=65, timeout=20) == [10, 20, 30]
        assert other.get_batch(at_most=45, timeout=20) == [40]
        assert other.get_batch(at_most=45, timeout=20) == [500]  # one at least, whatever it weighs
        end.put(1, weight=1)
        end.close()
        assert other.get_batch(at_least=99, timeout=20) == [1]  # no more can come
        with pytest.raises(EndOfStream):
            other.get_batch(timeout=20)


def test_a_put_waits_for_room_and_goes_on_when_there_is(broker: Broker, remote: Callable[..., Remote]) -> None:
    spec, other = pair(capacity=3), remote("p")
    with Member(broker.address, "c") as member:
        channel = member.channel(spec)
        assert other(put_some, spec, 10, None, 0.2) == 3
        assert [channel.get(timeout=20) for _ in range(3)] == [("p", 0), ("p", 1), ("p", 2)]
        channel.done()
        assert other(put_some, spec, 2, None, 20.0) == 2
        assert [channel.get(timeout=20) for _ in range(2)] == [("p", 0), ("p", 1)]
        channel.done()


def test_keys_are_streams_of_their_own_and_leave_nothing(broker: Broker) -> None:
    with Member(broker.address, "p") as producer, Member(broker.address, "c") as consumer:
        end, other = producer.channel(pair()), consumer.channel(pair())
        for number in range(200):
            end.put(number, ("even", number) if number % 2 == 0 else ("odd", number))
            end.close(("even", number) if number % 2 == 0 else ("odd", number))
        for number in reversed(range(200)):
            key = ("even", number) if number % 2 == 0 else ("odd", number)
            assert list(other.stream(key)) == [number]
        assert other.statistics()["keys"] == 0


def test_an_item_for_several_keys_is_there_once_and_read_under_each(broker: Broker) -> None:
    with Member(broker.address, "p") as producer, Member(broker.address, "c") as consumer:
        end, other = producer.channel(pair(transport="shared")), consumer.channel(pair(transport="shared"))
        end.put(torch.ones(1 << 20), keys=("a", "b"))
        assert producer.memory["used"] < 2 * 4 * 2**20
        got = [other.get(key, timeout=20) for key in ("a", "b")]
        assert all(bool((tensor == 1).all()) for tensor in got)
        other.done()


def test_select_gives_what_is_there_under_any_key_and_which_have_ended(broker: Broker) -> None:
    with Member(broker.address, "p") as producer, Member(broker.address, "c") as consumer:
        end, other = producer.channel(pair()), consumer.channel(pair())
        assert other.select(("a", "b"), wait=False) == ([], [])
        end.put(1, "a")
        end.put(2, "b")
        end.close("b")
        found: list[tuple[Any, Any]] = []
        ended: list[Any] = []
        while "b" not in ended:
            items, over = other.select([key for key in ("a", "b") if key not in ended], timeout=20)
            found += [(item.key, item.value) for item in items]
            ended += over
        assert sorted(found) == [("a", 1), ("b", 2)]


def test_async_ends(broker: Broker) -> None:
    async def both() -> list[Any]:
        with Member(broker.address, "p") as producer, Member(broker.address, "c") as consumer:
            end, other = producer.channel(pair(capacity=2)), consumer.channel(pair(capacity=2))

            async def produce() -> None:
                for number in range(20):
                    await end.put_async(number)
                end.close()

            task = asyncio.create_task(produce())
            found = [item async for item in other.stream_async()]
            await task
            return found

    assert asyncio.run(both()) == list(range(20))


def test_several_consumers_share_by_weight_and_each_item_is_processed_once(
    broker: Broker, remote: Callable[..., Remote]
) -> None:
    spec = pair(consumers=("c0", "c1", "c2"), capacity=16)
    others = [remote(name) for name in spec.consumers]
    for other in others:
        other.begin(take_to_the_end, spec)
    with Member(broker.address, "p") as member:
        channel = member.channel(spec)
        for number in range(300):
            channel.put(number)
        channel.close()
        found = [other.end() for other in others]
        assert sorted(number for part in found for number in part) == list(range(300))
        assert all(part == sorted(part) for part in found)


# Deaths


def test_a_consumer_that_dies_gives_back_what_it_had_in_hand(broker: Broker, remote: Callable[..., Remote]) -> None:
    spec = pair(consumers=("c0", "c1"))
    with Member(broker.address, "p") as member:
        channel = member.channel(spec)
        for number in range(10):
            channel.put(number)
        channel.close()
        first, second = remote("c0"), remote("c1")
        assert first(take, spec, 3, True) == [0, 1, 2]
        assert first(take, spec, 2, False)[-1] == 4  # the first of the two is acknowledged by the second get
        first.kill()
        assert second(take_to_the_end, spec) == [4, 5, 6, 7, 8, 9]
        counts = channel.statistics()
        assert (counts["items"], counts["acknowledged"], counts["given_back"]) == (10, 10, 1)


@pytest.mark.parametrize("state", ["before it put anything", "with items waiting", "after it closed"])
def test_a_producer_that_dies_is_named_unless_it_had_closed(
    broker: Broker, remote: Callable[..., Remote], state: str
) -> None:
    spec, other = pair(), remote("p")
    with Member(broker.address, "c") as member:
        channel = member.channel(spec)
        other(put_all, spec, [], False)
        if state == "with items waiting":
            other(put_all, spec, [1, 2], False)
        if state == "after it closed":
            other(put_all, spec, [], True)
        other.kill()
        # What it had put may still come, or be lost with it.
        with pytest.raises(EndOfStream if state == "after it closed" else PeerDied, match=r"'c'|\bp\b"):
            take(member, {"c": channel}, spec, 3)


def test_who_waits_when_a_producer_dies_is_told(broker: Broker, remote: Callable[..., Remote]) -> None:
    spec, other = pair(), remote("p")
    with Member(broker.address, "c") as member:
        channel = member.channel(spec)
        other(put_all, spec, [], False)
        threading.Timer(0.3, other.kill).start()
        with pytest.raises(PeerDied, match=r"\bp\b"):
            channel.get(timeout=20)


def test_a_producer_that_waits_for_room_is_told_when_the_last_consumer_dies(
    broker: Broker, remote: Callable[..., Remote]
) -> None:
    spec, other = pair(capacity=1), remote("c")
    with Member(broker.address, "p") as member:
        channel = member.channel(spec)
        channel.put(0)
        other(take, spec, 0)
        threading.Timer(0.3, other.kill).start()
        with pytest.raises(PeerDied, match=r"\bc\b"):
            channel.put(1, timeout=20)
        member.close(linger_s=0)


def test_when_the_broker_dies_everyone_is_told(remote: Callable[..., Remote]) -> None:
    broker = Broker()
    member = Member(broker.address, "c")
    channel = member.channel(pair())
    threading.Timer(0.3, broker.close).start()
    with pytest.raises(BrokerDied, match="broker"):
        channel.get(timeout=20)
    with pytest.raises(ChannelError):
        channel.get(timeout=20)
    member.close()


def host_broker(member: Member, state: dict[str, Any]) -> Any:
    state["broker"] = Broker()
    return state["broker"].address


def test_when_the_brokers_process_is_killed_everyone_is_told(remote: Callable[..., Remote]) -> None:
    host = remote("host")
    member = Member(host(host_broker), "c")
    channel = member.channel(pair())
    threading.Timer(0.3, host.kill).start()
    with pytest.raises(BrokerDied, match="broker"):
        channel.get(timeout=20)
    member.close()


def test_a_failure_reaches_whoever_waits_with_its_cause(broker: Broker, remote: Callable[..., Remote]) -> None:
    with Member(broker.address, "p") as producer, Member(broker.address, "c") as consumer:
        end, other = producer.channel(pair()), consumer.channel(pair())
        threading.Timer(0.2, lambda: end.fail(ZeroDivisionError("the cause"))).start()
        with pytest.raises(ChannelFailed, match="failed by p: ZeroDivisionError: the cause") as failed:
            other.get(timeout=20)
        assert isinstance(failed.value.__cause__, ZeroDivisionError)
        producer.close(linger_s=0)


# Wrong use


def test_a_timeout_says_what_was_waited_for(broker: Broker) -> None:
    with Member(broker.address, "c") as member:
        channel = member.channel(pair())
        with pytest.raises(ChannelTimeout, match=r"'c'.*p"):
            channel.get("some key", timeout=0.1)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda: pair(producers=()), "producers must be different names, at least one"),
        (lambda: pair(capacity=0), "capacity must be above 0"),
        (lambda: pair(transport="pigeon"), "no transport 'pigeon'; there are inprocess, shared"),
    ],
)
def test_a_wrong_spec_is_refused(wrong: Callable[[], ChannelSpec], text: str) -> None:
    with pytest.raises(ChannelError, match=text):
        wrong()


def test_wrong_calls_are_refused_by_name(broker: Broker) -> None:
    with Member(broker.address, "p") as producer, Member(broker.address, "c") as consumer:
        end, other = producer.channel(pair()), consumer.channel(pair())
        with pytest.raises(ChannelError, match=r"a key must be made of .*found list"):
            end.put(1, key=[1])
        with pytest.raises(ValueError, match="weight must be 0 or more"):
            end.put(1, weight=-1)
        with pytest.raises(ChannelError, match=r"'c': c is none of its producers, who are p"):
            other.put(1)
        with pytest.raises(ChannelError, match=r"'c': p is none of its consumers, who are c"):
            end.get(timeout=5)
        with pytest.raises(ChannelError, match=r"taken|p"):
            Member(broker.address, "p")


def test_a_stranger_without_the_secret_is_not_let_in(broker: Broker) -> None:
    from dataclasses import replace

    with pytest.raises(ChannelError):
        Member(replace(broker.address, secret=b"another"), "c", deadline_s=5.0)


# Memory


def _resident(pid: int) -> int:
    with open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS"))


def put_many(member: Member, state: dict[str, Any], spec: ChannelSpec, count: int) -> int:
    channel = opened(member, state, spec)
    for number in range(count):
        channel.put({"number": number, "x": torch.full((50_000,), float(number))}, ("step", number))
        channel.close(("step", number))
    return _resident(os.getpid())


def test_two_thousand_iterations_leave_memory_as_it_was(broker: Broker, remote: Callable[..., Remote]) -> None:
    spec, other, shm = pair(), remote("p"), set(os.listdir("/dev/shm"))
    with Member(broker.address, "c") as member:
        channel = member.channel(spec)

        def read(first: int, last: int) -> None:
            for number in range(first, last):
                (item,) = channel.stream(("step", number))
                assert item["number"] == number
                assert float(item["x"][-1]) == float(number)

        sizes = []
        for first in range(0, 2000, 500):
            other.begin(put_many, spec, 500) if not first else other.begin(put_more, spec, first, 500)
            read(first, first + 500)
            sizes.append((other.end(), _resident(os.getpid()), channel.statistics()["keys"]))
        (there, here, keys), (there_first, here_first, _) = sizes[-1], sizes[1]
        assert keys == 0
        assert there - there_first < 20 * 2**20
        assert here - here_first < 20 * 2**20
        assert set(os.listdir("/dev/shm")) <= shm
        other.kill()
        assert set(os.listdir("/dev/shm")) <= shm


def put_more(member: Member, state: dict[str, Any], spec: ChannelSpec, first: int, count: int) -> int:
    channel = opened(member, state, spec)
    for number in range(first, first + count):
        channel.put({"number": number, "x": torch.full((50_000,), float(number))}, ("step", number))
        channel.close(("step", number))
    return _resident(os.getpid())


@pytest.mark.parametrize("make", [torch.full, np.full])
def test_memory_is_not_used_again_while_somebody_looks_at_it(
    broker: Broker, remote: Callable[..., Remote], make: Callable[..., Any]
) -> None:
    spec, other = pair(), remote("p")
    with Member(broker.address, "c") as member:
        channel = member.channel(spec)
        other(put_all, spec, [make((1 << 16,), float(i)) for i in range(8)], False)
        kept = [channel.get(timeout=20) for _ in range(8)]
        channel.done()
        other(put_all, spec, [make((1 << 16,), -1.0) for _ in range(8)], True)
        rest = list(channel)
        assert [float(t[0]) for t in kept] == list(map(float, range(8)))
        assert all(bool((t == float(i)).all()) for i, t in enumerate(kept))
        assert len(rest) == 8
        assert Counter(float(t[-1]) for t in rest) == {-1.0: 8}
