"""`KVFerryTier`: kvferry's store as a secondary tier of vLLM's tiering. See docs/storage.md.

``"kv_connector_extra_config":{"spec_name":"TieringOffloadingSpec","cpu_bytes_to_use":…,"secondary_tiers":[{"type":
"KVFerryTier","module_path":"kvferry.vllm","disk":"/var/cache/kv","disk_gib":200}]}``

vLLM copies pages between the device and its primary tier in host memory. This tier copies between that memory and the
store. All of it runs in the scheduler's process, and no call waits but `drain_jobs` and `shutdown`.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    RequestOffloadingContext,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

import kvferry
from kvferry._engine.identity import fingerprint
from kvferry._engine.identity.core import Cached, core_of_callers
from kvferry._engine.identity.known import plain
from kvferry._engine.identity.vllm import (
    caches_of_callers,
    check_media_are_named,
    check_weights_are_named,
    of_vllm,
    processor,
    vllm_config_of_callers,
)
from kvferry._engine.jobs import hurried, runs, settled
from kvferry._engine.settings import StoreSettings
from kvferry._engine.store import PUT_TURN_S, open_store
from kvferry.vllm import _offload_stats as counters
from kvferry.vllm._guard import store_guarded
from kvferry.vllm._layout import has_channels_first
from kvferry.vllm._log import logger
from kvferry.vllm._of_vllm import check_tier
from kvferry.vllm._offload_adapters import RequestNames, StoredAdapters, by_group
from kvferry.vllm._offload_events import StoreEvents
from kvferry.vllm._offload_keys import Keys
from kvferry.vllm._offload_layout import specs_of
from kvferry.vllm._offload_retention import Limits, Plan, Plans
from kvferry.vllm._settings import store_settings

# Blocks that were found and could not be read are missed for so long, and so many are remembered.
_UNREADABLE_S = 60.0
_UNREADABLE_MAX = 65_536
_guarded = store_guarded("KVFerryTier")
# Names the tier in vLLM's events.
_OWNERSHIP = "kvferry"
# Prefetches of a request, per group of layers.
_PREFETCHES_MAX = 8


@dataclass
class _Asked:
    """What is known of a request, in vLLM's context of it."""

    plan: Plan
    keys: Keys
    names: RequestNames
    # By group and the key of the first block.
    prefetches: dict[int, dict[bytes, Any]] = field(default_factory=dict)


@dataclass
class _Run:
    """Blocks of a job that one operation of the store carries out."""

    pending: Any
    keys: list[bytes]
    chunks: list[int]


@dataclass
class _Job:
    is_load: bool
    keys: list[bytes]
    names: RequestNames
    began: float = field(default_factory=time.monotonic)
    runs: list[_Run] = field(default_factory=list)
    done: list[bytes] = field(default_factory=list)


