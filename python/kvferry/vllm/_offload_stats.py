"""What `KVFerryOffloadingSpec` and `KVFerryTier` count, under the names that vLLM exports to Prometheus."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import LookupResult, OffloadingCounterMetadata, OffloadingGaugeMetadata

import kvferry
from kvferry.vllm._log import logger

_PREFIX = "vllm:kv_offload_kvferry_"
LOOKUPS = _PREFIX + "lookups"
PUT_BLOCKS = _PREFIX + "put_blocks"
LOADED_BLOCKS = _PREFIX + "loaded_blocks"
FAILED_LOADS = _PREFIX + "failed_loads"
PREFETCHES = _PREFIX + "prefetches"
_GAUGES_EVERY_S = 1.0
_REFUSALS = ("refused_no_space", "refused_contended", "refused_index_full", "refused_waiting")
# `refused` counts all refusals, each of the others one reason.
_OUTCOMES = ("stored", "present", "refused", "failed", *_REFUSALS)
# Names of `kvferry.Store.stats`.
_STORE_GAUGES = {
    "blocks": "Blocks on the disk.",
    "disk_bytes": "Bytes of the store's files.",
    "capacity_bytes": "Bytes that the store's files may have.",
    "processes": "Processes that have the store open.",
    "hanging_directories": "Directories of the store whose device does not answer.",
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


def count_put(stats: Any, put: Any) -> None:
    for outcome in _OUTCOMES:
        number = getattr(put, outcome)
        if number:
            stats.increase_counter(PUT_BLOCKS, number, (outcome,))


class SchedulerStats:
    """What the scheduler's side counts until vLLM takes it."""

    def __init__(self) -> None:
        self.counted = OffloadingConnectorStats()
        # Look-ups are too many for `counted` to take each of them.
        self.looked: Counter[LookupResult] = Counter()
        # Those that are not in `looked`.
        self.hits = 0
        self._gauges_at = -_GAUGES_EVERY_S

    def take(self, store: kvferry.Store | None) -> OffloadingConnectorStats | None:
        """`store`: None if it could not be opened."""
        now = time.monotonic()
        if now >= self._gauges_at + _GAUGES_EVERY_S:
            self._gauges_at = now
            try:
                _set_gauges(self.counted, store)
            except kvferry.Error as error:
                logger.debug("the store's statistics can't be read: %s", error)
        if self.hits:
            self.looked[LookupResult.HIT] += self.hits
            self.hits = 0
        for result, number in self.looked.items():
            self.counted.increase_counter(LOOKUPS, number, (result.name.lower(),))
        self.looked.clear()
        if self.counted.is_empty():
            return None
        taken, self.counted = self.counted, OffloadingConnectorStats()
        return taken


def _set_gauges(stats: Any, store: kvferry.Store | None) -> None:
    stats.set_gauge(_PREFIX + "is_open", int(store is not None))
    if store is not None:
        held = store.stats()
        for name in _STORE_GAUGES:
            stats.set_gauge(_PREFIX + name, held[name])
