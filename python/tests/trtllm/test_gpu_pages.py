"""KV caches in memory of GPUs, on the fake driver: kvferry copies their pages, in the order of the stream."""

from __future__ import annotations

import ctypes
import gc
import math
import mmap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kvferry
import pytest
from fake_gpu import COMPUTE, HOST_TO_DEVICE, LIBRARY, Array, Driver, Stream
from kit import run_python
from kvferry.trtllm._meta import Copies, Load, Part
from kvferry.trtllm._pages import Memory, Pages
from trtllm_kit import Bench, Served, prompt, reference
from trtllm_pair import Pair, hand_over, hears, settled
from trtllm_reference import HostTensor, Ranks, Request, Shape, State


@pytest.fixture
def tensor_kind() -> str:
    return "buffer"


@pytest.fixture(scope="module")
def loaded() -> Driver:
    return Driver()


@pytest.fixture
def driver(loaded: Driver) -> Iterator[Driver]:
    # A GPU that an earlier test has lost goes with the last region of its memory.
    gc.collect()
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


BLOCKS_OF_PROMPT = 5
WINDOWED = Shape(groups=(((0,), 0), ((1,), 20)))


def asked(number: int = 1, **options: Any) -> list[Request]:
    """A request whose prompt has `BLOCKS_OF_PROMPT` full blocks, and one token more."""
    return [Request(number, prompt(41, number), **options)]


class GpuPair(Pair):
    """Engines with their caches on a GPU, which store nothing."""

    def __init__(self, bench: Bench, driver: Driver) -> None:
        super().__init__(bench)
        self._driver = driver
        bench.settings(save="off")
        self.on_gpu(True)

    def on_gpu(self, is_on_gpu: bool) -> None:
        """Says where engines that are made from now on have their caches."""
        made = (lambda shape, dtype: GpuTensor(self._driver, shape, dtype)) if is_on_gpu else HostTensor
        self.bench.make_tensor = made


@pytest.fixture
def pair(bench: Bench, driver: Driver) -> GpuPair:
    return GpuPair(bench, driver)


def array_of(served: Served) -> Array:
    array: Array = served.engine.cache.tensors[0].array
    return array


def noted(served: Served) -> list[bytes]:
    """The pages of the full blocks of the first prompt, once a step has computed with them."""
    found: list[bytes] = []
    save, engine = served.worker.wait_for_save, served.engine

    def noting(stream: Any) -> None:
        if not found:
            contexts = [it for it in engine._running if it.state is State.CONTEXT_INIT]
            pages = [page for it in contexts for page in it.pages[0][:BLOCKS_OF_PROMPT]]
            found.extend(bytes(engine.cache.page(0, page)) for page in pages)
        save(stream)

    served.worker.wait_for_save = noting
    return found


@pytest.mark.parametrize("load", ["sync", "async"])
@pytest.mark.parametrize("on_gpu", ["both", "prefill", "decode"])
def test_pages_are_handed_over_byte_for_byte(pair: GpuPair, on_gpu: str, load: str) -> None:
    pair.bench.settings(load=load)
    pair.on_gpu(on_gpu != "decode")
    prefill = pair.prefill()
    pair.on_gpu(on_gpu != "prefill")
    decode = pair.decode()
    sent, got = noted(prefill), noted(decode)
    (ended,) = hand_over(prefill, decode, asked)
    assert ended.computed_tokens == 1
    assert len(set(sent)) == BLOCKS_OF_PROMPT
    assert got == sent
    assert [ended.generated] == reference(asked())
    settled(prefill, decode)


def test_several_ranks_hand_over_the_groups_of_their_caches(pair: GpuPair) -> None:
    ranks = Ranks(2)

    def body(rank: int) -> list[Request]:
        # The settings are variables of this process, which all ranks share.
        prefill = pair.prefill(WINDOWED, rank=rank, tp=2)
        ranks.gather(None)
        decode = pair.decode(WINDOWED, rank=rank, tp=2)
        ranks.gather(None)
        ended = hand_over(prefill, decode, asked)
        if rank == 0:
            settled(prefill, decode)
        ranks.gather(None)
        return ended

    (ended,) = ranks.run(body)[0]
    assert ended.computed_tokens == 1
    assert [ended.generated] == reference(asked(), tp=2, shape=WINDOWED)


