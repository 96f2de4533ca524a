"""What `KVFerryTier` and the manager of `KVFerryOffloadingSpec` do where weights change, and at the end of the engine."""

from __future__ import annotations

import functools
import hashlib
import importlib
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kvferry
import pytest
import vllm_stand_in as vllm
from kvferry._engine.identity import adapters as _adapters
from kvferry._engine.identity.core import Cached, Core
from kvferry._engine.store import open_store
from test_identity import soon

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


class Scheduler:
    """As vLLM's of its offloading connector, which tells a manager and a tier of requests."""

    def __init__(self, made: Any) -> None:
        self._made = made

    def on_new_request(self, request: Any) -> Context:
        context = Context(BLOCKS)
        self._made.on_new_request(context)
        return context

    def build_connector_meta(self, scheduler_output: Any) -> None:
        assert scheduler_output.total_num_scheduled_tokens >= 0
        self._made.on_schedule_end(None)


def with_adapter(path: Path, number: int = 1, name: str = "tuned") -> Any:
    lora = SimpleNamespace(lora_name=name, lora_path=str(path), lora_int_id=number, load_inplace=False)
    return SimpleNamespace(lora_request=lora)


def adapter(path: Path, content: bytes) -> Path:
    path.mkdir(exist_ok=True)
    (path / "adapter_model.safetensors").write_bytes(content * 4096)
    return path


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


TIERS = {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [{"type": "KVFerryTier"}]}
SPEC = {"spec_name": "KVFerryOffloadingSpec"}


class Engine:
    """An engine with a tier, or with a manager of the store."""

    def __init__(self, core: vllm.EngineCore) -> None:
        self.core, self.made = core, core.made
        self.jobs = 0

    def lookup(self, number: int) -> str:
        return str(self.made.lookup(key(number), Context(BLOCKS)).name)

    def stores(self, number: int) -> bool:
        """Whether a block is stored that vLLM offers."""
        if hasattr(self.made, "submit_store"):
            self.store(number)
            return list(settle(self).values()) == [True]
        # One step computes what the next one offers.
        for _ in range(2):
            self.schedules(1)
        return self.offers(number)

    def schedules(self, tokens: int) -> None:
        Scheduler(self.made).build_connector_meta(SimpleNamespace(total_num_scheduled_tokens=tokens))

    def offers(self, number: int, context: Context | None = None) -> bool:
        """Whether a manager takes a block that vLLM offers, of a new request or of the one with this context."""
        context = context or Context(BLOCKS)
        keys: list[bytes] = self.made.prepare_store([key(number)], context).keys_to_store
        self.made.complete_store(keys, context)
        return keys == [key(number)]

    def reset(self, *, of_connector: bool = True, can_reset: bool = True) -> None:
        """As vLLM does it. The blocks of its cache stay if it can't."""
        self.core.can_reset = can_reset
        assert self.core.reset_prefix_cache(reset_connector=of_connector) == can_reset

    def store(self, *numbers: int, context: Context | None = None) -> int:
        """The number of the job."""
        self.jobs += 1
        ids = SimpleNamespace(tolist=lambda: list(numbers))
        keys = [key(it) for it in numbers]
        job = SimpleNamespace(job_id=self.jobs, keys=keys, chunk_ids=ids, req_context=context or Context(BLOCKS))
        self.made.submit_store(job)
        return self.jobs


Made = Callable[..., Engine]


@pytest.fixture
def tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    module = importlib.import_module("kvferry.vllm._offload_tier")
    monkeypatch.setattr(module, "check_tier", lambda: None)
    engines = []

    def made(kv_cache_config: Any = None, named: dict[str, Any] = TIERS) -> Engine:
        # As vLLM's connector, which has the specs of the cache.
        assert kv_cache_config is None or kv_cache_config.kv_cache_groups
        view = memoryview(bytearray(BLOCK * BLOCKS)).cast("B", (BLOCKS, BLOCK))
        spec = SimpleNamespace(config=config(), kv_events_config=SimpleNamespace(enable_kv_cache_events=False))
        core = vllm.EngineCore(
            lambda: module.KVFerryTier(spec, view, "kvferry", disk=str(tmp_path / "kv"), **SETTINGS),
            "OffloadingConnector",
            **named,
        )
        engines.append(Engine(core))
        return engines[-1]

    yield made
    for engine in engines:
        engine.made.shutdown()


