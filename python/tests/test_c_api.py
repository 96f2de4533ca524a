"""The C libraries of the wheel, and Mooncake's C API with stock Mooncake on the other side."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import c_engine
import kvferry.mooncake as mooncake
import pytest
import stock
from c_engine import COMPLETED, FAILED, READ, WRITE, Engine
from conftest import LOOPBACK  # noqa: F401 - the tests of Mooncake need it
from kit import Child, Memory, clean_environment, eventually
from kvferry.__main__ import libdir
from test_mooncake import SERVER, Server

NBYTES = 4 << 20
BLOCK = 4096


@pytest.fixture(autouse=True)
def _libraries() -> None:
    if libdir() is None:
        pytest.skip("SKIPPED: this installation has no C libraries (make wheel builds them)")


OLDER = "0.3.7.post2"


@pytest.fixture(params=[stock.VERSION, "kvferry"])
def there(request: pytest.FixtureRequest, peers: Callable[[str], Server]) -> Server:
    """A peer that serves the C API, and is served by it."""
    return peers(request.param)


@pytest.fixture
def peers(children: Callable[..., Child]) -> Callable[[str], Server]:
    """Starts engines with registered memory in other processes: of a version of Mooncake, or of kvferry."""

    def start(version: str) -> Server:
        return started(children, version)

    return start


def started(children: Callable[..., Child], version: str) -> Server:
    module, python = "mooncake.engine", sys.executable
    if version == "kvferry":
        module = "kvferry.mooncake"
    else:
        try:
            python = stock.python(version)
        except stock.UnavailableError as why:
            pytest.skip(f"SKIPPED: stock Mooncake {version} is not tested: {why}")
    child = children(python=python, env=stock.QUIET, quiet=True)
    child.run(SERVER.format(module=module, nbytes=NBYTES))
    return Server(child)


class Here:
    """An engine of the C API in this process, with registered memory."""

    def __init__(self) -> None:
        self.engine = Engine()
        self.memory = Memory(NBYTES)
        self.engine.register(self.memory.addr, NBYTES)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Here]:
    for name in [name for name in clean_environment() if name.startswith("KVFERRY_")]:
        monkeypatch.delenv(name, raising=False)
    made = Here()
    yield made
    made.engine.destroy()


def test_libdir_names_the_folder_of_the_libraries_headers_and_pkg_config() -> None:
    ran = subprocess.run([sys.executable, "-m", "kvferry", "libdir"], capture_output=True, text=True, check=True)
    folder = Path(ran.stdout.strip())
    names = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    headers = {"include/kvferry.h", "include/kvferry_tasks.h", "include/kvferry_transfer_engine.h"}
    assert names == {"libkvferry.so.0", "libtransfer_engine.so", "kvferry.pc"} | headers


def test_the_c_api_writes_and_reads_scattered_blocks(here: Here, there: Server) -> None:
    there.child.run("import os; memory[0:memory.nbytes] = os.urandom(memory.nbytes)")
    segment, count = here.engine.segment(there.session), NBYTES // 2 // BLOCK
    mine, theirs, half = here.memory.addr, there.base, NBYTES // 2
    here.memory[0:half] = bytes(i * 7 % 251 for i in range(BLOCK)) * count
    writes = [(WRITE, mine + i * BLOCK, segment, theirs + (count - 1 - i) * BLOCK, BLOCK) for i in range(count)]
    reads = [
        (READ, mine + half + i * BLOCK, segment, theirs + half + (count - 1 - i) * BLOCK, BLOCK) for i in range(count)
    ]
    written = here.engine.submit(writes)
    read = here.engine.submit(reads)
    assert set(here.engine.wait(written, count)) == {COMPLETED}
    assert set(here.engine.wait(read, count)) == {COMPLETED}
    data = there.bytes(half, half)
    blocks = [data[i * BLOCK : (i + 1) * BLOCK] for i in reversed(range(count))]
    assert here.memory[half:NBYTES] == b"".join(blocks)
    # Version 1 of Mooncake's protocol does not say when written bytes have arrived.
    eventually(lambda: there.bytes(0, half) == here.memory[0:half])


@pytest.mark.parametrize("version", [stock.VERSION, OLDER, "kvferry"])
def test_peers_write_and_read_the_memory_of_the_c_api(here: Here, peers: Callable[[str], Server], version: str) -> None:
    there = peers(version)
    session, mine = here.engine.session, here.memory.addr
    there.child.run("import os; memory[0:100000] = os.urandom(100000)")
    assert there.child.run(f"engine.transfer_sync_write({session!r}, memory.addr, {mine + 5}, 100000)") == 0
    expected = there.bytes(0, 100_000)
    eventually(lambda: here.memory[5:100_005] == expected)
    call = f"engine.transfer_sync_read({session!r}, memory.addr + 200000, {mine + 5}, 100000)"
    assert there.child.run(call) == 0
    assert there.bytes(200_000, 100_000) == expected


def test_what_an_older_peer_has_written_arrives_also_where_it_is_accepted_late(peers: Callable[[str], Server]) -> None:
    """The peer has closed its connection by then, and its user is not known any more."""
    writer, there = peers(OLDER), peers("kvferry")

    def write(at: int) -> None:
        call = f"engine.transfer_sync_write({there.session!r}, memory.addr, {there.base + at}, 100000)"
        assert writer.child.run(call) == 0

    def has_arrived(at: int) -> bool:
        return there.bytes(at, 100_000) == writer.bytes(0, 100_000)

    writer.child.run("import os; memory[0:100000] = os.urandom(100000)")
    write(0)
    eventually(lambda: has_arrived(0))
    there.child.send(signal.SIGSTOP)
    write(200_000)
    there.child.send(signal.SIGCONT)
    eventually(lambda: has_arrived(200_000))


def test_memory_that_is_registered_after_open_segment_is_found(here: Here, there: Server) -> None:
    segment = here.engine.segment(there.session)
    first = here.engine.submit([(WRITE, here.memory.addr, segment, there.base, BLOCK)])
    assert here.engine.wait(first, 1) == [COMPLETED]
    there.child.run("later = Memory(65536); assert engine.register_memory(later.addr, 65536) == 0")
    here.memory[0:BLOCK] = b"x" * BLOCK
    second = here.engine.submit([(WRITE, here.memory.addr, segment, there.child.run("later.addr"), BLOCK)])
    assert here.engine.wait(second, 1) == [COMPLETED]
    eventually(lambda: there.child.run("later[0:4096]") == b"x" * BLOCK)


def test_notifications_go_both_ways_and_follow_the_data(here: Here, there: Server) -> None:
    segment = here.engine.segment(there.session)
    here.memory[0:BLOCK] = b"y" * BLOCK
    tasks = [(WRITE, here.memory.addr, segment, there.base + i * BLOCK, BLOCK) for i in range(100)]
    batch = here.engine.submit(tasks, notify=(b"agent", "wörd".encode()))
    assert set(here.engine.wait(batch, 100)) == {COMPLETED}
    got: list[tuple[str, str]] = []
    take = "[(n.name, n.msg) for n in engine.get_notifies()]"
    eventually(lambda: got.extend(there.child.run(take)) or len(got) == 1)
    assert here.engine.notify(segment, b"sync", b"message") == 0
    eventually(lambda: got.extend(there.child.run(take)) or len(got) == 2)
    assert got == [("agent", "wörd"), ("sync", "message")]
    call = "engine.transfer_sync({!r}, memory.addr, {}, 64, TransferOpcode.Write, TransferNotify('n', 'back'))"
    assert there.child.run(call.format(here.engine.session, here.memory.addr)) == 0
    assert eventually(here.engine.notifications) == [(b"n", b"back")]


def test_what_is_beyond_registered_memory_fails_and_sends_no_message(here: Here, there: Server) -> None:
    segment = here.engine.segment(there.session)
    beyond = [(WRITE, here.memory.addr, segment, there.base + NBYTES - 10, BLOCK)]
    batch = here.engine.submit(beyond, notify=(b"never", b"sent"))
    assert here.engine.wait(batch, 1) == [FAILED]
    assert here.engine.lib.kvferry_last_error()
    assert here.engine.notify(segment, b"later", b"") == 0
    got: list[str] = []
    eventually(lambda: got.extend(there.child.run("[n.name for n in engine.get_notifies()]")) or got)
    assert got == ["later"]


def test_mooncake_0_3_7_sends_data_and_messages_and_writes_to_it_fail_with_a_reason(
    here: Here, peers: Callable[[str], Server]
) -> None:
    """It serves one request per connection; kvferry sends several."""
    there = peers(OLDER)
    call = "engine.transfer_sync({!r}, memory.addr, {}, 64, TransferOpcode.Write, TransferNotify('n', 'back'))"
    assert there.child.run(call.format(here.engine.session, here.memory.addr)) == 0
    assert eventually(here.engine.notifications) == [(b"n", b"back")]
    segment = here.engine.segment(there.session)
    tasks = [(WRITE, here.memory.addr, segment, there.base + i * BLOCK, BLOCK) for i in range(100)]
    assert set(here.engine.wait(here.engine.submit(tasks), 100)) == {FAILED}
    assert b"connection" in here.engine.lib.kvferry_last_error()


def test_a_peer_that_is_killed_ends_every_task(here: Here, there: Server) -> None:
    segment = here.engine.segment(there.session)
    tasks = [(WRITE, here.memory.addr, segment, there.base, NBYTES)] * 64
    batch = here.engine.submit(tasks)
    there.child.kill()
    ended = here.engine.wait(batch, 64)
    assert set(ended) <= {COMPLETED, FAILED}
    again = here.engine.submit(tasks[:1])
    assert here.engine.wait(again, 1) == [FAILED]


def test_both_libraries_of_the_wheel_work_in_one_process(here: Here) -> None:
    engine = mooncake.TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    memory = Memory(BLOCK)
    memory[0:BLOCK] = b"z" * BLOCK
    assert engine.register_memory(memory.addr, BLOCK) == 0
    assert engine.transfer_sync_write(here.engine.session, memory.addr, here.memory.addr, BLOCK) == 0
    assert here.memory[0:BLOCK] == b"z" * BLOCK


def test_a_library_without_an_engine_says_why() -> None:
    lib = c_engine.library()
    assert lib is not None
    assert not lib.createTransferEngine(b"etcd://nowhere", b"127.0.0.1", b"", 0, 1)
    assert b"P2PHANDSHAKE" in lib.kvferry_last_error()
