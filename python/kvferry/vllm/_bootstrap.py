"""Mooncake's bootstrap server: routers and decode engines ask a prefill for its engine ids and addresses.

``GET /query`` answers ``{"<dp_rank>": {"engine_id": "...", "worker_addr": {"<tp>": {"<pp>": "host:port"}}}}``.
The process of data-parallel rank 0 serves it and calls `BootstrapServer.register` for itself; the other
data-parallel ranks call `register_at`, where there are others. With a secret they prove it; without one the first host
that registers a rank keeps it, and on this host only processes of this user and of the superuser register.
Threads of their own do all of it, and no failure reaches the engine.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import http.client
import io
import ipaddress
import json
import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Mapping
from errno import EACCES, EAFNOSUPPORT, ENETUNREACH, ENOENT, EOPNOTSUPP, EPERM, EPROTONOSUPPORT
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import urlsplit

from kvferry._engine.connections import OpenConnections
from kvferry._engine.log import logger_of

DEFAULT_PORT = 8998
MAX_BODY_BYTES = 16 << 10
# Of its line, its headers and its body.
MAX_REQUEST_BYTES = 32 << 10
MAX_CONNECTIONS = 64
# Of all data-parallel ranks together.
MAX_WORKERS = 4096
MAX_TEXT = 256
# For all of a request, and for its answer.
IO_TIMEOUT_S = 10.0
RETRY_S = (0.2, 10.0)
# The header with the proof of the secret: HMAC-SHA256 of the challenge and the body, in hexadecimal digits.
PROOF = "X-KVFerry-Proof"
# The header with the challenge that ``GET /register`` answered. The server takes each for one registration, so no
# registration can be replayed.
CHALLENGE = "X-KVFerry-Challenge"

# netlink(7), sock_diag(7) and rtnetlink(7): `struct nlmsghdr`, and numbers.
_MESSAGE = struct.Struct("=IHHII")
_SOCK_DIAG, _BY_FAMILY, _REQUEST, _ERROR, _LISTENS = 4, 20, 1, 2, 10
_ROUTE, _NEW_ROUTE, _GET_ROUTE, _TO, _BY_INTERFACE, _IS_LOCAL = 0, 24, 26, 1, 4, 2
# Answers of a kernel without sock_diag for TCP, and of one that lets this process ask nothing.
_NO_USERS = (ENOENT, EOPNOTSUPP, EAFNOSUPPORT, EPROTONOSUPPORT, EPERM, EACCES)

WorkerAddr = Mapping[int, Mapping[int, str]]
"""Tensor-parallel rank, then pipeline rank, then the address ``host:port`` of that worker's agent."""

_log = logger_of("vllm")