@pytest.fixture
def _adapters_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is: an adapter that was not looked at in time has a name that equals nothing."""
    for name in ("_WAIT_S", "_WAIT_BURST_S", "_ANSWERS_S"):
        monkeypatch.setattr(_adapters, name, 60.0)


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
    # As a pause with `clear_cache` and `finish_weight_update` do.
    one.reset()
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


@pytest.fixture(params=["manager", "tier"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def stored(kind: str, request: pytest.FixtureRequest) -> Made:
    """Engines with one of the two."""
    made: Made = request.getfixturevalue(kind)
    return made


def test_a_store_takes_nothing_while_vllms_cache_may_have_blocks_of_weights_before(kind: str, stored: Made) -> None:
    engine, other = stored(), stored()
    assert engine.stores(0)
    # A pause with `clear_cache=false`, for example.
    engine.core.set_weight_version("2")
    # vLLM offers a prompt's blocks that it has found in its cache.
    assert not engine.stores(0) and not engine.stores(1)
    engine.reset(of_connector=False, can_reset=False)
    assert not engine.stores(2)
    # vLLM's own tier in host memory, which is before kvferry's, has such blocks still.
    engine.reset(of_connector=kind == "tier")
    assert engine.lookup(0) == "MISS"
    assert engine.stores(0)
    # There is no step between the reset and the version.
    engine.reset()
    engine.core.set_weight_version("3")
    assert engine.stores(3)
    assert other.stores(4)


def test_a_reset_of_the_connector_alone_leaves_blocks_of_other_weights(stored: Made) -> None:
    engine = stored()
    assert engine.stores(0)
    # Requests hold blocks, and go on with other weights.
    engine.reset(can_reset=False)
    assert engine.lookup(0) == "MISS" and not engine.stores(0)
    engine.reset()
    assert engine.stores(0)


def test_a_store_whose_engine_is_out_of_reach_goes_on_after_a_reset(stored: Made) -> None:
    """Nothing tells it when vLLM's cache is emptied."""
    engine = stored()
    engine.made._core = Core(None)
    engine.made._cached = Cached(engine.made._core)
    assert engine.stores(0)
    engine.reset(can_reset=False)
    assert engine.stores(0)


def test_blocks_that_were_not_offered_are_in_vllms_cache_too(stored: Made) -> None:
    engine = stored()
    # A request waits while the engine is paused.
    Scheduler(engine.made).on_new_request(SimpleNamespace(lora_request=None))
    engine.core.set_weight_version("2")
    assert engine.stores(0)
    engine.reset()
    # A client leaves: a step that only tells the workers of the request's end, which vLLM reports after it.
    engine.schedules(0)
    engine.core.set_weight_version("3")
    assert engine.stores(0)
    engine.reset()
    engine.schedules(1)
    engine.core.set_weight_version("4")
    assert not engine.stores(0)


def test_blocks_that_are_loaded_in_a_step_without_tokens_are_in_vllms_cache_too(kind: str, stored: Made) -> None:
    engine = stored()
    assert engine.stores(0)
    engine.reset()
    engine.schedules(0)
    if kind == "tier":
        ids = SimpleNamespace(tolist=lambda: [0])
        job = SimpleNamespace(job_id=9, keys=[key(0)], chunk_ids=ids, req_context=Context(BLOCKS))
        engine.made.submit_load(job)
        settle(engine)
    else:
        engine.made.prepare_load([key(0)], Context(BLOCKS))
    engine.core.set_weight_version("2")
    assert not engine.stores(0)


