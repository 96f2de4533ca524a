"""A rank's KV cache in host memory: pools of pages, one for each group of layers."""

from __future__ import annotations

import ctypes
import importlib
import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from trtllm_reference.request import Request


@dataclass(frozen=True)
class Shape:
    """`groups`: the layers of each group, and its window in tokens (0: none)."""

    blocks: int = 64
    tokens_per_block: int = 8
    token_bytes: int = 16
    groups: tuple[tuple[tuple[int, ...], int], ...] = (((0, 1), 0),)
    dtype: str = "float16"


class HostTensor:
    """What a connector uses of a torch tensor, over memory of this process."""

    device = "cpu"

    def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
        self.shape, self.dtype = shape, dtype
        self.memory = memoryview(bytearray(math.prod(shape)))
        self._held = (ctypes.c_char * len(self.memory)).from_buffer(self.memory)

    def data_ptr(self) -> int:
        return ctypes.addressof(self._held)

    def element_size(self) -> int:
        return 1

    def numel(self) -> int:
        return len(self.memory)

    def stride(self, dim: int) -> int:
        return math.prod(self.shape[dim + 1 :])

    def is_contiguous(self) -> bool:
        return True


def torch_tensor(shape: tuple[int, ...], dtype: str) -> Any:
    """The same, made by torch."""
    torch = importlib.import_module("torch")
    tensor: Any = torch.zeros(shape, dtype=torch.uint8)
    tensor.memory = memoryview(tensor.numpy()).cast("B")
    return tensor


class Cache:
    """Pages of requests. What TensorRT-LLM's managers of both generations tell a connector manager."""

    def __init__(self, shape: Shape, make_tensor: Any = HostTensor) -> None:
        self.shape = shape
        self.tensors = [
            make_tensor((shape.blocks, len(layers), 2, shape.tokens_per_block * shape.token_bytes), shape.dtype)
            for layers, _ in shape.groups
        ]
        self._priorities: dict[int, int] = {}
        self._free = [list(range(shape.blocks)) for _ in shape.groups]

    # For a connector manager.

    def get_cache_indices(self, request: Request) -> list[int]:
        return list(request.pages[0])

    def get_page_indices_by_layer_group(self, request: Request) -> list[list[int]]:
        return [list(pages) for pages in request.pages]

    def commit_and_get_block_hashes(self, request: Request) -> list[int]:
        return []

    def get_priority_by_block_id(self, page: int) -> int:
        return self._priorities.get(page, 35)

    # For the engine.

    def is_free(self, request: Request) -> bool:
        return all(len(free) >= self._blocks(request) for free in self._free)

    def _blocks(self, request: Request) -> int:
        return -(-(request.prompt_len + request.max_new_tokens) // self.shape.tokens_per_block)

    def allocate(self, request: Request, cached: int) -> None:
        """All pages that the request may need, but for those whose tokens the window has passed."""
        request.pages = []
        for group, (_, window) in enumerate(self.shape.groups):
            passed = max(0, cached - window) // self.shape.tokens_per_block if window else 0
            taken = [self._free[group].pop() for _ in range(self._blocks(request) - passed)]
            request.pages.append([-1] * passed + taken)
        for block, priority in enumerate(request.priorities or ()):
            self._priorities[request.pages[0][block]] = priority

    def pass_windows(self, request: Request, cached: int) -> None:
        """Frees pages that no later token needs."""
        for group, (_, window) in enumerate(self.shape.groups):
            for block in range(max(0, cached - window) // self.shape.tokens_per_block if window else 0):
                self._release(group, request.pages[group], block)

    def _release(self, group: int, pages: list[int], block: int) -> None:
        if pages[block] >= 0:
            # What another request reads there by mistake is wrong.
            self.page(group, pages[block])[:] = b"\xee" * len(self.page(group, pages[block]))
            self._free[group].append(pages[block])
            pages[block] = -1

    def free(self, request: Request) -> None:
        for group, pages in enumerate(request.pages):
            for block in range(len(pages)):
                self._release(group, pages, block)

    def page(self, group: int, page: int) -> memoryview:
        nbytes = self.tensors[group].stride(0)
        view: memoryview = self.tensors[group].memory[page * nbytes : (page + 1) * nbytes]
        return view

    def slot(self, request: Request, group: int, layer: int, kv: int, position: int) -> memoryview:
        """The bytes of a token."""
        shape = self.shape
        page = request.pages[group][position // shape.tokens_per_block]
        if page < 0:
            raise IndexError(f"request {request.request_id} has no page for token {position} in group {group}")
        row = (layer * 2 + kv) * shape.tokens_per_block + position % shape.tokens_per_block
        return self.page(group, page)[row * shape.token_bytes : (row + 1) * shape.token_bytes]

    def layout(self) -> Any:
        """As `KvCacheLayout`."""
        groups = []
        for number, ((layers, window), tensor) in enumerate(zip(self.shape.groups, self.tensors, strict=True)):
            buffers = tuple(SimpleNamespace(layer_id=it, role=role) for it in layers for role in ("key", "value"))
            region = SimpleNamespace(
                base=tensor.data_ptr(),
                size=tensor.stride(0),
                stride=tensor.stride(0),
                num_slots=self.shape.blocks,
                buffers=buffers,
                as_tensor=lambda tensor=tensor: tensor,
            )
            groups.append(
                SimpleNamespace(
                    layer_group_id=number,
                    layer_ids=layers,
                    window_size=window or None,
                    regions=(region,),
                    replicated_regions=(),
                )
            )
        return SimpleNamespace(
            tokens_per_block=self.shape.tokens_per_block, groups=tuple(groups), gpu_pool_mapping_bytes=None
        )
