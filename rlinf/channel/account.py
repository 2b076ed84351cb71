"""What a channel is like just now, in words and in figures."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlinf.channel.room import Room


def statistics(room: Room) -> dict[str, Any]:
    """`Counts`, and what is there now."""
    waiting = [entry for queue in room.queues.values() for entry in queue]
    return {
        **room.counts.plain(),
        "keys": len(room.queues),
        "waiting_items": len(waiting),
        "waiting_weight": sum(entry.item.weight for entry in waiting),
        "waiting_bytes": sum(entry.item.nbytes for entry in waiting),
        "parked_items": sum(len(queue.parked) for queue in room.queues.values()),
        "in_hand_items": sum(len(hand) for hand in room.hand.values()),
        "views": sum(len(views) for views in room.views.values()),
        "wants": len(room.wants),
        "taken_weight": {room.members[serial].name: weight for serial, weight in room.taken.items()},
    }


def places(room: Room) -> dict[str, tuple[Any, ...]]:
    """Where the members are, by name."""
    return {member.name: member.place for member in room.members.values()}


def state_of(room: Room, key: Hashable) -> str:
    """What is under a key that somebody waits at, and who is missing: for the text of a timeout."""
    queue, here = room.queues[key], {member.name for member in room.members.values()}
    still = [
        name if name in here else f"{name} ({room.gone.get(name, 'not here yet')})"
        for name in room.spec.producers
        if name not in queue.closed
    ]
    held = "".join(f", {count} in hand of {room.members[serial].name}" for serial, count in queue.in_hand.items())
    absent = [f"{name} ({room.gone.get(name, 'not here yet')})" for name in room.spec.consumers if name not in here]
    return (
        f"under key {key!r} wait {len(queue)} items of weight {queue.weight:g}{held}; "
        + (f"not closed by {some(still)}" if still else "closed by all producers")
        + (f"; missing consumers: {some(absent)}" if absent else "")
    )


def some(names: Sequence[str], most: int = 8) -> str:
    """The first of some names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