def test_a_step_whose_tokens_are_not_known_may_have_blocks_cached(stored: Made) -> None:
    engine = stored()
    engine.made.on_schedule_end(None)
    engine.core.set_weight_version("2")
    assert not engine.stores(0)


def test_a_manager_stores_nothing_of_earlier_requests_in_the_first_step_with_other_weights(manager: Made) -> None:
    engine = manager()
    assert engine.stores(0)
    before = Context(BLOCKS)
    engine.made.on_new_request(before)
    # As in a process of the caller's, which has the engine do nothing between these calls.
    engine.reset(of_connector=False)
    engine.core.set_weight_version("2")
    engine.schedules(1)
    assert not engine.offers(1, before), "the last block of a request that ended before"
    assert engine.offers(1), "the first block of a request that came after"
    engine.schedules(1)
    assert engine.offers(2, before)


def test_a_store_takes_nothing_after_other_weights_where_another_connector_keeps_blocks(
    kind: str, stored: Made
) -> None:
    own = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": TIERS if kind == "tier" else SPEC}
    engine = stored(named={"connectors": [{"kv_connector": "LMCacheConnectorV1"}, own]})
    engine.core.vllm_config.kv_transfer_config.kv_connector = "MultiConnector"
    assert engine.stores(0)
    engine.reset()
    assert not engine.stores(0)


def test_a_tier_takes_nothing_after_other_weights_where_another_tier_keeps_blocks(tier: Made) -> None:
    engine = tier(named={**TIERS, "secondary_tiers": [{"type": "fs"}, {"type": "KVFerryTier"}]})
    assert engine.stores(0)
    engine.reset()
    assert not engine.stores(0)


CARD = {"model": "m", "groups": [{"group": 0, "fingerprint": "00" * 32, "window": 0, "shards": [(0, 1)]}]}


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    """Managers of engines that share a store."""
    module = importlib.import_module("kvferry.vllm._offload_manager")
    settings = importlib.import_module("kvferry.vllm._settings")
    monkeypatch.setattr(module, "read_card", lambda *_: CARD)
    monkeypatch.setattr(module, "remove_cards", lambda *_: None)
    found = settings.store_settings({**SETTINGS, "disk": str(tmp_path / "kv")})
    engines = []

    def made(named: dict[str, Any] = SPEC) -> Engine:
        opened = open_store(found, 0, module.logger)
        core = vllm.EngineCore(
            lambda: module.KVFerryOffloadingManager(config(), found, opened), "OffloadingConnector", **named
        )
        engines.append(Engine(core))
        return engines[-1]

    yield made
    for engine in engines:
        engine.made.shutdown()


def test_a_manager_gives_blocks_of_another_version_other_names(manager: Made) -> None:
    engine = manager()
    made = engine.made
    memory = kvferry.Blocks(made._opened.agent.register(bytearray(BLOCK), "none"), [0], BLOCK)
    for version in ("default", "2", "3"):
        engine.core.set_weight_version(version)
        assert engine.lookup(0) == "MISS"
        made._groups[0].spaces[0].put([key(0)[:-4]], memory)
        made.on_schedule_end(None)
        assert engine.lookup(0) == "HIT"
        assert made.prepare_load([key(0)], Context(1)).tenant == made._tenant
    made.shutdown()
    # There is nothing to name any more.
    engine.core.set_weight_version("4")


