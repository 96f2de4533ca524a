"""`KVFerryOffloadingSpec`: vLLM's own offloading on kvferry's store. See docs/storage.md.

``--kv-transfer-config '{"kv_connector":"OffloadingConnector","kv_role":"kv_both","kv_load_failure_policy":"recompute",
"kv_connector_extra_config":{"spec_name":"KVFerryOffloadingSpec","spec_module_path":"kvferry.vllm","disk":"/var/cache/kv",
"disk_gib":200,"host_gib":8}}'``
"""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.base import OffloadingManager, OffloadingMetricMetadata, OffloadingSpec, OffloadingWorker

from kvferry._engine.identity.vllm import (
    check_media_are_named,
    check_weights_are_named,
    layer_facts,
    of_vllm,
    vllm_config_of_callers,
)
from kvferry._engine.store import open_store
from kvferry.vllm._log import logger
from kvferry.vllm._of_vllm import check_spec
from kvferry.vllm._offload_layout import check_device, group_layouts
from kvferry.vllm._offload_manager import KVFerryOffloadingManager
from kvferry.vllm._offload_stats import metric_definitions
from kvferry.vllm._offload_worker import KVFerryOffloadingWorker
from kvferry.vllm._settings import store_settings


class KVFerryOffloadingSpec(OffloadingSpec):  # type: ignore[misc]
    """vLLM makes one per process, and asks it for the manager in the scheduler's and for the worker in each rank's."""

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        return metric_definitions()

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        check_spec()
        self._settings = store_settings(config.extra_config)
        # vLLM's connector makes this object, and gives it only a part of the configuration.
        self._vllm_config = vllm_config_of_callers()
        if self._vllm_config is not None:
            check_media_are_named(self._vllm_config, "KVFerryOffloadingSpec")
            check_weights_are_named(self._vllm_config, self._settings.model, "KVFerryOffloadingSpec")

    def get_manager(self) -> OffloadingManager:
        # What the workers have in host memory is not asked for: it is on the disk, too, or will be.
        return KVFerryOffloadingManager(self.config, self._settings, open_store(self._settings, 0, logger))

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        check_device(kv_caches)
        connector = _connector_of(self)
        caches = interleave = None
        if connector is not None:
            caches = connector._kv_cache_config
            interleave = connector._vllm_config.parallel_config.cp_kv_cache_interleave_size
        names = [name for group in self.config.groups for name in group.layer_names]
        facts = layer_facts(self._vllm_config, names, tp_size=self.config.parallel.tp_size)
        layouts = group_layouts(self.config, kv_caches, caches, self._settings.share_tp, interleave, facts)
        ranks = self.config.parallel.world_size
        opened = open_store(self._settings, self._settings.host_bytes // ranks, logger)
        worker = KVFerryOffloadingWorker(self.config, self._model(connector), layouts, kv_caches, opened)
        if connector is not None:
            _report_failures(connector, worker)
        else:
            logger.warning(
                "KVFerryOffloadingSpec: its connector is not the one of vLLM's worker, so a block that can't be loaded "
                "ends the engine"
            )
        return worker

    def _model(self, connector: Any | None) -> str:
        """What names the weights."""
        config = self._vllm_config or getattr(connector, "_vllm_config", None)
        if config is not None:
            return of_vllm(config, self._settings.model).text()
        if self._settings.model is None:
            raise ValueError(
                "KVFerryOffloadingSpec: the engine's configuration is out of reach, so its weights can't be named: "
                "set model in kv_connector_extra_config to a name that says the weights and what else changes their KV"
            )
        return self._settings.model


def _connector_of(spec: OffloadingSpec) -> Any | None:
    """The `OffloadingConnector` of this worker that has the spec."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if not has_kv_transfer_group():
        return None
    connector: Any = get_kv_transfer_group()
    for child in (connector, *getattr(connector, "_connectors", ())):
        worker = getattr(child, "connector_worker", None)
        if worker is not None and worker.spec is spec:
            return child
    return None


def _report_failures(connector: Any, worker: KVFerryOffloadingWorker) -> None:
    """Lets a connector of vLLM 0.32 say which loads have failed: its own worker takes no load for failed, though the
    scheduler can have such a request computed.
    """
    results, stats = connector.get_transfer_results, connector.get_kv_connector_stats

    def get_transfer_results(finished_req_ids: set[str]) -> Any:
        made = results(finished_req_ids)
        made.failed_recving |= worker.take_failed()
        return made

    def get_kv_connector_stats() -> Any:
        return worker.take_stats() or stats()

    connector.get_transfer_results = get_transfer_results
    connector.get_kv_connector_stats = get_kv_connector_stats
    worker.can_report_failures = True
    if _failure_policy(connector) != "recompute":
        logger.warning(
            'KVFerryOffloadingSpec: set "kv_load_failure_policy": "recompute" beside "kv_connector": without it, a '
            "request ends with an error where a block leaves the store, or can't be read, after it was found"
        )


def _failure_policy(connector: Any) -> str:
    """The policy in force is that of the engine's own connector, which MultiConnector does not give to those in it."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    outer = getattr(get_kv_transfer_group(), "_vllm_config", connector._vllm_config)
    return str(outer.kv_transfer_config.kv_load_failure_policy)
