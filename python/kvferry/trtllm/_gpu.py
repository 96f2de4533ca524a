"""Copies between pages in memory of GPUs and memory of the host, by kvferry, in the order of TensorRT-LLM's stream."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, Literal

import kvferry

if TYPE_CHECKING:
    from kvferry.trtllm._pages import Memory, Move, Piece

# A copy waits for the work of the stream. A stream that never gets there hangs the engine as well.
_PATIENCE_S = 600.0


class GpuCopies:
    """The cache is in memory of GPUs. A copy is a transfer of an agent to itself."""

    # Of memory of the host that is copied to and from.
    access: Literal["none", "rw"] = "rw"

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = pieces
        self._own: kvferry.Agent | None = None
        self._agent: kvferry.Agent | None = None
        self._peer: Any = None
        self._regions: dict[Piece, kvferry.Region] = {}

    def open(self, agent: kvferry.Agent | None) -> None:
        """Registers the cache, with an agent of its own if none is given. Raises `kvferry.Error`."""
        if agent is None:
            agent = self._own = kvferry.Agent("trtllm-copies", listen="127.0.0.1:0", transports="local")
        self._agent = agent
        self._peer = agent.peer(agent.address)
        try:
            for piece in self._pieces:
                nbytes = piece.stride * (piece.slots - 1) + piece.nbytes
                self._regions[piece] = agent.register((piece.base, nbytes), "none", device="cuda")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Waits for copies of the cache, which may go then."""
        regions = list(self._regions.values())
        self._regions.clear()
        if self._own is not None:
            self._own.shutdown()
        elif self._agent is not None:
            self._agent.unregister_batch(regions)
        self._own = self._agent = None

    def begin(self, moves: Sequence[Move], memory: Memory, *, to_pages: bool, stream: Any) -> Any:
        """Begins copies that come after what the stream has now. What `wait` returns on has ended."""
        if not moves:
            return _Ended()
        remote = self._remote(memory)
        batch = kvferry.Batch()
        for move in moves:
            piece = move.piece
            places = [piece.stride * page for page in move.pages]
            batch.extend_regions(
                self._regions[piece], places, remote, list(move.offsets), list(repeat(piece.nbytes, len(places)))
            )
        after = "host" if stream is None else stream
        start = self._peer.read_async if to_pages else self._peer.write_async
        return _Copying(start(batch, timeout=_PATIENCE_S, after=after))

    def _remote(self, memory: Memory) -> Any:
        assert self._agent is not None
        if memory.region is None:
            memory.region = self._agent.register(memory.buffer, "rw")
        return memory.region.remote()


class _Copying:
    def __init__(self, transfer: Any) -> None:
        self._transfer = transfer

    def wait(self) -> None:
        self._transfer.wait()


class _Ended:
    def wait(self) -> None: ...