@pytest.mark.usefixtures("_adapters_are_looked_at")
def test_an_adapter_with_other_weights_under_its_name_and_path_finds_none_of_the_old_blocks(
    tier: Made, tmp_path: Path
) -> None:
    """vLLM gives them the same keys."""

    def request(engine: Engine, of: Any) -> tuple[Context, str]:
        context = Scheduler(engine.made).on_new_request(of)
        return context, engine.made.lookup(key(0), context).name

    path = adapter(tmp_path / "lora", b"one")
    engine = tier()
    context, found = request(engine, with_adapter(path))
    assert found == "MISS"
    engine.store(0, context=context)
    assert settle(engine) == {1: True}
    assert request(engine, with_adapter(path))[1] == "HIT"
    # Another engine, or a later start, with the same files.
    assert request(tier(), with_adapter(path, 7))[1] == "HIT"
    assert request(tier(), with_adapter(adapter(tmp_path / "there", b"one")))[1] == "HIT"
    adapter(path, b"other")
    later = tier()
    context, found = request(later, with_adapter(path))
    assert found == "MISS"
    later.store(0, context=context)
    settle(later)
    assert request(later, with_adapter(path))[1] == "HIT"
    # The first engine still computes with the weights that it has loaded, and knows of no file with them.
    soon(engine.made._adapters._adapters)
    context, found = request(engine, with_adapter(path))
    assert found == "MISS"
    engine.store(1, context=context)
    assert settle(engine) == {2: False}
    # Without an adapter vLLM's keys are others.
    assert request(later, SimpleNamespace(lora_request=None))[1] == "MISS"


@pytest.mark.usefixtures("_adapters_are_looked_at")
def test_a_manager_names_blocks_of_an_adapter_by_its_weights_and_reports_vllms_hashes(
    manager: Made, tmp_path: Path
) -> None:
    path = adapter(tmp_path / "lora", b"one")
    engine = manager()
    made = engine.made
    context = Scheduler(made).on_new_request(with_adapter(path))
    plain = Scheduler(made).on_new_request(SimpleNamespace(lora_request=None))
    named = made.prepare_load([key(0)], context).groups[0][0].hash
    assert made.prepare_load([key(0)], plain).groups[0][0].hash == key(0)[:-4]
    assert named != key(0)[:-4]
    assert made._adapters.report(made._request(context).names, [key(0)]) == [named]
    assert list(made._adapters.hashes([named, key(1)[:-4]])) == [key(0)[:-4], key(1)[:-4]]
    spec = made.prepare_store([key(0)], context).store_spec
    assert [block.hash for block in spec.groups[0]] == [named]
    memory = kvferry.Blocks(made._opened.agent.register(bytearray(BLOCK), "none"), [0], BLOCK)
    made._groups[0].spaces[0].put([named], memory)
    made.complete_store([key(0)], context)
    made.on_schedule_end(None)
    assert (made.lookup(key(0), context).name, made.lookup(key(0), plain).name) == ("HIT", "MISS")
    adapter(path, b"other")
    later = manager()
    context = Scheduler(later.made).on_new_request(with_adapter(path))
    assert later.made.lookup(key(0), context).name == "MISS"
    # With the weights that the first engine has, its own cache goes on, and nothing of it is stored.
    soon(made._adapters._adapters)
    context = Scheduler(made).on_new_request(with_adapter(path))
    assert made.prepare_store([key(1)], context).keys_to_store == []


@pytest.mark.usefixtures("_adapters_are_looked_at")
def test_a_tier_stores_nothing_of_an_adapter_whose_files_have_changed_since_the_last_look(
    tier: Made, tmp_path: Path
) -> None:
    path = adapter(tmp_path / "lora", b"one")
    engine = tier()
    context = Scheduler(engine.made).on_new_request(with_adapter(path))
    engine.made.lookup(key(0), context)
    engine.store(0, context=context)
    assert settle(engine) == {1: True}
    # vLLM has dropped the adapter for others, and reads it again for the next step.
    adapter(path, b"other")
    engine.store(1, context=context)
    assert settle(engine) == {2: False}


