"""Exchange of metadata by address and port: the listener's thread, and the requests to others' listeners.

A request is a byte for the operation, the length of its body, and the body. The answer has the same form. Threads wait
for connections and answers, so nothing runs while nothing comes.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Final

from kvferry._engine.connections import OpenConnections
from kvferry._engine.log import Seldom, logger_of

_log = logger_of("nixl")

# The sender's metadata; the receiver's metadata is asked for; the sender's metadata is no longer valid.
SEND, FETCH, INVALIDATE = 1, 2, 3
_HEAD: Final = struct.Struct("<BI")
# Of the body of one message, and of those that a listener's connections hold together.
BODY_MAX: Final = 64 << 20
# Of a part of a message, and of a whole exchange.
IO_TIMEOUT_S: Final = 5.0
EXCHANGE_TIMEOUT_S: Final = 30.0
MAX_CONNECTIONS: Final = 64
# For which a connection is kept where the next one has no place. Less than callers wait for an answer.
GRACE_S: Final = 2.0
# How long a request is repeated while nothing listens there.
PATIENCE_S: Final = 30.0
RETRY_S: Final = 0.2

Answer = Callable[[int, bytes], bytes]


def _read(connection: socket.socket, nbytes: int, until: float, took: Callable[[int], object]) -> bytes:
    got = bytearray()
    while len(got) < nbytes:
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"a message did not end within {EXCHANGE_TIMEOUT_S:g} s")
        connection.settimeout(min(left, IO_TIMEOUT_S))
        part = connection.recv(min(nbytes - len(got), 1 << 20))
        if not part:
            raise ConnectionError("the connection ended within a message")
        took(len(part))
        got += part
    return bytes(got)


def _receive(connection: socket.socket, took: Callable[[int], object] = lambda _: None) -> tuple[int, bytes]:
    """One message. `took` is called with the number of bytes of each part of its body."""
    until = time.monotonic() + EXCHANGE_TIMEOUT_S
    operation, length = _HEAD.unpack(_read(connection, _HEAD.size, until, lambda _: None))
    if length > BODY_MAX:
        raise ConnectionError(f"a message of {length} bytes")
    return operation, _read(connection, length, until, took)


def request(host: str, port: int, operation: int, body: bytes) -> bytes:
    """One request. OSError if it fails."""
    with socket.create_connection((host, port), timeout=IO_TIMEOUT_S) as connection:
        connection.sendall(_HEAD.pack(operation, len(body)) + body)
        return _receive(connection)[1]


class Listener:
    """Answers requests until `close`."""

    def __init__(self, host: str, port: int, answer: Answer) -> None:
        self._answer = answer
        self._closed = False
        # What strangers send may fail at any rate.
        self._say = Seldom(_log, "").say
        self._open = OpenConnections(MAX_CONNECTIONS, GRACE_S, BODY_MAX)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # All interfaces are those of IPv4, too.
        dual = host == "::" and socket.has_dualstack_ipv6()
        self._socket = socket.create_server((host, port), family=family, dualstack_ipv6=dual)
        self.host, self.port = str(self._socket.getsockname()[0]), int(self._socket.getsockname()[1])
        threading.Thread(target=self._serve, name="kvferry-nixl-listen", daemon=True).start()

    def _serve(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if not self._closed:
                    # Too many open files, for example: do not spin.
                    self._say("metadata listener at port %d: %s", self.port, error)
                    time.sleep(0.1)
                continue
            self._open.add(connection)
            threading.Thread(target=self._one, args=(connection,), name="kvferry-nixl-answer", daemon=True).start()

    def _one(self, connection: socket.socket) -> None:
        try:
            with connection:
                operation, body = _receive(connection, lambda nbytes: self._open.took(connection, nbytes))
                self._open.keep(connection)
                answer = self._answer(operation, body)
                connection.settimeout(IO_TIMEOUT_S)
                connection.sendall(_HEAD.pack(operation, len(answer)) + answer)
        except Exception as error:
            self._say("a request to the metadata listener at port %d failed: %s", self.port, error)
        finally:
            self._open.remove(connection)

    @property
    def closed(self) -> bool:
        return self._closed

    def forked(self) -> None:
        """In a forked child, which has the socket but not the thread: leaves the port to the parent."""
        self._closed = True
        self._socket.close()

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def in_background(what: str, host: str, port: int, operation: int, body: bytes, then: Callable[[bytes], None]) -> None:
    """A request that a thread repeats while nothing listens there. `then` gets the answer."""

    def run() -> None:
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                then(request(host, port, operation, body))
                return
            except ConnectionRefusedError as error:
                if time.monotonic() > until:
                    _log.warning("%s: nothing listens at %s port %d: %s", what, host, port, error)
                    return
            except Exception as error:
                _log.warning("%s: %s port %d: %s", what, host, port, error)
                return
            time.sleep(RETRY_S)

    threading.Thread(target=run, name="kvferry-nixl-metadata", daemon=True).start()
