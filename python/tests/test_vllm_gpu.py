"""`KVFerryConnector` with caches in memory of GPUs, on the fake driver, called as vLLM's two model runners call it, with
synchronous and with asynchronous scheduling: prefill computes on its stream, decode loads, and the race checker finds
accesses that no edge orders.
"""

from __future__ import annotations

import importlib
import re
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import vllm_stand_in as vllm
from fake_gpu import COMPUTE, DEVICE_TO_HOST, LIBRARY, Array, Driver, Stream
from kit import NEVER, PATIENCE
from kvferry._engine.identity.vllm import LayerFacts
from vllm_stand_in import Request

BLOCKS, HEADS, TOKENS, CONTENT, LAYERS = 12, 2, 4, 16, 3
BLOCK = HEADS * TOKENS * CONTENT * 4
LAYER = BLOCKS * BLOCK
NAMES = [f"model.layers.{at}.attn" for at in range(LAYERS)]
PROMPT = list(range(10))


class Order(NamedTuple):
    """The order of an engine's calls."""

    # The second model runner launches the kernels that zero and copy blocks before it tells its connector of the step.
    is_second: bool
    # A step is launched before the scheduler has the results of the step before it.
    is_asynchronous: bool


ORDERS = {
    "first": Order(False, False),
    "first, asynchronous": Order(False, True),
    "second": Order(True, False),
    "second, asynchronous": Order(True, True),
}


class FullAttentionSpec:
    block_size, dtype = TOKENS, "torch.float32"


class Tensor:
    """A layer of the cache, as torch shows it."""

    shape = (BLOCKS, HEADS, TOKENS, CONTENT)
    _strides = (HEADS * TOKENS * CONTENT, TOKENS * CONTENT, CONTENT, 1)

    def __init__(self, array: Array, layer: int) -> None:
        self._array, self._layer = array, layer
        self.device = SimpleNamespace(type="cuda", index=array.device)

    def dim(self) -> int:
        return len(self.shape)

    def stride(self, axis: int) -> int:
        return self._strides[axis]

    def element_size(self) -> int:
        return 4

    def data_ptr(self) -> int:
        return self._array.address + self._layer * LAYER

    def untyped_storage(self) -> Any:
        return SimpleNamespace(data_ptr=lambda: self._array.address, nbytes=lambda: self._array.nbytes)


