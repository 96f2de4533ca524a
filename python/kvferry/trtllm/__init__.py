"""kvferry in TensorRT-LLM: prompts' KV in kvferry's store, and handed from prefill to decode. See docs/trtllm.md.

``KvCacheConnectorConfig(connector_module="kvferry.trtllm", connector_scheduler_class="KVFerryConnectorScheduler",
connector_worker_class="KVFerryConnectorWorker")``
"""

from __future__ import annotations

from kvferry.trtllm._scheduler import KVFerryConnectorScheduler
from kvferry.trtllm._worker import KVFerryConnectorWorker

__all__ = ["KVFerryConnectorScheduler", "KVFerryConnectorWorker"]
