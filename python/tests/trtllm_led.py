"""An engine of TensorRT-LLM's manner that a test leads through the calls of its connector, one by one.

A test makes it in a process of its own (`kit.Child`). Settings are variables of that process.
"""

from __future__ import annotations

import hashlib
import queue
import random
import threading
from types import SimpleNamespace
from typing import Any

from kvferry.trtllm import KVFerryConnectorScheduler, KVFerryConnectorWorker
from trtllm_reference import Cache, Engine, Manager, Request, Shape

TOKENS_PER_BLOCK = 8
# Five full blocks, and a token. The engine computes them in two chunks.
PROMPT_TOKENS = 41
BLOCKS = 5
_CHUNK_TOKENS = 24
_SHAPE = Shape(tokens_per_block=TOKENS_PER_BLOCK, token_bytes=32, groups=((tuple(range(4)), 0),))
# The calls that do something: `wait_for_layer_load` and `save_kv_layer` do not.
_CALLS_OF_SCHEDULER = (
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "request_finished",
)
_CALLS_OF_WORKER = ("bind_connector_meta", "start_load_kv", "wait_for_save", "get_finished")
# Of an agent's gauges, those of work and of memory.
_GAUGES = (
    "transfers_in_flight",
    "requests_in_flight",
    "peer_memory_bytes",
    "handshakes_pending",
    "regions_quarantined",
)


def request(number: int, max_new_tokens: int) -> Request:
    """Requests of one number have the same prompt, which no other number has."""
    chance = random.Random(number)
    tokens = [chance.randrange(32_000) for _ in range(PROMPT_TOKENS)]
    return Request(number, tokens, max_new_tokens, chunk=_CHUNK_TOKENS)


class Watched(Engine):
    """Keeps a digest of each prompt's KV, taken when the request has ended."""

    def __init__(self, manager: Manager | None, cache: Cache) -> None:
        super().__init__(cache, manager)
        self.digests: dict[int, str] = {}

    def _end(self, request: Request) -> None:
        found = hashlib.sha256()
        for group, (layers, _) in enumerate(self.cache.shape.groups):
            for layer in range(len(layers)):
                for position in range(request.prompt_len):
                    for kv in range(2):
                        found.update(self.cache.slot(request, group, layer, kv, position))
        self.digests[request.request_id] = found.hexdigest()
        super()._end(request)


def expected(number: int, max_new_tokens: int) -> tuple[list[int], str]:
    """What an engine without a connector generates, and the digest of its KV."""
    engine = Watched(None, Cache(_SHAPE))
    (ended,) = engine.run([request(number, max_new_tokens)])
    return ended.generated, engine.digests[number]


class _Half:
    """A half of the connector. Each of `names` waits for the test's word before it is called."""

    def __init__(self, half: Any, names: tuple[str, ...], wait: Any) -> None:
        self._half, self._names, self._wait = half, names, wait

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._half, name)
        if name not in self._names:
            return value

        def call(*given: Any) -> Any:
            self._wait(name)
            return value(*given)

        return call


class Led:
    """The executor has a thread of its own. All calls here are made from one other thread."""

    def __init__(self) -> None:
        cache = SimpleNamespace(tokens_per_block=TOKENS_PER_BLOCK, dtype="auto")
        arguments = SimpleNamespace(model="made-up", load_format="dummy", revision="1", kv_cache_config=cache)
        self._worker = KVFerryConnectorWorker(arguments)
        self._scheduler = KVFerryConnectorScheduler(arguments)
        pages = Cache(_SHAPE)
        self._worker.register_kv_caches(pages.tensors[0])
        worker = _Half(self._worker, _CALLS_OF_WORKER, self._called)
        scheduler = _Half(self._scheduler, _CALLS_OF_SCHEDULER, self._called)
        self._engine = Watched(Manager(worker, scheduler), pages)
        self._handoff = self._worker._local.handoff
        self._is_led = False
        # What the executor calls next; None when the request has ended.
        self._calls: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._words: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._failure: BaseException | None = None

    @property
    def addresses(self) -> list[str]:
        """Where the agent of the handoff listens, and that of rank 0."""
        return [f"127.0.0.1:{agent.local_address[1]}" for agent in self._handoff._agents]

    @property
    def followers(self) -> int:
        return int(self._handoff.followers)

    @property
    def heard(self) -> int:
        """Prompts that are on offer for this engine."""
        return int(self._handoff.gauges()["heard"])

    @property
    def received(self) -> int:
        """Blocks that were handed over to this engine."""
        return int(self._scheduler.stats().get("received_blocks", 0))

    @property
    def offers(self) -> int:
        """Prompts that this engine has on offer, or computes."""
        return int(self._handoff.gauges()["offers"])

    # A request.

    def begin(self, number: int, max_new_tokens: int) -> str | None:
        """Begins a request, up to its first call. Returns that."""
        self._request = request(number, max_new_tokens)
        self._is_led = True
        threading.Thread(target=self._run, name="executor", daemon=True).start()
        return self._next()

    def step(self) -> str | None:
        """Has the call made at which the executor waits. Returns the next one, or None when the request has ended."""
        self._words.put(None)
        return self._next()

    def go(self) -> dict[str, Any]:
        """Has the request end, without further stops."""
        if self._is_led:
            self._is_led = False
            self._words.put(None)
            assert self._next() is None
        ended = self._request
        return {
            "generated": ended.generated,
            "digest": self._engine.digests[ended.request_id],
            "computed": ended.computed_tokens,
        }

    def _run(self) -> None:
        try:
            self._engine.run([self._request])
        except BaseException as failure:
            self._failure = failure
        self._calls.put(None)

    def _called(self, name: str) -> None:
        if self._is_led:
            self._calls.put(name)
            self._words.get()

    def _next(self) -> str | None:
        name = self._calls.get()
        if name is None:
            self._is_led = False
        if self._failure is not None:
            raise self._failure
        return name

    # Afterwards.

    def held(self) -> dict[str, int]:
        """What is kept for requests, by name. Empty when nothing is. No request must be under way."""
        # Takes what has ended, as each step does.
        self._engine.step()
        scheduler, worker, loads = self._scheduler, self._worker, self._scheduler._loads
        found = {
            "pages": _SHAPE.blocks - len(self._engine.cache._free[0]),
            "requests": len(scheduler._requests),
            "abandoned loads": len(scheduler._abandoned),
            "puts": sum(map(len, worker._reading.values())) + len(worker._copies),
            "reported loads and saves": len(worker._loading) + len(worker._saving) + len(worker._copying),
        }
        if loads is not None:
            found["loads"] = len(loads._kept) + len(loads._given_up)
            found["staging bytes"] = worker._local.settings.staging_bytes - loads.free_bytes
        found |= self._handoff.gauges()
        for agent in self._handoff._agents:
            stats = agent.stats()
            for name in _GAUGES:
                found[f"{name} of {agent.name}"] = stats[name]
        return {name: count for name, count in found.items() if count}

    def end(self) -> None:
        self._worker.shutdown()
