"""The names of a request's blocks, and requests whose blocks have none."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from typing import Any

# What changes the KV of the same tokens and can't be named from what TensorRT-LLM gives a connector.
_UNNAMED = (
    "lora_task_id",
    "lora_config",
    "multimodal_hashes",
    "multimodal_positions",
    "multimodal_lengths",
    "multimodal_embedding",
    "mrope_rotary_cos_sin",
    "prompt_embedding_table",
    "encoder_tokens",
    "encoder_input_features",
    "py_multimodal_data",
)


def is_named(request: Any) -> bool:
    """Whether its tokens and its salt say what its KV is."""
    return not any(_is_given(getattr(request, name, None)) for name in _UNNAMED)


def _is_given(value: Any) -> bool:
    if value is None:
        return False
    try:
        return len(value) > 0
    except TypeError:
        return True


def salt_of(source: Any) -> str | None:
    """Of a request or of `RequestData`: newer versions have a text, older ones a number."""
    for name in ("cache_salt", "cache_salt_id"):
        value = getattr(source, name, None)
        if value is not None:
            return f"{name}={value}"
    return None


def chain(tokens: Sequence[int], tokens_per_block: int, salt: str | None) -> list[bytes]:
    """One name per full block: each depends on the salt and on all tokens up to its block's end."""
    return list(_chain(tokens, tokens_per_block, salt))


def _chain(tokens: Sequence[int], tokens_per_block: int, salt: str | None) -> Iterator[bytes]:
    root = f"kvferry.trtllm 1 {tokens_per_block} " + ("-" if salt is None else "+" + salt)
    name = hashlib.sha256(root.encode()).digest()
    for end in range(tokens_per_block, len(tokens) + 1, tokens_per_block):
        block = struct.pack(f"<{tokens_per_block}q", *tokens[end - tokens_per_block : end])
        name = hashlib.sha256(name + block).digest()
        yield name
