"""The broker's book through any order of events, without processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rlinf.channel.book import Book
from rlinf.channel.spec import ChannelSpec

PRODUCERS, CONSUMERS, KEYS = ("p0", "p1"), ("c0", "c1", "c2"), ("a", "b", None)


class Driver:
    """A book with one channel, and what its members have been told."""

    def __init__(self, **spec: Any) -> None:
        self.book, self.now = Book(), 0.0
        self.spec = ChannelSpec("c", PRODUCERS, CONSUMERS, **spec)
        self.serials: dict[str, int] = {}
        self.told: dict[str, list[tuple[Any, ...]]] = {}
        self.request = 100  # lower ones are for other messages

    def come(self, name: str) -> None:
        self.serials[name] = self.book.join(name, ("host", f"process of {name}", "cpu", "", ""))
        self.told[name] = []
        self.say(name, "open", 1, self.spec.plain())

    def say(self, name: str, *message: Any) -> None:
        self.now += 1
        self.book.handle(self.serials[name], message, self.now)
        self.hear()

    def go(self, name: str, reason: str = "died") -> None:
        self.now += 1
        self.book.leave(self.serials.pop(name), reason, self.now)
        self.hear()

    def hear(self) -> None:
        names = {serial: name for name, serial in self.serials.items()}
        for serial, message in self.book.out:
            self.told[names[serial]].append(message)
        self.book.out.clear()

    def put(
        self, name: str, number: int, keys: tuple[Hashable, ...] = (None,), weight: float = 1.0, **more: Any
    ) -> int:
        self.request += 1
        priority = more.get("priority", 0)
        self.say(
            name, "put", "c", number, self.request, keys, weight, priority, 8, more.get("views", True), ("at", number)
        )
        return self.request

    def want(self, name: str, keys: tuple[Hashable, ...] = (None,), at_least: float = 0.0, **more: Any) -> int:
        self.request += 1
        at_most, most = more.get("at_most", float("inf")), more.get("most", 1)
        self.say(name, "want", "c", self.request, (), keys, at_least, at_most, most)
        return self.request

    def answer(self, name: str, request: int) -> tuple[Any, ...] | None:
        """What came for a request."""
        return next((m for m in self.told[name] if m[0] in ("reply", "error", "deliver") and m[1] == request), None)

    def numbers(self, name: str, request: int) -> list[int]:
        answer = self.answer(name, request)
        assert answer is not None
        assert answer[0] == "deliver"
        return [entry[3] for entry in answer[2]]


def here(**spec: Any) -> Driver:
    driver = Driver(**spec)
    for name in (*PRODUCERS, *CONSUMERS):
        driver.come(name)
    return driver


def test_of_consumers_that_wait_the_one_that_has_had_least_is_served() -> None:
    driver = here()
    first = driver.want("c0")
    driver.put("p0", 1, weight=100)
    (entry,) = driver.answer("c0", first)[2]  # type: ignore[index]
    driver.say("c0", "done", "c", (entry[0],))
    waits = {name: driver.want(name) for name in CONSUMERS}
    for number in (2, 3, 4):
        driver.put("p0", number)
    assert [driver.numbers(name, waits[name]) for name in CONSUMERS] == [[4], [2], [3]]


def test_a_consumer_that_waits_for_more_than_the_capacity_is_served() -> None:
    driver = here(capacity=10)
    driver.put("p0", 1, weight=6)
    parked = driver.put("p0", 2, weight=6)
    assert driver.answer("p0", parked) is None
    want = driver.want("c0", at_least=8, most=99)
    assert driver.numbers("c0", want) == [1, 2]
    assert driver.answer("p0", parked) == ("reply", parked, None)


def test_an_item_of_several_keys_that_one_of_them_has_taken_goes_in_under_all() -> None:
    driver = here(capacity=1)
    driver.put("p0", 1, ("b",))
    parked = driver.put("p0", 2, ("a", "b"))
    assert driver.numbers("c0", driver.want("c0", ("a",))) == [2]
    driver.say("p0", "withdraw", "c", parked)
    assert driver.answer("p0", parked) == ("reply", parked, None)
    assert driver.numbers("c0", driver.want("c0", ("b",))) == [1]
    assert driver.numbers("c0", driver.want("c0", ("b",))) == [2]


def test_a_put_that_finds_no_room_in_time_leaves_nothing() -> None:
    driver = here(capacity=1)
    driver.put("p0", 1)
    parked = driver.put("p0", 2)
    driver.say("p0", "withdraw", "c", parked)
    _, _, kind, text, _ = driver.answer("p0", parked)  # type: ignore[misc]
    assert kind == "ChannelTimeout"
    assert "no room for weight 1 (capacity 1)" in text
    assert ("free", (2,)) in driver.told["p0"]
    assert driver.book.rooms["c"].counts.items == 1


def test_the_end_waits_for_what_others_have_in_hand() -> None:
    driver = here()
    driver.put("p0", 1)
    taken = driver.want("c0")
    for name in PRODUCERS:
        driver.say(name, "close", "c", True, None)
    waits = driver.want("c1")
    assert driver.answer("c1", waits) is None
    driver.go("c0")
    assert taken
    assert driver.numbers("c1", waits) == [1]
    assert driver.book.rooms["c"].counts.given_back == 1


def test_what_a_consumer_says_of_an_earlier_delivery_does_not_count_for_a_later_one() -> None:
    driver = here()
    driver.put("p0", 1)
    (first,) = driver.answer("c0", driver.want("c0"))[2]  # type: ignore[index]
    driver.say("c0", "back", "c", (first[0],))
    (second,) = driver.answer("c0", driver.want("c0"))[2]  # type: ignore[index]
    driver.say("c0", "freed", "c", (first[0],))  # the old views die only now
    driver.say("c0", "done", "c", (second[0],))
    assert ("free", (1,)) not in driver.told["p0"]
    driver.say("c0", "freed", "c", (second[0],))
    assert ("free", (1,)) in driver.told["p0"]


def test_ended_and_asked_for_keys_leave_nothing_after_some_producers_closed_all() -> None:
    driver = here()
    driver.say("p0", "close", "c", True, None)
    driver.say("c0", "withdraw", "c", driver.want("c0", ("never",)))
    driver.say("p1", "close", "c", False, "k")
    assert driver.answer("c0", driver.want("c0", ("k",)))[2:] == ((), ("k",))  # type: ignore[index]
    assert driver.book.rooms["c"].queues == {}


def test_an_item_that_nobody_looks_at_any_longer_is_free_once_it_is_processed() -> None:
    driver = here()
    driver.put("p0", 1, views=False)
    (entry,) = driver.answer("c0", driver.want("c0"))[2]  # type: ignore[index]
    assert ("free", (1,)) not in driver.told["p0"]
    driver.say("c0", "done", "c", (entry[0],))
    assert ("free", (1,)) in driver.told["p0"]


@pytest.mark.parametrize("why", ["failure", "no consumers"])
def test_who_lingers_is_let_go_when_nobody_can_take_its_items(why: str) -> None:
    driver = here()
    driver.put("p0", 1)
    driver.say("p0", "drain", 77)
    assert driver.answer("p0", 77) is None
    if why == "failure":
        driver.say("c0", "fail", "c", "ChannelFailed", "text", b"")
    else:
        for name in CONSUMERS:
            driver.go(name)
    assert driver.answer("p0", 77) == ("reply", 77, None)


def test_a_consumer_that_comes_again_after_all_had_died_mends_the_channel() -> None:
    driver = here()
    for name in CONSUMERS:
        driver.go(name)
    refused = driver.put("p0", 1)
    assert driver.answer("p0", refused)[2] == "PeerDied"  # type: ignore[index]
    driver.come("c1")
    assert driver.told["p0"][-1] == ("mended", "c")
    driver.put("p0", 2)
    assert driver.numbers("c1", driver.want("c1")) == [2]


def test_items_of_a_dead_producer_are_lost_by_name_and_those_of_others_still_come() -> None:
    driver = here()
    driver.put("p0", 1)
    driver.put("p1", 2)
    driver.go("p0", "died (killed)")
    assert driver.numbers("c0", driver.want("c0")) == [2]
    _, _, kind, text, _ = driver.answer("c0", driver.want("c0"))  # type: ignore[misc]
    assert kind == "PeerDied"
    assert "1 put by p0" in text
    assert "p0 died (killed)" in text


class AnyOrder(RuleBasedStateMachine):
    """Puts, gets, acknowledgements, closes and deaths of consumers in any order; producers stay."""

    @initialize(capacity=st.sampled_from([None, 2.0, 5.0]))
    def begin(self, capacity: float | None) -> None:
        self.driver = here(capacity=capacity)
        self.capacity = capacity
        self.number = 0
        self.keys_of: dict[int, tuple[Hashable, ...]] = {}
        self.producer_of: dict[int, str] = {}
        self.priority_of: dict[int, int] = {}
        self.refused: set[int] = set()
        self.puts: dict[int, tuple[str, int]] = {}
        self.hand: dict[str, dict[int, tuple[int, Hashable]]] = {name: {} for name in CONSUMERS}
        self.views: dict[str, set[int]] = {name: set() for name in CONSUMERS}
        self.wants: dict[str, dict[int, tuple[Hashable, ...]]] = {name: {} for name in CONSUMERS}
        self.processed: Counter[tuple[int, Hashable]] = Counter()
        self.freed: Counter[int] = Counter()
        self.closed: dict[str, set[Hashable]] = {name: set() for name in PRODUCERS}

    def read(self) -> None:
        """Take note of what members were told."""
        for name, told in self.driver.told.items():
            for message in told:
                if message[0] == "deliver":
                    _, request, entries, ended = message
                    keys = self.wants[name].pop(request)
                    assert bool(entries) != bool(ended)
                    assert {e[1] for e in entries} <= set(keys)
                    for ticket, key, _, number, _, _ in entries:
                        held = [pair for hand in self.hand.values() for pair in hand.values()]
                        assert (number, key) not in held, "two have it in hand"
                        assert not self.processed[number, key], "it was processed already"
                        self.hand[name][ticket] = (number, key)
                    for key in ended:
                        assert all(key in closed for closed in self.closed.values())
                        assert not self.unprocessed(key, but=name)
                elif message[0] == "free":
                    self.freed.update(message[1])
                elif message[0] == "reply" and message[1] in self.puts:
                    self.puts.pop(message[1])
                elif message[0] == "error" and message[1] in self.puts:
                    _, number = self.puts.pop(message[1])
                    self.refused.add(number)
                elif message[0] == "error":
                    self.wants[name].pop(message[1], None)
            told.clear()

    def unprocessed(self, key: Hashable, but: str) -> list[int]:
        mine = {number for number, held in self.hand.get(but, {}).values() if held == key}
        return [
            number
            for number, keys in self.keys_of.items()
            if key in keys and number not in self.refused and not self.processed[number, key] and number not in mine
        ]

    def alive(self) -> list[str]:
        return [name for name in CONSUMERS if name in self.driver.serials]

    @rule(
        name=st.sampled_from(PRODUCERS),
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=3, unique=True),
        weight=st.sampled_from([0.5, 1.0, 3.0, 7.0]),
        priority=st.sampled_from([0, 0, 1]),
    )
    def put(self, name: str, keys: list[Hashable], weight: float, priority: int) -> None:
        self.number += 1
        self.keys_of[self.number], self.producer_of[self.number] = tuple(keys), name
        self.priority_of[self.number] = priority
        self.puts[self.driver.request + 1] = (name, self.number)
        self.driver.put(name, self.number, tuple(keys), weight, priority=priority)
        self.read()

    @precondition(lambda self: self.alive())
    @rule(
        data=st.data(),
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=3, unique=True),
        at_least=st.sampled_from([0.0, 0.0, 4.0]),
        most=st.sampled_from([1, 3, 99]),
    )
    def want(self, data: Any, keys: list[Hashable], at_least: float, most: int) -> None:
        name = data.draw(st.sampled_from(self.alive()))
        self.wants[name][self.driver.request + 1] = tuple(keys)
        self.driver.want(name, tuple(keys), at_least, most=most)
        self.read()

    @precondition(lambda self: any(self.hand[name] for name in self.alive()))
    @rule(data=st.data(), what=st.sampled_from(["done", "done", "back"]), seen=st.booleans())
    def settle(self, data: Any, what: str, seen: bool) -> None:
        name = data.draw(st.sampled_from([name for name in self.alive() if self.hand[name]]))
        ticket = data.draw(st.sampled_from(sorted(self.hand[name])))
        pair = self.hand[name].pop(ticket)
        if seen:
            self.driver.say(name, "freed", "c", (ticket,))
        elif what == "done":
            self.views[name].add(ticket)
        if what == "done":
            self.processed[pair] += 1
        self.driver.say(name, what, "c", (ticket,))
        self.read()

    @precondition(lambda self: any(self.views[name] for name in self.alive()))
    @rule(data=st.data())
    def look_away(self, data: Any) -> None:
        name = data.draw(st.sampled_from([name for name in self.alive() if self.views[name]]))
        self.driver.say(name, "freed", "c", (self.views[name].pop(),))
        self.read()

    @precondition(lambda self: any(self.wants[name] for name in self.alive()) or self.puts)
    @rule(data=st.data())
    def withdraw(self, data: Any) -> None:
        waiting = [(name, request) for name in self.alive() for request in self.wants[name]]
        waiting += [(name, request) for request, (name, _) in self.puts.items()]
        name, request = data.draw(st.sampled_from(waiting))
        self.driver.say(name, "withdraw", "c", request)
        self.read()
        assert request not in self.puts
        assert request not in self.wants.get(name, {})

    @rule(name=st.sampled_from(PRODUCERS), key=st.sampled_from(KEYS))
    def close(self, name: str, key: Hashable) -> None:
        if not any(producer == name and key in self.keys_of[number] for producer, number in self.puts.values()):
            self.closed[name].add(key)
            self.driver.say(name, "close", "c", False, key)
            self.read()

    @precondition(lambda self: len(self.alive()) > 1)
    @rule(data=st.data())
    def die(self, data: Any) -> None:
        name = data.draw(st.sampled_from(self.alive()))
        self.wants[name].clear()
        self.hand[name].clear()
        self.views[name].clear()
        self.driver.told.pop(name)
        self.driver.go(name)
        self.read()

    @precondition(lambda self: len(self.alive()) < len(CONSUMERS))
    @rule()
    def come_again(self) -> None:
        self.driver.come(next(name for name in CONSUMERS if name not in self.driver.serials))
        self.read()

    @invariant()
    def nobody_waits_for_what_is_there(self) -> None:
        room = self.driver.book.rooms["c"]
        for want in room.wants.values():
            assert not room._answer(want)

    @invariant()
    def counts_agree(self) -> None:
        counts = self.driver.book.rooms["c"].counts
        assert counts.acknowledged == sum(self.processed.values())
        assert counts.items == len(self.keys_of) - len(self.refused)
        held = sum(len(hand) for hand in self.hand.values())
        assert counts.delivered == counts.acknowledged + counts.given_back + held
        assert max(self.freed.values(), default=0) <= 1

    def teardown(self) -> None:
        """Whatever happened, all that was put is processed once, and its memory comes back."""
        if not hasattr(self, "driver"):
            return
        if not self.alive():
            self.driver.come("c0")
        name = self.alive()[0]
        for other in self.alive()[1:]:
            self.hand[other].clear()
            self.driver.told.pop(other)
            self.wants[other].clear()
            self.driver.go(other)
        for request in list(self.wants[name]):
            self.driver.say(name, "withdraw", "c", request)
        self.read()
        for ticket in list(self.hand[name]):
            self.processed[self.hand[name].pop(ticket)] += 1
            self.driver.say(name, "done", "c", (ticket,))
        for key in KEYS:
            while True:
                self.wants[name][self.driver.request + 1] = (key,)
                request = self.driver.want(name, (key,))
                self.read()
                if request in self.wants[name]:
                    self.driver.say(name, "withdraw", "c", request)
                    break
                if not self.hand[name]:
                    break  # it has ended
                for ticket in list(self.hand[name]):
                    self.processed[self.hand[name].pop(ticket)] += 1
                    self.driver.say(name, "done", "c", (ticket,))
            self.read()
        put = {(number, key) for number, keys in self.keys_of.items() if number not in self.refused for key in keys}
        assert set(self.processed) == put
        assert set(self.processed.values()) <= {1}
        self.driver.go(name)
        self.driver.hear()
        self.driver.told.setdefault(name, [])
        self.read()
        assert set(self.freed) == set(self.keys_of)


AnyOrder.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestAnyOrder = AnyOrder.TestCase
