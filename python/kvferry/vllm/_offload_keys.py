"""The order of a request's blocks."""

from __future__ import annotations

from typing import Any


def keys_of(group: int, req_context: Any) -> list[bytes]:
    """The keys of a request's blocks of a group of layers, in the order of the prompt.

    vLLM gives a manager one key after another, and keeps the positions of all of them in the request's context.
    """
    positions: dict[bytes, int] = getattr(req_context, "_offload_key_positions", {})
    suffix = group.to_bytes(4, "big")
    return sorted((key for key in positions if key.endswith(suffix)), key=positions.__getitem__)
