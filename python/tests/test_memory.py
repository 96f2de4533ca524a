"""Python buffers as regions, regions as Python buffers."""

from __future__ import annotations

import array
import ctypes
import gc
import mmap
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import kvferry
import pytest
from conftest import LOOPBACK, Target
from kit import Memory


class Buffer(bytearray):
    """A bytearray that takes weak references."""


def test_a_registered_buffer_is_held_until_it_is_unregistered(agent: kvferry.Agent) -> None:
    buffer = Buffer(100)
    watched = weakref.ref(buffer)
    region = agent.register(buffer)
    with pytest.raises(BufferError):
        buffer.extend(b"more")
    del buffer
    gc.collect()
    assert watched() is not None
    agent.unregister(region)
    gc.collect()
    assert watched() is None
    assert not region.is_registered


def test_dropping_the_region_object_does_not_release_the_buffer(agent: kvferry.Agent) -> None:
    buffer = Buffer(100)
    watched = weakref.ref(buffer)
    agent.register(buffer)
    del buffer
    gc.collect()
    assert watched() is not None
    (region,) = agent.regions()
    agent.unregister(region)
    assert watched() is None


@pytest.mark.parametrize("end", ["shutdown", "drop", "with"])
def test_an_agent_that_ends_releases_its_buffers(end: str) -> None:
    agent = kvferry.Agent(listen=LOOPBACK)
    buffer = Buffer(100)
    watched = weakref.ref(buffer)
    region = agent.register(buffer)
    del buffer
    if end == "shutdown":
        agent.shutdown()
    elif end == "with":
        with agent:
            pass
    del agent, region
    gc.collect()
    assert watched() is None


def test_an_agent_lives_as_long_as_the_objects_that_refer_to_it(target: Target) -> None:
    agent = kvferry.Agent(listen=LOOPBACK)
    peer = agent.peer(target.address)
    del agent
    gc.collect()
    mine = Memory(4096)
    assert peer.write(mine.addr, target.base, 10).nbytes == 10


@pytest.mark.parametrize(
    "make",
    [
        lambda: bytearray(64),
        lambda: memoryview(bytearray(100))[10:74],
        lambda: mmap.mmap(-1, 64),
        lambda: array.array("d", [0.0] * 8),
    ],
    ids=["bytearray", "memoryview", "mmap", "array"],
)
def test_any_contiguous_writable_memory_can_be_registered(agent: kvferry.Agent, target: Target, make: Any) -> None:
    buffer = make()
    region = agent.register(buffer)
    assert region.nbytes == len(region) == 64
    target.child.run("memory[0:64] = bytes(range(64))")
    batch = kvferry.Batch()
    batch.push(region, 0, target.region, 0, 64)
    agent.peer(target.address).read(batch)
    assert memoryview(buffer).cast("B")[:].tobytes() == bytes(range(64))


def test_numpy_arrays_can_be_registered(agent: kvferry.Agent, target: Target) -> None:
    numpy = pytest.importorskip("numpy")
    values = numpy.arange(1000, dtype=numpy.float32).reshape(10, 100)
    region = agent.register(values)
    assert (region.addr, region.nbytes) == (values.ctypes.data, 4000)
    batch = kvferry.Batch()
    batch.push(region, 0, target.region, 0, 4000)
    agent.peer(target.address).write(batch)
    assert target.bytes(0, 4000) == values.tobytes()
    with pytest.raises(ValueError, match="contiguous"):
        agent.register(values[:, ::2])
    values.flags.writeable = False
    with pytest.raises(TypeError, match="read-only"):
        agent.register(values)


class Tensor:
    """The part of torch.Tensor that kvferry uses; torch itself is too large for these tests."""

    def __init__(self, nbytes: int, device: str = "cpu", contiguous: bool = True) -> None:
        self.memory = Memory(max(nbytes, 1))
        self.device, self._nbytes, self._contiguous = device, nbytes, contiguous

    def data_ptr(self) -> int:
        return self.memory.addr

    def element_size(self) -> int:
        return 2

    def numel(self) -> int:
        return self._nbytes // 2

    def is_contiguous(self) -> bool:
        return self._contiguous


