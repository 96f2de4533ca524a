"""Look-ups of a prompt in a store: TensorRT-LLM's, and beside it vLLM's of as many blocks in the same directory.

Neither engine runs. TensorRT-LLM's side of its connector is restated in `python/tests/trtllm_reference`, and vLLM's
classes have stand-ins in `python/tests/vllm_stand_in.py`; the connector's classes are the real ones.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kvferry
import vllm_stand_in
from kvferry._engine.store import open_store
from kvferry.trtllm import KVFerryConnectorScheduler, KVFerryConnectorWorker
from kvferry.trtllm._keys import chain
from trtllm_reference import Cache, Engine, Manager, Request, Shape

TOKENS_PER_BLOCK = 32
BLOCKS = 256
TOKENS = BLOCKS * TOKENS_PER_BLOCK
DISK_GIB = 0.0625
BLOCK_BYTES = 4096
PATIENCE_S = 20.0


def prompt(seed: int) -> list[int]:
    return [(seed * 7919 + at * 31) % 50_000 for at in range(TOKENS)]


class TensorRTLLM:
    """An engine that has stored prompt 0, and loads nothing: reading the blocks is no part of the look-up."""

    def __init__(self, directory: Path) -> None:
        settings = {"DISK": directory, "DISK_GIB": DISK_GIB, "STAGING_GIB": 1 / 64, "LOAD": "off"}
        os.environ.update({f"TLLM_KVFERRY_{name}": str(value) for name, value in settings.items()})
        cache = SimpleNamespace(tokens_per_block=TOKENS_PER_BLOCK, dtype="auto")
        arguments = SimpleNamespace(model="made-up", load_format="dummy", revision="1", kv_cache_config=cache)
        self.worker = KVFerryConnectorWorker(arguments)
        self.scheduler = KVFerryConnectorScheduler(arguments)
        pages = Cache(Shape(blocks=BLOCKS + 8, tokens_per_block=TOKENS_PER_BLOCK))
        self.worker.register_kv_caches(pages.tensors[0])
        Engine(pages, Manager(self.worker, self.scheduler)).run([Request(0, prompt(0), 1)])
        self._requests = 0
        # Blocks are stored behind the engine's steps.
        deadline = time.monotonic() + PATIENCE_S
        while self.found(prompt(0)) < BLOCKS and time.monotonic() < deadline:
            time.sleep(0.01)

    def look_up(self, tokens: list[int]) -> Callable[[], Any]:
        self._requests += 1
        request = Request(self._requests, tokens)
        return lambda: self.scheduler.get_num_new_matched_tokens(request, 0)

    def found(self, tokens: list[int]) -> int:
        """Blocks that a look-up finds."""
        self.look_up(tokens)()
        stored: int = self.scheduler._requests[self._requests].stored
        return stored

    def close(self) -> None:
        self.worker.shutdown()


class _Context:
    """vLLM's of a request."""

    req_id, kv_transfer_params = "r", None
    load_tier_filter = SimpleNamespace(allows=lambda *_: True)

    def __init__(self, keys: list[bytes]) -> None:
        self._offload_key_positions = {key: TOKENS_PER_BLOCK * (at + 1) for at, key in enumerate(keys)}
        self._states: dict[type, Any] = {}

    def get_state(self, of: type) -> Any:
        return self._states.get(of)

    def set_state(self, state: Any) -> None:
        self._states[type(state)] = state


class _Patch:
    """What `vllm_stand_in.install` uses of pytest's, without an end."""

    def setitem(self, of: dict[str, Any], name: str, value: Any) -> None:
        of[name] = value

    def delitem(self, of: dict[str, Any], name: str) -> None:
        del of[name]


class VLLM:
    """The manager of `KVFerryOffloadingSpec`, in whose store the blocks of prompt 0 are."""

    def __init__(self, directory: Path) -> None:
        patch: Any = _Patch()
        vllm_stand_in.install(patch)
        module: Any = importlib.import_module("kvferry.vllm._offload_manager")
        group = {"group": 0, "fingerprint": "00" * 32, "window": 0, "shards": [(0, 1)]}
        module.read_card = lambda *_: {"model": "m", "groups": [group]}
        module.remove_cards = lambda *_: None
        settings = importlib.import_module("kvferry.vllm._settings").store_settings(
            {"disk": str(directory), "disk_gib": DISK_GIB, "model": "m"}
        )
        opened = open_store(settings, 0, module.logger)
        config = SimpleNamespace(
            groups=[SimpleNamespace(group_id=0, tokens_per_block=TOKENS_PER_BLOCK, layer_names=("0",))],
            cache=SimpleNamespace(blocks_per_chunk=1, tokens_per_hash=TOKENS_PER_BLOCK),
            parallel=SimpleNamespace(world_size=1),
            engine_id="engine",
            enable_kv_cache_events=False,
        )
        self._manager: Any = vllm_stand_in.EngineCore(
            lambda: module.KVFerryOffloadingManager(config, settings, opened),
            "OffloadingConnector",
            spec_name="KVFerryOffloadingSpec",
        ).made
        assert opened is not None
        self._memory = (ctypes.c_char * (BLOCKS * BLOCK_BYTES))()
        region = opened.agent.register(self._memory, "none")
        space = self._manager._groups[0].spaces[0]
        context = _Context(self._keys(0))
        names = self._manager._request(context).names.of(self._keys(0))
        put = space.put(names, kvferry.Blocks(region, [at * BLOCK_BYTES for at in range(BLOCKS)], BLOCK_BYTES))
        assert put.stored == BLOCKS, put

    @staticmethod
    def _keys(seed: int) -> list[bytes]:
        return [hashlib.sha256(f"{seed} {at}".encode()).digest() + bytes(4) for at in range(BLOCKS)]

    def look_up(self, seed: int) -> Callable[[], int]:
        """Asks for a block after another until one is missing, as vLLM does, in a step of its own."""
        keys = self._keys(seed)
        manager, context = self._manager, _Context(keys)
        manager.on_schedule_end(None)
        manager.on_new_request(context)

        def call() -> int:
            for at, key in enumerate(keys):
                if manager.lookup(key, context).name != "HIT":
                    return at
            return len(keys)

        return call

    def close(self) -> None:
        self._manager.shutdown()


def naming(tokens: list[int]) -> Callable[[], Any]:
    return lambda: chain(tokens, TOKENS_PER_BLOCK, None)