class KVFerryTier(SecondaryTierManager):  # type: ignore[misc]
    """Settings are those of `KVFerryOffloadingSpec`, `locality`, and `enable_kv_events`."""

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        locality: str | None = None,
        enable_kv_events: bool = False,
        **settings: Any,
    ) -> None:
        check_tier()
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = Locality(locality) if locality is not None else None
        self._settings = store_settings(settings, "secondary_tiers")
        _check_parallelism(offloading_spec.config, self._settings)
        vllm_config = vllm_config_of_callers()
        self._layout = _fingerprint(offloading_spec.config, self.block_size_bytes, vllm_config, caches_of_callers())
        self._model = _model(self._settings, vllm_config)
        self._opened = open_store(self._settings, self._settings.host_bytes, logger)
        self._region: Any = None
        if self._opened is not None:
            self._region = self._opened.agent.register(_range(primary_kv_view), "none")
        each = offloading_spec.config.cache.blocks_per_chunk
        self._tokens = {it.group_id: it.tokens_per_block * each for it in offloading_spec.config.groups}
        # Empty, or a salt since the cache was reset.
        self._tenant = b""
        self._spaces: dict[int, Any] = {}
        self._core = core_of_callers()
        self._adapters = StoredAdapters(self._core, vllm_config)
        self._events: StoreEvents | None = None
        if self._opened is not None and enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events:
            locality = Locality.LOCAL if self.locality is None else self.locality
            self._events = StoreEvents(
                self._opened, locality=locality, ownership=_OWNERSHIP, hashes_of=self._adapters.hashes
            )
            self._events.watch({number: [self._space(number)] for number in self._tokens})
        self._jobs: dict[int, _Job] = {}
        # Keys that can't be read, each with the time until which it is missed.
        self._unreadable: OrderedDict[bytes, float] = OrderedDict()
        self._stats = counters.SchedulerStats()
        self._plans = Plans(Limits.of_store(self._settings), "KVFerryTier", logger)
        self._version = self._core.version()
        self._core.on_named(self._follow_weights)
        # With vLLM's tier in host memory.
        self._cached = Cached(self._core)

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return counters.metric_definitions()

    def _space(self, number: int) -> Any | None:
        space = self._spaces.get(number)
        if space is None and self._opened is not None:
            space = self._opened.store.space(self._model, layout=self._layout, tenant=self._tenant, group=number)
            self._spaces[number] = space
        return space

    # Requests and look-ups.

    def _asked(self, req_context: Any) -> _Asked:
        asked: _Asked | None = req_context.get_state(_Asked)
        if asked is None:
            plan = self._plans.of(req_context.kv_transfer_params)
            asked = _Asked(plan, Keys(self._tokens), self._adapters.of_request())
            req_context.set_state(asked)
        return asked

    @_guarded(lambda self, _: RequestOffloadingContext())
    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        self._asked(req_context)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        asked: _Asked | None = req_context.get_state(_Asked)
        if asked is not None:
            asked.prefetches.clear()

    def on_schedule_end(self, context: Any) -> None:
        self._cached.step_of_callers()

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        result = self._lookup(key, req_context)
        self._stats.looked[result] += 1
        return result

    @_guarded(lambda self, *_: LookupResult.MISS)
    def _lookup(self, key: bytes, req_context: Any) -> LookupResult:
        until = self._unreadable.get(key)
        if until is not None:
            if time.monotonic() < until:
                return LookupResult.MISS
            del self._unreadable[key]
        number = get_offload_group_idx(key)
        space = self._space(number)
        if space is None:
            return LookupResult.MISS
        try:
            asked = self._asked(req_context)
            # Asked before the index: a prefetch that ends between the two has its blocks looked up once more.
            runs = any(not pending.done() for pending in asked.prefetches.get(number, {}).values())
            if space.lookup(asked.names.of([key])):
                return LookupResult.HIT
            if runs or (self._settings.object is not None and self._prefetch(key, number, space, req_context)):
                return LookupResult.RETRY
        except kvferry.Error as error:
            logger.debug("a block can't be looked up: %s", error)
        return LookupResult.MISS

    def _prefetch(self, key: bytes, number: int, space: Any, req_context: Any) -> bool:
        """Begins a prefetch from the object store, while none of the group runs, and says whether it has."""
        asked = self._asked(req_context)
        begun = asked.prefetches.setdefault(number, {})
        if key in begun or len(begun) >= _PREFETCHES_MAX:
            return False
        asked.keys.update(req_context)
        keys = asked.keys.of(number, key)
        begun[key] = space.prefetch_async(asked.names.of(keys))
        self._stats.counted.increase_counter(counters.PREFETCHES)
        return True

    @_guarded(lambda self, *_: None)
    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        names = self._asked(req_context).names
        with suppress(kvferry.Error):
            for key in keys:
                space = self._space(get_offload_group_idx(key))
                if space is not None:
                    space.touch(names.of([key]))

    # Jobs.

    @_guarded(lambda self, job: self._lost(job, is_load=False))
    def submit_store(self, job_metadata: Any) -> None:
        keys = list(job_metadata.keys)
        chunks = dict(zip(keys, job_metadata.chunk_ids.tolist(), strict=True))
        context = job_metadata.req_context
        asked = self._asked(context)
        job = self._jobs[job_metadata.job_id] = _Job(False, keys, asked.names)
        asked.keys.update(context)
        for key in keys:
            self._unreadable.pop(key, None)
        self._cached.add()
        if not self._may_store(asked):
            return
        with suppress(kvferry.Error):
            for number, of_group in by_group(keys):
                self._put(job, number, of_group, chunks, asked, context)

    def _may_store(self, asked: _Asked) -> bool:
        """Whether the request's KV is computed with the weights of its names. vLLM gives a tier blocks that were in its
        own cache, too, and those of a copy to host memory that began before the weights changed.
        """
        if self._cached.are_mixed:
            logger.warning_once(
                "KVFerryTier: the weights are others, or may be, and vLLM's cache has blocks of the weights before: "
                "nothing is stored until the cache is reset with its connectors (pause with clear_cache, or POST "
                "/reset_prefix_cache?reset_external=true; beside connectors and tiers with a store of their own not "
                "even then: see New weights in docs/vllm.md)"
            )
            return False
        return asked.names.may_store(is_computed=True)

    def _put(
        self, job: _Job, number: int, keys: list[bytes], chunks: dict[bytes, int], asked: _Asked, context: Any
    ) -> None:
        """Blocks that follow each other in the prompt, with one retention, are a put."""
        space = self._space(number)
        if space is None:
            return
        ends = {key: context.get_offload_key_position(key) for key in keys}
        kept = {key: asked.plan.at(end - 1) if end else asked.plan.otherwise for key, end in ends.items()}

        def follows(last: bytes, key: bytes) -> bool:
            return asked.keys.parent(number, key) == last and kept[key] == kept[last]

        for run in runs(sorted(keys, key=asked.keys.place), follows):
            parent = asked.keys.parent(number, run[0])
            hashes = asked.names.of([parent, *run] if parent is not None else run)
            numbers = [chunks[key] for key in run]
            first = len(hashes) - len(run)
            put = space.put_async(hashes, self._memory(numbers), first, wait=PUT_TURN_S, **vars(kept[run[0]]))
            job.runs.append(_Run(put, run, numbers))

    def _memory(self, chunks: list[int]) -> kvferry.Blocks:
        return kvferry.Blocks(self._region, [chunk * self.block_size_bytes for chunk in chunks], self.block_size_bytes)

    @_guarded(lambda self, job: self._lost(job, is_load=True))
    def submit_load(self, job_metadata: Any) -> None:
        keys = list(job_metadata.keys)
        names = self._asked(job_metadata.req_context).names
        job = self._jobs[job_metadata.job_id] = _Job(True, keys, names)
        # Also in a step without tokens, where a request waits for what it loads.
        self._cached.add()
        chunks = dict(zip(keys, job_metadata.chunk_ids.tolist(), strict=True))
        for _, of_group in by_group(keys):
            self._get(job, of_group, [chunks[key] for key in of_group])

    def _get(self, job: _Job, keys: list[bytes], chunks: list[int]) -> None:
        space = self._space(get_offload_group_idx(keys[0]))
        if space is not None:
            with suppress(kvferry.Error):
                pending = space.get_async(job.names.of(keys), self._memory(chunks))
                job.runs.append(_Run(pending, keys, chunks))

    def _lost(self, job_metadata: Any, *, is_load: bool) -> None:
        """vLLM waits for a job that could not be begun: it ends without the blocks that were not."""
        if job_metadata.job_id not in self._jobs:
            names = RequestNames(None, None, is_known=False)
            self._jobs[job_metadata.job_id] = _Job(is_load, list(job_metadata.keys), names)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        finished = []
        for job_id, job in list(self._jobs.items()):
            for run in [it for it in job.runs if it.pending.done()]:
                job.runs.remove(run)
                self._end(job, run)
            if not job.runs:
                del self._jobs[job_id]
                finished.append(self._result(job_id, job))
        return finished

    def _end(self, job: _Job, run: _Run) -> None:
        try:
            outcome = run.pending.wait()
        except Exception as error:
            # It would end the engine.
            logger.warning_once("blocks can't be read from or written to the store: %r", str(error))
            outcome = None
        if not job.is_load:
            if outcome is not None:
                counters.count_put(self._stats.counted, outcome)
                if not outcome.refused and not outcome.failed:
                    job.done += run.keys
            return
        here = int(outcome or 0)
        job.done += run.keys[:here]
        if here < len(run.keys):
            self._unreadable[run.keys[here]] = time.monotonic() + _UNREADABLE_S
            while len(self._unreadable) > _UNREADABLE_MAX:
                self._unreadable.popitem(last=False)
            if outcome is not None and here + 1 < len(run.keys):
                # Those behind the one that is missing may be there.
                self._get(job, run.keys[here + 1 :], run.chunks[here + 1 :])

    def _result(self, job_id: int, job: _Job) -> JobResult:
        if job.is_load:
            self._stats.counted.increase_counter(counters.LOADED_BLOCKS, len(job.done))
            if len(job.done) < len(job.keys):
                self._stats.counted.increase_counter(counters.FAILED_LOADS)
        if job.done and self._events is not None:
            # Also what was loaded: another engine, or a start before, may have stored it.
            for number, of_group in by_group(job.done):
                self._events.know(number, self._adapters.report(job.names, of_group))
        complete = len(job.done) == len(job.keys)
        return JobResult(
            job_id,
            complete,
            successful_keys=tuple(job.done) if job.is_load and job.done and not complete else None,
            transfer_time=time.monotonic() - job.began,
            transfer_bytes=len(job.done) * self.block_size_bytes,
        )

    def drain_jobs(self) -> None:
        """vLLM 0.32 calls it only where it resets its cache, as for new weights, and tells a tier no more of it. So
        puts that do not begin soon are cancelled: nothing would find their blocks.
        """
        hurried(run.pending for job in self._jobs.values() for run in job.runs)
        self._drain()
        self._take_other_names()

    def _follow_weights(self) -> None:
        """The engine was given the version of its weights. A store outlives it, and another training may give other
        weights the same version, so blocks of another one have names that nobody else has.
        """
        version = self._core.version()
        if version != self._version:
            self._version = version
            self._take_other_names()

    def _take_other_names(self) -> None:
        """The weights are others, or may be. Nothing is stored before vLLM's cache was emptied, too."""
        self._cached.got_other_weights()
        self._tenant = os.urandom(16)
        self._spaces.clear()
        self._unreadable.clear()
        if self._events is not None and self._opened is not None:
            self._events.watch({number: [self._space(number)] for number in self._tokens})

    def _drain(self) -> None:
        for job in self._jobs.values():
            while True:
                settled(run.pending for run in job.runs)
                again = [run for run in job.runs if job.is_load]
                if not again:
                    break
                # What is behind a missing block is asked for only now.
                job.runs = []
                for run in again:
                    self._end(job, run)

    # The rest of vLLM's contract.

    def take_events(self) -> Iterable[OffloadingEvent]:
        return self._events.take() if self._events is not None else ()

    def has_pending_work(self) -> bool:
        # vLLM publishes events in a step only.
        return self._events is not None and self._events.are_ready

    def get_stats(self) -> OffloadingConnectorStats | None:
        return self._stats.take(self._opened.store if self._opened else None)

    def shutdown(self) -> None:
        self._drain()
        if self._opened is not None:
            opened, self._opened = self._opened, None
            self._spaces.clear()
            opened.store.close()
            if self._events is not None:
                self._events.close()
            opened.agent.unregister(self._region)
            opened.agent.shutdown()