@pytest.mark.usefixtures("_adapters_are_looked_at")
def test_a_worker_stores_nothing_of_an_adapter_whose_files_have_changed_until_the_step_was_computed(
    manager: Made, tmp_path: Path
) -> None:
    """The manager is asked before the step in which vLLM loads the adapter."""
    module = importlib.import_module("kvferry.vllm._offload_worker")
    worker = module.KVFerryOffloadingWorker.__new__(module.KVFerryOffloadingWorker)
    worker._opened, worker._jobs, worker._adapters = object(), {}, _adapters.Unchanged()
    stored: list[str] = []
    worker._of_groups = lambda spec, pages: stored.append(spec.request) or []
    worker._say = lambda *_: None

    path = adapter(tmp_path / "lora", b"one")
    made = manager().made
    plain = Scheduler(made).on_new_request(SimpleNamespace(lora_request=None))
    context = Scheduler(made).on_new_request(with_adapter(path))
    # As vLLM sends it to each rank.
    specs = [pickle.loads(pickle.dumps(made.prepare_store([key(0)], it).store_spec)) for it in (context, plain)]
    assert [spec.files is None for spec in specs] == [False, True]
    for job, spec in enumerate(specs):
        assert worker.submit_store(job, None, spec)
    assert len(stored) == 2
    adapter(path, b"other")
    for job, spec in enumerate(specs):
        assert worker.submit_store(job, None, spec)
    # The one without an adapter.
    assert len(stored) == 3
    assert all(has_ended for _, has_ended, *_ in worker.get_finished())


def _renamed(monkeypatch: pytest.MonkeyPatch) -> None:
    card = {**CARD, "groups": [{"group": 0}]}
    monkeypatch.setattr("kvferry.vllm._offload_manager.read_card", lambda *_: card)


def _other_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    def watch(*_: Any) -> None:
        raise ValueError("the groups of layers were [0] and are [1]")

    monkeypatch.setattr("kvferry.vllm._offload_manager.StoreEvents.watch", watch)


@pytest.mark.parametrize("fault", [_renamed, _other_groups])
def test_a_manager_that_fails_with_its_cards_finds_and_stores_nothing_and_ends_no_engine(
    manager: Made, monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None]
) -> None:
    events = config()
    events.enable_kv_cache_events = True
    monkeypatch.setitem(globals(), "config", lambda: events)
    fault(monkeypatch)
    engine = manager()
    assert engine.lookup(0) == "MISS"
    assert engine.made.prepare_store([key(0)], Context(BLOCKS)).keys_to_store == []
    engine.made.reset_cache()
    assert engine.lookup(0) == "MISS"


class ArrivesBehindLookup:
    """A space of a store with an object store, from which a block arrives as soon as it was looked up in vain."""

    def __init__(self) -> None:
        self.prefetches = 0
        self.is_here = False

    def done(self) -> bool:
        return self.is_here

    def prefetch_async(self, _: list[bytes]) -> ArrivesBehindLookup:
        self.prefetches += 1
        return self

    def lookup(self, hashes: list[bytes]) -> int:
        was_here, self.is_here = self.is_here, self.prefetches > 0
        return len(hashes) if was_here else 0


@pytest.mark.parametrize("kind", ["manager", "tier"])
def test_a_block_that_arrives_from_the_object_store_during_its_look_up_is_found(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = request.getfixturevalue(kind)().made
    space = ArrivesBehindLookup()
    monkeypatch.setattr(made, "_settings", SimpleNamespace(object="s3://bucket"))
    if kind == "manager":
        monkeypatch.setattr(made, "_groups", {0: SimpleNamespace(spaces=[space], window=0)})
    else:
        monkeypatch.setattr(made, "_space", lambda _: space)
    context = Context(BLOCKS)
    # All within one step.
    found = [made.lookup(key(0), context).name for _ in range(3)]
    assert (found, space.prefetches) == (["RETRY", "RETRY", "HIT"], 1)


def fails(*_: Any) -> Any:
    raise RuntimeError("as a bug")


def test_a_call_that_fails_in_a_manager_is_a_miss_or_a_load_without_blocks(
    manager: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = manager()
    made = engine.made

    monkeypatch.setattr(made, "_request", fails)
    assert made.on_new_request(Context(BLOCKS)) is not None
    assert made.lookup(key(0), Context(BLOCKS)).name == "MISS"
    assert made.prepare_load([key(0)], Context(BLOCKS)).groups == {}
    assert made.prepare_store([key(0)], Context(BLOCKS)).keys_to_store == []
    made.touch([key(0)], Context(BLOCKS))
    monkeypatch.setattr("kvferry.vllm._offload_manager.by_group", fails)
    made.complete_store([key(0)], Context(BLOCKS), success=True)
    monkeypatch.setattr(made, "_release", fails)
    made.complete_load([key(0)], Context(BLOCKS))


def cache(slots: int | None) -> Any:
    spec = SimpleNamespace(num_head_slots=slots, state_content_bytes=None if slots is None else 128)
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])


