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


@dataclass(frozen=True)
class _Column:
    """One piece of each page."""

    region: kvferry.Region
    # In the region, per page.
    offsets: list[int]
    nbytes: int


@dataclass(frozen=True)
class Pages:
    """The memory of the pages of one call."""

    count: int
    columns: list[_Column]
    # Parts of a page that are blocks of their own.
    split: int

    @property
    def nbytes(self) -> int:
        return self.count * sum(column.nbytes for column in self.columns)

    def memory(self, part: int, begin: int = 0) -> kvferry.Blocks:
        """A part of each page from number `begin` on."""
        each = len(self.columns) // self.split
        first, *others = self.columns[each * part : each * (part + 1)]
        memory = kvferry.Blocks(first.region, first.offsets[begin:] if begin else first.offsets, first.nbytes)
        for column in others:
            memory.add_pieces(column.region, column.offsets[begin:] if begin else column.offsets, column.nbytes)
        return memory


@dataclass(frozen=True)
class _Steps:
    """Where a piece of the page at an index of the pool is: at `base + index * stride` in the region."""

    region: kvferry.Region
    base: int
    stride: int
    nbytes: int


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
    # Of each piece. None where the places are not proportional to the index, or change: SGLang is asked each time.
    steps: list[_Steps] | None = None
    spaces: Sequence[kvferry.Space] = field(default_factory=list)
    # For the interface that copies.
    copied: kvferry.Space | None = None

    def pages(self, buffers: Buffers, count: int, host_indices: Any) -> Pages:
        """Raises ValueError if the indices are not those of `count` whole pages of the pool."""
        each = self.pool.page_size or 1
        if self.pieces is None or len(host_indices) != count * each:
            raise ValueError(f"{len(host_indices)} indices of the host pool are not those of {count} pages")
        first = host_indices[::each].tolist()
        if min(first) < 0 or max(first) > self.pool.size - each:
            raise ValueError(f"indices beyond the {self.pool.size} of the host pool")
        if self.steps is not None:
            columns = [_Column(it.region, [it.base + at * it.stride for at in first], it.nbytes) for it in self.steps]
        else:
            columns = _columns(self.pool, self.split, buffers, host_indices, len(self.pieces))
        return Pages(count, columns, self.split)

    def find_steps(self, buffers: Buffers) -> None:
        """SGLang's pointers of 128 pages take as long as reading 1 MiB. So they are asked for once, for a few pages."""
        pool, each = self.pool, self.pool.page_size or 1
        pages = pool.size // each
        if self.pieces is None or pages < 2 or getattr(pool, "shared_allocation_domain", None) is not None:
            return
        probes = sorted({0, 1, pages // 2, pages - 1})
        indices = torch.cat([torch.arange(it * each, (it + 1) * each) for it in probes])
        columns = _columns(pool, self.split, buffers, indices, len(self.pieces))
        steps = []
        for column, nbytes in zip(columns, self.pieces, strict=True):
            base, stride = column.offsets[0], (column.offsets[1] - column.offsets[0]) // each
            if column.nbytes != nbytes or column.offsets != [base + it * each * stride for it in probes]:
                return
            steps.append(_Steps(column.region, base, stride, nbytes))
        self.steps = steps


def pieces_of(pool: Any, split: int) -> list[int]:
    """The bytes of each piece of a page. Raises what the pool raises if it has no pointers of its pages."""
    _, sizes = _pointers(pool, torch.arange(pool.page_size or 1), split)
    if not sizes or len(sizes) % split:
        raise ValueError(f"a page of {type(pool).__name__} has {len(sizes)} pieces")
    return [int(size) for size in sizes]


def _columns(pool: Any, split: int, buffers: Buffers, host_indices: Any, pieces: int) -> list[_Column]:
    pointers, sizes = _pointers(pool, host_indices, split)
    columns = []
    for piece in range(pieces):
        of_piece, nbytes = pointers[piece::pieces], sizes[piece]
        region = buffers.of(min(of_piece), max(of_piece) + nbytes)
        base = region.addr
        columns.append(_Column(region, [pointer - base for pointer in of_piece], nbytes))
    return columns


def _pointers(pool: Any, host_indices: Any, split: int) -> tuple[list[int], list[int]]:
    if split > 1:
        pointers, sizes = pool.get_split_heads_page_buffer_meta(host_indices, split)
    else:
        pointers, sizes = pool.get_page_buffer_meta(host_indices)
    return pointers, sizes
