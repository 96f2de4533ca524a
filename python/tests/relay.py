"""A TCP relay on loopback between clients and a server, which fails as a test wants.

One thread carries the bytes of all connections. It suits messages of some kilobytes: it waits for a receiver that has no
room for them.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import selectors
import socket
import struct
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Literal

__all__ = ["BOTH", "Relay", "Side"]

Side = Literal["client", "server"]
BOTH: tuple[Side, Side] = ("client", "server")

_CONNECT_S = 10.0


class _End:
    """One end of a connection, with what it has sent and the relay has not passed on."""

    def __init__(self, connection: socket.socket, side: Side) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket, self.side = connection, side
        self.other = self
        self.held: list[bytes] = []
        self.is_open = True
        self.has_ended = False
        # The other end was reset: what this one sends is answered by a reset, as TCP does.
        self.is_half_open = False


class Relay:
    """Listens at `addresses`, and connects each client of one to the server of that number in `connect_to`."""

    def __init__(self, ports: int) -> None:
        self._listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(ports)]
        self.addresses = [f"127.0.0.1:{it.getsockname()[1]}" for it in self._listeners]
        self._servers: list[tuple[str, int] | None] = [None] * ports
        self._ends: set[_End] = set()
        self._silent: set[Side] = set()
        self._is_closed = False
        # Messages that have arrived, and a callback on the relay's thread before each is passed on.
        self.messages = 0
        self.on_message: Callable[[], None] = lambda: None
        self._orders: queue.SimpleQueue[tuple[Callable[[], None], Future[None]]] = queue.SimpleQueue()
        self._waiting, self._waker = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._waiting, selectors.EVENT_READ, self._take_orders)
        for number, listener in enumerate(self._listeners):
            accept = functools.partial(self._accept, number)
            self._selector.register(listener, selectors.EVENT_READ, accept)
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()

    # Calls from any thread; they return when they are done.

    def connect_to(self, servers: Iterable[str]) -> None:
        """`host:port` of the server behind each of `addresses`, for connections that begin from now on."""
        parts = [it.rpartition(":") for it in servers]
        found = [(host, int(port)) for host, _, port in parts]
        self._do(lambda: self._servers.__setitem__(slice(None), found))

    def silence(self, sides: Iterable[Side]) -> None:
        """A partition: what these sides send does not arrive. Connections stay open."""
        self._do(functools.partial(self._silence, set(sides)))

    def heal(self) -> None:
        """All that was sent arrives: TCP sends it again."""
        self._do(self._heal)

    def reset(self, sides: Iterable[Side]) -> None:
        """Resets these sides of all connections. The other side is reset when it sends something."""
        self._do(functools.partial(self._reset, set(sides)))

    def close(self) -> None:
        self._do(self._close)
        self._thread.join()

    def _do(self, order: Callable[[], None]) -> None:
        if threading.current_thread() is self._thread:
            return order()
        done: Future[None] = Future()
        self._orders.put((order, done))
        self._waker.send(b"\0")
        return done.result(60)

    # On the relay's thread.

    def _run(self) -> None:
        while not self._is_closed:
            for key, _ in self._selector.select():
                key.data()
        for it in (self._waiting, self._waker, *self._listeners):
            it.close()

    def _take_orders(self) -> None:
        self._waiting.recv(4096)
        while not self._orders.empty():
            order, done = self._orders.get()
            try:
                order()
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(None)

    def _accept(self, number: int) -> None:
        client = _End(self._listeners[number].accept()[0], "client")
        self._ends.add(client)
        server = self._servers[number]
        try:
            if server is None:
                raise ConnectionRefusedError
            connection = socket.create_connection(server, timeout=_CONNECT_S)
        except OSError:
            return self._cut(client)
        connection.settimeout(None)
        other = _End(connection, "server")
        client.other, other.other = other, client
        self._ends.add(other)
        for end in (client, other):
            if end.side not in self._silent:
                self._read(end)
        return None

    def _read(self, end: _End) -> None:
        self._selector.register(end.socket, selectors.EVENT_READ, functools.partial(self._arrived, end))

    def _ignore(self, end: _End) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(end.socket)

    def _arrived(self, end: _End) -> None:
        # An event of the same round may have changed this.
        if not end.is_open or end.side in self._silent:
            return None
        try:
            data = end.socket.recv(1 << 16)
        except ConnectionError:
            self._cut(end.other)
            return self._cut(end)
        if end.is_half_open:
            return self._cut(end)
        if not data:
            return self._ended(end)
        self.messages += 1
        self.on_message()
        if end.side in self._silent:
            end.held.append(data)
        elif end.is_half_open:
            self._cut(end)
        elif end.is_open:
            self._send(end.other, data)
        return None

    def _send(self, end: _End, data: bytes) -> None:
        try:
            end.socket.sendall(data)
        except OSError:
            self._cut(end)
            self._cut(end.other)

    def _ended(self, end: _End) -> None:
        """It sends nothing any more."""
        end.has_ended = True
        self._ignore(end)
        with contextlib.suppress(OSError):
            end.other.socket.shutdown(socket.SHUT_WR)
        if end.other.has_ended:
            for it in (end, end.other):
                it.is_open = False
                self._ends.discard(it)
                it.socket.close()

    def _cut(self, end: _End) -> None:
        if end.is_open:
            end.is_open = False
            self._ignore(end)
            self._ends.discard(end)
            end.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            end.socket.close()

    def _silence(self, sides: set[Side]) -> None:
        self._silent |= sides
        for end in self._ends:
            if end.side in sides:
                self._ignore(end)

    def _heal(self) -> None:
        sides, self._silent = self._silent, set()
        for end in [it for it in self._ends if it.side in sides]:
            for data in end.held:
                self._send(end.other, data)
            end.held.clear()
            if end.is_open and not end.has_ended:
                self._read(end)

    def _reset(self, sides: set[Side]) -> None:
        for end in [it for it in self._ends if it.side in sides]:
            end.other.is_half_open = True
            self._cut(end)

    def _close(self) -> None:
        self._is_closed = True
        self._reset(set(BOTH))
