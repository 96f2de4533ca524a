"""The worker of `KVFerryOffloadingSpec` with pages in memory of a GPU, on the fake driver."""

from __future__ import annotations

import hashlib
import importlib
import sys
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
    return Driver()


@pytest.fixture
def engine(driver: Driver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Engine]:
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
    made.worker.shutdown()
    made.array.free()
    driver.clear_findings()


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
