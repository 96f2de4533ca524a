"""Mooncake's transfer engine over TCP, called as vLLM's connector calls it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mooncake.engine import TransferEngine

from kvferry_peers.engine import Engine, Table, TransferError


class MooncakeEngine(Engine):
    def __init__(self) -> None:
        self._engine = TransferEngine()
        if self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
            raise TransferError("initialize failed")
        self._session, self._base = "", 0
        self._batches: list[tuple[Any, list[int], list[int], list[int]]] = []
        self._pool: ThreadPoolExecutor | None = None

    def register(self) -> Any:
        if self._engine.register_memory(self.memory.address, self.memory.nbytes):
            raise TransferError("register_memory failed")
        return {"session": f"127.0.0.1:{self._engine.get_rpc_port()}", "address": self.memory.address}

    def connect(self, other: Any) -> None:
        self._session, self._base = other["session"], other["address"]

    def plan(self, op: str, batches: list[Table]) -> None:
        write, read = self._engine.batch_transfer_sync_write, self._engine.batch_transfer_sync_read
        move = write if op == "write" else read
        self._batches = [
            (move, [self.memory.address + at for at in here], [self._base + at for at in there], lengths)
            for here, there, lengths in batches
        ]

    def move(self, batch: int) -> None:
        call, here, there, lengths = self._batches[batch]
        returned = call(self._session, here, there, lengths)
        if returned:
            raise TransferError(f"the call returned {returned}")

    def _failed(self, batch: int) -> int:
        try:
            self.move(batch)
        except TransferError:
            return 1
        return 0

    def move_all(self, callers: int) -> int:
        """Threads, as vLLM's sender pool has: the call releases the interpreter's lock."""
        if callers == 1:
            return sum(map(self._failed, range(len(self._batches))))
        self._pool = self._pool or ThreadPoolExecutor(callers)
        return sum(self._pool.map(self._failed, range(len(self._batches))))
