"""An HTTP proxy on loopback before one server, which fails as a test wants."""

from __future__ import annotations

import contextlib
import http.client
import socket
import struct
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

from kit import kept_port

__all__ = ["Fault", "FaultyProxy"]

# "503": says so. "cut": ends in the middle of the body. "flip": changes a bit of it. "reset": resets the connection.
# "hang": does not answer before `FaultyProxy.release`. "slow": answers late.
Fault = Literal["503", "cut", "flip", "reset", "hang", "slow"]

SLOW_S = 0.2


class FaultyProxy:
    """Passes requests on to the server at a port. Each takes the next of `faults`, and then `always`."""

    def __init__(self, upstream: int) -> None:
        self.upstream = upstream
        self.faults: list[Fault | None] = []
        self.always: Fault | None = None
        self.requests: list[tuple[str, str]] = []
        self._lock = threading.Lock()
        self._released = threading.Event()
        # The kernel gives the port to no other socket in an outage.
        self._kept = contextlib.ExitStack()
        self.port = int(self._kept.enter_context(kept_port()).rpartition(":")[2])
        self._server = self._listen(self.port)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def count(self, method: str) -> int:
        with self._lock:
            return sum(made == method for made, _ in self.requests)

    def next_fault(self, method: str, path: str) -> Fault | None:
        with self._lock:
            self.requests.append((method, path))
            return self.faults.pop(0) if self.faults else self.always

    def wait_released(self) -> None:
        self._released.wait(60)

    def release(self) -> None:
        """Lets requests that hang go on."""
        self.always = None
        self._released.set()

    @contextlib.contextmanager
    def outage(self) -> Iterator[None]:
        """Nothing listens, and connections that are open are reset."""
        before, self.always = self.always, "reset"
        self._close()
        yield
        self.always = before
        self._server = self._listen(self.port)

    def close(self) -> None:
        self.always = "reset"
        self._released.set()
        self._close()
        self._kept.close()

    def _listen(self, port: int) -> Server:
        server = Server(("127.0.0.1", port), Handler)
        server.proxy = self
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return server

    def _close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64
    proxy: FaultyProxy

    def shutdown_request(self, request: socket.socket | tuple[bytes, socket.socket]) -> None:
        # Without a FIN, which would come before the reset of a connection.
        self.close_request(request)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        fault = self.server.proxy.next_fault(self.command, self.path)
        if fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            return
        if fault == "hang":
            self.server.proxy.wait_released()
        if fault == "slow":
            threading.Event().wait(SLOW_S)
        if fault == "503":
            self.answer(503, [], b"<Error><Code>SlowDown</Code><Message>Reduce your rate.</Message></Error>")
            return
        upstream = http.client.HTTPConnection("127.0.0.1", self.server.proxy.upstream, timeout=60)
        with contextlib.closing(upstream):
            upstream.request(self.command, self.path, body, dict(self.headers.items()))
            response = upstream.getresponse()
            content = response.read()
        if fault == "flip" and content:
            middle = len(content) // 2
            content = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        kept = ("connection", "content-length", "transfer-encoding", "date", "server")
        headers = [(name, value) for name, value in response.getheaders() if name.lower() not in kept]
        self.answer(response.status, headers, content, cut=fault == "cut")

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = pass_on  # noqa: N815

    def answer(self, status: int, headers: list[tuple[str, str]], content: bytes, cut: bool = False) -> None:
        with contextlib.suppress(ConnectionError):
            self.send_response(status)
            for name, value in headers:
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2] if cut else content)
        self.close_connection = self.close_connection or cut

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass
