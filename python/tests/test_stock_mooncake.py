"""Transfers with stock Mooncake, in both directions."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator

import kvferry
import kvferry.mooncake as mooncake
import pytest
import stock
from conftest import LOOPBACK
from kit import NEVER, Child, ChildError, Memory, eventually
from test_interrupt import HANDLER
from test_mooncake import PREPARE, SCRIPT, SERVER, Server, engine

BLOCK = 4096


@pytest.fixture(scope="session")
def stock_python() -> str:
    try:
        return stock.python()
    except stock.UnavailableError as why:
        pytest.skip(f"STOCK MOONCAKE IS NOT TESTED: {why}")


@pytest.fixture
def stocks(children: Callable[..., Child], stock_python: str) -> Callable[..., Server]:
    """Starts engines of stock Mooncake with registered memory."""

    def start(nbytes: int = 1 << 20, env: dict[str, str] | None = None) -> Server:
        child = children(python=stock_python, env=stock.QUIET | (env or {}), quiet=True)
        child.run(SERVER.format(module="mooncake.engine", nbytes=nbytes))
        return Server(child)

    return start


class Here:
    """A kvferry engine in this process, with registered memory."""

    def __init__(self, nbytes: int = 1 << 20) -> None:
        self.engine = engine()
        self.memory = Memory(nbytes)
        assert self.engine.register_memory(self.memory.addr, nbytes) == 0
        self.session = f"127.0.0.1:{self.engine.get_rpc_port()}"

    @property
    def base(self) -> int:
        return self.memory.addr


@pytest.fixture
def here() -> Iterator[Here]:
    yield Here()


@pytest.fixture(params=["v2", "v1"])
def initiator(request: pytest.FixtureRequest, stocks: Callable[..., Server]) -> Server:
    """A stock engine that connects to kvferry, by either version of Mooncake's protocol."""
    return stocks(env={"MC_TCP_PROTO": "1"} if request.param == "v1" else None)


# ---- stock to kvferry


def test_stock_writes_to_kvferry(here: Here, initiator: Server) -> None:
    initiator.child.run("import os; memory[0:100000] = os.urandom(100000)")
    call = f"engine.transfer_sync_write({here.session!r}, memory.addr, {here.base + 5}, 100000)"
    assert initiator.child.run(call) == 0
    expected = initiator.bytes(0, 100_000)
    # Version 1 of Mooncake's protocol returns before the bytes have arrived.
    eventually(lambda: here.memory[5:100_005] == expected)


def test_stock_reads_from_kvferry(here: Here, initiator: Server) -> None:
    here.memory[0:100_000] = os.urandom(100_000)
    call = f"engine.transfer_sync_read({here.session!r}, memory.addr, {here.base + 7}, 99993)"
    assert initiator.child.run(call) == 0
    assert initiator.bytes(0, 99_993) == here.memory[7:100_000]


def test_batches_of_stock_land_at_their_addresses(here: Here, initiator: Server) -> None:
    places = random.sample(range(256), 200)
    initiator.child.run("import os; memory[0:1 << 20] = os.urandom(1 << 20)")
    assert (
        initiator.child.run(
            f"""
            places = {places!r}
            n = {BLOCK}
            lists = [memory.addr + i * n for i in range(200)], [{here.base} + p * n for p in places], [n] * 200
            engine.batch_transfer_sync_write({here.session!r}, *lists)
            """
        )
        == 0
    )
    source = initiator.bytes(0, 200 * BLOCK)

    def arrived() -> bool:
        return all(
            here.memory[p * BLOCK : (p + 1) * BLOCK] == source[i * BLOCK : (i + 1) * BLOCK]
            for i, p in enumerate(places)
        )

    eventually(arrived)
    assert (
        initiator.child.run(
            f"""
        memory[0:200 * n] = bytes(200 * n)
        engine.get_batch_transfer_status([engine.batch_transfer_async_read({here.session!r}, *lists)])
        """
        )
        == 0
    )
    assert initiator.bytes(0, 200 * BLOCK) == source


