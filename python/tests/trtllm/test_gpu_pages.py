"""KV caches in memory of GPUs, on the fake driver: kvferry copies their pages, in the order of the stream."""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fake_gpu import COMPUTE, Array, Driver, Stream
from kvferry.trtllm._meta import Copies, Load, Part
from kvferry.trtllm._pages import Memory, Pages
from trtllm_kit import Bench, prompt, reference
from trtllm_reference import Request, Shape


@pytest.fixture
def tensor_kind() -> str:
    return "buffer"


@pytest.fixture(scope="module")
def loaded() -> Driver:
    return Driver()


@pytest.fixture
def driver(loaded: Driver) -> Iterator[Driver]:
    yield loaded
    loaded.hold(0)
    assert loaded.findings() == ""


class View:
    """A range of a GPU's memory, which the reference engine reads and writes as a memoryview."""

    def __init__(self, driver: Driver, address: int, nbytes: int) -> None:
        self._driver, self._address, self._nbytes = driver, address, nbytes

    def __len__(self) -> int:
        return self._nbytes

    def __getitem__(self, part: slice) -> View:
        begin, end, _ = part.indices(self._nbytes)
        return View(self._driver, self._address + begin, end - begin)

    def __setitem__(self, part: slice, data: bytes) -> None:
        begin, end, _ = part.indices(self._nbytes)
        assert end - begin == len(data)
        self._driver.call(
            "fakecuda_write", ctypes.c_uint64(self._address + begin), bytes(data), ctypes.c_size_t(len(data))
        )

    def __bytes__(self) -> bytes:
        got = ctypes.create_string_buffer(self._nbytes)
        self._driver.call("fakecuda_read", ctypes.c_uint64(self._address), got, ctypes.c_size_t(self._nbytes))
        return got.raw


class GpuTensor:
    """What a connector uses of a torch tensor on CUDA."""

    def __init__(self, driver: Driver, shape: tuple[int, ...], dtype: str = "float16", device: int = 0) -> None:
        self.shape, self.dtype, self.device = shape, dtype, f"cuda:{device}"
        self.array = Array(driver, math.prod(shape), device)
        self.array.content = bytes(self.array.nbytes)
        self.memory = View(driver, self.array.address, self.array.nbytes)

    def data_ptr(self) -> int:
        return self.array.address

    def element_size(self) -> int:
        return 1

    def numel(self) -> int:
        return self.array.nbytes

    def stride(self, dim: int) -> int:
        return math.prod(self.shape[dim + 1 :])

    def is_contiguous(self) -> bool:
        return True


BLOCK_BYTES = 4096
BLOCKS = 8


