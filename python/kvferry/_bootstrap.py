"""Mooncake's bootstrap server: routers and decode engines ask a prefill for its engine ids and addresses.

``GET /query`` answers ``{"<dp_rank>": {"engine_id": "...", "worker_addr": {"<tp>": {"<pp>": "host:port"}}}}``.
The process of data-parallel rank 0 serves it and calls `BootstrapServer.register` for itself; the other
data-parallel ranks call `register_at`. Threads of their own do all of it, and no failure reaches the engine.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import socket
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

DEFAULT_PORT = 8998
MAX_BODY_BYTES = 16 << 10
MAX_CONNECTIONS = 64
# Of all data-parallel ranks together.
MAX_WORKERS = 4096
MAX_TEXT = 256
# For each read or write on a connection.
IO_TIMEOUT_S = 10.0
RETRY_S = (0.2, 10.0)

WorkerAddr = Mapping[int, Mapping[int, str]]
"""Tensor-parallel rank, then pipeline rank, then the address ``host:port`` of that worker's agent."""

_log = logging.getLogger("kvferry.bootstrap")


class _RefusedError(Exception):
    """The status and the reason of a refused request."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class _Registry:
    """The workers of each data-parallel rank; any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._engines: dict[int, tuple[str, dict[int, dict[int, str]]]] = {}

    def add(self, dp_rank: int, engine_id: str, workers: WorkerAddr) -> None:
        """Adds workers to an engine. Another engine id for a rank means that the rank was restarted, so it replaces the
        old engine and all its workers. Mooncake refuses it with status 400, and routers then send decode engines to the
        dead one until rank 0 is restarted too.
        """
        with self._lock:
            known, held = self._engines.get(dp_rank, (engine_id, {}))
            merged = dict(held) if known == engine_id else {}
            for tp_rank, stages in workers.items():
                merged[tp_rank] = {**merged.get(tp_rank, {}), **stages}
            after = {**self._engines, dp_rank: (engine_id, merged)}
            if sum(len(stages) for _, held in after.values() for stages in held.values()) > MAX_WORKERS:
                raise _RefusedError(400, f"more than {MAX_WORKERS} workers")
            self._engines = after
        if known != engine_id:
            _log.warning("data-parallel rank %d restarted: engine %s replaces %s", dp_rank, engine_id, known)

    def answer(self) -> dict[int, dict[str, Any]]:
        with self._lock:
            engines = self._engines
        return {rank: {"engine_id": engine, "worker_addr": workers} for rank, (engine, workers) in engines.items()}


def _rank(body: dict[str, Any], name: str) -> int:
    rank = body.get(name)
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < 1 << 16:
        raise _RefusedError(422, f"{name} must be an integer from 0 to 65535")
    return rank


def _text(body: dict[str, Any], name: str) -> str:
    text = body.get(name)
    if not isinstance(text, str) or not 0 < len(text) <= MAX_TEXT:
        raise _RefusedError(422, f"{name} must be a text of 1 to {MAX_TEXT} characters")
    return text


class _Handler(BaseHTTPRequestHandler):
    # HTTP/1.0, the default, closes each connection after its answer: no idle connection keeps a thread.
    server: _Server
    timeout = IO_TIMEOUT_S
    server_version = "kvferry"
    sys_version = ""

    def do_GET(self) -> None:
        self._serve("/query", self.server.registry.answer)

    def do_POST(self) -> None:
        self._serve("/register", self._register)

    def _serve(self, path: str, call: Any) -> None:
        try:
            if self.path.partition("?")[0] != path:
                raise _RefusedError(404, "GET /query and POST /register are served here")
            self._send(200, call())
        except _RefusedError as refused:
            self._send(refused.status, {"detail": str(refused)})

    def _register(self) -> dict[str, str]:
        try:
            body = json.loads(self._body())
        except (ValueError, RecursionError):
            raise _RefusedError(422, "the body is not JSON") from None
        if not isinstance(body, dict):
            raise _RefusedError(422, "the body is not a JSON object")
        workers = {_rank(body, "tp_rank"): {_rank(body, "pp_rank"): _text(body, "addr")}}
        self.server.registry.add(_rank(body, "dp_rank"), _text(body, "engine_id"), workers)
        return {"status": "ok"}

    def _body(self) -> bytes:
        text = self.headers.get("Content-Length", "")
        if not (text.isascii() and text.isdigit()):
            raise _RefusedError(411, "Content-Length is missing")
        if len(text) > 9 or int(text) > MAX_BODY_BYTES:
            raise _RefusedError(413, f"the body has more than {MAX_BODY_BYTES} bytes")
        return self.rfile.read(int(text))

    def _send(self, status: int, answer: object) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its caller's name
        _log.debug(format, *args)


