"""`kvferry.mooncake` against the surface of `mooncake.engine`: signatures, return codes, tolerance.

The outcomes in `SCRIPT` are those of mooncake-transfer-engine-non-cuda 0.3.13.post1; a comment marks an intended
difference. `test_stock_mooncake.py` runs the script with stock Mooncake.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import kvferry.mooncake as mooncake
import pytest
from kit import Child, Memory, eventually, kept_port

P2P = "P2PHANDSHAKE"


def engine(host: str = "127.0.0.1") -> mooncake.TransferEngine:
    engine = mooncake.TransferEngine()
    assert engine.initialize(host, P2P, "tcp", "") == 0, engine.last_error()
    return engine


@pytest.fixture
def here() -> Iterator[mooncake.TransferEngine]:
    yield engine()


SERVER = """
from {module} import TransferEngine, TransferNotify, TransferOpcode
engine = TransferEngine()
memory = Memory({nbytes})
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
assert engine.register_memory(memory.addr, memory.nbytes) == 0
session = f"127.0.0.1:{{engine.get_rpc_port()}}"
"""


class Server:
    """An engine with registered memory in another process."""

    def __init__(self, child: Child) -> None:
        self.child = child
        self.session: str = child.run("session")
        self.base: int = child.run("memory.addr")

    def bytes(self, at: int, nbytes: int) -> bytes:
        data: bytes = self.child.run(f"memory[{at}:{at + nbytes}]")
        return data


@pytest.fixture
def servers(children: Callable[..., Child]) -> Callable[..., Server]:
    def start(nbytes: int = 1 << 20, env: dict[str, str] | None = None) -> Server:
        return Server(children(SERVER.format(module="kvferry.mooncake", nbytes=nbytes), env=env))

    return start


@pytest.fixture
def there(servers: Callable[..., Server]) -> Server:
    return servers()


def test_the_five_calls_of_vllm(servers: Callable[..., Server]) -> None:
    """The calls of vLLM's MooncakeConnector, and no others."""
    decode = servers(8 << 20)
    prefill = mooncake.TransferEngine()
    assert prefill.initialize("127.0.0.1", P2P, "tcp", "") == 0
    assert 1024 <= prefill.get_rpc_port() <= 65535
    caches = [Memory(1 << 20) for _ in range(8)]
    assert prefill.batch_register_memory([c.addr for c in caches], [c.nbytes for c in caches]) == 0
    for cache in caches:
        cache[0 : cache.nbytes] = os.urandom(cache.nbytes)
    block = 16 << 10
    moves = [(layer, random.randrange(64), place) for layer in range(8) for place in range(64)]
    ret = prefill.batch_transfer_sync_write(
        decode.session,
        [caches[layer].addr + source * block for layer, source, _ in moves],
        [decode.base + (layer * 64 + place) * block for layer, _, place in moves],
        [block] * len(moves),
    )
    assert ret == 0, prefill.last_error()
    arrived = decode.bytes(0, 8 << 20)
    for layer, source, place in moves:
        at = (layer * 64 + place) * block
        assert arrived[at : at + block] == caches[layer][source * block : (source + 1) * block]