class Cache:
    """A cache of one tensor, an agent that copies it, and memory of the host."""

    def __init__(self, driver: Driver) -> None:
        self.tensor = GpuTensor(driver, (BLOCKS, 2, 2, BLOCK_BYTES // 4))
        self.pages = Pages.of_tensor(self.tensor, 8, "auto")
        self.pages.copies.open(None)
        mapped = mmap.mmap(-1, BLOCKS * BLOCK_BYTES)
        self.memory = Memory(mapped, ctypes.addressof(ctypes.c_char.from_buffer(mapped)))

    @property
    def group(self) -> Any:
        return self.pages.groups[0]

    def blocks(self) -> list[bytes]:
        content = self.tensor.array.content
        return [content[at : at + BLOCK_BYTES] for at in range(0, len(content), BLOCK_BYTES)]


@pytest.fixture
def cache(driver: Driver) -> Iterator[Cache]:
    made = Cache(driver)
    yield made
    made.pages.copies.close()


def test_copies_from_pages_come_after_the_work_of_the_stream(driver: Driver, cache: Cache) -> None:
    stream = Stream(driver)
    driver.hold(COMPUTE)
    stream.fill(cache.tensor.array, 7)
    copy = cache.pages.from_pages(cache.group, [3, 1], cache.memory, BLOCK_BYTES, stream)
    assert copy.wait(0.02) is None, "the kernel has not run"
    driver.hold(0)
    copy.wait()
    content = bytes(cache.memory.buffer)
    assert content == bytes(BLOCK_BYTES) + b"\7" * (2 * BLOCK_BYTES) + bytes((BLOCKS - 3) * BLOCK_BYTES)


def test_copies_to_pages_come_after_their_last_users_and_skip_pages_that_are_not_there(
    driver: Driver, cache: Cache
) -> None:
    stream = Stream(driver)
    cache.memory.buffer[:] = b"".join(bytes([at + 1]) * BLOCK_BYTES for at in range(BLOCKS))
    driver.hold(COMPUTE)
    stream.fill(cache.tensor.array, 99)
    count, copy = cache.pages.to_pages(cache.group, [5, -1, 0], cache.memory, 2 * BLOCK_BYTES, stream)
    assert (count, copy.wait(0.02)) == (2, None)
    driver.hold(0)
    copy.wait()
    assert [block[0] for block in cache.blocks()] == [5, 99, 99, 99, 99, 3, 99, 99]
    assert all(len(set(block)) == 1 for block in cache.blocks())
    count, copy = cache.pages.to_pages(cache.group, [-1], cache.memory, 0, stream)
    copy.wait()
    assert count == 0


def test_a_page_beyond_the_cache_is_refused(cache: Cache) -> None:
    with pytest.raises(IndexError, match="page 8 is not in the KV cache"):
        cache.pages.from_pages(cache.group, [8], cache.memory)


def test_regions_of_a_layout_with_gaps_are_copied_piece_by_piece(driver: Driver) -> None:
    pool = Array(driver, 16 * 1024)
    pool.content = bytes(range(256)) * 64

    def region(base: int, size: int) -> Any:
        tensor = SimpleNamespace(device="cuda:0")
        return SimpleNamespace(
            base=pool.address + base, size=size, stride=2048, num_slots=8, buffers=(), as_tensor=lambda: tensor
        )

    given = SimpleNamespace(
        layer_group_id=0, layer_ids=(0, 1), window_size=None, regions=(region(0, 100), region(1024, 300))
    )
    layout = SimpleNamespace(tokens_per_block=8, groups=(given,))
    pages = Pages.of_layout(layout, "auto")
    pages.copies.open(None)
    mapped = mmap.mmap(-1, 4096)
    memory = Memory(mapped, ctypes.addressof(ctypes.c_char.from_buffer(mapped)))
    pages.from_pages(pages.groups[0], [7, 2], memory).wait()
    content = pool.content
    expected = b"".join(
        content[page * 2048 + base : page * 2048 + base + size]
        for page in (7, 2)
        for base, size in ((0, 100), (1024, 300))
    )
    assert bytes(mapped[:800]) == expected
    assert not any(mapped[800:])
    pages.copies.close()


@pytest.mark.parametrize("load", ["sync", "async"])
@pytest.mark.parametrize("tp", [1, 2])
def test_an_engine_with_its_cache_on_a_gpu_loads_what_another_has_saved(
    driver: Driver, bench: Bench, load: str, tp: int
) -> None:
    bench.settings(load=load)
    bench.make_tensor = lambda shape, dtype: GpuTensor(driver, shape, dtype)
    shape = Shape(groups=(((0, 1), 0), ((2,), 16)))
    bench.serve(lambda: [Request(1, prompt(41))], tp=tp, shape=shape)
    (ended,) = bench.serve(lambda: [Request(1, prompt(41))], tp=tp, shape=shape)
    assert ended.computed_tokens == 1
    assert [ended.generated] == reference([Request(1, prompt(41))], tp=tp, shape=shape)


def test_an_engine_with_one_tensor_on_a_gpu_loads_what_another_has_saved(driver: Driver, bench: Bench) -> None:
    bench.make_tensor = lambda shape, dtype: GpuTensor(driver, shape, dtype)
    served = bench.rank(Shape())
    served.engine.run([Request(1, prompt(41))])
    served.worker.shutdown()
    assert served.worker.stats()["stored_blocks"] == 5
    (ended,) = bench.serve(lambda: [Request(1, prompt(41))])
    assert ended.computed_tokens == 1
    assert [ended.generated] == reference([Request(1, prompt(41))])


def test_a_cache_that_the_driver_does_not_know_is_refused_by_all_ranks(driver: Driver, bench: Bench) -> None:
    class Freed(GpuTensor):
        def data_ptr(self) -> int:
            return 1 << 46

    bench.make_tensor = lambda shape, dtype: Freed(driver, shape, dtype)
    for tp in (1, 2):
        with pytest.raises(NotImplementedError, match="rank 0: the KV cache can't be registered"):
            bench.serve(lambda: [Request(1, prompt(41))], tp=tp)


@pytest.mark.parametrize("side", ["load", "hand over"])
def test_a_part_that_fails_is_not_reported_before_the_copies_of_the_others_have_ended(
    driver: Driver, bench: Bench, side: str
) -> None:
    bench.make_tensor = lambda shape, dtype: GpuTensor(driver, shape, dtype)
    worker = bench.rank(Shape()).worker
    pages, arena = worker._local.pages, worker._local.arena
    piece = pages.groups[0].pieces[0]
    stream = Stream(driver)
    parts = Part(0, (arena.head,), (1,)), Part(0, (arena.head,), (piece.slots,))
    ended: list[float] = []

    def fail(begin: Callable[[], Any]) -> None:
        with pytest.raises(IndexError, match="is not in the KV cache"):
            begin()
        ended.append(time.monotonic())

    driver.hold(COMPUTE)
    stream.run("step", writes=[(piece.base, piece.stride)], byte=1)
    failing: Callable[[], Any] = {
        "load": lambda: worker._begin_load(Load(1, 1, parts), stream),
        "hand over": lambda: worker._hand_over(pages, Copies(1, parts), stream),
    }[side]
    thread = threading.Thread(target=fail, args=(failing,))
    thread.start()
    time.sleep(0.1)
    assert (ended, arena.lost_by_any()) == ([], 0), "the first part waits for the step"
    driver.hold(0)
    thread.join()
    assert len(ended) == 1
    assert arena.lost_by_any() == (1 if side == "hand over" else 0)