def test_stock_finds_and_probes_kvferry(here: Here, stocks: Callable[..., Server]) -> None:
    there = stocks()
    assert there.child.run(f"engine.send_probe({here.session!r})") == 0
    assert there.child.run(f"engine.get_first_buffer_address({here.session!r})") == here.base


def test_stock_notifies_kvferry(here: Here, stocks: Callable[..., Server]) -> None:
    there = stocks()
    call = f"engine.transfer_sync({here.session!r}, memory.addr, {here.base}, 64, TransferOpcode.Write, TransferNotify('n', 'wörd'))"
    assert there.child.run(call) == 0
    (notify,) = eventually(here.engine.get_notifies)
    assert (notify.name, notify.msg) == ("n", "wörd")


@pytest.mark.parametrize("offset", [(1 << 20) - 5, -5, 1 << 40])
def test_an_out_of_bounds_request_of_stock_is_refused_and_writes_nothing(
    here: Here, stocks: Callable[..., Server], offset: int
) -> None:
    there = stocks()
    there.child.run("memory[0:64] = b'x' * 64")
    assert there.child.run(f"engine.transfer_sync_write({here.session!r}, memory.addr, {here.base + offset}, 10)") == -1
    assert here.memory[0 : 1 << 20].count(b"x") == 0
    assert eventually(
        lambda: there.child.run(f"engine.transfer_sync_write({here.session!r}, memory.addr, {here.base}, 10)") == 0
    )


def test_stock_reaches_only_regions_that_peers_may_access(stocks: Callable[..., Server]) -> None:
    there = stocks()
    memory = Memory(8192)
    with kvferry.Agent(listen=LOOPBACK, mooncake=True) as agent:
        agent.register((memory.addr, 4096), "r")
        call = f"({agent.address!r}, memory.addr, {memory.addr}, 10)"
        assert there.child.run(f"engine.transfer_sync_read{call}") == 0
        assert there.child.run(f"engine.transfer_sync_write{call}") == -1
        (region,) = agent.regions()
        agent.unregister(region)
        assert there.child.run(f"engine.transfer_sync_read{call}") == -1


def test_with_a_secret_stock_is_refused(stocks: Callable[..., Server]) -> None:
    there = stocks()
    with kvferry.Agent(listen=LOOPBACK, mooncake=True, secret="s3cret") as agent:
        region = agent.allocate(4096)
        assert there.child.run(f"engine.transfer_sync_write({agent.address!r}, memory.addr, {region.addr}, 10)") == -1


# ---- kvferry to stock


def test_kvferry_writes_to_and_reads_from_stock(here: Here, stocks: Callable[..., Server]) -> None:
    there = stocks()
    here.memory[0 : 1 << 20] = os.urandom(1 << 20)
    assert here.engine.transfer_sync_write(there.session, here.base, there.base, 1 << 20) == 0, here.engine.last_error()
    assert there.bytes(0, 1 << 20) == here.memory[0 : 1 << 20]
    there.child.run("memory[0:100] = bytes(range(100))")
    assert here.engine.transfer_sync_read(there.session, here.base + 50, there.base, 100) == 0
    assert here.memory[50:150] == bytes(range(100))


@pytest.mark.parametrize("block", [1, 4096, 32 << 10])
def test_batches_of_kvferry_land_at_their_addresses_in_stock(stocks: Callable[..., Server], block: int) -> None:
    blocks = 1024
    here, there = Here(block * blocks), stocks(block * blocks)
    here.memory[0 : here.memory.nbytes] = os.urandom(here.memory.nbytes)
    places = random.sample(range(blocks), blocks)
    lists = [here.base + i * block for i in range(blocks)], [there.base + p * block for p in places], [block] * blocks
    assert here.engine.batch_transfer_sync_write(there.session, *lists) == 0, here.engine.last_error()
    arrived = there.bytes(0, block * blocks) if block < 32 << 10 else None
    if arrived is not None:
        for i, p in enumerate(places):
            assert arrived[p * block : (p + 1) * block] == here.memory[i * block : (i + 1) * block]
    source = here.memory[0 : block * blocks]
    here.memory[0 : block * blocks] = bytes(block * blocks)
    assert here.engine.batch_transfer_sync_read(there.session, *lists) == 0
    assert here.memory[0 : block * blocks] == source


def test_a_batch_of_70000_elements_is_one_call_to_stock(stocks: Callable[..., Server]) -> None:
    here, there = Here(70_000 * 64), stocks(70_000 * 64)
    here.memory[0 : 70_000 * 64] = os.urandom(70_000 * 64)
    order = random.sample(range(70_000), 70_000)
    lists = [here.base + i * 64 for i in order], [there.base + i * 64 for i in order], [64] * 70_000
    assert here.engine.batch_transfer_sync_write(there.session, *lists) == 0, here.engine.last_error()
    digest = there.child.run("import hashlib; hashlib.sha256(memory.map).hexdigest()")
    assert digest == hashlib.sha256(here.memory.map).hexdigest()


def test_ten_threads_write_to_stock_at_once(stocks: Callable[..., Server]) -> None:
    size, calls, blocks, block = 32 << 20, 4, 100, 8192
    here, there = Here(size), stocks(size)
    here.memory[0:size] = os.urandom(1 << 20) * 32
    codes: list[int] = []

    def work(thread: int) -> None:
        for call in range(calls):
            at = [((thread * calls + call) * blocks + i) * block for i in reversed(range(blocks))]
            lists = [here.base + a for a in at], [there.base + a for a in at], [block] * blocks
            codes.append(here.engine.batch_transfer_sync_write(there.session, *lists))

    workers = [threading.Thread(target=work, args=(n,)) for n in range(10)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert codes == [0] * 40, here.engine.last_error()
    moved = 10 * calls * blocks * block
    digest = there.child.run(f"import hashlib; hashlib.sha256(memoryview(memory.map)[:{moved}]).hexdigest()")
    assert digest == hashlib.sha256(memoryview(here.memory.map)[:moved]).hexdigest()


def test_asynchronous_calls_to_stock(here: Here, stocks: Callable[..., Server]) -> None:
    there = stocks()
    here.memory[0:4] = b"data"
    identity = here.engine.batch_transfer_async_write(there.session, [here.base], [there.base], [4])
    assert identity > 0
    assert here.engine.get_batch_transfer_status([identity]) == 0
    assert there.bytes(0, 4) == b"data"
    identity = here.engine.transfer_submit_write(there.session, here.base, there.base + 10, 4)
    eventually(lambda: here.engine.transfer_check_status(identity) == 1)
    assert there.bytes(10, 4) == b"data"


def test_kvferry_finds_probes_and_notifies_stock(here: Here, stocks: Callable[..., Server]) -> None:
    there = stocks()
    assert here.engine.send_probe(there.session) == 0
    assert here.engine.get_first_buffer_address(there.session) == there.base
    notify = mooncake.TransferNotify("name", "wörd")
    write = mooncake.TransferOpcode.Write
    assert here.engine.transfer_sync(there.session, here.base, there.base, 64, write, notify) == 0
    assert here.engine.batch_transfer_sync(there.session, [], [], [], write, notify) == 0
    got: list[tuple[str, str]] = []
    eventually(lambda: got.extend(there.child.run("[(n.name, n.msg) for n in engine.get_notifies()]")) or len(got) == 2)
    assert got == [("name", "wörd")] * 2


def test_an_agent_reports_the_mooncake_transport_of_stock(stocks: Callable[..., Server]) -> None:
    there = stocks()
    with kvferry.Agent(listen=LOOPBACK, mooncake=True) as agent, kvferry.Agent(listen=LOOPBACK, mooncake=True) as ours:
        peer = agent.peer(there.session)
        summary = peer.connect()
        assert (summary.transport, summary.incarnation, summary.authenticated) == ("mooncake", None, False)
        mine = agent.allocate(4096)
        assert peer.write(mine.addr, there.base, 4096).transport == "mooncake"
        assert [(r.addr, r.nbytes) for r in peer.regions()] == [(there.base, 1 << 20)]
        # Two kvferry agents change to kvferry's protocol after the same handshake.
        region = ours.register(bytearray(64))
        assert agent.peer(ours.address).write(mine.addr, region.addr, 64).transport == "tcp"


@pytest.mark.parametrize("offset", [(1 << 20) - 5, -5, 1 << 40])
def test_an_out_of_bounds_request_to_stock_fails_and_the_next_call_succeeds(
    here: Here, stocks: Callable[..., Server], offset: int
) -> None:
    there = stocks()
    for _ in range(5):
        assert here.engine.transfer_sync_write(there.session, here.base, there.base + offset, 10) == -1
    assert here.engine.transfer_sync_write(there.session, here.base, there.base, 10) == 0, here.engine.last_error()


def test_killing_stock_during_a_batch_is_an_error_at_once(
    stocks: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only the reset of the connection ends the call.
    monkeypatch.setenv("KVFERRY_TIMEOUT_MS", "600000")
    size = 64 << 20
    here, there = Here(size), stocks(size)
    lists = [here.base + a for a in range(0, size, 32 << 10)], [there.base + a for a in range(0, size, 32 << 10)]
    assert here.engine.transfer_sync_write(there.session, here.base, there.base, 64) == 0
    codes = [0]

    def work() -> None:
        while codes[-1] == 0:
            codes.append(here.engine.batch_transfer_sync_write(there.session, *lists, [32 << 10] * len(lists[0])))

    worker = threading.Thread(target=work)
    worker.start()
    time.sleep(0.2)
    there.child.process.kill()
    worker.join()
    assert codes[-1] == -1
    assert here.engine.send_probe(there.session) == -102
    again = stocks()
    assert here.engine.transfer_sync_write(again.session, here.base, again.base, 64) == 0


def test_stopping_stock_is_an_error_by_the_silence_limit_and_other_peers_go_on(
    stocks: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The peer that is well, and this process, run on a busy machine at least once in three quarters of it.
    monkeypatch.setenv("KVFERRY_SILENCE_MS", "4000")
    monkeypatch.setenv("KVFERRY_TIMEOUT_MS", "600000")
    size = 64 << 20
    here, there, well = Here(size), stocks(size), stocks()

    def is_delayed() -> bool:
        """False if this process was suspended for the limit, which ends all sessions."""
        for server in (there, well):
            assert here.engine.transfer_sync_write(server.session, here.base, server.base, 64) == 0
        there.child.send(signal.SIGSTOP)
        codes: list[int] = []
        worker = threading.Thread(
            target=lambda: codes.append(here.engine.transfer_sync_write(there.session, here.base, there.base, size))
        )
        worker.start()
        errors = []
        while worker.is_alive():
            if here.engine.transfer_sync_write(well.session, here.base, well.base, 4096) != 0:
                errors.append(here.engine.last_error())
            time.sleep(0.01)
        last = here.engine.last_error()
        there.child.send(signal.SIGCONT)
        assert codes == [-1]
        assert all("was suspended" in error for error in errors), errors
        if errors or "was suspended" in last:
            return False
        assert "could not confirm" in last
        return True

    eventually(is_delayed)
    assert here.engine.transfer_sync_write(there.session, here.base, there.base, 64) == 0, here.engine.last_error()


@pytest.mark.parametrize("goes_on", [True, False])
def test_ctrl_c_ends_a_call_to_a_stopped_stock_peer(
    stocks: Callable[..., Server], children: Callable[..., Child], goes_on: bool
) -> None:
    there = stocks(64 << 20)
    silence = NEVER if goes_on else 10
    env = {"KVFERRY_TIMEOUT_MS": str(int(NEVER * 1000)), "KVFERRY_SILENCE_MS": str(int(silence * 1000))}
    caller = children(SERVER.format(module="kvferry.mooncake", nbytes=64 << 20), env=env)
    assert caller.run(f"engine.transfer_sync_write({there.session!r}, memory.addr, {there.base}, 64)") == 0
    caller.run(HANDLER)
    there.child.send(signal.SIGSTOP)
    caller.start(f"begun(); engine.transfer_sync_write({there.session!r}, memory.addr, {there.base}, 64 << 20)")
    caller.has_begun()
    time.sleep(0.3)
    caller.send(signal.SIGINT)
    caller.has_begun()
    # The call ends with the peer's confirmation, or by the silence limit.
    if goes_on:
        there.child.send(signal.SIGCONT)
    with pytest.raises(ChildError) as caught:
        caller.result()
    assert caught.value.kind == "KeyboardInterrupt"
    assert caller.finish() == (0, "")


def test_the_source_of_a_failed_call_is_no_longer_read(
    stocks: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVFERRY_SILENCE_MS", "4000")
    size = 256 << 20
    here, there = Here(size), stocks(size)
    here.memory[0:64] = b"\x11" * 64
    assert here.engine.transfer_sync_write(there.session, here.base, there.base, 64) == 0
    there.child.send(signal.SIGSTOP)
    assert here.engine.transfer_sync_write(there.session, here.base, there.base, size) == -1
    here.memory.map.seek(0)
    here.memory.map.write(b"\xee" * size)
    there.child.send(signal.SIGCONT)
    time.sleep(1)
    # The peer may still apply what its kernel had received, but nothing written after the call returned.
    assert there.child.run(r"memory.map.find(b'\xee')") == -1


# ---- the script of test_mooncake.py

# Lines of `test_mooncake.SCRIPT` with another outcome in kvferry.
OURS_ALONE = {
    "a.transfer_sync_write(None, ad, bd, 100)",  # crashes the process
    # Mooncake caches the regions of a peer for ever
    "b.get_first_buffer_address(f'127.0.0.1:{a.get_rpc_port()}') > 0",
}


def test_stock_gives_the_outcomes_of_the_script(children: Callable[..., Child], stock_python: str) -> None:
    child = children(python=stock_python, env=stock.QUIET, quiet=True)
    child.run(PREPARE.format(module="mooncake.engine"))
    child.run("import sys; __run = sys.modules['__main__'].execute; names = dict(globals())")
    differs = []
    for line, expected in SCRIPT:
        if line in OURS_ALONE:
            continue
        expected = expected.__name__ if isinstance(expected, type) else expected
        try:
            got = child.run(f"__run({line!r}, names)")
        except ChildError as error:
            got = error.kind
        if got != expected:
            differs.append((line, expected, got))
    assert differs == []


def test_the_stock_store_is_reachable_beside_kvferrys_engine(stock_python: str) -> None:
    import importlib.util
    from pathlib import Path

    from kit import run_python

    # The installed kvferry, followed by the packages of stock Mooncake.
    ours = Path(importlib.util.find_spec("kvferry").origin).parents[1]  # type: ignore[union-attr,arg-type]
    theirs = Path(stock_python).parents[1] / "lib" / f"python{os.sys.version_info.major}.{os.sys.version_info.minor}"  # type: ignore[attr-defined]
    ended = run_python(
        f"""
        import sys
        sys.path += [{str(theirs / "site-packages")!r}]
        import mooncake.engine, mooncake.store, mooncake
        print(mooncake.engine.TransferEngine.__module__, mooncake.store.MooncakeDistributedStore.__module__)
        print(bool(mooncake.BufferPool))
        """,
        env={"KVFERRY_SHIMS": "mooncake"} | stock.QUIET,
    )
    assert ended.stdout.splitlines() == ["kvferry.mooncake mooncake.store", "True"], ended.stderr
    assert ours.is_dir()
