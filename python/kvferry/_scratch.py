"""Memory of an agent that is used again, by its length. Registering memory takes longer than filling it."""

from __future__ import annotations

import threading

import kvferry


class Scratch:
    """Any thread may call it. It ends with the agent."""

    def __init__(self, agent: kvferry.Agent, free_bytes_max: int = 256 << 20) -> None:
        self._agent = agent
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
        return self._agent.allocate(nbytes, "none")

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
