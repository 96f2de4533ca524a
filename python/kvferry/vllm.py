"""kvferry in vLLM, which calls `register` in each of its processes: a plugin of the group ``vllm.general_plugins``."""

from __future__ import annotations

import importlib


def register() -> None:
    """Puts the shims that ``KVFERRY_SHIMS`` names in place; does nothing otherwise."""
    # It lies beside the package, not in it; see there.
    importlib.import_module("_kvferry_shims").install()