@pytest.mark.parametrize("is_ordered", [True, False], ids=["after the stream", "without an order"])
def test_pages_are_handed_over_after_the_copies_of_the_stream_that_write_them(
    driver: Driver, pair: GpuPair, is_ordered: bool
) -> None:
    prefill, decode = pair.prefill(), pair.decode()
    save, array, stream = prefill.worker.wait_for_save, array_of(prefill), Stream(driver)

    def save_late_pages(_: Any) -> None:
        """The step's KV is in the pages once the stream has copied it there."""
        computed = array.content
        array.content = bytes(array.nbytes)
        driver.hold(HOST_TO_DEVICE)
        stream.copy(array, computed)
        release = threading.Timer(0.05, driver.hold, [0])
        release.start()
        save(stream if is_ordered else None)
        if is_ordered:
            assert array.content == computed, "the pages were copied before"
        release.join()
        stream.synchronize()

    prefill.worker.wait_for_save = save_late_pages
    (ended,) = hand_over(prefill, decode, asked)
    assert ended.computed_tokens == 1
    if is_ordered:
        assert [ended.generated] == reference(asked())
    else:
        assert f"of stream {stream.cuda_stream:#x}" in driver.findings()
        driver.clear_findings()
    settled(prefill, decode)


@pytest.mark.parametrize("is_ordered", [True, False], ids=["after the stream", "without an order"])
@pytest.mark.parametrize("load", ["sync", "async"])
def test_what_was_handed_over_is_written_after_the_last_readers_of_its_pages(
    driver: Driver, pair: GpuPair, load: str, is_ordered: bool
) -> None:
    pair.bench.settings(load=load)
    prefill, decode = pair.prefill(), pair.decode()
    start, array, stream = decode.worker.start_load_kv, array_of(decode), Stream(driver)

    def start_behind_a_reader(_: Any) -> None:
        step = decode.worker._step()
        if not (step.loads or step.async_loads):
            start(None)
            return
        driver.hold(COMPUTE)
        stream.run("reader", reads=[(array.address, array.nbytes)], expect=0)
        release = threading.Timer(0.05, driver.hold, [0])
        release.start()
        start(stream if is_ordered else None)
        if load == "sync":
            driver.access(array.address, array.nbytes, write=False)
        release.join()

    decode.worker.start_load_kv = start_behind_a_reader
    (ended,) = hand_over(prefill, decode, asked)
    assert ended.computed_tokens == 1
    assert [ended.generated] == reference(asked())
    if not is_ordered:
        assert "kernel `reader`" in driver.findings()
        driver.clear_findings()
    settled(prefill, decode)


def struck(driver: Driver, served: Served, fault: str) -> Request:
    """Has a fault of the driver strike the copy of a request's step, and returns the request when the step has failed."""
    (request,) = asked(max_new_tokens=1)
    served.engine._waiting.append(request)
    hits = driver.counter(f"hit:{fault}")
    driver.fault(fault)
    with pytest.raises(kvferry.Error, match="a device failed to copy local memory"):
        for _ in range(100):
            served.engine.step()
            time.sleep(0.01)
    assert driver.counter(f"hit:{fault}") == hits + 1
    assert (request.computed_tokens, request.generated) == (0, [])
    return request


def dropped(served: Served, request: Request) -> None:
    """TensorRT-LLM ends a request whose step has failed."""
    served.engine._running.remove(request)
    served.scheduler.request_finished(request, request.pages[0])
    served.engine._end(request)


