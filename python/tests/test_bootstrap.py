"""`kvferry.vllm._bootstrap`: what routers and decode engines ask of a prefill in Mooncake's flow."""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from kit import PATIENCE
from kvferry.vllm import _bootstrap
from kvferry.vllm._bootstrap import CHALLENGE, MAX_BODY_BYTES, MAX_CONNECTIONS, PROOF, BootstrapServer, register_at

ENGINE = "00112233445566778899aabbccddeeff"
OTHER = "ffeeddccbbaa99887766554433221100"


@pytest.fixture(params=["127.0.0.1", "::1"])
def server(request: pytest.FixtureRequest) -> Iterator[BootstrapServer]:
    server = BootstrapServer(request.param, 0, 4)
    if server.error is not None:
        pytest.skip(server.error)
    server.host = request.param  # type: ignore[attr-defined]
    yield server
    server.close()


def url(server: BootstrapServer) -> str:
    host = server.host  # type: ignore[attr-defined]
    return f"http://[{host}]:{server.port}" if ":" in host else f"http://{host}:{server.port}"


def ask(
    server: BootstrapServer, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=PATIENCE)  # type: ignore[attr-defined]
    text = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    try:
        connection.request(method, path, text, headers or {})
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def worker(**changes: Any) -> dict[str, Any]:
    return {"engine_id": ENGINE, "dp_rank": 1, "tp_rank": 0, "pp_rank": 0, "addr": "10.0.0.1:7000", **changes}


def test_query_answers_as_mooncakes_server_does(server: BootstrapServer) -> None:
    assert ask(server, "GET", "/query") == (200, {})
    server.register(0, ENGINE, {0: {0: "10.0.0.1:7000", 1: "10.0.0.2:7000"}, 1: {0: "10.0.0.1:7001"}})
    workers = {"0": {"0": "10.0.0.1:7000", "1": "10.0.0.2:7000"}, "1": {"0": "10.0.0.1:7001"}}
    assert ask(server, "GET", "/query") == (200, {"0": {"engine_id": ENGINE, "worker_addr": workers}})


def test_ranks_register_one_worker_at_a_time_and_may_repeat_it(server: BootstrapServer) -> None:
    for body in (worker(), worker(tp_rank=1, addr="10.0.0.1:7001"), worker(), worker(dp_rank=2, engine_id=OTHER)):
        assert ask(server, "POST", "/register", body) == (200, {"status": "ok"})
    assert ask(server, "GET", "/query")[1] == {
        "1": {"engine_id": ENGINE, "worker_addr": {"0": {"0": "10.0.0.1:7000"}, "1": {"0": "10.0.0.1:7001"}}},
        "2": {"engine_id": OTHER, "worker_addr": {"0": {"0": "10.0.0.1:7000"}}},
    }


def test_a_restarted_rank_replaces_its_old_engine_and_all_its_workers(server: BootstrapServer) -> None:
    for tp_rank, addr in enumerate(("10.0.0.1:7000", "10.0.0.1:7001")):
        assert ask(server, "POST", "/register", worker(tp_rank=tp_rank, addr=addr))[0] == 200
    assert ask(server, "POST", "/register", worker(engine_id=OTHER, addr="10.0.0.9:7000"))[0] == 200
    assert ask(server, "GET", "/query")[1] == {
        "1": {"engine_id": OTHER, "worker_addr": {"0": {"0": "10.0.0.9:7000"}}},
    }


def test_another_rank_registers_all_its_workers(server: BootstrapServer) -> None:
    registration = register_at(url(server), 3, ENGINE, {0: {0: "a:1", 1: "a:2"}, 1: {0: "a:3", 1: "a:4"}})
    assert registration.done.wait(60)
    workers = {"0": {"0": "a:1", "1": "a:2"}, "1": {"0": "a:3", "1": "a:4"}}
    assert ask(server, "GET", "/query")[1] == {"3": {"engine_id": ENGINE, "worker_addr": workers}}


