"""kvferry in SGLang: the plug-in that SGLang loads, and `KVFerryStorage` for HiCache.

``--hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name":"kvferry","module_path":
"kvferry.sglang","class_name":"KVFerryStorage","interface_v1":1,"disk":"/var/cache/kv","disk_gib":200}'``
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvferry.sglang._of_sglang import TRIED, version

if TYPE_CHECKING:
    from kvferry.sglang._storage import KVFerryStorage as KVFerryStorage

__all__ = ["KVFerryStorage", "register"]


def register() -> None:
    """The plug-in, of the group ``sglang.srt.plugins``: SGLang calls it in each of its processes.

    Installs the shims that ``KVFERRY_SHIMS`` names.
    """
    # The module lies beside the package; its documentation says why.
    importlib.import_module("_kvferry_shims").install()


def __getattr__(name: str) -> Any:
    # SGLang is imported only where the storage is: this module is also loaded where it is a plug-in.
    if name == "KVFerryStorage":
        try:
            return importlib.import_module("kvferry.sglang._storage").KVFerryStorage
        except ImportError as error:
            if (error.name or "").partition(".")[0] not in ("sglang", "torch"):
                raise
            raise RuntimeError(f"{name} needs SGLang {', '.join(TRIED)}; this one is {version()}: {error}") from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