class _Server(ThreadingHTTPServer):
    """At most `MAX_CONNECTIONS` at a time: the next one ends the oldest, so slow clients never keep others out."""

    daemon_threads = True
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, host: str, port: int, registry: _Registry) -> None:
        self.registry = registry
        self.closed = threading.Event()
        self._lock = threading.Lock()
        self._open: dict[socket.socket, None] = {}
        # From the address, since a name may have addresses of either family.
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            # "::" takes IPv4 connections too, whatever the host's default is.
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        # Not HTTPServer's, which asks the name service for the host's name.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def serve(self) -> None:
        """Without wake-ups while nothing comes, each of which would take the interpreter's lock from the engine."""
        while not self.closed.is_set():
            self.handle_request()

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:
            # Too many open files, for example: do not spin.
            self.closed.wait(0.1)
            raise

    def close(self) -> None:
        self.closed.set()
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open[request] = None
            oldest = next(iter(self._open)) if len(self._open) > MAX_CONNECTIONS else None
            self._open.pop(oldest, None)  # type: ignore[arg-type]
        if oldest is not None:
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("connection from %s failed", client_address, exc_info=True)


def place(parallel: Any, own_host: str) -> tuple[int, str | None]:
    """The data-parallel rank of this engine at its server, and the server's host; None if this process serves.

    `parallel`: vLLM's ``ParallelConfig``. As Mooncake has it: where each host or each engine has its own API server,
    it also has its own bootstrap server; else the whole deployment has one.
    """
    if parallel.local_engines_only:
        rank, host = parallel.data_parallel_rank_local or 0, own_host
    else:
        rank = parallel.data_parallel_index
        host = parallel.master_addr if parallel.nnodes_within_dp > 1 else parallel.data_parallel_master_ip
    return (rank, None) if rank == 0 else (rank, host)


class BootstrapServer:
    """Serves until `close`. Without the port (`error` says why) it keeps quiet: only Mooncake's flow needs it."""

    def __init__(self, host: str, port: int) -> None:
        self._registry = _Registry()
        self._server: _Server | None = None
        self.port = port
        self.error: str | None = None
        try:
            self._server = _Server(host, port, self._registry)
        except (OSError, OverflowError) as error:
            self.error = f"no bootstrap server at {host} port {port}: {error}"
            _log.warning(
                "%s. Routers that ask for /query (Mooncake's flow) get no answer; "
                "VLLM_MOONCAKE_BOOTSTRAP_PORT sets another port.",
                self.error,
            )
            return
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve, name="kvferry-bootstrap", daemon=True)
        self._thread.start()
        _log.info("bootstrap server at %s port %d", host, self.port)

    def register(self, dp_rank: int, engine_id: str, worker_addr: WorkerAddr) -> None:
        """Adds a data-parallel rank of this process. Another engine id for a rank replaces the earlier one."""
        try:
            self._registry.add(dp_rank, engine_id, worker_addr)
        except _RefusedError as refused:
            _log.error("data-parallel rank %d is not registered: %s", dp_rank, refused)

    def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()
            self._thread.join(1.0)
            server.server_close()


class Registration:
    """A registration at another process's server, which a thread repeats until it succeeds or `close`."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self._closed = threading.Event()

    def close(self) -> None:
        self._closed.set()

    def _run(self, host: str, port: int, bodies: list[dict[str, Any]]) -> None:
        wait, longest = RETRY_S
        while bodies and not self._closed.is_set():
            try:
                _post(host, port, bodies[0])
            except _RefusedError as refused:
                _log.error("bootstrap server at %s port %d refuses %s: %s", host, port, bodies[0], refused)
                return
            except (OSError, http.client.HTTPException) as error:
                # Rank 0 may load its model for minutes before it serves.
                _log.log(
                    logging.WARNING if wait >= longest else logging.INFO,
                    "no bootstrap server at %s port %d yet (%s); next attempt in %.1f s",
                    *(host, port, error, wait),
                )
                self._closed.wait(wait)
                wait = min(2 * wait, longest)
            else:
                bodies = bodies[1:]
        if not bodies:
            self.done.set()


def register_at(url: str, dp_rank: int, engine_id: str, worker_addr: WorkerAddr) -> Registration:
    """Registers this data-parallel rank at the server of rank 0, ``http://host:port``, which may be on another host."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise ValueError(f"expected http://host:port, got {url!r}")
    bodies = [
        {"engine_id": engine_id, "dp_rank": dp_rank, "tp_rank": tp_rank, "pp_rank": pp_rank, "addr": addr}
        for tp_rank, stages in worker_addr.items()
        for pp_rank, addr in stages.items()
    ]
    registration = Registration()
    threading.Thread(
        target=registration._run,
        args=(parts.hostname, parts.port or DEFAULT_PORT, bodies),
        name="kvferry-register",
        daemon=True,
    ).start()
    return registration


def _post(host: str, port: int, body: dict[str, Any]) -> None:
    # Not urllib, which sends requests to the proxy of the environment.
    connection = http.client.HTTPConnection(host, port, timeout=IO_TIMEOUT_S)
    try:
        connection.request("POST", "/register", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read(MAX_BODY_BYTES).decode(errors="replace")
    finally:
        connection.close()
    if 400 <= response.status < 500:
        raise _RefusedError(response.status, f"HTTP {response.status} {text}")
    if response.status != 200:
        raise http.client.HTTPException(f"HTTP {response.status} {text}")
