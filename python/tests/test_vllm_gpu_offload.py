"""The worker of `KVFerryOffloadingSpec` with pages in memory of a GPU, on the fake driver."""

from __future__ import annotations

import gc
import hashlib
import importlib
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import kvferry
import numpy as np
import pytest
import vllm_stand_in as vllm
from fake_gpu import COMPUTE, LIBRARY, Array, Driver, Stream
from kvferry._engine.store import OpenStore

# Two layers, in one allocation. A block of the store has two of the engine's.
PAGE, PAGES, LAYERS, EACH = 4096, 16, 2, 2


class Pages:
    """The pages of a layer, as torch shows them."""

    def __init__(self, array: Array, layer: int) -> None:
        self._array, self._layer = array, layer
        self.device = SimpleNamespace(type="cuda", index=array.device)

    def stride(self, _: int) -> int:
        return PAGE

    def data_ptr(self) -> int:
        return self._array.address + self._layer * PAGES * PAGE

    def untyped_storage(self) -> Any:
        return SimpleNamespace(data_ptr=lambda: self._array.address, nbytes=lambda: self._array.nbytes)


class Engine:
    """A worker of an engine with a store, and the memory of the GPU that has its pages."""

    def __init__(self, driver: Driver, modules: Any, stream: Stream, directory: Path) -> None:
        self.stream, self._modules = stream, modules
        self.array = Array(driver, LAYERS * PAGES * PAGE)
        self.array.content = bytes(self.array.nbytes)
        agent = kvferry.Agent(listen="127.0.0.1:0", transports="local")
        opened = OpenStore(agent, kvferry.Store(agent, directory, 64 << 20))
        pieces = tuple(modules.layout.Piece(at, 0, PAGE) for at in range(LAYERS))
        shard = modules.layout.Shard(0, 1, pieces)
        layouts = [modules.layout.GroupLayout(0, b"print", (shard,), 1, 0, 0, False)]
        config = SimpleNamespace(
            cache=SimpleNamespace(blocks_per_chunk=EACH),
            engine_id=f"engine {id(self)}",
            parallel=SimpleNamespace(rank=0),
        )
        caches = SimpleNamespace(tensors=[SimpleNamespace(tensor=Pages(self.array, at)) for at in range(LAYERS)])
        self.worker = modules.worker.KVFerryOffloadingWorker(config, "model", layouts, caches, opened)
        self.worker.can_report_failures = True
        self.ended: dict[int, bool] = {}

    def ranges(self, *pages: int) -> list[tuple[int, int]]:
        starts = [(layer * PAGES + page) * PAGE for layer in range(LAYERS) for page in pages]
        return [(self.array.address + start, PAGE) for start in starts]

    def stored(self, names: list[str]) -> Any:
        hashes = [hashlib.sha256(name.encode()).digest() for name in names]
        blocks = [self._modules.blocks.Block(it, hashes[at - 1] if at else None) for at, it in enumerate(hashes)]
        return self._modules.manager.StoredBlocks("r", b"", {0: blocks})

    def store(self, job: int, names: list[str], pages: list[int]) -> None:
        given = SimpleNamespace(block_ids=np.array(pages), group_sizes=[len(pages)], block_indices=[0])
        assert self.worker.submit_store(job, given, self.stored(names))

    def load(self, job: int, names: list[str], pages: list[int], first: int = 0) -> None:
        given = SimpleNamespace(block_ids=np.array(pages), group_sizes=[len(pages)], block_indices=[first])
        assert self.worker.submit_load(job, self.stored(names), given)

    def until(self, job: int, seconds: float = 20) -> bool:
        """Waits for the end of a job. False if it does not end within `seconds`."""
        deadline = time.monotonic() + seconds
        while job not in self.ended:
            if time.monotonic() > deadline:
                return False
            self.ended |= {it[0]: it[1] for it in self.worker.get_finished()}
            time.sleep(0.001)
        return True

    def bytes_of(self, page: int) -> list[int]:
        content = self.array.content
        found = [set(content[start : start + PAGE]) for start in self._starts(page)]
        assert all(len(it) == 1 for it in found)
        return [it.pop() for it in found]

    def _starts(self, page: int) -> list[int]:
        return [(layer * PAGES + page) * PAGE for layer in range(LAYERS)]


