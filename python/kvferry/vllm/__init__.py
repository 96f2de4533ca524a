"""kvferry in vLLM: the plug-in that vLLM loads, `KVFerryConnector`, `KVFerryOffloadingSpec` and `KVFerryTier`.

``vllm serve MODEL --kv-transfer-config '{"kv_connector":"KVFerryConnector","kv_role":"kv_both"}'``

Where ``VLLM_PLUGINS`` leaves this plug-in out, add ``"kv_connector_module_path":"kvferry.vllm"``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvferry.vllm._of_vllm import TRIED, version

if TYPE_CHECKING:
    from kvferry.vllm._connector import KVFerryConnector as KVFerryConnector
    from kvferry.vllm._offload import KVFerryOffloadingSpec as KVFerryOffloadingSpec
    from kvferry.vllm._offload_tier import KVFerryTier as KVFerryTier

__all__ = ["KVFerryConnector", "KVFerryOffloadingSpec", "KVFerryTier", "register"]

_NAME = "KVFerryConnector"
# The modules that need vLLM.
_MODULES = {_NAME: "_connector", "KVFerryOffloadingSpec": "_offload", "KVFerryTier": "_offload_tier"}


def register() -> None:
    """The plug-in, of the group ``vllm.general_plugins``: vLLM calls it in each of its processes.

    Makes `KVFerryConnector` known and installs the shims that ``KVFERRY_SHIMS`` names.
    """
    # The module lies beside the package; its documentation says why.
    importlib.import_module("_kvferry_shims").install()
    try:
        factory = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.factory").KVConnectorFactory
    except ImportError:
        # A vLLM without this module says so where the connector is asked for.
        return
    # vLLM may load its plug-ins more than once in a process.
    if _NAME not in factory._registry:
        factory.register_connector(_NAME, __name__, _NAME)


def __getattr__(name: str) -> Any:
    # vLLM is imported only where its connector is: this module is also loaded where it is a plug-in.
    if name in _MODULES:
        try:
            return getattr(importlib.import_module(f"kvferry.vllm.{_MODULES[name]}"), name)
        except ImportError as error:
            if not (error.name or "").startswith("vllm"):
                raise
            raise RuntimeError(f"{name} needs vLLM {', '.join(TRIED)}; this one is {version()}: {error}") from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
