"""kvferry in SGLang: the plug-in that SGLang loads, and `KVFerryStorage` for HiCache.

``--hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name":"kvferry","module_path":
"kvferry.sglang","class_name":"KVFerryStorage","interface_v1":1,"disk":"/var/cache/kv","disk_gib":200}'``
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from kvferry._engine.hooks import lazily
from kvferry.sglang._of_sglang import TRIED, version

if TYPE_CHECKING:
    from kvferry.sglang._storage import KVFerryStorage as KVFerryStorage

__all__ = ["KVFerryStorage", "register"]

# SGLang is imported only where the storage is: this module is also loaded where it is a plug-in.
__getattr__ = lazily(__name__, {"KVFerryStorage": "_storage"}, "SGLang", TRIED, version, ("sglang", "torch"))


def register() -> None:
    """The plug-in, of the group ``sglang.srt.plugins``: SGLang calls it in each of its processes.

    Installs the shims that ``KVFERRY_SHIMS`` names.
    """
    # The module lies beside the package; its documentation says why.
    importlib.import_module("_kvferry_shims").install()