class Engine:
    """An engine of one GPU: what its scheduler and its runner call."""

    def __init__(self, module: Any, driver: Driver, gpu: int, order: Order) -> None:
        self.order = order
        # Itself, and the others that take a step when it waits.
        self.all = [self]
        self._results: deque[Any] = deque()
        self.stream = Stream(driver, gpu)
        self.array = Array(driver, LAYERS * LAYER, gpu)
        self.array.content = bytes(self.array.nbytes)
        group = SimpleNamespace(kv_cache_spec=FullAttentionSpec(), layer_names=NAMES)
        caches = SimpleNamespace(
            kv_cache_groups=[group],
            transfer_groups=[group],
            transfer_group_ids=(0,),
            transfer_group_index_by_layer=dict.fromkeys(NAMES, 0),
            num_blocks=BLOCKS,
        )
        config = vllm.config(is_kv_producer=False, prefill_context_parallel_size=1)
        config.kv_transfer_config.kv_connector_extra_config = {"timeout": 20}
        config.use_v2_model_runner = order.is_second
        role = module.KVConnectorRole
        self.worker, self.scheduler = (
            module.KVFerryConnector(config, it, caches) for it in (role.WORKER, role.SCHEDULER)
        )
        self.worker.register_kv_caches({name: Tensor(self.array, at) for at, name in enumerate(NAMES)})
        self.scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): self.worker.get_handshake_metadata()})
        self.sent: set[str] = set()
        self.received: set[str] = set()
        self.failed: set[str] = set()

    def ranges(self, layer: int, blocks: list[int]) -> list[tuple[int, int]]:
        return [(self.array.address + layer * LAYER + block * BLOCK, BLOCK) for block in blocks]

    def step(
        self,
        *new: tuple[str, int, list[int]],
        launch: Callable[[int], None] | None = None,
        preempted: str | None = None,
        is_resumed: bool = False,
        overwrite: Callable[[], None] | None = None,
    ) -> None:
        """A step. `new`: requests with their tokens and blocks, or `is_resumed`, those of a preempted request;
        `launch`: launches a layer; `overwrite`: launches what zeroes and copies blocks before the layers.
        """
        # In the second runner a preempted request comes back as a new one.
        resumed = new if is_resumed and not self.order.is_second else ()
        scheduled = [
            SimpleNamespace(req_id=request, block_ids=(blocks,), num_computed_tokens=0)
            for request, _, blocks in new
            if not resumed
        ]
        output = SimpleNamespace(
            num_scheduled_tokens={request: tokens for request, tokens, _ in new},
            scheduled_new_reqs=scheduled,
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[request for request, _, _ in resumed],
                new_block_ids=[(blocks,) for _, _, blocks in resumed],
                resumed_req_ids={request for request, _, _ in resumed},
                num_computed_tokens=[0] * len(resumed),
            ),
            preempted_req_ids={preempted} if preempted else set(),
        )
        worker, metadata = self.worker, self.scheduler.build_connector_meta(output)
        if not self.order.is_second:
            worker.handle_preemptions(metadata)
        if overwrite is not None:
            overwrite()
        if self.order.is_second:
            worker.handle_preemptions(metadata)
        worker.bind_connector_metadata(metadata)
        if launch is not None:
            for at, name in enumerate(NAMES):
                worker.wait_for_layer_load(name)
                launch(at)
                worker.save_kv_layer(name, None, None)
        worker.start_load_kv(None)
        worker.wait_for_save()
        results = worker.get_transfer_results(set())
        results.kv_connector_worker_meta = worker.build_connector_worker_meta()
        worker.clear_connector_metadata()
        self._results.append(results)
        while len(self._results) > self.order.is_asynchronous:
            self._update(self._results.popleft())

    def results(self) -> None:
        """The scheduler gets the results of the last step, and with asynchronous scheduling one more is launched before."""
        if self._results:
            self.step()

    def _update(self, results: Any) -> None:
        self.scheduler.update_connector_output(results)
        self.sent |= results.finished_sending
        self.received |= results.finished_recving
        self.failed |= results.failed_recving

    def until(self, has_ended: Callable[[], bool], seconds: float = PATIENCE) -> bool:
        """Runs steps of all engines without requests until the condition holds. False if it does not within `seconds`."""
        deadline = time.monotonic() + seconds
        while not has_ended():
            if time.monotonic() > deadline:
                return False
            for engine in self.all:
                engine.step()
            time.sleep(0.001)
        return True

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()


@pytest.fixture(scope="module")
def driver() -> Driver:
    assert LIBRARY.exists(), f"{LIBRARY} is missing: make test-wheel"
    return Driver()


@pytest.fixture(params=ORDERS.values(), ids=ORDERS)
def order(request: pytest.FixtureRequest) -> Order:
    found: Order = request.param
    return found


@pytest.fixture
def engines(driver: Driver, monkeypatch: pytest.MonkeyPatch, order: Order) -> Iterator[tuple[Engine, Engine]]:
    vllm.install(monkeypatch)
    monkeypatch.setenv("KVFERRY_SILENCE_MS", str(int(NEVER * 1000)))
    module = importlib.import_module("kvferry.vllm._connector")
    monkeypatch.setattr(module, "check_connector", lambda: None)
    monkeypatch.setattr(module, "of_vllm", lambda *_: SimpleNamespace(properties=lambda: {"model": "m"}))
    monkeypatch.setattr(module, "_place", lambda _: (module.Place(), 0))
    torch: Any = ModuleType("torch")
    torch.cuda = SimpleNamespace(current_stream=lambda gpu: made[gpu].stream)
    monkeypatch.setitem(sys.modules, "torch", torch)
    made: list[Engine] = []
    for gpu in range(2):
        made.append(Engine(module, driver, gpu, order))
    for engine in made:
        engine.all = made
    driver.clear_findings()
    yield made[0], made[1]
    driver.hold(0)
    for engine in made:
        engine.close()
    for engine in made:
        engine.array.free()
    driver.clear_findings()


