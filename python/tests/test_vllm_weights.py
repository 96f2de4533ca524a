"""What the scheduler's side of `KVFerryConnector` does where a call fails, and where weights change."""

from __future__ import annotations

import importlib
import inspect
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm_stand_in as vllm
from kvferry._engine.identity import adapters as _adapters
from kvferry._engine.identity import core as _core
from kvferry._engine.identity.adapters import Adapters
from kvferry.vllm._settings import Settings
from vllm_stand_in import FullAttentionSpec, Request

TOKENS = list(range(32))


@pytest.fixture(autouse=True)
def _schedulers_wait_for_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is: an adapter that was not looked at in time has a name that equals nothing."""
    for name in ("_WAIT_S", "_WAIT_BURST_S", "_ANSWERS_S"):
        monkeypatch.setattr(_adapters, name, 60.0)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    vllm.install(monkeypatch)
    return importlib.import_module("kvferry.vllm._connector")


@pytest.fixture
def connector(module: Any) -> Any:
    return connector_of(module)


def connector_of(module: Any, named: str = "KVFerryConnector", **extra: Any) -> Any:
    """Its engine core is `core`."""
    made = module.KVFerryConnector.__new__(module.KVFerryConnector)
    core = vllm.EngineCore(
        lambda: module._Scheduler(vllm.config(), vllm.caches(FullAttentionSpec()), Settings.of({})), named, **extra
    )
    made._scheduler, made._side, made.core = core.made, core.made, core
    return made


def prefill(name: str, tokens: list[int]) -> Request:
    return Request(name, {"do_remote_decode": True, "transfer_id": f"of {name}"}, tokens)


def decode(name: str) -> Request:
    params = {"do_remote_prefill": True, "transfer_id": f"of {name}", "remote_host": "127.0.0.1", "remote_port": 1}
    return Request(name, params, list(TOKENS))


def step(
    new: dict[str, tuple[list[int], int]] | None = None,
    more: dict[str, tuple[list[int], int, int]] | None = None,
    preempted: list[str] | None = None,
) -> Any:
    """What vLLM says of a step. `new`: blocks and tokens. `more`: new blocks, and tokens before the step and in it."""
    new, more = new or {}, more or {}
    tokens = {**{it: given[1] for it, given in new.items()}, **{it: given[2] for it, given in more.items()}}
    return SimpleNamespace(
        num_scheduled_tokens=tokens,
        scheduled_new_reqs=[
            SimpleNamespace(req_id=it, num_computed_tokens=0, block_ids=(blocks,)) for it, (blocks, _) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(more),
            new_block_ids=[(blocks,) for blocks, _, _ in more.values()],
            num_computed_tokens=[before for _, before, _ in more.values()],
            resumed_req_ids=set(),
        ),
        preempted_req_ids=set(preempted or ()),
    )


class Half:
    """The half, of which a call raises once."""

    def __init__(self, half: Any, name: str, *, after: bool = False) -> None:
        self._half, self._name, self._after = half, name, after
        self.raised = False

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._half, name)
        return self._failing(call) if name == self._name and not self.raised else call

    def _failing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def fail(*given: Any) -> Any:
            self.raised = True
            if self._after:
                call(*given)
            raise RuntimeError("a failure of the test")

        return fail


def fail_once(connector: Any, name: str, *, after: bool = False) -> Half:
    half = connector._scheduler.half = Half(connector._scheduler.half, name, after=after)
    return half


def gauges(connector: Any) -> dict[str, int]:
    found: dict[str, int] = connector._scheduler.half.gauges()
    return found


def offered(connector: Any, name: str = "a") -> Any:
    """A request whose prompt was computed, and is offered."""
    request = prefill(name, list(TOKENS))
    connector.on_new_request(request)
    connector.build_connector_meta(step({name: ([1, 2], 32)}))
    return request


def test_a_request_that_ended_is_held_for_decode(connector: Any) -> None:
    request = offered(connector)
    assert connector.request_finished(request, [1, 2])[0]
    assert gauges(connector)["held"] == 1


@pytest.mark.parametrize("after", [False, True])
def test_blocks_that_are_offered_are_held_when_the_end_of_their_request_fails(connector: Any, *, after: bool) -> None:
    request = offered(connector)
    half = fail_once(connector, "finished", after=after)
    held, _ = connector.request_finished_all_groups(request, ([1, 2],))
    assert half.raised and held
    assert gauges(connector)["held"] == 1
    connector.build_connector_meta(step())
    reported = SimpleNamespace(kv_connector_worker_meta=None, finished_sending={"a"}, finished_recving=None)
    connector.update_connector_output(reported)
    assert gauges(connector)["held"] == gauges(connector)["produced"] == 0


def test_blocks_that_are_offered_are_held_when_their_answer_fails(
    connector: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = offered(connector)

    def fail(*_: Any) -> None:
        raise RuntimeError("a failure of the test")

    monkeypatch.setattr(connector._scheduler._siblings, "ended", fail)
    assert connector.request_finished(request, [1, 2]) == (True, None)
    assert gauges(connector)["held"] == 1


def test_a_request_without_a_handoff_is_not_held_when_its_end_fails(connector: Any) -> None:
    request = Request("b", {"do_remote_decode": True}, list(TOKENS))
    fail_once(connector, "finished")
    assert connector.request_finished(request, [1, 2]) == (False, None)
    assert connector.request_finished(Request("c", None, list(TOKENS)), [1]) == (False, None)


def test_each_report_of_the_workers_is_heard_whatever_fails_before_it(connector: Any, module: Any) -> None:
    for name in ("a", "b"):
        connector.request_finished(offered(connector, name), [1, 2])
    fail_once(connector, "reported")
    notes = module.KVFerryWorkerMetadata({0: b"of rank 0", 1: b"of rank 1"})
    connector.update_connector_output(
        SimpleNamespace(kv_connector_worker_meta=notes, finished_sending={"a", "b"}, finished_recving={"c"})
    )
    assert gauges(connector)["held"] == 0


def test_a_step_that_fails_withdraws_what_it_computes_and_what_was_preempted(connector: Any) -> None:
    a, b = (prefill(name, list(range(48))) for name in ("a", "b"))
    c = offered(connector, "c")
    for request in (a, b):
        connector.on_new_request(request)
    connector.build_connector_meta(step({"a": ([3], 16), "b": ([4], 16)}))
    half = fail_once(connector, "step_of")
    lost = connector.build_connector_meta(step(more={"a": ([5], 16, 16)}, preempted=["b"]))
    assert half.raised and lost.data and not lost.computes
    # A later step of it has only the blocks since: the half would take them for its first ones.
    connector.build_connector_meta(step(more={"a": ([6], 32, 16)}))
    assert not connector.request_finished(a, [3, 5, 6])[0]
    assert not connector.request_finished(b, [])[0]
    assert connector.request_finished(c, [1, 2])[0]


def test_a_step_that_can_not_be_read_withdraws_everything_that_is_computed(connector: Any) -> None:
    a, b = offered(connector, "a"), prefill("b", list(range(48)))
    connector.on_new_request(b)
    connector.build_connector_meta(step({"b": ([3], 16)}))
    assert not connector.build_connector_meta(SimpleNamespace()).computes
    for request in (a, b):
        assert not connector.request_finished(request, [1, 2])[0]


# New weights.


def version(connector: Any, given: str) -> None:
    connector.core.set_weight_version(given)


def is_handed_over(connector: Any, name: str) -> bool:
    held: bool = connector.request_finished(offered(connector, name), [1, 2])[0]
    return held


def test_after_a_reset_with_the_connector_nothing_is_handed_over_until_the_weights_have_a_version(
    connector: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert is_handed_over(connector, "a")
    connector.reset_cache()
    assert not is_handed_over(connector, "b")
    assert "/update_weight_version" in caplog.text
    consumer = decode("c")
    connector.on_new_request(consumer)
    assert connector.get_num_new_matched_tokens(consumer, 0) == (0, False)
    version(connector, "7")
    assert is_handed_over(connector, "d")


@pytest.mark.parametrize("name", ["1", "2", "default"])
def test_a_version_that_was_given_before_a_reset_is_none_of_the_weights_that_came_after_it(
    connector: Any, name: str
) -> None:
    version(connector, name)
    assert is_handed_over(connector, "a")
    connector.reset_cache()
    # Weights may have come without a version: `finish_weight_update` need not have one.
    assert not is_handed_over(connector, "b")
    refused = connector.get_kv_connector_stats().data["refused_requests"]
    assert refused == {"changed_weights": 1}
    # The engine had only paused.
    version(connector, name)
    assert is_handed_over(connector, "c")


def test_what_arrived_before_the_weights_changed_is_not_handed_over(connector: Any) -> None:
    version(connector, "1")
    waiting = prefill("a", list(TOKENS))
    connector.on_new_request(waiting)
    loading = decode("b")
    connector.on_new_request(loading)
    assert connector.get_num_new_matched_tokens(loading, 0) != (0, False)
    # It comes between an arrival and its step: vLLM takes requests while it is paused for new weights.
    version(connector, "2")
    assert connector.get_num_new_matched_tokens(loading, 16) == (0, False)
    connector.build_connector_meta(step({"a": ([1, 2], 32)}))
    assert connector.request_finished(waiting, [1, 2]) == (False, None)
    assert is_handed_over(connector, "c")


def reset(connector: Any, *, of_connector: bool = True, can_reset: bool = True) -> bool:
    """As vLLM does it. The blocks of its cache stay if it can't."""
    connector.core.can_reset = can_reset
    emptied: bool = connector.core.reset_prefix_cache(reset_connector=of_connector)
    return emptied


