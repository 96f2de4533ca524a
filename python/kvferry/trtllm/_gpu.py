"""Copies between pages in memory of GPUs and memory of the host, by kvferry, in the order of TensorRT-LLM's stream."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, Literal

import kvferry
from kvferry._engine.quiet import is_quiet

if TYPE_CHECKING:
    from kvferry.trtllm._pages import Memory, Move, Piece

# A copy waits for the work of the stream. A stream that never gets there hangs the engine as well.
_PATIENCE_S = 600.0


class GpuCopies:
    """Copies of a cache in memory of GPUs. A copy is a transfer of an agent to itself."""

    # The access with which the memory of the host is registered.
    access: Literal["none", "rw"] = "rw"

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = pieces
        self._agent: kvferry.Agent | None = None
        # This agent, and that of the store, as peers.
        self._self: Any = None
        self._store: Any = None
        self._regions: dict[Piece, kvferry.Region] = {}
        # Memory of the host that is not the store's, by address.
        self._lent: dict[int, kvferry.Region] = {}

    def open(self, store: kvferry.Agent | None) -> None:
        """Registers the cache. Raises `kvferry.Error`."""
        agent = self._agent = kvferry.Agent("trtllm-copies", listen="127.0.0.1:0", transports="local")
        self._self = agent.peer(agent.address)
        self._store = agent.peer(store.address) if store is not None else None
        try:
            for piece in self._pieces:
                nbytes = piece.stride * (piece.slots - 1) + piece.nbytes
                self._regions[piece] = agent.register((piece.base, nbytes), "none", device="cuda")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Waits for copies of the cache, which may go then."""
        if self._agent is not None:
            self._agent.shutdown()
        self._agent = self._self = self._store = None
        self._regions.clear()
        self._lent.clear()

    def begin(self, moves: Sequence[Move], memory: Memory, *, to_pages: bool, stream: Any) -> Any:
        """Begins copies that come after the work that the stream has now. They have ended when `wait` returns."""
        if not moves:
            return _Ended()
        peer, remote = self._peer_of(memory)
        batch = kvferry.Batch()
        for move in moves:
            piece = move.piece
            places = [piece.stride * page for page in move.pages]
            batch.extend_regions(
                self._regions[piece], places, remote, list(move.offsets), list(repeat(piece.nbytes, len(places)))
            )
        after = "host" if stream is None else stream
        start = peer.read_async if to_pages else peer.write_async
        transfer = start(batch, timeout=_PATIENCE_S, after=after)
        # Copies from the pages write to the agent's own memory, which it keeps until they have ended.
        return _Copies(transfer) if to_pages else transfer

    def _peer_of(self, memory: Memory) -> tuple[Any, Any]:
        """The agent that has registered memory of the host, and the region."""
        if memory.region is not None:
            return self._store, memory.region.remote()
        assert self._agent is not None
        lent = self._lent.get(memory.addr)
        if lent is None:
            lent = self._lent[memory.addr] = self._agent.register(memory.buffer, "rw")
        return self._self, lent.remote()


class _Ended:
    def wait(self) -> None: ...


class _Copies:
    def __init__(self, transfer: kvferry.Transfer) -> None:
        self._transfer = transfer

    def wait(self, timeout: float | None = None) -> kvferry.TransferStats | None:
        try:
            return self._transfer.wait(timeout)
        except kvferry.Error:
            # Its copies may still be under way.
            if not is_quiet(self._transfer, timeout):
                return None
            raise