# A copy with a wrong entry fails, and the GPU goes on. After an illegal address it does not.
@pytest.mark.parametrize("fault", ["batch_entry", "illegal_address"])
@pytest.mark.parametrize("load", ["sync", "async"])
def test_a_load_that_the_driver_fails_is_an_error_and_nothing_is_written_after_it(
    driver: Driver, pair: GpuPair, monkeypatch: pytest.MonkeyPatch, load: str, fault: str
) -> None:
    monkeypatch.setenv("KVFERRY_GPU_METHOD", "batch")
    pair.bench.settings(load=load)
    prefill, decode = pair.prefill(), pair.decode()
    hears(decode, prefill.engine.run(asked(max_new_tokens=1)))
    request = struck(driver, decode, fault)
    array = array_of(decode)
    driver.access(array.address, array.nbytes, write=True)
    array.content = poison = b"\xaa" * array.nbytes
    assert driver.counter("pending") == 0
    driver.clear_faults()
    time.sleep(0.05)
    assert array.content == poison
    dropped(decode, request)
    if fault == "illegal_address":
        return
    (ended,) = hand_over(prefill, decode, lambda **options: asked(2, **options))
    assert ended.computed_tokens == 1
    assert [ended.generated] == reference(asked(2))
    settled(prefill, decode)


def test_pages_whose_copy_the_driver_fails_are_not_handed_over_and_the_engine_goes_on(
    driver: Driver, pair: GpuPair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KVFERRY_GPU_METHOD", "batch")
    prefill, decode = pair.prefill(), pair.decode()
    hits = driver.counter("hit:batch_entry")
    driver.fault("batch_entry")
    (prefilled,) = prefill.engine.run(asked(max_new_tokens=1))
    assert driver.counter("hit:batch_entry") == hits + 1
    assert "blocks are not handed over: a device failed to copy local memory" in caplog.text
    driver.clear_faults()
    assert [prefilled.generated] == reference(asked(max_new_tokens=1))
    ended = hand_over(prefill, decode, lambda **options: asked(2, **options))
    ended += decode.engine.run(asked())
    assert [it.computed_tokens for it in ended] == [1, 41]
    assert [it.generated for it in ended] == reference([*asked(2), *asked()])
    settled(prefill, decode)


HANGS = """
    import sys
    import time
    import trtllm_kit
    from fake_gpu import Driver
    from kvferry.trtllm import KVFerryConnectorWorker
    from kvferry.trtllm._meta import Load, Part, Step
    from test_gpu_pages import GpuTensor

    sys.modules["tensorrt_llm._utils"] = trtllm_kit._utilities()
    driver = Driver()
    worker = KVFerryConnectorWorker(trtllm_kit.args())
    worker.register_kv_caches(GpuTensor(driver, (8, 2, 2, 1024)))
    driver.fault("stream_stalls", count=1 << 60)
    load = Load(1, 1, (Part(0, (worker._local.arena.head,), (1,)),))
    worker.bind_connector_meta(Step(1, (), (load,), (), None))
    worker.start_load_kv(None)
    while driver.counter("hit:stream_stalls") == 0:
        time.sleep(0.01)
    assert worker.get_finished([], [1]) == ([], [])
    print("ends", flush=True)
"""


def test_a_process_ends_while_a_copy_to_pages_hangs(tmp_path: Path) -> None:
    tests = Path(__file__).parents[1]
    env = {"KVFERRY_LIBCUDA": str(LIBRARY), "KVFERRY_SILENCE_MS": "500", "PYTHONPATH": f"{tests}:{tests / 'trtllm'}"}
    env |= {
        "TLLM_KVFERRY_DISK": str(tmp_path / "kv"),
        "TLLM_KVFERRY_DISK_GIB": "0.0625",
        "TLLM_KVFERRY_STAGING_GIB": "0.015625",
    }
    ended = run_python(HANGS, env=env | {"TLLM_KVFERRY_LOAD": "async"})
    assert (ended.returncode, ended.stdout) == (0, "ends\n"), ended.stderr
