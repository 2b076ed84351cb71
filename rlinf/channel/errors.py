"""What can go wrong with a channel. Each message names who or what, what was expected, and what to change."""

from __future__ import annotations

import asyncio
import pickle

from rlinf.errors import RlinfError


class ChannelError(RlinfError):
    """A channel was used wrongly, or cannot do what was asked."""


class EndOfStream(ChannelError):
    """Every producer has closed the key, and all of its items are processed."""


class ChannelTimeout(ChannelError):
    """What was waited for did not come in the time given."""


class PeerDied(ChannelError):
    """Another member is gone, and what is waited for depended on it."""


class BrokerDied(PeerDied):
    """The broker is gone: nothing more goes through any of its channels."""


class ChannelFailed(ChannelError):
    """A member has failed the channel. ``__cause__`` is the error that it passed, where that could be sent."""


_KINDS: dict[str, type[ChannelError]] = {
    kind.__name__: kind for kind in (ChannelError, EndOfStream, ChannelTimeout, PeerDied, BrokerDied, ChannelFailed)
}


def rebuilt(kind: str, text: str, cause: bytes = b"") -> ChannelError:
    """An error as a message brought it."""
    error = _KINDS.get(kind, ChannelError)(text)
    if cause:
        try:
            error.__cause__ = pickle.loads(cause)
        except Exception as reason:  # a class that only its sender has: the text says what it was
            error.add_note(f"(the error itself could not be read here: {reason})")
    return error


def packed(error: BaseException) -> bytes:
    """An error for `rebuilt`, or nothing where it cannot be pickled."""
    if isinstance(error, asyncio.CancelledError):
        return b""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        return b""
    return data