def test_an_engine_whose_attention_backend_orders_pages_otherwise_finds_no_rows(tier: Made) -> None:
    plain, apart = tier(cache(None)), tier(cache(2))
    plain.store(0)
    apart.store(1)
    for engine in (plain, apart):
        settle(engine)
    found = {"plain": tier(cache(None)), "apart": tier(cache(2))}
    assert {name: [it.lookup(0), it.lookup(1)] for name, it in found.items()} == {
        "plain": ["HIT", "MISS"],
        "apart": ["MISS", "HIT"],
    }


def states(*shape: int) -> Any:
    spec = SimpleNamespace(shapes=(shape, (2, 3, 4)), dtypes=("bfloat16", "float32"))
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])


def test_an_engine_whose_convolutions_have_the_axes_of_their_states_swapped_finds_no_rows(tier: Made) -> None:
    default, swapped = tier(states(3, 64)), tier(states(64, 3))
    default.store(0)
    swapped.store(1)
    for engine in (default, swapped):
        settle(engine)
    for shape, found in (((3, 64), ["HIT", "MISS"]), ((64, 3), ["MISS", "HIT"])):
        engine = tier(states(*shape))
        assert [engine.lookup(0), engine.lookup(1)] == found
    # An engine of an earlier release, which looked at no states.
    engine = tier(cache(None))
    assert [engine.lookup(0), engine.lookup(1)] == ["HIT", "MISS"]


@pytest.mark.parametrize(
    ("slots", "counts"), [(None, False), (2, True)], ids=["in the order of most backends", "in an order of its own"]
)
def test_the_backend_counts_where_the_specs_do_not_say_its_order(slots: int | None, counts: bool) -> None:
    module = importlib.import_module("kvferry.vllm._offload_tier")

    def of(backend: str | None) -> bytes:
        attention = SimpleNamespace(backend=backend, backend_per_kind={})
        found: bytes = module._fingerprint(config(), BLOCK, SimpleNamespace(attention_config=attention), cache(slots))
        return found

    assert of("ROCM_ATTN") == of("ROCM_ATTN")
    assert (of("ROCM_ATTN") != of("B12X")) == counts