@pytest.fixture(scope="module")
def driver() -> Driver:
    assert LIBRARY.exists(), f"{LIBRARY} is missing: make test-wheel"
    loaded = Driver()
    # After other errors by which a GPU is gone, a load waits for its copies: they may still run.
    loaded.set("removed_code", "999")
    return loaded


@pytest.fixture
def engine(driver: Driver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Engine]:
    # A GPU that an earlier test has lost goes with the last region of its memory.
    gc.collect()
    destroyed = driver.counter("hit:context_destroyed")
    # Faults strike copies, not the stages that are pinned before.
    monkeypatch.setenv("KVFERRY_GPU_PIN_AHEAD", "0")
    vllm.install(monkeypatch)
    names = {"worker": "_offload_worker", "layout": "_offload_layout", "manager": "_offload_manager"}
    names["blocks"] = "_offload_blocks"
    modules = SimpleNamespace(
        **{name: importlib.import_module(f"kvferry.vllm.{module}") for name, module in names.items()}
    )
    stream = Stream(driver)
    torch: Any = ModuleType("torch")
    torch.cuda = SimpleNamespace(current_stream=lambda _: stream)
    monkeypatch.setitem(sys.modules, "torch", torch)
    made = Engine(driver, modules, stream, tmp_path / "kv")
    driver.clear_findings()
    yield made
    driver.hold(0)
    driver.clear_faults()
    made.worker.shutdown()
    if driver.counter("hit:context_destroyed") == destroyed:
        made.array.free()
    driver.clear_findings()


@pytest.fixture
def _the_gpu_is_given_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """For copies that never end. Before `engine`."""
    monkeypatch.setenv("KVFERRY_SILENCE_MS", "4000")


def fill(engine: Engine, byte: int, *pages: int) -> None:
    engine.stream.run("compute", writes=engine.ranges(*pages), byte=byte)


def test_pages_are_stored_after_the_step_that_computes_them_and_come_back(driver: Driver, engine: Engine) -> None:
    driver.hold(COMPUTE)
    for at in range(4):
        fill(engine, 10 + at, 1 + at)
    engine.store(1, ["a", "b"], [1, 2, 3, 4])
    assert not engine.until(1, 0.1), "nothing is computed"
    driver.hold(0)
    assert engine.until(1)
    assert engine.ended == {1: True}
    engine.load(2, ["a", "b"], [9, 8, 7, 6])
    assert engine.until(2)
    assert engine.ended[2] is True
    for at, page in enumerate([9, 8, 7, 6]):
        assert engine.bytes_of(page) == [10 + at] * LAYERS
    assert driver.findings() == ""


def test_pages_that_are_needed_are_copied_and_the_disk_is_not_waited_for(driver: Driver, engine: Engine) -> None:
    fill(engine, 5, 1, 2)
    engine.store(1, ["a"], [1, 2])
    engine.worker.wait({1})
    # The next request computes them anew.
    fill(engine, 6, 1, 2)
    assert engine.until(1)
    engine.load(2, ["a"], [3, 4])
    assert engine.until(2)
    assert engine.bytes_of(3) == engine.bytes_of(4) == [5] * LAYERS
    assert driver.findings() == ""


def test_a_load_is_written_after_the_last_reader_of_its_pages(driver: Driver, engine: Engine) -> None:
    fill(engine, 5, 1, 2)
    engine.store(1, ["a"], [1, 2])
    assert engine.until(1)
    fill(engine, 9, 3, 4)
    driver.hold(COMPUTE)
    engine.stream.run("reader", reads=engine.ranges(3, 4), expect=9)
    engine.load(2, ["a"], [3, 4])
    assert not engine.until(2, 0.1), "the pages are read"
    driver.hold(0)
    assert engine.until(2)
    assert engine.bytes_of(3) == engine.bytes_of(4) == [5] * LAYERS
    assert driver.findings() == ""