def test_ten_threads_write_on_one_engine_at_once(here: mooncake.TransferEngine, servers: Callable[..., Server]) -> None:
    there = servers(64 << 20)
    mine = Memory(64 << 20)
    mine[0 : mine.nbytes] = os.urandom(1 << 20) * 64
    block, blocks, calls, threads = 4096, 200, 5, 10
    codes: list[int] = []

    def work(thread: int) -> None:
        for call in range(calls):
            first = (thread * calls + call) * blocks
            at = [(first + i) * block for i in range(blocks)]
            # In descending order, so that no two blocks can be merged.
            codes.append(
                here.batch_transfer_sync_write(
                    there.session,
                    [mine.addr + a for a in reversed(at)],
                    [there.base + a for a in reversed(at)],
                    [block] * blocks,
                )
            )

    workers = [threading.Thread(target=work, args=(n,)) for n in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert codes == [0] * (threads * calls), here.last_error()
    moved = block * blocks * calls * threads
    digest = f"import hashlib; hashlib.sha256(memoryview(memory.map)[:{moved}]).hexdigest()"
    assert there.child.run(digest) == hashlib.sha256(memoryview(mine.map)[:moved]).hexdigest()


def test_a_batch_of_70000_elements_is_one_call(here: mooncake.TransferEngine, servers: Callable[..., Server]) -> None:
    there = servers(70_000 * 128)
    mine = Memory(70_000 * 128)
    mine[0 : mine.nbytes] = os.urandom(mine.nbytes)
    order = list(range(70_000))
    random.shuffle(order)
    local = [mine.addr + i * 128 for i in order]
    remote = [there.base + i * 128 for i in order]
    assert here.batch_transfer_sync_write(there.session, local, remote, [128] * 70_000) == 0, here.last_error()
    assert there.bytes(0, 70_000 * 128) == mine[0 : mine.nbytes]
    identity = here.batch_transfer_async_read(there.session, local, remote, [128] * 70_000)
    assert identity != 0
    assert here.get_batch_transfer_status([identity]) == 0


# Label, expression, outcome. `a` calls, `b` is the other engine (in the same process), `T` its session; `ad` and `bd` are
# the addresses of 1 MiB each; the first 64 KiB of b's are registered when the third block begins. `ended` waits for a
# transfer of `a`, `notifies` for notifications of `b`.
SCRIPT: list[tuple[str, Any]] = [
    # initialize
    ("E().initialize('127.0.0.1', P2P, 'bogus', '')", 0),
    ("E().initialize('127.0.0.1', P2P, 'xgmi', '')", -1),
    ("E().initialize('127.0.0.1', P2P, 'tcp', None)", 0),
    ("E().initialize('127.0.0.1:777', P2P, 'tcp', '')", 0),
    ("E().initialize(b'127.0.0.1', P2P, 'tcp', '')", 0),
    ("E().initialize('', P2P, 'tcp', '')", 0),
    ("E().initialize('no such host!', P2P, 'tcp', '')", 0),
    ("E().initialize('127.0.0.1:1', 'http://127.0.0.1:1/metadata', 'tcp', '')", -1),
    ("E().initialize_ext('127.0.0.1', P2P, 'tcp', '', 'p2p')", 0),
    ("E().initialize(local_hostname='x', metadata_server=P2P, protocol='tcp', device_name='')", TypeError),
    ("E().initialize('127.0.0.1', P2P, 'tcp')", TypeError),
    ("E().initialize(7, P2P, 'tcp', '')", TypeError),
    # registration
    ("b.register_memory(bd, 0)", -1),
    ("b.register_memory(bd, 65536)", 0),
    ("b.register_memory(bd, 65536)", -7),
    ("b.register_memory(bd + 100, 10)", -7),
    ("b.register_memory(bd + 65536, 10, 'cpu:0')", 0),
    ("b.register_memory(buffer_addr=bd + 65552, capacity=10, location='cpu:0')", 0),
    ("b.register_memory(-1, 10)", TypeError),
    ("b.register_memory(1.0, 10)", TypeError),
    ("b.register_memory(2**64, 10)", TypeError),
    ("b.register_memory(None, 10)", TypeError),
    ("b.register_memory(bd)", TypeError),
    ("b.unregister_memory(bd + 65536)", 0),
    ("b.unregister_memory(bd + 65536)", -3),
    ("b.unregister_memory(bd + 5)", -3),
    ("b.unregister_memory(buffer_addr=bd + 5)", TypeError),
    ("b.batch_register_memory([], [])", 0),
    ("b.batch_register_memory([bd + 70000, bd + 80000], [100, 100])", 0),
    ("b.batch_register_memory([bd + 90000, bd + 90010], [100, 100])", -7),
    ("b.batch_register_memory([bd + 90000, bd + 80010], [100, 100])", -7),
    ("b.batch_register_memory([bd + 90000], [100])", 0),
    ("b.batch_register_memory([bd + 91000, bd + 92000], [100, 0])", -1),
    ("b.batch_register_memory([bd + 91000], [100])", 0),
    ("b.batch_register_memory([bd + 93000], [100, 100])", 0),
    ("b.batch_register_memory((bd + 94000,), (100,))", 0),
    ("b.batch_register_memory((x for x in [bd + 95000]), [100])", TypeError),
    ("b.batch_unregister_memory([bd + 70000, bd + 80000])", 0),
    ("b.batch_unregister_memory([bd + 1, bd + 90000])", -3),
    ("b.batch_unregister_memory([bd + 90000])", -3),
    ("b.batch_unregister_memory([])", 0),
    ("a.get_first_buffer_address(T) == bd", True),
    ("b.get_first_buffer_address(T) == bd", True),
    ("a.get_first_buffer_address('127.0.0.1:1')", 0),
    ("b.get_first_buffer_address(f'127.0.0.1:{a.get_rpc_port()}')", 0),
    # one range; the local memory is not registered anywhere in this script
    ("a.transfer_sync_write(T, ad, bd, 100)", 0),
    ("a.transfer_sync_write(T, ad, bd, 100, 'tcp')", 0),
    ("a.transfer_sync_write(T, ad, bd, 100, 'bogus')", 0),
    ("a.transfer_sync_write(target_hostname=T, buffer=ad, peer_buffer_address=bd, length=100, transport_hint='')", 0),
    ("a.transfer_sync_write(T, ad, bd, 0)", 0),
    ("a.transfer_sync_write(T, ad, 1, 0)", 0),
    ("a.transfer_sync_write('127.0.0.1:1', ad, bd, 100)", -1),
    ("a.transfer_sync_write('nohost.invalid:5', ad, bd, 100)", -1),
    ("a.transfer_sync_write('', ad, bd, 100)", -1),
    ("a.transfer_sync_write(None, ad, bd, 100)", TypeError),  # crashes the process in Mooncake
    ("a.transfer_sync_write(T, -1, bd, 100)", TypeError),
    ("a.transfer_sync_read(T, ad, bd, 100)", 0),
    ("a.transfer_sync(T, ad, bd, 100, Op.Write)", 0),
    ("a.transfer_sync(T, ad, bd, 100, Op.Read)", 0),
    ("a.transfer_sync(T, ad, bd, 100, 1)", TypeError),
    ("a.transfer_sync(T, ad, bd, 100, Op.Write, Notify('n', 'm'))", 0),
    ("a.transfer_sync(T, ad, bd, 100, opcode=Op.Write, notify=Notify(name='n2', msg='m2'), transport_hint='')", 0),
    ("a.transfer_sync(T, ad, bd, 100, Op.Write, None, 'hint')", 0),
    ("notifies(2)", [("n", "m"), ("n2", "m2")]),
    ("b.get_notifies()", []),
    # batches
    ("a.batch_transfer_sync_write(T, [ad, ad + 100], [bd, bd + 100], [100, 100])", 0),
    ("a.batch_transfer_sync_write(T, (ad, ad + 100), (bd, bd + 100), (100, 100), 'hint')", 0),
    ("a.batch_transfer_sync_write(T, [ad, ad + 100], [bd], [100, 100])", -1),
    ("a.batch_transfer_sync_write(T, [], [], [])", 0),
    ("a.batch_transfer_sync_write('127.0.0.1:1', [], [], [])", -1),
    ("a.batch_transfer_sync_write(T, [ad, ad + 100], [bd, bd], [100, 0])", 0),
    ("a.batch_transfer_sync_write(T, 'ab', 'ab', 'ab')", TypeError),
    ("a.batch_transfer_sync_write(T, [1.0], [bd], [1])", TypeError),
    ("a.batch_transfer_sync_write(T, [-1], [bd], [1])", TypeError),
    ("a.batch_transfer_sync_write(T, [2**64], [bd], [1])", TypeError),
    ("a.batch_transfer_sync_write(T, [ad], [bd], [True])", 0),
    ("a.batch_transfer_sync_write(T, [ad], [bd], None)", TypeError),
    ("a.batch_transfer_sync_read(T, [ad, ad + 100], [bd, bd + 100], [100, 100])", 0),
    ("a.batch_transfer_sync(T, [ad], [bd], [10], Op.Read)", 0),
    ("a.batch_transfer_sync(T, [ad], [bd], [10], Op.Write, Notify('batch', 'done'))", 0),
    ("notifies(1)", [("batch", "done")]),
    # asynchronous
    ("a.get_batch_transfer_status([a.batch_transfer_async_write(T, [ad, ad + 100], [bd, bd + 100], [100, 100])])", 0),
    ("a.get_batch_transfer_status([a.batch_transfer_async_read(T, [ad, ad + 100], [bd, bd + 100], [100, 100])])", 0),
    ("a.get_batch_transfer_status([a.batch_transfer_async(T, [ad], [bd], [10], Op.Read) for _ in range(5)])", 0),
    ("a.get_batch_transfer_status([])", 0),
    ("a.batch_transfer_async_write(T, [], [], []) > 0", True),
    ("a.get_batch_transfer_status([a.batch_transfer_async_write(T, [], [], [])])", 0),
    ("a.batch_transfer_async_write('127.0.0.1:1', [ad], [bd], [100])", 0),
    ("a.batch_transfer_async_write(T, [ad], [bd, 1], [100])", 0),
    ("i = a.transfer_submit_write(T, ad, bd, 10)", None),
    ("i > 0, ended(i)", (True, 1)),
    ("a.transfer_submit_write('127.0.0.1:1', ad, bd, 10)", 0),
    ("a.transfer_check_status(batch_id=1)", TypeError),
    # managed buffers
    ("a.allocate_managed_buffer(100) > 0, a.allocate_managed_buffer(0) > 0", (True, True)),
    ("m = a.allocate_managed_buffer(1 << 20)", None),
    ("a.write_bytes_to_buffer(m, b'hello\\0x', 7), a.read_bytes_from_buffer(m, 7)", (0, b"hello\0x")),
    ("a.write_bytes_to_buffer(m, 'hell', 4), a.write_bytes_to_buffer(m, bytearray(b'hell'), 4)", (0, 0)),
    ("a.read_bytes_from_buffer(m, 0)", b""),
    ("a.free_managed_buffer(m, 1 << 20)", 0),
    ("b.get_first_buffer_address(f'127.0.0.1:{a.get_rpc_port()}') > 0", True),
    # probes
    ("a.send_probe(T), a.send_probe(peer_server_name=T)", (0, 0)),
    ("a.send_probe('127.0.0.1:1')", -102),
    ("a.send_probe('unreachable-peer.invalid:9')", -101),
    ("a.send_probe('127.0.0.1')", -102),
    ("a.send_probe('')", -101),
    ("a.send_probe('a:b:c')", -101),
    # the rest
    ("list(json.loads(a.get_local_topology()))[0], a.get_local_topology('mlx5_0') == a.get_local_topology()", ("cpu:0", True)),
    ("a.get_local_topology(device_name=None) == a.get_local_topology()", True),
    ("type(a.get_engine()).__name__, a.get_engine_ptr() > 0", ("InnerTransferEngine", True)),
    ("a.warmup_efa_segment('x'), a.warmup_efa_segment(segment_name='x')", (0, 0)),
    ("int(Op.Read), int(Op.Write), Op.Read.name, repr(Op.Write), str(Op.Write)", (0, 1, "Read", "<TransferOpcode.Write: 1>", "TransferOpcode.Write")),
    ("Op(1) == Op.Write, Op.Read == 0, E.TransferOpcode is Op, me.Read == Op.Read, list(Op.__members__)", (True, False, True, True, ["Read", "Write"])),
    ("Notify().name, Notify().msg, Notify('a', 'b') == Notify('a', 'b')", ("", "", False)),
    ("n = Notify(); n.name = 'z'; n.msg = 'y'", None),
    ("n.name, n.msg", ("z", "y")),
    ("Notify('a')", TypeError),
    ("[getattr(me, 'SUPPORT_' + x) for x in 'CUDA EFA HIP INTRA_NVLINK MNNVL MUSA'.split()]", [False] * 6),
    ("isinstance(b.get_rpc_port(), int)", True),
]  # fmt: skip

PREPARE = """
import ctypes, json, mmap
from time import monotonic, sleep
import {module} as me
E, Op, Notify, P2P = me.TransferEngine, me.TransferOpcode, me.TransferNotify, "P2PHANDSHAKE"
a, b = E(), E()
assert a.initialize("127.0.0.1", P2P, "tcp", "") == b.initialize("127.0.0.1", P2P, "tcp", "") == 0
one, two = Memory(1 << 20), Memory(1 << 20)
ad, bd = one.addr, two.addr
T = f"127.0.0.1:{{b.get_rpc_port()}}"

def ended(identity):
    until = monotonic() + 60
    while (status := a.transfer_check_status(identity)) == 0 and monotonic() < until:
        sleep(0.005)
    return status

def notifies(count):
    until, got = monotonic() + 60, []
    while len(got) < count and monotonic() < until:
        got += [(it.name, it.msg) for it in b.get_notifies()]
        sleep(0.005)
    return got
"""


def outcomes(child: Child) -> list[tuple[str, Any, Any]]:
    """The differences from the script: expression, expected, actual."""
    code = f"""
    script = {[expression for expression, _ in SCRIPT]!r}
    answers = []
    names = dict(globals())
    for line in script:
        try:
            answers.append(names["__run"](line, names))
        except Exception as error:
            answers.append(type(error).__name__)
    answers
    """
    child.run("import sys; __run = sys.modules['__main__'].execute")
    answers = child.run(code, patience=150)
    expected = [e.__name__ if isinstance(e, type) else e for _, e in SCRIPT]
    return [(line, e, got) for (line, _), e, got in zip(SCRIPT, expected, answers, strict=True) if e != got]


def test_every_call_answers_as_mooncake_does(children: Callable[..., Child]) -> None:
    child = children(PREPARE.format(module="kvferry.mooncake"))
    assert outcomes(child) == []
    status, stderr = child.finish()
    # Once, although no log was asked for: Mooncake's engine listens on all interfaces, and there is no secret.
    assert (status, stderr.count("\n")) == (0, 1), stderr
    assert "listens on 0.0.0.0:" in stderr
    assert "without a secret" in stderr


@pytest.mark.parametrize(
    ("what", "local", "remote", "nbytes"),
    [
        ("beyond", 0, (1 << 20) - 5, 10),
        ("before", 0, -5, 10),
        ("elsewhere", 0, 1 << 40, 10),
        ("overflowing", 0, None, 100),
        ("null locally", None, 0, 10),
        ("unmapped locally", 1, 0, 10),
    ],
)
def test_an_invalid_range_returns_minus_one_and_the_next_call_succeeds(
    here: mooncake.TransferEngine, there: Server, what: str, local: int | None, remote: int | None, nbytes: int
) -> None:
    mine = Memory(4096)
    local_addr = {None: 0, 1: 4096}.get(local, mine.addr)
    remote_addr = 2**64 - 10 if remote is None else there.base + remote
    assert here.transfer_sync_write(there.session, local_addr, remote_addr, nbytes) == -1
    assert here.last_error()
    identity = here.batch_transfer_async_write(there.session, [local_addr], [remote_addr], [nbytes])
    assert identity == 0 or here.get_batch_transfer_status([identity]) == -1
    assert here.transfer_sync_write(there.session, mine.addr, there.base, 100) == 0, here.last_error()


def test_invalid_ranges_are_not_registered(here: mooncake.TransferEngine) -> None:
    assert here.register_memory(0, 10) == -1
    assert here.register_memory(2**64 - 1, 10) == -1
    assert here.batch_register_memory([4096, 8192], [10]) == -1


def test_a_call_before_initialize_fails_and_does_not_crash() -> None:
    engine = mooncake.TransferEngine()
    assert engine.get_rpc_port() == 0
    assert engine.register_memory(4096, 10) == -1
    assert engine.unregister_memory(4096) == -1
    assert engine.transfer_sync_write("127.0.0.1:1", 1, 1, 1) == -1
    assert engine.batch_transfer_async_write("127.0.0.1:1", [1], [1], [1]) == 0
    assert engine.get_batch_transfer_status([]) == 0
    assert engine.get_batch_transfer_status([1]) == -1
    assert engine.transfer_check_status(1) == -1
    assert engine.allocate_managed_buffer(10) == 0
    assert engine.free_managed_buffer(4096, 10) == -1
    assert engine.get_first_buffer_address("127.0.0.1:1") == 0
    assert engine.send_probe("127.0.0.1:1") == -1
    assert engine.get_notifies() == []
    assert engine.get_engine() is None
    assert engine.get_engine_ptr() == 0
    assert "initialize" in engine.last_error()


def test_a_stale_or_made_up_id_returns_minus_one(here: mooncake.TransferEngine, there: Server) -> None:
    mine = Memory(4096)
    identity = here.batch_transfer_async_write(there.session, [mine.addr], [there.base], [10])
    assert here.get_batch_transfer_status([identity]) == 0
    assert here.get_batch_transfer_status([identity]) == -1
    assert here.transfer_check_status(identity) == -1
    for unknown in (0, 1 << 40, 0x7F0000000000, 2**64 - 1):
        assert here.get_batch_transfer_status([unknown]) == -1
        assert here.transfer_check_status(unknown) == -1
    other = engine()
    identity = here.batch_transfer_async_write(there.session, [mine.addr], [there.base], [10])
    assert other.get_batch_transfer_status([identity]) == -1
    assert here.get_batch_transfer_status([identity, identity]) == -1


def test_waiting_for_a_failed_transfer_uses_up_all_ids(here: mooncake.TransferEngine, there: Server) -> None:
    mine = Memory(4096)
    good = here.batch_transfer_async_write(there.session, [mine.addr], [there.base], [10])
    bad = here.batch_transfer_async_write(there.session, [mine.addr], [1], [10])
    assert good and bad and good != bad
    assert here.get_batch_transfer_status([bad, good]) == -1
    assert here.get_batch_transfer_status([good]) == -1


def test_initialize_again_replaces_the_engine(here: mooncake.TransferEngine, there: Server) -> None:
    mine = Memory(4096)
    assert here.register_memory(mine.addr, 4096) == 0
    before = here.get_rpc_port()
    assert here.initialize("127.0.0.1", P2P, "tcp", "") == 0
    assert here.get_rpc_port() != before
    assert here.register_memory(mine.addr, 4096) == 0
    assert here.transfer_sync_write(there.session, mine.addr, there.base, 100) == 0
    assert here.initialize("127.0.0.1", "what://is.this", "tcp", "") == -1
    assert here.transfer_sync_write(there.session, mine.addr, there.base, 100) == 0


def test_managed_buffers_are_registered_distinct_and_used_again(here: mooncake.TransferEngine, there: Server) -> None:
    sizes = [1, 8192, 8193, 100_000, 1 << 20, (256 << 20) + 1]
    buffers = [here.allocate_managed_buffer(size) for size in sizes]
    assert all(buffers)
    ends = sorted((addr, addr + size) for addr, size in zip(buffers, sizes, strict=True))
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))
    for addr, size in zip(buffers, sizes, strict=True):
        assert here.write_bytes_to_buffer(addr + size - 1, b"!", 1) == 0
        # Registered: the other engine can reach it.
        session = f"127.0.0.1:{here.get_rpc_port()}"
        assert there.child.run(
            f"engine.transfer_sync_read({session!r}, memory.addr, {addr + size - 1}, 1), memory[0:1]"
        ) == (0, b"!")
    assert [here.free_managed_buffer(addr, size) for addr, size in zip(buffers, sizes, strict=True)] == [0] * 6
    assert here.free_managed_buffer(buffers[0], 1) == -1
    again = here.allocate_managed_buffer(100_000)
    assert again in buffers
    many = [here.allocate_managed_buffer(8192) for _ in range(1000)]
    assert len(set(many)) == 1000
    assert [here.free_managed_buffer(addr, 8192) for addr in many] == [0] * 1000


