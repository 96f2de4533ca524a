"""kvferry in vLLM: the plug-in that vLLM loads, `KVFerryConnector`, `KVFerryOffloadingSpec` and `KVFerryTier`.

``vllm serve MODEL --kv-transfer-config '{"kv_connector":"KVFerryConnector","kv_role":"kv_both"}'``

Where ``VLLM_PLUGINS`` leaves this plug-in out, add ``"kv_connector_module_path":"kvferry.vllm"``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from kvferry._engine.hooks import lazily
from kvferry.vllm._of_vllm import TRIED, version

if TYPE_CHECKING:
    from kvferry.vllm._connector import KVFerryConnector as KVFerryConnector
    from kvferry.vllm._offload import KVFerryOffloadingSpec as KVFerryOffloadingSpec
    from kvferry.vllm._offload_tier import KVFerryTier as KVFerryTier

__all__ = ["KVFerryConnector", "KVFerryOffloadingSpec", "KVFerryTier", "register"]

_NAME = "KVFerryConnector"
# The modules that need vLLM, each imported only where its class is: this one is also loaded where it is a plug-in.
_MODULES = {_NAME: "_connector", "KVFerryOffloadingSpec": "_offload", "KVFerryTier": "_offload_tier"}
__getattr__ = lazily(__name__, _MODULES, "vLLM", TRIED, version, ("vllm",))


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