class _RefusedError(Exception):
    """The status and the reason of a refused request."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class _Engine(NamedTuple):
    """What is registered for a data-parallel rank."""

    engine_id: str
    # The host that registered it; None is this process.
    host: str | None
    # The number of the challenge that the latest registration was proved with.
    challenge: int
    workers: dict[int, dict[int, str]]

    def registered(self) -> int:
        return sum(len(stages) for stages in self.workers.values())


class _Registry:
    """The workers of each data-parallel rank; any thread may call it."""

    def __init__(self, workers_max: int) -> None:
        """`workers_max`: of one data-parallel rank."""
        self._lock = threading.Lock()
        self._workers_max = workers_max
        self._engines: dict[int, _Engine] = {}
        # Challenges of another incarnation of the server have another prefix.
        self._incarnation = secrets.token_hex(16)
        self._challenges = 0

    def challenge(self) -> str:
        with self._lock:
            self._challenges += 1
            return f"{self._incarnation}.{self._challenges}"

    def number(self, challenge: str) -> int:
        """The number of a challenge that this server has given out."""
        incarnation, _, number = challenge.partition(".")
        with self._lock:
            given_out = self._challenges
        is_number = number.isascii() and number.isdigit() and len(number) < 20
        if incarnation != self._incarnation or not is_number or not 0 < int(number) <= given_out:
            raise _RefusedError(403, f"{CHALLENGE} is no challenge of this server")
        return int(number)

    def add(
        self, dp_rank: int, engine_id: str, workers: WorkerAddr, host: str | None = None, challenge: int | None = None
    ) -> None:
        """Adds workers to an engine. Another engine id for a rank means that the rank was restarted, so it replaces the
        old engine and all its workers. Mooncake refuses it with status 400, and routers then send decode engines to the
        dead one until rank 0 is restarted too. A registration that was proved with a `challenge` needs a later one than
        the rank's last. One without a proof must come from the `host` that registered the rank; None is this process.
        """
        with self._lock:
            known = self._engines.get(dp_rank, _Engine(engine_id, host, 0, {}))
            if challenge is not None:
                if challenge <= known.challenge:
                    raise _RefusedError(409, f"data-parallel rank {dp_rank} was registered with a later challenge")
            elif host is not None and known.host != host:
                raise _RefusedError(403, f"data-parallel rank {dp_rank} was registered by another host")
            merged = dict(known.workers) if known.engine_id == engine_id else {}
            for tp_rank, stages in workers.items():
                merged[tp_rank] = {**merged.get(tp_rank, {}), **stages}
            engine = _Engine(engine_id, host, known.challenge if challenge is None else challenge, merged)
            if engine.registered() > self._workers_max:
                raise _RefusedError(400, f"more than {self._workers_max} workers of data-parallel rank {dp_rank}")
            after = {**self._engines, dp_rank: engine}
            if sum(engine.registered() for engine in after.values()) > MAX_WORKERS:
                raise _RefusedError(400, f"more than {MAX_WORKERS} workers")
            self._engines = after
        if known.engine_id != engine_id:
            _log.warning("data-parallel rank %d restarted: engine %s replaces %s", dp_rank, engine_id, known.engine_id)

    def answer(self) -> dict[int, dict[str, Any]]:
        with self._lock:
            engines = self._engines
        return {rank: {"engine_id": it.engine_id, "worker_addr": it.workers} for rank, it in engines.items()}


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


class _Request(io.RawIOBase):
    """The bytes of one request. `http.server` itself takes 100 headers of 64 KiB, each byte within a timeout."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._left = MAX_REQUEST_BYTES
        self._until = time.monotonic() + IO_TIMEOUT_S

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        if self._left == 0:
            # `http.server` answers it with status 431.
            raise http.client.LineTooLong("request")
        left_s = self._until - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._connection.settimeout(left_s)
        got = self._connection.recv_into(memoryview(into)[: self._left])
        self._left -= got
        return got


class _Handler(BaseHTTPRequestHandler):
    # HTTP/1.0, the default, closes each connection after its answer: no idle connection keeps a thread.
    server: _Server
    server_version = "kvferry"
    sys_version = ""

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.rfile = io.BufferedReader(_Request(self.connection))

    def do_GET(self) -> None:
        if self.server.secret is not None and self.path == "/register":
            self._send(200, {"challenge": self.server.registry.challenge()})
        else:
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
        ranks, secret = self.server.ranks, self.server.secret
        if ranks <= 1:
            raise _RefusedError(403, "this engine has no other data-parallel ranks")
        text = self._body()
        number = None
        if secret is not None:
            challenge = self.headers.get(CHALLENGE, "")
            proof = _proof(secret, challenge, text)
            if not hmac.compare_digest(proof, self.headers.get(PROOF, "").encode()):
                raise _RefusedError(403, f"{PROOF} does not prove the secret of this engine")
            number = self.server.registry.number(challenge)
        try:
            body = json.loads(text)
        except (ValueError, RecursionError):
            raise _RefusedError(422, "the body is not JSON") from None
        if not isinstance(body, dict):
            raise _RefusedError(422, "the body is not a JSON object")
        workers = {_rank(body, "tp_rank"): {_rank(body, "pp_rank"): _text(body, "addr")}}
        dp_rank = _rank(body, "dp_rank")
        if not 1 <= dp_rank < ranks:
            raise _RefusedError(403, f"dp_rank must be one of the other {ranks - 1} ranks, from 1 on")
        if secret is None:
            self._check_user()
        self.server.registry.add(dp_rank, _text(body, "engine_id"), workers, self.client_address[0], number)
        return {"status": "ok"}

    def _check_user(self) -> None:
        """Of a process of this host. Where the kernel does not tell users, those of agents are not checked either."""
        user = self.server.owners.user_of(self.client_address, self.connection.getsockname())
        if user is not None and user not in (0, os.geteuid()):
            raise _RefusedError(403, "without a secret, only processes of this server's user register from its host")

    def _body(self) -> bytes:
        text = self.headers.get("Content-Length", "")
        if not (text.isascii() and text.isdigit()):
            raise _RefusedError(411, "Content-Length is missing")
        if len(text) > 9 or int(text) > MAX_BODY_BYTES:
            raise _RefusedError(413, f"the body has more than {MAX_BODY_BYTES} bytes")
        return self.rfile.read(int(text))

    def _send(self, status: int, answer: object) -> None:
        body = json.dumps(answer).encode()
        self.connection.settimeout(IO_TIMEOUT_S)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its caller's name
        _log.debug(format, *args)