def compute(engine: Engine, request: str, byte: int, blocks: list[int], transfer: str = "x") -> dict[str, Any] | None:
    """Prefills a request on the engine's stream, whose one token ends it. None if its KV is not offered."""
    made = Request(request, {"do_remote_decode": True, "transfer_id": transfer}, list(PROMPT))
    engine.scheduler.on_new_request(made)
    assert engine.scheduler.get_num_new_matched_tokens(made, 0) == (0, False)

    def launch(layer: int) -> None:
        engine.stream.run("prefill", writes=engine.ranges(layer, blocks), byte=byte + layer)

    engine.step((request, len(PROMPT), blocks), launch=launch)
    engine.results()
    held, params = engine.scheduler.request_finished(made, blocks)
    answer: dict[str, Any] | None = params if held else None
    return answer


def before_it_is_computed(prefill: Engine) -> dict[str, Any]:
    """The parameters of a request that decode gets while prefill computes it."""
    host, _, port = prefill.worker.get_handshake_metadata().address.rpartition(":")
    return {"do_remote_prefill": True, "transfer_id": "x", "remote_host": host, "remote_port": int(port)}


def load(engine: Engine, request: str, params: Any, blocks: list[int], preempted: str | None = None) -> Request:
    """Gives a request blocks and begins its load. `preempted`: whose blocks they were before."""
    made = Request(request, params, list(PROMPT), max_tokens=4)
    engine.scheduler.on_new_request(made)
    assert engine.scheduler.get_num_new_matched_tokens(made, 0) == (len(PROMPT), True)
    given = SimpleNamespace(get_block_ids=lambda: (blocks,))
    engine.scheduler.update_state_after_alloc(made, given, len(PROMPT))
    engine.step(preempted=preempted)
    return made


def finish(engine: Engine, made: Request, blocks: list[int]) -> None:
    assert engine.scheduler.request_finished(made, blocks)[0] is False


def decode(engine: Engine, blocks: list[int], byte: int, *, delay: float = 0.001) -> None:
    """A step of decode that reads the blocks."""
    for layer in range(LAYERS):
        engine.stream.run("decode", reads=engine.ranges(layer, blocks), expect=byte + layer, delay=delay)


def bytes_of(engine: Engine, blocks: list[int]) -> list[set[int]]:
    """For each layer, the bytes in the blocks' tokens of the prompt."""
    content, tokens = engine.array.content, len(PROMPT)
    found: list[set[int]] = [set() for _ in range(LAYERS)]
    for layer in range(LAYERS):
        for at, block in enumerate(blocks):
            held = min(TOKENS, tokens - at * TOKENS)
            for head in range(HEADS):
                start = layer * LAYER + block * BLOCK + head * TOKENS * CONTENT * 4
                found[layer] |= set(content[start : start + held * CONTENT * 4])
    return found


def test_a_prompt_is_not_read_before_the_prefill_stream_has_computed_it(
    driver: Driver, engines: tuple[Engine, Engine]
) -> None:
    prefill, decoder = engines
    driver.hold(COMPUTE)
    params = compute(prefill, "p", 7, [1, 2, 5])
    made = load(decoder, "d", params, [9, 3, 4])
    assert not decoder.until(lambda: "d" in decoder.received, 0.1), "nothing is computed"
    driver.hold(0)
    assert decoder.until(lambda: "d" in decoder.received)
    assert not decoder.failed
    decode(decoder, [9, 3], 7)
    assert bytes_of(decoder, [9, 3, 4]) == [{7}, {8}, {9}]
    finish(decoder, made, [9, 3, 4])
    assert prefill.until(lambda: "p" in prefill.sent)
    assert driver.findings() == ""


