"""NIXL with its POSIX plug-in: memory to files and back."""

from __future__ import annotations

import os
import threading
import time
import uuid
from typing import Any

from nixl_cu12._api import nixl_agent, nixl_agent_config

from kvferry_peers.memory import Memory

# The plug-in takes no more operations in one transfer.
OPERATIONS_MAX = 65536


class Mover:
    """One submitting thread: an agent is one thread's."""

    def __init__(self, queue: str, nbytes: int) -> None:
        self._agent = nixl_agent(str(uuid.uuid4()), nixl_agent_config(enable_prog_thread=False, backends=[]))
        parameters = {"use_aio": str(queue == "aio").lower(), "use_uring": str(queue == "uring").lower()}
        self._agent.create_backend("POSIX", parameters)
        self.memory = Memory(nbytes, huge=True)
        self._agent.register_memory([(self.memory.address, nbytes, 0, "")], "DRAM")
        self._handle: Any = None

    def plan(self, op: str, fd: int, file_bytes: int, block: int, places: int, blocks: list[int]) -> Any:
        """Made outside the measured time: less than a caller has to do whose blocks change."""
        agent, base = self._agent, self.memory.address
        file = agent.register_memory([(0, file_bytes, fd, "")], "FILE")
        ours = [(base + at % places * block, block, 0) for at in range(len(blocks))]
        theirs = [(number * block, block, fd) for number in blocks]
        self._handle = agent.initialize_xfer(
            op.upper(), agent.get_xfer_descs(ours, "DRAM"), agent.get_xfer_descs(theirs, "FILE"), agent.name
        )
        return file

    def move(self) -> None:
        state = self._agent.transfer(self._handle)
        while state == "PROC":
            state = self._agent.check_xfer_state(self._handle)
        if state != "DONE":
            raise RuntimeError(f"the transfer ended as {state}")

    def forget(self, file: Any) -> None:
        self._agent.release_xfer_handle(self._handle)
        self._agent.deregister_memory(file)


class NixlFiles:
    def __init__(self, queue: str) -> None:
        self._queue = queue
        self._movers: list[Mover] = []

    def open(self, threads: int, nbytes: int) -> None:
        self._movers = [Mover(self._queue, nbytes) for _ in range(threads)]

    def run(self, op: str, path: str, direct: bool, block: int, places: int, blocks: list[list[int]]) -> float:
        """Seconds from the first thread's start to the last one's end."""
        fd = os.open(path, os.O_RDWR | (os.O_DIRECT if direct else 0))
        movers = self._movers[: len(blocks)]
        times: list[tuple[float, float]] = []
        failures: list[BaseException] = []
        start = threading.Barrier(len(blocks))

        def work(mover: Mover) -> None:
            start.wait()
            began = time.perf_counter()
            try:
                mover.move()
            except Exception as error:
                failures.append(error)
            times.append((began, time.perf_counter()))

        try:
            size = os.fstat(fd).st_size
            files = [
                mover.plan(op, fd, size, block, places, numbers[:OPERATIONS_MAX])
                for mover, numbers in zip(movers, blocks, strict=True)
            ]
            threads = [threading.Thread(target=work, args=(mover,)) for mover in movers]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for mover, file in zip(movers, files, strict=True):
                mover.forget(file)
        finally:
            os.close(fd)
        if failures:
            raise failures[0]
        return max(end for _, end in times) - min(began for began, _ in times)