def begins_with_cached_tokens(connector: Any, name: str, *, resumes: bool = False) -> bool:
    """Whether a prompt is handed over of which vLLM has found 16 tokens in its cache."""
    request = prefill(name, list(TOKENS))
    connector.on_new_request(request)
    if resumes:
        connector.build_connector_meta(step({name: ([1], 8)}))
        connector.build_connector_meta(step(preempted=[name]))
        last = step(more={name: ([1, 2], 16, 16)})
        last.scheduled_cached_reqs.resumed_req_ids = {name}
    else:
        last = step({name: ([1, 2], 16)})
        last.scheduled_new_reqs[0].num_computed_tokens = 16
    connector.build_connector_meta(last)
    held: bool = connector.request_finished(request, [1, 2])[0]
    return held


@pytest.mark.parametrize("resumes", [False, True])
def test_blocks_of_weights_of_an_earlier_version_are_not_handed_over(
    connector: Any, caplog: pytest.LogCaptureFixture, *, resumes: bool
) -> None:
    assert begins_with_cached_tokens(connector, "a") and is_handed_over(connector, "b")
    version(connector, "2")
    # vLLM's cache has blocks of the first weights.
    assert not begins_with_cached_tokens(connector, "c", resumes=resumes)
    assert is_handed_over(connector, "d")
    assert "/reset_prefix_cache" in caplog.text
    assert not reset(connector, of_connector=False, can_reset=False)
    assert not begins_with_cached_tokens(connector, "e", resumes=resumes)
    assert reset(connector, of_connector=False)
    assert begins_with_cached_tokens(connector, "f")


