"""Loaded by every Python process of the vLLM instances under test (the folder is first on their
PYTHONPATH).

The connector under test stays unmodified; what the test needs besides is hung around it from here:

* `torch.accelerator.current_device_index` answers 0, because the connector asks for it and a
  machine without an accelerator raises;
* the `TransferEngine` the connector got is wrapped by a recorder (`recorder.py`), which writes down
  whose engine it is and every call, and can send a prefill's writes through the test's relay.

Both happen when the module in question is imported, so that processes that never import it stay as
they are.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector"


def _accelerator_zero(module: ModuleType) -> None:
    module.current_device_index = lambda: 0  # type: ignore[attr-defined]


def _record_engine(module: ModuleType) -> None:
    from recorder import wrap  # found beside this file; imported late to keep start-up free of it

    module.TransferEngine = wrap(module)  # type: ignore[attr-defined]


HOOKS: dict[str, Callable[[ModuleType], None]] = {"torch.accelerator": _accelerator_zero}
if "KVFERRY_E2E_RECORD" in os.environ:
    HOOKS[CONNECTOR] = _record_engine


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds a hooked module where Python would have found it, and runs its hook once it has been
    executed.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        hook = HOOKS.get(name)
        if hook is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            hook(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _AfterImport())