def test_copying_more_bytes_than_given_is_refused(here: mooncake.TransferEngine) -> None:
    buffer = here.allocate_managed_buffer(100)
    assert here.write_bytes_to_buffer(buffer, b"abc", 4) == -1
    assert here.write_bytes_to_buffer(0, b"abc", 3) == -1
    assert here.read_bytes_from_buffer(0, 3) == b""


def test_a_peer_that_restarts_gets_a_new_session(
    servers: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only the end of the connection ends the call to the killed peer.
    monkeypatch.setenv("KVFERRY_TIMEOUT_MS", "600000")
    with kept_port() as address:
        here, first = engine(), servers(env={"KVFERRY_LISTEN": address})
        mine = Memory(4096)
        assert here.transfer_sync_write(first.session, mine.addr, first.base, 100) == 0
        first.child.kill()
        assert here.transfer_sync_write(first.session, mine.addr, first.base, 100) == -1
        assert here.send_probe(first.session) == -102
        second = servers()
        assert here.transfer_sync_write(second.session, mine.addr, second.base, 100) == 0
        # The same port again.
        third = servers(env={"KVFERRY_LISTEN": address})
        assert third.session == first.session == address
        assert here.transfer_sync_write(third.session, mine.addr, third.base, 100) == 0, here.last_error()
        assert here.send_probe(third.session) == 0


def test_a_stopped_peer_delays_calls_at_most_by_the_silence_limit_and_no_other_peer(
    servers: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    import signal

    # The peer that is well, and this process, run on a busy machine at least once in three quarters of it.
    monkeypatch.setenv("KVFERRY_SILENCE_MS", "4000")
    monkeypatch.setenv("KVFERRY_TIMEOUT_MS", "600000")
    here, silent, well = engine(), servers(), servers()
    mine = Memory(1 << 20)

    def is_delayed() -> bool:
        """False if this process was suspended for the limit, which ends all sessions."""
        for server in (silent, well):
            assert here.transfer_sync_write(server.session, mine.addr, server.base, 100) == 0, here.last_error()
        silent.child.send(signal.SIGSTOP)
        code: list[int] = []
        stuck = threading.Thread(
            target=lambda: code.append(here.transfer_sync_write(silent.session, mine.addr, silent.base, 1 << 20))
        )
        stuck.start()
        errors = []
        while stuck.is_alive():
            if here.transfer_sync_write(well.session, mine.addr, well.base, 4096) != 0:
                errors.append(here.last_error())
            time.sleep(0.01)
        silent.child.send(signal.SIGCONT)
        assert code == [-1]
        assert all("was suspended" in error for error in errors), errors
        return not errors

    eventually(is_delayed)


def test_the_listening_address_follows_the_local_hostname(monkeypatch: pytest.MonkeyPatch) -> None:
    def listening(engine: mooncake.TransferEngine) -> set[str]:
        port = f":{engine.get_rpc_port():04X}"
        lines = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/self/net/{name}").readlines()[1:]]
        return {line[1].rsplit(":", 1)[0] for line in lines if line[1].endswith(port) and line[3] == "0A"}

    assert listening(engine("127.0.0.1")) == {"0100007F"}
    assert listening(engine("localhost")) == {"0100007F"}
    assert listening(engine("10.1.2.3")) == {"00000000"}
    assert listening(engine("")) == {"00000000"}
    monkeypatch.setenv("KVFERRY_LISTEN", "127.0.0.1:0")
    assert listening(engine("10.1.2.3")) == {"0100007F"}


def test_the_environment_configures_the_engine(servers: Callable[..., Server], monkeypatch: pytest.MonkeyPatch) -> None:
    secretive = servers(env={"KVFERRY_SECRET": "s3cret"})
    mine = Memory(4096)
    innocent = engine()
    assert innocent.transfer_sync_write(secretive.session, mine.addr, secretive.base, 10) == -1
    monkeypatch.setenv("KVFERRY_SECRET", "s3cret")
    initiated = engine()
    assert initiated.transfer_sync_write(secretive.session, mine.addr, secretive.base, 10) == 0, initiated.last_error()
    monkeypatch.setenv("KVFERRY_CHECKSUM", "perhaps")
    refused = mooncake.TransferEngine()
    assert refused.initialize("127.0.0.1", P2P, "tcp", "") == -1
    assert "perhaps" in refused.last_error()
    assert "s3cret" not in refused.last_error()


def test_the_rest_of_mooncake_raises_not_implemented_error() -> None:
    assert not mooncake.SharedSegment.supported()
    for call in (
        mooncake.SharedSegment,
        mooncake.RpcInterface,
        mooncake.ReceivedData,
        mooncake.ReceivedTensor,
        mooncake.create_rpc_client,
        mooncake.create_rpc_server,
        lambda: mooncake.SharedSegment.create("x", 1, 1, 0),
    ):
        with pytest.raises(NotImplementedError):
            call()


def test_topology_is_json(here: mooncake.TransferEngine) -> None:
    topology = json.loads(here.get_local_topology())
    assert topology["cpu:0"] == [[], []]


def test_orders_whose_end_runs_code_are_replaced_by_several_threads() -> None:
    program = """if True:
        import threading, time
        from kvferry.mooncake import TransferEngine

        class Event:
            cuda_event = 1

            def __del__(self):
                time.sleep(0.01)

        engine = TransferEngine()
        assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0

        def replace():
            for _ in range(20):
                assert engine.set_after(Event()) == 0

        threads = [threading.Thread(target=replace) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    """
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
