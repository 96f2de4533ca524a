"""`KVFerryConnector`: vLLM's connector contract, translated to kvferry's halves. It decides nothing itself.

vLLM makes one object per role. The scheduler's is in the engine's process, the worker's in the process of each rank;
bytes go from one to the other in vLLM's own messages.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from kvferry import Agent, __version__
from kvferry._bootstrap import DEFAULT_PORT, BootstrapServer, Registration, place, register_at
from kvferry._siblings import Siblings
from kvferry.connector import SchedulerHalf, WorkerHalf, log_to_stderr, prompt_id
from kvferry.vllm._layout import Place, UnsupportedCacheError, groups, layout, storages
from kvferry.vllm._settings import Settings
from kvferry.vllm._stats import KVFerryPromMetrics, KVFerryStats

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    _P2P: Any = CacheHitSource.P2P
except ImportError:
    # vLLM 0.31 does not tell cache hits apart.
    _P2P = None

# Below vLLM's own logger, so that its settings hold.
logger: Any = init_logger("vllm.kvferry")


@dataclass
class KVFerryMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """A step, for the worker halves."""

    data: bytes
    # Whether the step computes KV that is handed over.
    computes: bool


@dataclass
class KVFerryHandshakeMetadata(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """A worker, for the scheduler half."""

    card: bytes
    address: str


@dataclass
class KVFerryWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What the worker halves tell the scheduler half after a step, by rank."""

    notes: dict[int, bytes] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVFerryWorkerMetadata:
        return KVFerryWorkerMetadata({**self.notes, **other.notes})


class KVFerryConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Hands the KV cache of requests from prefill to decode instances of vLLM. See docs/vllm.md."""

    _cache_hit_source = _P2P

    # Of the object's role: one of the two, and `_side` is the same object.
    _scheduler: _Scheduler
    _worker: _Worker
    _side: _Scheduler | _Worker
    # Whether this step computes KV that is handed over.
    _computes = False

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if "KVFERRY_LOG" not in os.environ:
            log_to_stderr("warn")
        settings = Settings.of(vllm_config.kv_transfer_config.kv_connector_extra_config)
        if vllm_config.parallel_config.prefill_context_parallel_size > 1:
            raise UnsupportedCacheError(
                "KVFerryConnector does not support prefill context parallelism: its ranks have one name"
            )
        if role == KVConnectorRole.SCHEDULER:
            self._side = self._scheduler = _Scheduler(vllm_config, kv_cache_config, settings)
        else:
            self._side = self._worker = _Worker(vllm_config, kv_cache_config, settings)

    # What vLLM asks of the class.

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVFerryStats:
        return KVFerryStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVFerryPromMetrics:
        return KVFerryPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # The scheduler's side.

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], Any]) -> None:
        self._scheduler.ranks(metadata)

    def on_new_request(self, request: Any) -> None:
        self._scheduler.arrived(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.matched(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        # A load fills all groups that are handed over, so vLLM need not zero their blocks.
        groups: tuple[int, ...] = self._kv_cache_config.transfer_group_ids
        return groups

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVFerryMetadata:
        return self._scheduler.step(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduler.reported(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.finished(request, block_ids)

    def has_pending_push_work(self) -> bool:
        return self._scheduler.half.has_pending_work()

    def reset_cache(self) -> bool:
        self._scheduler.half.reset_cache()
        return True

    # The worker's side.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._worker.register(kv_caches)

    def get_handshake_metadata(self) -> KVFerryHandshakeMetadata | None:
        return self._worker.handshake()

    def handle_preemptions(self, kv_connector_metadata: KVFerryMetadata) -> None:
        self._worker.apply(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: KVFerryMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._worker.apply(connector_metadata)
        self._computes = connector_metadata.computes

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._worker.fetch()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Requests wait for their loads in the scheduler, not here."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        # vLLM calls this for each layer in each step.
        if self._computes:
            self._worker.layer_computed(layer_name)

    def wait_for_save(self) -> None:
        if self._computes:
            self._worker.step_computed()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self._worker.results()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self._worker.results()
        return results.finished_sending, results.finished_recving

    def build_connector_worker_meta(self) -> KVFerryWorkerMetadata | None:
        return self._worker.notes()

    # Both sides.

    def get_kv_connector_stats(self) -> KVFerryStats | None:
        return self._side.stats()

    def shutdown(self) -> None:
        self._side.close()


_Reason: TypeAlias = Literal["length", "stop", "abort", "error"]


@dataclass
class _Live:
    """A request that is handed over, or was to be."""

    # Before any cut.
    prompt_tokens: int
    produces: bool
    # Cached tokens when its load was matched last: vLLM does not repeat the number.
    computed: int = 0


_REASONS: dict[Any, _Reason] = {
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_ABORTED: "abort",
}


class _Scheduler:
    """The scheduler's side."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, settings: Settings) -> None:
        self._config = vllm_config
        self._settings = settings
        self._caches = kv_cache_config
        parallel = vllm_config.parallel_config
        place = Place(
            tp_size=parallel.tensor_parallel_size,
            dcp_size=parallel.decode_context_parallel_size,
            dcp_interleave=parallel.cp_kv_cache_interleave_size,
        )
        self._rules = [group.rule for group in groups(kv_cache_config, place)]
        self._all_groups = len(kv_cache_config.transfer_group_ids) == len(kv_cache_config.kv_cache_groups)
        self.half = SchedulerHalf(
            self._rules,
            ranks=parallel.pipeline_parallel_size * parallel.tensor_parallel_size,
            timeout=settings.timeout,
            recomputed_tokens=max(0, vllm_config.num_prefill_lookahead_tokens - 1),
            null_block=0,
        )
        self._live: dict[str, _Live] = {}
        self._produced: set[str] = set()
        self._siblings = Siblings()
        self._bootstrap: BootstrapServer | Registration | None = None

    def ranks(self, metadata: Mapping[tuple[int, int], Any]) -> None:
        """`metadata`: of each worker, by pipeline and tensor-parallel rank."""
        workers = [metadata[place] for place in sorted(metadata)]
        if not all(isinstance(worker, KVFerryHandshakeMetadata) for worker in workers):
            raise UnsupportedCacheError(
                "KVFerryConnector got the handshake of another connector: MultiConnector passes on only that of the "
                "first of its connectors that has one, so name KVFerryConnector first"
            )
        self.half.set_ranks([worker.card for worker in workers])
        addresses = ", ".join(worker.address for worker in workers)
        logger.info("KVFerryConnector %s: engine %s, ranks at %s", __version__, self.half.engine_id, addresses)
        if self._config.kv_transfer_config.is_kv_producer:
            self._serve_bootstrap(metadata)

    def _serve_bootstrap(self, metadata: Mapping[tuple[int, int], Any]) -> None:
        """Lets routers of Mooncake's flow find this engine."""
        port = int(os.environ.get("VLLM_MOONCAKE_BOOTSTRAP_PORT") or DEFAULT_PORT)
        own_host = (self._settings.listen() or "127.0.0.1:0").rpartition(":")[0].strip("[]")
        dp_rank, host = place(self._config.parallel_config, own_host)
        workers: dict[int, dict[int, str]] = {}
        for (pp_rank, tp_rank), worker in metadata.items():
            workers.setdefault(tp_rank, {})[pp_rank] = worker.address
        if host is None:
            self._bootstrap = BootstrapServer(own_host, port)
            self._bootstrap.register(dp_rank, self.half.engine_id, workers)
        else:
            url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            self._bootstrap = register_at(url, dp_rank, self.half.engine_id, workers)

    def _selected(self, blocks: Sequence[list[int]]) -> Sequence[list[int]]:
        """The block ids of the groups that are handed over."""
        if self._all_groups:
            return blocks
        selected: Sequence[list[int]] = self._caches.select_transfer_block_ids(blocks)
        return selected

    def arrived(self, request: Any) -> None:
        params = request.kv_transfer_params
        if not params:
            return
        produces, consumes = bool(params.get("do_remote_decode")), bool(params.get("do_remote_prefill"))
        if not produces and not consumes:
            return
        if produces and not self._siblings.owns(request.request_id):
            return
        request_id, tokens = request.request_id, request.num_prompt_tokens
        self._live[request_id] = _Live(tokens, produces)
        self.half.arrived(request_id, tokens, request.max_tokens, params, _prompt(request))
        if produces:
            self._produced.add(request_id)
            _cut(request, tokens - self.half.prompt_tokens_to_prefill(request_id, tokens))

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        live = self._live.get(request.request_id)
        if live is None or live.produces:
            return 0, False
        live.computed = computed
        tokens = self.half.matched(request.request_id, live.prompt_tokens, computed)
        return tokens, bool(tokens)

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        live = self._live.get(request.request_id)
        if live is not None and not live.produces:
            table = self._selected(blocks.get_block_ids())
            self.half.allocated(request.request_id, live.prompt_tokens, live.computed, external, table)

    def step(self, output: Any) -> KVFerryMetadata:
        scheduled: list[tuple[str, int, int, bool, Sequence[list[int]]]] = []
        produced, tokens = self._produced, output.num_scheduled_tokens
        if not produced.isdisjoint(tokens):
            for new in output.scheduled_new_reqs:
                request_id = new.req_id
                if request_id in produced:
                    blocks = self._selected(new.block_ids)
                    scheduled.append((request_id, new.num_computed_tokens, tokens[request_id], True, blocks))
            cached = output.scheduled_cached_reqs
            for at, request_id in enumerate(cached.req_ids):
                if request_id in produced and self.half.produces(request_id):
                    new_blocks = cached.new_block_ids[at]
                    blocks = [[] for _ in self._rules] if new_blocks is None else self._selected(new_blocks)
                    resumed = request_id in cached.resumed_req_ids
                    computed = cached.num_computed_tokens[at]
                    scheduled.append((request_id, computed, tokens[request_id], resumed, blocks))
        preempted = [it for it in output.preempted_req_ids or () if it in produced]
        return KVFerryMetadata(self.half.step(scheduled, preempted), bool(scheduled))

    def reported(self, output: Any) -> None:
        meta = output.kv_connector_worker_meta
        if isinstance(meta, KVFerryWorkerMetadata):
            for rank, notes in meta.notes.items():
                self.half.reported(rank, notes)
        if output.finished_sending:
            self.half.sent(list(output.finished_sending))
        if output.finished_recving:
            self.half.received(list(output.finished_recving))

    def finished(self, request: Any, blocks: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        request_id, params = request.request_id, request.kv_transfer_params
        live = self._live.pop(request_id, None)
        self._produced.discard(request_id)
        if live is None and (not params or not self._siblings.owns(request_id)):
            return False, self._siblings.ended(request_id, None)
        tokens = live.prompt_tokens if live else request.num_prompt_tokens
        reason: _Reason = _REASONS.get(request.status, "error")
        prompt = None if live else _prompt(request)
        held, answer = self.half.finished(request_id, tokens, params, prompt, reason, self._selected(blocks))
        return held, self._siblings.ended(request_id, answer)

    def stats(self) -> KVFerryStats | None:
        taken = self.half.take_stats()
        return KVFerryStats.of_scheduler(taken) if taken else None

    def close(self) -> None:
        if self._bootstrap is not None:
            self._bootstrap.close()


def _prompt(request: Any) -> bytes | None:
    """The identity of a request's prompt; None if it has no token ids.

    A request that vLLM rejected ends here with its parameters and another prompt, so that prefill frees its blocks.
    """
    if request.prompt_token_ids is None or getattr(request, "abort_immediately", False):
        return None
    extra = []
    if request.lora_request is not None:
        extra.append("lora:" + request.lora_request.lora_name)
    extra += ["mm:" + feature.identifier for feature in request.mm_features or ()]
    if request.cache_salt:
        extra.append("salt:" + request.cache_salt)
    return prompt_id(request.prompt_token_ids, extra)


def _cut(request: Any, tokens: int) -> None:
    """Has a producer prefill without the last tokens: decode computes them again, from the state before them."""
    for _ in range(tokens):
        if request.prompt_token_ids is not None:
            request.prompt_token_ids.pop()
        elif request.prompt_embeds is not None:
            request.prompt_embeds = request.prompt_embeds[:-1]
        else:
            return
        request._all_token_ids.pop()
        request.num_prompt_tokens -= 1
        request.max_tokens = 1


class _Worker:
    """A worker's side."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, settings: Settings) -> None:
        self._config = vllm_config
        self._caches = kv_cache_config
        self._settings = settings
        self._agent: Agent | None = None
        self._half: WorkerHalf | None = None
        self._rank = 0
        self._layers: dict[str, int] = {}
        # Of the step: all layers before this one are computed, and these after it.
        self._next_layer = 0
        self._early: set[int] = set()
        # In micro-batches a layer runs several times in a step, and only the last time computes all of it.
        self._by_layer = not getattr(vllm_config.parallel_config, "use_ubatching", False)
        self._applied: KVFerryMetadata | None = None
        # What was applied may have loads, which have not begun.
        self._has_loads = False
        self._notes: bytes | None = None

    def register(self, kv_caches: dict[str, Any]) -> None:
        place, self._rank = _place(self._config)
        found = storages(kv_caches)
        agent = Agent(
            f"vllm-{os.getpid()}-rank-{self._rank}",
            listen=self._settings.listen(),
            secret=self._settings.secret(),
            transports=self._settings.transports,
        )
        # Peers read the blocks of this rank. What is written here, this rank reads from its peers.
        regions = agent.register_batch([(it.address, it.nbytes) for it in found], "r")
        numbers = [(region.id, region.addr, region.nbytes) for region in regions]
        heads = self._config.model_config.get_total_num_kv_heads()
        made = layout(kv_caches, self._caches, place, heads, numbers)
        self._layers = {name: at for at, name in enumerate(made.layers)}
        model = _model(self._config, self._settings)
        timeout = self._settings.timeout
        self._half = WorkerHalf(agent, made.json, regions, rank=self._rank, timeout=timeout, model=model)
        self._agent = agent
        exposed = not agent.local_address[0].startswith("127.") and agent.local_address[0] != "::1"
        if exposed and not self._settings.has_secret():
            logger.warning_once(
                "KVFerryConnector: every host that reaches %s can read the KV cache; set a secret "
                "(secret_file in kv_connector_extra_config, or KVFERRY_SECRET_FILE) on all engines",
                agent.address,
            )

    def handshake(self) -> KVFerryHandshakeMetadata | None:
        if self._half is None or self._agent is None:
            return None
        return KVFerryHandshakeMetadata(self._half.card, self._agent.address)

    def apply(self, metadata: KVFerryMetadata) -> None:
        """Once per step: before blocks are overwritten."""
        if metadata is self._applied or self._half is None:
            return
        self._applied = metadata
        self._next_layer = 0
        self._early.clear()
        if metadata.data:
            self._has_loads = True
            try:
                self._half.apply(metadata.data)
            except ValueError as error:
                # An exception here would end the engine. Loads that need what was refused fail by themselves.
                logger.error("KVFerryConnector: %s", error)

    def fetch(self) -> None:
        if self._has_loads and self._half is not None:
            self._has_loads = False
            self._half.fetch()

    def layer_computed(self, layer: str) -> None:
        """The half takes layers in their order, each as "all up to this one". A model may compute them in another."""
        at = self._layers.get(layer)
        if at is None or at < self._next_layer or not self._by_layer or self._half is None:
            return
        self._early.add(at)
        if at == self._next_layer:
            while self._next_layer in self._early:
                self._early.remove(self._next_layer)
                self._next_layer += 1
            self._half.layer_computed(self._next_layer - 1)

    def step_computed(self) -> None:
        if self._half is not None:
            self._half.step_computed()

    def results(self) -> KVConnectorTransferResults:
        if self._half is None:
            return KVConnectorTransferResults()
        sent, received, failed, self._notes = self._half.reports()
        return KVConnectorTransferResults(set(sent), set(received), set(failed))

    def notes(self) -> KVFerryWorkerMetadata | None:
        notes, self._notes = self._notes, None
        return None if notes is None else KVFerryWorkerMetadata({self._rank: notes})

    def stats(self) -> KVFerryStats | None:
        loads = self._half.take_loads() if self._half is not None else []
        if not loads:
            return None
        stats = KVFerryStats()
        for request_id, seconds, nbytes, failure in loads:
            if failure is None:
                stats.loaded(seconds, nbytes)
            else:
                code, detail = failure
                stats.count("failed_loads", code)
                reason = f"{code}: {detail}" if detail else code
                logger.warning("KVFerryConnector: the KV of request %s was not loaded: %s", request_id, reason)
        return stats

    def close(self) -> None:
        if self._half is not None:
            self._half.close()
        if self._agent is not None:
            self._agent.shutdown()


def _model(vllm_config: Any, settings: Settings) -> dict[str, str]:
    """What two engines must have in common, besides the layout of their caches."""
    config = vllm_config.model_config
    properties = {
        "model": settings.model or config.model,
        "revision": None if settings.model else config.revision,
        "quantization": config.quantization,
        "dtype": config.dtype,
    }
    return {name: str(value).removeprefix("torch.") for name, value in properties.items() if value is not None}


def _place(vllm_config: Any) -> tuple[Place, int]:
    """This worker's part of the model, and its number among the ranks of its engine."""
    from vllm.distributed import parallel_state

    parallel = vllm_config.parallel_config
    tp, pp = parallel_state.get_tp_group(), parallel_state.get_pp_group()
    dcp_size = parallel.decode_context_parallel_size
    place = Place(
        tp_rank=tp.rank_in_group,
        tp_size=tp.world_size,
        dcp_rank=parallel_state.get_dcp_group().rank_in_group if dcp_size > 1 else 0,
        dcp_size=dcp_size,
        dcp_interleave=parallel.cp_kv_cache_interleave_size,
    )
    return place, pp.rank_in_group * tp.world_size + tp.rank_in_group
