"""What kvferry overrides of TensorRT-LLM's connector, looked up where its halves start.

The halves read requests and steps by `getattr` with defaults, since versions differ in their fields.
"""

from __future__ import annotations

import importlib.metadata
import logging

from kvferry._engine_names import check, missing_hooks
from kvferry.trtllm._bases import StandInScheduler, StandInWorker, bases

# No version has run it: docs/trtllm.md says what was run.
TRIED: tuple[str, ...] = ()

# The hooks without which nothing is loaded or saved. Versions lack some of the others.
NEEDED = frozenset(
    (
        "get_num_new_matched_tokens",
        "update_state_after_alloc",
        "build_connector_meta",
        "request_finished",
        "register_kv_caches",
        "start_load_kv",
        "wait_for_layer_load",
        "save_kv_layer",
        "wait_for_save",
        "get_finished",
    )
)
_OWN = ("stats", "shutdown")


_is_checked = False


def check_connector() -> None:
    """Looks once. Raises `kvferry._engine_names.EngineError`."""
    global _is_checked
    scheduler, worker = bases()
    if _is_checked or scheduler is StandInScheduler or worker is StandInWorker:
        return
    check("TensorRT-LLM", version(), TRIED, missing(scheduler, worker), logging.getLogger("kvferry.trtllm"))
    _is_checked = True


def missing(scheduler: type, worker: type) -> list[str]:
    """The hooks that these base classes lack."""
    from kvferry.trtllm._scheduler import KVFerryConnectorScheduler
    from kvferry.trtllm._worker import KVFerryConnectorWorker

    found = []
    for half, base in ((KVFerryConnectorScheduler, scheduler), (KVFerryConnectorWorker, worker)):
        optional = set(vars(half)) - NEEDED
        found += missing_hooks(half, (base,), _OWN, optional)
    return found


def version() -> str:
    """TensorRT-LLM's version."""
    try:
        return importlib.metadata.version("tensorrt_llm")
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"
