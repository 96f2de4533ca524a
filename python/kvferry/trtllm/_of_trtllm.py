"""What kvferry overrides and reads of TensorRT-LLM, looked up where its halves start.

Versions differ in the fields of requests and steps, which have classes of C++ in part: those that are needed are looked
up, and the halves read the others by `getattr` with defaults.
"""

from __future__ import annotations

from typing import Any

from kvferry._engine.hooks import attributes, check, installed, missing_hooks, missing_names, names_of
from kvferry._engine.identity import known
from kvferry._engine.log import logger_of
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
# Read of steps, in the module of the hooks.
_READ = (
    *names_of("SchedulerOutput", "new_requests cached_requests"),
    *names_of("RequestData", "request_id new_block_ids computed_position num_scheduled_tokens"),
)
# Read of the engine's arguments, and of their parts: without these, names would lack what changes KV.
_READ_OF_ARGUMENTS = {
    "": (*sorted(known.TRTLLM.named - set(known.TRTLLM.optional)), "kv_connector_config", "max_beam_width"),
    "kv_cache_config": (*sorted(known.TRTLLM_CACHE.named), "tokens_per_block"),
    "quant_config": tuple(sorted(known.TRTLLM_QUANTIZATION.named)),
}
# What the halves read where a version has it, with what it is for.
OPTIONAL = {
    **known.TRTLLM.optional,
    "new_block_ids_by_layer_group": "versions with several groups of layers",
    "priorities": "versions that tell a connector the priorities of blocks",
    "cache_salt": "newer versions",
    "cache_salt_id": "versions with a number instead of the text",
    "py_num_connector_matched_tokens": "versions that take a part of an offer",
    "enable_attention_dp": "versions with attention data parallelism",
    "scheduler_config": "versions with policies of the scheduler",
    "host_cache_size": "versions with a host cache of their own",
    "use_kv_cache_manager_v2": "versions with a second cache manager",
    "parallel_config": "versions that have the parallelism in one object",
    "mapping": "versions that have the parallelism in one object",
}


_is_checked = False


def check_connector(llm_args: Any = None) -> None:
    """Looks once. Raises `kvferry._engine.hooks.EngineError`."""
    global _is_checked
    scheduler, worker = bases()
    if _is_checked or scheduler is StandInScheduler or worker is StandInWorker:
        return
    gone = [*missing(scheduler, worker), *missing_names(scheduler.__module__, *_READ), *missing_settings(llm_args)]
    check("TensorRT-LLM", version(), TRIED, gone, logger_of("trtllm"))
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


def missing_settings(llm_args: Any) -> list[str]:
    """The names that the engine's arguments lack. Parts that are None are not looked at."""
    found = []
    for part, names in _READ_OF_ARGUMENTS.items():
        value = getattr(llm_args, part, None) if part else llm_args
        if value is not None:
            has = attributes(type(value)) | {*getattr(type(value), "model_fields", ()), *getattr(value, "__dict__", ())}
            found += [".".join(filter(None, ("llm_args", part, name))) for name in names if name not in has]
    return found


def version() -> str:
    """TensorRT-LLM's version."""
    return installed("tensorrt_llm") or "of unknown version"
