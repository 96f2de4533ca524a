"""The open connections of a server: a bounded number, which hold a bounded number of bytes."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from dataclasses import dataclass


@dataclass
class _Use:
    since: float
    # The connection was ended for another one. Its thread may still hold the bytes.
    is_ended: bool = False
    # What it has sent is being answered: it is not ended for others.
    is_kept: bool = False
    nbytes: int = 0


class OpenConnections:
    """At most `most` at a time: the next one ends the oldest, so slow clients never keep others out. Any thread may
    call it.
    """

    def __init__(self, most: int, grace_s: float = 0.0, bytes_max: int = 0) -> None:
        """`grace_s`: how long a connection keeps its place for certain. `bytes_max`: what all together may hold."""
        self._most, self._grace_s, self._bytes_max = most, grace_s, bytes_max
        self._removed = threading.Condition()
        # From the oldest to the newest.
        self._uses: dict[socket.socket, _Use] = {}

    def add(self, connection: socket.socket) -> None:
        """Adds a connection. Where all places are taken, waits until one is free or the oldest has had its grace."""
        with self._removed:
            if len(using := self._open()) >= self._most:
                left_s = max(self._uses[using[0]].since + self._grace_s - time.monotonic(), 0.0)
                if not self._removed.wait_for(lambda: len(self._open()) < self._most, left_s):
                    self._removed.wait_for(lambda: len(self._open()) < self._most or self._not_kept())
                    if len(self._open()) >= self._most:
                        self._end(self._not_kept()[0])
            self._uses[connection] = _Use(time.monotonic())

    def took(self, connection: socket.socket, nbytes: int) -> None:
        """Counts bytes that the connection holds until it ends. Beyond `bytes_max`, the connection that holds most
        is ended. ConnectionError if this one was.
        """
        with self._removed:
            self._check(connection)
            self._uses[connection].nbytes += nbytes
            # Without those that were ended: their threads let go of theirs when they read again.
            if sum(self._uses[it].nbytes for it in self._open()) > self._bytes_max:
                self._end(max(self._not_kept(), key=lambda it: self._uses[it].nbytes))
            self._check(connection)

    def keep(self, connection: socket.socket) -> None:
        """The connection has sent all, and is not ended for others any more. ConnectionError if it was."""
        with self._removed:
            self._check(connection)
            self._uses[connection].is_kept = True

    def remove(self, connection: socket.socket) -> None:
        with self._removed:
            self._uses.pop(connection, None)
            self._removed.notify_all()

    def _open(self) -> list[socket.socket]:
        return [connection for connection, use in self._uses.items() if not use.is_ended]

    def _not_kept(self) -> list[socket.socket]:
        return [connection for connection in self._open() if not self._uses[connection].is_kept]

    def _check(self, connection: socket.socket) -> None:
        if self._uses[connection].is_ended:
            raise ConnectionError("the connection was ended for others")

    def _end(self, connection: socket.socket) -> None:
        """Has the thread that reads from the connection find its end."""
        self._uses[connection].is_ended = True
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
