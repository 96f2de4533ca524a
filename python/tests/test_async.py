"""Transfers in the background: handles, event descriptors, asyncio."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import time
from collections.abc import Callable

import kvferry
import pytest
from conftest import LOOPBACK, Target
from kit import NEVER, PATIENCE, Memory, eventually

BIG = 64 << 20
Targets = Callable[..., Target]


def test_a_background_transfer_keeps_its_one_outcome(agent: kvferry.Agent, target: Target) -> None:
    mine = Memory(1 << 20)
    mine[0 : 1 << 20] = os.urandom(1 << 20)
    transfer = agent.peer(target.address).write_async(mine.addr, target.base, 1 << 20)
    moved = transfer.wait()
    assert moved is not None
    assert moved.nbytes == 1 << 20
    assert transfer.done()
    for again in (transfer.poll(), transfer.wait(0), transfer.wait(1)):
        assert again is not None
        assert again.nbytes == 1 << 20
    transfer.cancel()
    assert transfer.poll() is not None
    assert target.bytes(0, 1 << 20) == mine[0 : 1 << 20]


def test_read_async_reads(agent: kvferry.Agent, target: Target) -> None:
    target.child.run("memory[100:104] = b'read'")
    mine = Memory(4096)
    agent.peer(target.address).read_async([mine.addr], [target.base + 100], [4]).wait()
    assert mine[0:4] == b"read"


def test_an_error_is_the_outcome_of_the_transfer_and_not_of_the_call(agent: kvferry.Agent, target: Target) -> None:
    mine = Memory(4096)
    for peer, remote, error in (
        (agent.peer("127.0.0.1:1"), 4096, kvferry.UnreachableError),
        (agent.peer(target.address), 16, kvferry.Error),
    ):
        transfer = peer.write_async(mine.addr, remote, 10)
        for _ in range(2):
            with pytest.raises(error):
                transfer.wait(60)
        with pytest.raises(error):
            transfer.poll()
        assert transfer.done()


def test_wait_returns_none_after_its_timeout_and_the_transfer_continues(targets: Targets) -> None:
    target = targets(BIG, silence=NEVER)
    mine = Memory(BIG)
    with kvferry.Agent(listen=LOOPBACK, silence=NEVER) as agent:
        peer = agent.peer(target.address)
        peer.connect()
        target.child.send(signal.SIGSTOP)
        transfer = peer.write_async(mine.addr, target.base, BIG)
        began = time.monotonic()
        assert transfer.wait(0.25) is None
        assert time.monotonic() - began > 0.24
        assert transfer.poll() is None
        assert not transfer.done()
        target.child.send(signal.SIGCONT)
        moved = transfer.wait(30)
        assert moved is not None
        assert moved.nbytes == BIG


def test_the_event_descriptor_is_readable_only_after_the_transfer_ended(targets: Targets) -> None:
    target = targets(BIG, silence=NEVER)
    mine = Memory(BIG)
    with kvferry.Agent(listen=LOOPBACK, silence=NEVER) as agent:
        peer = agent.peer(target.address)
        peer.connect()
        target.child.send(signal.SIGSTOP)
        transfer = peer.write_async(mine.addr, target.base, BIG)
        fd = transfer.fileno()
        assert select.select([fd], [], [], 0.1)[0] == []
        target.child.send(signal.SIGCONT)
        assert select.select([transfer], [], [], 30)[0] == [transfer]
        assert transfer.poll() is not None
        assert select.select([fd], [], [], 0)[0] == [fd]


def test_a_cancelled_transfer_no_longer_accesses_its_memory(targets: Targets) -> None:
    target = targets(BIG, silence=NEVER)
    mine = Memory(BIG)
    with kvferry.Agent(listen=LOOPBACK, silence=NEVER) as agent:
        peer = agent.peer(target.address)
        peer.write(mine.addr, target.base, 4096)
        target.child.send(signal.SIGSTOP)
        transfer = peer.write_async(mine.addr, target.base, BIG)
        assert transfer.wait(0.2) is None
        transfer.cancel()
        target.child.send(signal.SIGCONT)
        with pytest.raises(kvferry.CancelledError) as caught:
            transfer.wait(60)
        assert caught.value.quiesced is True
        mine[0:BIG] = b"\xee" * BIG
        time.sleep(0.3)
        assert target.child.run(r"memory.map.find(b'\xee')") == -1


def test_dropping_a_transfer_does_not_cancel_it(agent: kvferry.Agent, target: Target) -> None:
    mine = Memory(1 << 20)
    agent.peer(target.address).write_async(mine.addr, target.base, 1 << 20, notify=("there", b""))
    assert target.child.run(f"agent.wait_notification({PATIENCE}).name") == "there"


def test_transfers_can_be_awaited(agent: kvferry.Agent, target: Target) -> None:
    mine = Memory(1 << 20)
    mine[0:4] = b"data"
    peer = agent.peer(target.address)

    async def both() -> tuple[int, int]:
        one = peer.write_async(mine.addr, target.base, 1 << 20)
        # Also the same transfer twice: each waiter has its own descriptor.
        first, again, other = await asyncio.gather(
            asyncio.ensure_future(one), asyncio.ensure_future(one), peer.read_async(mine.addr, target.base, 100)
        )
        assert first.nbytes == again.nbytes
        return first.nbytes, other.nbytes

    assert asyncio.run(both()) == (1 << 20, 100)


def test_an_awaited_failure_is_raised(agent: kvferry.Agent) -> None:
    mine = Memory(4096)

    async def fail() -> None:
        await agent.peer("127.0.0.1:1").write_async(mine.addr, 4096, 10)

    with pytest.raises(kvferry.UnreachableError):
        asyncio.run(fail())


def test_awaiting_many_transfers_at_once_leaks_no_descriptor(agent: kvferry.Agent, target: Target) -> None:
    mine = Memory(1 << 20)
    peer = agent.peer(target.address)
    peer.connect()

    def open_descriptors() -> int:
        # Streams are kept for later transfers; their number depends on the order of the transfers.
        return len(os.listdir("/proc/self/fd")) - agent.stats()["streams"]

    async def many() -> int:
        transfers = [peer.write_async(mine.addr, target.base, 4096) for _ in range(200)]
        return sum(moved.nbytes for moved in await asyncio.gather(*transfers))

    assert asyncio.run(many()) == 200 * 4096
    before = open_descriptors()
    assert asyncio.run(many()) == 200 * 4096
    # One more stream may be opening.
    eventually(lambda: open_descriptors() <= before)


def test_a_cancelled_task_cancels_its_transfer_and_does_not_block_the_loop(targets: Targets) -> None:
    target = targets(BIG, silence=NEVER)
    mine = Memory(BIG)

    async def impatient(peer: kvferry.Peer) -> kvferry.Transfer:
        transfer = peer.write_async(mine.addr, target.base, BIG)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.ensure_future(transfer), 0.2)
        return transfer

    with kvferry.Agent(listen=LOOPBACK, silence=NEVER) as agent:
        peer = agent.peer(target.address)
        peer.connect()
        target.child.send(signal.SIGSTOP)
        transfer = asyncio.run(impatient(peer))
        target.child.send(signal.SIGCONT)
        with pytest.raises(kvferry.CancelledError):
            transfer.wait(60)


def test_notifications_reach_an_event_loop(agent: kvferry.Agent, target: Target) -> None:
    async def next_name() -> str:
        loop, fd = asyncio.get_running_loop(), agent.notification_fd()
        arrived = loop.create_future()
        loop.add_reader(fd, lambda: arrived.done() or arrived.set_result(None))
        target.child.run(f"agent.peer({agent.address!r}).notify(('wake', b''))")
        await asyncio.wait_for(arrived, 10)
        loop.remove_reader(fd)
        return agent.notifications()[0].name

    assert asyncio.run(next_name()) == "wake"
