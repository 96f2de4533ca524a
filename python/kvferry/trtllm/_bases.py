"""The classes of TensorRT-LLM that the connector's halves subclass, or stand-ins of the same shape.

TensorRT-LLM has moved them once. Without it the halves can be driven all the same.
"""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = (
    "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector",
    "tensorrt_llm._torch.pyexecutor.kv_cache_connector",
)


class StandInWorker:
    """What a worker half inherits."""

    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args
        self._metadata: Any = None

    def bind_connector_meta(self, metadata: Any) -> None:
        self._metadata = metadata

    def get_connector_meta(self) -> Any:
        return self._metadata

    def _clear_connector_meta(self) -> None:
        self._metadata = None


class StandInScheduler:
    """What a scheduler half inherits."""

    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args


def bases() -> tuple[Any, Any]:
    """The base classes of the scheduler half and of the worker half."""
    for name in _MODULES:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            # Of TensorRT-LLM: the other path, or none. Of what it needs: a broken installation.
            if not (error.name or "").startswith("tensorrt_llm"):
                raise
            continue
        return module.KvCacheConnectorScheduler, module.KvCacheConnectorWorker
    return StandInScheduler, StandInWorker
