"""`KVFerryConnector`: vLLM's connector contract, translated to kvferry's halves. It decides nothing itself.

vLLM makes one object per role. The scheduler's is in the engine's process, the worker's in the process of each rank;
bytes go from one to the other in vLLM's own messages.
"""

from __future__ import annotations

import functools
import os
import sys
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
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

from kvferry import Agent, __version__
from kvferry._engine import address
from kvferry._engine.identity import PromptIdentity
from kvferry._engine.identity.adapters import Adapters
from kvferry._engine.identity.core import Cached, core_of_callers
from kvferry._engine.identity.vllm import layer_facts, of_vllm, of_vllm_prompt
from kvferry._engine.log import Seldom
from kvferry.connector import SchedulerHalf, WorkerHalf, log_to_stderr, prompt_id
from kvferry.vllm._bootstrap import DEFAULT_PORT, BootstrapServer, Registration, place, register_at
from kvferry.vllm._device import compute_stream
from kvferry.vllm._guard import guarded, tried
from kvferry.vllm._layout import Place, UnsupportedCacheError, groups, layout, storages
from kvferry.vllm._log import logger
from kvferry.vllm._of_vllm import check_connector
from kvferry.vllm._settings import Settings
from kvferry.vllm._siblings import Siblings
from kvferry.vllm._stats import AgentCounts, KVFerryPromMetrics, KVFerryStats

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


@dataclass
class KVFerryMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """A step, for the worker halves."""

    data: bytes
    # Whether the step computes KV that is handed over.
    computes: bool
    # What vLLM waits for: loads, and the ends of requests that are handed over. A worker that can't read `data` reports
    # them.
    loads: tuple[str, ...] = ()
    endings: tuple[tuple[str, str, bool], ...] = ()


