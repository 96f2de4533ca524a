"""Where the KV blocks of one vLLM worker lie, as kvferry's layout.

The numbers come from the tensors' strides and from the specs of the layers, never from shapes alone: a cache with two
heads and one with two planes have the same shape.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry._engine.identity.vllm import LayerFacts, processor


class UnsupportedCacheError(ValueError):
    """A cache that kvferry does not hand over."""


@dataclass(frozen=True)
class Place:
    """Which part of the model a worker holds."""

    tp_rank: int = 0
    tp_size: int = 1
    # Context parallelism of decode: ranks that share the tokens of a request.
    dcp_rank: int = 0
    dcp_size: int = 1
    # Tokens of a run that one of these ranks holds.
    dcp_interleave: int = 1


@dataclass(frozen=True)
class Group:
    """A group of layers that share block tables. `window`: 0 for kinds without one."""

    name: str
    kind: str
    window: int
    block_tokens: int
    context: Place | None

    @property
    def rule(self) -> tuple[str, int, int]:
        """For `kvferry.connector.SchedulerHalf`: tokens of a block of all context-parallel ranks together."""
        ranks = self.context.dcp_size if self.context else 1
        return self.kind, self.window, self.block_tokens * ranks


def layer_specs(group: Any) -> Iterator[tuple[str, Any]]:
    """The layers of a `KVCacheGroupSpec`, each with its own spec."""
    spec = group.kv_cache_spec
    own = getattr(spec, "kv_cache_specs", None)
    for layer in group.layer_names:
        yield layer, own[layer] if own is not None else spec


def _class_names(spec: Any) -> set[str]:
    return {it.__name__ for it in type(spec).__mro__}


def groups(kv_cache_config: Any, place: Place) -> list[Group]:
    """The groups that are handed over, in the order of vLLM's transfer groups.

    Raises `UnsupportedCacheError` for a cache that has no blocks that another engine could use.
    """
    found = []
    for number, group in zip(kv_cache_config.transfer_group_ids, kv_cache_config.transfer_groups, strict=True):
        _, spec = next(layer_specs(group))
        kind, window = _kind(spec)
        sharded = place.dcp_size > 1 and kind != "state" and getattr(spec, "dcp_sharded", True)
        found.append(Group(str(number), kind, window, spec.block_size, place if sharded else None))
    return found


def _kind(spec: Any) -> tuple[str, int]:
    names = _class_names(spec)
    if "MambaSpec" in names:
        return "state", 0
    if "SlidingWindowSpec" in names:
        return "window", spec.sliding_window
    if "ChunkedLocalAttentionSpec" in names:
        return "chunk", spec.attention_chunk_size
    if "FullAttentionSpec" in names:
        return "full", 0
    raise UnsupportedCacheError(f"KVFerryConnector does not hand over a cache of the kind {type(spec).__name__}")


@dataclass(frozen=True)
class Storage:
    """Memory of one allocation. `device`: the number of its GPU; None for memory of the host."""

    address: int
    nbytes: int
    device: int | None = None


def storages(kv_caches: Mapping[str, Any]) -> list[Storage]:
    """The allocations that the tensors are views of, each once."""
    found: dict[int, Storage] = {}
    for layer, tensor in kv_caches.items():
        if tensor.device.type not in ("cpu", "cuda"):
            raise UnsupportedCacheError(
                f"the KV cache of layer {layer} lies in the memory of {tensor.device}; this version of kvferry reads "
                "and writes memory of the host and of CUDA devices only"
            )
        device = tensor.device.index if tensor.device.type == "cuda" else None
        storage = tensor.untyped_storage()
        found.setdefault(storage.data_ptr(), Storage(storage.data_ptr(), storage.nbytes(), device))
    devices = {it.device for it in found.values()}
    if len(devices) > 1:
        raise UnsupportedCacheError(f"the KV cache lies in the memory of several devices: {sorted(map(str, devices))}")
    return list(found.values())


def _natural(name: str) -> list[tuple[int, int | str]]:
    parts = re.split(r"(\d+)", name)
    return [(0, int(part)) if part.isdigit() else (1, part) for part in parts]


def in_order(layers: Sequence[str]) -> list[str]:
    """The layers in the order of computing: by the numbers in their names."""
    return sorted(layers, key=_natural)


@dataclass(frozen=True)
class Layout:
    """`json` is what `kvferry.connector.WorkerHalf` takes; `layers` are its layers in their order."""

    json: str
    layers: list[str]


def layout(
    kv_caches: Mapping[str, Any],
    kv_cache_config: Any,
    place: Place,
    facts: Mapping[str, LayerFacts],
    regions: Sequence[tuple[int, int, int]],
) -> Layout:
    """The layout of the tensors that vLLM registers.

    `facts`: of each layer. `regions`: id, address and bytes of each registered allocation.
    """
    specs = {layer: spec for group in kv_cache_config.transfer_groups for layer, spec in layer_specs(group)}
    group_of = kv_cache_config.transfer_group_index_by_layer
    blocks = kv_cache_config.num_blocks
    shapes: list[dict[str, Any]] = []
    layers = []
    for layer in in_order([name for name in kv_caches if name in specs]):
        tensor, spec = kv_caches[layer], specs[layer]
        storage = tensor.untyped_storage().data_ptr()
        region = next(at for at, (_, address, _) in enumerate(regions) if address == storage)
        shape = _shape(layer, tensor, spec, blocks, place, facts.get(layer, LayerFacts()))
        if shape not in shapes:
            shapes.append(shape)
        plane = {"shape": shapes.index(shape), "region": region, "base": tensor.data_ptr() - storage}
        layers.append({"name": layer, "group": group_of[layer], "planes": [plane]})
    parts = {
        "v": 1,
        "regions": [{"id": number, "len": nbytes} for number, _, nbytes in regions],
        "groups": [_group(group, blocks) for group in groups(kv_cache_config, place)],
        "shapes": shapes,
        "layers": layers,
    }
    return Layout(json.dumps(parts), [layer["name"] for layer in layers])


def _group(group: Group, blocks: int) -> dict[str, Any]:
    parts = {
        "name": group.name,
        "kind": group.kind,
        "window": group.window,
        "block_tokens": group.block_tokens,
        "blocks": blocks,
    }
    if group.context is not None:
        context = group.context
        parts["context"] = {
            "rank": context.dcp_rank,
            "size": context.dcp_size,
            "interleave": context.dcp_interleave,
        }
    return parts


def _shape(layer: str, tensor: Any, spec: Any, blocks: int, place: Place, facts: LayerFacts) -> dict[str, Any]:
    element = tensor.element_size()
    if tensor.dim() != 4 or tensor.stride(3) != 1 or tensor.shape[0] % blocks != 0:
        raise UnsupportedCacheError(
            f"the KV cache of layer {layer} is not blocks × heads × states × content: shape {tuple(tensor.shape)}, "
            f"strides {tensor.stride()}, {blocks} blocks"
        )
    block, heads, rows, content = tensor.shape
    split = block // blocks
    if "MambaSpec" in _class_names(spec):
        # All of a rank's state is one run of bytes. Ranks of another number have it cut differently, also within the
        # run, so they do not fit.
        held = (1, 0, 1) if getattr(spec, "tp_replicated", False) else (place.tp_size, place.tp_rank, 1)
        encoding, bits, role, content_bytes = _state(spec), 8, "state", spec.state_content_size_bytes
        if heads != 1 or rows != 1 or split != 1:
            raise UnsupportedCacheError(
                f"the state of layer {layer} has {heads} heads, {rows} rows, {split} kernel blocks"
            )
    else:
        held = _heads(layer, spec, heads, place, facts.kv_heads)
        encoding, bits = _encoding(spec), element * 8
        role, content_bytes = "kv", content * element
        if tensor.device.type == "cpu" and "MLAAttentionSpec" not in _class_names(spec):
            # The kernels of the CPU keep all keys of a head's block before all its values, in an order of their own:
            # no token has bytes that can be copied alone, so a head's block is one row.
            if tensor.stride(2) != content or split != 1:
                raise UnsupportedCacheError(f"the KV cache of layer {layer} has strides {tensor.stride()}")
            encoding = f"cpu {processor(facts.kernel)}:{rows}:{encoding}"
            content_bytes, rows = content_bytes * rows, 1
        elif tensor.device.type != "cpu" and facts.backend is not None and "MLAAttentionSpec" not in _class_names(spec):
            # The backend decides whether a token's row has keys and values only, or scales, too.
            encoding = f"{facts.backend}:{encoding}"
    block_stride, head_stride, row_stride = (tensor.stride(axis) * element for axis in range(3))
    total, start, count = held
    return {
        "role": role,
        "encoding": encoding,
        "bits": bits,
        "heads_total": total,
        "head_start": start,
        "heads": count,
        "rows": rows * split,
        "content": content_bytes,
        "block_stride": block_stride * split,
        "kernel_blocks": split,
        "kernel_stride": block_stride,
        "head_stride": head_stride,
        "row_stride": row_stride,
    }


def _heads(layer: str, spec: Any, heads: int, place: Place, total: int | None) -> tuple[int, int, int]:
    """Heads of the layer on all ranks, the first one here, and how many are here.

    `total`: None if it is not known. vLLM spreads heads evenly, so that ranks with several have different ones, and
    where there are more ranks than heads each has one. Those ranks are then taken for different ones: engines of
    another tensor parallelism do not fit, instead of reading the wrong heads.
    """
    size, rank = place.tp_size, place.tp_rank
    if _class_names(spec) & {"MLAAttentionSpec", "SlidingWindowMLASpec"}:
        # One latent for all heads, the same on every rank.
        return heads, 0, heads
    shards = getattr(spec, "max_tp_shards", None)
    if shards is None:
        shards = size if heads > 1 or total is None else total
    shards = min(shards, size)
    if shards < 1 or size % shards != 0:
        raise UnsupportedCacheError(f"layer {layer}: {heads} heads on each of {size} ranks, in {shards} parts")
    return heads * shards, rank // (size // shards) * heads, heads


def _encoding(spec: Any) -> str:
    parts = [str(getattr(spec, "cache_dtype_str", None) or str(spec.dtype).removeprefix("torch."))]
    quantised = getattr(spec, "kv_quant_mode", None)
    if quantised is not None and getattr(quantised, "name", "NONE") != "NONE":
        parts.append(quantised.name.lower())
    return ":".join(parts)


def _state(spec: Any) -> str:
    return f"state:{_dtypes(spec)}{':DS' if has_channels_first(spec) else ''}"


def has_channels_first(spec: Any) -> bool:
    """Whether the state of a convolution has its axes in the other order than vLLM's default: ``DS``, and not ``SD``,
    as ``VLLM_SSM_CONV_STATE_LAYOUT`` names them. Number and type of the elements are the same.

    It is the first state of a layer, and the only kind of first state that has two axes: steps and channels, of which
    there are many more.
    """
    shapes: Any = getattr(spec, "shapes", None) or ((),)
    first = shapes[0]
    return len(first) == 2 and bool(first[0] > first[1])


def _dtypes(spec: Any) -> str:
    return ",".join(str(dtype).removeprefix("torch.") for dtype in spec.dtypes)
