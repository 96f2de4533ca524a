"""Where the blocks of a rank's KV cache are in memory, and copies between them and other memory of this process.

TensorRT-LLM gives either one tensor, whose rows are blocks with all layers, or a description of groups of layers.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvferry._engine.identity import fingerprint


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

    def __init__(self, buffer: Any, addr: int) -> None:
        self.buffer, self.addr = buffer, addr
        self._tensor: Any = None

    def tensor(self, offset: int, nbytes: int) -> Any:
        torch = importlib.import_module("torch")
        if self._tensor is None:
            self._tensor = torch.frombuffer(self.buffer, dtype=torch.uint8)
        return self._tensor[offset : offset + nbytes]


class HostCopies:
    """The cache is in host memory."""

    def mark(self, stream: Any) -> None:
        """What has been enqueued on `stream` before an asynchronous load."""

    def to_page(self, piece: Piece, page: int, memory: Memory, offset: int) -> None:
        ctypes.memmove(piece.base + piece.stride * page, memory.addr + offset, piece.nbytes)

    def from_page(self, piece: Piece, page: int, memory: Memory, offset: int) -> None:
        ctypes.memmove(memory.addr + offset, piece.base + piece.stride * page, piece.nbytes)

    def on(self, stream: Any, mark: Any = None) -> Any:
        return _NoStream()


class _NoStream:
    def __enter__(self) -> None: ...

    def __exit__(self, *_exception: object) -> None: ...


class TensorCopies:
    """The cache is wherever torch can copy to: one tensor of bytes per piece, a row for each page."""

    def __init__(self, rows: dict[Piece, Any]) -> None:
        self._rows = rows
        self._torch = importlib.import_module("torch")
        self._is_cuda = any(row.is_cuda for row in rows.values())
        self._own: Any = None

    def mark(self, stream: Any) -> Any:
        if not self._is_cuda:
            return None
        event = self._torch.cuda.Event()
        event.record(stream)
        return event

    def on(self, stream: Any, mark: Any = None) -> Any:
        """The stream of the copies: the caller's or, after `mark`, one of their own."""
        if not self._is_cuda:
            return _NoStream()
        if mark is not None:
            if self._own is None:
                # The thread of asynchronous loads has another current device than the rank.
                self._own = self._torch.cuda.Stream(device=next(iter(self._rows.values())).device)
            stream = self._own
            stream.wait_event(mark)
        return self._torch.cuda.stream(stream)

    # Copies between pageable memory and a device have ended when they return.

    def to_page(self, piece: Piece, page: int, memory: Memory, offset: int) -> None:
        self._rows[piece][page].copy_(memory.tensor(offset, piece.nbytes))

    def from_page(self, piece: Piece, page: int, memory: Memory, offset: int) -> None:
        memory.tensor(offset, piece.nbytes).copy_(self._rows[piece][page])


@dataclass(frozen=True)
class Pages:
    """The cache of a rank."""

    groups: tuple[Group, ...]
    tokens_per_block: int
    # What the bytes of a block depend on, besides the model.
    fingerprint: bytes
    copies: HostCopies | TensorCopies
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
        copies = HostCopies() if is_host else TensorCopies({piece: _bytes_of(tensor, slots)})
        layout = {"shape": shape[1:], "dtype": str(tensor.dtype), "configured": dtype, "tokens": tokens_per_block}
        return Pages((group,), tokens_per_block, _fingerprint(layout), copies, is_host, tensor)

    @staticmethod
    def of_layout(layout: Any, dtype: str) -> Pages:
        """Of `KvCacheLayout`."""
        groups, described = [], []
        rows: dict[Piece, Any] = {}
        for given in layout.groups:
            pieces, regions = [], []
            for region in (*given.regions, *getattr(given, "replicated_regions", ())):
                piece = Piece(int(region.base), int(region.stride), int(region.size), int(region.num_slots))
                pieces.append(piece)
                buffers = [_described(it) for it in getattr(region, "buffers", ())]
                regions.append([piece.nbytes, buffers])
                if hasattr(region, "as_tensor"):
                    rows[piece] = region.as_tensor()
            window = int(getattr(given, "window_size", None) or 0)
            number = int(given.layer_group_id)
            groups.append(Group(number, window, tuple(pieces)))
            described.append([number, window, list(given.layer_ids), regions])
        tokens = int(layout.tokens_per_block)
        on_device = [row for row in rows.values() if not _is_host(row)]
        copies: HostCopies | TensorCopies = TensorCopies(rows) if on_device else HostCopies()
        of_data = str(getattr(layout, "dtype", None))
        fingerprint = _fingerprint({"groups": described, "dtype": of_data, "configured": dtype, "tokens": tokens})
        # Pages leave a window, or their request, without notice.
        return Pages(tuple(groups), tokens, fingerprint, copies, False, layout)

    def to_pages(self, group: Group, pages: Sequence[int], memory: Memory, offset: int) -> int:
        """Copies blocks that lie one after another. -1 is no page. Returns how many were copied."""
        copied = 0
        for at, page in enumerate(pages):
            place = offset + at * group.nbytes
            if page >= 0:
                for piece in group.pieces:
                    self.copies.to_page(_within(piece, page), page, memory, place)
                    place += piece.nbytes
                copied += 1
        return copied

    def from_pages(self, group: Group, pages: Sequence[int], memory: Memory, offset: int = 0) -> None:
        place = offset
        for page in pages:
            for piece in group.pieces:
                self.copies.from_page(_within(piece, page), page, memory, place)
                place += piece.nbytes

    def group(self, number: int) -> Group:
        for group in self.groups:
            if group.number == number:
                return group
        raise KeyError(f"the KV cache has no group of layers {number}")


def _described(buffer: Any) -> list[str]:
    """The layer and the role of a buffer, and what newer versions say besides."""
    return [str(it) for it in (buffer if isinstance(buffer, tuple) else (buffer.layer_id, buffer.role))]


def _within(piece: Piece, page: int) -> Piece:
    if page >= piece.slots:
        raise IndexError(f"page {page} is not in the KV cache, which has {piece.slots}")
    return piece


def _is_host(tensor: Any) -> bool:
    return str(getattr(tensor, "device", "cpu")).startswith("cpu")


def _bytes_of(tensor: Any, slots: int) -> Any:
    torch = importlib.import_module("torch")
    return tensor.reshape(slots, -1).view(torch.uint8)


def _fingerprint(layout: Any) -> bytes:
    return fingerprint(["kvferry.trtllm", 2, layout], sort_keys=False)
