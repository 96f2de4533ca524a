"""All that kvferry overrides or reads of SGLang, looked up where the storage starts."""

from __future__ import annotations

import functools
import importlib.metadata
import logging

from kvferry._engine_names import check, missing_hooks, missing_names

# The versions that `e2e/run --parts sglang` ran with.
TRIED = ("0.5.23",)

_READ = {
    "sglang.srt.mem_cache.hicache_storage": (
        *(
            f"HiCacheStorageConfig.{name}"
            for name in (
                "tp_rank",
                "tp_size",
                "pp_rank",
                "pp_size",
                "attn_cp_rank",
                "attn_cp_size",
                "is_mla_model",
                "enable_storage_metrics",
                "model_name",
                "extra_config",
            )
        ),
        "PoolHitPolicy",
        "PoolName.KV",
        "PoolName.DRAFT",
        "PoolTransferResult",
    ),
    "sglang.srt.mem_cache.pool_host": (
        "HostKVCache.page_size",
        "HostKVCache.size",
    ),
    "sglang.srt.observability.metrics_collector": ("StorageMetrics",),
}


@functools.cache
def check_storage() -> None:
    """Raises `kvferry._engine_names.EngineError`."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

    from kvferry.sglang._storage import KVFerryStorage

    hooks = missing_hooks(KVFerryStorage, (HiCacheStorage,), ("store_stats", "close"))
    read = [name for module, names in _READ.items() for name in missing_names(module, *names)]
    check("SGLang", version(), TRIED, [*hooks, *read], logging.getLogger("kvferry.sglang"))


def version() -> str:
    """SGLang's version."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
