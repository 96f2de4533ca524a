"""NIXL with its UCX backend. Which lanes UCX may use is said by UCX_TLS."""

from __future__ import annotations

import base64
import uuid
from typing import Any

from nixl_cu12._api import nixl_agent, nixl_agent_config

from kvferry_peers.engine import Engine, Table, TransferError


class NixlEngine(Engine):
    def __init__(self, *, progress_thread: bool) -> None:
        config = nixl_agent_config(enable_prog_thread=progress_thread, backends=["UCX"])
        self._agent = nixl_agent(str(uuid.uuid4()), config)
        self._other, self._base = b"", 0
        self._lists: list[Any] = []
        self._handles: list[Any] = []

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
        self._handles, self._lists = [], []
        for here, there, lengths in batches:
            ours = [(self.memory.address + at, length, 0) for at, length in zip(here, lengths, strict=True)]
            theirs = [(self._base + at, length, 0) for at, length in zip(there, lengths, strict=True)]
            ends = (
                self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", ours, "DRAM"),
                self._agent.prep_xfer_dlist(self._other, theirs, "DRAM"),
            )
            order = list(range(len(lengths)))
            self._handles.append(self._agent.make_prepped_xfer(op.upper(), ends[0], order, ends[1], order))
            self._lists.extend(ends)

    def move(self, batch: int) -> None:
        handle, check = self._handles[batch], self._agent.check_xfer_state
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
