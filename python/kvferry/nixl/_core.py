"""The kvferry agent behind NIXL's: its start, its memory, what runs on it."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from typing import Any, Final, Literal

import kvferry
from kvferry.nixl import _descs
from kvferry.nixl._backends import Backends, file_facts
from kvferry.nixl._bindings import nixl_mem_t, nixlRegDList, nixlRemoteDList, nixlXferDList
from kvferry.nixl._errors import (
    as_nixl,
    nixlBackendError,
    nixlInvalidParamError,
    nixlNotFoundError,
    nixlNotSupportedError,
    nixlRemoteDisconnectError,
    translated,
)
from kvferry.nixl._memory import Area, Local, Remote, close
from kvferry.nixl._transfers import CANCEL_S, Plan, nixl_xfer_handle

# NIXL's transfers have no limit of time, and engines have their own. An agent that dies is noticed within seconds.
TIMEOUT_S: Final = 120.0

_agents: weakref.WeakSet[AgentCore] = weakref.WeakSet()


def _forked() -> None:
    for agent in list(_agents):
        agent._forked()


os.register_at_fork(after_in_child=_forked)


def text(name: str | bytes) -> str:
    """An agent's name, as `add_remote_agent` returned it or as text."""
    if isinstance(name, bytes):
        return name.decode()
    if isinstance(name, str):
        return name
    raise TypeError(f"an agent's name must be str or bytes, not {type(name).__name__}")


def order_of_environment() -> int | Literal["host"]:
    """What transfers of memory of GPUs come after: NIXL's calls have no argument for it."""
    orders: dict[str, int | Literal["host"]] = {"host": "host", "default-stream": 0}
    named = os.environ.get("KVFERRY_NIXL_AFTER") or "host"
    if named not in orders:
        raise nixlInvalidParamError(f"KVFERRY_NIXL_AFTER is host or default-stream, not {named!r}")
    return orders[named]


def has_ended(job: kvferry.Transfer) -> bool:
    """Whether a cancelled transfer has ended, after waiting for it a moment."""
    try:
        return job.wait(CANCEL_S) is not None
    except kvferry.Error:
        return True


