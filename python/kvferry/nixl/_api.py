"""``nixl._api``: the agent, its configuration, its transfers and notifications."""

from __future__ import annotations

import os
import time
from typing import Any, Final, TypeAlias

import kvferry
from kvferry.nixl import _descs
from kvferry.nixl._bindings import (
    DEFAULT_COMM_PORT,
    nixl_mem_t,
    nixl_thread_sync_t,
    nixlXferDList,
    nixlXferTelemetry,
)
from kvferry.nixl._core import text
from kvferry.nixl._errors import (
    GONE,
    as_nixl,
    nixlBackendError,
    nixlInvalidParamError,
    nixlNoTelemetryError,
    nixlNotSupportedError,
    translated,
)
from kvferry.nixl._exchange import Exchange
from kvferry.nixl._memory import Array
from kvferry.nixl._transfers import (
    NOTIFICATION,
    Plan,
    Ranges,
    columns,
    file_areas,
    indices,
    nixl_prepped_dlist_handle,
    nixl_xfer_handle,
)

__all__ = [
    "DEFAULT_COMM_PORT",
    "nixl_agent",
    "nixl_agent_config",
    "nixl_backend_handle",
    "nixl_prepped_dlist_handle",
    "nixl_thread_sync_t",
    "nixl_xfer_handle",
]

nixl_backend_handle = int
_Name: TypeAlias = str | bytes
_Names: TypeAlias = list[str] | tuple[()]
_WRITES: Final = {"WRITE": True, "READ": False}
# Notifications to one agent whose arrival is not confirmed.
_NOTIFYING_MAX: Final = 1024
# A notification usually arrives within this time, and then the next one can't overtake it.
_NOTIFY_S: Final = 0.05
_WHOLE: Final = slice(None)


class nixl_agent_config:  # noqa: N801 - NIXL's names
    """NIXL's settings. `enable_prog_thread`, `num_threads` and `sync_mode` have no effect."""

    def __init__(
        self,
        enable_prog_thread: bool = True,
        enable_listen_thread: bool = False,
        listen_port: int = DEFAULT_COMM_PORT,
        capture_telemetry: bool = False,
        num_threads: int = 0,
        backends: list[str] | None = None,
        sync_mode: nixl_thread_sync_t | None = None,
    ) -> None:
        if sync_mode is not None and not isinstance(sync_mode, nixl_thread_sync_t):
            raise TypeError(f"sync_mode must be a nixl_thread_sync_t, not {type(sync_mode).__name__}")
        self.enable_pthread = enable_prog_thread
        self.enable_listen = enable_listen_thread
        self.port = listen_port
        self.capture_telemetry = capture_telemetry
        self.num_threads = num_threads
        self.backends = ["UCX"] if backends is None else backends
        self.sync_mode = sync_mode


def _message(message: _Name) -> bytes:
    if isinstance(message, str):
        return message.encode()
    if isinstance(message, (bytes, bytearray, memoryview)):
        return bytes(message)
    raise TypeError(f"a notification must be bytes or str, not {type(message).__name__}")


