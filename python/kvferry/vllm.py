"""kvferry's plugin for vLLM, of the group ``vllm.general_plugins``: vLLM calls `register` in each of its processes."""

from __future__ import annotations

import importlib


def register() -> None:
    """Installs the shims that ``KVFERRY_SHIMS`` names."""
    # The module lies beside the package; its documentation says why.
    importlib.import_module("_kvferry_shims").install()
