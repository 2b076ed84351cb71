"""Between hosts: each producer has a small server, and a consumer keeps one connection to it.

Bytes go from the producer's memory to the socket and from there into the consumer's memory, without a copy between.
Both sides prove that they know the run's secret. The server starts when the first consumer asks for it.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

from rlinf.channel.errors import ChannelError, PeerDied
from rlinf.channel.transports.base import Held, Landed, Offer, Visit
from rlinf.channel.wire import patient, prove

_ASKS = struct.Struct("<QI")  # number of the item, part
_TELLS = struct.Struct("<Q")  # bytes that follow; 0: there is no such item
_BUFFER = 1 << 22


class _Line:
    """A connection to a producer; one exchange at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.lock = threading.Lock()


class Tcp:
    """See `HostTransport`.

    Args:
        secret: of the run.
        ip: that this member listens at.
        find: an item that this member holds, by number.
    """

    def __init__(self, secret: bytes, ip: str, find: Callable[[int], Held | None]) -> None:
        self._secret = secret
        self._ip = ip or "127.0.0.1"
        self._find = find
        self._server: socket.socket | None = None
        self._lines: dict[int, _Line] = {}
        self._served: set[socket.socket] = set()
        self._lock = threading.Lock()

    # Producer

    def answer(self, held: Held, consumer: int, *question: Any) -> tuple[Any, ...]:
        with self._lock:
            if self._server is None:
                self._server = socket.create_server((self._ip, 0), backlog=256)
                threading.Thread(target=self._listen, args=(self._server,), name="channel-tcp", daemon=True).start()
            return self._server.getsockname()[:2]

    def _listen(self, server: socket.socket) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                sock, _ = server.accept()
                threading.Thread(target=self._serve, args=(sock,), name="channel-tcp-send", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError, ChannelError), sock:  # the consumer is gone, or none of ours
            patient(sock)
            prove(sock, self._secret, first=True)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
            with self._lock:
                self._served.add(sock)
            try:
                while True:
                    number, part = _ASKS.unpack(_exactly(sock, _ASKS.size))
                    held = self._find(number)
                    if held is None or part not in held.parts:
                        sock.sendall(_TELLS.pack(0))
                        continue
                    block, offer = held.parts[part]
                    sock.sendall(_TELLS.pack(offer.nbytes))
                    sock.sendall(block.area.data)
            finally:
                with self._lock:
                    self._served.discard(sock)

    # Consumer

    def take(self, visit: Visit, part: int, offer: Offer) -> Landed:
        block = visit.pool.take(offer.nbytes)
        area = block.area
        try:
            line = self._line(visit)
            with line.lock:
                line.sock.sendall(_ASKS.pack(visit.number, part))
                (nbytes,) = _TELLS.unpack(_exactly(line.sock, _TELLS.size))
                if nbytes != offer.nbytes:
                    raise ChannelError(f"{visit.name} offered {offer.nbytes} bytes and sent {nbytes}")
                _into(line.sock, memoryview(area.data))
        except ChannelError:
            visit.pool.give(block)
            raise
        except OSError as error:
            visit.pool.give(block)
            self.forget(visit.serial)
            raise PeerDied(
                f"{visit.name} did not send an item of {offer.nbytes} bytes within {visit.deadline_s:g} s, or is gone: "
                f"{error or type(error).__name__}"
            ) from error
        return Landed(area, block)

    def _line(self, visit: Visit) -> _Line:
        with self._lock:
            line = self._lines.get(visit.serial)
        if line is None:
            ip, port = visit.ask()
            sock = socket.create_connection((ip, port), visit.deadline_s)
            sock.settimeout(None)
            patient(sock)
            prove(sock, self._secret, first=False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
            sock.settimeout(visit.deadline_s)
            with self._lock:
                line = self._lines.setdefault(visit.serial, _Line(sock))
            if line.sock is not sock:  # another thread was faster
                sock.close()
        return line

    def forget(self, serial: int) -> None:
        """A producer is gone."""
        with self._lock:
            line = self._lines.pop(serial, None)
        if line:
            line.sock.close()

    def close(self) -> None:
        with self._lock:
            socks = [*(line.sock for line in self._lines.values()), *self._served]
            if self._server:
                with contextlib.suppress(OSError):
                    self._server.shutdown(socket.SHUT_RDWR)
                self._server.close()
        for sock in socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for line in self._lines.values():
            line.sock.close()


def _exactly(sock: socket.socket, nbytes: int) -> bytearray:
    data = bytearray(nbytes)
    _into(sock, memoryview(data))
    return data


def _into(sock: socket.socket, view: memoryview) -> None:
    while len(view):
        got = sock.recv_into(view)
        if not got:
            raise ConnectionError("the connection ended")
        view = view[got:]
