"""Messages between members and the broker: who may send them, and how they are cut out of a stream of bytes.

A message is a tuple of plain values. It is pickled, and read by an unpickler that knows no classes: what arrives cannot
run code. Before the first message either side proves that it knows the run's secret.
"""

from __future__ import annotations

import io
import os
import pickle
import socket
import struct
from collections.abc import Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from rlinf.channel.errors import ChannelError

HANDSHAKE_S = 10.0
# A host that loses its power says nothing; its connections end after about this long.
SILENCE_S = 20
_HEAD = struct.Struct("<I")
_LONGEST = 1 << 28

Message = tuple[Any, ...]


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise ChannelError(f"a message holds {module}.{name}; messages are made of plain values")


def frame(message: Message) -> bytes:
    """A message with its length before it."""
    data = pickle.dumps(message, 5)
    return _HEAD.pack(len(data)) + data


class Frames:
    """Cuts messages out of what arrives."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        self._data += data
        at = 0
        try:
            while len(self._data) - at >= _HEAD.size:
                (size,) = _HEAD.unpack_from(self._data, at)
                if size > _LONGEST:
                    raise ChannelError(f"a message of {size} bytes: this is no message of ours")
                if len(self._data) - at - _HEAD.size < size:
                    break
                begin = at + _HEAD.size
                at = begin + size
                yield _Plain(io.BytesIO(bytes(self._data[begin:at]))).load()
        finally:
            del self._data[:at]


def patient(sock: socket.socket) -> None:
    """Small messages go at once; a peer whose host is gone is noticed."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_S // 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, SILENCE_S // 8))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_S * 1000)


def prove(sock: socket.socket, secret: bytes, first: bool) -> None:
    """Either side shows that it knows the secret.

    Args:
        first: whether this side asks first (the one that listens).

    Raises:
        ChannelError: the other one does not know it, or does not answer in time.
    """
    seconds = struct.pack("ll", int(HANDSHAKE_S), 0)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, seconds)
    connection = Connection(os.dup(sock.fileno()))
    try:
        for step in (deliver_challenge, answer_challenge) if first else (answer_challenge, deliver_challenge):
            step(connection, secret)
    except (AuthenticationError, OSError, EOFError, ValueError) as error:
        raise ChannelError(
            f"a peer did not prove that it knows this run's secret ({type(error).__name__}: {error}); "
            "was the address taken from another run?"
        ) from None
    finally:
        connection.close()
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", 0, 0))
