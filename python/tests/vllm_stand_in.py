"""Modules with the names that `kvferry.vllm._connector` imports from vLLM, so that its scheduler's side runs without vLLM.

What vLLM itself does with the connector is tried with vLLM: `e2e/run`.
"""

from __future__ import annotations

import enum
import logging
import sys
from collections import Counter
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # bench/scheduler has no pytest.
    import pytest

_V1 = "vllm.distributed.kv_transfer.kv_connector.v1"


class RequestStatus(enum.Enum):
    FINISHED_LENGTH_CAPPED = 1
    FINISHED_STOPPED = 2
    FINISHED_ABORTED = 3


class Metric:
    """A counter, gauge or histogram of Prometheus; `series`: values by labels."""

    made: dict[str, Metric]

    def __init__(self, name: str, documentation: str, labelnames: list[str], **_: Any) -> None:
        self.series: dict[tuple[Any, ...], float] = {}
        Metric.made[name] = self

    def labels(self, *values: Any) -> SimpleNamespace:
        self.series.setdefault(values, 0)

        def inc(by: float = 1) -> None:
            self.series[values] += by

        def set_(to: float) -> None:
            self.series[values] = to

        return SimpleNamespace(inc=inc, set=set_, observe=inc)


class PromMetrics:
    def __init__(
        self, _config: Any, _types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, Any]
    ) -> None:
        self._gauge_cls = self._counter_cls = self._histogram_cls = Metric
        self.per_engine_labelvalues = per_engine_labelvalues


@dataclass
class Stats:
    data: dict[str, Any] = field(default_factory=dict)


class OffloadingStats:
    def __init__(self) -> None:
        self.counted: Counter[Any] = Counter()

    def increase_counter(self, name: str, by: int = 1, labels: tuple[str, ...] = ()) -> None:
        self.counted[labels or name] += by


@dataclass
class JobResult:
    job_id: int
    success: bool
    successful_keys: tuple[bytes, ...] | None = None
    transfer_time: float = 0
    transfer_bytes: int = 0


class SecondaryTierManager:
    def __init__(self, _spec: Any, view: memoryview, *_: Any) -> None:
        self.block_size_bytes = view.strides[0] if view.strides else 0


class EngineCore:
    """Makes something, as vLLM's engine core makes the scheduler that makes connectors."""

    def __init__(self, make: Any, connector: str = "KVFerryConnector", **extra: Any) -> None:
        self.version = "default"
        self.loaded: list[Any] = []
        # Whether no request holds blocks.
        self.can_reset = True
        given = SimpleNamespace(kv_connector=connector, kv_connector_extra_config=extra)
        self.vllm_config = SimpleNamespace(kv_transfer_config=given)
        self.made = make()

    def get_weight_version(self) -> str:
        return self.version

    def set_weight_version(self, weight_version: str) -> None:
        self.version = weight_version

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        if reset_connector:
            # A connector's scheduler, a manager of a store, or a tier.
            calls = (getattr(self.made, name, None) for name in ("reset", "reset_cache", "drain_jobs"))
            next(call for call in calls if call is not None)()
        return self.can_reset

    def add_lora(self, lora_request: SimpleNamespace) -> bool:
        self.loaded.append(lora_request)
        return True


class Connector:
    """What vLLM's base class of connectors keeps."""

    def __init__(self, vllm_config: Any, _role: Any, kv_cache_config: Any) -> None:
        self._vllm_config, self._kv_cache_config = vllm_config, kv_cache_config
        self._connector_metadata: Any = None

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        self._connector_metadata = None


@dataclass
class TransferResults:
    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


