"""Where the blocks of a rank's KV cache are in memory, and copies between them and other memory of this process.

TensorRT-LLM gives either one tensor, whose rows are blocks with all layers, or a description of groups of layers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvferry._engine.identity import fingerprint
from kvferry.trtllm._gpu import GpuCopies
from kvferry.trtllm._of_trtllm import check_layout


@dataclass(frozen=True)
class Piece:
    """Bytes that repeat in each page: page i's are at ``base + stride * i``."""

    base: int
    stride: int
    nbytes: int
    slots: int


@dataclass(frozen=True)
class Group:
    """A group of layers, with its own numbers of pages."""

    number: int
    # Tokens of the sliding window; 0: full attention.
    window: int
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        """Of a block."""
        return sum(piece.nbytes for piece in self.pieces)


class Memory:
    """Memory of this process outside of the cache. `buffer` keeps it."""

    def __init__(self, buffer: Any, addr: int, region: Any = None) -> None:
        self.buffer, self.addr = buffer, addr
        # The region of the store's agent, if the agent has registered the memory.
        self.region = region


@dataclass(frozen=True)
class Move:
    """Copies of one piece of each page, to or from an offset in memory."""

    piece: Piece
    pages: list[int]
    offsets: list[int]


class HostCopies:
    """Copies of a cache in host memory."""

    access: Literal["none", "rw"] = "none"

    def open(self, agent: Any) -> None: ...

    def close(self) -> None: ...

    def begin(self, moves: Sequence[Move], memory: Memory, *, to_pages: bool, stream: Any) -> _HostCopy:
        """Copies on the thread that waits."""
        return _HostCopy(moves, memory, to_pages)


@dataclass(frozen=True)
class _HostCopy:
    moves: Sequence[Move]
    memory: Memory
    to_pages: bool

    def wait(self) -> None:
        for move in self.moves:
            piece = move.piece
            for page, offset in zip(move.pages, move.offsets, strict=True):
                place, other = piece.base + piece.stride * page, self.memory.addr + offset
                if self.to_pages:
                    ctypes.memmove(place, other, piece.nbytes)
                else:
                    ctypes.memmove(other, place, piece.nbytes)


@dataclass(frozen=True)
class Pages:
    """The cache of a rank."""

    groups: tuple[Group, ...]
    tokens_per_block: int
    # What the bytes of a block depend on, besides the model.
    fingerprint: bytes
    copies: HostCopies | GpuCopies
    # Whether the store may read pages while requests run: they are in host memory, and stay with their request.
    is_direct: bool
    # Keeps the memory.
    owner: Any

    @staticmethod
    def of_tensor(tensor: Any, tokens_per_block: int | None, dtype: str) -> Pages:
        """Raises NotImplementedError."""
        if tokens_per_block is None:
            raise NotImplementedError(
                "kvferry.trtllm: the arguments have no kv_cache_config.tokens_per_block, and a tensor does not say it"
            )
        if not tensor.is_contiguous():
            raise NotImplementedError(
                "kvferry.trtllm needs a contiguous KV cache tensor; this one has gaps or another order"
            )
        shape = [int(it) for it in tensor.shape]
        slots = shape[0]
        row = int(tensor.numel()) // slots * int(tensor.element_size())
        piece = Piece(int(tensor.data_ptr()), row, row, slots)
        group = Group(0, 0, (piece,))
        is_host = _is_host(tensor)
        copies = HostCopies() if is_host else GpuCopies([piece])
        layout = {"shape": shape[1:], "dtype": str(tensor.dtype), "configured": dtype, "tokens": tokens_per_block}
        return Pages((group,), tokens_per_block, _fingerprint(layout), copies, is_host, tensor)

    @staticmethod
    def of_layout(layout: Any, dtype: str) -> Pages:
        """Of `KvCacheLayout`. Raises NotImplementedError and `kvferry._engine.hooks.EngineError`."""
        check_layout(layout)
        groups, described = [], []
        gpus: list[Piece] = []
        all_pieces: list[Piece] = []
        for given in layout.groups:
            pieces, regions = [], []
            for region in (*given.regions, *getattr(given, "replicated_regions", ())):
                piece = Piece(int(region.base), int(region.stride), int(region.size), int(region.num_slots))
                pieces.append(piece)
                buffers = [_described(it) for it in getattr(region, "buffers", ())]
                regions.append([piece.nbytes, buffers])
                if hasattr(region, "as_tensor") and not _is_host(region.as_tensor()):
                    gpus.append(piece)
            all_pieces += pieces
            window = int(getattr(given, "window_size", None) or 0)
            number = int(given.layer_group_id)
            groups.append(Group(number, window, tuple(pieces)))
            described.append([number, window, list(given.layer_ids), regions])
        tokens = int(layout.tokens_per_block)
        if gpus and len(gpus) < len(all_pieces):
            raise NotImplementedError("kvferry.trtllm: some layers of the KV cache are in host memory, others on a GPU")
        copies: HostCopies | GpuCopies = GpuCopies(gpus) if gpus else HostCopies()
        of_data = str(getattr(layout, "dtype", None))
        fingerprint = _fingerprint({"groups": described, "dtype": of_data, "configured": dtype, "tokens": tokens})
        # Pages leave a window, or their request, without notice.
        return Pages(tuple(groups), tokens, fingerprint, copies, False, layout)

    def to_pages(
        self, group: Group, pages: Sequence[int], memory: Memory, offset: int, stream: Any = None
    ) -> tuple[int, Any]:
        """Begins to copy blocks that lie one after another; -1 is no page. Returns the number of pages and the copy."""
        there = [(at, page) for at, page in enumerate(pages) if page >= 0]
        moves = self._moves(group, there, offset)
        return len(there), self.copies.begin(moves, memory, to_pages=True, stream=stream)

    def from_pages(
        self, group: Group, pages: Sequence[int], memory: Memory, offset: int = 0, stream: Any = None
    ) -> Any:
        """Begins to copy pages to memory, one after another. Returns the copy."""
        moves = self._moves(group, list(enumerate(pages)), offset)
        return self.copies.begin(moves, memory, to_pages=False, stream=stream)

    def _moves(self, group: Group, pages: Sequence[tuple[int, int]], offset: int) -> list[Move]:
        moves = []
        for piece in group.pieces if pages else ():
            numbers = [_within(piece, page) for _, page in pages]
            moves.append(Move(piece, numbers, [offset + at * group.nbytes for at, _ in pages]))
            offset += piece.nbytes
        return moves

    def group(self, number: int) -> Group:
        for group in self.groups:
            if group.number == number:
                return group
        raise KeyError(f"the KV cache has no group of layers {number}")


def _described(buffer: Any) -> list[str]:
    """The layer and the role of a buffer, and what newer versions say besides."""
    return [str(it) for it in (buffer if isinstance(buffer, tuple) else (buffer.layer_id, buffer.role))]


def _within(piece: Piece, page: int) -> int:
    if page >= piece.slots:
        raise IndexError(f"page {page} is not in the KV cache, which has {piece.slots}")
    return page


def _is_host(tensor: Any) -> bool:
    return str(getattr(tensor, "device", "cpu")).startswith("cpu")


def _fingerprint(layout: Any) -> bytes:
    return fingerprint(["kvferry.trtllm", 2, layout], sort_keys=False)