def test_a_call_that_fails_in_a_tier_is_a_miss_or_a_job_that_ends_without_blocks(
    tier: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tier()
    made = engine.made

    monkeypatch.setattr(made, "_asked", fails)
    assert made.on_new_request(Context(BLOCKS)) is not None
    assert engine.lookup(0) == "MISS"
    made.touch([key(0)], Context(BLOCKS))
    stored = engine.store(0)
    made.submit_load(SimpleNamespace(job_id=7, keys=[key(0)], chunk_ids=None, req_context=Context(BLOCKS)))
    assert {it.job_id: it.success for it in made.get_finished_jobs()} == {stored: False, 7: False}


def test_a_hash_of_blocks_of_two_weights_has_left_with_the_last_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    events = importlib.import_module("kvferry.vllm._offload_events")
    monkeypatch.setattr(events, "OffloadingEvent", SimpleNamespace)
    # Names in the store, of vLLM's hashes "a" and "b"; "c" is of no adapter.
    hashes = {b"a1": b"a", b"a2": b"a", b"b1": b"b"}
    reports = [
        (0, False, [b"a1", b"b1", b"c"]),
        (0, False, [b"a2"]),
        (0, True, [b"a1"]),
        (0, True, [b"b1", b"c"]),
        (0, True, [b"a2"]),
    ]

    class Watch:
        reports = 0

        def gather(self, _: float) -> int:
            raise kvferry.Error("it was closed")

        def take(self, _: int) -> Any:
            return reports

    store = SimpleNamespace(watch=lambda _: Watch())
    made = events.StoreEvents(
        SimpleNamespace(store=store),
        locality=None,
        ownership="kvferry",
        hashes_of=lambda names: [hashes.get(name, name) for name in names],
    )
    made.watch({0: []})
    found = [(it.removed, [key[:-4] for key in it.keys]) for it in made.take()]
    made.close()
    assert found == [(False, [b"a", b"b", b"c"]), (False, [b"a"]), (True, [b"b", b"c"]), (True, [b"a"])]
    assert not made._published and not made._names


def test_a_request_whose_adapter_is_not_known_neither_finds_nor_stores_a_block() -> None:
    adapters = importlib.import_module("kvferry.vllm._offload_adapters")
    core = importlib.import_module("kvferry._engine.identity.core").Core(None)
    for has_adapters in (True, False):
        lora_config = SimpleNamespace() if has_adapters else None
        stored = adapters.StoredAdapters(core, SimpleNamespace(lora_config=lora_config))
        names = stored.of_request()
        assert (names.of([key(0)]) == [key(0)[:-4]]) == (not has_adapters)
        assert names.may_store(is_computed=False) == (not has_adapters)


class HeldPut:
    """A put that lasts until the test ends it or, without `may_end`, waits for its turn until that has passed."""

    def __init__(self, put: Callable[[], Any], may_end: threading.Event | None) -> None:
        self._put, self._may_end = functools.cache(put), may_end
        self.was_cancelled = threading.Event()

    def done(self) -> bool:
        return self._may_end is None or self._may_end.is_set()

    def cancel(self) -> bool:
        self.was_cancelled.set()
        return self._may_end is None

    def wait(self, timeout: float | None = None) -> Any:
        if self._may_end is None:
            names = "stored present failed refused_no_space refused_contended refused_index_full"
            return SimpleNamespace(**dict.fromkeys(names.split(), 0), refused=1, refused_waiting=1)
        has_ended = self._may_end.wait(60 if timeout is None else timeout)
        assert has_ended or timeout is not None
        return self._put() if has_ended else None


class Held:
    """A space that begins its first put, and no other."""

    def __init__(self, space: Any, may_end: threading.Event) -> None:
        self._space, self._may_end = space, may_end
        self.puts: list[HeldPut] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._space, name)

    def put_async(self, *given: Any, wait: float, **more: Any) -> HeldPut:
        # The store ends a put that has no turn by then.
        assert 0 < wait <= 10
        put = functools.partial(self._space.put, *given, **more)
        self.puts.append(HeldPut(put, None if self.puts else self._may_end))
        return self.puts[-1]


@pytest.mark.parametrize("ends", ["drain_jobs", "shutdown"])
def test_puts_that_have_not_begun_hold_up_neither_a_reset_nor_the_end_of_an_engine(tier: Made, ends: str) -> None:
    engine, may_end = tier(), threading.Event()
    held = engine.made._spaces[0] = Held(engine.made._space(0), may_end)
    jobs = [engine.store(at) for at in range(BLOCKS)]
    ended = threading.Thread(target=getattr(engine.made, ends))
    ended.start()
    if ends == "drain_jobs":
        assert all(it.was_cancelled.wait(60) for it in held.puts)
    may_end.set()
    ended.join(60)
    assert not ended.is_alive()
    assert len(held.puts) == BLOCKS
    results = {it.job_id: it.success for it in engine.made.get_finished_jobs()}
    assert results == {job: job == 1 for job in jobs}
