"""The block store: blocks of memory on disk and back."""

from __future__ import annotations

import asyncio
import hashlib
import os
import pickle
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import kvferry
import pytest
from conftest import LOOPBACK
from kit import Child, eventually, remove, run_python, ticks_during

KIB = 1024
MIB = 1 << 20
BLOCK = 64 * KIB
CAPACITY = 64 * MIB


@pytest.fixture
def store(agent: kvferry.Agent, tmp_path: Path) -> Iterator[kvferry.Store]:
    with kvferry.Store(agent, tmp_path / "kv", CAPACITY) as store:
        yield store


def hashes(count: int, name: str = "prompt") -> list[bytes]:
    return [hashlib.sha256(f"{name} {block}".encode()).digest() for block in range(count)]


class Pool:
    """Memory of blocks, filled with random bytes."""

    def __init__(self, agent: kvferry.Agent, count: int, nbytes: int = BLOCK) -> None:
        self.nbytes = nbytes
        self.data = bytearray(os.urandom(count * nbytes))
        self.region = agent.register(self.data, "none")
        self.blocks = kvferry.Blocks(self.region, range(0, count * nbytes, nbytes), nbytes)

    def list(self, *numbers: int) -> list[tuple[kvferry.Region, int, int]]:
        return [(self.region, number * self.nbytes, self.nbytes) for number in numbers]


def counts(put: kvferry.Put) -> tuple[int, int, int, int]:
    return put.stored, put.present, put.refused, put.failed


def test_blocks_come_back_as_they_were_put(agent: kvferry.Agent, store: kvferry.Store) -> None:
    space = store.space("model@1")
    source, target = Pool(agent, 8), Pool(agent, 8)
    put = space.put(hashes(8), source.blocks)
    assert counts(put) == (8, 0, 0, 0)
    assert repr(put) == "<kvferry.Put 8 stored, 0 present, 0 refused, 0 failed>"
    assert space.put(hashes(8), source.blocks) != put
    assert counts(space.put(hashes(8), source.blocks)) == (0, 8, 0, 0)
    assert space.lookup(hashes(8)) == space.touch(hashes(8)) == 8
    assert space.get(hashes(8), target.blocks) == 8
    assert target.data == source.data


