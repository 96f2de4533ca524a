"""Memory in which blocks wait: regions of an agent that are used again, and ranges of memory that is shared."""

from __future__ import annotations

import threading
from typing import Literal

import kvferry

ALIGN = 4096


class Scratch:
    """Regions of an agent by their lengths. Registering memory takes longer than filling it.

    Any thread may call it. It ends with the agent.
    """

    def __init__(
        self, agent: kvferry.Agent, free_bytes_max: int = 256 << 20, access: Literal["none", "rw"] = "none"
    ) -> None:
        self._agent = agent
        self._access: Literal["none", "rw"] = access
        self._free_bytes_max = free_bytes_max
        self._free: dict[int, list[kvferry.Region]] = {}
        self._free_bytes = 0
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> kvferry.Region:
        with self._lock:
            free = self._free.get(nbytes)
            if free:
                self._free_bytes -= nbytes
                return free.pop()
        return self._agent.allocate(nbytes, self._access)

    def give(self, region: kvferry.Region) -> None:
        """Nothing may copy from or to it any more. Where too much is free, other lengths are given up."""
        surplus: list[kvferry.Region] = []
        with self._lock:
            if self._free_bytes + region.nbytes > self._free_bytes_max:
                surplus = [one for free in self._free.values() for one in free]
                self._free.clear()
                self._free_bytes = 0
            self._free.setdefault(region.nbytes, []).append(region)
            self._free_bytes += region.nbytes
        if surplus:
            self._agent.unregister_batch(surplus)


class Extents:
    """Which ranges are free, of an arena or of numbered slots."""

    def __init__(self, begin: int, end: int, *, align: int = ALIGN) -> None:
        self._free = [(begin, end)]
        self._align = align

    def take(self, nbytes: int) -> tuple[int, int] | None:
        nbytes = -(-nbytes // self._align) * self._align
        for at, (begin, end) in enumerate(self._free):
            if end - begin >= nbytes:
                self._free[at : at + 1] = [(begin + nbytes, end)] if end - begin > nbytes else []
                return begin, begin + nbytes
        return None

    def give(self, extent: tuple[int, int]) -> None:
        merged: list[tuple[int, int]] = []
        for begin, end in sorted([*self._free, extent]):
            if merged and merged[-1][1] == begin:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((begin, end))
        self._free = merged

    @property
    def free_bytes(self) -> int:
        return sum(end - begin for begin, end in self._free)
