"""NIXL with its UCX backend, and kvferry's `nixl` in its place. Which lanes UCX may use is said by UCX_TLS."""

from __future__ import annotations

import base64
import importlib
import time
import uuid
from typing import Any

import numpy as np

from kvferry_peers.engine import Engine, Table, TransferError


class NixlEngine(Engine):
    def __init__(self, *, progress_thread: bool, module: str = "nixl_cu12._api") -> None:
        api = importlib.import_module(module)
        config = api.nixl_agent_config(enable_prog_thread=progress_thread, backends=["UCX"])
        self._agent = api.nixl_agent(str(uuid.uuid4()), config)
        self._other, self._base = b"", 0
        self._lists: list[Any] = []
        self._handles: list[Any] = []
        self._ends: list[tuple[Any, Any]] = []
        self._operation = ""

    def register(self) -> Any:
        self._agent.register_memory([(self.memory.address, self.memory.nbytes, 0, "")], "DRAM")
        metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()
        return {"metadata": metadata, "address": self.memory.address}

    def connect(self, other: Any) -> None:
        self._other = self._agent.add_remote_agent(base64.b64decode(other["metadata"]))
        self._base = other["address"]

    def plan(self, op: str, batches: list[Table]) -> None:
        """Handles that are posted again and again: less than an engine has to do, whose block tables change."""
        for handle in self._handles:
            self._agent.release_xfer_handle(handle)
        for prepared in self._lists:
            self._agent.release_dlist_handle(prepared)
        self._handles, self._lists, self._ends, self._operation = [], [], [], op.upper()
        for here, there, lengths in batches:
            ours = [(self.memory.address + at, length, 0) for at, length in zip(here, lengths, strict=True)]
            theirs = [(self._base + at, length, 0) for at, length in zip(there, lengths, strict=True)]
            self._ends.append((ours, theirs))
            ends = (
                self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", ours, "DRAM"),
                self._agent.prep_xfer_dlist(self._other, theirs, "DRAM"),
            )
            order = list(range(len(lengths)))
            self._handles.append(self._agent.make_prepped_xfer(op.upper(), ends[0], order, ends[1], order))
            self._lists.extend(ends)

    def move(self, batch: int) -> None:
        self._move(self._handles[batch])

    def call_unprepared(self, batches: int, calls: int, limit: float) -> list[float]:
        """As `call`, for a caller that has nothing but tuples: each call makes the lists and the transfer anew."""
        prepared, self._handles = self._handles, [None] * batches
        self.move, before = self._move_new, self.move  # type: ignore[method-assign]
        try:
            return self.call(batches, calls, limit)
        finally:
            self.move, self._handles = before, prepared  # type: ignore[method-assign]

    def post(self, calls: int) -> list[float]:
        """Seconds that making and posting a transfer takes its caller, with prepared lists and arrays of numbers."""
        agent, ends = self._agent, self._lists
        order = np.arange(len(self._ends[0][0]), dtype=np.int32)
        times = []
        for _ in range(calls):
            started = time.perf_counter()
            handle = agent.make_prepped_xfer(self._operation, ends[0], order, ends[1], order)
            state = agent.transfer(handle)
            times.append(time.perf_counter() - started)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            agent.release_xfer_handle(handle)
        return times

    def _move_new(self, batch: int) -> None:
        agent = self._agent
        ours, theirs = (agent.get_xfer_descs(end, "DRAM") for end in self._ends[batch])
        handle = agent.initialize_xfer(self._operation, ours, theirs, self._other)
        self._move(handle)
        agent.release_xfer_handle(handle)

    def _move(self, handle: Any) -> None:
        check = self._agent.check_xfer_state
        state = self._agent.transfer(handle)
        while state == "PROC":
            state = check(handle)
        if state != "DONE":
            raise TransferError(f"the transfer ended as {state}")

    def move_all(self, callers: int) -> int:
        """An agent is one thread's: several callers are several transfers in flight."""
        check, failed, waiting = self._agent.check_xfer_state, 0, list(self._handles)
        while waiting:
            going = [(handle, self._agent.transfer(handle)) for handle in waiting[:callers]]
            waiting = waiting[callers:]
            while going:
                failed += sum(state not in ("DONE", "PROC") for _, state in going)
                going = [(handle, check(handle)) for handle, state in going if state == "PROC"]
        return failed