def test_numpy_arrays_and_allocated_memory_hold_blocks(agent: kvferry.Agent, store: kvferry.Store) -> None:
    numpy = pytest.importorskip("numpy")
    space = store.space("model@1")
    source = numpy.random.default_rng(1).integers(0, 1 << 63, (4, BLOCK // 8), dtype=numpy.int64)
    target = agent.allocate(4 * BLOCK)
    offsets = numpy.arange(4) * BLOCK
    assert space.put(hashes(4), kvferry.Blocks(agent.register(source), offsets, BLOCK)).stored == 4
    assert space.get(hashes(4), kvferry.Blocks(target, offsets, numpy.full(4, BLOCK))) == 4
    assert bytes(target.memory()) == source.tobytes()


def test_only_the_beginning_of_a_prompt_that_is_there_is_found(agent: kvferry.Agent, store: kvferry.Store) -> None:
    space = store.space("model@1")
    source, target = Pool(agent, 8), Pool(agent, 8)
    first, rest = hashes(3), hashes(8, "other")
    space.put(first, source.list(0, 1, 2))
    assert space.lookup(first + rest) == 3
    assert space.lookup(rest + first) == 0
    assert space.lookup([]) == 0
    assert space.get(first + rest, target.blocks) == 3
    assert target.data[: 3 * BLOCK] == source.data[: 3 * BLOCK]
    # From a block on: the memory is that of the blocks behind it.
    assert space.get(first + rest, target.list(5, 6, 7), 1) == 2
    assert target.data[5 * BLOCK : 7 * BLOCK] == source.data[BLOCK : 3 * BLOCK]
    assert space.put(first + rest, source.list(3, 4), first=3).stored == 2
    assert space.lookup(first + rest) == 5


def test_blocks_may_be_in_pieces(agent: kvferry.Agent, store: kvferry.Store) -> None:
    space = store.space("model@1")
    layers, target = [Pool(agent, 4, 4 * KIB) for _ in range(3)], Pool(agent, 4, 12 * KIB)
    blocks = kvferry.Blocks(layers[0].region, [0, 4 * KIB, 8 * KIB, 12 * KIB], 4 * KIB)
    for layer in layers[1:]:
        blocks.add_pieces(layer.region, range(0, 16 * KIB, 4 * KIB), 4 * KIB)
    assert (len(blocks), blocks.nbytes) == (4, 4 * 12 * KIB)
    assert repr(blocks) == "<kvferry.Blocks 4 blocks, 49152 bytes>"
    assert space.put(hashes(4), blocks).stored == 4
    assert space.get(hashes(4), target.blocks) == 4
    for block in range(4):
        pieces = b"".join(layer.data[block * 4 * KIB :][: 4 * KIB] for layer in layers)
        assert target.data[block * 12 * KIB :][: 12 * KIB] == pieces
    # The same as lists.
    back = [Pool(agent, 4, 4 * KIB) for _ in range(3)]
    lists = [[layer.list(block)[0] for layer in back] for block in range(4)]
    assert space.get(hashes(4), lists) == 4
    assert [layer.data for layer in back] == [layer.data for layer in layers]


@pytest.mark.parametrize(
    "other",
    [
        {"model": "model@2"},
        {"layout": b"fp8"},
        {"tenant": b"acme"},
        {"adapter": "lora@1"},
        {"group": 1},
        {"shard": (1, 2)},
    ],
)
def test_namespaces_do_not_see_each_others_blocks(
    agent: kvferry.Agent, store: kvferry.Store, other: dict[str, Any]
) -> None:
    source = Pool(agent, 2)
    store.space("model@1").put(hashes(2), source.blocks)
    assert store.space(**{"model": "model@1"} | other).lookup(hashes(2)) == 0
    same = store.space("model@1", layout=b"", tenant=b"", adapter="", group=0, shard=(0, 1))
    assert same.lookup(hashes(2)) == 2


def test_blocks_are_there_when_the_store_is_opened_again(agent: kvferry.Agent, tmp_path: Path) -> None:
    directories: list[Path | str] = [tmp_path / "a", str(tmp_path / "b")]
    source, target = Pool(agent, 8), Pool(agent, 8)
    with kvferry.Store(agent, directories, CAPACITY, segment_bytes=MIB, blocks_max=4096) as store:
        store.space("model@1").put(hashes(8), source.blocks, priority=80, duration=3600.0, leave=True)
        store.sync()
    store = kvferry.Store(agent, directories, CAPACITY)
    assert store.space("model@1").get(hashes(8), target.blocks) == 8
    assert target.data == source.data
    store.close()


def test_processes_share_a_store(
    agent: kvferry.Agent, store: kvferry.Store, tmp_path: Path, children: Callable[..., Child]
) -> None:
    source, target = Pool(agent, 8), Pool(agent, 4)
    space = store.space("model@1")
    space.put(hashes(8), source.blocks)
    child = children(
        f"""
        import kvferry
        agent = kvferry.Agent(listen="127.0.0.1:0")
        store = kvferry.Store(agent, {str(tmp_path / "kv")!r}, {CAPACITY})
        space = store.space("model@1")
        region = agent.allocate({8 * BLOCK})
        blocks = kvferry.Blocks(region, range(0, {8 * BLOCK}, {BLOCK}), {BLOCK})
        """
    )
    assert child.run(f"space.get({hashes(8)!r}, blocks), store.stats()['processes']") == (8, 2)
    assert child.run("region.read_at(0, region.nbytes)") == source.data
    assert child.run(f"space.put({hashes(4, 'mine')!r}, [(region, 0, {BLOCK})] * 4).stored") == 4
    assert space.get(hashes(4, "mine"), target.blocks) == 4
    assert target.data == source.data[:BLOCK] * 4
    assert child.finish() == (0, "")
    eventually(lambda: store.stats()["processes"] == 1)


def test_operations_in_the_background_can_be_awaited(agent: kvferry.Agent, store: kvferry.Store) -> None:
    space = store.space("model@1")
    source, target = Pool(agent, 64), Pool(agent, 64)

    async def go() -> int:
        put = space.put_async(hashes(64), source.blocks, priority=50)
        one, same = await asyncio.gather(asyncio.ensure_future(put), asyncio.ensure_future(put))
        assert counts(one) == counts(same) == (64, 0, 0, 0)
        return await space.get_async(hashes(64), target.blocks)

    assert asyncio.run(go()) == 64
    assert target.data == source.data


def test_an_operation_keeps_its_one_outcome(agent: kvferry.Agent, store: kvferry.Store) -> None:
    space = store.space("model@1")
    source = Pool(agent, 8)
    operation: kvferry.Pending[kvferry.Put] = space.put_async(hashes(8), source.blocks)
    assert select.select([operation], [], [], 30)[0] == [operation]
    assert operation.done()
    for put in (operation.poll(), operation.wait(), operation.wait(0)):
        assert put is not None
        assert counts(put) == (8, 0, 0, 0)
    assert repr(operation) == "<kvferry.Pending done>"
    with pytest.raises(kvferry.InvalidArgumentError):
        space.get_async(hashes(4), source.blocks)


def test_an_operation_that_nobody_waits_for_is_carried_out(agent: kvferry.Agent, tmp_path: Path) -> None:
    pool = Pool(agent, 64)
    store = kvferry.Store(agent, tmp_path, CAPACITY)
    store.space("model@1").put_async(hashes(64), pool.blocks)
    # The last reference closes the store, after what runs has ended.
    del store
    with kvferry.Store(agent, tmp_path, CAPACITY) as store:
        assert store.space("model@1").lookup(hashes(64)) == 64


def test_the_memory_of_an_operation_is_kept(agent: kvferry.Agent, store: kvferry.Store) -> None:
    space = store.space("model@1")
    region = agent.allocate(16 * MIB)
    region.write_at(0, b"kept" * (4 * MIB))
    put = space.put_async(hashes(32), [(region, number * MIB // 2, MIB // 2) for number in range(32)])
    del region
    done = put.wait()
    assert done is not None
    assert done.stored == 32
    target = Pool(agent, 32, MIB // 2)
    assert space.get(hashes(32), target.blocks) == 32
    assert target.data == b"kept" * (4 * MIB)


def test_other_threads_run_while_blocks_are_put_and_read(agent: kvferry.Agent, tmp_path: Path) -> None:
    pool = Pool(agent, 32, 4 * MIB)
    with kvferry.Store(agent, tmp_path, 512 * MIB, segment_bytes=32 * MIB) as store:
        space = store.space("model@1")
        # A call may end before the other thread runs, on a busy machine or a fast one. Between two bytecodes of this
        # thread the other one runs once at most.
        names = [hashes(32, f"turn {turn}") for turn in range(50)]
        put = next((it for it in names if ticks_during(partial(space.put, it, pool.blocks)) >= 3), None)
        assert put is not None
        assert any(ticks_during(partial(space.get, put, pool.blocks)) >= 3 for _ in range(50))


def test_the_counters_have_names(agent: kvferry.Agent, store: kvferry.Store) -> None:
    space = store.space("model@1")
    pool = Pool(agent, 4)
    space.put(hashes(4), pool.blocks)
    space.put(hashes(4), pool.blocks)
    space.get(hashes(4), pool.blocks)
    stats = store.stats()
    assert stats.pop("disk_bytes") >= 4 * BLOCK
    assert stats == {
        "asked": 4,
        "hits": 4,
        "host_hits": 0,
        "shared_hits": 0,
        "disk_reads": 4,
        "bytes_read": 4 * BLOCK,
        "stored": 4,
        "bytes_written": 4 * BLOCK,
        "present": 4,
        "refused": 0,
        "refused_no_space": 0,
        "refused_contended": 0,
        "refused_index_full": 0,
        "refused_waiting": 0,
        "failed": 0,
        "corrupt": 0,
        "evicted": 0,
        "bytes_collected": 0,
        "uploaded": 0,
        "upload_dropped": 0,
        "upload_failed": 0,
        "fetched": 0,
        "fetch_missed": 0,
        "fetch_failed": 0,
        "fetch_corrupt": 0,
        "lost_directories": 0,
        "hanging_directories": 0,
        "blocks": 4,
        "capacity_bytes": CAPACITY,
        "processes": 1,
        "host_blocks": 0,
        "host_bytes": 0,
        "waiting_bytes": 0,
        "unwritten_blocks": 0,
        "is_keeper": 1,
        "uploads_waiting": 0,
        "is_away": 0,
    }


def test_a_damaged_block_is_missed_and_counted(agent: kvferry.Agent, store: kvferry.Store, tmp_path: Path) -> None:
    space = store.space("model@1")
    source, target = Pool(agent, 3), Pool(agent, 3)
    space.put(hashes(3), source.blocks)
    (segment,) = [path for path in (tmp_path / "kv").iterdir() if source.data[BLOCK : 2 * BLOCK] in path.read_bytes()]
    at = segment.read_bytes().index(source.data[BLOCK : 2 * BLOCK])
    with segment.open("r+b") as file:
        file.seek(at + 100)
        file.write(b"damage")
    assert space.get(hashes(3), target.blocks) == 1
    assert store.stats()["corrupt"] == 1
    assert space.lookup(hashes(3)) == 1


def test_wrong_arguments_are_refused(agent: kvferry.Agent, store: kvferry.Store) -> None:
    space = store.space("model@1")
    pool = Pool(agent, 4)
    for wrong in (
        lambda: space.lookup([b"short"]),
        lambda: space.lookup([b"x" * 65]),
        lambda: space.get(hashes(3), pool.blocks),
        lambda: space.get(hashes(4), pool.blocks, 1),
        lambda: space.put(hashes(1), [(pool.region, 0, 0)]),
        lambda: space.put(hashes(1), [[]]),
        lambda: space.put(hashes(4), pool.blocks, priority=101),
        lambda: space.put(hashes(4), pool.blocks, leave=True),
        lambda: space.put(hashes(4), pool.blocks, duration=-1.0),
        lambda: kvferry.Blocks(pool.region, [0, 1], [1]),
        lambda: pool.blocks.add_pieces(pool.region, [0, 1], 1),
    ):
        with pytest.raises(kvferry.InvalidArgumentError):
            wrong()
    for of_no_type in (
        lambda: space.lookup("text"),  # type: ignore[arg-type]
        lambda: space.lookup(hashes(1)[0]),  # type: ignore[arg-type]
        lambda: space.lookup(iter(hashes(1))),  # type: ignore[arg-type]
        lambda: space.lookup(7),  # type: ignore[arg-type]
        lambda: space.get(hashes(1), [(0, BLOCK)]),  # type: ignore[list-item]
        lambda: space.get(hashes(1), [(pool.region, 0)]),  # type: ignore[list-item]
        lambda: space.get(hashes(1), pool.region),  # type: ignore[arg-type]
        lambda: space.get(hashes(1), [pool.region]),  # type: ignore[list-item]
        lambda: pickle.dumps(space),
    ):
        with pytest.raises(TypeError):
            of_no_type()
    for beyond in (
        lambda: kvferry.Blocks(pool.region, [len(pool.data) - 1], 2),
        lambda: kvferry.Blocks(pool.region, [(1 << 64) - 1], 2),
        lambda: space.get(hashes(1), [(pool.region, 0, len(pool.data) + 1)]),
    ):
        with pytest.raises(kvferry.OutOfBoundsError):
            beyond()
    assert space.lookup(hashes(4)) == 0


def test_the_memory_must_be_registered_with_the_stores_agent(agent: kvferry.Agent, store: kvferry.Store) -> None:
    space = store.space("model@1")
    pool = Pool(agent, 4)
    with kvferry.Agent(listen=LOOPBACK) as other:
        foreign = Pool(other, 4)
        for memory in (foreign.blocks, foreign.list(0, 1), [[*pool.list(0), *foreign.list(1)]]):
            with pytest.raises(kvferry.InvalidArgumentError, match="the store's"):
                space.put(hashes(4), memory)
        with pytest.raises(kvferry.InvalidArgumentError, match="one agent"):
            pool.blocks.add_pieces(foreign.region, [0, 1, 2, 3], 1)
    space.put(hashes(4), pool.blocks)
    agent.unregister(pool.region)
    with pytest.raises(kvferry.NotRegisteredError):
        space.get(hashes(4), pool.blocks)
    with pytest.raises(kvferry.NotRegisteredError):
        space.put(hashes(4, "new"), pool.blocks)


@pytest.mark.parametrize(
    ("directory", "capacity", "keywords"),
    [
        ([], CAPACITY, {}),
        ("kv", MIB, {}),
        ("kv", CAPACITY, {"segment_bytes": 5000}),
        ("kv", CAPACITY, {"direct": "yes"}),
    ],
)
def test_a_store_is_not_opened_with_wrong_arguments(
    agent: kvferry.Agent,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    directory: Any,
    capacity: int,
    keywords: dict[str, Any],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(kvferry.InvalidArgumentError):
        kvferry.Store(agent, directory, capacity, **keywords)
    for wrong in (7, [7], b"kv"):
        with pytest.raises(TypeError):
            kvferry.Store(agent, wrong, CAPACITY)  # type: ignore[arg-type]


def test_a_directory_that_cannot_be_used_raises_and_is_named(agent: kvferry.Agent, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(kvferry.IoError, match="file"):
        kvferry.Store(agent, tmp_path / "file", CAPACITY)


def test_closing_a_store_carries_out_what_waits(agent: kvferry.Agent, tmp_path: Path) -> None:
    pool = Pool(agent, 4)
    store = kvferry.Store(agent, tmp_path, CAPACITY)
    space = store.space("model@1")
    puts = [space.put_async(hashes(4, str(number)), pool.blocks) for number in range(64)]
    store.close()
    for operation in puts:
        put = operation.poll()
        assert put is not None
        assert put.stored == 4


def test_a_put_that_waits_for_its_turn_can_be_cancelled_and_ends_in_time(agent: kvferry.Agent, tmp_path: Path) -> None:
    pool, one = Pool(agent, 8), Pool(agent, 1)
    open_store = partial(kvferry.Store, agent, tmp_path, 12 * MIB, segment_bytes=MIB)
    with open_store(put_wait=1.0) as keeps:
        # Leases keep all blocks.
        pins = []
        for number in range(1000):
            put = keeps.space("model@1").put(hashes(8, str(number)), pool.blocks)
            pins.append(keeps.space("model@1").pin(hashes(8, str(number)), 3600.0))
            if put.refused_no_space:
                break
        # No thread takes the place of those that wait for space.
        with open_store(put_wait=3600.0, hang_after=3600.0) as store:
            space = store.space("model@1")
            puts = [space.put_async(hashes(1, f"held {at}"), one.blocks, wait=3600.0) for at in range(4)]
            puts.append(space.put_async(hashes(1, "waits"), one.blocks, wait=3600.0))
            cancelled = space.put_async(hashes(1, "cancelled"), one.blocks, wait=3600.0)
            late = space.put_async(hashes(1, "late"), one.blocks, wait=0.02)
            assert (cancelled.cancel(), cancelled.cancel()) == (True, False)
            for refused in (cancelled.poll(), late.wait(60.0)):
                assert refused is not None
                assert (counts(refused), refused.refused_waiting) == ((0, 0, 1, 0), 1)
            assert not any(put.done() for put in puts)
            assert store.stats()["refused_waiting"] == 2
            got = space.get_async(hashes(8, "0"), pool.blocks)
            assert not got.cancel()
            assert got.wait(60.0) == 8
        # Closing the store carries out what waits, and waits for no space.
        assert [put.poll().refused_no_space for put in puts] == [1] * 5  # type: ignore[union-attr]
        assert not puts[-1].cancel()
        with pytest.raises(kvferry.InvalidArgumentError):
            keeps.space("model@1").put_async(hashes(1), one.blocks, wait=-1.0)


def test_a_store_of_an_agent_that_was_shut_down_raises_and_closes(tmp_path: Path) -> None:
    with kvferry.Agent(listen=LOOPBACK) as agent:
        pool = Pool(agent, 4)
        store = kvferry.Store(agent, tmp_path, CAPACITY)
    with pytest.raises(kvferry.NotRegisteredError):
        store.space("model@1").put(hashes(4), pool.blocks)
    store.close()
    with pytest.raises(kvferry.ShutdownError):
        kvferry.Store(agent, tmp_path, CAPACITY)


def test_a_closed_store_raises_shutdown_error(agent: kvferry.Agent, tmp_path: Path) -> None:
    pool = Pool(agent, 4)
    store = kvferry.Store(agent, tmp_path, CAPACITY)
    space = store.space("model@1")
    put = space.put_async(hashes(4), pool.blocks)
    store.close()
    store.close()
    done = put.wait(0)
    assert done is not None
    assert done.stored == 4
    for call in (
        lambda: space.lookup(hashes(4)),
        lambda: space.touch(hashes(4)),
        lambda: space.get(hashes(4), pool.blocks),
        lambda: space.put(hashes(4), pool.blocks),
        lambda: space.get_async(hashes(4), pool.blocks),
        lambda: space.put_async(hashes(4), pool.blocks),
        store.sync,
    ):
        with pytest.raises(kvferry.ShutdownError, match="the store was closed"):
            call()
    assert repr(store) == f"<kvferry.Store {tmp_path}>"
    assert repr(space) == '<kvferry.Space "model@1">'


START = """
import kvferry, os, sys, threading, time
agent = kvferry.Agent(listen="127.0.0.1:0")
store = kvferry.Store(agent, {directory!r}, 256 << 20, segment_bytes=8 << 20)
space = store.space("model@1")
region = agent.allocate(8 << 20)
blocks = kvferry.Blocks(region, range(0, 8 << 20, 1 << 20), 1 << 20)
hashes = [bytes([n + 1]) * 32 for n in range(8)]
"""


@pytest.mark.parametrize(
    "end",
    [
        "space.put(hashes, blocks)",
        "space.put_async(hashes, blocks)",
        "sys.keep = (store, space, space.put_async(hashes, blocks))",
        "put = space.put_async(hashes, blocks); del agent, store, space, region, blocks",
        "threading.Thread(target=lambda: [space.put([os.urandom(32)], [(region, 0, 1 << 20)]) for _ in range(10**9)],"
        "daemon=True).start(); time.sleep(0.3)",
        "agent.shutdown()",
        "agent.shutdown(); store.close()",
    ],
)
def test_the_interpreter_exits_cleanly_with_an_open_store(end: str, tmp_path: Path) -> None:
    ended = run_python(START.format(directory=str(tmp_path)) + end)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_what_was_put_before_the_exit_is_sealed(agent: kvferry.Agent, tmp_path: Path) -> None:
    ended = run_python(START.format(directory=str(tmp_path)) + "space.put_async(hashes, blocks)")
    assert (ended.returncode, ended.stderr) == (0, "")
    with kvferry.Store(agent, tmp_path, 256 * MIB) as store:
        assert store.space("model@1").lookup([bytes([n + 1]) * 32 for n in range(8)]) == 8


def test_after_a_fork_every_call_raises_forked_error_and_the_parent_goes_on(
    tmp_path: Path, children: Callable[..., Child]
) -> None:
    child = children(START.format(directory=str(tmp_path)))
    child.run("put = space.put_async(hashes, blocks); put.wait(); watch = store.watch([[space]])")
    calls = [
        "kvferry.Store(agent, 'kv', 64 << 20)",
        "kvferry.Blocks(region, [0], 1)",
        "store.space('model@1')",
        "store.sync()",
        "store.stats()",
        "store.watch([[space]])",
        "store.close()",
        "watch.add(0, hashes)",
        "watch.take(1)",
        "watch.gather(1)",
        "space.lookup(hashes)",
        "space.touch(hashes)",
        "space.get(hashes, blocks)",
        "space.put(hashes, blocks)",
        "space.get_async(hashes, blocks)",
        "space.put_async(hashes, blocks)",
        "put.done()",
        "put.poll()",
        "put.wait(1)",
        "put.fileno()",
        "put.cancel()",
    ]
    answers, status = child.run(
        f"""
        import json
        r, w = os.pipe()
        pid = os.fork()
        if pid == 0:
            answers = {{}}
            for call in {calls!r}:
                try: answers[call] = repr(eval(call))
                except BaseException as e: answers[call] = type(e).__name__
            with store: pass
            del put, watch, space, store, blocks, region, agent
            os.write(w, json.dumps(answers).encode())
            os._exit(0)
        os.close(w)
        text = b""
        while piece := os.read(r, 65536): text += piece
        os.close(r)
        json.loads(text), os.waitpid(pid, 0)[1]
        """
    )
    assert status == 0
    assert answers == dict.fromkeys(calls, "ForkedError")
    assert child.run("space.put([b'x' * 32], [(region, 0, 4096)]).stored, space.get(hashes, blocks)") == (1, 8)
    assert child.run("store.stats()['processes']") == 1
    assert child.finish() == (0, "")


def test_ctrl_c_ends_the_wait_for_an_operation(tmp_path: Path, children: Callable[..., Child]) -> None:
    child = children(START.format(directory=str(tmp_path)))
    # Four puts at a time: the last one waits for those before.
    child.start(
        """
        puts = [space.put_async([os.urandom(32) for _ in range(8)], blocks) for _ in range(4)]
        try:
            begun()
            while True: puts[-1].wait(60)
        except KeyboardInterrupt: pass
        "interrupted"
        """
    )
    child.has_begun()
    # While it waits, most of the time.
    time.sleep(0.3)
    child.send(signal.SIGINT)
    assert child.result() == "interrupted"
    assert child.run("all(sum((p.stored, p.refused)) == 8 for p in [put.wait() for put in puts])") is True
    assert child.finish() == (0, "")


def test_stores_leak_no_descriptor_and_no_thread(tmp_path: Path, children: Callable[..., Child]) -> None:
    child = children("import kvferry, os")
    code = f"""
    for _ in range(5):
        with kvferry.Agent(listen="127.0.0.1:0") as agent, kvferry.Store(agent, {str(tmp_path)!r}, {CAPACITY}) as store:
            region = agent.allocate(4096)
            put = store.space("model").put_async([os.urandom(32)], [(region, 0, 4096)])
            assert put.wait().stored == 1
            put.fileno()
        del put, store, agent, region
    # A thread that unmaps large mappings ends after the last of them.
    left()
    """
    first = child.run(code)
    assert child.run(code) == first
    assert first[1] == 1
    assert child.finish() == (0, "")


def test_a_tier_in_host_memory_is_read_before_the_disk(agent: kvferry.Agent, tmp_path: Path) -> None:
    source, target = Pool(agent, 8), Pool(agent, 8)
    with kvferry.Store(agent, tmp_path / "kv", CAPACITY, host_bytes=4 * MIB) as store:
        space = store.space("model@1")
        assert counts(space.put(hashes(8), source.blocks)) == (8, 0, 0, 0)
        assert space.get(hashes(8), target.blocks) == 8
        store.sync()
        stats = store.stats()
        assert (stats["host_hits"], stats["disk_reads"], stats["host_blocks"]) == (8, 0, 8)
        assert (stats["host_bytes"], stats["waiting_bytes"]) == (8 * BLOCK, 0)
    assert target.data == source.data
    with kvferry.Store(agent, tmp_path / "kv", CAPACITY, host_bytes=4 * MIB) as store:
        assert store.space("model@1").prefetch(hashes(9)) == 8
        assert store.stats()["host_blocks"] == 8
    with pytest.raises(kvferry.InvalidArgumentError, match="a tier in host memory has"):
        kvferry.Store(agent, tmp_path / "kv", CAPACITY, host_bytes=KIB)


def test_a_pin_tells_how_many_blocks_it_keeps(agent: kvferry.Agent, store: kvferry.Store) -> None:
    space = store.space("model@1")
    space.put(hashes(4), Pool(agent, 4).blocks)
    with space.pin(hashes(6), lease=60.0) as pin:
        assert (pin.blocks, repr(pin)) == (4, "<kvferry.Pin of 4 blocks>")
    pin.release()
    assert space.pin(hashes(2, "other"), 60).blocks == 0
    with pytest.raises(kvferry.InvalidArgumentError):
        space.pin(hashes(4), -1.0)
    store.close()
    pin.release()


def settled(watch: kvferry.Watch, told: set[tuple[int, bytes]], *, removed: int = 0, stored: int = 0) -> None:
    """Takes reports until so many were stored and removed."""
    counted = [0, 0]
    deadline = time.monotonic() + 30
    while counted != [stored, removed]:
        assert time.monotonic() < deadline, f"{counted}"
        watch.gather(0.01)
        for group, is_removed, names in watch.take(1000):
            counted[is_removed] += len(names)
            for name in names:
                assert ((group, name) in told) == is_removed, "said twice"
                (told.discard if is_removed else told.add)((group, name))


def test_a_watch_reports_what_comes_and_what_leaves(agent: kvferry.Agent, store: kvferry.Store, tmp_path: Path) -> None:
    parts = [store.space("model@1", shard=(number, 2)) for number in range(2)]
    watch = store.watch([[store.space("other")], parts])
    assert (watch.gather(0), watch.take(10), watch.reports) == (0, [], 0)
    pool, told = Pool(agent, 4), set[tuple[int, bytes]]()
    watch.add(1, hashes(4))
    parts[0].put(hashes(4), pool.blocks)
    assert watch.gather(0.05) == 0, "a part is missing"
    parts[1].put(hashes(4), pool.blocks)
    settled(watch, told, stored=4)
    assert told == {(1, name) for name in hashes(4)}
    watch.add(1, hashes(4))
    assert watch.reports == 0
    block = pool.data[BLOCK : 2 * BLOCK]
    for segment in (tmp_path / "kv").glob("segment-*"):
        # Both parts have these bytes.
        segment.write_bytes(segment.read_bytes().replace(block, bytes(BLOCK)))
    assert parts[0].get(hashes(4), pool.blocks) == 1
    settled(watch, told, removed=1)
    assert (1, hashes(4)[1]) not in told
    watch.reset([parts])
    settled(watch, told, removed=3)
    assert not told
    with pytest.raises(kvferry.InvalidArgumentError, match="no group 1"):
        watch.add(1, hashes(1))
    with pytest.raises(kvferry.InvalidArgumentError, match="16 to 64"):
        watch.add(0, [b"short"])
    assert repr(watch) == "<kvferry.Watch>"


def test_a_thread_that_gathers_ends_when_the_store_is_closed(agent: kvferry.Agent, tmp_path: Path) -> None:
    with kvferry.Store(agent, tmp_path / "kv", CAPACITY) as store:
        watch = store.watch([[store.space("model@1")]])
        raised: list[BaseException] = []

        def gather() -> None:
            try:
                watch.gather(600)
            except kvferry.Error as error:
                raised.append(error)

        thread = threading.Thread(target=gather)
        thread.start()
    thread.join(30)
    assert [type(error) for error in raised] == [kvferry.ShutdownError]
    with pytest.raises(kvferry.ShutdownError):
        watch.add(0, hashes(1))


def test_an_empty_directory_takes_the_place_of_a_lost_one_where_that_is_asked_for(
    agent: kvferry.Agent, tmp_path: Path
) -> None:
    directories = [tmp_path / "a", tmp_path / "b"]
    with kvferry.Store(agent, directories, CAPACITY):
        pass
    remove(directories[1])
    directories[1].mkdir()
    with kvferry.Store(agent, directories, CAPACITY) as store:
        assert store.stats()["lost_directories"] == 1
    assert not (directories[1] / "kvferry.store").exists()
    with kvferry.Store(agent, directories, CAPACITY, adopt_empty=True) as store:
        assert store.stats()["lost_directories"] == 0
    assert (directories[1] / "kvferry.store").exists()


def test_a_store_that_must_exist_is_not_made_anew(agent: kvferry.Agent, tmp_path: Path) -> None:
    with pytest.raises(kvferry.IoError, match=r"there is no store in .*mount the device"):
        kvferry.Store(agent, tmp_path / "a", CAPACITY, must_exist=True)
    assert not (tmp_path / "a").exists()
    with kvferry.Store(agent, tmp_path / "a", CAPACITY):
        pass
    with kvferry.Store(agent, tmp_path / "a", CAPACITY, must_exist=True):
        pass
