"""How the pages of an engine are cut into blocks of the store, and how the scheduler learns it from the workers.

The bytes of a group of layers are stored per shard. Where vLLM certifies how a rank's page lies in the page of the
whole model, a shard holds some of the model's KV heads, so that engines of another tensor parallelism find it.
Elsewhere it holds what one rank of an engine of the same parallelism has.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry._engine.identity import fingerprint
from kvferry._engine.identity.vllm import LayerFacts, processor
from kvferry.vllm._layout import UnsupportedCacheError

_VERSION = 2


@dataclass(frozen=True)
class Piece:
    """Bytes of a layer's page that belong to a shard."""

    tensor: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Shard:
    """A block of the store, per offloaded block of the engine."""

    index: int
    count: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class GroupLayout:
    """How a rank stores the blocks of a group of layers."""

    group: int
    # What the bytes of a block depend on.
    fingerprint: bytes
    shards: tuple[Shard, ...]
    # Ranks that hold the same bytes take turns to store them.
    writers: int
    writer: int
    # Blocks of the engine before a position that a load needs at least; 0: all.
    window_tokens: int
    is_shared: bool

    def is_writer(self, block: int) -> bool:
        return block % self.writers == self.writer


def group_layouts(
    config: Any,
    kv_caches: Any,
    kv_cache_config: Any | None,
    share_tp: int,
    interleave: int | None = None,
    facts: Mapping[str, LayerFacts] | None = None,
) -> list[GroupLayout]:
    """`config`: vLLM's `OffloadingConfig`; `kv_cache_config`: None if it is not known; `interleave`: tokens in a row
    that one rank has with context parallelism, None if that is not known.
    """
    made = []
    facts = facts or {}
    for group, refs in zip(config.groups, kv_caches.group_data_refs, strict=True):
        if not refs:
            # A stage of a pipeline without layers of this group: it has nothing to store or to load.
            made.append(GroupLayout(group.group_id, b"", (), 1, 0, 0, False))
            continue
        specs = specs_of(kv_cache_config, group)
        mappings = [ref.mapping for ref in refs]
        window = max((_window(spec) for spec in specs), default=0)
        shared = None
        of_layers = [facts.get(name, LayerFacts()) for name in group.layer_names]
        if specs and len(specs) == len(refs):
            shared = _shared_shards(config, refs, specs, of_layers, share_tp)
        if shared is not None:
            shards, described = shared
            writers, writer = mappings[0].num_writers, mappings[0].writer_index
        else:
            parallel = config.parallel
            pieces = tuple(Piece(ref.tensor_idx, 0, ref.page_size_bytes) for ref in refs)
            shards = (Shard(parallel.rank, parallel.world_size, pieces),)
            described = [*(repr(spec) for spec in specs), _parallelism(parallel, interleave)]
            writers, writer = 1, 0
        fingerprint = _fingerprint(config, kv_caches, group, refs, described, of_layers)
        made.append(GroupLayout(group.group_id, fingerprint, shards, writers, writer, window, shared is not None))
    return made


def _parallelism(parallel: Any, interleave: int | None) -> str:
    sizes = f"tp {parallel.tp_size} pp {parallel.pp_size} pcp {parallel.pcp_size} dcp {parallel.dcp_size}"
    if parallel.pcp_size * parallel.dcp_size == 1:
        return sizes
    if interleave is None:
        raise UnsupportedCacheError(
            f"the tokens of a block are spread over ranks ({sizes}), and how is not known: KVFerryOffloadingSpec needs "
            "vLLM's OffloadingConnector around it for context parallelism"
        )
    return f"{sizes} interleave {interleave}"


def specs_of(kv_cache_config: Any | None, group: Any) -> list[Any]:
    """The specs of a group's layers in their order."""
    if kv_cache_config is None:
        return []
    spec = kv_cache_config.kv_cache_groups[group.group_id].kv_cache_spec
    own = getattr(spec, "kv_cache_specs", None)
    return [own[layer] if own is not None else spec for layer in group.layer_names]


def _names(spec: Any) -> set[str]:
    return {it.__name__ for it in type(spec).__mro__}