def test_a_registration_waits_for_a_server_that_starts_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_bootstrap, "RETRY_S", (0.01, 0.02))
    refused, post = threading.Event(), _bootstrap._post

    def posted(*args: Any) -> None:
        try:
            post(*args)
        except OSError:
            refused.set()
            raise

    monkeypatch.setattr(_bootstrap, "_post", posted)
    with socket.socket() as held:
        # Nobody else gets the port, and nothing listens there.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        registration = register_at(f"http://127.0.0.1:{port}", 1, ENGINE, {0: {0: "a:1"}})
        assert refused.wait(60)
        server = BootstrapServer("127.0.0.1", port, 2)
        assert server.error is None
    assert registration.done.wait(60)
    server.close()


def test_a_closed_registration_ends_its_thread() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        before = set(threading.enumerate())
        registration = register_at(f"http://127.0.0.1:{closed.getsockname()[1]}", 1, ENGINE, {0: {0: "a:1"}})
        begun = set(threading.enumerate()) - before
        registration.close()
        for thread in begun:
            thread.join(60)
            assert not thread.is_alive()
    assert not registration.done.is_set()


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 422),
        (b"{", 422),
        (b"[]", 422),
        (b"[" * 10_000, 422),
        (b"\xff", 422),
        (b"x" * (MAX_BODY_BYTES + 1), 413),
        (worker(dp_rank=-1), 422),
        (worker(tp_rank="0"), 422),
        (worker(pp_rank=True), 422),
        (worker(addr=""), 422),
        (worker(engine_id="x" * 1000), 422),
        ({"engine_id": ENGINE}, 422),
    ],
)
def test_a_bad_registration_is_refused_and_changes_nothing(server: BootstrapServer, body: Any, status: int) -> None:
    answer = ask(server, "POST", "/register", body)
    assert answer[0] == status
    assert answer[1]["detail"]
    assert ask(server, "GET", "/query") == (200, {})


def test_no_engine_replaces_another_process_or_host(server: BootstrapServer) -> None:
    server.register(0, ENGINE, {0: {0: "10.0.0.1:7000"}})
    server._registry.add(1, ENGINE, {0: {0: "10.0.0.2:7000"}}, "10.0.0.2")
    before = ask(server, "GET", "/query")
    for dp_rank in (0, 1, 4, 7):
        assert ask(server, "POST", "/register", worker(dp_rank=dp_rank, engine_id=OTHER, addr="evil:1"))[0] == 403
    assert ask(server, "POST", "/register", worker(tp_rank=1, addr="evil:1"))[0] == 403
    assert ask(server, "GET", "/query") == before