class nixl_agent(Exchange):  # noqa: N801
    """NIXL's agent on a kvferry agent. All methods may be called from any thread."""

    def __init__(
        self, agent_name: str, nixl_conf: nixl_agent_config | None = None, instantiate_all: bool = False
    ) -> None:
        config = nixl_conf or nixl_agent_config()
        wanted = None if instantiate_all and nixl_conf is None else config.backends
        super().__init__(agent_name, wanted, config.port if config.enable_listen else None)
        self.notifs: dict[str, list[bytes]] = {}
        # The environment prevails over the configuration, as in NIXL.
        asked = os.environ.get("NIXL_TELEMETRY_ENABLE", "").lower()
        self._telemetry = asked in ("y", "yes", "1", "on", "true") if asked else config.capture_telemetry

    def prep_xfer_dlist(
        self, agent_name: _Name, xfer_list: Any, mem_type: str | None = None, backends: _Names = ()
    ) -> nixl_prepped_dlist_handle:
        """A checked list of descriptors, of which transfers take some by their positions.

        `agent_name`: "NIXL_INIT_AGENT" or "" for the initiator's side; a remote agent, or this agent itself, for the
        other side. Besides lists for transfers it takes N x 5 arrays `(address, length, device, stride, count)`.
        """
        self._handles(backends)
        name = text(agent_name)
        is_local = name in ("", "NIXL_INIT_AGENT")
        if _descs.is_strided(xfer_list):
            if mem_type is None:
                raise ValueError("strided descriptors need a memory type")
            kind, rows = _descs.MEMS[mem_type], _descs.written_out(xfer_list)
        else:
            found = _descs.xfer_descs(xfer_list, mem_type)
            if found is None:
                raise TypeError("expected a list of memory for transfers")
            kind, rows = found.getType(), found.rows
        ranges = self._ranges(None if is_local else name, kind, rows)
        return nixl_prepped_dlist_handle(self, ranges, is_local)

    def _ranges(self, name: str | None, kind: nixl_mem_t, rows: Array) -> Ranges:
        """Ranges of this agent's memory (`name` is None or its own) or of a remote agent's."""
        here, lengths = columns(rows)
        with self._lock:
            if name is not None and name != self.name:
                remote = self._remote(name)
                if kind not in (nixl_mem_t.DRAM_SEG, nixl_mem_t.VRAM_SEG):
                    raise nixlNotSupportedError(f"kvferry's nixl reaches memory of remote agents, not {kind.name}")
                areas = remote.areas
                return Ranges(remote, kind, here, lengths, areas.find(here, lengths, remote.name), areas.list)
            if kind is nixl_mem_t.FILE_SEG:
                listed, which = file_areas(rows, self._local.files)
                return Ranges(None, kind, here, lengths, which, listed)
            areas = self._local.areas
        return Ranges(None, kind, here, lengths, areas.find(here, lengths, "this agent"), areas.list)

    def _prepped(self, handle: Any, is_local: bool) -> Ranges:
        if not isinstance(handle, nixl_prepped_dlist_handle):
            raise TypeError(f"expected a prepared list, not {type(handle).__name__}")
        if handle._agent is not self or handle._released:
            raise nixlInvalidParamError("the prepared list is another agent's, or was released")
        if handle._is_local is not is_local:
            side = "initiator's" if is_local else "other"
            raise nixlInvalidParamError(f"the prepared list is not one of the {side} side")
        return handle._ranges

    def make_prepped_xfer(
        self,
        operation: str,
        local_xfer_side: nixl_prepped_dlist_handle,
        local_indices: Any,
        remote_xfer_side: nixl_prepped_dlist_handle,
        remote_indices: Any,
        notif_msg: _Name = b"",
        backends: _Names = (),
        skip_desc_merge: bool = False,
    ) -> nixl_xfer_handle:
        """A transfer between descriptors of prepared lists. Neighbours in memory become one descriptor."""
        write = _WRITES[operation]
        self._handles(backends)
        local, other = self._prepped(local_xfer_side, True), self._prepped(remote_xfer_side, False)
        mine, theirs = indices(local_indices, local), indices(remote_indices, other)
        return self._made(write, Plan(local, mine, other, theirs, not skip_desc_merge), notif_msg)

    def initialize_xfer(
        self,
        operation: str,
        local_descs: nixlXferDList,
        remote_descs: nixlXferDList,
        remote_agent: _Name,
        notif_msg: _Name = b"",
        backends: _Names = (),
    ) -> nixl_xfer_handle:
        """A transfer between two lists. Nothing is merged."""
        write = _WRITES[operation]
        self._handles(backends)
        for descs in (local_descs, remote_descs):
            if not isinstance(descs, nixlXferDList):
                raise TypeError(f"expected a nixlXferDList, not {type(descs).__name__}")
        local = self._ranges(None, local_descs.getType(), local_descs.rows)
        other = self._ranges(text(remote_agent), remote_descs.getType(), remote_descs.rows)
        return self._made(write, Plan(local, _WHOLE, other, _WHOLE, merge=False), notif_msg)

    def _made(self, write: bool, plan: Plan, notif_msg: _Name) -> nixl_xfer_handle:
        message = _message(notif_msg)
        if plan.is_file and message:
            raise nixlNotSupportedError("transfers with files carry no notifications")
        self._must_be_usable(plan)
        return nixl_xfer_handle(self, write, plan, message)

    def _mine(self, handle: Any) -> nixl_xfer_handle:
        if not isinstance(handle, nixl_xfer_handle):
            raise TypeError(f"expected a transfer, not {type(handle).__name__}")
        if handle._agent is not self:
            raise nixlInvalidParamError("the transfer is another agent's")
        return handle

    def transfer(self, handle: nixl_xfer_handle, notif_msg: _Name = b"") -> str:
        """Starts a transfer, or starts it again after its end: "PROC", "DONE" or "ERR"."""
        return self._mine(handle)._post(_message(notif_msg))

    def check_xfer_state(self, handle: nixl_xfer_handle) -> str:
        """ "PROC", "DONE" or "ERR", whose reason is in `handle.error`.

        A loop that asks again at once waits in here for the outcome, 0.2 ms at most each time.
        """
        return self._mine(handle)._check()

    def get_xfer_telemetry(self, handle: nixl_xfer_handle) -> nixlXferTelemetry:
        mine = self._mine(handle)
        if not self._telemetry:
            raise nixlNoTelemetryError("the agent was made without capture_telemetry")
        return mine._telemetry()

    def query_xfer_backend(self, handle: nixl_xfer_handle) -> str:
        return "POSIX" if self._mine(handle)._plan.is_file else "UCX"

    def estimate_xfer_cost(self, req_handle: nixl_xfer_handle) -> tuple[int, int, str]:
        raise nixlNotSupportedError("kvferry does not estimate the cost of transfers")

    def release_xfer_handle(self, handle: nixl_xfer_handle) -> None:
        """Gives a transfer up, and cancels it if it runs. See `nixl_xfer_handle.release`."""
        self._mine(handle).release()

    def release_dlist_handle(self, handle: nixl_prepped_dlist_handle) -> None:
        if not isinstance(handle, nixl_prepped_dlist_handle) or handle._agent is not self:
            raise nixlInvalidParamError("expected a prepared list of this agent")
        handle.release()

    def prep_mem_view(self, dlist: Any, *, backends: list[str] | None = None) -> int:
        raise nixlNotSupportedError("memory views are for device memory")

    def release_mem_view(self, mvh: int) -> None:
        raise nixlNotSupportedError("memory views are for device memory")

    def send_notif(self, remote_agent_name: _Name, notif_msg: _Name, backend: str | None = None) -> None:
        """Sends a notification. Does not wait for an agent that does not answer; raises if it is found to be gone."""
        self._handles([] if backend is None else [backend])
        message = _message(notif_msg)
        if not message:
            raise nixlInvalidParamError("a notification has at least one byte")
        with self._lock:
            remote = self._remote(remote_agent_name)
        peer = self._peer(remote)
        with self._lock:
            before = remote.notifying
            if len(before) >= _NOTIFYING_MAX:
                before[:] = [job for job in before if _outcome(job, 0) is None]
            if len(before) >= _NOTIFYING_MAX:
                raise nixlBackendError(f"agent {remote.name!r} does not take {_NOTIFYING_MAX} notifications")
            # One that does not answer is not waited for again.
            limit = 0.0 if before else _NOTIFY_S
            with as_nixl():
                before.append(peer.write_async(kvferry.Batch(), notify=(NOTIFICATION, message), streams=1))
            waiting = list(before)
        until = time.monotonic() + limit
        for job in waiting:
            ended = _outcome(job, max(until - time.monotonic(), 0))
            if ended is None:
                return
            with self._lock:
                if job in before:
                    before.remove(job)
            if isinstance(ended, kvferry.Error):
                remote.lost |= isinstance(ended, GONE)
                raise translated(ended) from ended

    def get_new_notifs(self, backends: _Names = ()) -> dict[str, list[bytes]]:
        """Takes the notifications that have arrived, by their senders."""
        self._handles(backends)
        found: dict[str, list[bytes]] = {}
        with as_nixl():
            arrived = self._core().notifications()
        for notification in arrived:
            found.setdefault(notification.sender, []).append(notification.message)
        return found

    def update_notifs(self, backends: _Names = ()) -> dict[str, list[bytes]]:
        """All notifications that `check_remote_xfer_done` has not taken, with the new ones."""
        new = self.get_new_notifs(backends)
        with self._lock:
            for sender, messages in new.items():
                self.notifs.setdefault(sender, []).extend(messages)
        return self.notifs

    def check_remote_xfer_done(
        self, remote_agent_name: _Name, lookup_tag: _Name, backends: _Names = (), tag_is_prefix: bool = True
    ) -> bool:
        """Takes a notification that starts with the tag, or contains it. False if there is none."""
        tag = _message(lookup_tag)
        self.update_notifs(backends)
        with self._lock:
            held = self.notifs.get(text(remote_agent_name), [])
            for at, message in enumerate(held):
                if message.startswith(tag) if tag_is_prefix else tag in message:
                    del held[at]
                    return True
        return False


def _outcome(job: kvferry.Transfer, limit_s: float) -> object:
    """The result or the error of a transfer, or None if it has neither in time."""
    try:
        return job.wait(limit_s)
    except kvferry.Error as error:
        return error