def _model(settings: StoreSettings, config: Any | None) -> str:
    """What names the weights. vLLM gives a tier the model's name only."""
    if config is not None:
        check_media_are_named(config, "KVFerryTier")
        check_weights_are_named(config, settings.model, "KVFerryTier")
        return of_vllm(config, settings.model).text()
    if settings.model is None:
        raise ValueError(
            "KVFerryTier: the engine's configuration is out of reach, so that its weights can't be named; set model in "
            "secondary_tiers to a name that says the weights and all that changes their KV, and do not combine "
            "--no-enable-prefix-caching with --mm-processor-cache-gb 0"
        )
    return settings.model


def _range(view: memoryview) -> tuple[int, int]:
    """Where the memory of the primary tier is. Its owner keeps it until the tier is shut down."""
    flat = view.cast("B") if view.ndim != 1 or view.format != "B" else view
    held = (ctypes.c_char * flat.nbytes).from_buffer(flat)
    try:
        return ctypes.addressof(held), flat.nbytes
    finally:
        # vLLM releases its view before the memory, which needs that nothing else refers to it.
        del held
        if flat is not view:
            flat.release()


def _fingerprint(config: Any, row_bytes: int, vllm_config: Any | None, caches: Any | None = None) -> bytes:
    """What the bytes of a row of the primary tier depend on. `caches`: vLLM's specs of the cache; None: not known."""
    device = getattr(getattr(vllm_config, "device_config", None), "device_type", None)
    parallel = config.parallel
    parts = {
        "v": 3,
        "processor": processor() if device == "cpu" else None,
        "bytes": row_bytes,
        "dtype": config.model.dtype,
        "layout": config.kv_cache_layout,
        "canonical": config.canonical_layout,
        "tokens": [group.tokens_per_block for group in config.groups],
        "layers": [list(group.layer_names) for group in config.groups],
        "blocks": config.cache.blocks_per_chunk,
        "hash": config.cache.tokens_per_hash,
        "ranks": None
        if _is_portable(config)
        else [parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size, parallel.world_size],
    }
    orders = _orders(config, vllm_config, caches)
    if orders is not None:
        parts["orders"] = orders
    channels_first = [has_channels_first(spec) for group in config.groups for spec in specs_of(caches, group)]
    if any(channels_first):
        parts["states"] = channels_first
    if parallel.pp_size > 1:
        # The layers above are those of the first stage.
        parts["stages"] = os.environ.get("VLLM_PP_LAYER_PARTITION")
    return fingerprint(parts)


def _orders(config: Any, vllm_config: Any | None, caches: Any | None) -> list[Any] | None:
    """What says in which order a page has its elements, where that is not the order of most attention backends.

    Backends with an order of their own say in the specs that a page has K and V apart. Which order it is within K and V
    they do not say: there they count with all that vLLM chooses one of them by.
    """
    specs = [spec for group in config.groups for spec in specs_of(caches, group)]
    apart = [[getattr(it, name, None) for name in ("num_head_slots", "state_content_bytes")] for it in specs]
    attention = getattr(vllm_config, "attention_config", None)
    chosen = [plain(getattr(attention, name, None)) for name in ("backend", "backend_per_kind")]
    if caches is not None and all(slots is None for slots, _ in apart):
        return None
    if caches is None and not any(chosen):
        return None
    rocm = {name: value for name, value in os.environ.items() if name.startswith("VLLM_ROCM_")}
    torch = sys.modules.get("torch")
    return [apart, *chosen, rocm, str(getattr(getattr(torch, "version", None), "hip", None))]


def _is_portable(config: Any) -> bool:
    """Whether engines of another tensor parallelism have the same rows.

    vLLM 0.32 says so of all layouts of full attention. Without its canonical layout, a row has what one rank has after
    what another rank has, and these are the bytes of an engine of one rank only where heads come before layers.
    """
    if config.replicated_layout:
        return True
    is_in_order = config.kv_cache_layout == "BHLNC" and config.parallel.pp_size == 1
    return bool(config.parallel.is_parallelism_agnostic and (config.canonical_layout or is_in_order))


def _check_parallelism(config: Any, settings: StoreSettings) -> None:
    """Raises ValueError where engines that differ in what vLLM does not tell a tier would find each other's rows."""
    parallel = config.parallel
    if parallel.dcp_size * parallel.pcp_size > 1 and settings.model is None:
        raise ValueError(
            "KVFerryTier: with context parallelism, a block's tokens are spread over the ranks by "
            "cp_kv_cache_interleave_size, which vLLM does not tell a tier; set model in secondary_tiers to a name that "
            "says the model, its revision and this size"
        )
