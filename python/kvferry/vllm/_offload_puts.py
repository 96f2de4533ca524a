"""Puts of a worker: more bytes at once than the store queues wait here, and are not refused."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import kvferry
    from kvferry.vllm._offload_retention import Retention

# The store refuses what is put while 256 MiB wait.
_QUEUED_BYTES_MAX = 128 << 20
# A step of a long prefill may compute more than the disk takes meanwhile. An engine that needs the pages of what waits
# waits for it.
_WAITING_BYTES_MAX = 2 << 30


class Waiting:
    """A put that waits for its turn. As `kvferry.Pending`."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> Any:
        return self._future.result()


class Puts:
    """One thread puts what waits, a run of blocks after another. It starts when something waits first."""

    def __init__(self) -> None:
        self._queued: list[tuple[Any, int]] = []
        self._waiting: list[tuple[Waiting, int]] = []
        self._thread: ThreadPoolExecutor | None = None

    def put(
        self, space: Any, hashes: list[bytes], memory: kvferry.Blocks, first: int, retention: Retention
    ) -> Any | None:
        """None if too much waits."""
        kept = {"priority": retention.priority, "duration": retention.duration}
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

    def close(self) -> None:
        """Waits for all."""
        if self._thread is not None:
            self._thread.shutdown()


def _sum(puts: list[tuple[Any, int]]) -> int:
    return sum(nbytes for _, nbytes in puts)
