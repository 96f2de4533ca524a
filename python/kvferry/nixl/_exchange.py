"""What agents tell each other about themselves: metadata, direct and by the listener."""

from __future__ import annotations

import contextlib
import os
import struct
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

import kvferry
from kvferry._engine.log import logger_of
from kvferry.nixl import _listener
from kvferry.nixl._bindings import DEFAULT_COMM_PORT, nixlRegDList, nixlXferDList
from kvferry.nixl._core import AgentCore, text
from kvferry.nixl._errors import (
    as_nixl,
    nixlBackendError,
    nixlInvalidParamError,
    nixlMismatchError,
    nixlNotAllowedError,
    nixlNotFoundError,
    nixlNotSupportedError,
)
from kvferry.nixl._memory import Area, Remote
from kvferry.nixl._metadata import Metadata, RemoteMemory
from kvferry.nixl._transfers import CANCEL_S

_log = logger_of("nixl")
_Name: TypeAlias = str | bytes
# Remote agents, and their regions, beyond which the listener takes no more. The caller's own `add_remote_agent` does.
_REMOTES_MAX, _REGIONS_MAX = 1 << 12, 1 << 18


class Exchange(AgentCore):
    """The metadata of an agent and of those that it knows."""

    def __init__(self, name: str, wanted: list[str] | None, listen_port: int | None) -> None:
        self._listener: _listener.Listener | None = None
        self._closes_listener: Callable[[], object] = lambda: None
        super().__init__(name, wanted)
        if listen_port is None:
            return
        if os.environ.get("KVFERRY_LISTEN"):
            # The variable says where the agent listens, whatever backends it gets.
            agent = self._core()
            self._listen(agent.local_address[0], listen_port)
        else:
            # A backend may come later where there is none yet.
            self._listen(self._host_of_backends() if self.backends else "0.0.0.0", listen_port)

    def _listen(self, host: str, port: int) -> None:
        # The listener's thread does not keep the agent alive.
        weak = weakref.WeakMethod(self._answer)

        def answer(operation: int, body: bytes) -> bytes:
            alive = weak()
            if alive is None:
                raise ConnectionError("the agent has ended")
            return alive(operation, body)

        with as_nixl():
            self._listener = _listener.Listener(host, port, answer)
        closes = weakref.finalize(self, self._listener.close)
        closes.atexit = False
        self._closes_listener = closes

    def _move_listener(self, host: str) -> None:
        """Has the metadata listener on another interface, at the same port. The caller holds the lock.

        If that fails, the listener is where it was. If something else has that place by then, too, there is none until
        the next call, which tries again.
        """
        before = self._listener
        if before is None or (before.host == host and not before.closed):
            return
        # One socket at a time: all interfaces and one of them can't have the same port.
        self._closes_listener()
        try:
            self._listen(host, before.port)
        except Exception:
            if before.host != host:
                with contextlib.suppress(Exception):
                    self._listen(before.host, before.port)
            raise

    def _started(self, agent: kvferry.Agent) -> None:
        self._move_listener(agent.local_address[0])

    def create_backend(self, backend: str, initParams: dict[str, str] | None = None) -> None:  # noqa: N803
        """Makes a backend. If the metadata listener can't be where the agent is going to listen, there is none."""
        self._must_not_be_forked()
        with self._lock:
            if self._shut_down:
                raise nixlBackendError("the agent was shut down")
            super().create_backend(backend, initParams)
            # An agent that has started stays where it is.
            if self._listener is not None and self._agent is None:
                try:
                    self._move_listener(self._host_of_backends())
                except Exception:
                    self._remove_backend(backend)
                    raise

    def _forked(self) -> None:
        super()._forked()
        if self._listener is not None:
            self._listener.forked()

    def shutdown(self) -> None:
        super().shutdown()
        # No call opens it anew now.
        self._closes_listener()

    def get_agent_metadata(self) -> bytes:
        """What another agent needs to reach this one's memory."""
        with self._lock:
            return self._metadata(list(self._local.memory.values()), True)

    def get_partial_agent_metadata(
        self, descs: nixlRegDList, inc_conn_info: bool = False, backends: list[str] | tuple[()] = ()
    ) -> bytes:
        """The same for some of the memory, with or without the agent's address."""
        self._handles(backends)
        found = self._reg_list(descs, None)
        with self._lock:
            areas = [self._local.find(found.getType(), *desc[:3]) for desc in found]
            return self._metadata(areas, inc_conn_info)

    def _metadata(self, areas: list[Area], connection: bool) -> bytes:
        agent = self._core()
        regions = [
            RemoteMemory(area.addr, area.length, area.device, area.remote.to_bytes())
            for area in areas
            if area.file is None
        ]
        address = agent.address if connection else None
        return Metadata(self.name, agent.incarnation, address, regions).to_bytes()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        """Makes a remote agent known, or more of its memory. A restarted one replaces the one that is gone."""
        found = Metadata.from_bytes(metadata)
        if found.name == self.name:
            raise nixlInvalidParamError(f"{self.name!r} is this agent's own name")
        self._core()
        while not self._add(found):
            # A thread has added or removed it meanwhile.
            continue
        return found.name.encode()

    def _add(self, found: Metadata) -> bool:
        with self._lock:
            known = self._remotes.get(found.name)
        is_same = known is not None and known.incarnation == found.incarnation
        if known is not None and not is_same:
            if known.answers():
                raise nixlNotAllowedError(f"another agent {found.name!r} is known, and answers; remove it first")
            _log.info("agent %s was restarted", found.name)
        with self._lock, as_nixl():
            if self._remotes.get(found.name) is not known:
                return False
            remote = known if known is not None and is_same else Remote(found.name, found.incarnation)
            try:
                remote.update(self._core(), found)
            except kvferry.Error as error:
                raise nixlMismatchError(f"malformed metadata: {error}") from error
            self._remotes[found.name] = remote
        return True

    def remove_remote_agent(self, agent: _Name) -> None:
        """Forgets a remote agent and disconnects from it. Its transfers are cancelled."""
        with self._lock:
            remote = self._remote(agent)
            del self._remotes[remote.name]
            running = [handle for handle in self._running if handle._plan.remote is remote]
        for handle in running:
            handle._cancel(CANCEL_S)
        if remote.peer is not None:
            with as_nixl():
                remote.peer.disconnect()

    def check_remote_metadata(self, agent: _Name, descs: nixlXferDList | None = None) -> bool:
        """Whether a remote agent is known and not found to be gone, and has registered these ranges."""
        with self._lock:
            remote = self._remotes.get(text(agent))
        if remote is None or remote.lost:
            return False
        if descs is None or descs.isEmpty():
            return True
        try:
            remote.areas.find(descs.rows[:, 0], descs.rows[:, 1], remote.name)
        except nixlNotFoundError:
            return False
        return True

    def make_connection(self, remote_agent: _Name, backends: list[str] | tuple[()] = ()) -> None:
        """Connects now instead of at the first transfer."""
        self._handles(backends)
        with self._lock:
            remote = self._remote(remote_agent)
        with as_nixl():
            self._peer(remote).connect()

    def send_local_metadata(self, ip_addr: str = "", port: int = DEFAULT_COMM_PORT) -> None:
        """Sends the metadata to another agent's listener, in the background."""
        self._exchange("sending metadata", ip_addr, port, _listener.SEND, self.get_agent_metadata())

    def send_partial_agent_metadata(
        self,
        descs: nixlRegDList,
        inc_conn_info: bool = False,
        backends: list[str] | tuple[()] = (),
        ip_addr: str = "",
        port: int = DEFAULT_COMM_PORT,
        label: str = "",
    ) -> None:
        metadata = self.get_partial_agent_metadata(descs, inc_conn_info, backends)
        self._exchange("sending metadata", ip_addr, port, _listener.SEND, metadata)

    def fetch_remote_metadata(
        self, remote_agent: _Name, ip_addr: str = "", port: int = DEFAULT_COMM_PORT, label: str = ""
    ) -> None:
        """Asks another agent's listener for its metadata, in the background. See `check_remote_metadata`."""
        name = text(remote_agent)

        def add(blob: bytes) -> None:
            found = Metadata.from_bytes(blob).name
            if found != name:
                raise nixlMismatchError(f"the agent there is {found!r}, not {name!r}")
            self.add_remote_agent(blob)

        self._exchange(f"metadata of {name}", ip_addr, port, _listener.FETCH, b"", add)

    def invalidate_local_metadata(self, ip_addr: str = "", port: int = DEFAULT_COMM_PORT) -> None:
        """Has another agent forget this one, in the background."""
        with self._lock:
            mine = self._metadata([], False)
        self._exchange("invalidating metadata", ip_addr, port, _listener.INVALIDATE, mine)

    def _exchange(
        self, what: str, host: str, port: int, operation: int, body: bytes, then: Any = lambda _: None
    ) -> None:
        if not host:
            raise nixlNotSupportedError("kvferry has no central metadata server; give the other agent's address")
        _listener.in_background(what, host, port, operation, body, then)

    def _answer(self, operation: int, body: bytes) -> bytes:
        if operation == _listener.FETCH:
            return self.get_agent_metadata()
        if operation == _listener.SEND:
            self._check_room(Metadata.from_bytes(body))
            self.add_remote_agent(body)
        elif operation == _listener.INVALIDATE:
            gone = Metadata.from_bytes(body)
            with self._lock:
                known = self._remotes.get(gone.name)
            # Its incarnation shows that the agent itself asks, or one that it gave its metadata to.
            if known is not None and known.incarnation == gone.incarnation:
                self.remove_remote_agent(gone.name)
        return b""

    def _check_room(self, found: Metadata) -> None:
        """The listener takes metadata from all who reach it, and the names in it may be made up."""
        with self._lock:
            known = {name: len(remote.areas.list) for name, remote in self._remotes.items()}
        regions = sum(known.values()) + len(found.regions)
        if len(known.keys() | {found.name}) > _REMOTES_MAX or regions > _REGIONS_MAX:
            raise nixlNotAllowedError(
                f"metadata of agent {found.name!r} was refused: {len(known)} agents are known, and the listener takes "
                f"{_REMOTES_MAX} with {_REGIONS_MAX} regions at most; remove agents"
            )

    def get_serialized_descs(self, descs: nixlXferDList | nixlRegDList) -> bytes:
        """A descriptor list as bytes, which `deserialize_descs` reads without running anything."""
        metas = "\0".join(descs.metas).encode() if isinstance(descs, nixlRegDList) else b""
        head = struct.pack("<BBI", isinstance(descs, nixlRegDList), descs.getType(), len(descs))
        return head + descs.rows.tobytes() + metas

    def deserialize_descs(self, serialized_descs: bytes) -> nixlXferDList | nixlRegDList:
        try:
            is_reg, kind, count = struct.unpack_from("<BBI", serialized_descs)
            rows = np.frombuffer(serialized_descs, dtype=np.uint64, count=3 * count, offset=6).reshape(count, 3)
            if not is_reg:
                return nixlXferDList(kind, rows)
            metas = bytes(serialized_descs[6 + 24 * count :]).decode().split("\0") if count else []
            return nixlRegDList(kind, [(*row, meta) for row, meta in zip(rows.tolist(), metas, strict=True)])
        except (struct.error, ValueError, TypeError) as error:
            raise nixlMismatchError(f"not a serialized descriptor list: {error}") from error
