"""The scheduler's side of `KVFerryConnector`, with stand-ins of vLLM's classes."""

from __future__ import annotations

import importlib
import logging
import re
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import kvferry.vllm
import pytest
import test_connector as handoff
import vllm_stand_in as vllm
from kvferry.connector import prompt_id
from kvferry.vllm._settings import Settings
from vllm_stand_in import FullAttentionSpec, MambaSpec, Request

PREFILL = {"do_remote_decode": True, "transfer_id": "x"}
DECODE = {"do_remote_prefill": True, "transfer_id": "x", "remote_host": "127.0.0.1", "remote_port": 1}


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    vllm.install(monkeypatch)
    return importlib.import_module("kvferry.vllm._connector")


def scheduler(module: Any, *specs: Any, **settings: Any) -> Any:
    specs = specs or (FullAttentionSpec(),)
    return module._Scheduler(vllm.config(), vllm.caches(*specs), Settings.of(settings))


def connector(module: Any, side: Any) -> Any:
    made = module.KVFerryConnector.__new__(module.KVFerryConnector)
    made._scheduler = made._side = side
    return made


def refused(side: Any) -> dict[str, int]:
    stats = side.stats()
    return dict(stats.data["refused_requests"]) if stats is not None else {}


def blocks(numbers: list[int]) -> Any:
    return SimpleNamespace(get_block_ids=lambda: (numbers,))


def test_a_vllm_without_a_module_is_refused_with_the_modules_name_and_the_tried_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vllm.install(monkeypatch)
    missing = "vllm.v1.metrics.cache_hit_source"
    monkeypatch.delitem(sys.modules, missing)
    tried = re.escape(", ".join(kvferry.vllm.TRIED))
    with pytest.raises(RuntimeError, match=rf"KVFerryConnector needs vLLM {tried}; this one is .*{re.escape(missing)}"):
        _ = kvferry.vllm.KVFerryConnector


@pytest.mark.parametrize("params", [PREFILL, DECODE])
@pytest.mark.parametrize("token", [-1, 1 << 32])
def test_a_request_whose_token_ids_are_none_goes_on_without_parameters_and_is_counted(
    module: Any, params: dict[str, Any], token: int
) -> None:
    """With --skip-tokenizer-init vLLM checks no token id."""
    side = scheduler(module)
    made = connector(module, side)
    request = Request("a", dict(params), [1, token, 3])
    made.on_new_request(request)
    assert made.get_num_new_matched_tokens(request, 0) == (0, False)
    made.update_state_after_alloc(request, blocks([1]), 0)
    assert made.request_finished(request, [1]) == (False, None)
    assert refused(side) == {"internal": 1}
    assert not any(side.half.gauges().values())