def test_contiguous_tensors_in_host_memory_can_be_registered(agent: kvferry.Agent) -> None:
    tensor = Tensor(4096)
    watched = weakref.ref(tensor)
    region = agent.register(tensor)
    assert (region.addr, region.nbytes) == (tensor.memory.addr, 4096)
    del tensor
    assert watched() is not None
    agent.unregister(region)
    assert watched() is None
    with pytest.raises(TypeError, match="xpu:0"):
        agent.register(Tensor(64, device="xpu:0"))
    with pytest.raises(kvferry.InvalidArgumentError, match="not memory of a GPU"):
        agent.register(Tensor(64, device="cuda:0"))
    with pytest.raises(ValueError, match="contiguous"):
        agent.register(Tensor(64, contiguous=False))
    with pytest.raises(ValueError, match="empty"):
        agent.register(Tensor(0))


@pytest.mark.parametrize(
    ("what", "error"),
    [
        (b"bytes are constant", TypeError),
        ("text", TypeError),
        (7, TypeError),
        (None, TypeError),
        (bytearray(), ValueError),
        ((1, 2, 3), ValueError),
        ((4096, -1), OverflowError),
        ((0, 10), kvferry.InvalidArgumentError),
        ((4096, 0), kvferry.InvalidArgumentError),
        ((2**64 - 8, 16), kvferry.InvalidArgumentError),
    ],
)
def test_an_object_without_memory_is_refused(agent: kvferry.Agent, what: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        agent.register(what)
    assert agent.regions() == []


@pytest.fixture
def pages() -> Iterator[tuple[int, int]]:
    """The addresses of two pages that follow each other: this process may only read the first one, and may not touch the
    second one.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    page, flags = mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    first = libc.mmap(None, ctypes.c_size_t(2 * page), 0, flags, -1, ctypes.c_long(0))
    assert first not in (None, ctypes.c_void_p(-1).value), ctypes.get_errno()
    assert libc.mprotect(ctypes.c_void_p(first), ctypes.c_size_t(page), mmap.PROT_READ) == 0, ctypes.get_errno()
    yield first, first + page
    assert libc.munmap(ctypes.c_void_p(first), ctypes.c_size_t(2 * page)) == 0


def test_memory_that_this_process_may_not_touch_is_refused(agent: kvferry.Agent, pages: tuple[int, int]) -> None:
    (read_only, unreadable), own, page = pages, Memory(4096), mmap.PAGESIZE
    # No process has memory there.
    unmapped = 4096
    for address, nbytes, access, why in [
        (unreadable, page, "rw", "can't read"),
        (unreadable, page, "r", "can't read"),
        (unreadable + 1, 1, "none", "can't read"),
        (read_only + page - 1, 2, "r", "can't read"),
        (read_only, 2 * page, "none", "can't read"),
        (read_only, page, "rw", "can't write to"),
        (read_only, page, "w", "can't write to"),
        (unmapped, 16, "r", "nothing is mapped"),
    ]:
        match = f"not host memory: .*{why}"
        with pytest.raises(kvferry.InvalidArgumentError, match=match) as caught:
            agent.register((address, nbytes), access)  # type: ignore[arg-type]
        assert (caught.value.context["addr"], caught.value.context["len"]) == (hex(address), str(nbytes))
        with pytest.raises(kvferry.InvalidArgumentError, match=match) as caught:
            agent.register_batch([(own.addr, 4096), (address, nbytes)], access)  # type: ignore[arg-type]
        assert caught.value.context["range"] == "1"
        assert agent.regions() == []
    # What may be read can be registered for peers that read.
    assert agent.register((read_only, page), "r").nbytes == page


def test_access_is_one_of_four_strings(agent: kvferry.Agent) -> None:
    for access in ("rw", "r", "w", "none"):
        assert agent.register(bytearray(8), access).access == access
    with pytest.raises(ValueError, match="access"):
        agent.register(bytearray(8), "x")  # type: ignore[arg-type]


def test_overlapping_memory_is_refused_and_a_batch_is_registered_as_a_whole(agent: kvferry.Agent) -> None:
    memory = Memory(4096)
    first = agent.register((memory.addr, 100))
    with pytest.raises(kvferry.OverlapError) as caught:
        agent.register((memory.addr + 99, 1))
    assert caught.value.context["region"] == str(first.id)
    buffer = Buffer(10)
    watched = weakref.ref(buffer)
    with pytest.raises(kvferry.OverlapError):
        agent.register_batch([buffer, (memory.addr + 200, 10), (memory.addr + 50, 10)])
    del buffer
    gc.collect()
    assert watched() is None
    assert agent.regions() == [first]
    regions = agent.register_batch([(memory.addr + 100 * i, 100) for i in range(1, 40)], access="r")
    assert [region.access for region in regions] == ["r"] * 39
    agent.unregister_batch(regions)
    assert agent.regions() == [first]


def test_a_region_can_be_unregistered_once(agent: kvferry.Agent) -> None:
    region = agent.register(bytearray(10))
    agent.unregister(region)
    with pytest.raises(kvferry.NotRegisteredError):
        agent.unregister(region)
    other = agent.register(bytearray(10))
    with pytest.raises(kvferry.NotRegisteredError):
        agent.unregister_batch([region, other])
    assert not other.is_registered
    with kvferry.Agent(listen=LOOPBACK) as stranger, pytest.raises(kvferry.NotRegisteredError):
        kept = stranger.register(Buffer(10))
        agent.unregister_batch([kept])


def test_a_region_of_another_agent_does_not_free_a_buffer_of_this_one(agent: kvferry.Agent) -> None:
    buffer = Buffer(10)
    watched = weakref.ref(buffer)
    agent.register(buffer)
    del buffer
    with kvferry.Agent(listen=LOOPBACK) as stranger:
        theirs = stranger.register(bytearray(10))
        stranger.unregister(theirs)
    with pytest.raises(kvferry.NotRegisteredError):
        agent.unregister_batch([theirs])
    gc.collect()
    assert watched() is not None


def test_allocated_memory_is_a_buffer_that_lives_with_its_views(agent: kvferry.Agent, target: Target) -> None:
    region = agent.allocate(10_000)
    view = region.memory()
    assert (len(view), view.format, view.readonly, view.nbytes) == (10_000, "B", False, 10_000)
    assert bytes(view[:100]) == bytes(100)
    view[5:9] = b"view"
    assert region.read_at(5, 4) == b"view"
    region.write_at(9, b"ed")
    assert bytes(view[5:11]) == b"viewed"
    batch = kvferry.Batch()
    batch.push(region, 0, target.region, 0, 10_000)
    agent.peer(target.address).write(batch)
    assert target.bytes(5, 6) == b"viewed"
    agent.unregister(region)
    del region, batch
    agent.shutdown()
    gc.collect()
    assert bytes(view[5:11]) == b"viewed"


def test_numpy_sees_allocated_memory_without_a_copy(agent: kvferry.Agent) -> None:
    numpy = pytest.importorskip("numpy")
    region = agent.allocate(64)
    values = numpy.asarray(region).view(numpy.int64)
    values[:] = range(8)
    assert region.read_at(8, 8) == (1).to_bytes(8, sys.byteorder)
    del region
    gc.collect()
    assert values.sum() == 28


def test_only_allocated_memory_can_be_viewed(agent: kvferry.Agent) -> None:
    region = agent.register(bytearray(10))
    for look in (region.memory, lambda: region.read_at(0, 1), lambda: region.write_at(0, b"x")):
        with pytest.raises(kvferry.UnsupportedError):
            look()
    own = agent.allocate(10)
    for beyond in (lambda: own.read_at(5, 6), lambda: own.read_at(0, 2**40), lambda: own.write_at(9, b"xx")):
        with pytest.raises(kvferry.OutOfBoundsError):
            beyond()
    with pytest.raises(kvferry.InvalidArgumentError):
        agent.allocate(0)


def test_thousands_of_regions_are_registered_and_unregistered_by_one_call_each(agent: kvferry.Agent) -> None:
    memory = Memory(10_000 * 128)
    ranges = [(memory.addr + 128 * i, 64) for i in range(10_000)]
    regions = agent.register_batch(ranges)
    assert [region.addr for region in regions] == [addr for addr, _ in ranges]
    agent.unregister_batch(regions)
