"""What the blocks of `KVFerryStorage` are named by: SGLang's keys are hashes of tokens and nothing else."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from kvferry._engine.identity import began, fingerprint
from kvferry._engine.identity.known import SGLANG, Settings
from kvferry._engine.identity.sglang import check_sglang_weights_are_named, of_sglang, sglang_draft

# Host pools have FP8 of either kind as bytes.
_OF_CACHE = ("kv_cache_dtype",)
# What a pool says of the bytes of its pages.
_GEOMETRY = (
    "layout",
    "page_size",
    "layer_num",
    "head_dim",
    "v_head_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "kv_cache_dim",
    "start_layer",
    "end_layer",
    "dcp_size",
    "storage_format_tag",
    "temporal_dtype",
    "conv_dtype",
    "conv_state_shapes",
)


def server_arguments() -> Any | None:
    """The arguments of the SGLang server of this process, if it is one. Raises ImportError or AttributeError where
    SGLang has them elsewhere: without them, names would lack most of what changes KV.
    """
    if "sglang" not in sys.modules and importlib.util.find_spec("sglang") is None:
        return None
    get_server_args = importlib.import_module("sglang.srt.runtime_context").get_server_args
    try:
        return get_server_args()
    except (ValueError, RuntimeError, AssertionError):
        # The process is no server.
        return None


def model_of(config: Any, named: str | None) -> str:
    """The model, its weights and adapters. `named`: the setting `model`, which replaces the model and its weights."""
    return of_sglang(config, server_arguments(), named).text()


def check_weights_are_named(config: Any, named: str | None) -> None:
    """Raises ValueError where new weights would have the name of the old ones."""
    check_sglang_weights_are_named(config, server_arguments(), named, "KVFerryStorage")


def _given(arguments: Any | None, names: Sequence[str]) -> list[str]:
    given = Settings(arguments, SGLANG)
    return [f"{name}={given.get(name)}" for name in names if given]


def _draft(name: str, pool: Any) -> str | None:
    """What names the draft model, where a pool has KV of it."""
    layers = getattr(pool, "layer_num", None)
    if not name.startswith("draft") and getattr(pool, "target_layer_num", layers) == layers:
        return None
    return sglang_draft(server_arguments())


def _order(pool: Any) -> dict[str, str]:
    """The order of a page's elements, where it is not the usual one: SGLang's environment changes it."""
    # Host pools of keys and values have what describes the device's buffers. Others have the device's pool.
    buffers = [getattr(it, "buffers", None) for it in getattr(pool, "_buffer_infos", None) or ()]
    orders = [getattr(it, "layout", None) for it in buffers]
    orders.append(getattr(getattr(pool, "device_pool", None), "kv_cache_layout", None))
    names = {str(getattr(it, "value", it)) for it in orders if it is not None} - {"nhd", "paged_nhd"}
    return {"order": " ".join(sorted(names))} if names else {}


def layout_of(config: Any, name: str, pool: Any, pieces: list[int] | None, split: int, *, copied: bool) -> bytes:
    """What the bytes of a pool's blocks depend on. `pieces`: the bytes of each piece of a page. `split`: how many
    blocks a page is; more than one where ranks of another parallelism have parts of it.
    """
    heads = getattr(pool, "head_num", None)
    parts = {
        "v": 2,
        "pool": name,
        "class": type(pool).__name__,
        "dtype": str(getattr(pool, "dtype", None)),
        "cache": _given(server_arguments(), _OF_CACHE),
        "draft": _draft(name, pool),
        "heads": heads // split if heads is not None else None,
        "geometry": {it: str(getattr(pool, it, None)) for it in _GEOMETRY} | _order(pool),
        "pieces": pieces[: len(pieces) // split] if pieces is not None else None,
        "tp": config.tp_lcm_size if split > 1 else config.tp_size,
        "mla": config.is_mla_model,
        "logical_page": config.logical_page_size,
        # The two interfaces have the layers of a page in different orders. The one that copies does not split pages.
        "copied": split if copied else 0,
    }
    return fingerprint(parts)


def hashes_of(keys: Sequence[str]) -> list[bytes]:
    """The names of blocks. SGLang's keys are the digits of a SHA-256, all of one length."""
    digits = "".join(keys)
    each = len(keys[0]) if keys else 0
    if 32 <= each <= 128 and each % 2 == 0 and set(map(len, keys)) == {each}:
        with suppress(ValueError):
            joined = bytes.fromhex(digits)
            # Not so where there are capitals or spaces, which `fromhex` takes.
            if joined.hex() == digits:
                return [joined[at : at + each // 2] for at in range(0, len(joined), each // 2)]
    return [_hash_of(key) for key in keys]


def _hash_of(key: str) -> bytes:
    if re.fullmatch("(?:[0-9a-f]{2}){16,64}", key):
        return bytes.fromhex(key)
    # Longer than a digest of SGLang, so that no two keys have one name.
    return hashlib.sha512(key.encode()).digest()


def incarnation() -> str:
    """A name of this incarnation of the engine, the same in all of its ranks on this node."""
    given = Settings(server_arguments(), SGLANG)
    # One process has started all ranks of the node, but Ray's lives longer than an engine.
    is_alone = not given or given.get("use_ray")
    return f"{given.get('port')} {began(os.getpid() if is_alone else os.getppid())}"
