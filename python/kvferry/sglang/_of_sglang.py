"""All that kvferry overrides or reads of SGLang, looked up where the storage starts."""

from __future__ import annotations

import functools

from kvferry._engine.hooks import Names, check, installed, missing_hooks, missing_in
from kvferry._engine.hooks import names_of as _of
from kvferry._engine.identity import known
from kvferry._engine.log import logger_of

# The versions that `e2e/run --parts sglang` ran with.
TRIED = ("0.5.23",)

_MEM_CACHE = "sglang.srt.mem_cache"

# By module: classes, functions, or `Class.attribute`.
_READ: Names = {
    "sglang.srt.runtime_context": ("get_server_args",),
    "sglang.srt.server_args": _of("ServerArgs", " ".join(sorted(known.SGLANG.named))),
    f"{_MEM_CACHE}.hicache_storage": (
        *_of(
            "HiCacheStorageConfig",
            """tp_rank tp_size tp_lcm_size pp_rank pp_size attn_cp_rank attn_cp_size dcp_rank dcp_size is_mla_model
            should_split_heads is_storage_writer logical_page_size enable_storage_metrics model_name extra_config""",
        ),
        "HiCacheStorageExtraInfo.prefix_keys",
        *_of("PoolHitPolicy", "ALL_PAGES BLOCK_GROUPS"),
        *_of("PoolName", "KV DRAFT MAMBA"),
        *_of("PoolTransfer", "name keys host_indices hit_policy block_pages group_pages"),
        "PoolTransferResult",
    ),
    f"{_MEM_CACHE}.kv_cache_dtype": ("fp8_dtype",),
    "sglang.srt.observability.metrics_collector": ("StorageMetrics",),
}
# Of host pools, each by a class that has it. The kinds of pools have different ones: a pool without one is named, and
# stored, without.
_READ_OF_POOLS: Names = {
    f"{_MEM_CACHE}.device_pool_info": ("MHABufferInfo.buffers", "KVBuffers.layout"),
    f"{_MEM_CACHE}.pool_host.base": _of("HostKVCache", "page_size size layout dtype storage_format_tag dcp_size"),
    f"{_MEM_CACHE}.pool_host.mha": _of(
        "MHATokenToKVPoolHost",
        """kv_buffer head_num head_dim layer_num target_layer_num get_hybrid_pool_buffer get_page_buffer_meta
        get_split_heads_page_buffer_meta""",
    ),
    f"{_MEM_CACHE}.pool_host.mla": _of("MLATokenToKVPoolHost", "kv_lora_rank qk_rope_head_dim kv_cache_dim"),
    f"{_MEM_CACHE}.pool_host.mamba": _of("MambaPoolHost", "temporal_dtype conv_dtype conv_state_shapes"),
}
# What SGLang 0.5.23 has in some pools alone, and what is found otherwise where no pool has it.
OPTIONAL = {
    "v_head_dim": "pools with values of another size",
    "v_buffer": "pools with keys and values apart",
    "start_layer": "pools of a stage of a pipeline",
    "end_layer": "pools of a stage of a pipeline",
    "device_pool": "pools of which a device has a copy",
    "kv_cache_layout": "pools of a device with heads",
    "_buffer_infos": "host pools of keys and values, since 0.5.23",
    "shared_allocation_domain": "UnifiedPageEnvelopeHostPool, since 0.5.23",
}


@functools.cache
def check_storage() -> None:
    """Raises `kvferry._engine.hooks.EngineError`."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

    from kvferry.sglang._storage import KVFerryStorage

    hooks = missing_hooks(KVFerryStorage, (HiCacheStorage,), ("store_stats", "close"))
    check("SGLang", version(), TRIED, [*hooks, *missing()], logger_of("sglang"))


def missing() -> list[str]:
    """The names that this SGLang lacks."""
    return missing_in(_READ, _READ_OF_POOLS)


def version() -> str:
    """SGLang's version."""
    return installed("sglang") or "not installed"
