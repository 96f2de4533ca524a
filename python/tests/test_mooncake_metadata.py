"""Mooncake's HTTP metadata server: names instead of addresses, and the steps of Mooncake's own engine test."""

from __future__ import annotations

import json
import random
import signal
import socket
import string
import struct
from collections.abc import Callable, Iterator

import kvferry.mooncake as mooncake
import pytest
import stock
from kit import Child, Memory, eventually
from kvferry.vllm._bootstrap import Owners
from metadata_server import MetadataServer
from test_mooncake import engine
from test_stock_mooncake import stock_python

__all__ = ["stock_python"]


@pytest.fixture
def server() -> Iterator[MetadataServer]:
    with MetadataServer() as server:
        yield server


def named(name: str, server: MetadataServer) -> mooncake.TransferEngine:
    engine = mooncake.TransferEngine()
    assert engine.initialize(name, server.url, "tcp", "") == 0, engine.last_error()
    return engine


TARGET = """
from {module} import TransferEngine
engine = TransferEngine()
assert engine.initialize({name!r}, {url!r}, "tcp", "") == 0
buffer = engine.allocate_managed_buffer(64 << 20) if engine.get_first_buffer_address({name!r}) == 0 else -1
"""


def test_engines_find_each_other_by_name(server: MetadataServer, children: Callable[..., Child]) -> None:
    target = children(TARGET.format(module="kvferry.mooncake", name="127.0.0.1:12345", url=server.url))
    base = target.run("buffer")
    here = named("127.0.0.1:12347", server)
    assert here.get_first_buffer_address("127.0.0.1:12345") != 0
    mine = Memory(4096)
    mine[0:5] = b"hello"
    assert here.transfer_sync_write("127.0.0.1:12345", mine.addr, base, 5) == 0, here.last_error()
    assert target.run("engine.read_bytes_from_buffer(buffer, 5)") == b"hello"
    assert here.send_probe("127.0.0.1:12345") == 0
    assert here.send_probe("127.0.0.1:1") == -200
    assert here.transfer_sync_write("127.0.0.1:1", mine.addr, base, 5) == -1
    assert "does not know" in here.last_error()


def test_published_values_are_as_stock_engines_expect_and_are_deleted_at_the_end(server: MetadataServer) -> None:
    here = named("127.0.0.1:777", server)
    assert json.loads(server.values["mooncake/rpc_meta/127.0.0.1:777"]) == {
        "ip_or_host_name": "127.0.0.1",
        "rpc_port": here.get_rpc_port(),
    }
    memory = Memory(8192)
    assert here.register_memory(memory.addr, 4096) == 0
    segment = json.loads(server.values["mooncake/ram/127.0.0.1:777"])
    assert (segment["name"], segment["protocol"], segment["tcp_proto_version"]) == ("127.0.0.1:777", "tcp", 2)
    assert segment["tcp_data_port"] > 0
    assert segment["buffers"] == [{"name": "127.0.0.1:777", "addr": memory.addr, "length": 4096}]
    assert here.unregister_memory(memory.addr) == 0
    assert json.loads(server.values["mooncake/ram/127.0.0.1:777"])["buffers"] == []
    own = {"mooncake/rpc_meta/127.0.0.1:777", "mooncake/ram/127.0.0.1:777"}
    del here
    # The engine deletes the other key only if the server has answered in half a second, which a busy machine may need.
    eventually(lambda: server.deleted)

    def are_deleted() -> bool:
        named("127.0.0.1:777", server)
        return server.deleted == own and not server.values

    eventually(are_deleted)


def test_a_peer_that_restarts_under_its_name_is_found_again(
    server: MetadataServer, children: Callable[..., Child]
) -> None:
    here, mine = named("127.0.0.1:1000", server), Memory(4096)
    for _ in range(2):
        target = children(TARGET.format(module="kvferry.mooncake", name="127.0.0.1:2000", url=server.url))
        base = target.run("buffer")
        # The first call after the restart may still go to the earlier process.
        eventually(lambda base=base: here.transfer_sync_write("127.0.0.1:2000", mine.addr, base, 5) == 0)
        target.kill()