def beside(module: Any, connector: str, path: str | None = None, **extra: Any) -> Any:
    """A `KVFerryConnector` beside another connector."""
    part = {"kv_connector": connector, "kv_connector_extra_config": extra}
    if path is not None:
        part["kv_connector_module_path"] = path
    return connector_of(module, "MultiConnector", connectors=[{"kv_connector": "KVFerryConnector"}, part])


OFFLOADING = "OffloadingConnector"
# llm-d's file store, which vLLM tells of no reset.
FILES = {"spec_name": "SharedStorageOffloadingSpec", "spec_module_path": "llmd_fs_backend.spec"}
SPEC = {"spec_name": "KVFerryOffloadingSpec", "spec_module_path": "kvferry.vllm"}


@pytest.mark.parametrize(
    ("other", "path", "extra", "keeps"),
    [
        ("LMCacheConnectorV1", None, {}, True),
        (OFFLOADING, None, {"secondary_tiers": [{"type": "fs"}]}, True),
        (OFFLOADING, None, {"secondary_tiers": [{"type": "KVFerryTier"}]}, False),
        (OFFLOADING, None, {"secondary_tiers": [{"type": "KVFerryTier", "module_path": "another"}]}, True),
        (OFFLOADING, None, {}, False),
        (OFFLOADING, None, {"spec_name": "TieringOffloadingSpec"}, False),
        (OFFLOADING, None, FILES, True),
        (OFFLOADING, None, SPEC, False),
        (OFFLOADING, None, {**SPEC, "spec_module_path": "another"}, True),
        ("SimpleCPUOffloadConnector", None, {}, False),
        # Of another package, with files that outlive its engine.
        ("SimpleCPUOffloadConnector", "vllm_marconi_offload", {}, True),
        ("KVFerryConnector", "kvferry.vllm", {}, False),
        ("KVFerryConnector", "kvferry_of_another", {}, True),
        # Other engines store in it, also those that have the weights of before.
        ("MooncakeStoreConnector", None, {}, True),
        ("NixlConnector", None, {}, False),
        ("NixlConnector", "another", {}, True),
    ],
)
def test_a_reset_empties_what_vllm_resets_of_other_connectors_alone(
    other: str, path: str | None, extra: dict[str, Any], keeps: bool, module: Any
) -> None:
    connector = beside(module, other, path, **extra)
    assert begins_with_cached_tokens(connector, "a")
    assert reset(connector)
    version(connector, "2")
    assert begins_with_cached_tokens(connector, "b") != keeps
    assert is_handed_over(connector, "c")