def _window(spec: Any) -> int:
    names = _names(spec)
    if "MambaSpec" in names:
        return 1
    if "SlidingWindowSpec" in names:
        return int(spec.sliding_window)
    if "ChunkedLocalAttentionSpec" in names:
        return int(spec.attention_chunk_size)
    return 0


def _shared_shards(
    config: Any, refs: list[Any], specs: list[Any], facts: list[LayerFacts], share_tp: int
) -> tuple[tuple[Shard, ...], list[str]] | None:
    """Shards of heads, and what describes the layers; None if a layer's page can't be cut by heads."""
    parts: list[tuple[int, int]] = []
    described = []
    for ref, spec, fact in zip(refs, specs, facts, strict=True):
        mapping = ref.mapping
        # One run: the heads of this rank follow each other in its page and in the model's page. A page with two halves
        # has that in an engine of one rank, too, but vLLM 0.32 has no such page in the layout LBHNC.
        if (
            mapping is None
            or not mapping.parallelism_agnostic
            or config.kv_cache_layout != "LBHNC"
            or len(mapping.runs) != 1
        ):
            return None
        (run,) = mapping.runs
        page = mapping.local_page_size_bytes
        of = mapping.canonical_page_size_bytes // page
        if "MLAAttentionSpec" in _names(spec):
            total = 1
        elif (run.local_offset, run.fragment_size, run.num_fragments) == (
            0,
            page,
            1,
        ) and not run.canonical_offset % page:
            total = spec.num_kv_heads * of
            if not _is_certain(total, of, spec, fact, config.parallel.tp_size):
                return None
        else:
            return None
        described.append(_describe(spec, total))
        parts.append((total, run.canonical_offset // page))
    totals = {total for total, _ in parts}
    firsts = {first for _, first in parts}
    if len(totals) != 1 or len(firsts) != 1:
        return None
    total, here = totals.pop(), firsts.pop()
    ranks = refs[0].mapping.canonical_page_size_bytes // refs[0].mapping.local_page_size_bytes
    count = math.gcd(total, share_tp)
    if count % ranks:
        raise ValueError(
            f"kv_connector_extra_config: share_tp is {share_tp}, but the KV heads of this engine are spread over "
            f"{ranks} ranks; set share_tp to a multiple of {ranks} on all engines that share the store"
        )
    each = count // ranks
    shards = tuple(
        Shard(
            here * each + at,
            count,
            tuple(
                Piece(ref.tensor_idx, at * (ref.page_size_bytes // each), ref.page_size_bytes // each) for ref in refs
            ),
        )
        for at in range(each)
    )
    return shards, described


def _is_certain(total: int, shards: int, spec: Any, fact: LayerFacts, ranks: int) -> bool:
    """Whether a layer has so many heads in so many shards. vLLM concludes it from one number for the model, and layers
    may have other numbers: ranks are then taken for replicas which are none.
    """
    if spec.num_kv_heads > 1:
        # Ranks with several heads have different ones.
        return shards == ranks
    return shards == ranks if fact.kv_heads is None else total == fact.kv_heads


def _describe(spec: Any, heads: int) -> str:
    parts = [type(spec).__name__, str(heads)]
    fields = ("block_size", "head_size", "dtype", "cache_dtype_str", "kv_quant_mode", "sliding_window")
    for name in fields:
        parts.append(f"{name}={getattr(spec, name, None)}")
    return " ".join(parts)


def _fingerprint(
    config: Any, kv_caches: Any, group: Any, refs: list[Any], described: list[str], facts: list[LayerFacts]
) -> bytes:
    device = kv_caches.tensors[refs[0].tensor_idx].tensor.device.type
    parts = {
        "v": _VERSION,
        "device": f"cpu {processor()}" if device == "cpu" else device,
        "kernels": [fact.kernel for fact in facts],
        "dtype": config.model.dtype,
        "layout": config.kv_cache_layout,
        "tokens": group.tokens_per_block,
        "blocks": config.cache.blocks_per_chunk,
        "layers": list(group.layer_names),
        "pages": [] if described and len(described) == len(refs) else [ref.page_size_bytes for ref in refs],
        "specs": described,
    }
    backends = [fact.backend for fact in facts]
    if device != "cpu" and any(backends):
        # The backend decides what a token's row has, as in handoffs.
        parts["backends"] = backends
    return fingerprint(parts)


def check_device(kv_caches: Any) -> None:
    """Raises `UnsupportedCacheError` for pages in the memory of a device that is no CUDA device."""
    for held in kv_caches.tensors:
        if held.tensor.device.type not in ("cpu", "cuda"):
            raise UnsupportedCacheError(
                f"the KV cache is in the memory of {held.tensor.device}, and KVFerryOffloadingSpec reads and writes "
                "memory of the host and of CUDA devices only; use vLLM's tiering with kvferry behind it: "
                '"spec_name": "TieringOffloadingSpec" and "secondary_tiers": [{"type": "KVFerryTier", '
                '"module_path": "kvferry.vllm", ...}]; see docs/storage.md'
            )


def gpu_of(kv_caches: Any) -> int | None:
    """The number of the GPU that has the pages; None for memory of the host."""
    devices = {held.tensor.device.index for held in kv_caches.tensors if held.tensor.device.type == "cuda"}
    if len(devices) > 1:
        raise UnsupportedCacheError(f"the KV cache lies in the memory of several GPUs: {sorted(devices)}")
    return next(iter(devices), None)


def regions_of(agent: Any, kv_caches: Any) -> tuple[list[Any], list[tuple[Any, int, int]]]:
    """Registers the memory of the engine's pages.

    Returns the regions, and for each tensor its region, where its first page is in it, and the distance of two pages.
    """
    found: dict[int, Any] = {}
    places = []
    gpu = gpu_of(kv_caches)
    device = None if gpu is None else f"cuda:{gpu}"
    for held in kv_caches.tensors:
        tensor = held.tensor
        storage = tensor.untyped_storage()
        region = found.get(storage.data_ptr())
        if region is None:
            memory = storage.data_ptr(), storage.nbytes()
            region = found[storage.data_ptr()] = agent.register(memory, "none", device=device)
        places.append((region, tensor.data_ptr() - storage.data_ptr(), tensor.stride(0)))
    return list(found.values()), places


# A worker writes its card before the scheduler is made; both are processes of one host and one user.


def _card_path(engine_id: str, rank: int) -> Path:
    name = hashlib.sha256(engine_id.encode()).hexdigest()[:24]
    return Path(tempfile.gettempdir()) / f"kvferry-{os.getuid()}-{name}-{rank}.json"


def write_card(engine_id: str, rank: int, model: str, layouts: list[GroupLayout]) -> Path:
    """Tells the scheduler of the engine how this rank names its blocks."""
    card = {
        "v": _VERSION,
        "model": model,
        "groups": [
            {
                "group": it.group,
                "fingerprint": it.fingerprint.hex(),
                "shards": [(shard.index, shard.count) for shard in it.shards],
                "window": it.window_tokens,
            }
            for it in layouts
        ],
    }
    path = _card_path(engine_id, rank)
    handle, partial = tempfile.mkstemp(prefix=path.name, dir=path.parent)
    with open(handle, "w", encoding="utf-8") as file:
        json.dump(card, file)
    os.replace(partial, path)
    return path


def remove_cards(engine_id: str, ranks: int) -> None:
    """The scheduler has read them: an engine that is killed later leaves no file."""
    for rank in range(ranks):
        with suppress(OSError):
            _card_path(engine_id, rank).unlink()


def read_card(engine_id: str, rank: int) -> dict[str, Any] | None:
    """None if the worker has not written it, or it is not this user's."""
    path = _card_path(engine_id, rank)
    with suppress(OSError, ValueError):
        # The open of another user's pipe would wait for its writer.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(handle, encoding="utf-8") as file:
            status = os.fstat(handle)
            if status.st_uid == os.getuid() and stat.S_ISREG(status.st_mode):
                card = json.load(file)
                if isinstance(card, dict) and card.get("v") == _VERSION:
                    return card
    return None
