"""One rank of an engine with a made-up model, in the order of steps of TensorRT-LLM's executor.

The KV of a token depends on the token and on the KV of the token before; the next token depends on all KV that the
attention sees. A wrong byte in the cache changes what is generated.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from trtllm_reference.cache import Cache
from trtllm_reference.manager import Batch
from trtllm_reference.ranks import here
from trtllm_reference.request import Request, State

# How long requests may wait for loads and saves.
_PATIENCE_S = 60.0


class Engine:
    """`manager`: None for an engine without a connector."""

    def __init__(self, cache: Cache, manager: Any | None, *, rank: int = 0, weights: str = "") -> None:
        self.cache, self.manager = cache, manager
        self._rank, self._weights = rank, weights
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        # Ended, and being saved.
        self._saving: list[Request] = []
        self.steps = 0
        # Called with the name of each part of a step.
        self.trace: Any = lambda _part: None

    def run(self, requests: Sequence[Request]) -> list[Request]:
        """Until all have ended, and their pages are free."""
        self._waiting += requests
        until = time.monotonic() + _PATIENCE_S
        # Each computes a token at least; KV that does not come is computed a second time.
        all_of_them = (*self._waiting, *self._running)
        computing, most = 0, 2 * sum(it.prompt_len + it.max_new_tokens for it in all_of_them)
        while self._waiting or self._running or self._saving:
            if self.step():
                computing += 1
                assert computing <= most, "requests are computed again and again"
                until = time.monotonic() + _PATIENCE_S
            elif time.monotonic() > until:
                raise AssertionError("requests do not end")
            else:
                # Leaves the processor to the threads that load and save.
                time.sleep(0.001)
        return list(requests)

    def step(self) -> bool:
        """True if it computes tokens."""
        self.steps += 1
        batch = self._schedule()
        if self.manager is not None:
            self.manager.build_scheduler_output(batch, self.cache)
            self.manager.take_scheduled_requests_pending_load(batch)
            self.manager.handle_metadata()
            self.trace("start_load_kv")
            self.manager.worker.start_load_kv(None)
        self._forward(batch)
        if self.manager is not None:
            self.trace("wait_for_save")
            self.manager.worker.wait_for_save(None)
        for request in [*batch.context_requests, *batch.generation_requests]:
            self._advance(request)
        if self.manager is not None:
            self.trace("get_finished")
            for request in self.manager.get_finished():
                self._saving.remove(request)
                self._end(request)
        return bool(batch.context_requests or batch.generation_requests)

    def _schedule(self) -> Batch:
        while self._waiting and self.cache.is_free(self._waiting[0]):
            request = self._waiting.pop(0)
            self._running.append(request)
            cached = 0
            if self.manager is not None:
                cached = self.manager.get_num_new_matched_tokens(request, 0)
            self.cache.allocate(request, cached)
            request.context_current_position = cached
            if self.manager is not None:
                self.manager.update_state_after_alloc(request, *self._pages(request))
        batch = Batch()
        for request in self._running:
            if request.state is State.GENERATION_IN_PROGRESS:
                batch.generation_requests.append(request)
            elif request.state is State.CONTEXT_INIT:
                is_last = request.context_chunk_size == request.context_remaining_length
                (batch.context_requests_last_chunk if is_last else batch.context_requests_chunking).append(request)
        return batch

    def _pages(self, request: Request) -> tuple[Any, ...]:
        pages = self.cache.get_page_indices_by_layer_group(request)
        return (pages[0],) if len(pages) == 1 else ([], pages)

    def _forward(self, batch: Batch) -> None:
        for group, (layers, _) in enumerate(self.cache.shape.groups):
            for at, layer in enumerate(layers):
                module = SimpleNamespace(layer_idx=layer)
                if self.manager is not None:
                    self.manager.layer_pre_hook(module)
                for request in batch.context_requests:
                    begin = request.context_current_position
                    for position in range(begin, begin + request.context_chunk_size):
                        self._compute(request, group, at, layer, position)
                for request in batch.generation_requests:
                    self._compute(request, group, at, layer, len(request.tokens) - 1)
                if self.manager is not None:
                    self.manager.layer_post_hook(module)

    def _compute(self, request: Request, group: int, at: int, layer: int, position: int) -> None:
        for kv in range(2):
            before = bytes(self.cache.slot(request, group, at, kv, position - 1)) if position else b""
            text = f"{self._weights} {layer} {kv} {self._rank} {request.tokens[position]} ".encode() + before
            self.cache.slot(request, group, at, kv, position)[:] = hashlib.sha256(text).digest()[
                : self.cache.shape.token_bytes
            ]

    def _advance(self, request: Request) -> None:
        if request.state is State.CONTEXT_INIT:
            request.computed_tokens += request.context_chunk_size
            request.context_current_position += request.context_chunk_size
            if request.context_remaining_length:
                self.cache.pass_windows(request, request.context_current_position)
                return
            request.state = State.GENERATION_IN_PROGRESS
        request.tokens.append(self._next(request))
        self.cache.pass_windows(request, len(request.tokens) - 1)
        if len(request.generated) >= request.max_new_tokens:
            self._running.remove(request)
            if self.manager is not None and self.manager.request_finished(request, *self._pages(request)):
                self._saving.append(request)
            else:
                self._end(request)

    def _next(self, request: Request) -> int:
        """From the KV of all tokens that the attention sees, on all ranks."""
        seen = hashlib.sha256()
        end = len(request.tokens)
        for group, (layers, window) in enumerate(self.cache.shape.groups):
            for at in range(len(layers)):
                for position in range(max(0, end - window) if window else 0, end):
                    seen.update(bytes(self.cache.slot(request, group, at, 0, position)))
                    seen.update(bytes(self.cache.slot(request, group, at, 1, position)))
        return int.from_bytes(hashlib.sha256(b"".join(here.gather(seen.digest()))).digest()[:2], "big")

    def _end(self, request: Request) -> None:
        request.state = State.GENERATION_COMPLETE
        self.cache.free(request)