class _Server(ThreadingHTTPServer):
    """Has at most `MAX_CONNECTIONS` open at a time."""

    daemon_threads = True
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, host: str, port: int, registry: _Registry, ranks: int, secret: bytes | None) -> None:
        self.registry, self.ranks, self.secret = registry, ranks, secret
        self.closed = threading.Event()
        self._open = OpenConnections(MAX_CONNECTIONS)
        # From the address, since a name may have addresses of either family.
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        super().__init__((host, port), _Handler)
        self.owners = Owners(self.server_address)

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
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.remove(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("connection from %s failed", client_address, exc_info=True)


class Owners:
    """Tells the users of connections within this host, as the kernel knows them: sock_diag(7)."""

    def __init__(self, listening: tuple[Any, ...]) -> None:
        """`listening`: where this process listens. The kernel's answer about it shows whether it tells users. Raises
        OSError if something else is in the way: another user may have caused it, and must not switch the check off.
        """
        anywhere = "::" if ":" in listening[0] else "0.0.0.0"
        try:
            self.tell = _owner(listening, (anywhere, 0), is_listener=True) == os.geteuid()
        except OSError as error:
            if error.errno not in _NO_USERS:
                raise
            self.tell = False

    def user_of(self, client: tuple[Any, ...], server: tuple[Any, ...]) -> int | None:
        """Whose socket is connected from `client` to `server`; -1 if no process has it open, or that is not known. None
        for a client of another host, and where the kernel does not tell.
        """
        if not self.tell:
            return None
        try:
            if not _is_of_this_host(client):
                return None
            user = _owner(client, server)
        except OSError:
            return -1
        return -1 if user is None else user


def _is_of_this_host(client: tuple[Any, ...]) -> bool:
    """True for loopback, and for all addresses that the kernel's routes call local. Raises OSError."""
    host = _canonical(client)
    if host.is_loopback:
        return True
    # `struct rtmsg`: the family, the length of the address in bits, and nothing else; then attributes.
    body = struct.pack("=8BI", _family(host), host.max_prefixlen, *[0] * 7)
    body += struct.pack("=HH", 4 + len(host.packed), _TO) + host.packed
    if len(client) > 3 and client[3]:
        body += struct.pack("=HHI", 8, _BY_INTERFACE, client[3])
    try:
        kind, answer = _ask_kernel(_ROUTE, _GET_ROUTE, body)
    except OSError as error:
        if error.errno == ENETUNREACH:
            return False
        raise
    return kind == _NEW_ROUTE and answer[7] == _IS_LOCAL


_Host: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address


def _canonical(end: tuple[Any, ...]) -> _Host:
    host = ipaddress.ip_address(str(end[0]).partition("%")[0])
    return getattr(host, "ipv4_mapped", None) or host


def _family(host: _Host) -> int:
    return socket.AF_INET if host.version == 4 else socket.AF_INET6


def _owner(of: tuple[Any, ...], to: tuple[Any, ...], *, is_listener: bool = False) -> int | None:
    """The user of the socket at `of` that is connected to `to`, or listens. None if no process has it open. Raises
    OSError.
    """
    host = _canonical(of)
    # `struct inet_diag_req_v2`: the family, any state, the ends, the interface, no cookie.
    body = struct.pack("=BBHI", _family(host), socket.IPPROTO_TCP, 0, 0xFFFF_FFFF) + struct.pack("!HH", of[1], to[1])
    body += b"".join(it.packed.ljust(16, b"\0") for it in (host, _canonical(to)))
    body += struct.pack("=I", of[3] if len(of) > 3 else 0) + b"\xff" * 8
    try:
        _, answer = _ask_kernel(_SOCK_DIAG, _BY_FAMILY, body)
    except FileNotFoundError:
        return None
    # `struct inet_diag_msg`: the state is its second byte; the user and the inode are its last numbers.
    state, (user, inode) = answer[1], struct.unpack_from("=II", answer, 64)
    # Where there is no such connection, the kernel finds what listens at its address.
    return user if inode and (state == _LISTENS) is is_listener else None


def _ask_kernel(family: int, kind: int, body: bytes) -> tuple[int, bytes]:
    """The kind and the body of the answer to a question by netlink. Raises OSError."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, family) as kernel:
        # The kernel answers before `send` returns.
        kernel.send(_MESSAGE.pack(_MESSAGE.size + len(body), kind, _REQUEST, 1, 0) + body)
        answer = kernel.recv(4096, socket.MSG_DONTWAIT)
    kind = _MESSAGE.unpack_from(answer)[1]
    if kind == _ERROR:
        errno = -struct.unpack_from("=i", answer, _MESSAGE.size)[0]
        raise OSError(errno, os.strerror(errno))
    return kind, answer[_MESSAGE.size :]


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

    def __init__(
        self, host: str, port: int, ranks: int = 1, secret: bytes | None = None, workers: int = MAX_WORKERS
    ) -> None:
        """`ranks`: data-parallel ranks that this server answers for. Others than 0 register themselves, each with at
        most so many `workers`, so that no host that claims one takes the places of the others.
        """
        self._registry = _Registry(workers)
        self._server: _Server | None = None
        self.port = port
        self.error: str | None = None
        try:
            self._server = _Server(host, port, self._registry, ranks, secret)
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

    def __init__(self, secret: bytes | None = None) -> None:
        self._secret = secret
        self.done = threading.Event()
        self._closed = threading.Event()

    def close(self) -> None:
        self._closed.set()

    def _run(self, host: str, port: int, bodies: list[dict[str, Any]]) -> None:
        wait, longest = RETRY_S
        said = None
        while bodies and not self._closed.is_set():
            try:
                _post(host, port, bodies[0], self._secret)
            except _RefusedError as refused:
                # It may know an earlier incarnation of this rank, or be about to end itself.
                level = logging.DEBUG if said == str(refused) else logging.ERROR
                said = str(refused)
                text = "bootstrap server at %s port %d refuses %s: %s; next attempts every %.1f s"
                _log.log(level, text, host, port, bodies[0], refused, longest)
                self._closed.wait(longest)
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


def register_at(
    url: str, dp_rank: int, engine_id: str, worker_addr: WorkerAddr, secret: bytes | None = None
) -> Registration:
    """Registers this data-parallel rank at the server of rank 0, ``http://host:port``, which may be on another host."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise ValueError(f"expected http://host:port, got {url!r}")
    bodies = [
        {"engine_id": engine_id, "dp_rank": dp_rank, "tp_rank": tp_rank, "pp_rank": pp_rank, "addr": addr}
        for tp_rank, stages in worker_addr.items()
        for pp_rank, addr in stages.items()
    ]
    registration = Registration(secret)
    threading.Thread(
        target=registration._run,
        args=(parts.hostname, parts.port or DEFAULT_PORT, bodies),
        name="kvferry-register",
        daemon=True,
    ).start()
    return registration


def _proof(secret: bytes, challenge: str, body: bytes) -> bytes:
    # Of a key of its own, since the sessions of agents prove the same secret in another way.
    key = hashlib.sha256(b"kvferry bootstrap registration, v2\0" + secret).digest()
    return hmac.new(key, challenge.encode() + b"\0" + body, hashlib.sha256).hexdigest().encode()


def _post(host: str, port: int, body: dict[str, Any], secret: bytes | None) -> None:
    text_of_body = json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    if secret is not None:
        headers[CHALLENGE] = _challenge(_request(host, port, "GET"))
        headers[PROOF] = _proof(secret, headers[CHALLENGE], text_of_body).decode()
    _request(host, port, "POST", text_of_body, headers)


def _challenge(answer: str) -> str:
    try:
        challenge = json.loads(answer)["challenge"]
    except (ValueError, RecursionError, LookupError, TypeError):
        challenge = None
    if not (
        isinstance(challenge, str) and challenge.isascii() and challenge.isprintable() and len(challenge) < MAX_TEXT
    ):
        raise _RefusedError(422, f"GET /register was answered with {answer[:MAX_TEXT]!r}, which has no challenge")
    return challenge


def _request(
    host: str, port: int, method: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
) -> str:
    # Not urllib, which sends requests to the proxy of the environment.
    connection = http.client.HTTPConnection(host, port, timeout=IO_TIMEOUT_S)
    try:
        connection.request(method, "/register", body, headers or {})
        response = connection.getresponse()
        text = response.read(MAX_BODY_BYTES).decode(errors="replace")
    finally:
        connection.close()
    if 400 <= response.status < 500:
        raise _RefusedError(response.status, f"HTTP {response.status} {text}")
    if response.status != 200:
        raise http.client.HTTPException(f"HTTP {response.status} {text}")
    return text
