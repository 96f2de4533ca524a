"""A TCP relay between prefill and decode that can slow a stream down, damage it, or keep its bytes.

It forwards bytes of any protocol. The payload flows towards the target with MooncakeConnector, whose prefill writes to
decode, and from it with KVFerryConnector, whose decode reads from prefill. It parses only Mooncake's handshake: the
answer of a stock peer names a second port for the data, which the relay replaces by a port of its
own. A connection is such a handshake if its first eight bytes, read as a little-endian length, are
small; kvferry's own protocol starts with a larger value.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from dataclasses import dataclass

_MAX_HANDSHAKE_BYTES = 128 << 20
_METADATA_FRAME = 1
_CHUNK_BYTES = 32 << 10


@dataclass
class Damage:
    """Flip `length` bytes of the first stream that carries `skip` bytes of payload from now on."""

    skip: int
    length: int
    flipped: int = 0
    stream: object | None = None


@dataclass
class _Stream:
    """The payload of one connection since `damage` was set."""

    damage: Damage | None = None
    carried: int = 0


class Relay:
    """Runs its own event loop in a thread, which reads the attributes that the test sets."""

    def __init__(self, host: str, port: int, *, from_target: bool = False) -> None:
        """`from_target`: where the payload flows from."""
        self.target = (host, port)
        self.from_target = from_target
        # Keeps all bytes, as a network that is partitioned does; TCP sends them later.
        self.held = False
        self.bytes_per_s: float | None = None
        self.damage: Damage | None = None
        self.carried = 0
        self.port = 0
        self._data_ports: dict[int, int] = {}
        self._servers: list[asyncio.Server] = []
        # asyncio itself does not keep tasks alive.
        self._tasks: set[asyncio.Task[None] | None] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relay", daemon=True)
        self._thread.start()
        self.port = asyncio.run_coroutine_threadsafe(self._listen(host, port, handshakes=True), self._loop).result(10)

    def close(self) -> None:
        """Breaks every connection and stops listening."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    async def _end(self) -> None:
        for server in self._servers:
            server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _listen(self, host: str, port: int, *, handshakes: bool) -> int:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            # A cancelled task means that the relay was closed; asyncio would log it as an error.
            ends = (OSError, asyncio.IncompleteReadError, asyncio.CancelledError)
            task = asyncio.current_task()
            self._tasks.add(task)
            try:
                with contextlib.suppress(*ends):
                    await self._serve(reader, writer, host, port, handshakes)
            finally:
                writer.transport.abort()
                self._tasks.discard(task)

        server = await asyncio.start_server(serve, host, 0, limit=_CHUNK_BYTES)
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    async def _serve(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        host: str,
        port: int,
        handshakes: bool,
    ) -> None:
        await self._while_held()
        up_reader, up_writer = await asyncio.open_connection(host, port, limit=_CHUNK_BYTES)
        for side in (writer, up_writer):
            side.transport.set_write_buffer_limits(high=_CHUNK_BYTES)
        try:
            if handshakes:
                first = await reader.readexactly(8)
                up_writer.write(first)
                if int.from_bytes(first, "little") <= _MAX_HANDSHAKE_BYTES:
                    forward = asyncio.create_task(self._pump(reader, up_writer, payload=False))
                    await self._answer_handshake(up_reader, writer, host)
                    await self._pump(up_reader, writer, payload=False)
                    await forward
                    return
            await asyncio.gather(
                self._pump(reader, up_writer, payload=not self.from_target),
                self._pump(up_reader, writer, payload=self.from_target),
            )
        finally:
            up_writer.transport.abort()

    async def _answer_handshake(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str) -> None:
        """Forwards one framed answer with its data port replaced by a port of the relay."""
        length = int.from_bytes(await reader.readexactly(8), "little")
        frame = await reader.readexactly(length)
        if frame[:1] == bytes([_METADATA_FRAME]):
            descriptor = json.loads(frame[1:])
            data_port = descriptor.get("tcp_data_port")
            if data_port:
                if data_port not in self._data_ports:
                    self._data_ports[data_port] = await self._listen(host, data_port, handshakes=False)
                descriptor["tcp_data_port"] = self._data_ports[data_port]
                frame = frame[:1] + json.dumps(descriptor).encode()
        writer.write(len(frame).to_bytes(8, "little") + frame)
        await writer.drain()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, payload: bool) -> None:
        """Forwards until the end of the stream. On an error the caller aborts both sides."""
        stream = _Stream()
        while chunk := await reader.read(_CHUNK_BYTES):
            if payload:
                self.carried += len(chunk)
                chunk = self._damaged(stream, chunk)
                if self.bytes_per_s:
                    await asyncio.sleep(len(chunk) / self.bytes_per_s)
            await self._while_held()
            writer.write(chunk)
            await writer.drain()
        writer.write_eof()

    async def _while_held(self) -> None:
        while self.held:
            await asyncio.sleep(0.02)

    def _damaged(self, stream: _Stream, chunk: bytes) -> bytes:
        damage = self.damage
        if stream.damage is not damage:
            stream.damage, stream.carried = damage, 0
        start = stream.carried
        stream.carried += len(chunk)
        if damage is None or damage.flipped >= damage.length or stream.carried <= damage.skip:
            return chunk
        if damage.stream is None:
            damage.stream = stream
        if damage.stream is not stream:
            return chunk
        first = max(damage.skip + damage.flipped - start, 0)
        last = min(first + damage.length - damage.flipped, len(chunk))
        damage.flipped += last - first
        return chunk[:first] + bytes(byte ^ 0xFF for byte in chunk[first:last]) + chunk[last:]
