"""What `KVFerryOffloadingSpec` and `KVFerryTier` count, under the names that vLLM exports to Prometheus."""

from __future__ import annotations

from collections import Counter
from typing import Any

from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata

_PREFIX = "vllm:kv_offload_kvferry_"
LOOKUPS = _PREFIX + "lookups"
PUT_BLOCKS = _PREFIX + "put_blocks"
LOADED_BLOCKS = _PREFIX + "loaded_blocks"
FAILED_LOADS = _PREFIX + "failed_loads"
PREFETCHES = _PREFIX + "prefetches"
# Names of `kvferry.Store.stats`.
_STORE_GAUGES = {
    "blocks": "Blocks on the disk.",
    "disk_bytes": "Bytes of the store's files.",
    "capacity_bytes": "Bytes that the store's files may have.",
    "processes": "Processes that have the store open.",
    "is_away": "1 while the object store does not answer.",
}


def metric_definitions() -> dict[str, Any]:
    gauges = {_PREFIX + name: OffloadingGaugeMetadata(documentation=about) for name, about in _STORE_GAUGES.items()}
    return {
        LOOKUPS: OffloadingCounterMetadata(
            documentation="Blocks that the scheduler looked up, by result.", labelnames=("result",)
        ),
        PUT_BLOCKS: OffloadingCounterMetadata(
            documentation="Blocks that were to be stored, per shard, by outcome.", labelnames=("outcome",)
        ),
        LOADED_BLOCKS: OffloadingCounterMetadata(documentation="Blocks that were loaded, per shard."),
        FAILED_LOADS: OffloadingCounterMetadata(
            documentation="Loads of a request that failed on a rank; the request is computed."
        ),
        PREFETCHES: OffloadingCounterMetadata(documentation="Prefetches from the object store that were begun."),
        _PREFIX + "is_open": OffloadingGaugeMetadata(documentation="0 if the store could not be opened."),
        **gauges,
    }


def count_lookups(stats: Any, looked: Counter[Any]) -> None:
    """Takes what was counted by vLLM's `LookupResult`. Look-ups are too many for `stats` to take each of them."""
    for result, number in looked.items():
        stats.increase_counter(LOOKUPS, number, (result.name.lower(),))
    looked.clear()


def count_put(stats: Any, put: Any) -> None:
    for outcome in ("stored", "present", "refused", "failed"):
        number = getattr(put, outcome)
        if number:
            stats.increase_counter(PUT_BLOCKS, number, (outcome,))


def set_gauges(stats: Any, store: Any | None) -> None:
    """`store`: None if it could not be opened."""
    stats.set_gauge(_PREFIX + "is_open", int(store is not None))
    if store is not None:
        held = store.stats()
        for name in _STORE_GAUGES:
            stats.set_gauge(_PREFIX + name, held[name])