def test_what_is_asked_for_early_is_announced_layer_by_layer_behind_the_stream(
    driver: Driver, engines: tuple[Engine, Engine]
) -> None:
    prefill, decoder = engines
    made = load(decoder, "d", before_it_is_computed(prefill), [2, 3, 4])
    compute(prefill, "p", 20, [1, 2, 5])
    assert decoder.until(lambda: "d" in decoder.received)
    decode(decoder, [2, 3], 20)
    assert bytes_of(decoder, [2, 3, 4]) == [{20}, {21}, {22}]
    finish(decoder, made, [2, 3, 4])
    assert driver.findings() == ""


def test_a_load_is_written_after_the_last_step_that_read_its_blocks(
    driver: Driver, engines: tuple[Engine, Engine]
) -> None:
    prefill, decoder = engines
    first = load(decoder, "d1", compute(prefill, "p1", 40, [1, 2, 5], "x1"), [1, 2, 3])
    assert decoder.until(lambda: "d1" in decoder.received)
    second = compute(prefill, "p2", 60, [4, 6, 7], "x2")
    # The last step is launched and has not run when the blocks are given to the next request.
    driver.hold(COMPUTE)
    decode(decoder, [1, 2], 40)
    finish(decoder, first, [1, 2, 3])
    made = load(decoder, "d2", second, [1, 2, 3])
    assert not decoder.until(lambda: "d2" in decoder.received, 0.1), "the blocks are read"
    driver.hold(0)
    assert decoder.until(lambda: "d2" in decoder.received)
    decode(decoder, [1, 2], 60)
    assert bytes_of(decoder, [1, 2, 3]) == [{60}, {61}, {62}]
    finish(decoder, made, [1, 2, 3])
    assert prefill.until(lambda: {"p1", "p2"} <= prefill.sent)
    assert driver.findings() == ""


def test_blocks_of_a_prompt_are_computed_anew_only_after_they_were_read(
    driver: Driver, engines: tuple[Engine, Engine]
) -> None:
    prefill, decoder = engines
    for at in range(8):
        blocks = [1, 2, 3]
        made = load(decoder, f"d{at}", compute(prefill, f"p{at}", 10 * at + 1, blocks, f"x{at}"), [1, 2, 3])
        assert decoder.until(lambda at=at: f"d{at}" in decoder.received)  # type: ignore[misc]
        decode(decoder, [1, 2], 10 * at + 1)
        finish(decoder, made, [1, 2, 3])
        assert prefill.until(lambda at=at: f"p{at}" in prefill.sent)  # type: ignore[misc]
    assert driver.findings() == ""


