"""The connector manager: calls the scheduler half on rank 0, the worker half on every rank, and parks requests.

Its methods have the names of TensorRT-LLM's, so that an engine can be driven by either. It is stricter: what
TensorRT-LLM's documentation forbids a connector raises `ContractError`.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from trtllm_reference.ranks import here
from trtllm_reference.request import Request, State


class ContractError(AssertionError):
    """The connector did what TensorRT-LLM forbids."""


@dataclass
class Batch:
    """Requests of a step."""

    context_requests_chunking: list[Request] = field(default_factory=list)
    context_requests_last_chunk: list[Request] = field(default_factory=list)
    generation_requests: list[Request] = field(default_factory=list)

    @property
    def context_requests(self) -> list[Request]:
        return self.context_requests_chunking + self.context_requests_last_chunk


class Manager:
    def __init__(self, worker: Any, scheduler: Any, *, enable_attention_dp: bool = False) -> None:
        self._is_leader = scheduler is not None
        if self._is_leader != (enable_attention_dp or here.rank == 0):
            raise ContractError(
                "a scheduler half exists on rank 0 only, or with attention data parallelism on all ranks"
            )
        if enable_attention_dp and not (worker.supports_attention_dp and scheduler.supports_attention_dp):
            raise ContractError("both classes must declare supports_attention_dp")
        self.worker, self.scheduler, self._is_local = worker, scheduler, enable_attention_dp
        # Request ids that were asked for, with the pages and tokens that steps have reported.
        self._asked: set[int] = set()
        self._reported: dict[int, tuple[list[int], int]] = {}
        self._loads: dict[int, int] = {}
        # Each direction: not handed in yet, handed in, and reported by this rank.
        self._new: dict[str, dict[int, Request]] = {"saving": {}, "loading": {}}
        self._handed: dict[str, dict[int, Request]] = {"saving": {}, "loading": {}}
        self._done: dict[str, dict[int, Request]] = {"saving": {}, "loading": {}}
        self._output: Any = None

    def _lead(self, call: Any) -> Any:
        value = call() if self._is_leader else None
        # Ranks are processes: what the leader says is a copy.
        return value if self._is_local else pickle.loads(pickle.dumps(here.broadcast(value)))

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        if request.is_generation_only_request:
            raise ContractError("a connector is not asked for requests that only generate")
        if request.request_id in self._asked:
            raise ContractError("a request is asked for once")
        self._asked.add(request.request_id)
        matched, is_async = self._lead(lambda: self.scheduler.get_num_new_matched_tokens(request, num_computed_tokens))
        if is_async and matched == 0:
            raise ContractError("an asynchronous load must load something")
        if not 0 <= matched < max(1, request.prompt_len - num_computed_tokens):
            raise ContractError(f"{matched} tokens of a prompt of {request.prompt_len} were promised")
        if is_async:
            self._new["loading"][request.request_id] = request
        self._loads[request.request_id] = matched
        request.py_num_connector_matched_tokens = matched
        return int(matched)

    def update_state_after_alloc(
        self, request: Request, block_ids: list[int], by_layer_group: list[list[int]] | None = None
    ) -> None:
        if self._is_leader and by_layer_group:
            self.scheduler.update_state_after_alloc_by_layer_group(request, by_layer_group)
        elif self._is_leader:
            self.scheduler.update_state_after_alloc(request, block_ids)

    def build_scheduler_output(self, batch: Batch, cache: Any) -> None:
        new: list[Any] = []
        cached: list[Any] = []
        for request in batch.context_requests:
            if request.request_id not in self._new["loading"]:
                is_new = request.request_id not in self._reported
                data = self._data(request, cache)
                data.computed_position -= self._loads.get(request.request_id, 0)
                (new if is_new else cached).append(data)
        cached += [self._data(request, cache) for request in batch.generation_requests]
        self._loads.clear()
        rank = here.rank if self._is_local else None
        self._output = SimpleNamespace(new_requests=new, cached_requests=cached, attention_dp_rank=rank)

    def _data(self, request: Request, cache: Any) -> Any:
        counts, tokens = self._reported.get(request.request_id, ([0] * len(request.pages), 0))
        pages = cache.get_page_indices_by_layer_group(request)
        fresh = [of_group[count:] for of_group, count in zip(pages, counts, strict=True)]
        self._reported[request.request_id] = ([len(it) for it in pages], len(request.tokens))
        is_context = request.state in (State.CONTEXT_INIT, State.DISAGG_GENERATION_TRANS_IN_PROGRESS)
        is_flat = len(pages) == 1
        priorities = None
        if request.kv_cache_retention_config is not None and is_flat:
            priorities = [cache.get_priority_by_block_id(page) for page in fresh[0]]
        return SimpleNamespace(
            request_id=request.request_id,
            new_tokens=request.tokens[tokens:],
            new_block_ids=fresh[0] if is_flat else [],
            computed_position=request.context_current_position if is_context else len(request.tokens) - 1,
            num_scheduled_tokens=request.context_chunk_size if is_context else 1,
            priorities=priorities,
            cache_salt=request.cache_salt,
            new_block_ids_by_layer_group=[] if is_flat else fresh,
        )

    def take_scheduled_requests_pending_load(self, batch: Batch) -> None:
        for name in ("context_requests_chunking", "context_requests_last_chunk"):
            parked = [it for it in getattr(batch, name) if it.request_id in self._new["loading"]]
            for request in parked:
                request.state = State.DISAGG_GENERATION_TRANS_IN_PROGRESS
            setattr(batch, name, [it for it in getattr(batch, name) if it not in parked])

    def handle_metadata(self) -> None:
        if self._output is None:
            return
        metadata = self._lead(lambda: self.scheduler.build_connector_meta(self._output))
        self._output = None
        self.worker.bind_connector_meta(metadata)

    def layer_pre_hook(self, module: Any, *_args: Any) -> None:
        self.worker.wait_for_layer_load(module.layer_idx, None)

    def layer_post_hook(self, module: Any, *_args: Any) -> None:
        self.worker.save_kv_layer(module.layer_idx, None)

    def request_finished(
        self, request: Request, block_ids: list[int], by_layer_group: list[list[int]] | None = None
    ) -> bool:
        if by_layer_group:
            is_saving = self._lead(lambda: self.scheduler.request_finished_by_layer_group(request, by_layer_group))
        else:
            is_saving = self._lead(lambda: self.scheduler.request_finished(request, block_ids))
        if is_saving:
            self._new["saving"][request.request_id] = request
            request.state = State.DISAGG_CONTEXT_TRANS_IN_PROGRESS
        return bool(is_saving)

    def get_finished(self) -> list[Request]:
        """Requests that every rank has saved. Those that every rank has loaded can be scheduled again."""
        handed = {name: list(self._new[name]) for name in self._new}
        for name, new in self._new.items():
            self._handed[name].update(new)
            new.clear()
        reported = self.worker.get_finished(handed["saving"], handed["loading"])
        ended = {}
        for name, ids in zip(("saving", "loading"), reported, strict=True):
            for it in ids:
                if it not in self._handed[name]:
                    raise ContractError(f"request {it} was reported as {name}, which was not handed in")
                self._done[name][it] = self._handed[name].pop(it)
            everywhere = [set(self._done[name])] if self._is_local else here.gather(set(self._done[name]))
            ended[name] = [self._done[name].pop(it) for it in sorted(set.intersection(*everywhere))]
        for request in ended["loading"]:
            request.state = State.CONTEXT_INIT
        return ended["saving"]

    def has_pending_transfers(self, request_id: int) -> bool:
        return any(request_id in kept[name] for kept in (self._new, self._handed, self._done) for name in kept)
