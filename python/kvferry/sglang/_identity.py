"""What the blocks of `KVFerryStorage` are named by: SGLang's keys are hashes of tokens and nothing else."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvferry._weights import weights_of

# Arguments of the server that change the KV of the same tokens, and that the pool does not show.
_ARGUMENTS = (
    "revision",
    "quantization",
    "weight_version",
    "dtype",
    "quantization_param_path",
    "load_format",
    "json_model_override_args",
    "model_loader_extra_config",
    "modelopt_quant",
    "rl_quant_profile",
    "kt_weight_path",
)
# The same, whatever names the model. Host pools have FP8 of either kind as bytes.
_OF_CACHE = ("kv_cache_dtype",)
# Those that change the KV of the draft model of speculative decoding.
_OF_DRAFT = (
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_draft_model_revision",
    "speculative_draft_model_quantization",
    "speculative_draft_load_format",
    "speculative_draft_kv_cache_dtype",
)
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
    """The arguments of the SGLang server of this process, if it is one."""
    try:
        return importlib.import_module("sglang.srt.runtime_context").get_server_args()
    except (ImportError, AttributeError, ValueError, RuntimeError, AssertionError):
        return None


def model_of(config: Any, named: str | None) -> str:
    """The model, its weights and adapters. `named`: the setting `model`, which replaces the model and its weights."""
    arguments = server_arguments()
    parts = [named or str(config.model_name)]
    if named is None:
        parts += _given(arguments, _ARGUMENTS)
        parts += _weights(getattr(arguments, "model_path", None) or config.model_name)
    # SGLang's keys have an adapter's name and path.
    for adapter in getattr(arguments, "lora_paths", None) or ():
        path = _path_of(adapter)
        parts += [f"lora={path}", *_weights(path)]
    return " ".join(parts)


def _given(arguments: Any | None, names: Sequence[str]) -> list[str]:
    return [f"{name}={getattr(arguments, name, None)}" for name in names if arguments is not None]


def _weights(path: str | None) -> list[str]:
    found = weights_of(path)
    return [] if found is None else [f"weights={found}"]


def _path_of(adapter: Any) -> str:
    """Of ``NAME=PATH``, ``PATH``, or what SGLang has made of them."""
    if isinstance(adapter, str):
        return adapter.partition("=")[2] or adapter
    path = adapter.get("lora_path") if isinstance(adapter, Mapping) else getattr(adapter, "lora_path", None)
    return str(path)


def _draft(name: str, pool: Any) -> list[str] | None:
    """What names the draft model, where a pool has KV of it."""
    layers = getattr(pool, "layer_num", None)
    if not name.startswith("draft") and getattr(pool, "target_layer_num", layers) == layers:
        return None
    arguments = server_arguments()
    return _given(arguments, _OF_DRAFT) + _weights(getattr(arguments, "speculative_draft_model_path", None))


def layout_of(config: Any, name: str, pool: Any, pieces: list[int] | None, split: int, *, copied: bool) -> bytes:
    """What the bytes of a pool's blocks depend on. `pieces`: the bytes of each piece of a page. `split`: how many
    blocks a page is; more than one where ranks of another parallelism have parts of it.
    """
    heads = getattr(pool, "head_num", None)
    parts = {
        "v": 1,
        "pool": name,
        "class": type(pool).__name__,
        "dtype": str(getattr(pool, "dtype", None)),
        "cache": _given(server_arguments(), _OF_CACHE),
        "draft": _draft(name, pool),
        "heads": heads // split if heads is not None else None,
        "geometry": {it: str(getattr(pool, it, None)) for it in _GEOMETRY},
        "pieces": pieces[: len(pieces) // split] if pieces is not None else None,
        "tp": config.tp_lcm_size if split > 1 else config.tp_size,
        "mla": config.is_mla_model,
        "logical_page": config.logical_page_size,
        # The two interfaces have the layers of a page in different orders. The one that copies does not split pages.
        "copied": split if copied else 0,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()


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


def life() -> str:
    """A name that all ranks of this engine on this node have, and no other engine and no later life of it."""
    arguments = server_arguments()
    # One process has started all ranks of the node, but Ray's lives longer than an engine.
    is_alone = arguments is None or getattr(arguments, "use_ray", False)
    return f"{getattr(arguments, 'port', None)} {_began(os.getpid() if is_alone else os.getppid())}"


def _began(pid: int) -> str:
    """The process, and when it began, since numbers of processes come again."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return f"{pid}@{fields[19]}@{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
    except OSError:
        # The parent is in another container: then each rank is alone.
        return secrets.token_hex(16)
