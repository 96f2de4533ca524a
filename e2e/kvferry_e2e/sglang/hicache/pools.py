"""SGLang's own host pools, without a GPU: nothing is pinned, and the device's tensors lie in host memory."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from sglang.srt.mem_cache import device_pool_info as info
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

CPU = torch.device("cpu")
# Of the device: as small as the host pool allows.
_DEVICE_TOKENS = 16
# Else SGLang makes a pool only where 10 GiB more are free.
_BUDGET_BYTES = 2 << 30


def _pointers(tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return torch.tensor([it.data_ptr() for it in tensors], dtype=torch.uint64)


def _of(pages: int, page_size: int) -> dict[str, Any]:
    return {
        "host_to_device_ratio": 2.0,
        "host_size": 0,
        "page_size": page_size,
        "pin_memory": False,
        "device_capacity_tokens": _DEVICE_TOKENS,
        "host_token_capacity": pages * page_size,
    }


def mha(
    *,
    layout: str = "page_first",
    dtype: torch.dtype = torch.float16,
    layers: int = 4,
    heads: int = 4,
    head_dim: int = 64,
    page_size: int = 16,
    pages: int = 64,
) -> Any:
    k, v = (tuple(torch.zeros(_DEVICE_TOKENS, heads, head_dim, dtype=dtype) for _ in range(layers)) for _ in range(2))
    described = info.MHABufferInfo(
        buffers=info.KVBuffers(
            k=k, v=v, k_data_ptrs=_pointers(k), v_data_ptrs=_pointers(v), layout=info.KVBufferLayout.NHD
        ),
        page_size=page_size,
        head_num=heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        dtype=dtype,
        device=CPU,
    )
    with host_memory_budget_scope(_BUDGET_BYTES):
        return MHATokenToKVPoolHost(described, layout=layout, start_layer=0, end_layer=layers, **_of(pages, page_size))


def mla(
    *,
    layout: str = "page_first",
    dtype: torch.dtype = torch.float16,
    layers: int = 4,
    page_size: int = 16,
    pages: int = 64,
) -> Any:
    lora, rope = 448, 64
    rows = tuple(torch.zeros(_DEVICE_TOKENS, 1, lora + rope, dtype=dtype) for _ in range(layers))
    described = info.MLABufferInfo(
        buffers=rows,
        data_ptrs=_pointers(rows),
        layer_indices=tuple(range(layers)),
        device_layer_num=layers,
        page_size=page_size,
        kv_lora_rank=lora,
        qk_rope_head_dim=rope,
        kv_cache_dim=lora + rope,
        dtype=dtype,
        device=CPU,
    )
    more = _of(pages, page_size)
    with host_memory_budget_scope(_BUDGET_BYTES):
        return MLATokenToKVPoolHost(
            described, layout=layout, start_layer=0, end_layer=layers, target_layer_num=layers, **more
        )


def mamba(*, slots: int = 64) -> Any:
    layers, capacity = 2, 8
    described = info.MambaStateBufferInfo(
        temporal=torch.zeros(layers, capacity, 4, 32, 16),
        conv=(torch.zeros(layers, capacity, 96, 3), torch.zeros(layers, capacity, 32, 3)),
    )
    with host_memory_budget_scope(_BUDGET_BYTES):
        return MambaPoolHost(
            described, slots / capacity, 0, device_capacity=capacity, pin_memory=False, layout="page_first"
        )


def buffers(pool: Any) -> list[torch.Tensor]:
    """All memory of a pool, as bytes."""
    found = pool.get_hybrid_pool_buffer() if hasattr(pool, "get_hybrid_pool_buffer") else [pool.kv_buffer]
    return [it.view(-1).view(torch.uint8) for it in found if it.numel()]


def fill(pool: Any, seed: int) -> None:
    noise = torch.Generator().manual_seed(seed)
    for it in buffers(pool):
        it.copy_(torch.randint(0, 256, it.shape, dtype=torch.uint8, generator=noise))


def page(pool: Any, number: int) -> bytes:
    """The bytes of a page, by its pointers."""
    each = pool.page_size
    pointers, sizes = pool.get_page_buffer_meta(torch.arange(number * each, (number + 1) * each))
    return b"".join(ctypes.string_at(pointer, size) for pointer, size in zip(pointers, sizes, strict=True))


def indices(pool: Any, numbers: list[int]) -> torch.Tensor:
    """The host indices of pages."""
    each = pool.page_size
    return torch.cat([torch.arange(it * each, (it + 1) * each) for it in numbers])