def _per_engine(metric: Metric, labelvalues: dict[int, Any]) -> dict[int, Any]:
    return {engine: metric.labels(*values) for engine, values in labelvalues.items()}


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    def module(name: str, **names: Any) -> None:
        for end in [at for at, letter in enumerate(name) if letter == "."]:
            if name[:end] not in sys.modules:
                monkeypatch.setitem(sys.modules, name[:end], ModuleType(name[:end]))
        made = ModuleType(name)
        vars(made).update(names)
        monkeypatch.setitem(sys.modules, name, made)

    for name in [it for it in sys.modules if it.split(".")[0] == "vllm" or it.startswith("kvferry.vllm._")]:
        monkeypatch.delitem(sys.modules, name)
    Metric.made = {}

    def init_logger(name: str) -> Any:
        logger: Any = logging.getLogger(name)
        logger.warning_once = logger.warning
        return logger

    base = {
        name: type(name, (), {})
        for name in (
            "KVConnectorHandshakeMetadata",
            "KVConnectorMetadata",
            "KVConnectorWorkerMetadata",
            "SupportsHMA",
        )
    }
    base |= {"KVConnectorBase_V1": Connector, "KVConnectorTransferResults": TransferResults}
    module(f"{_V1}.base", KVConnectorRole=enum.Enum("KVConnectorRole", "SCHEDULER WORKER"), **base)
    module(f"{_V1}.metrics", KVConnectorPromMetrics=PromMetrics, KVConnectorStats=Stats)
    module(f"{_V1}.offloading.metrics", OffloadingConnectorStats=OffloadingStats)
    module(
        "vllm.v1.kv_offload.base",
        OffloadingWorker=type("OffloadingWorker", (), {}),
        TransferResult=lambda *result: result,
        LookupResult=enum.Enum("LookupResult", "MISS HIT HIT_PENDING RETRY"),
        OffloadingCounterMetadata=dict,
        OffloadingGaugeMetadata=dict,
    )
    plain = {
        name: type(name, (), {})
        for name in ("LoadStoreSpec", "OffloadingEvent", "OffloadingManager", "RequestOffloadingContext")
    }
    vars(sys.modules["vllm.v1.kv_offload.base"]).update(
        **plain,
        Locality=enum.Enum("Locality", "LOCAL REMOTE"),
        Medium=enum.Enum("Medium", "STORAGE CPU"),
        PrepareStoreOutput=SimpleNamespace,
        get_offload_block_hash=lambda key: key[:-4],
        get_offload_group_idx=lambda key: int.from_bytes(key[-4:], "big"),
    )
    module("vllm.v1.kv_offload.tiering.base", JobResult=JobResult, SecondaryTierManager=SecondaryTierManager)
    module("vllm.v1.engine", EngineCoreRequestType=enum.Enum("EngineCoreRequestType", "WAKEUP"))
    module("vllm.logger", init_logger=init_logger)
    module("vllm.v1.metrics.cache_hit_source", CacheHitSource=enum.Enum("CacheHitSource", "P2P DISK"))
    module("vllm.v1.metrics.utils", create_metric_per_engine=_per_engine)
    module("vllm.v1.request", RequestStatus=RequestStatus)


class FullAttentionSpec:
    block_size = 16


class MambaSpec:
    block_size = 16


def caches(*specs: Any, num_blocks: int = 100) -> SimpleNamespace:
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=[f"{at}"]) for at, spec in enumerate(specs)]
    return SimpleNamespace(
        kv_cache_groups=groups,
        transfer_groups=groups,
        transfer_group_ids=tuple(range(len(groups))),
        num_blocks=num_blocks,
    )


def config(*, is_kv_producer: bool = True, **parallel: int) -> SimpleNamespace:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            **{
                "tensor_parallel_size": 1,
                "pipeline_parallel_size": 1,
                "decode_context_parallel_size": 1,
                "cp_kv_cache_interleave_size": 1,
                "data_parallel_size": 1,
                "data_parallel_index": 0,
                "local_engines_only": False,
                "nnodes_within_dp": 1,
                "data_parallel_master_ip": "127.0.0.1",
                **parallel,
            }
        ),
        num_prefill_lookahead_tokens=0,
        kv_transfer_config=SimpleNamespace(is_kv_producer=is_kv_producer, engine_id="engine"),
    )


@dataclass
class Request:
    request_id: str
    kv_transfer_params: dict[str, Any] | None
    prompt_token_ids: list[int]
    max_tokens: int = 1
    status: RequestStatus = RequestStatus.FINISHED_LENGTH_CAPPED
    resumable: bool = False
    skip_reading_prefix_cache: bool = False
    lora_request: Any = None
    mm_features: Any = None
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self._all_token_ids = list(self.prompt_token_ids)
