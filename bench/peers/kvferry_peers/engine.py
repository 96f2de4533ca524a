"""What a driven engine can do. Both roles of an engine are objects of one class, in two processes."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any

from kvferry_peers.memory import Memory, Pair

# Offsets here, offsets there, lengths.
Table = tuple[list[int], list[int], list[int]]


class TransferError(Exception):
    """The engine reported a failed transfer."""


class Engine(ABC):
    """One engine with registered memory, that after `connect` can move to and from one other."""

    memory: Memory

    def open(self, nbytes: int) -> Any:
        """Allocates and registers; what the other side needs to connect."""
        self.memory = Memory(nbytes)
        return self.register()

    @abstractmethod
    def register(self) -> Any: ...

    @abstractmethod
    def connect(self, other: Any) -> None: ...

    @abstractmethod
    def plan(self, op: str, batches: list[Table]) -> None:
        """Whatever can be done before the first byte moves."""

    @abstractmethod
    def move(self, batch: int) -> None:
        """One planned batch, to its end."""

    @abstractmethod
    def move_all(self, callers: int) -> int:
        """All planned batches, by so many callers at once; how many failed."""

    def fill(self, seed: int, nbytes: int) -> None:
        self.memory.fill(seed, nbytes)

    def poison(self, nbytes: int) -> None:
        self.memory.poison(nbytes)

    def check(self, seed: int, nbytes: int, pairs: list[Pair]) -> str | None:
        return self.memory.check(seed, nbytes, pairs)

    def call(self, batches: int, calls: int, limit: float) -> list[float]:
        """Seconds of each call; a call moves all batches, one after the other. Two calls at least, then until the
        limit is reached.
        """
        times: list[float] = []
        began = time.perf_counter()
        while len(times) < calls and (len(times) < 2 or time.perf_counter() - began < limit):
            started = time.perf_counter()
            for batch in range(batches):
                self.move(batch)
            times.append(time.perf_counter() - started)
        return times

    def together(self, callers: int, calls: int) -> tuple[float, int]:
        """Seconds that all batches take, `calls` times, by so many callers; and how many of them failed."""
        failed = 0
        started = time.perf_counter()
        for _ in range(calls):
            failed += self.move_all(callers)
        return time.perf_counter() - started, failed
