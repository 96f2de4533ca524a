"""Puts of a worker: more bytes at once than the store queues wait here, and are not refused."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import kvferry

# The store refuses what is put while 256 MiB wait.
_QUEUED_BYTES_MAX = 128 << 20
# A step of a long prefill may compute more than the disk takes meanwhile. An engine that needs the pages of what waits
# has it given up.
_WAITING_BYTES_MAX = 2 << 30
# A put is not given up once it has begun, so it is no larger than that: 0.3 s of a disk that takes 200 MB/s.
PUT_BYTES_MAX = 64 << 20
# How long the end of the engine waits for what has not begun.
_CLOSE_S = 10.0


class Waiting:
    """A put that waits for its turn. As `kvferry.Pending`."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> Any:
        """Raises what the put raised, or `CancelledError`."""
        return self._future.result()

    def give_up(self) -> None:
        """It does not begin any more. One that has begun goes on."""
        self._future.cancel()


class Puts:
    """One thread puts what waits, a run of blocks after another. It starts when something waits first."""

    def __init__(self) -> None:
        self._queued: list[tuple[Any, int]] = []
        self._waiting: list[tuple[Waiting, int]] = []
        self._thread: ThreadPoolExecutor | None = None

    def put(self, space: Any, hashes: list[bytes], memory: kvferry.Blocks, first: int, **kept: Any) -> Any | None:
        """As `kvferry.Space.put_async`. None if too much waits."""
        nbytes = memory.nbytes
        self._queued = [it for it in self._queued if not it[0].done()]
        self._waiting = [it for it in self._waiting if not it[0].done()]
        if not self._waiting and (not self._queued or _sum(self._queued) + nbytes <= _QUEUED_BYTES_MAX):
            pending = space.put_async(hashes, memory, first, **kept)
            self._queued.append((pending, nbytes))
            return pending
        if _sum(self._waiting) + nbytes > _WAITING_BYTES_MAX:
            return None
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvferry-offload")
        waiting = Waiting(self._thread.submit(space.put, hashes, memory, first, **kept))
        self._waiting.append((waiting, nbytes))
        return waiting

    def give_up(self) -> None:
        """What waits does not begin any more."""
        for waiting, _ in self._waiting:
            waiting.give_up()

    def close(self) -> None:
        """Waits for what has begun, and not for long for the rest."""
        if self._thread is not None:
            wait([it._future for it, _ in self._waiting], _CLOSE_S)
            self._thread.shutdown(cancel_futures=True)


def _sum(puts: list[tuple[Any, int]]) -> int:
    return sum(nbytes for _, nbytes in puts)