@pytest.mark.parametrize("other", [*_core.KEEP_NOTHING, "KVFerryConnector"])
def test_a_connector_without_a_cache_keeps_no_blocks_of_weights_before(other: str, module: Any) -> None:
    connector = beside(module, other)
    assert begins_with_cached_tokens(connector, "a")
    version(connector, "2")
    assert not begins_with_cached_tokens(connector, "b")
    assert reset(connector, of_connector=False)
    assert begins_with_cached_tokens(connector, "c")


@pytest.mark.parametrize("path", [None, "kvferry.vllm", "another"])
def test_a_connector_alone_is_known_by_its_module(path: str | None, module: Any) -> None:
    connector = connector_of(module)
    connector.core.vllm_config.kv_transfer_config.kv_connector_module_path = path
    assert begins_with_cached_tokens(connector, "a")
    version(connector, "2")
    assert reset(connector, of_connector=False)
    assert begins_with_cached_tokens(connector, "b") == (path != "another")


def test_a_store_of_kvferry_beside_it_keeps_no_blocks_of_weights_before(module: Any) -> None:
    """Such a store takes none: test_a_store_takes_nothing_while_vllms_cache_may_have_blocks_of_weights_before."""
    connector = beside(module, OFFLOADING, **SPEC)
    assert begins_with_cached_tokens(connector, "a")
    version(connector, "2")
    assert not begins_with_cached_tokens(connector, "b")
    assert reset(connector, of_connector=False)
    assert begins_with_cached_tokens(connector, "c")


