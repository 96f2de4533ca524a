"""What kvferry overrides and reads of TensorRT-LLM, looked up where its halves start.

Versions differ in the fields of requests and steps, which have classes of C++ in part: those that are needed are looked
up, and the halves read the others by `getattr` with defaults.
"""

from __future__ import annotations

import importlib
from typing import Any

from kvferry._engine.hooks import attributes, check, installed, missing_hooks, missing_in, missing_names, names_of
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
# Read of requests, where the module of the hooks has their class.
_READ_OF_REQUESTS = names_of("LlmRequest", "request_id get_tokens")
# Called where a rank is one of several.
_READ_OF_RANKS = {"tensorrt_llm._utils": ("mpi_rank", "mpi_allgather")}
# Read of the layout of a cache with several groups, of a group, and of a region.
_READ_OF_LAYOUT = ("groups", "tokens_per_block")
_READ_OF_GROUP = ("regions", "layer_group_id", "layer_ids")
_READ_OF_REGION = ("base", "stride", "size", "num_slots")
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
    "to_mapping": "versions that have the parallelism in one object",
    "capacity_scheduler_policy": "versions with policies of the scheduler",
    "replicated_regions": "layouts with regions that all ranks have alike",
    "window_size": "layouts with sliding windows",
    "buffers": "layouts that say what is in a region",
    "layer_id": "layouts whose buffers are no tuples",
    "role": "layouts whose buffers are no tuples",
    "as_tensor": "layouts that make tensors of regions",
}


_is_checked = False


def check_connector(llm_args: Any = None) -> None:
    """Looks once. Raises `kvferry._engine.hooks.EngineError`."""
    global _is_checked
    scheduler, worker = bases()
    if _is_checked or scheduler is StandInScheduler or worker is StandInWorker:
        return
    hooks = scheduler.__module__
    gone = [*missing(scheduler, worker), *missing_names(hooks, *_READ), *missing_settings(llm_args)]
    gone += missing_in(_READ_OF_RANKS)
    if hasattr(importlib.import_module(hooks), "LlmRequest"):
        gone += missing_names(hooks, *_READ_OF_REQUESTS)
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


def check_layout(layout: Any) -> None:
    """Raises `kvferry._engine.hooks.EngineError` for a layout of a cache that lacks what is read of it."""
    if gone := missing_of_layout(layout):
        check("TensorRT-LLM", version(), TRIED, gone, logger_of("trtllm"))


def missing_of_layout(layout: Any) -> list[str]:
    """The names that a layout lacks, or its groups, or their regions."""
    groups = list(getattr(layout, "groups", ()))
    if hasattr(layout, "groups") and not groups:
        return ["layout.groups[0]"]
    kinds = ("regions", "replicated_regions")
    regions = [region for group in groups for kind in kinds for region in getattr(group, kind, ())]
    wanted = (
        ("", [layout], _READ_OF_LAYOUT),
        ("groups", groups, _READ_OF_GROUP),
        ("regions", regions, _READ_OF_REGION),
    )
    return [
        ".".join(filter(None, ("layout", part, name)))
        for part, values, names in wanted
        for name in names
        if not all(hasattr(value, name) for value in values)
    ]


def version() -> str:
    """TensorRT-LLM's version."""
    return installed("tensorrt_llm") or "of unknown version"
