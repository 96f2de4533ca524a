"""What `KVFerryTier` and the manager of `KVFerryOffloadingSpec` do where weights change, and at the end of the engine."""

from __future__ import annotations

import functools
import hashlib
import importlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kvferry
import pytest
import vllm_stand_in as vllm

BLOCK, BLOCKS = 4096, 8
SETTINGS: dict[str, Any] = {"disk_gib": 1 / 32, "segment_mib": 1, "model": "m"}


@pytest.fixture(autouse=True)
def _vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm.install(monkeypatch)


def key(number: int) -> bytes:
    return hashlib.sha256(bytes([number])).digest() + bytes(4)


class Context:
    """vLLM's of a request."""

    req_id, kv_transfer_params = "r", None
    load_tier_filter = SimpleNamespace(allows=lambda *_: True)

    def __init__(self, count: int) -> None:
        self._offload_key_positions = {key(it): 16 * (it + 1) for it in range(count)}
        self._states: dict[type, Any] = {}

    def get_state(self, of: type) -> Any:
        return self._states.get(of)

    def set_state(self, state: Any) -> None:
        self._states[type(state)] = state

    def get_offload_key_position(self, of: bytes) -> int | None:
        return self._offload_key_positions.get(of)


def config() -> Any:
    return SimpleNamespace(
        groups=[SimpleNamespace(group_id=0, tokens_per_block=16, layer_names=("0",))],
        cache=SimpleNamespace(blocks_per_chunk=1, tokens_per_hash=16),
        model=SimpleNamespace(dtype="bfloat16"),
        parallel=SimpleNamespace(
            tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, world_size=1, is_parallelism_agnostic=True
        ),
        kv_cache_layout="BHLNC",
        canonical_layout=False,
        replicated_layout=False,
        engine_id="engine",
        enable_kv_cache_events=False,
    )


class Engine:
    """An engine with a tier, or with a manager of the store."""

    def __init__(self, core: vllm.EngineCore) -> None:
        self.core, self.made = core, core.made
        self.jobs = 0

    def lookup(self, number: int) -> str:
        return str(self.made.lookup(key(number), Context(BLOCKS)).name)

    def store(self, *numbers: int) -> int:
        """The number of the job."""
        self.jobs += 1
        ids = SimpleNamespace(tolist=lambda: list(numbers))
        keys = [key(it) for it in numbers]
        job = SimpleNamespace(job_id=self.jobs, keys=keys, chunk_ids=ids, req_context=Context(BLOCKS))
        self.made.submit_store(job)
        return self.jobs


Made = Callable[[], Engine]


@pytest.fixture
def tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    module = importlib.import_module("kvferry.vllm._offload_tier")
    monkeypatch.setattr(module, "check_tier", lambda: None)
    engines = []

    def made() -> Engine:
        view = memoryview(bytearray(BLOCK * BLOCKS)).cast("B", (BLOCKS, BLOCK))
        spec = SimpleNamespace(config=config(), kv_events_config=SimpleNamespace(enable_kv_cache_events=False))
        core = vllm.EngineCore(lambda: module.KVFerryTier(spec, view, "kvferry", disk=str(tmp_path / "kv"), **SETTINGS))
        engines.append(Engine(core))
        return engines[-1]

    yield made
    for engine in engines:
        engine.made.shutdown()


def settle(engine: Engine) -> dict[int, bool]:
    """Which jobs succeeded."""
    engine.made._drain()
    return {it.job_id: it.success for it in engine.made.get_finished_jobs()}


def test_weights_of_another_version_find_no_blocks_of_the_first_and_their_blocks_are_found_by_no_other(
    tier: Made,
) -> None:
    one, other = tier(), tier()
    one.store(0)
    settle(one)
    assert (one.lookup(0), other.lookup(0)) == ("HIT", "HIT")
    # As `finish_weight_update` does, with a reset of vLLM's cache alone.
    one.core.set_weight_version("2")
    assert (one.lookup(0), other.lookup(0)) == ("MISS", "HIT")
    one.store(1)
    settle(one)
    assert (one.lookup(1), other.lookup(1)) == ("HIT", "MISS")
    # Another training may give other weights this text.
    other.core.set_weight_version("2")
    assert other.lookup(1) == "MISS"
    # An engine that says its version again has the same weights.
    one.core.set_weight_version("2")
    assert one.lookup(1) == "HIT"


def test_a_manager_gives_blocks_of_another_version_other_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("kvferry.vllm._offload_manager")
    settings = importlib.import_module("kvferry.vllm._offload_settings")
    card = {"model": "m", "groups": [{"group": 0, "fingerprint": "00" * 32, "window": 0, "shards": [(0, 1)]}]}
    monkeypatch.setattr(module, "read_card", lambda *_: card)
    monkeypatch.setattr(module, "remove_cards", lambda *_: None)
    found = settings.OffloadSettings.of({**SETTINGS, "disk": str(tmp_path / "kv")})
    opened = settings.open_store(found, 0, module.logger)
    engine = Engine(vllm.EngineCore(lambda: module.KVFerryOffloadingManager(config(), found, opened)))
    manager = engine.made
    memory = kvferry.Blocks(opened.agent.register(bytearray(BLOCK), "none"), [0], BLOCK)
    for version in ("default", "2", "3"):
        engine.core.set_weight_version(version)
        assert engine.lookup(0) == "MISS"
        manager._groups[0].spaces[0].put([key(0)[:-4]], memory)
        manager.on_schedule_end(None)
        assert engine.lookup(0) == "HIT"
        assert manager.prepare_load([key(0)], Context(1)).tenant == manager._tenant
    manager.shutdown()
    # There is nothing to name any more.
    engine.core.set_weight_version("4")


class Held:
    """A space whose puts last until the test ends them."""

    def __init__(self, space: Any, may_end: threading.Event) -> None:
        self._space, self._may_end = space, may_end
        self.begun = threading.Event()
        self.puts = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._space, name)

    def put_async(self, *given: Any, **more: Any) -> Any:
        wait = functools.cache(lambda: self.put(*given, **more))
        return SimpleNamespace(done=self._may_end.is_set, wait=wait)

    def put(self, *given: Any, **more: Any) -> Any:
        self.puts += 1
        self.begun.set()
        assert self._may_end.wait(60)
        return self._space.put(*given, **more)


@pytest.mark.parametrize("ends", ["drain_jobs", "shutdown"])
def test_puts_that_have_not_begun_hold_up_neither_a_reset_nor_the_end_of_an_engine(
    tier: Made, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    module = importlib.import_module("kvferry.vllm._offload_puts")
    monkeypatch.setattr(module, "_QUEUED_BYTES_MAX", 0)
    monkeypatch.setattr(module, "_CLOSE_S", 0.0)
    engine, may_end = tier(), threading.Event()
    held = Held(engine.made._space(0), may_end)
    engine.made._spaces[0] = held
    jobs = [engine.store(at) for at in range(BLOCKS)]
    assert held.begun.wait(60)
    ended = threading.Thread(target=getattr(engine.made, ends))
    ended.start()
    # The first is queued in the store, the second has begun, and nobody waits for another.
    waiting = [run.pending for job in engine.made._jobs.values() for run in job.runs][2:]
    watchdog = time.monotonic() + 60
    while not all(it.done() for it in waiting):
        assert time.monotonic() < watchdog
        time.sleep(0.001)
    may_end.set()
    ended.join(60)
    assert not ended.is_alive()
    assert held.puts == 2
    results = {it.job_id: it.success for it in engine.made.get_finished_jobs()}
    assert results == {job: job <= 2 for job in jobs}