def test_blocks_that_another_connector_keeps_are_not_handed_over_after_a_reset_of_vllms_cache_alone(
    module: Any,
) -> None:
    connector = beside(module, "OffloadingConnector")
    assert begins_with_cached_tokens(connector, "a")
    version(connector, "2")
    assert reset(connector, of_connector=False)
    # Its blocks are of the first weights, and vLLM's hash of them is the same.
    assert not begins_with_cached_tokens(connector, "b") and is_handed_over(connector, "c")
    assert reset(connector)
    version(connector, "2")
    assert begins_with_cached_tokens(connector, "d")


def test_blocks_since_a_reset_of_the_connector_may_be_of_the_weights_before(connector: Any) -> None:
    version(connector, "1")
    assert is_handed_over(connector, "a")
    # It only slept, and is not given its version again.
    assert reset(connector)
    assert not is_handed_over(connector, "b")
    # An update in flight, which resets nothing.
    version(connector, "2")
    assert not begins_with_cached_tokens(connector, "c")
    assert is_handed_over(connector, "d")
    assert reset(connector)
    version(connector, "3")
    # There is no step between the reset and the version.
    assert begins_with_cached_tokens(connector, "e")


def test_blocks_since_a_reset_of_the_connector_are_of_the_version_that_is_given_again(connector: Any) -> None:
    version(connector, "2")
    assert is_handed_over(connector, "a")
    assert reset(connector)
    assert not is_handed_over(connector, "b")
    version(connector, "2")
    assert begins_with_cached_tokens(connector, "c")
    version(connector, "3")
    assert not begins_with_cached_tokens(connector, "d")


def test_what_another_connector_loads_without_a_step_is_cached(connector: Any) -> None:
    connector.update_state_after_alloc(Request("a", None, list(TOKENS)), None, 0)
    version(connector, "2")
    assert not begins_with_cached_tokens(connector, "b")


def test_a_reset_that_leaves_blocks_in_the_cache_is_none(connector: Any) -> None:
    assert is_handed_over(connector, "a")
    assert not reset(connector, can_reset=False)
    version(connector, "2")
    assert not begins_with_cached_tokens(connector, "b")


def test_the_first_version_before_the_first_step_is_that_of_all_blocks(connector: Any) -> None:
    version(connector, "1")
    assert begins_with_cached_tokens(connector, "a")


def test_a_prompt_has_another_name_with_another_version_of_the_weights(connector: Any) -> None:
    scheduler, request = connector._scheduler, prefill("a", list(TOKENS))
    scheduler._follow_weights()
    names = {scheduler._identity(request)}
    for given in ("1", "2"):
        version(connector, given)
        scheduler._follow_weights()
        names.add(scheduler._identity(request))
    assert len(names) == 3


def test_the_weights_of_an_adapter_are_sampled_at_its_first_request_of_any_kind(connector: Any) -> None:
    streaming = prefill("b", list(TOKENS))
    streaming.resumable = True
    for number, request in enumerate((Request("a", None, list(TOKENS)), streaming)):
        request.lora_request = lora("/no/where", number)
        connector.on_new_request(request)
        assert connector._scheduler._adapters._known[number].look.ended.wait(60)


def lora(path: Any, number: int = 5, *, load_inplace: bool = False) -> Any:
    return SimpleNamespace(lora_name="l", lora_int_id=number, lora_path=str(path), load_inplace=load_inplace)


def adapter(at: Path, weights: bytes) -> Path:
    at.mkdir(exist_ok=True)
    (at / "adapter_model.safetensors").write_bytes(weights * 1000)
    return at


def with_adapter(name: str, of: Any) -> Request:
    request = prefill(name, list(TOKENS))
    request.lora_request = of
    return request


def test_an_adapter_is_named_by_what_the_engine_read_when_it_was_told_to_load_it(module: Any, tmp_path: Path) -> None:
    path = adapter(tmp_path / "A", b"one")
    early, late = (connector_of(module) for _ in range(2))
    # As vLLM does at start, and for POST /load_lora_adapter.
    assert early.core.add_lora(lora(path)) is True
    adapter(path, b"two")
    late.core.add_lora(lora(path))
    names = [it._scheduler._identity(with_adapter("r", lora(path))).adapter for it in (early, late)]
    assert names[0] != names[1]
    # Nobody says what the early one has, since its files have changed; the late one's name is that of the files.
    assert late._scheduler._identity(with_adapter("s", lora(path))).adapter == names[1]
    assert names[1] == named(lora(path))


