"""The broker: a small server with one thread that keeps the `Book`. Payloads never come here.

It can be in any process that lives as long as the channels: the driver, a Ray actor of its own, one of the members.
Members of its host come by a Unix socket without a name in any directory, others by TCP; both must know the secret.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import secrets
import selectors
import socket
import threading
import time
from typing import Any

from rlinf.channel.book import Book
from rlinf.channel.errors import ChannelError
from rlinf.channel.spec import Address, new_secret
from rlinf.channel.wire import Frames, Message, frame, patient, prove
from rlinf.host import this_host

log = logging.getLogger(__name__)
_PIECE = 1 << 18


class _Connection:
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.frames = Frames()
        self.unsent = bytearray()
        self.serial = 0


class Broker:
    """Start it by making it.

    Args:
        ip: where it listens for members of other hosts; the node's own address, if there are such.
        port: 0: any that is free.

    Attributes:
        address: give it to the members. It holds the run's secret.
    """

    def __init__(self, ip: str = "127.0.0.1", port: int = 0) -> None:
        self._tcp = socket.create_server((ip, port), backlog=1024)
        self._unix = socket.socket(socket.AF_UNIX)
        local = f"\0rlinf-channel-{secrets.token_hex(8)}"
        self._unix.bind(local)
        self._unix.listen(1024)
        self.address = Address(this_host(), local, ip, self._tcp.getsockname()[1], new_secret())
        self._book = Book()
        self._by_serial: dict[int, _Connection] = {}
        self._proven: queue.SimpleQueue[socket.socket | None] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        for listener in (self._tcp, self._unix):
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="channel-broker", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it. Members that still wait get `BrokerDied`."""
        if self._thread.is_alive():
            self._proven.put(None)
            os.eventfd_write(self._wake, 1)
            self._thread.join()

    def __enter__(self) -> Broker:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except Exception:
            log.exception("the broker of the channels fails; its members are told by the end of their connections")
        finally:
            for key in list(self._selector.get_map().values()):
                if key.data is not None:
                    key.data.sock.close()
            for listener in (self._tcp, self._unix):
                listener.close()
            self._selector.close()
            os.close(self._wake)

    def _turn(self) -> bool:
        for key, events in self._selector.select():
            if key.data is not None:
                self._serve(key.data, events)
            elif key.fileobj in (self._tcp, self._unix):
                self._accept(key.fileobj)  # type: ignore[arg-type]
            else:
                os.eventfd_read(self._wake)
                while not self._proven.empty():
                    sock = self._proven.get()
                    if sock is None:
                        return False
                    self._admit(sock)
        return True

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # who came is gone again
            sock, _ = listener.accept()
            sock.setblocking(True)
            # A stranger who says nothing holds up nobody else.
            threading.Thread(target=self._prove, args=(sock,), name="channel-broker-proof", daemon=True).start()

    def _prove(self, sock: socket.socket) -> None:
        try:
            patient(sock)
            prove(sock, self.address.secret, first=True)
        except (ChannelError, OSError) as error:
            log.warning("the broker of the channels refused a connection: %s", error)
            sock.close()
            return
        self._proven.put(sock)
        with contextlib.suppress(OSError):  # the broker has ended meanwhile
            os.eventfd_write(self._wake, 1)

    def _admit(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._selector.register(sock, selectors.EVENT_READ, _Connection(sock))

    def _serve(self, connection: _Connection, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._push(connection)
        if not events & selectors.EVENT_READ:
            return
        try:
            data = connection.sock.recv(_PIECE)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(connection, f"died (its connection broke: {error.strerror})")
            return
        if not data:
            self._end(connection, "died (its connection ended without a word)")
            return
        try:
            for message in connection.frames.feed(data):
                self._handle(connection, message)
        except Exception as error:
            log.exception("a message of %s was wrong", self._name(connection))
            self._end(connection, f"sent a wrong message ({type(error).__name__}: {error})")
        self._flush()

    def _name(self, connection: _Connection) -> str:
        member = self._book.members.get(connection.serial)
        return member.name if member else "a stranger"

    def _handle(self, connection: _Connection, message: Message) -> None:
        if connection.serial:
            if message[0] == "leave":
                self._leave(connection, "has left")
            else:
                self._book.handle(connection.serial, message, time.monotonic())
            return
        _, name, place = message
        connection.serial = self._book.join(name, place)
        if connection.serial:
            self._by_serial[connection.serial] = connection
            connection.unsent += frame(("welcome", connection.serial))
        else:
            text = f"a member {name!r} is here already; each process needs a name of its own"
            connection.unsent += frame(("refused", text))
        self._push(connection)

    def _leave(self, connection: _Connection, reason: str) -> None:
        if self._by_serial.pop(connection.serial, None):
            self._book.leave(connection.serial, reason, time.monotonic())
        connection.serial = 0

    def _end(self, connection: _Connection, reason: str) -> None:
        self._leave(connection, reason)
        with contextlib.suppress(KeyError):
            self._selector.unregister(connection.sock)
        connection.sock.close()
        self._flush()

    def _flush(self) -> None:
        out, self._book.out = self._book.out, []
        changed = {}
        for serial, message in out:
            if connection := self._by_serial.get(serial):
                connection.unsent += frame(message)
                changed[serial] = connection
        for connection in changed.values():
            self._push(connection)

    def _push(self, connection: _Connection) -> None:
        """Send what can be sent at once; the rest when there is room. The broker waits for nobody."""
        with contextlib.suppress(BlockingIOError):
            while connection.unsent:
                try:
                    sent = connection.sock.send(connection.unsent)
                except BlockingIOError:
                    raise
                except OSError:
                    connection.unsent.clear()  # its end is read in a moment
                    break
                del connection.unsent[:sent]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        with contextlib.suppress(KeyError):
            if self._selector.get_key(connection.sock).events != events:
                self._selector.modify(connection.sock, events, connection)