def test_a_load_whose_blocks_can_not_be_taken_is_fetched_without_blocks_which_fails(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM waits for the load: an exception would end the engine, and silence would keep the request for ever."""
    side = scheduler(module)
    made = connector(module, side)
    request = Request("a", dict(DECODE), list(range(32)))
    made.on_new_request(request)
    assert made.get_num_new_matched_tokens(request, 0) == (32, True)

    def fails(*_: Any) -> Any:
        raise RuntimeError("as a table of an unknown kind")

    with monkeypatch.context() as patched:
        patched.setattr(side, "_selected", fails)
        made.update_state_after_alloc(request, blocks([1, 2]), 32)
    assert not side.half.waits_for_blocks("a")
    assert side.half.step([], [])
    # A request of which nothing is loaded needs nothing.
    with monkeypatch.context() as patched:
        patched.setattr(side, "allocated", fails)
        made.update_state_after_alloc(Request("b", None, [1]), blocks([1]), 0)


def test_a_reset_that_fails_is_none_for_vllm_and_hands_nothing_from_before_over(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = scheduler(module)
    made = connector(module, side)
    request = Request("a", dict(DECODE), list(range(32)))
    made.on_new_request(request)

    def fails() -> None:
        raise RuntimeError("as a bug")

    with monkeypatch.context() as patched:
        patched.setattr(side, "_follow_weights", fails)
        assert made.reset_cache() is False
    assert made.get_num_new_matched_tokens(request, 0) == (0, False)
    later = Request("b", dict(PREFILL), list(range(32)))
    made.on_new_request(later)
    assert refused(side) == {"changed_weights": 1}


@pytest.mark.parametrize("params", [PREFILL, DECODE])
def test_a_request_of_a_session_whose_prompt_may_grow_gets_no_handoff(module: Any, params: dict[str, Any]) -> None:
    side = scheduler(module)
    request = Request("a", dict(params), [1, 2, 3], resumable=True)
    side.arrived(request)
    assert side.matched(request, 0) == (0, False)
    assert side.finished(request, ([1],)) == (False, None)
    assert refused(side) == {"resumable": 1}
    assert not any(side.half.gauges().values())


def test_a_prompt_whose_logprobs_are_asked_for_is_not_cut(module: Any) -> None:
    side = scheduler(module, FullAttentionSpec(), MambaSpec())
    request = Request("a", dict(PREFILL), [1, 2, 3], max_tokens=4, skip_reading_prefix_cache=True)
    side.arrived(request)
    assert (request.prompt_token_ids, request.num_prompt_tokens, request.max_tokens) == ([1, 2, 3], 3, 4)
    assert side.finished(request, ([1], [2])) == (False, None)
    assert refused(side) == {"prompt_logprobs": 1}
    other = Request("b", dict(PREFILL), [1, 2, 3])
    side.arrived(other)
    assert other.prompt_token_ids == [1, 2]


def test_a_request_that_names_a_producer_outside_the_list_is_refused_before_it_gets_blocks(module: Any) -> None:
    side = scheduler(module)
    side.half.set_producers(["10.0.0.0/8"])
    request = Request("a", dict(DECODE), [1, 2, 3])
    side.arrived(request)
    assert side.matched(request, 0) == (0, False)
    assert refused(side) == {"forbidden_producer": 1}
    allowed = Request("b", {**DECODE, "remote_host": "10.1.2.3"}, [1, 2, 3])
    side.arrived(allowed)
    assert side.matched(allowed, 0) == (3, True)
    assert refused(side) == {}


@pytest.mark.parametrize(
    ("address", "host"), [("10.1.2.3:5600", "10.1.2.3"), ("[fe80::1]:5600", "fe80::1"), ("127.0.0.1:1", "127.0.0.1")]
)
def test_the_bootstrap_server_listens_where_peers_reach_the_agent_whatever_named_the_address(
    module: Any, monkeypatch: pytest.MonkeyPatch, address: str, host: str
) -> None:
    served: list[Any] = []

    class Server:
        def __init__(self, *args: Any) -> None:
            served.append(args)

        def register(self, *args: Any) -> None:
            served.append(args)

    monkeypatch.setattr(module, "BootstrapServer", Server)
    monkeypatch.setenv("KVFERRY_LISTEN", address)
    monkeypatch.setenv("VLLM_MOONCAKE_BOOTSTRAP_PORT", "7")
    side = scheduler(module)
    side._serve_bootstrap({(0, 0): SimpleNamespace(address=address)})
    assert served[0][:2] == (host, 7)
    assert served[1] == (0, side.half.engine_id, {0: {0: address}})


def test_registering_caches_again_is_refused_and_says_what_to_do(module: Any) -> None:
    worker = module._Worker(vllm.config(), vllm.caches(FullAttentionSpec()), Settings.of({}))
    worker._agent = object()
    with pytest.raises(module.UnsupportedCacheError, match=r"registered before.*start the engine anew"):
        worker.register({})


def test_an_agent_whose_caches_do_not_fit_is_shut_down(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = module._Worker(vllm.config(), vllm.caches(FullAttentionSpec()), Settings.of({}))
    agents = []

    class Agent:
        def __init__(self, *_: Any, **__: Any) -> None:
            agents.append(self)
            self.is_up = True

        def register_batch(self, *_: Any) -> list[Any]:
            raise ValueError("no memory")

        def shutdown(self) -> None:
            self.is_up = False

    monkeypatch.setattr(module, "Agent", Agent)
    monkeypatch.setattr(module, "_place", lambda config: (module.Place(), 0))
    with pytest.raises(ValueError, match="no memory"):
        worker.register({})
    assert [agent.is_up for agent in agents] == [False]
    assert worker.handshake() is None


def test_the_death_of_a_prefill_is_one_warning_for_all_loads_from_it(
    module: Any, caplog: pytest.LogCaptureFixture
) -> None:
    worker = module._Worker(vllm.config(), vllm.caches(FullAttentionSpec()), Settings.of({}))
    loads = [(f"r{at}", 0.0, 0, ("closed", "the peer has ended")) for at in range(500)]
    worker._half = SimpleNamespace(take_loads=lambda: loads)
    stats = worker.stats()
    assert stats.data["failed_loads"] == {"closed": 500}
    assert len([it for it in caplog.records if it.levelname == "WARNING"]) == 1


@pytest.fixture
def engines() -> Iterator[tuple[handoff.Engine, handoff.Engine]]:
    both = handoff.Engine(), handoff.Engine()
    yield both
    for engine in both:
        engine.worker.close()
        engine.agent.shutdown()


class ForwardError(Exception):
    pass


def layers(made: Any, fails_after: int | None) -> None:
    """`fails_after`: layers that are computed before the forward pass raises."""
    for layer in range(handoff.LAYERS):
        if layer == fails_after:
            raise ForwardError
        made.save_kv_layer(f"layers.{layer}", None, None)
    if fails_after == handoff.LAYERS:
        raise ForwardError


def forward(made: Any, metadata: Any, fails_after: int | None) -> None:
    """A step as vLLM's first model runner has it."""
    made.bind_connector_metadata(metadata)
    try:
        made.start_load_kv(None)
        layers(made, fails_after)
    finally:
        made.wait_for_save()
        made.clear_connector_metadata()


def forward_of_second(made: Any, metadata: Any, fails_after: int | None) -> None:
    """A step as vLLM's second model runner has it, which tells a connector nothing of a pass that has raised."""
    made.handle_preemptions(metadata)
    made.bind_connector_metadata(metadata)
    layers(made, fails_after)
    made.start_load_kv(None)
    made.wait_for_save()
    made.clear_connector_metadata()


def connector_of(module: Any, engine: handoff.Engine) -> Any:
    """A worker's connector on the half of an engine."""
    worker = module._Worker(vllm.config(), vllm.caches(FullAttentionSpec()), Settings.of({}))
    worker._half = engine.worker
    worker._layers = {f"layers.{layer}": layer for layer in range(handoff.LAYERS)}
    made = module.KVFerryConnector.__new__(module.KVFerryConnector)
    made._worker = made._side = worker
    return made


@pytest.mark.parametrize("extra", [[], ["lora:tuned", "lora:weights"]], ids=["model", "adapter"])
@pytest.mark.parametrize("fails_after", [0, 1, handoff.LAYERS, None])
@pytest.mark.parametrize("handles_another", [False, True])
def test_of_a_forward_pass_that_raised_nothing_is_loaded(
    module: Any,
    engines: tuple[handoff.Engine, handoff.Engine],
    handles_another: bool,
    fails_after: int | None,
    extra: list[str],
) -> None:
    """The first model runner waits for saves also then. What its caller handles is no failure of the step."""
    prefill, decode = engines
    made = connector_of(module, prefill)

    params = {"do_remote_decode": True}
    tokens, identity, blocks = len(handoff.PROMPT), prompt_id(handoff.PROMPT, extra), [[3, 1, 2]]
    prefill.scheduler.arrived("p", tokens, 1, params, identity)
    metadata = module.KVFerryMetadata(prefill.scheduler.step([("p", 0, tokens, True, blocks)], []), computes=True)
    try:
        if handles_another:
            try:
                raise KeyError("as of a retry around the step")
            except KeyError:
                forward(made, metadata, fails_after)
        else:
            forward(made, metadata, fails_after)
    except ForwardError:
        assert fails_after is not None

    _, answer = prefill.scheduler.finished("p", "length", blocks) or (False, None)
    prefill.worker.apply(prefill.scheduler.step([], []))
    decode.scheduler.arrived("d", tokens, 8, answer, identity)
    assert decode.scheduler.matched("d", 0) == tokens
    decode.scheduler.allocated("d", tokens, [[7, 9, 8]])
    decode.until(lambda: bool(decode.received))
    assert decode.failed == ([] if fails_after is None else ["d"])
    if fails_after is not None:
        ((_, _, _, failure),) = decode.worker.take_loads()
        assert failure is not None and "ForwardError" in failure[1]


@pytest.mark.parametrize("fails_after", [0, 1, handoff.LAYERS, None])
def test_of_a_forward_pass_of_the_second_runner_that_raised_nothing_is_loaded(
    module: Any, fails_after: int | None
) -> None:
    """Decode has asked before, and waits until prefill's engine has ended."""
    prefill, decode = handoff.Engine(eager=False), handoff.Engine()
    tokens, identity, blocks = len(handoff.PROMPT), prompt_id(handoff.PROMPT), [[3, 1, 2]]
    try:
        made = connector_of(module, prefill)
        prefill.scheduler.arrived("p", tokens, 1, dict(PREFILL), identity)
        metadata = module.KVFerryMetadata(prefill.scheduler.step([("p", 0, tokens, True, blocks)], []), computes=True)
        place = {"remote_address": prefill.agent.address, "remote_engine_id": prefill.scheduler.engine_id}
        params = {"do_remote_prefill": True, "transfer_id": "x", **place}
        decode.scheduler.arrived("d", tokens, 8, params, identity)
        assert decode.scheduler.matched("d", 0) == tokens
        decode.scheduler.allocated("d", tokens, [[7, 9, 8]])
        decode.step()
        if fails_after is None:
            forward_of_second(made, metadata, None)
            assert prefill.scheduler.finished("p", "length", blocks)
            prefill.worker.apply(prefill.scheduler.step([], []))
        else:
            with pytest.raises(ForwardError):
                forward_of_second(made, metadata, fails_after)
            for _ in range(200):
                decode.step()
                time.sleep(0.001)
            assert (decode.received, decode.failed) == ([], [])
            prefill.worker.close()
            prefill.agent.shutdown()
        decode.until(lambda: bool(decode.received))
        assert decode.failed == ([] if fails_after is None else ["d"])
    finally:
        for engine in (prefill, decode):
            engine.worker.close()
            engine.agent.shutdown()


def forward_of_a_stage(made: Any, metadata: Any) -> None:
    """A step with speculation as vLLM's first model runner has it on a pipeline stage that is not the last one: without
    a wait for saves.
    """
    made.bind_connector_metadata(metadata)
    made.start_load_kv(None)
    layers(made, None)
    made.clear_connector_metadata()


@pytest.mark.parametrize("chunks", [[(0, 10, [3, 1, 2])], [(0, 4, [3]), (4, 6, [1, 2])]], ids=["one", "two"])
def test_a_stage_that_hears_of_no_steps_end_hands_over_a_request_that_decode_waits_for_at_the_requests_end(
    module: Any, engines: tuple[handoff.Engine, handoff.Engine], chunks: list[tuple[int, int, list[int]]]
) -> None:
    prefill, decode = engines
    made = connector_of(module, prefill)
    tokens, identity, table = len(handoff.PROMPT), prompt_id(handoff.PROMPT), [3, 1, 2]
    for layer in range(handoff.LAYERS):
        for at, block in enumerate(table):
            prefill.block(layer, block)[:] = bytes([layer * 16 + at + 1]) * handoff.BLOCK
    prefill.scheduler.arrived("p", tokens, 1, dict(PREFILL), identity)
    place = {"remote_address": prefill.agent.address, "remote_engine_id": prefill.scheduler.engine_id}
    params = {"do_remote_prefill": True, "transfer_id": "x", **place}
    decode.scheduler.arrived("d", tokens, 8, params, identity)
    assert decode.scheduler.matched("d", 0) == tokens
    decode.scheduler.allocated("d", tokens, [[7, 9, 8]])
    for first, count, new in chunks:
        step = prefill.scheduler.step([("p", first, count, first == 0, [new])], [])
        forward_of_a_stage(made, module.KVFerryMetadata(step, computes=True))
        for _ in range(100):
            decode.step()
            time.sleep(0.001)
        assert (decode.received, decode.failed) == ([], [])
    assert prefill.scheduler.finished("p", "length", [table])
    forward_of_a_stage(made, module.KVFerryMetadata(prefill.scheduler.step([], []), computes=False))
    decode.until(lambda: bool(decode.received))
    assert (decode.received, decode.failed) == (["d"], [])
    for layer in range(handoff.LAYERS):
        for at, block in enumerate([7, 9, 8]):
            used = min(handoff.TOKENS, tokens - at * handoff.TOKENS) * handoff.CONTENT
            assert bytes(decode.block(layer, block)[:used]) == bytes([layer * 16 + at + 1]) * used
    prefill.until(lambda: bool(prefill.sent))
    assert prefill.sent == ["p"]


def failures(worker: Any) -> dict[str, str]:
    """Why loads have failed, by request."""
    ended = worker.take_loads()
    return {request: failure[1] for request, _, _, failure in ended if failure is not None}


def test_a_step_that_a_worker_can_not_read_costs_the_request_that_it_computes_and_the_engine_goes_on(
    module: Any,
    engines: tuple[handoff.Engine, handoff.Engine],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prefill, decode = engines
    monkeypatch.setattr("kvferry._engine.log._EVERY_S", 1e6)
    # The first step says who the ranks are.
    prefill.step()
    made = connector_of(module, prefill)
    tokens, identity, table = len(handoff.PROMPT), prompt_id(handoff.PROMPT), [[3, 1, 2]]
    prefill.scheduler.arrived("p", tokens, 1, {"do_remote_decode": True}, identity)
    step = prefill.scheduler.step([("p", 0, tokens, True, table)], [])
    forward(made, module.KVFerryMetadata(step[:-1], computes=True), None)
    # Another one soon after is not logged.
    forward(made, module.KVFerryMetadata(b"of another release", computes=False), None)
    logged = [it.getMessage() for it in caplog.records if it.levelno >= logging.WARNING]
    (said,) = [it for it in logged if it.startswith("KVFerryConnector: ")]
    assert "a step was not carried out as a whole; if it can't be read and was the first one, nothing is" in said
    assert "until the engine is restarted: malformed connector metadata: " in said
    held, answer = prefill.scheduler.finished("p", "length", table) or (False, None)
    assert held and answer is not None
    prefill.until(lambda: bool(prefill.sent))
    assert prefill.sent == ["p"], "its blocks are given back"
    handoff.consume(decode, "d", answer, [7, 9, 8])
    decode.until(lambda: bool(decode.received))
    assert decode.failed == ["d"] and list(failures(decode.worker)) == ["d"]
    later = handoff.produce(prefill, "q", {"do_remote_decode": True}, [3, 1, 2])
    handoff.consume(decode, "e", later, [4, 5, 6])
    decode.until(lambda: "e" in decode.received)
    assert decode.failed == ["d"]


def test_vllm_hears_once_of_each_load_and_held_request_of_a_step_that_a_worker_can_not_read(
    module: Any, engines: tuple[handoff.Engine, handoff.Engine]
) -> None:
    prefill, decode = engines
    output = SimpleNamespace(num_scheduled_tokens={}, preempted_req_ids=None)
    steps = []
    for engine in engines:
        side = scheduler(module)
        side.half = engine.scheduler
        steps.append(connector(module, side).build_connector_meta)
        # The first step says who the ranks are.
        engine.worker.apply(steps[-1](output).data)
    answer = handoff.produce(prefill, "p", {"do_remote_decode": True}, [3, 1, 2])
    handoff.consume(decode, "d", answer, [7, 9, 8])
    for engine, step, sent, received in zip(engines, steps, (["p"], []), ([], ["d"]), strict=True):
        metadata = step(output)
        assert (metadata.loads, [it for it, _, held in metadata.endings if held]) == (tuple(received), sent)
        metadata.data = metadata.data[:-1]
        made = connector_of(module, engine)
        forward_of_second(made, metadata, None)
        reports = [made.get_transfer_results(set()) for _ in range(20)]
        assert [it for report in reports for it in report.finished_sending] == sent
        assert [it for report in reports for it in report.finished_recving] == received
        assert [it for report in reports for it in report.failed_recving] == received


def test_what_a_worker_has_offered_is_not_loaded_once_it_could_not_read_a_step(
    module: Any, engines: tuple[handoff.Engine, handoff.Engine]
) -> None:
    """The step may have said that the request loses its blocks, which others overwrite then."""
    prefill, decode = engines
    made = connector_of(module, prefill)
    answer = handoff.produce(prefill, "p", {"do_remote_decode": True}, [3, 1, 2])
    # The worker hears that the request has ended and keeps its blocks.
    prefill.step()
    assert prefill.sent == []
    forward(made, module.KVFerryMetadata(b"of another release", computes=False), None)
    handoff.consume(decode, "d", answer, [7, 9, 8])
    decode.until(lambda: bool(decode.received))
    assert decode.failed == ["d"]
    assert "could not read a step" in failures(decode.worker)["d"]
    prefill.until(lambda: bool(prefill.sent))
    assert prefill.sent == ["p"]


def test_block_lists_of_a_consumer_are_read_once_and_only_while_it_waits_for_blocks(module: Any) -> None:
    side = scheduler(module)
    request = Request("a", dict(DECODE), [1, 2, 3])
    side.arrived(request)
    asked = []

    def get_block_ids() -> tuple[list[int]]:
        asked.append(1)
        return ([1],)

    assert side.matched(request, 0) == (3, True)
    for external in (3, 0):
        # vLLM calls it again when the load has ended.
        side.allocated(request, SimpleNamespace(get_block_ids=get_block_ids), external)
    assert len(asked) == 1


def test_gauges_are_sent_when_they_change_and_counters_have_a_series_before_they_count(module: Any) -> None:
    side = scheduler(module)
    metrics = module.KVFerryPromMetrics(None, None, ["model"], {0: ["m"]})
    made = vllm.Metric.made
    for name in ("failed_loads", "refused_requests", "withdrawn_offers"):
        series = made[f"vllm:kvferry_{name}"].series
        assert len(series) > 5 and not any(series.values())
    assert ("m", "peer is silent") in made["vllm:kvferry_failed_loads"].series
    assert ("m", "expired") in made["vllm:kvferry_withdrawn_offers"].series

    def observe() -> dict[str, float]:
        stats = side.stats()
        if stats is not None:
            # As vLLM adds those of the workers, whose gauges are unknown.
            metrics.observe(module.KVFerryStats().aggregate(stats).aggregate(module.KVFerryStats()).data)
        names = ("held_blocks", "waiting_loads")
        return {name: made[f"vllm:kvferry_{name}"].series[("m",)] for name in names}

    assert observe() == {"held_blocks": 0, "waiting_loads": 0}
    request = Request("a", dict(DECODE), [1, 2, 3])
    side.arrived(request)
    side.matched(request, 0)
    side.allocated(request, blocks([1]), 3)
    assert observe() == {"held_blocks": 0, "waiting_loads": 1}
    assert side.stats() is None, "nothing has changed"
    side.half.received(["a"])
    assert observe() == {"held_blocks": 0, "waiting_loads": 0}
    # What may be a reason is one, of those that are counted.
    reasons = set(made["vllm:kvferry_refused_requests"].series)
    assert {("m", "internal"), ("m", "busy"), ("m", "resumable"), ("m", "prompt_logprobs")} <= reasons


def test_the_share_of_the_cache_that_may_be_idle_is_a_setting(module: Any) -> None:
    side = scheduler(module, idle_share=0.02)
    for at in range(3):
        request = Request(f"r{at}", {**DECODE, "transfer_id": f"x{at}"}, [1, 2, 3])
        side.arrived(request)
        tokens = side.matched(request, 0)
        if at == 0:
            assert tokens == (3, True)
            side.allocated(request, blocks([1]), 3)
        else:
            # Half of the two blocks is for producers that have never answered.
            assert tokens == (None, False)