@dataclass
class KVFerryHandshakeMetadata(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """A worker, for the scheduler half."""

    card: bytes
    address: str
    # Those that this rank accepts.
    producers: list[str] = field(default_factory=list)


@dataclass
class KVFerryWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What the worker halves tell the scheduler half after a step, by rank."""

    notes: dict[int, bytes] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVFerryWorkerMetadata:
        return KVFerryWorkerMetadata({**self.notes, **other.notes})


class KVFerryConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Hands the KV cache of requests from prefill to decode instances of vLLM. See docs/vllm.md."""

    _cache_hit_source = CacheHitSource.P2P

    # Of the object's role: one of the two, and `_side` is the same object.
    _scheduler: _Scheduler
    _worker: _Worker
    _side: _Scheduler | _Worker
    # Whether this step computes KV that is handed over.
    _computes = False
    # What was being handled when the step began: another exception later is the step's.
    _raised: BaseException | None = None

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if "KVFERRY_LOG" not in os.environ:
            log_to_stderr("warn")
        check_connector()
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
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        # The heads of a block lie one after the other: engines of another tensor parallelism copy long runs.
        model = vllm_config.model_config
        is_on_gpus = getattr(vllm_config.device_config, "device_type", "cpu") == "cuda"
        return "LBHNC" if is_on_gpus and model is not None and not model.use_mla else None

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        # A step whose graphs skip the layers' hooks is announced as a whole, after the event at its end.
        return False

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

    @guarded(lambda self, request: self._scheduler.refuse(request))
    def on_new_request(self, request: Any) -> None:
        self._scheduler.arrived(request)

    @guarded(lambda self, request, _: (self._scheduler.refuse(request), (0, False))[1])
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.matched(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        # A load fills all groups that are handed over, so vLLM need not zero their blocks.
        groups: tuple[int, ...] = self._kv_cache_config.transfer_group_ids
        return groups

    @guarded(lambda self, request, _, external: self._scheduler.lost_blocks(request, external))
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.allocated(request, blocks, num_external_tokens)

    @guarded(lambda self, output: self._scheduler.lost_step(output))
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

    @guarded(lambda self: self._scheduler.lost_reset())
    def reset_cache(self) -> bool:
        self._scheduler.reset()
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
        self._raised = sys.exc_info()[1]

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._worker.fetch()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Requests wait for their loads in the scheduler, not here."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        # vLLM calls this for each layer in each step.
        if self._computes:
            self._worker.layer_computed(layer_name)

    def wait_for_save(self) -> None:
        # The first model runner calls this also when the forward pass has raised.
        raised = sys.exc_info()[1]
        if self._computes and raised is not self._raised:
            self._worker.step_failed(raised)
        elif self._computes:
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
# A request in a step, as `SchedulerHalf.step` takes it.
_Step: TypeAlias = "tuple[str, int, int, bool, Sequence[list[int]]]"

# No LoRA adapter.
_NO_LORA: tuple[None, None] = (None, None)

_REASONS: dict[Any, _Reason] = {
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_ABORTED: "abort",
}


class _Scheduler:
    """The scheduler's side. The state of requests is in `half`."""

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
        recomputed_tokens = max(0, vllm_config.num_prefill_lookahead_tokens - 1)
        # Decode computes the last tokens of a prompt again, so prefill leaves them out.
        self._cuts = recomputed_tokens > 0 or any(kind != "full" for kind, _, _ in self._rules)
        self._all_groups = len(kv_cache_config.transfer_group_ids) == len(kv_cache_config.kv_cache_groups)
        self.half = SchedulerHalf(
            self._rules,
            ranks=parallel.pipeline_parallel_size * parallel.tensor_parallel_size,
            timeout=settings.timeout,
            # The second model runner overwrites a preempted request's blocks before the workers hear of the preemption:
            # nothing may be complete, and so accepted by decode, before the request's end, which keeps its blocks.
            eager=not getattr(vllm_config, "use_v2_model_runner", False),
            recomputed_tokens=recomputed_tokens,
            null_block=0,
            # All groups share one pool.
            idle=(kv_cache_config.num_blocks, settings.idle_blocks(kv_cache_config.num_blocks)),
        )
        self._siblings = Siblings()
        # Of requests that are handed over, the LoRA adapter and what named its weights at the arrival: not in `half`,
        # since both are objects of vLLM and `_adapters` that only these understand.
        self._loras: dict[str, tuple[Any, str | None]] = {}
        self._adapters = Adapters()
        self._core = core_of_callers()
        self._core.on_load(self._adapters.loads)
        self._core.on_emptied(self._adapters.cache_was_emptied)
        self._version: str | None = None
        # After a reset the weights may be others than those that were named before, until they are named anew.
        self._was_reset, self._times_named = False, 0
        self._cached = Cached(self._core)
        self._bootstrap: BootstrapServer | Registration | None = None
        self._gauges: dict[str, int] = {}

    def ranks(self, metadata: Mapping[tuple[int, int], Any]) -> None:
        """`metadata`: of each worker, by pipeline and tensor-parallel rank."""
        workers = [metadata[place] for place in sorted(metadata)]
        if not all(isinstance(worker, KVFerryHandshakeMetadata) for worker in workers):
            raise UnsupportedCacheError(
                "KVFerryConnector got the handshake of another connector: MultiConnector passes on only that of the "
                "first of its connectors that has one, so name KVFerryConnector first"
            )
        self.half.set_ranks([worker.card for worker in workers])
        # Each rank checks them again for itself.
        self.half.set_producers(sorted({it for worker in workers for it in worker.producers}))
        addresses = ", ".join(worker.address for worker in workers)
        logger.info("KVFerryConnector %s: engine %s, ranks at %s", __version__, self.half.engine_id, addresses)
        if self._config.kv_transfer_config.is_kv_producer:
            self._serve_bootstrap(metadata)

    def _serve_bootstrap(self, metadata: Mapping[tuple[int, int], Any]) -> None:
        """Lets routers of Mooncake's flow find this engine."""
        port = int(os.environ.get("VLLM_MOONCAKE_BOOTSTRAP_PORT") or DEFAULT_PORT)
        # Where peers reach the agent, peers and routers reach this server, whatever has named the address.
        own_host = address.split(metadata[min(metadata)].address)[0]
        secret = self._settings.any_secret()
        dp_rank, host = place(self._config.parallel_config, own_host)
        workers: dict[int, dict[int, str]] = {}
        for (pp_rank, tp_rank), worker in metadata.items():
            workers.setdefault(tp_rank, {})[pp_rank] = worker.address
        if host is None:
            ranks = self._config.parallel_config.data_parallel_size
            # All ranks have as many workers as this one.
            self._bootstrap = BootstrapServer(own_host, port, ranks, secret, len(metadata))
            self._bootstrap.register(dp_rank, self.half.engine_id, workers)
        else:
            url = "http://" + address.join(host, port)
            self._bootstrap = register_at(url, dp_rank, self.half.engine_id, workers, secret)

    def _selected(self, blocks: Sequence[list[int]]) -> Sequence[list[int]]:
        """The block ids of the groups that are handed over."""
        if self._all_groups:
            return blocks
        selected: Sequence[list[int]] = self._caches.select_transfer_block_ids(blocks)
        return selected

    def arrived(self, request: Any) -> None:
        params, lora = request.kv_transfer_params, getattr(request, "lora_request", None)
        self._follow_weights()
        if lora is not None:
            self._adapters.saw(lora)
        if not params:
            return
        produces = bool(params.get("do_remote_decode"))
        if not produces and not params.get("do_remote_prefill"):
            return
        if produces and not self._siblings.owns(request.request_id):
            return
        request_id, tokens = request.request_id, request.num_prompt_tokens
        if getattr(request, "resumable", False):
            # Its prompt grows after it was computed, and a handoff is of all of a prompt.
            self.half.refuse(request_id, "resumable")
            return
        if produces and self._cuts and getattr(request, "skip_reading_prefix_cache", False):
            # Its answer has a logprob for each token of the prompt, and decode computes all of such a prompt itself.
            self.half.refuse(request_id, "prompt_logprobs")
            return
        if self._was_reset:
            logger.warning_once(
                "KVFerryConnector: the cache was reset with its connector, as for new weights, which have no name now: "
                "this engine hands nothing over, and loads nothing, until it is given the version of its weights (POST "
                "/update_weight_version, or with /finish_weight_update), the last one again if they are the same, or "
                "is restarted"
            )
            self.half.refuse(request_id, "changed_weights")
            return
        identity = self._identity(request)
        if produces and lora is not None:
            weights = identity.adapter[1] if identity is not None and identity.adapter is not None else None
            self._loras[request_id] = (lora, weights)
        prefilled = self.half.arrived(request_id, tokens, request.max_tokens, params, _prompt(request, identity))
        _cut(request, tokens - prefilled)

    def reset(self) -> None:
        """The weights may have changed. What arrived before is named by the old ones, so it is not handed over."""
        self._follow_weights()
        self._was_reset = True
        self.half.give_up_all()

    def lost_reset(self) -> bool:
        """A reset that failed: the weights may be others all the same, so nothing from before is handed over."""
        self._was_reset = True
        tried(self.half.give_up_all)
        return False

    def _follow_weights(self) -> None:
        """A version may come after requests that arrived while the engine was paused."""
        version = self._core.version()
        is_new, self._version = version != self._version, version
        if is_new or self._core.times_named != self._times_named:
            self._times_named, self._was_reset = self._core.times_named, False
        if is_new:
            self._cached.got_other_weights()
            self.half.give_up_all()
            if self._cached.are_mixed:
                logger.warning_once(
                    "KVFerryConnector: the weights have another version, and vLLM's cache has blocks of the weights "
                    "before: prompts of which something is cached are not handed over until the cache is reset (pause "
                    "with clear_cache, or POST /reset_prefix_cache, beside other connectors with ?reset_external=true; "
                    "connectors with a store of their own keep such blocks even then: see New weights in docs/vllm.md)"
                )

    def _identity(self, request: Any) -> PromptIdentity | None:
        """None if the request was rejected, or has neither token ids nor embeddings.

        A request that vLLM rejected ends here with its parameters and another prompt, so that prefill frees its blocks.
        """
        if getattr(request, "abort_immediately", False):
            return None
        if request.prompt_token_ids is None and getattr(request, "prompt_embeds", None) is None:
            return None
        return of_vllm_prompt(request, self._adapters, self._version)

    def refuse(self, request: Any) -> None:
        """The request is computed as if it had no parameters."""
        self._loras.pop(request.request_id, None)
        # Of others, `_ended` tells the half nothing.
        if request.kv_transfer_params:
            self.half.refuse(request.request_id, "internal")

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        self._follow_weights()
        if not _consumes(request):
            return 0, False
        tokens = self.half.matched(request.request_id, computed)
        return tokens, bool(tokens)

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        # Also for another connector beside this one: what it loads is cached without a step.
        self._cached.add()
        if (external or _consumes(request)) and self.half.waits_for_blocks(request.request_id):
            self.half.allocated(request.request_id, external, self._selected(blocks.get_block_ids()))

    def lost_blocks(self, request: Any, external: int) -> None:
        """`allocated` failed with this request, and vLLM waits for its load: it is fetched without a block, which each
        rank reports as a failed load.
        """
        if (external or _consumes(request)) and tried(self.half.waits_for_blocks, request.request_id):
            tried(self.half.allocated, request.request_id, external, [])

    def step(self, output: Any) -> KVFerryMetadata:
        self._follow_weights()
        if output.num_scheduled_tokens:
            self._cached.add()
        steps = functools.partial(self._steps, output)
        preempted = list(output.preempted_req_ids or ())
        data, computes, loads, endings = self.half.step_of(output.num_scheduled_tokens, steps, preempted)
        return KVFerryMetadata(data, computes, tuple(loads), tuple(endings))

    def _steps(self, output: Any, producing: dict[str, bool]) -> list[_Step]:
        """What the half must get of a step: see `SchedulerHalf.step_of`."""
        if self._cached.are_mixed or self._adapters.are_mixed:
            mixed = self._mixed(output, producing)
            if mixed:
                self.half.give_up(mixed)
            for request_id in mixed:
                del producing[request_id]
        steps: list[_Step] = []
        tokens = output.num_scheduled_tokens
        for new in output.scheduled_new_reqs:
            request_id = new.req_id
            if request_id in producing:
                blocks = self._selected(new.block_ids)
                steps.append((request_id, new.num_computed_tokens, tokens[request_id], True, blocks))
        cached = output.scheduled_cached_reqs
        for at, request_id in enumerate(cached.req_ids):
            if request_id not in producing:
                continue
            resumed = request_id in cached.resumed_req_ids
            if producing[request_id] or resumed:
                new_blocks = cached.new_block_ids[at]
                blocks = [[] for _ in self._rules] if new_blocks is None else self._selected(new_blocks)
                computed = cached.num_computed_tokens[at]
                steps.append((request_id, computed, tokens[request_id], resumed, blocks))
        return steps

    def _mixed(self, output: Any, producing: dict[str, bool]) -> list[str]:
        """Requests of the step whose cached blocks may be of earlier weights, of the model or of an adapter, which vLLM
        names by the adapter's name and path.
        """
        cached = output.scheduled_cached_reqs
        begin = [(it.req_id, it.num_computed_tokens) for it in output.scheduled_new_reqs]
        begin += [
            (it, computed)
            for it, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
            if it in cached.resumed_req_ids
        ]
        found = []
        for request_id, computed in begin:
            if not computed or request_id not in producing:
                continue
            lora, _ = self._loras.get(request_id, _NO_LORA)
            if self._cached.are_mixed or (lora is not None and self._adapters.may_be_mixed(lora)):
                found.append(request_id)
        return found

    def lost_step(self, output: Any) -> KVFerryMetadata:
        """Of a step that `step` failed with: what the half does not know it may not hand over, and what lost its blocks
        it may not offer any more.
        """
        self._cached.add()
        named = tried(lambda: [*output.num_scheduled_tokens, *(output.preempted_req_ids or ())])
        if named is None:
            tried(self.half.give_up_all)
        else:
            tried(self.half.give_up, named)
        rest = tried(self.half.step_of, {}, _no_steps, [])
        if rest is None:
            tried(self.half.give_up_all)
            return KVFerryMetadata(b"", False)
        data, computes, loads, endings = rest
        return KVFerryMetadata(data, computes, tuple(loads), tuple(endings))

    def reported(self, output: Any) -> None:
        """Each part for itself: what the half does not hear of a request would keep its blocks for ever."""
        meta = output.kv_connector_worker_meta
        if isinstance(meta, KVFerryWorkerMetadata):
            for rank, notes in meta.notes.items():
                tried(self.half.reported, rank, notes)
        for request_id in output.finished_sending or ():
            tried(self.half.sent, [request_id])
        for request_id in output.finished_recving or ():
            tried(self.half.received, [request_id])

    def finished(self, request: Any, blocks: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        """Never raises: vLLM frees the blocks of a request that is not held, whatever the half still offers."""
        lora = self._loras.pop(request.request_id, _NO_LORA)
        ended = tried(self._ended, request, lora, blocks)
        if ended is None:
            ended = tried(self._failed, request.request_id)
        if ended is None:
            return _produces(request), None
        held, answer = ended
        return held, tried(self._siblings.ended, request.request_id, answer)

    def _ended(
        self, request: Any, lora: tuple[Any, str | None], blocks: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        request_id, params = request.request_id, request.kv_transfer_params
        if not params:
            return False, None
        produces = _produces(request)
        reason: _Reason = _REASONS.get(request.status, "error")
        adapter, weights = lora
        if weights is not None and not self._adapters.still(adapter, weights):
            reason = "error"
        # A consumer's blocks say nothing.
        table = self._selected(blocks) if produces else None
        ended = self.half.finished(request_id, reason, table)
        if ended is None and (produces or _consumes(request)) and self._siblings.owns(request_id):
            # vLLM has rejected it before it arrived.
            prompt = _prompt(request, self._identity(request))
            self.half.arrived(request_id, request.num_prompt_tokens, request.max_tokens, params, prompt)
            ended = self.half.finished(request_id, reason, table)
        return ended or (False, None)

    def _failed(self, request_id: str) -> tuple[bool, dict[str, Any] | None]:
        """The end of a request that `_ended` failed with."""
        return self.half.finished(request_id, "error", None) or (False, None)

    def stats(self) -> KVFerryStats | None:
        taken = self.half.take_stats()
        gauges = KVFerryStats.gauges_of(self.half.gauges())
        if not taken and gauges == self._gauges:
            return None
        self._gauges = gauges
        return KVFerryStats.of_scheduler(taken or {}, gauges)

    def close(self) -> None:
        if self._bootstrap is not None:
            self._bootstrap.close()


def _no_steps(producing: dict[str, bool]) -> list[_Step]:
    return []


def _produces(request: Any) -> bool:
    """Whether a request asks to be handed over."""
    params = request.kv_transfer_params
    return isinstance(params, dict) and bool(params.get("do_remote_decode"))


def _consumes(request: Any) -> bool:
    """Whether a request asks to be loaded from another engine."""
    params = request.kv_transfer_params
    return isinstance(params, dict) and bool(params.get("do_remote_prefill"))


def _prompt(request: Any, identity: PromptIdentity | None) -> bytes | None:
    """What names a request's prompt in a handoff."""
    return None if identity is None else prompt_id(request.prompt_token_ids or [], identity.extra())


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
        # Returns the compute stream of the GPU. None for memory of the host.
        self._stream: Callable[[], Any] | None = None
        # A prefill's death fails all loads from it.
        self._say = Seldom(logger, "KVFerryConnector: ").say
        # All steps of an engine of another version.
        self._say_lost = Seldom(logger, "KVFerryConnector: ").say
        self._counts = AgentCounts()

    def register(self, kv_caches: dict[str, Any]) -> None:
        if self._agent is not None:
            raise UnsupportedCacheError(
                "KVFerryConnector: the KV caches of this worker were registered before; other engines know only the "
                "first ones, so start the engine anew"
            )
        place, self._rank = _place(self._config)
        found = storages(kv_caches)
        agent = Agent(
            f"vllm-{os.getpid()}-rank-{self._rank}",
            listen=self._settings.listen(),
            secret=self._settings.secret(),
            transports=self._settings.transports,
        )
        try:
            self._half = self._start(agent, kv_caches, found, place)
        except BaseException:
            agent.shutdown()
            raise
        self._agent = agent
        if self._settings.is_open_to_hosts(agent):
            logger.warning_once(
                "KVFerryConnector: every host that reaches %s can read the KV cache, and every host among the "
                "producers can have its own KV loaded; set a secret (secret_file in kv_connector_extra_config, or "
                "KVFERRY_SECRET_FILE) on all engines",
                agent.address,
            )

    def _start(self, agent: Agent, kv_caches: dict[str, Any], found: list[Any], place: Place) -> WorkerHalf:
        # Peers read the blocks of this rank. What is written here, this rank reads from its peers.
        device = found[0].device if found else None
        memory = [(it.address, it.nbytes) for it in found]
        if device is None:
            regions = agent.register_batch(memory, "r")
        else:
            regions = agent.register_batch(memory, "r", device=f"cuda:{device}")
            self._stream = compute_stream(device)
        numbers = [(region.id, it.address, it.nbytes) for region, it in zip(regions, found, strict=True)]
        facts = layer_facts(self._config, list(kv_caches), tp_size=place.tp_size)
        made = layout(kv_caches, self._caches, place, facts, numbers)
        self._layers = {name: at for at, name in enumerate(made.layers)}
        model = of_vllm(self._config, self._settings.model).properties()
        timeout = self._settings.timeout
        producers = self._settings.producers
        return WorkerHalf(
            agent,
            made.json,
            regions,
            rank=self._rank,
            timeout=timeout,
            model=model,
            producers=None if producers is None else list(producers),
        )

    def handshake(self) -> KVFerryHandshakeMetadata | None:
        if self._half is None or self._agent is None:
            return None
        return KVFerryHandshakeMetadata(self._half.card, self._agent.address, self._half.producers)

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
                # Loads write their blocks after the work that the stream has now: the last steps that used them.
                self._half.apply(metadata.data, self._launched(), loads=metadata.loads, endings=metadata.endings)
            except ValueError as error:
                # An exception here would end the engine. Where a step can't be read, the half hands over nothing of it
                # and of those before it. Only the first one says who the ranks are.
                self._say_lost(
                    "a step was not carried out as a whole; if it can't be read and was the first one, nothing is "
                    "handed over until the engine is restarted: %s",
                    error,
                )

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
            try:
                self._half.layer_computed(self._next_layer - 1, self._launched())
            except ValueError as error:
                # Nothing of the step may be announced without its event.
                self._give_up(str(error))

    def step_computed(self) -> None:
        if self._half is not None:
            try:
                self._half.step_computed(self._launched())
            except ValueError as error:
                self._give_up(str(error))

    def step_failed(self, raised: BaseException | None) -> None:
        if self._half is not None:
            self._half.step_failed(f"the forward pass raised {type(raised).__name__}")

    def _launched(self) -> Any:
        """The engine's stream, with the work of the layers and steps so far. None for memory of the host: there, layers
        and steps are computed when their calls return.
        """
        return None if self._stream is None else self._stream()

    def _give_up(self, why: str) -> None:
        assert self._half is not None
        logger.error("KVFerryConnector: the KV of the step is not handed over: %s", why)
        self._half.step_failed(why)

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
        counted = self._counts.take(self._agent)
        if not loads and not counted:
            return None
        stats = KVFerryStats()
        for (what, reason), number in counted.items():
            stats.count(what, reason, number)
        for request_id, seconds, nbytes, failure in loads:
            if failure is None:
                stats.loaded(seconds, nbytes)
            else:
                code, detail = failure
                stats.count("failed_loads", code)
                reason = f"{code}: {detail}" if detail else code
                self._say("the KV of request %s was not loaded: %s", request_id, reason)
        return stats

    def close(self) -> None:
        if self._half is not None:
            self._half.close()
        if self._agent is not None:
            self._agent.shutdown()


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