def test_without_a_secret_no_process_of_another_user_registers(
    server: BootstrapServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ask(server, "POST", "/register", worker())[0] == 200
    for user, status in ((0, 200), (os.geteuid() + 1, 403), (-1, 403)):
        monkeypatch.setattr(_bootstrap.Owners, "user_of", lambda *_, user=user: user)
        assert ask(server, "POST", "/register", worker(engine_id=OTHER))[0] == status
    assert ask(server, "GET", "/query")[1]["1"]["engine_id"] == OTHER


@pytest.fixture(params=["127.0.0.1", "::1", "::"])
def listening(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    """At an address of which the kernel tells users."""
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    try:
        made = socket.create_server((request.param, 0), family=family, dualstack_ipv6=request.param == "::")
    except OSError as error:
        pytest.skip(f"no {request.param} here: {error}")
    with made:
        if not _bootstrap.Owners(made.getsockname()).tell:
            pytest.skip("this kernel does not tell whose connections are")
        yield made


def test_a_connection_within_this_host_has_its_user(listening: socket.socket) -> None:
    owners, port = _bootstrap.Owners(listening.getsockname()), listening.getsockname()[1]
    # All interfaces take both families.
    hosts = ["127.0.0.1", "::1"] if listening.getsockname()[0] == "::" else [listening.getsockname()[0]]
    for host in hosts:
        with socket.create_connection((host, port)):
            accepted, client = listening.accept()
            assert owners.user_of(client, accepted.getsockname()) == os.geteuid()
            accepted.close()


def test_a_connection_within_this_host_that_nobody_has_is_no_users(listening: socket.socket) -> None:
    owners, (own, port) = _bootstrap.Owners(listening.getsockname()), listening.getsockname()[:2]
    with socket.create_connection(("::1" if own == "::" else own, port)) as connection:
        accepted, client = listening.accept()
        connection.close()
        assert owners.user_of(client, accepted.getsockname()) == -1
        accepted.close()
    # Of a client that listens at its own port, and of none.
    assert owners.user_of((client[0], port), (client[0], 1)) == -1
    assert owners.user_of((client[0], 1), (client[0], port)) == -1


def test_each_loopback_address_is_of_this_host_and_others_as_the_kernels_routes_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        owners, address = _bootstrap.Owners(listening.getsockname()), listening.getsockname()
        with socket.create_connection(address, source_address=("127.0.0.5", 0)):
            accepted, client = listening.accept()
            assert owners.user_of(client, accepted.getsockname()) == os.geteuid()
            accepted.close()
    asked: list[bytes] = []

    def routes(_family: int, _kind: int, question: bytes) -> tuple[int, bytes]:
        asked.append(question)
        # `struct rtmsg`: the kind of the route is its last byte; 2 is local, 1 leads to others.
        return 24, bytes([*question[:7], 2 if question.endswith(bytes([10, 0, 0, 7])) else 1, 0, 0, 0, 0])

    monkeypatch.setattr(_bootstrap, "_ask_kernel", routes)
    assert _bootstrap._is_of_this_host(("10.0.0.7", 1))
    assert not _bootstrap._is_of_this_host(("10.0.0.8", 1))
    assert not _bootstrap._is_of_this_host(("fd00::7", 1, 0, 0))
    assert len(asked) == 3


def test_a_want_of_descriptors_does_not_switch_the_check_of_users_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(_bootstrap, "_ask_kernel", none)
    with pytest.raises(OSError, match="Too many"):
        _bootstrap.Owners(("127.0.0.1", 1))


def test_of_a_kernel_that_does_not_tell_users_no_client_is_refused(
    server: BootstrapServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: Any, **__: Any) -> int:
        raise OSError(errno.EPROTONOSUPPORT, "a kernel without INET_DIAG")

    with monkeypatch.context() as patch:
        patch.setattr(_bootstrap, "_owner", none)
        silent = _bootstrap.Owners(("127.0.0.1", 1))
        assert silent.user_of(("127.0.0.1", 1), ("127.0.0.1", 2)) is None
        # One that tells, and fails once.
        silent.tell = True
        assert silent.user_of(("127.0.0.1", 1), ("127.0.0.1", 2)) == -1


def test_what_no_rank_registers_asks_for_no_user(server: BootstrapServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_bootstrap.Owners, "user_of", lambda *_: pytest.fail("the user was asked for"))
    assert ask(server, "POST", "/register", b"{")[0] == 422
    assert ask(server, "POST", "/register", worker(dp_rank=0))[0] == 403


def test_an_engine_without_other_ranks_takes_no_registration() -> None:
    server = BootstrapServer("127.0.0.1", 0)
    server.host = "127.0.0.1"  # type: ignore[attr-defined]
    server.register(0, ENGINE, {0: {0: "10.0.0.1:7000"}})
    for dp_rank in (0, 1):
        assert ask(server, "POST", "/register", worker(dp_rank=dp_rank, engine_id=OTHER))[0] == 403
    assert list(ask(server, "GET", "/query")[1]) == ["0"]
    server.close()


def test_with_a_secret_only_ranks_that_prove_it_register() -> None:
    server = BootstrapServer("127.0.0.1", 0, 2, b"the secret of the test")
    server.host = "127.0.0.1"  # type: ignore[attr-defined]
    assert ask(server, "POST", "/register", worker())[0] == 403
    body = worker()
    for secret in (None, b"another"):
        with pytest.raises(_bootstrap._RefusedError):
            _bootstrap._post("127.0.0.1", server.port, body, secret)
    registration = register_at(url(server), 1, ENGINE, {0: {0: "a:1"}}, b"the secret of the test")
    assert registration.done.wait(60)
    assert list(ask(server, "GET", "/query")[1]) == ["1"]
    server.close()


SECRET = b"the secret of the test"


@pytest.fixture
def proving() -> Iterator[BootstrapServer]:
    """A server with a secret."""
    server = BootstrapServer("127.0.0.1", 0, 3, SECRET)
    server.host = "127.0.0.1"  # type: ignore[attr-defined]
    yield server
    server.close()


def proof(server: BootstrapServer, body: Any) -> dict[str, str]:
    challenge = ask(server, "GET", "/register")[1]["challenge"]
    return {CHALLENGE: challenge, PROOF: _bootstrap._proof(SECRET, challenge, json.dumps(body).encode()).decode()}


def test_a_rank_that_proves_the_secret_may_come_back_from_another_host(proving: BootstrapServer) -> None:
    proving._registry.challenge()
    proving._registry.add(1, ENGINE, {0: {0: "10.0.0.2:7000"}}, "10.0.0.2", 1)
    registration = register_at(url(proving), 1, OTHER, {0: {0: "10.0.0.3:7000"}}, SECRET)
    assert registration.done.wait(60)
    assert ask(proving, "GET", "/query")[1]["1"]["engine_id"] == OTHER


def test_a_replayed_registration_puts_no_earlier_engine_back(proving: BootstrapServer) -> None:
    old, new = worker(), worker(engine_id=OTHER)
    recorded, unused = proof(proving, old), proof(proving, old)
    assert ask(proving, "POST", "/register", old, recorded)[0] == 200
    assert ask(proving, "POST", "/register", new, proof(proving, new))[0] == 200
    for replayed in (recorded, unused):
        assert ask(proving, "POST", "/register", old, replayed)[0] == 409
    assert ask(proving, "GET", "/query")[1]["1"]["engine_id"] == OTHER
    restarted = BootstrapServer("127.0.0.1", 0, 3, SECRET)
    restarted.host = "127.0.0.1"  # type: ignore[attr-defined]
    for _ in range(10):
        assert ask(restarted, "GET", "/register")[0] == 200
    assert ask(restarted, "POST", "/register", old, recorded)[0] == 403
    # A proof holds for its challenge alone.
    other = proof(restarted, old) | {CHALLENGE: ask(restarted, "GET", "/register")[1]["challenge"]}
    assert ask(restarted, "POST", "/register", old, other)[0] == 403
    assert ask(restarted, "GET", "/query")[1] == {}
    restarted.close()


def test_a_registration_that_was_refused_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_bootstrap, "RETRY_S", (0.01, 0.02))
    server = BootstrapServer("127.0.0.1", 0, 2)
    server.host = "127.0.0.1"  # type: ignore[attr-defined]
    server._registry.add(1, OTHER, {0: {0: "10.0.0.2:7000"}}, "10.0.0.2")
    refused = threading.Event()
    post = _bootstrap._post

    def posted(*args: Any) -> None:
        try:
            post(*args)
        except _bootstrap._RefusedError:
            refused.set()
            raise

    monkeypatch.setattr(_bootstrap, "_post", posted)
    registration = register_at(url(server), 1, ENGINE, {0: {0: "a:1"}})
    assert refused.wait(60)
    server._registry._engines = {}
    assert registration.done.wait(60)
    assert ask(server, "GET", "/query")[1]["1"]["engine_id"] == ENGINE
    server.close()


def test_no_rank_registers_more_workers_than_it_has() -> None:
    server = BootstrapServer("127.0.0.1", 0, 3, workers=2)
    server.host = "127.0.0.1"  # type: ignore[attr-defined]
    answers = [ask(server, "POST", "/register", worker(tp_rank=rank))[0] for rank in range(3)]
    assert answers == [200, 200, 400]
    assert ask(server, "POST", "/register", worker(dp_rank=2))[0] == 200
    server.close()


def test_other_paths_are_not_served(server: BootstrapServer) -> None:
    assert ask(server, "GET", "/register")[0] == 404
    assert ask(server, "POST", "/query", worker())[0] == 404
    assert ask(server, "GET", "/query?dp=0") == (200, {})


def test_workers_are_bounded(server: BootstrapServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_bootstrap, "MAX_WORKERS", 2)
    assert [ask(server, "POST", "/register", worker(tp_rank=rank))[0] for rank in range(3)] == [200, 200, 400]
    server.register(3, OTHER, {0: {0: "a:1"}})  # the engine's own call only logs it
    assert ask(server, "POST", "/register", worker(engine_id=OTHER))[0] == 200
    assert list(ask(server, "GET", "/query")[1]["1"]["worker_addr"]) == ["0"]


def test_silent_connections_never_keep_others_out(server: BootstrapServer) -> None:
    address = (server.host, server.port)  # type: ignore[attr-defined]
    silent = [socket.create_connection(address, timeout=10) for _ in range(MAX_CONNECTIONS + 5)]
    assert ask(server, "GET", "/query") == (200, {})
    assert silent[0].recv(1) == b"", "the oldest was ended"
    for connection in silent:
        connection.close()


def connected(server: BootstrapServer) -> socket.socket:
    return socket.create_connection((server.host, server.port), timeout=60)  # type: ignore[attr-defined]


def ended(connection: socket.socket) -> bytes:
    """What a connection was answered when it has ended."""
    answer = b""
    with contextlib.suppress(ConnectionError):
        while data := connection.recv(4096):
            answer += data
    return answer


def test_a_request_has_32_kib_in_all(server: BootstrapServer) -> None:
    for headers in (b"X: " + b"x" * (40 << 10), b"".join(b"X%d: %s\r\n" % (at, b"x" * 1000) for at in range(60))):
        with connected(server) as connection:
            connection.sendall(b"GET /query HTTP/1.0\r\n" + headers)
            assert ended(connection).split(b" ", 2)[1] == b"431"
    # The server does not take what is behind.
    with connected(server) as connection, pytest.raises(ConnectionError):
        connection.sendall(b"GET /query HTTP/1.0\r\n" + (b"X: " + b"x" * (60 << 10) + b"\r\n") * 90)
    assert ask(server, "GET", "/query")[0] == 200


def test_a_request_that_comes_byte_by_byte_has_its_time_in_all(
    server: BootstrapServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_bootstrap, "IO_TIMEOUT_S", 0.2)
    with connected(server) as connection:
        connection.settimeout(0.01)
        watchdog = time.monotonic() + 60
        with contextlib.suppress(ConnectionError):
            while True:
                assert time.monotonic() < watchdog
                connection.send(b"x")
                with contextlib.suppress(TimeoutError):
                    assert connection.recv(1) == b""
                    break


def test_a_taken_port_is_said_and_not_raised() -> None:
    first = BootstrapServer("127.0.0.1", 0)
    second = BootstrapServer("127.0.0.1", first.port)
    assert first.error is None
    assert second.error is not None
    assert str(first.port) in second.error
    second.register(0, ENGINE, {0: {0: "a:1"}})
    second.close()
    first.close()
    first.close()


def test_all_interfaces_take_both_families() -> None:
    server = BootstrapServer("::", 0)
    if server.error is not None:
        pytest.skip(server.error)
    for host in ("127.0.0.1", "::1"):
        server.host = host  # type: ignore[attr-defined]
        assert ask(server, "GET", "/query") == (200, {})
    server.close()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (0, None)),
        ({"data_parallel_index": 3}, (3, "master")),
        ({"data_parallel_index": 3, "nnodes_within_dp": 2}, (3, "first-node")),
        ({"local_engines_only": True, "data_parallel_index": 2, "data_parallel_rank_local": 0}, (0, None)),
        ({"local_engines_only": True, "data_parallel_index": 2}, (0, None)),
        ({"local_engines_only": True, "data_parallel_index": 3, "data_parallel_rank_local": 1}, (1, "own")),
    ],
)
def test_each_set_of_engines_behind_one_api_server_has_one_server(changes: dict[str, Any], expected: Any) -> None:
    parallel = {
        "local_engines_only": False,
        "data_parallel_index": 0,
        "data_parallel_rank_local": None,
        "nnodes_within_dp": 1,
        "data_parallel_master_ip": "master",
        "master_addr": "first-node",
    }
    assert _bootstrap.place(SimpleNamespace(**parallel | changes), "own") == expected


def test_a_registration_needs_a_url() -> None:
    for bad in ("10.0.0.1:8998", "https://10.0.0.1", "http://"):
        with pytest.raises(ValueError, match="http://host:port"):
            register_at(bad, 1, ENGINE, {0: {0: "a:1"}})
