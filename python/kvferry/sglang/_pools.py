"""SGLang's host pools as memory of the store: pages are named by pointers, and lie in registered buffers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import kvferry


class Buffers:
    """The memory of the pools, registered once each."""

    def __init__(self, agent: kvferry.Agent) -> None:
        self._agent = agent
        self._regions: list[kvferry.Region] = []
        self._lock = threading.Lock()

    def add(self, pool: Any) -> None:
        tensors = pool.get_hybrid_pool_buffer() if hasattr(pool, "get_hybrid_pool_buffer") else [pool.kv_buffer]
        for tensor in _flat(tensors):
            # Pools give views; several are of one storage.
            storage = tensor.untyped_storage()
            base, nbytes = storage.data_ptr(), storage.nbytes()
            with self._lock:
                if nbytes and self._find(base, base + nbytes) is None:
                    self._regions.append(self._agent.register((base, nbytes), "none"))

    def of(self, begin: int, end: int) -> kvferry.Region:
        region = self._find(begin, end)
        if region is None:
            raise ValueError(f"pages at {begin:#x} to {end:#x} do not lie in one buffer of a registered host pool")
        return region

    def _find(self, begin: int, end: int) -> kvferry.Region | None:
        for region in self._regions:
            if region.addr <= begin and end <= region.addr + region.nbytes:
                return region
        return None

    def close(self) -> None:
        with self._lock:
            regions, self._regions = self._regions, []
        self._agent.unregister_batch(regions)


def _flat(tensors: Any) -> list[Any]:
    if isinstance(tensors, list | tuple):
        return [one for it in tensors for one in _flat(it)]
    return [] if tensors is None else [tensors]


@dataclass
class Pages:
    """The pages of one call: for each page in turn, the pointers and sizes of its pieces."""

    buffers: Buffers
    count: int
    pointers: list[int]
    sizes: list[int]
    # Parts of a page that are blocks of their own.
    split: int

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)

    def memory(self, part: int, begin: int = 0) -> kvferry.Blocks:
        """A part of each page from number `begin` on."""
        each = len(self.pointers) // self.count
        memory: kvferry.Blocks | None = None
        for piece in range(each // self.split * part, each // self.split * (part + 1)):
            pointers = self.pointers[begin * each + piece :: each]
            nbytes = self.sizes[piece]
            region = self.buffers.of(min(pointers), max(pointers) + nbytes)
            base = region.addr
            offsets = [pointer - base for pointer in pointers]
            if memory is None:
                memory = kvferry.Blocks(region, offsets, nbytes)
            else:
                memory.add_pieces(region, offsets, nbytes)
        assert memory is not None
        return memory


@dataclass
class Pool:
    """A registered host pool, and the spaces of its pages in the store: one for each part of a page."""

    pool: Any
    # Without memory of its own: it only counts pages.
    is_logical: bool
    # Whether this rank stores its pages. Ranks have the same pages of MLA.
    writes: bool
    split: int
    # The bytes of each piece of a page, or None if its pages have no pointers.
    pieces: list[int] | None
    spaces: Sequence[kvferry.Space] = field(default_factory=list)
    # For the interface that copies.
    copied: kvferry.Space | None = None

    def pages(self, buffers: Buffers, count: int, host_indices: Any) -> Pages:
        """Raises ValueError if the indices are not those of `count` whole pages."""
        pointers, sizes = _pointers(self.pool, host_indices, self.split)
        if self.pieces is None or len(pointers) != count * len(self.pieces):
            raise ValueError(f"{len(host_indices)} indices of the host pool are not those of {count} pages")
        return Pages(buffers, count, pointers, sizes, self.split)


def pieces_of(pool: Any, split: int) -> list[int]:
    """The bytes of each piece of a page. Raises what the pool raises if it has no pointers of its pages."""
    _, sizes = _pointers(pool, torch.arange(pool.page_size or 1), split)
    if not sizes or len(sizes) % split:
        raise ValueError(f"a page of {type(pool).__name__} has {len(sizes)} pieces")
    return [int(size) for size in sizes]


def _pointers(pool: Any, host_indices: Any, split: int) -> tuple[list[int], list[int]]:
    if split > 1:
        pointers, sizes = pool.get_split_heads_page_buffer_meta(host_indices, split)
    else:
        pointers, sizes = pool.get_page_buffer_meta(host_indices)
    return pointers, sizes