def test_of_a_block_only_the_wanted_part_is_loaded(driver: Driver, engine: Engine) -> None:
    for at in range(4):
        fill(engine, 10 + at, 1 + at)
    engine.store(1, ["a", "b"], [1, 2, 3, 4])
    assert engine.until(1)
    # From the second page of the first block on, and not the last page of the second.
    engine.load(2, ["a", "b"], [8, 7], first=1)
    assert engine.until(2)
    assert (engine.bytes_of(8), engine.bytes_of(7), engine.bytes_of(9)) == ([11] * 2, [12] * 2, [0] * 2)
    assert driver.findings() == ""


def test_a_block_that_is_not_there_fails_its_load_and_writes_no_page(driver: Driver, engine: Engine) -> None:
    engine.load(1, ["nothing"], [3, 4])
    assert engine.until(1)
    assert engine.worker.take_failed() == {"r"}
    assert engine.bytes_of(3) == [0] * LAYERS
    assert driver.findings() == ""


def test_a_stream_that_the_driver_refuses_stores_and_loads_nothing(driver: Driver, engine: Engine) -> None:
    fill(engine, 5, 1, 2)
    engine.store(1, ["a"], [1, 2])
    assert engine.until(1)
    engine.worker._stages._stream = lambda: 12345
    engine.store(2, ["b"], [1, 2])
    engine.load(3, ["a"], [3, 4])
    assert engine.until(2)
    assert engine.until(3)
    assert engine.worker.take_failed() == {"r"}
    assert engine.bytes_of(3) == [0] * LAYERS


@pytest.mark.parametrize("side", ["compute", "reader"])
def test_without_its_edges_the_race_is_found(driver: Driver, engine: Engine, side: str) -> None:
    engine.worker._stages._stream = lambda: "host"
    fill(engine, 5, 1, 2)
    engine.store(1, ["a"], [1, 2])
    assert engine.until(1)
    if side == "reader":
        driver.clear_findings()
        engine.stream.run("reader", reads=engine.ranges(3, 4), delay=0.05)
        engine.load(2, ["a"], [3, 4])
        assert engine.until(2)
    assert f"kernel `{side}`" in driver.findings()


def test_stages_are_used_again(engine: Engine) -> None:
    taken: list[Any] = []
    take: Callable[[int], Any] = engine.worker._stages.take

    def noted(nbytes: int) -> Any:
        taken.append(take(nbytes))
        return taken[-1]

    engine.worker._stages.take = noted
    for at in range(6):
        engine.store(at, [f"{at}"], [1, 2])
        assert engine.until(at)
    assert len({id(it) for it in taken}) == 1