def test_the_copies_of_a_ranks_gpu_are_counted_by_method_and_direction(
    driver: Driver, engines: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decoder = engines
    module = importlib.import_module("kvferry.vllm._stats")
    monkeypatch.setattr(module, "_LOOK_EVERY_S", 0.0)
    metrics = module.KVFerryPromMetrics(None, None, ["model"], {0: ["m"]})
    series = {name: vllm.Metric.made[f"vllm:kvferry_{name}"].series for name in module._REASONED}
    assert not any(value for values in series.values() for value in values.values())
    made = load(decoder, "d", compute(prefill, "p", 7, [1, 2, 5]), [9, 3, 4])
    assert decoder.until(lambda: "d" in decoder.received)
    finish(decoder, made, [9, 3, 4])
    assert prefill.until(lambda: "p" in prefill.sent)
    agent = decoder.worker._worker._agent
    stats = decoder.worker.get_kv_connector_stats()
    metrics.observe(module.KVFerryStats().aggregate(stats).data)
    # All GPUs of the process, which both engines of this test share.
    counted: Counter[str] = Counter()
    for name, value in agent.stats().items():
        counted[re.sub(r"^gpu\d+_", "", name)] += value
    assert series["gpu_bytes"] == {("m", "out"): counted["bytes_out"], ("m", "in"): counted["bytes_in"]}
    assert counted["bytes_out"] >= len(PROMPT) and counted["bytes_in"] >= len(PROMPT)
    methods = ("single", "batch", "kernel", "gather")
    assert series["gpu_calls"] == {("m", method): counted[f"{method}_calls"] for method in methods}
    assert sum(series["gpu_calls"].values()) > 0
    assert {("m", "kernel_refused_jit"), ("m", "unpinned_memory"), ("m", "lost")} <= set(series["gpu_failures"])
    assert set(series["fallbacks"]) == {("m", "peer_device"), ("m", "out_of_reach"), ("m", "unlisted")}
    assert decoder.worker.get_kv_connector_stats() is None, "nothing has been copied since"


def begin(engine: Engine, request: str, tokens: int, byte: int, blocks: list[int]) -> Request:
    """Prefills the first tokens of a prompt that is handed over."""
    made = Request(request, {"do_remote_decode": True, "transfer_id": "x"}, list(PROMPT))
    engine.scheduler.on_new_request(made)
    assert engine.scheduler.get_num_new_matched_tokens(made, 0) == (0, False)

    def launch(layer: int) -> None:
        engine.stream.run("prefill", writes=engine.ranges(layer, blocks), byte=byte + layer)

    engine.step((request, tokens, blocks), launch=launch)
    return made


def preempt(engine: Engine, request: str, blocks: list[int], then: Callable[[], None] = lambda: None) -> None:
    """A step that takes blocks from a request and gives them to another, for which it zeroes and computes them. `then`:
    after it has launched what zeroes them.
    """

    def overwrite() -> None:
        every = [it for layer in range(LAYERS) for it in engine.ranges(layer, blocks)]
        engine.stream.run("zero", writes=every, byte=0)
        then()

    def launch(layer: int) -> None:
        engine.stream.run("local", writes=engine.ranges(layer, blocks), byte=200)

    engine.step(("local", len(PROMPT), blocks), launch=launch, preempted=request, overwrite=overwrite)


def resume(engine: Engine, made: Request, byte: int, blocks: list[int]) -> bool:
    """Prefills a preempted request from its first token on, in other blocks, and ends it. Returns whether these are held."""

    def launch(layer: int) -> None:
        engine.stream.run("prefill", writes=engine.ranges(layer, blocks), byte=byte + layer)

    engine.step((made.request_id, len(PROMPT), blocks), launch=launch, is_resumed=True)
    engine.results()
    held: bool = engine.scheduler.request_finished(made, blocks)[0]
    return held


def test_a_prompt_whose_blocks_were_taken_and_overwritten_is_handed_over_as_it_is_computed_again(
    driver: Driver, engines: tuple[Engine, Engine]
) -> None:
    prefill, decoder = engines
    made = load(decoder, "d", before_it_is_computed(prefill), [9, 3, 4])
    lost = begin(prefill, "p", 2 * TOKENS, 7, [1, 2])
    # Decode has read and written what the first attempt computed.
    assert decoder.until(lambda: bytes_of(decoder, [9, 3])[LAYERS - 1] == {7 + LAYERS - 1})
    preempt(prefill, "p", [1, 2])
    resume(prefill, lost, 30, [5, 6, 7])
    assert decoder.until(lambda: "d" in decoder.received)
    assert not decoder.failed
    decode(decoder, [9, 3], 30)
    assert bytes_of(decoder, [9, 3, 4]) == [{30}, {31}, {32}]
    finish(decoder, made, [9, 3, 4])
    assert prefill.until(lambda: "p" in prefill.sent)
    assert driver.findings() == ""


def test_a_request_that_lost_its_blocks_is_not_read_where_its_step_names_no_work_that_it_comes_after(
    driver: Driver, engines: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decoder = engines
    made = load(decoder, "d", before_it_is_computed(prefill), [9, 3, 4])
    lost = begin(prefill, "p", 2 * TOKENS, 7, [1, 2])
    # Decode has read and written what the first attempt computed.
    assert decoder.until(lambda: bytes_of(decoder, [9, 3])[LAYERS - 1] == {7 + LAYERS - 1})
    with monkeypatch.context() as patched:
        patched.setattr(prefill.worker._worker, "_launched", lambda: None)
        preempt(prefill, "p", [1, 2])
    resume(prefill, lost, 30, [5, 6, 7])
    assert decoder.until(lambda: "d" in decoder.received)
    assert not decoder.failed
    assert bytes_of(decoder, [9, 3, 4]) == [{30}, {31}, {32}]
    finish(decoder, made, [9, 3, 4])
    assert prefill.until(lambda: "p" in prefill.sent)
    with pytest.raises(ValueError, match="say what this comes after"):
        prefill.worker._worker._half.apply(b"")


@pytest.mark.parametrize("tokens", [2 * TOKENS, len(PROMPT)], ids=["a part", "the prompt"])
def test_what_is_read_of_blocks_while_they_are_overwritten_is_not_used(
    driver: Driver, engines: tuple[Engine, Engine], order: Order, tokens: int
) -> None:
    """Neither runner waits for copies of blocks that were taken from a request, so they may copy what is written there."""
    prefill, decoder = engines
    made = load(decoder, "d", before_it_is_computed(prefill), [9, 3, 4])
    driver.hold(DEVICE_TO_HOST)
    lost = begin(prefill, "p", tokens, 7, [1, 2, 8])
    prefill.stream.synchronize()
    assert decoder.until(lambda: driver.counter("pending") > 0), "nothing reads the blocks"

    def overwritten() -> None:
        # The kernel is done before the copies that were launched before it.
        prefill.stream.synchronize()
        driver.hold(0)
        # The second runner's connector has not heard of it yet.
        began = time.monotonic()
        while time.monotonic() < began + 0.1 or driver.counter("pending") > 0:
            assert time.monotonic() < began + PATIENCE, "the copies do not end"
            decoder.step()
        assert "d" not in decoder.received - decoder.failed, "decode took what is overwritten"

    preempt(prefill, "p", [1, 2, 8], overwritten)
    held = resume(prefill, lost, 30, [5, 6, 7])
    assert decoder.until(lambda: "d" in decoder.received)
    # Of the first runner, the handoff was complete, and can't begin again.
    if tokens == len(PROMPT) and not order.is_second:
        assert decoder.failed == {"d"}
        assert bytes_of(decoder, [9, 3, 4]) == [{0}, {0}, {0}]
    else:
        assert not decoder.failed
        decode(decoder, [9, 3], 30)
        assert bytes_of(decoder, [9, 3, 4]) == [{30}, {31}, {32}]
    finish(decoder, made, [9, 3, 4])
    assert not held or prefill.until(lambda: "p" in prefill.sent)
    for race in driver.findings().split("\n\n"):
        assert "D2H copy" in race
        assert "kernel `zero`" in race or "kernel `local`" in race, race


def test_a_load_into_blocks_of_a_preempted_request_comes_after_the_step_that_reads_them(
    driver: Driver, engines: tuple[Engine, Engine]
) -> None:
    prefill, decoder = engines
    first = load(decoder, "d1", compute(prefill, "p1", 40, [1, 2, 5], "x1"), [1, 2, 3])
    assert decoder.until(lambda: "d1" in decoder.received)
    second = compute(prefill, "p2", 60, [4, 6, 7], "x2")
    driver.hold(COMPUTE)
    decode(decoder, [1, 2], 40)
    made = load(decoder, "d2", second, [1, 2, 3], preempted="d1")
    assert not decoder.until(lambda: "d2" in decoder.received, 0.1), "the blocks are read"
    driver.hold(0)
    assert decoder.until(lambda: "d2" in decoder.received)
    decode(decoder, [1, 2], 60)
    assert bytes_of(decoder, [1, 2, 3]) == [{60}, {61}, {62}]
    # The first one's client leaves before it is computed anew.
    finish(decoder, first, [])
    finish(decoder, made, [1, 2, 3])
    assert prefill.until(lambda: {"p1", "p2"} <= prefill.sent)
    assert driver.findings() == ""


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_without_its_edges_the_race_is_found(driver: Driver, engines: tuple[Engine, Engine], side: str) -> None:
    prefill, decoder = engines
    bare = prefill if side == "prefill" else decoder
    bare.worker._worker._stream = lambda: "host"
    made = load(decoder, "d1", compute(prefill, "p1", 40, [1, 2, 5], "x1"), [1, 2, 3])
    assert decoder.until(lambda: "d1" in decoder.received)
    decoder.stream.run("decode", reads=decoder.ranges(0, [1, 2]), delay=0.01)
    finish(decoder, made, [1, 2, 3])
    made = load(decoder, "d2", compute(prefill, "p2", 60, [4, 6, 7], "x2"), [1, 2, 3])
    assert decoder.until(lambda: "d2" in decoder.received)
    finish(decoder, made, [1, 2, 3])
    assert f"kernel `{side}`" in driver.findings()


def test_a_step_whose_event_can_not_be_recorded_hands_nothing_over(
    driver: Driver, engines: tuple[Engine, Engine]
) -> None:
    prefill, decoder = engines
    # The driver refuses this stream, as it does one in a graph capture.
    prefill.worker._worker._stream = lambda: 12345
    made = load(decoder, "d", before_it_is_computed(prefill), [1, 2, 3])
    offered = compute(prefill, "p", 7, [1, 2, 5])
    assert decoder.until(lambda: "d" in decoder.received)
    assert decoder.failed == {"d"}
    finish(decoder, made, [1, 2, 3])
    assert bytes_of(decoder, [1, 2, 3]) == [{0}, {0}, {0}]
    # Blocks are held until the decode engine has been told, if its request came after the step.
    assert offered is None or prefill.until(lambda: "p" in prefill.sent)


def test_loads_without_their_order_fail_and_write_nothing(driver: Driver, engines: tuple[Engine, Engine]) -> None:
    prefill, decoder = engines
    params = compute(prefill, "p", 7, [1, 2, 5])
    decoder.worker._worker._stream = lambda: 12345
    made = load(decoder, "d", params, [1, 2, 3])
    assert decoder.until(lambda: "d" in decoder.received)
    assert decoder.failed == {"d"}
    finish(decoder, made, [1, 2, 3])
    assert bytes_of(decoder, [1, 2, 3]) == [{0}, {0}, {0}]
    assert prefill.until(lambda: "p" in prefill.sent)


def test_steps_without_handoffs_call_no_driver(driver: Driver, engines: tuple[Engine, Engine]) -> None:
    prefill, _ = engines
    names = ("cuEventCreate", "cuEventRecord", "cuEventQuery", "cuStreamGetCtx")
    calls = [driver.counter(f"call:{name}") for name in names]
    for _ in range(100):
        prefill.step()
    assert [driver.counter(f"call:{name}") for name in names] == calls


def test_caches_of_several_gpus_are_refused(driver: Driver, engines: tuple[Engine, Engine]) -> None:
    layout: Any = importlib.import_module("kvferry.vllm._layout")
    tensors = {name: Tensor(engine.array, 0) for name, engine in zip(NAMES, engines, strict=False)}
    with pytest.raises(layout.UnsupportedCacheError, match="several devices"):
        layout.storages(tensors)


def test_engines_of_other_attention_backends_do_not_fit() -> None:
    layout: Any = importlib.import_module("kvferry.vllm._layout")
    array: Any = SimpleNamespace(address=1 << 30, nbytes=LAYERS * LAYER, device=0)

    def encoding(backend: str) -> str:
        facts = LayerFacts(backend=backend)
        shape = layout._shape("a", Tensor(array, 0), FullAttentionSpec(), BLOCKS, layout.Place(), facts)
        return str(shape["encoding"])

    assert encoding("FLASH_ATTN") == "FLASH_ATTN:float32" != encoding("FLASHINFER")
