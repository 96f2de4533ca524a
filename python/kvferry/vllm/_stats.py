"""What `KVFerryConnector` counts, for vLLM's log and for Prometheus."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from kvferry import Agent, Error
from kvferry.connector import counted_reasons

# Seconds, and bytes from 64 KiB to 64 GiB.
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_BYTES = tuple(float(2**power) for power in range(16, 37, 2))


_REASONED = {
    "failed_loads": "Loads of a request's KV that failed, per rank, by reason.",
    "refused_requests": "Requests whose parameters ask for a handoff, but that get none, by reason.",
    "withdrawn_offers": "Requests of a prefill whose KV was withdrawn, by reason.",
    "fallbacks": "Transfers of a rank within the host that did not go over local, by reason.",
    "gpu_bytes": "Bytes that the rank's process copied from GPUs (out) and to them (in).",
    "gpu_calls": "Calls of the driver in the rank's process that copied memory of GPUs, by method.",
    "gpu_failures": "What GPUs or their driver refused or failed in the rank's process, by reason.",
}
# The label of those that have no reason.
_LABELS = {"gpu_bytes": "direction", "gpu_calls": "method"}
# By the name in `Agent.stats`, without the GPU's number: the metric, and the value of its label.
_OF_AGENTS = {
    **{f"fallbacks_{it}": ("fallbacks", it) for it in ("peer_device", "out_of_reach", "unlisted")},
    **{f"gpu_bytes_{it}": ("gpu_bytes", it) for it in ("out", "in")},
    **{f"gpu_{it}_calls": ("gpu_calls", it) for it in ("single", "batch", "kernel", "gather")},
    **{
        f"gpu_{it}": ("gpu_failures", it)
        for it in (
            *(f"kernel_refused_{reason}" for reason in ("old", "jit", "launch", "memory", "table")),
            *(f"unpinned_{reason}" for reason in ("memory", "registered", "other")),
            "failed",
            "leaked",
            "lost",
        )
    },
}
# Seconds between two looks at the counters of an agent.
_LOOK_EVERY_S = 1.0
# By the name in `SchedulerHalf.gauges`, which are as they were when something was counted last.
_GAUGES = {
    "held_blocks": "Blocks of ended requests that a prefill holds for decodes.",
    "waiting_loads": "Loads of a decode whose prefill has not answered.",
}
_PLAIN = {
    "offered_requests": "Requests of a prefill that ended and whose KV is handed over.",
    "offered_tokens": "Tokens of these requests.",
    "loaded_tokens": "Tokens of a decode's requests whose KV was loaded.",
    "freed_requests": "Requests of a decode whose KV at the prefill was not needed.",
}


class AgentCounts:
    """What the agent of a rank and its GPUs count, as vLLM takes it: the growth since the last time."""

    def __init__(self) -> None:
        self._before: dict[str, int] = {}
        self._due = 0.0

    def take(self, agent: Agent | None) -> Counter[tuple[str, str]]:
        """Numbers by metric and value of its label. None within a second of the last look."""
        grown: Counter[tuple[str, str]] = Counter()
        now = time.monotonic()
        if agent is None or now < self._due:
            return grown
        self._due = now + _LOOK_EVERY_S
        try:
            counters = agent.stats()
        except Error:
            return grown  # It is shut down.
        for name, value in counters.items():
            metric = _OF_AGENTS.get(re.sub(r"^gpu\d+_", "gpu_", name))
            if metric is not None:
                before = self._before.get(name, 0)
                # A GPU without registered memory forgets what it has counted.
                number = value - before if value >= before else value
                if number:
                    grown[metric] += number
        self._before = counters
        return grown


class KVFerryStats(KVConnectorStats):  # type: ignore[misc]
    """`data`: lists with an item per load that succeeded, counts by reason, plain counts, and gauges."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.reset()
        self.data.update(data or {})

    def reset(self) -> None:
        reasoned: dict[str, Any] = {name: {} for name in _REASONED}
        plain = dict.fromkeys(_PLAIN, 0)
        # Only the scheduler's side has gauges.
        self.data: dict[str, Any] = {"load_seconds": [], "load_bytes": [], **reasoned, **plain, "gauges": {}}

    def loaded(self, seconds: float, nbytes: int) -> None:
        self.data["load_seconds"].append(seconds)
        self.data["load_bytes"].append(nbytes)

    def count(self, what: str, reason: str, number: int = 1) -> None:
        """`what`: one of `_REASONED`."""
        counts = self.data[what]
        counts[reason] = counts.get(reason, 0) + number

    def aggregate(self, other: KVConnectorStats) -> KVFerryStats:
        for name, values in other.data.items():
            if name == "gauges":
                self.data[name] = {**self.data[name], **values}
            elif isinstance(values, dict):
                for reason, number in values.items():
                    self.count(name, reason, number)
            else:
                # Lists grow, and numbers are added up.
                self.data[name] += values
        return self

    def reduce(self) -> dict[str, int | float]:
        seconds, sizes = self.data["load_seconds"], self.data["load_bytes"]
        reduced: dict[str, int | float] = {"loads": len(seconds)}
        if seconds:
            ordered = sorted(seconds)
            reduced["median load (ms)"] = round(ordered[len(ordered) // 2] * 1e3, 3)
            reduced["longest load (ms)"] = round(ordered[-1] * 1e3, 3)
            reduced["loaded (MiB)"] = round(sum(sizes) / 2**20, 3)
        for what in _PLAIN:
            if self.data[what]:
                reduced[what.replace("_", " ")] = self.data[what]
        for what in _REASONED:
            for reason, number in sorted(self.data[what].items()):
                reduced[f"{what.replace('_', ' ')}: {reason}"] = number
        for what, number in self.data["gauges"].items():
            if number:
                reduced[what.replace("_", " ")] = number
        return reduced

    def is_empty(self) -> bool:
        return not any(self.data.values())

    @staticmethod
    def gauges_of(gauges: dict[str, int]) -> dict[str, int]:
        """`gauges`: from `SchedulerHalf.gauges`."""
        return {name: gauges[name] for name in _GAUGES}

    @staticmethod
    def of_scheduler(taken: dict[str, Any], gauges: dict[str, int]) -> KVFerryStats:
        """`taken`: from `SchedulerHalf.take_stats`, or empty. How loads ended is counted where they end, per rank."""
        stats = KVFerryStats({"gauges": gauges})
        if taken:
            stats.data["refused_requests"] = taken["refused"]
            stats.data["withdrawn_offers"] = taken["withdrawn"]
            stats.data["offered_requests"] = taken["offered"]
            stats.data["offered_tokens"] = taken["offered_tokens"]
            stats.data["loaded_tokens"] = taken["fetched_tokens"]
            stats.data["freed_requests"] = taken["freed"]
        return stats


class KVFerryPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The counters, gauges and histograms ``vllm:kvferry_*``."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)

        def histogram(name: str, documentation: str, buckets: Iterable[float]) -> Any:
            made = self._histogram_cls(
                name=f"vllm:kvferry_{name}", documentation=documentation, buckets=buckets, labelnames=labelnames
            )
            return create_metric_per_engine(made, self.per_engine_labelvalues)

        def counter(name: str, documentation: str, *more: str) -> Any:
            return self._counter_cls(
                name=f"vllm:kvferry_{name}", documentation=documentation, labelnames=[*labelnames, *more]
            )

        self._seconds = histogram(
            "load_seconds", "Seconds from the first read of a request's KV to its last, per rank.", _SECONDS
        )
        self._bytes = histogram("load_bytes", "Bytes of KV that a request loaded, per rank.", _BYTES)
        self._reasoned = {name: counter(name, about, _LABELS.get(name, "reason")) for name, about in _REASONED.items()}
        self._plain = {
            name: create_metric_per_engine(counter(name, about), self.per_engine_labelvalues)
            for name, about in _PLAIN.items()
        }
        self._gauges = {
            name: create_metric_per_engine(
                self._gauge_cls(
                    name=f"vllm:kvferry_{name}",
                    documentation=about,
                    multiprocess_mode="mostrecent",
                    labelnames=labelnames,
                ),
                self.per_engine_labelvalues,
            )
            for name, about in _GAUGES.items()
        }
        # A series that begins with its first count has no rate() for it.
        counted = [(name, reason) for name, reasons in counted_reasons().items() for reason in reasons]
        for name, reason in (*counted, *_OF_AGENTS.values()):
            for labelvalues in self.per_engine_labelvalues.values():
                self._reasoned[name].labels(*labelvalues, reason)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for seconds in transfer_stats_data["load_seconds"]:
            self._seconds[engine_idx].observe(seconds)
        for nbytes in transfer_stats_data["load_bytes"]:
            self._bytes[engine_idx].observe(nbytes)
        for name, metric in self._reasoned.items():
            for reason, number in transfer_stats_data[name].items():
                metric.labels(*self.per_engine_labelvalues[engine_idx], reason).inc(number)
        for name, plain in self._plain.items():
            plain[engine_idx].inc(transfer_stats_data[name])
        for name, number in transfer_stats_data["gauges"].items():
            self._gauges[name][engine_idx].set(number)