def test_without_host_memory_for_stages_nothing_is_stored_or_loaded(
    driver: Driver, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(engine, 5, 1, 2)
    engine.store(1, ["a"], [1, 2])
    assert engine.until(1)
    engine.worker._stages._free.clear()

    def full(*_: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("mmap.mmap", full)
    engine.store(2, ["b"], [1, 2])
    engine.load(3, ["a"], [3, 4])
    assert engine.until(2)
    assert engine.until(3)
    assert engine.worker.take_failed() == {"r"}
    assert engine.bytes_of(3) == [0] * LAYERS


def test_a_page_outside_of_the_cache_keeps_no_stage(engine: Engine) -> None:
    engine.store(1, ["a"], [1, PAGES * LAYERS])
    assert engine.until(1)
    assert len(engine.worker._stages._free) == 1


# What becomes of a job that a fault strikes, and the method of copying that makes the calls that the fault is about.
SUCCEEDS, FAILS, IS_LOST, HANGS = "succeeds", "fails", "is lost", "hangs"
FAULTS: dict[str, tuple[str, str]] = {
    "alloc_oom": (SUCCEEDS, "gather"),
    "pin_oom": (SUCCEEDS, ""),
    "pin_twice": (SUCCEEDS, ""),
    "pin_too_long": (SUCCEEDS, ""),
    "stream_slow": (SUCCEEDS, ""),
    "event_never_signals": (SUCCEEDS, ""),
    "jit_refused": (SUCCEEDS, "kernel"),
    "launch_refused": (SUCCEEDS, "kernel"),
    "stream_oom": (FAILS, ""),
    "event_oom": (FAILS, ""),
    "batch_entry": (FAILS, "batch"),
    "foreign_error": (FAILS, ""),
    "context_destroyed": (IS_LOST, ""),
    "illegal_address": (IS_LOST, ""),
    "launch_failed": (IS_LOST, ""),
    "device_removed": (IS_LOST, ""),
    "stream_stalls": (HANGS, ""),
}
# Faults that strike no job, with the reason.
_LOADED = "the driver is loaded before a GPU's memory is registered"
_MAPPED = "no other process and no other GPU maps the pages"
_DMABUF = "no network device reads or writes the pages"
ELSEWHERE = {
    "no_device": _LOADED,
    "driver_mismatch": _LOADED,
    "missing_symbol": _LOADED,
    "context_oom": "the pages' context exists as long as the pages",
    "ipc_refused": _MAPPED,
    "ipc_exporter_dead": _MAPPED,
    "ipc_freed": _MAPPED,
    "ipc_full": _MAPPED,
    "ipc_not_capable": _MAPPED,
    "vmm_not_exportable": _MAPPED,
    "peer_refused": _MAPPED,
    "dmabuf_unsupported": _DMABUF,
    "dmabuf_flag_refused": _DMABUF,
    "dmabuf_notsupp": _DMABUF,
}
# Deadline of a copy that never ends.
COPY_S = 0.2
STRIKING = [(fault, side) for fault in FAULTS for side in ("store", "load")]


def test_each_fault_of_the_fake_driver_has_its_place() -> None:
    source = Path(__file__).parents[2] / "crates" / "kvferry-fakecuda" / "src" / "faults.rs"
    names = re.findall(r'Self::\w+ => "(\w+)"', source.read_text())
    assert sorted(names) == sorted([*FAULTS, *ELSEWHERE])


def stored_from_host(engine: Engine, name: str, byte: int) -> None:
    """Puts a block into the store past the GPU."""
    (layout,), nbytes = engine.worker._layouts, EACH * LAYERS * PAGE
    region = engine.worker._opened.agent.register(bytearray([byte]) * nbytes, "none")
    space = engine.worker._space(b"", layout, layout.shards[0])
    put = space.put([hashlib.sha256(name.encode()).digest()], kvferry.Blocks(region, [0], nbytes))
    assert put.stored == 1


def is_stored(engine: Engine, name: str) -> bool:
    (layout,) = engine.worker._layouts
    space = engine.worker._space(b"", layout, layout.shards[0])
    return bool(space.lookup([hashlib.sha256(name.encode()).digest()]) == 1)


def loads(engine: Engine, job: int, name: str) -> bool:
    engine.load(job, [name], [3, 4])
    assert engine.until(job)
    return not engine.worker.take_failed()


def struck(driver: Driver, engine: Engine, fault: str, side: str) -> None:
    """Begins job 1, whose copy the fault strikes. The copy waits for no event, which the fault would strike before it."""
    engine.worker._stages._stream = lambda: "host"
    hits = driver.counter(f"hit:{fault}")
    driver.fault(fault)
    if side == "store":
        engine.store(1, ["new"], [1, 2])
    else:
        engine.load(1, ["there"], [3, 4])
    deadline = time.monotonic() + 20
    while driver.counter(f"hit:{fault}") == hits and not engine.until(1, 0.01):
        assert time.monotonic() < deadline
    assert driver.counter(f"hit:{fault}") == hits + 1


def poisoned(driver: Driver, engine: Engine) -> bytes:
    """The engine uses its pages for something else. A copy that still runs is a finding."""
    driver.access(engine.array.address, engine.array.nbytes, write=True)
    engine.array.content = poison = b"\xaa" * engine.array.nbytes
    return poison


@pytest.mark.parametrize(("fault", "side"), [it for it in STRIKING if FAULTS[it[0]][0] in (SUCCEEDS, FAILS)])
def test_a_job_that_a_fault_of_the_driver_strikes_ends_and_the_next_succeeds(
    driver: Driver, engine: Engine, monkeypatch: pytest.MonkeyPatch, fault: str, side: str
) -> None:
    end, method = FAULTS[fault]
    monkeypatch.setenv("KVFERRY_GPU_METHOD", method)
    stored_from_host(engine, "there", 5)
    fill(engine, 7, 1, 2)
    engine.stream.synchronize()
    struck(driver, engine, fault, side)
    assert engine.until(1)
    failed = bool(engine.worker.take_failed()) if side == "load" else not is_stored(engine, "new")
    assert not (failed and end == SUCCEEDS)
    if side == "load" and not failed:
        assert engine.bytes_of(3) == engine.bytes_of(4) == [5] * LAYERS
    poison = poisoned(driver, engine)
    assert driver.counter("pending") == 0
    driver.clear_faults()
    time.sleep(0.05)
    assert engine.array.content == poison
    if side == "store" and not failed:
        assert loads(engine, 2, "new")
        assert engine.bytes_of(3) == engine.bytes_of(4) == [7] * LAYERS
    fill(engine, 8, 1, 2)
    engine.stream.synchronize()
    engine.store(3, ["next"], [1, 2])
    assert engine.until(3)
    assert loads(engine, 4, "next")
    assert engine.bytes_of(3) == engine.bytes_of(4) == [8] * LAYERS
    assert len(engine.worker._stages._free) == 1
    assert driver.findings() == ""


@pytest.mark.parametrize(("fault", "side"), [it for it in STRIKING if FAULTS[it[0]][0] == IS_LOST])
def test_a_job_whose_gpu_is_lost_fails_and_so_do_those_after_it(
    driver: Driver, engine: Engine, fault: str, side: str
) -> None:
    stored_from_host(engine, "there", 5)
    struck(driver, engine, fault, side)
    assert engine.until(1)
    assert side == "load" or not is_stored(engine, "new")
    engine.store(2, ["next"], [1, 2])
    assert engine.until(2)
    assert not is_stored(engine, "next")
    assert not loads(engine, 3, "there")
    # What is in the store, and host memory, does not depend on the GPU.
    stored_from_host(engine, "host", 6)
    assert is_stored(engine, "host")
    assert len(engine.worker._stages._free) == 1
    assert driver.findings() == ""


@pytest.mark.usefixtures("_the_gpu_is_given_up_soon")
@pytest.mark.parametrize("fault", [it for it, (end, _) in FAULTS.items() if end == HANGS])
def test_a_store_whose_copy_never_ends_stores_nothing_and_a_shutdown_does_not_wait_for_it(
    driver: Driver, engine: Engine, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr("kvferry.vllm._offload_staging._COPY_S", COPY_S)
    struck(driver, engine, fault, "store")
    assert engine.until(1)
    assert not is_stored(engine, "new")
    engine.worker.shutdown()
    region = engine.worker._regions[0]
    assert region.is_quarantined
    driver.clear_faults()
    deadline = time.monotonic() + 20
    while region.is_quarantined:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    poison = poisoned(driver, engine)
    assert driver.counter("pending") == 0
    assert engine.array.content == poison
    assert driver.findings() == ""


@pytest.mark.usefixtures("_the_gpu_is_given_up_soon")
@pytest.mark.parametrize("fault", [it for it, (end, _) in FAULTS.items() if end == HANGS])
def test_a_load_and_a_shutdown_wait_for_a_copy_to_pages_until_the_gpu_goes_on(
    driver: Driver, engine: Engine, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr("kvferry.vllm._offload_staging._COPY_S", COPY_S)
    stored_from_host(engine, "there", 5)
    struck(driver, engine, fault, "load")
    # Longer than the copy's deadline and the limit of silence.
    assert not engine.until(1, 5), "the GPU may write the pages"
    ends = threading.Thread(target=engine.worker.shutdown)
    ends.start()
    ends.join(0.5)
    assert ends.is_alive(), "the engine frees its pages after it"
    driver.clear_faults()
    ends.join(20)
    assert not ends.is_alive()
    poison = poisoned(driver, engine)
    assert driver.counter("pending") == 0
    assert engine.array.content == poison
    assert driver.findings() == ""