def test_an_engine_that_publishes_itself_is_no_peer_whose_closed_connections_may_write(
    server: MetadataServer, children: Callable[..., Child]
) -> None:
    """The user of a connection that was closed before it is accepted is not known."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        if not Owners(listening.getsockname()).tell:
            pytest.skip("this kernel does not tell the users of connections")
    target = children(TARGET.format(module="kvferry.mooncake", name="127.0.0.1:2000", url=server.url))
    base = target.run("buffer")
    segment = json.loads(server.values["mooncake/ram/127.0.0.1:2000"])

    def write(at: int, data: bytes) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", segment["tcp_data_port"]))
        connection.sendall(struct.pack("<QQB7x", len(data), base + at, 1) + data)
        return connection

    def there(at: int) -> bytes:
        data: bytes = target.run(f"engine.read_bytes_from_buffer(buffer + {at}, 4)")
        return data

    before = there(0)
    target.send(signal.SIGSTOP)
    write(0, b"evil").close()
    with write(64, b"mine"):
        target.send(signal.SIGCONT)
        # It was accepted after the other one.
        eventually(lambda: there(64) == b"mine")
    assert there(0) == before


def test_a_failing_server_returns_minus_200_and_memory_it_rejects_is_not_registered(server: MetadataServer) -> None:
    here, memory = named("127.0.0.1:777", server), Memory(4096)
    server.refusing = True
    assert here.register_memory(memory.addr, 4096) == -200
    assert here.initialize("127.0.0.1:778", server.url, "tcp", "") == -1
    server.refusing = False
    assert here.register_memory(memory.addr, 4096) == 0
    assert here.send_probe("127.0.0.1:777") == 0


def test_a_server_that_can_not_be_reached_is_an_error() -> None:
    engine = mooncake.TransferEngine()
    assert engine.initialize("127.0.0.1", "http://127.0.0.1:1/metadata", "tcp", "") == -1
    assert "metadata server" in engine.last_error()
    for kind in ("etcd://127.0.0.1:1", "redis://127.0.0.1:1", "127.0.0.1:2379", "https://127.0.0.1:1/metadata"):
        assert engine.initialize("127.0.0.1", kind, "tcp", "") == -1


def test_initialize_ext_takes_the_type_of_the_server_apart(server: MetadataServer) -> None:
    engine = mooncake.TransferEngine()
    assert engine.initialize_ext("127.0.0.1:5", server.url.removeprefix("http://"), "tcp", "", "http") == 0
    assert "mooncake/rpc_meta/127.0.0.1:5" in server.values


# ---- the steps of Mooncake's CI with two engines


def text(length: int) -> bytes:
    return "".join(random.choices(string.ascii_letters + string.digits + string.punctuation, k=length)).encode()


class Pair:
    """An initiator here, a target in another process, and a buffer at each."""

    def __init__(self, initiator: mooncake.TransferEngine, own_name: str, target_name: str) -> None:
        self.engine, self.target = initiator, target_name
        self.own = initiator.get_first_buffer_address(own_name) or initiator.allocate_managed_buffer(64 << 20)
        self.there = initiator.get_first_buffer_address(target_name)
        assert self.own
        assert self.there, initiator.last_error()


@pytest.fixture(params=["by address", "by name", "by name, a stock server", "by address, a stock target"])
def pair(request: pytest.FixtureRequest, server: MetadataServer, children: Callable[..., Child]) -> Pair:
    url, module, options = server.url, "kvferry.mooncake", {}
    if "stock" in request.param:
        options = {"python": request.getfixturevalue("stock_python"), "env": stock.QUIET, "quiet": True}
    if request.param == "by name, a stock server":
        serving = children(**options)
        url = serving.run(
            """
            import ctypes, random, signal, socket, subprocess, sys, time
            # Below the ports that the kernel gives to clients: nobody else gets it meanwhile.
            while True:
                port = random.randrange(20_000, 32_000)
                try: socket.create_server(("127.0.0.1", port)).close(); break
                except OSError: pass
            command = [sys.executable, "-m", "mooncake.http_metadata_server", "--host", "127.0.0.1", "--port", str(port)]
            # Ends with this process, even if that is killed.
            end = lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL)
            running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=end)
            while running.poll() is None:
                try: socket.create_connection(("127.0.0.1", port)).close(); break
                except OSError: time.sleep(0.02)
            f"http://127.0.0.1:{port}/metadata"
            """
        )
        options = {}
    if request.param.startswith("by name"):
        children(TARGET.format(module=module, name="127.0.0.1:12345", url=url))
        here = mooncake.TransferEngine()
        assert here.initialize("127.0.0.1:12347", url, "tcp", "") == 0, here.last_error()
        return Pair(here, "127.0.0.1:12347", "127.0.0.1:12345")
    module = "mooncake.engine" if options else module
    target = children(TARGET.format(module=module, name="127.0.0.1", url="P2PHANDSHAKE"), **options)
    here = engine()
    return Pair(here, f"127.0.0.1:{here.get_rpc_port()}", f"127.0.0.1:{target.run('engine.get_rpc_port()')}")


def test_written_bytes_are_read_back_repeatedly(pair: Pair) -> None:
    for _ in range(1000):
        data = text(random.randint(16, 256))
        assert pair.engine.write_bytes_to_buffer(pair.own, data, len(data)) == 0
        assert pair.engine.transfer_sync_write(pair.target, pair.own, pair.there, len(data)) == 0
        assert pair.engine.write_bytes_to_buffer(pair.own, bytes(len(data)), len(data)) == 0
        assert pair.engine.transfer_sync_read(pair.target, pair.own, pair.there, len(data)) == 0
        assert pair.engine.read_bytes_from_buffer(pair.own, len(data)) == data


@pytest.mark.parametrize("way", ["sync", "async"])
def test_batches_are_read_back(pair: Pair, way: str) -> None:
    own = [pair.own + i * 1024 for i in range(100)]
    there = [pair.there + i * 1024 for i in range(100)]

    def move(direction: str, lengths: list[int]) -> int:
        code: int = getattr(pair.engine, f"batch_transfer_{way}_{direction}")(pair.target, own, there, lengths)
        if way == "async":
            assert code != 0
            return pair.engine.get_batch_transfer_status([code])
        return code

    for _ in range(10):
        blocks = [text(random.randint(32, 128)) for _ in range(100)]
        lengths = [len(block) for block in blocks]
        for addr, block in zip(own, blocks, strict=True):
            assert pair.engine.write_bytes_to_buffer(addr, block, len(block)) == 0
        assert move("write", lengths) == 0
        for addr, length in zip(own, lengths, strict=True):
            assert pair.engine.write_bytes_to_buffer(addr, bytes(length), length) == 0
        assert move("read", lengths) == 0
        assert [pair.engine.read_bytes_from_buffer(a, n) for a, n in zip(own, lengths, strict=True)] == blocks


def test_a_probe_tells_present_peers_from_absent_ones(pair: Pair) -> None:
    assert pair.engine.send_probe(pair.target) == 0
    assert pair.engine.send_probe("unreachable_peer:9") != 0
    assert pair.engine.batch_transfer_async_write("unreachable_peer:9", [pair.own], [pair.there], [64]) == 0


def test_a_stock_initiator_writes_to_kvferry_by_name(
    server: MetadataServer, children: Callable[..., Child], stock_python: str
) -> None:
    here, memory = named("127.0.0.1:777", server), Memory(8192)
    assert here.register_memory(memory.addr, 4096) == 0
    there = children(python=stock_python, env=stock.QUIET, quiet=True)
    there.run(TARGET.format(module="mooncake.engine", name="127.0.0.1:778", url=server.url))
    there.run("engine.write_bytes_to_buffer(buffer, b'by name', 7)")
    assert there.run("engine.get_first_buffer_address('127.0.0.1:777')") == memory.addr
    assert there.run(f"engine.transfer_sync_write('127.0.0.1:777', buffer, {memory.addr + 9}, 7)") == 0
    assert memory[9:16] == b"by name"
    assert there.run("engine.send_probe('127.0.0.1:777')") == 0
