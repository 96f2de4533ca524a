"""Copying between processes of one host, from Python."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import weakref
from collections.abc import Callable, Iterator

import kvferry
import pytest
from kit import Child, eventually, ticks_during

ALL = {"KVFERRY_TRANSPORTS": ""}
NBYTES = 1 << 20

TARGET = """
import kvferry
agent = kvferry.Agent("there", listen="127.0.0.1:0")
memory = Memory({nbytes})
region = agent.register((memory.addr, memory.nbytes))
shared = agent.allocate({nbytes})
"""


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[kvferry.Agent]:
    monkeypatch.delenv("KVFERRY_TRANSPORTS")
    with kvferry.Agent("here", listen="127.0.0.1:0", silence=4.0) as agent:
        yield agent


@pytest.fixture
def there(children: Callable[..., Child]) -> Child:
    return children(TARGET.format(nbytes=NBYTES), env=ALL)


def remote(child: Child, name: str) -> kvferry.RemoteRegion:
    return kvferry.RemoteRegion.from_bytes(child.run(f"{name}.remote().to_bytes()"))


def test_without_any_setting_bytes_are_copied_between_the_processes(agent: kvferry.Agent, there: Child) -> None:
    peer = agent.peer(there.run("agent.address"))
    summary = peer.connect()
    assert (summary.transport, summary.fallback) == ("local", None)
    data = os.urandom(NBYTES)
    mine = agent.register(bytearray(data))
    back = bytearray(NBYTES)
    into = agent.register(back)
    for name in ("region", "shared"):
        target = remote(there, name)
        for nbytes in (512, 64 << 10, NBYTES):
            moved = peer.write(mine.addr, target.addr, nbytes)
            assert moved.transport == "local"
            peer.read(into.addr, target.addr, nbytes)
            assert back[:nbytes] == data[:nbytes]


def test_a_notification_comes_after_the_bytes(agent: kvferry.Agent, there: Child) -> None:
    peer = agent.peer(there.run("agent.address"))
    mine = agent.register(bytearray(b"x" * 4096))
    peer.write(mine.addr, there.run("memory.addr"), 4096, notify=("done", b"now"))
    assert there.run("n = agent.wait_notification(5); (n.name, bytes(n.message), memory[0:4])") == (
        "done",
        b"now",
        b"xxxx",
    )


def test_the_transports_setting_selects_the_transport(children: Callable[..., Child], there: Child) -> None:
    with kvferry.Agent(listen="127.0.0.1:0", transports="tcp") as agent:
        summary = agent.peer(there.run("agent.address")).connect()
        assert summary.transport == "tcp"
        assert summary.fallback == "this agent does not allow local"


def test_a_buffer_is_held_while_a_stopped_process_may_write_to_it(
    agent: kvferry.Agent, children: Callable[..., Child]
) -> None:
    class Buffer(bytearray):
        """A bytearray that takes weak references."""

    writer = children(
        """
import threading
import kvferry
agent = kvferry.Agent("writer", listen="127.0.0.1:0")
memory = Memory(16 << 20)
source = agent.register((memory.addr, memory.nbytes))
def write(address, at):
    peer = agent.peer(address)
    while True:
        try:
            peer.write(memory.addr, at, memory.nbytes)
        except kvferry.Error:
            return
""",
        env=ALL,
    )
    for _ in range(50):
        buffer = Buffer(16 << 20)
        gone = weakref.ref(buffer)
        region = agent.register(buffer)
        del buffer
        before = agent.stats()["bytes_received"]
        writer.run(f"threading.Thread(target=write, args=({agent.address!r}, {region.addr}), daemon=True).start()")
        eventually(lambda before=before: agent.stats()["bytes_received"] > before)
        os.kill(writer.process.pid, signal.SIGSTOP)
        with contextlib.suppress(kvferry.QuarantinedError):
            agent.unregister(region)
        if region.is_quarantined:
            break
        os.kill(writer.process.pid, signal.SIGCONT)
    else:
        pytest.fail("never caught in the middle of a copy")
    gc.collect()
    assert gone() is not None, "the buffer is held"
    assert agent.stats()["regions_quarantined"] == 1
    with pytest.raises(kvferry.QuarantinedError):
        agent.unregister(region)
    os.kill(writer.process.pid, signal.SIGCONT)
    eventually(lambda: not region.is_quarantined)
    agent.unregister(region)
    gc.collect()
    assert gone() is None, "the buffer was released"


def test_other_threads_run_while_many_bytes_are_copied(agent: kvferry.Agent, children: Callable[..., Child]) -> None:
    there = children(TARGET.format(nbytes=64 << 20), env=ALL)
    peer = agent.peer(there.run("agent.address"))
    mine = agent.register(bytearray(64 << 20))
    at = there.run("memory.addr")
    assert any(ticks_during(lambda: peer.write(mine.addr, at, 64 << 20)) >= 3 for _ in range(50))


def test_the_mooncake_engine_uses_local_copies_within_the_host(children: Callable[..., Child]) -> None:
    start = """
from kvferry.mooncake import TransferEngine
engine = TransferEngine()
assert engine.initialize("127.0.0.1:0", "P2PHANDSHAKE", "tcp", "") == 0
memory = Memory(1 << 20)
assert engine.register_memory(memory.addr, memory.nbytes) == 0
session = f"127.0.0.1:{engine.get_rpc_port()}"
"""
    one, other = children(start, env=ALL), children(start, env=ALL)
    session, at = other.run("session"), other.run("memory.addr")
    one.run("memory[0:4] = b'abcd'")
    assert one.run(f"engine.transfer_sync_write({session!r}, memory.addr, {at}, 4096)") == 0
    assert other.run("memory[0:4]") == b"abcd"
