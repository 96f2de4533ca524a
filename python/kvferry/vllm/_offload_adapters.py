"""The names of stored blocks that were computed with a LoRA adapter.

vLLM's hash of a block has the adapter's name and path. The files there may be others after a restart, and a store
outlives an engine. So the name of a block in the store has the adapter's weights, too, sampled as the engine loaded
them. Events of the store are translated back: routers know vLLM's hashes.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

from vllm.v1.kv_offload.base import get_offload_block_hash, get_offload_group_idx

from kvferry._engine.identity.adapters import Adapters, Files
from kvferry._engine.identity.core import Core, callers

# Names that are translated back. Events of further blocks have the store's names, which no router looks up.
_NAMES_MAX = 1 << 20


class StoredAdapters:
    """The adapters of an engine. On the scheduler's thread only."""

    def __init__(self, core: Core, vllm_config: Any | None) -> None:
        """`vllm_config`: None if it is not known."""
        self._has_adapters = getattr(vllm_config, "lora_config", None) is not None
        self._adapters = Adapters()
        core.on_load(self._adapters.loads)
        core.on_emptied(self._adapters.cache_was_emptied)
        # vLLM's hashes, by the names of blocks that were reported.
        self._hashes: OrderedDict[bytes, bytes] = OrderedDict()

    def of_request(self) -> RequestNames:
        """The names of blocks of the request that vLLM tells the caller of now."""
        is_known, lora = _lora_of_callers()
        if lora is not None:
            self._adapters.saw(lora)
            return RequestNames(self._adapters, lora)
        # Of a request whose adapter is not known, no block is found or stored.
        return RequestNames(None, None, is_known=is_known or not self._has_adapters)

    def report(self, names: RequestNames, keys: Iterable[bytes]) -> list[bytes]:
        """The names of blocks of which events are to be reported."""
        keys = list(keys)
        found = names.of(keys)
        if names.is_mixed:
            for key, name in zip(keys, found, strict=True):
                self._hashes[name] = get_offload_block_hash(key)
                self._hashes.move_to_end(name)
            while len(self._hashes) > _NAMES_MAX:
                self._hashes.popitem(last=False)
        return found

    def hashes(self, names: Sequence[bytes]) -> Sequence[bytes]:
        """vLLM's hashes of blocks, by their names in the store."""
        return [self._hashes.get(name, name) for name in names] if self._hashes else names


def by_group(keys: Iterable[bytes]) -> list[tuple[int, list[bytes]]]:
    """The keys of each group of layers, by the group's number."""
    found: dict[int, list[bytes]] = {}
    for key in keys:
        found.setdefault(get_offload_group_idx(key), []).append(key)
    return sorted(found.items())


class RequestNames:
    """The names of a request's blocks in the store: vLLM's hashes, with an adapter a hash of these and its weights."""

    def __init__(self, adapters: Adapters | None, lora: Any, *, is_known: bool = True) -> None:
        self._adapters, self._lora = adapters, lora
        self._weights: str | None = None if is_known else secrets.token_hex(16)
        self._names: dict[bytes, bytes] = {}

    @property
    def is_mixed(self) -> bool:
        """Whether the names are others than vLLM's hashes."""
        return self._adapters is not None or self._weights is not None

    def of(self, keys: Iterable[bytes]) -> list[bytes]:
        if not self.is_mixed:
            # As get_offload_block_hash, without a call for each block.
            return [key[:-4] for key in keys]
        return [self._names.get(key) or self._named(key) for key in keys]

    def _named(self, key: bytes) -> bytes:
        if self._weights is None:
            assert self._adapters is not None
            self._weights = self._adapters.weights(self._lora)
        made = hashlib.sha256(f"kvferry lora {self._weights} ".encode() + key[:-4]).digest()
        self._names[key] = made
        return made

    def one(self, key: bytes) -> bytes:
        return self.of([key])[0]

    def may_store(self, *, is_computed: bool) -> bool:
        """Whether the request's KV is computed with the weights of its names. An adapter may be loaded anew, and vLLM's
        own cache may have blocks of the weights that it had before. `is_computed`: no step that computes some of it is
        still to come, so that its files are looked at again. Else who stores it must do that after the step (`files`):
        the engine may read them in it.
        """
        if self._adapters is None:
            return self._weights is None
        if self._weights is None:
            self._weights = self._adapters.weights(self._lora)
        is_same = self._adapters.still(self._lora, self._weights, looks=is_computed)
        return is_same and not self._adapters.may_be_mixed(self._lora)

    @property
    def files(self) -> Files | None:
        """Of the adapter, with the weights of the names; None: there is no adapter."""
        if self._adapters is None or self._weights is None:
            return None
        return self._adapters.files(self._lora, self._weights)


def _lora_of_callers() -> tuple[bool, Any]:
    """The adapter of the request that vLLM's connector handles, and whether it is known. vLLM tells managers and tiers
    no more of a request than its keys and parameters, and its connector, which calls them, has it.
    """
    for frame in callers():
        request: Any = frame.f_locals.get("request")
        if frame.f_code.co_name == "on_new_request" and hasattr(request, "lora_request"):
            return True, request.lora_request
    return False, None
