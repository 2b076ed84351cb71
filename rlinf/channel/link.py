"""A process' connection to the broker: requests and their answers, one thread that reads, and no polling."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any

from rlinf.channel.errors import BrokerDied, ChannelError, rebuilt
from rlinf.channel.spec import Address, Place
from rlinf.channel.wire import HANDSHAKE_S, Frames, Message, frame, patient, prove

log = logging.getLogger(__name__)
_PIECE = 1 << 18


class Doorbell:
    """Things that came to an end, told from anywhere: from a finaliser in the midst of other code too.

    Finalisers may run at any point of any thread, so they take no lock and send nothing: they leave a note, and wake
    the thread that reads.
    """

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._notes: deque[Any] = deque()

    def ring(self, note: Any) -> None:
        self._notes.append(note)
        with contextlib.suppress(BlockingIOError):  # it has been rung often enough
            os.eventfd_write(self.fd, 1)

    def answer(self) -> list[Any]:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        notes = []
        while self._notes:
            notes.append(self._notes.popleft())
        return notes

    def __del__(self) -> None:  # only now: a late finaliser must not ring at another file that has the number
        os.close(self.fd)


class Link:
    """The connection.

    Args:
        address: of the broker.
        name, place: of this member.
        on_message: what the broker says unasked. Called by the reading thread.
        on_notes: what the doorbell collected. Called by the reading thread.

    Raises:
        BrokerDied: nobody listens there.
        ChannelError: the secret is another one, or the name is taken.
    """

    def __init__(
        self,
        address: Address,
        name: str,
        place: Place,
        on_message: Callable[[Message], None],
        on_notes: Callable[[list[Any]], None],
    ) -> None:
        self.address = address
        self.where = f"the broker at {address.ip}:{address.port}"
        self.doorbell = Doorbell()
        self._on_message, self._on_notes = on_message, on_notes
        self._frames = Frames()
        self._early: list[Message] = []
        self._requests: dict[int, Future[Any]] = {}
        self._numbers = itertools.count(1)
        self._sending = threading.Lock()
        self._over: ChannelError | None = None
        self._leaving = False
        self._sock = self._connect(place)
        self.serial = self._enter(name, place)
        self._thread = threading.Thread(target=self._read, name=f"channel-{name}", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def _connect(self, place: Place) -> socket.socket:
        try:
            if place.host == self.address.host:
                sock = socket.socket(socket.AF_UNIX)
                sock.connect(self.address.local)
            else:
                sock = socket.create_connection((self.address.ip, self.address.port), HANDSHAKE_S)
                sock.settimeout(None)
        except OSError as error:
            raise BrokerDied(f"{self.where} cannot be reached: {error}") from None
        try:
            patient(sock)
            prove(sock, self.address.secret, first=False)
        except BaseException:
            sock.close()
            raise
        return sock

    def _enter(self, name: str, place: Place) -> int:
        self._sock.sendall(frame(("hello", name, place.plain())))
        messages: list[Message] = []
        while not messages:
            data = self._sock.recv(_PIECE)
            if not data:
                raise BrokerDied(f"{self.where} ended while {name} came in")
            messages += self._frames.feed(data)
        (what, told), self._early = messages[0], messages[1:]
        if what != "welcome":
            self._sock.close()
            raise ChannelError(told)
        return told

    # Sending

    def send(self, *message: Any) -> None:
        """Raises `BrokerDied` where it is gone."""
        if self._over:
            raise self._over
        data = frame(message)
        try:
            with self._sending:
                self._sock.sendall(data)
        except OSError as error:
            raise self._over or BrokerDied(f"{self.where} is gone: {error}") from None

    def request(self) -> tuple[int, Future[Any]]:
        """A number to send with a message, and what its answer will come in."""
        number, future = next(self._numbers), Future[Any]()
        self._requests[number] = future
        if self._over:  # it ended between the caller's check and now
            self._fail(self._over)
        return number, future

    def call(self, what: str, *rest: Any, before: tuple[Any, ...] = (), timeout: float | None = None) -> Any:
        """Send ``(what, *before, request, *rest)`` and wait for the answer."""
        number, future = self.request()
        self.send(what, *before, number, *rest)
        try:
            return future.result(timeout)
        except TimeoutError:
            raise BrokerDied(f"{self.where} did not answer {what!r} within {timeout:g} s") from None

    # Reading

    def _read(self) -> None:
        reason = "its connection ended"
        try:
            for message in self._early:
                self._take(message)
            with selectors.DefaultSelector() as selector:
                selector.register(self._sock, selectors.EVENT_READ)
                selector.register(self.doorbell.fd, selectors.EVENT_READ)
                while True:
                    for key, _ in selector.select():
                        if key.fd == self.doorbell.fd:
                            self._on_notes(self.doorbell.answer())
                            continue
                        data = self._sock.recv(_PIECE)
                        if not data:
                            return
                        for message in self._frames.feed(data):
                            self._take(message)
        except (OSError, ChannelError) as error:
            reason = str(error)
        except Exception as error:
            log.exception("the link to the broker of the channels fails")
            reason = f"{type(error).__name__}: {error}"
        finally:
            text = "this member has left" if self._leaving else f"{self.where} is gone ({reason})"
            self._fail(BrokerDied(text))

    def _take(self, message: Message) -> None:
        what = message[0]
        if what == "deliver":
            _, number, *answer = message
            self._resolve(number, answer)
        elif what == "reply":
            self._resolve(*message[1:])
        elif what == "error":
            _, number, kind, text, cause = message
            self._resolve(number, rebuilt(kind, text, cause))
        else:
            self._on_message(message)

    def _resolve(self, number: int, answer: Any) -> None:
        future = self._requests.pop(number, None)
        if future is None:
            return
        with contextlib.suppress(InvalidStateError):
            if isinstance(answer, BaseException):
                future.set_exception(answer)
            else:
                future.set_result(answer)

    def _fail(self, error: ChannelError) -> None:
        self._over = self._over or error
        for number in list(self._requests):
            self._resolve(number, self._over)

    def close(self) -> None:
        """Leave."""
        self._leaving = True
        with contextlib.suppress(ChannelError):
            self.send("leave")
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(HANDSHAKE_S)
        self._sock.close()