def named(of: Any) -> tuple[str, str]:
    return of.lora_name, Adapters().weights(of)


def test_an_adapter_that_changes_while_the_engine_loads_it_has_no_name(module: Any, tmp_path: Path) -> None:
    path = adapter(tmp_path / "A", b"one")
    connector = connector_of(module)
    vllm_loads = connector.core.loaded.append
    connector.core.loaded = SimpleNamespace(append=lambda it: (vllm_loads(it), adapter(path, b"two")))
    connector.core.add_lora(lora(path))
    names = {connector._scheduler._identity(with_adapter("r", lora(path))).adapter for _ in range(2)}
    assert len(names) == 2
    # A load that fails leaves nothing behind.
    connector.core.loaded = None
    with pytest.raises(AttributeError):
        connector.core.add_lora(lora(path, 6))
    assert connector._scheduler._identity(with_adapter("s", lora(path, 6))).adapter == named(lora(path))


def test_a_load_keeps_its_signature_and_no_engine_alive(module: Any) -> None:
    connector = connector_of(module)
    core = connector.core
    assert list(inspect.signature(core.add_lora).parameters) == ["lora_request"]
    assert inspect.signature(core.set_weight_version).parameters["weight_version"].annotation == "str"
    found = weakref.ref(core)
    del connector.core, core
    assert found() is None
    assert connector._scheduler._core.version() is None


def is_offered(connector: Any, name: str, of: Any, *, cached: int = 0, meanwhile: Callable[[], Any] = int) -> bool:
    """Whether a prompt with an adapter is offered, of which `cached` tokens were cached before."""
    connector.get_kv_connector_stats()
    request = with_adapter(name, of)
    connector.on_new_request(request)
    meanwhile()
    first = step({name: ([1, 2], 32 - cached)})
    first.scheduled_new_reqs[0].num_computed_tokens = cached
    connector.build_connector_meta(first)
    connector.request_finished(request, [1, 2])
    stats = connector.get_kv_connector_stats()
    return stats is not None and stats.data["offered_requests"] == 1


@pytest.mark.parametrize("load_inplace", [False, True])
def test_what_was_computed_while_an_adapters_files_changed_is_not_offered(
    connector: Any, tmp_path: Path, *, load_inplace: bool
) -> None:
    path = adapter(tmp_path / "A", b"one")
    # vLLM reads the files for the first step, and in place for each.
    first, second = (lora(path, number, load_inplace=load_inplace) for number in (1, 2))
    assert is_offered(connector, "a", first)
    assert is_offered(connector, "b", first)
    assert not is_offered(connector, "c", second, meanwhile=lambda: adapter(path, b"two"))


def test_blocks_that_may_be_of_an_adapters_earlier_weights_are_not_offered(connector: Any, tmp_path: Path) -> None:
    path = adapter(tmp_path / "A", b"one")
    of = lora(path, load_inplace=True)

    def offers(name: str, cached: int) -> bool:
        return is_offered(connector, name, of, cached=cached)

    connector.core.add_lora(of)
    assert offers("a", 0) and offers("b", 16)
    adapter(path, b"two")
    connector.core.add_lora(of)
    # vLLM's cache has blocks of the first weights under the adapter's name and path.
    assert offers("c", 0) and not offers("d", 16)
    # Requests hold blocks, so that vLLM keeps them, and all others.
    assert not reset(connector, can_reset=False)
    version(connector, "default")
    assert offers("e", 0) and not offers("f", 16)
    assert reset(connector)
    version(connector, "default")
    assert offers("g", 16)
