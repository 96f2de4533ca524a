"""`kvferry._bootstrap`: what routers and decode engines ask of a prefill in Mooncake's flow."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from kvferry import _bootstrap
from kvferry._bootstrap import MAX_BODY_BYTES, MAX_CONNECTIONS, BootstrapServer, register_at

ENGINE = "00112233445566778899aabbccddeeff"
OTHER = "ffeeddccbbaa99887766554433221100"


@pytest.fixture(params=["127.0.0.1", "::1"])
def server(request: pytest.FixtureRequest) -> Iterator[BootstrapServer]:
    server = BootstrapServer(request.param, 0)
    if server.error is not None:
        pytest.skip(server.error)
    server.host = request.param  # type: ignore[attr-defined]
    yield server
    server.close()


def url(server: BootstrapServer) -> str:
    host = server.host  # type: ignore[attr-defined]
    return f"http://[{host}]:{server.port}" if ":" in host else f"http://{host}:{server.port}"


def ask(server: BootstrapServer, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=10)  # type: ignore[attr-defined]
    text = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    try:
        connection.request(method, path, text)
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
    server.register(1, ENGINE, {0: {0: "10.0.0.1:7000"}, 1: {0: "10.0.0.1:7001"}})
    assert ask(server, "POST", "/register", worker(engine_id=OTHER, addr="10.0.0.9:7000"))[0] == 200
    assert ask(server, "GET", "/query")[1] == {
        "1": {"engine_id": OTHER, "worker_addr": {"0": {"0": "10.0.0.9:7000"}}},
    }


def test_another_rank_registers_all_its_workers(server: BootstrapServer) -> None:
    registration = register_at(url(server), 3, ENGINE, {0: {0: "a:1", 1: "a:2"}, 1: {0: "a:3", 1: "a:4"}})
    assert registration.done.wait(10)
    workers = {"0": {"0": "a:1", "1": "a:2"}, "1": {"0": "a:3", "1": "a:4"}}
    assert ask(server, "GET", "/query")[1] == {"3": {"engine_id": ENGINE, "worker_addr": workers}}


def test_a_registration_waits_for_a_server_that_starts_later() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    registration = register_at(f"http://127.0.0.1:{port}", 1, ENGINE, {0: {0: "a:1"}})
    assert not registration.done.wait(0.5)
    server = BootstrapServer("127.0.0.1", port)
    assert registration.done.wait(10)
    server.close()


def test_a_closed_registration_ends_its_thread() -> None:
    before = threading.active_count()
    registration = register_at("http://127.0.0.1:9", 1, ENGINE, {0: {0: "a:1"}})
    registration.close()
    deadline = time.monotonic() + 10
    while threading.active_count() > before:
        assert time.monotonic() < deadline
        time.sleep(0.01)
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


def test_other_paths_are_not_served(server: BootstrapServer) -> None:
    assert ask(server, "GET", "/register")[0] == 404
    assert ask(server, "POST", "/query", worker())[0] == 404
    assert ask(server, "GET", "/query?dp=0") == (200, {})


def test_workers_are_bounded(server: BootstrapServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_bootstrap, "MAX_WORKERS", 2)
    assert [ask(server, "POST", "/register", worker(tp_rank=rank))[0] for rank in range(3)] == [200, 200, 400]
    server.register(2, OTHER, {0: {0: "a:1"}})  # the engine's own call only logs it
    assert ask(server, "POST", "/register", worker(engine_id=OTHER))[0] == 200
    assert list(ask(server, "GET", "/query")[1]["1"]["worker_addr"]) == ["0"]


def test_silent_connections_never_keep_others_out(server: BootstrapServer) -> None:
    address = (server.host, server.port)  # type: ignore[attr-defined]
    silent = [socket.create_connection(address, timeout=10) for _ in range(MAX_CONNECTIONS + 5)]
    assert ask(server, "GET", "/query") == (200, {})
    assert silent[0].recv(1) == b"", "the oldest was ended"
    for connection in silent:
        connection.close()


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
