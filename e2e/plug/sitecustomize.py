"""Loaded by every Python process of the vLLM instances under test (the folder is first on their
PYTHONPATH).

The connector under test stays unmodified. This module changes three things around it:

* engines poll as vLLM has them do on older Pythons, without `sched_yield`: beside threads that
  yield, Linux 6.18 now and then keeps everything else of a processor waiting for up to a minute
  (its log says `workqueue lockup`), which looks like a suspended or dead peer;
* for MooncakeConnector, `torch.accelerator.current_device_index` returns 0: the connector calls it,
  and it raises on a machine without an accelerator;
* for MooncakeConnector, a recorder (`recorder.py`) wraps its `TransferEngine`. It records the
  engine's origin and every call, and can send a prefill's writes through the test's relay.

Each happens at the import of the patched module; processes that never import it are not affected.
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


def _poll_without_yielding(module: ModuleType) -> None:
    module.USE_SCHED_YIELD = False  # type: ignore[attr-defined]


def _record_engine(module: ModuleType) -> None:
    from recorder import wrap  # beside this file; imported late to keep start-up fast

    module.TransferEngine = wrap(module)  # type: ignore[attr-defined]


HOOKS: dict[str, Callable[[ModuleType], None]] = {"vllm.distributed.utils": _poll_without_yielding}
if "KVFERRY_E2E_MOONCAKE" in os.environ:
    HOOKS["torch.accelerator"] = _accelerator_zero
if "KVFERRY_E2E_RECORD" in os.environ:
    HOOKS[CONNECTOR] = _record_engine


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds a hooked module where Python would find it, and runs its hook after its execution."""

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
