"""Ranks as threads, which meet where TensorRT-LLM's ranks use MPI."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

_T = TypeVar("_T")
_PATIENCE_S = 60.0


class Ranks:
    def __init__(self, count: int) -> None:
        self.count = count
        self._barrier = threading.Barrier(count)
        self._slots: list[Any] = [None] * count

    def run(self, body: Callable[[int], _T]) -> list[_T]:
        """Runs `body` on each rank. If one raises, the others stop waiting for it."""

        def of_rank(rank: int) -> _T:
            here.ranks, here.rank = self, rank
            try:
                return body(rank)
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(self.count) as threads:
            made = [threads.submit(of_rank, rank) for rank in range(self.count)]
            failures = [it.exception() for it in made]
        self._barrier.reset()
        # A rank that waited for the one that failed says less.
        first = [it for it in failures if it is not None and not isinstance(it, threading.BrokenBarrierError)]
        for failure in first or [it for it in failures if it is not None]:
            raise failure
        return [it.result() for it in made]

    def gather(self, value: Any) -> list[Any]:
        self._slots[here.rank] = value
        self._barrier.wait(_PATIENCE_S)
        gathered = list(self._slots)
        self._barrier.wait(_PATIENCE_S)
        return gathered


class _Here(threading.local):
    """The rank of this thread."""

    ranks: Ranks | None = None
    rank: int = 0

    def gather(self, value: Any) -> list[Any]:
        return [value] if self.ranks is None else self.ranks.gather(value)

    def broadcast(self, value: Any, root: int = 0) -> Any:
        return self.gather(value)[root]


here = _Here()