class AgentCore(Backends):
    """State of an agent, and its memory. Nothing that a peer could delay happens under `_lock`."""

    def __init__(self, name: str, wanted: list[str] | None) -> None:
        if not name:
            raise ValueError("an agent needs a name")
        self._lock = threading.RLock()
        self._agent: kvferry.Agent | None = None
        self._is_forked = False
        self._shut_down = False
        super().__init__(wanted)
        self.name = name
        self._after = order_of_environment()
        self._local = Local()
        self._remotes: dict[str, Remote] = {}
        self._running: weakref.WeakSet[nixl_xfer_handle] = weakref.WeakSet()
        # Transfers that still run, whose handles the caller dropped.
        self._left: list[tuple[Plan, kvferry.Transfer]] = []
        _agents.add(self)

    def _forked(self) -> None:
        """In a forked child, where another thread may have held the lock at the fork."""
        self._is_forked = True
        self._lock = threading.RLock()

    def _must_not_be_forked(self) -> None:
        if self._is_forked:
            raise nixlBackendError("this process was forked from the one that made the agent; make another here")

    def shutdown(self) -> None:
        """Ends all transfers and sessions; later calls raise. NIXL has no such call: its agent ends with its object."""
        self._must_not_be_forked()
        with self._lock:
            self._shut_down = True
            agent = self._agent
        if agent is not None:
            with as_nixl():
                agent.shutdown()

    def _core(self) -> kvferry.Agent:
        """kvferry's agent, which starts when it is needed: what it listens on depends on the backends."""
        self._must_not_be_forked()
        with self._lock:
            if self._shut_down:
                raise nixlBackendError("the agent was shut down")
            if self._agent is None:
                listen = None if os.environ.get("KVFERRY_LISTEN") else f"{self._host_of_backends()}:0"
                with as_nixl():
                    timeout = None if os.environ.get("KVFERRY_TIMEOUT_MS") else TIMEOUT_S
                    agent = kvferry.Agent(self.name, listen=listen, timeout=timeout, mooncake=False)
                try:
                    agent.set_after(self._after)
                    self._started(agent)
                except Exception:
                    agent.shutdown()
                    raise
                self._agent = agent
            return self._agent

    def _host_of_backends(self) -> str:
        """Loopback without a backend that reaches other hosts' memory."""
        return "0.0.0.0" if "UCX" in self.backends else "127.0.0.1"

    def _started(self, agent: kvferry.Agent) -> None:
        """Called when kvferry's agent has started. It is shut down if this raises. The caller holds the lock."""

    def _ended(self, handle: nixl_xfer_handle) -> None:
        with self._lock:
            self._running.discard(handle)

    def _left_behind(self, plan: Plan, job: kvferry.Transfer) -> None:
        with self._lock:
            self._left = [(plan, job) for plan, job in self._left if not job.done()]
            self._left.append((plan, job))

    def _remote(self, name: str | bytes) -> Remote:
        """A known remote agent. The caller holds the lock."""
        found = self._remotes.get(text(name))
        if found is None:
            raise nixlNotFoundError(f"no agent {text(name)!r} is known; add its metadata first")
        return found

    def _peer(self, remote: Remote | None) -> kvferry.Peer:
        """The agent's peer; this agent itself for None."""
        agent = self._core()
        if remote is None:
            with as_nixl():
                return agent.peer(agent.address)
        if remote.peer is None:
            raise nixlNotFoundError(f"the metadata of {remote.name!r} had no address")
        if remote.lost:
            raise nixlRemoteDisconnectError(f"agent {remote.name!r} is gone; add its metadata again")
        return remote.peer

    def _must_be_usable(self, plan: Plan) -> None:
        """Whether all that a transfer was made of is still there."""
        with self._lock:
            gone = next((area for area in plan.areas if not self._local.is_live(area)), None)
            if plan.remote is None:
                gone = gone or next((area for area in plan.others if not self._local.is_live(area)), None)
            elif self._remotes.get(plan.remote.name) is not plan.remote:
                raise nixlNotFoundError(f"agent {plan.remote.name!r} was removed or replaced; prepare the list again")
        if gone is not None:
            raise nixlNotFoundError(f"the {gone.length} bytes at {gone.addr:#x} were deregistered")

    def get_reg_descs(self, descs: Any, mem_type: str | None = None) -> nixlRegDList | None:
        """A list for registration, from 4-tuples, an N x 3 array or tensors; None for what can't be used."""
        return _descs.reg_descs(descs, mem_type)

    def get_xfer_descs(self, descs: Any, mem_type: str | None = None) -> nixlXferDList | None:
        """A list for transfers, from 3-tuples, an N x 3 array or tensors; None for what can't be used."""
        return _descs.xfer_descs(descs, mem_type)

    def get_remote_descs(self, descs: Any, mem_type: str | None = None) -> nixlRemoteDList | None:
        return _descs.remote_descs(descs, mem_type)

    def register_memory(
        self, reg_list: Any, mem_type: str | None = None, backends: list[str] | tuple[()] = ()
    ) -> nixlRegDList:
        """Registers all or nothing. The caller keeps the memory valid until it is deregistered."""
        descs = self._reg_list(reg_list, mem_type)
        kind = descs.getType()
        self._must_have(kind, backends)
        agent, done = self._core(), []
        with self._lock:
            try:
                for addr, length, device, meta in descs:
                    with as_nixl():
                        if kind is nixl_mem_t.FILE_SEG:
                            self._local.add_file(agent, addr, length, device, meta)
                        else:
                            self._local.add_memory(agent, kind, addr, length, device)
                    done.append(self._local.find(kind, addr, length, device))
            except Exception:
                with contextlib.suppress(Exception):
                    self._close(agent, self._local.take(done))
                raise
        return descs

    def deregister_memory(self, dereg_list: nixlRegDList, backends: list[str] | tuple[()] = ()) -> None:
        """Ends registrations. Transfers that use the memory are cancelled, and waited for."""
        descs = self._reg_list(dereg_list, None)
        self._handles(backends)
        agent = self._core()
        with self._lock:
            # First all, so that one that is missing changes nothing.
            areas = [self._local.find(descs.getType(), *desc[:3]) for desc in descs]
            ended = self._local.take(areas)
            running = [handle for handle in self._running if handle._plan.uses(ended)]
            left = [job for plan, job in self._left if plan.uses(ended)]
        stuck = [handle for handle in running if not handle._cancel(CANCEL_S)]
        if stuck or not all(has_ended(job) for job in left):
            with self._lock:
                self._local.put_back(ended)
            raise nixlBackendError("a cancelled transfer still uses the memory; try again when it has ended")
        for handle in running:
            with handle._lock:
                handle._state(wait=False)
        self._close(agent, ended)

    def _close(self, agent: kvferry.Agent, ended: list[Area]) -> None:
        """Ends what `Local.take` returned, all of it that it can. What is left can be deregistered again."""
        left: list[Area] = []
        first: kvferry.Error | OSError | None = None
        for area in ended:
            try:
                close(agent, area)
            except (kvferry.Error, OSError) as error:
                first = first or error
                left.append(area)
        if first is not None:
            with self._lock:
                self._local.put_back(left)
            raise translated(first) from first

    def query_memory(self, reg_list: Any, backend: str, mem_type: str | None = None) -> list[dict[str, str] | None]:
        """For each file, by its path in `meta`: its size, mode and time of modification, or None."""
        descs = self._reg_list(reg_list, mem_type)
        if backend not in self.backends:
            raise ValueError(f"no backend {backend!r} was created; there are {sorted(self.backends)}")
        if descs.getType() is not nixl_mem_t.FILE_SEG:
            raise nixlNotSupportedError("only files can be queried")
        return [file_facts(meta) for *_, meta in descs]

    def _reg_list(self, descs: Any, mem_type: str | None) -> nixlRegDList:
        found = _descs.reg_descs(descs, mem_type)
        if found is None:
            raise TypeError("expected a list of memory for registration")
        return found
