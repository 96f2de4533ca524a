"""`kvferry.nixl` between processes: metadata by the listener, peers that die, stop, restart and fork; no idle work."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kit import PATIENCE, Child, Memory, eventually, kept_port, run_python
from kvferry._engine.connections import OpenConnections
from kvferry.nixl import _bindings as bind
from kvferry.nixl import _errors as nixl_errors
from kvferry.nixl import _exchange, _listener, _memory, nixl_agent, nixl_agent_config
from kvferry.nixl._errors import nixlBackendError
from kvferry.nixl._metadata import Metadata, RemoteMemory
from nixl_kit import deregister, release

MIB = 1 << 20
NBYTES = 64 * MIB
LISTEN = {"KVFERRY_LISTEN": "127.0.0.1:0"}

TARGET = f"""
from kvferry.nixl import nixl_agent, nixl_agent_config
agent = nixl_agent("there", nixl_agent_config({{settings}}))
memory = Memory({NBYTES})
memory[0:{NBYTES}] = bytes([7]) * {NBYTES}
descs = agent.register_memory([(memory.addr, memory.nbytes, 0, "")], "DRAM")
"""


class Here:
    """An agent of this process, and its memory."""

    def __init__(self) -> None:
        self.agent = nixl_agent("here", nixl_agent_config())
        self.memory = Memory(NBYTES)
        self.agent.register_memory([(self.memory.addr, NBYTES, 0, "")], "DRAM")

    def handle(self, child: Child, operation: str, nbytes: int = NBYTES, notif: bytes = b"") -> Any:
        mine = self.agent.get_xfer_descs([(self.memory.addr, nbytes, 0)], "DRAM")
        theirs = self.agent.get_xfer_descs([(child.run("memory.addr"), nbytes, 0)], "DRAM")
        return self.agent.initialize_xfer(operation, mine, theirs, "there", notif)

    def end(self, handle: Any, patience: float = 30.0) -> str:
        eventually(lambda: self.agent.check_xfer_state(handle) != "PROC", patience)
        return self.agent.check_xfer_state(handle)


@pytest.fixture(autouse=True)
def _the_listener_waits_for_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_listener, "IO_TIMEOUT_S", PATIENCE)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Here]:
    monkeypatch.setenv("KVFERRY_LISTEN", LISTEN["KVFERRY_LISTEN"])
    here = Here()
    yield here
    here.agent.shutdown()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> Iterator[Here]:
    """An agent that waits for a transfer longer than a test may take."""
    monkeypatch.setenv("KVFERRY_LISTEN", LISTEN["KVFERRY_LISTEN"])
    monkeypatch.setenv("KVFERRY_TIMEOUT_MS", "600000")
    here = Here()
    yield here
    here.agent.shutdown()


@pytest.fixture
def port() -> Iterator[int]:
    with kept_port() as address:
        yield int(address.rpartition(":")[2])


@pytest.fixture
def start(children: Callable[..., Child]) -> Callable[..., Child]:
    def start(settings: str = "", **env: str) -> Child:
        return children(TARGET.format(settings=settings), env=LISTEN | env)

    return start


def test_two_agents_exchange_metadata_by_the_listener_and_move_both_ways(
    here: Here, start: Callable[..., Child], port: int
) -> None:
    # Asked before the other agent listens.
    here.agent.fetch_remote_metadata("there", "127.0.0.1", port)
    child = start(f"True, True, {port}")
    eventually(lambda: here.agent.check_remote_metadata("there"), 30)
    # The first answer may have come before the memory was registered.
    descs = here.agent.get_xfer_descs([(child.run("memory.addr"), NBYTES, 0)], "DRAM")
    here.agent.fetch_remote_metadata(b"there", "127.0.0.1", port)
    eventually(lambda: here.agent.check_remote_metadata(b"there", descs))
    here.agent.send_local_metadata("127.0.0.1", port)
    wait = "import time\nwhile not agent.check_remote_metadata('here'): time.sleep(0.01)"
    child.run(wait)
    assert not here.agent.check_remote_metadata("there", here.agent.get_xfer_descs([(1, 1, 0)], "DRAM"))
    handle = here.handle(child, "READ", notif=b"UUID1")
    here.agent.transfer(handle)
    assert here.end(handle) == "DONE"
    assert here.memory[0:NBYTES] == bytes([7]) * NBYTES
    child.run("while not agent.check_remote_xfer_done('here', b'UUID1'): time.sleep(0.01)")
    child.run("agent.send_notif('here', b'bye')")
    assert eventually(here.agent.get_new_notifs) == {"there": [b"bye"]}
    here.agent.invalidate_local_metadata("127.0.0.1", port)
    child.run("while agent.check_remote_metadata('here'): time.sleep(0.01)")


def test_a_strangers_request_to_the_listener_makes_no_agent_forgotten(here: Here, start: Callable[..., Child]) -> None:
    child = start("True, True, 0")
    port = child.run("agent._listener.port")
    child.run(f"agent.add_remote_agent({here.agent.get_agent_metadata()!r})")
    stranger = nixl_agent("here", nixl_agent_config())
    stranger.invalidate_local_metadata("127.0.0.1", port)
    # Garbage is answered with the end of the connection.
    for garbage in (b"\x03\xff\xff\xff\xff", b"\x01\x04\x00\x00\x00abcd", b"GET / HTTP/1.1\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            connection.sendall(garbage)
            try:
                connection.shutdown(socket.SHUT_WR)
            except OSError as error:
                if error.errno == errno.ENOTCONN:
                    # The listener has answered with a reset already.
                    continue
                raise
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""
    assert child.run("agent.check_remote_metadata('here')") is True
    stranger.shutdown()


def test_the_listener_takes_a_bounded_number_of_agents_and_regions(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_exchange, "_REMOTES_MAX", 2)
    monkeypatch.setattr(_exchange, "_REGIONS_MAX", 3)

    def send(name: str, regions: int = 0) -> None:
        region = Metadata.from_bytes(here.agent.get_agent_metadata()).regions[0]
        made = [RemoteMemory((1 << 30) * (at + 1), 4096, 0, region.token) for at in range(regions)]
        here.agent._answer(_listener.SEND, Metadata(name, "0" * 32, None, made).to_bytes())

    send("one", 2)
    with pytest.raises(nixl_errors.nixlNotAllowedError, match="at most"):
        send("two", 2)
    send("two")
    send("two", 1)
    with pytest.raises(nixl_errors.nixlNotAllowedError, match="remove agents"):
        send("three")
    here.agent.remove_remote_agent("one")
    send("three", 2)


def test_bad_requests_to_the_listener_are_logged_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    handled = threading.Semaphore(0)

    def refuse(_operation: int, _body: bytes) -> bytes:
        handled.release()
        raise ValueError("a test")

    listener = _listener.Listener("127.0.0.1", 0, refuse)
    for _ in range(20):
        with contextlib.suppress(ConnectionError):
            _listener.request("127.0.0.1", listener.port, _listener.FETCH, b"")
        assert handled.acquire(timeout=60)
    eventually(lambda: "a test" in caplog.text, 60)
    assert caplog.text.count("a test") < 10
    listener.close()


def silent_at(port: int, count: int, body: bytes = b"") -> list[socket.socket]:
    """Connections that begin a message of 1 MiB and do not end it."""
    silent = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(count)]
    for connection in silent:
        connection.sendall(_listener._HEAD.pack(_listener.SEND, MIB) + body)
    return silent


def test_silent_connections_never_keep_others_out_of_the_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_listener, "MAX_CONNECTIONS", 4)
    monkeypatch.setattr(_listener, "GRACE_S", 0.2, raising=False)
    listener = _listener.Listener("127.0.0.1", 0, lambda _operation, body: body)
    silent = silent_at(listener.port, 4)
    for _ in range(3):
        assert _listener.request("127.0.0.1", listener.port, _listener.FETCH, b"kv") == b"kv"
    assert silent[0].recv(1) == b"", "the oldest was ended"
    silent[3].settimeout(0.01)
    with pytest.raises(TimeoutError):
        silent[3].recv(1)
    for connection in silent:
        connection.close()
    listener.close()


def test_a_connection_to_the_listener_waits_for_a_place_of_those_that_have_just_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_listener, "MAX_CONNECTIONS", 1)
    monkeypatch.setattr(_listener, "GRACE_S", 60.0, raising=False)
    listener = _listener.Listener("127.0.0.1", 0, lambda _operation, body: body)
    [first] = silent_at(listener.port, 1)
    answers: list[bytes] = []
    second = threading.Thread(
        target=lambda: answers.append(_listener.request("127.0.0.1", listener.port, _listener.FETCH, b"kv"))
    )
    second.start()
    time.sleep(0.1)
    first.sendall(bytes(MIB))
    assert _listener._receive(first) == (_listener.SEND, bytes(MIB))
    second.join(60)
    assert answers == [b"kv"]
    first.close()
    listener.close()


def test_the_connections_to_the_listener_hold_bodies_of_a_bounded_size_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_listener, "BODY_MAX", MIB)
    listener = _listener.Listener("127.0.0.1", 0, lambda _operation, body: body)
    most, *others = (silent_at(listener.port, 1, bytes(size << 10))[0] for size in (600, 300, 200))
    with contextlib.suppress(ConnectionError):
        assert most.recv(1) == b"", "the one that held most was ended"
    for connection in others:
        connection.settimeout(0.01)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        connection.close()
    assert _listener.request("127.0.0.1", listener.port, _listener.FETCH, b"kv") == b"kv"
    most.close()
    listener.close()


def test_what_the_listener_answers_stays_counted_and_is_ended_for_no_other() -> None:
    answering, sending, last = pairs = [socket.socketpair() for _ in range(3)]
    open_ones = OpenConnections(2, bytes_max=100)
    for (connection, _), nbytes in ((answering, 90), (sending, 5)):
        open_ones.add(connection)
        open_ones.took(connection, nbytes)
    open_ones.keep(answering[0])
    with pytest.raises(ConnectionError):
        open_ones.took(sending[0], 20)
    open_ones.remove(sending[0])
    # Of the two places the one that is not answered goes to the next connection.
    for connection, _ in (sending, last):
        open_ones.add(connection)
    with pytest.raises(ConnectionError):
        open_ones.keep(sending[0])
    answering[0].sendall(b"answer")
    assert answering[1].recv(6) == b"answer"
    for pair in pairs:
        for it in pair:
            it.close()


@pytest.mark.parametrize(("backends", "host"), [(["POSIX"], "127.0.0.1"), (["UCX"], "0.0.0.0"), ([], "0.0.0.0")])
def test_the_listener_is_where_the_agent_listens(backends: list[str], host: str) -> None:
    agent = nixl_agent("files", nixl_agent_config(True, True, 0, backends=backends))
    assert agent._listener is not None
    assert agent._listener.host == host
    # It stays with the agent, which starts later.
    port = agent._listener.port
    started = agent._core().local_address[0]
    assert (agent._listener.host, agent._listener.port) == (started, port)
    agent.shutdown()


def test_the_listener_goes_where_a_later_backend_has_the_agent() -> None:
    with kept_port() as address:
        port = int(address.rpartition(":")[2])
        agent = nixl_agent("later", nixl_agent_config(True, True, port, backends=["POSIX"]))
        assert agent._listener is not None
        assert (agent._listener.host, agent._listener.port) == ("127.0.0.1", port)
        agent.create_backend("UCX")
        assert (agent._listener.host, agent._listener.port) == ("0.0.0.0", port)
        assert agent._core().local_address[0] == "0.0.0.0"
        assert _listener.request("127.0.0.1", port, _listener.FETCH, b"") == agent.get_agent_metadata()
        agent.shutdown()


def test_the_listener_stays_where_it_is_if_another_socket_has_its_new_place() -> None:
    with kept_port() as address:
        port = int(address.rpartition(":")[2])
        agent = nixl_agent("stays", nixl_agent_config(True, True, port, backends=["POSIX"]))
        # All interfaces are free only while no other socket listens at one of them.
        with socket.create_server(("127.0.0.2", port)), pytest.raises(nixlBackendError, match=r"0\.0\.0\.0"):
            agent.create_backend("UCX")
        assert agent._listener is not None
        assert (agent._listener.host, agent._listener.port) == ("127.0.0.1", port)
        assert _listener.request("127.0.0.1", port, _listener.FETCH, b"") == agent.get_agent_metadata()
        assert "UCX" not in agent.backends
        agent.shutdown()


def test_an_agent_that_was_shut_down_opens_no_listener_for_a_later_backend() -> None:
    with kept_port() as address:
        port = int(address.rpartition(":")[2])
        agent = nixl_agent("ended", nixl_agent_config(True, True, port, backends=["POSIX"]))
        listener = agent._listener
        assert listener is not None
        agent.shutdown()
        with pytest.raises(nixlBackendError, match="shut down"):
            agent.create_backend("UCX")
        assert agent._listener is listener and listener.closed and "UCX" not in agent.backends


def test_a_listener_that_has_lost_its_place_is_tried_again() -> None:
    with kept_port() as address:
        port = int(address.rpartition(":")[2])
        agent = nixl_agent("again", nixl_agent_config(True, True, port, backends=[]))
        assert agent._listener is not None
        assert agent._listener.host == "0.0.0.0"
        agent._listener.close()
        with socket.create_server(("127.0.0.1", port)):
            for _ in range(2):
                with pytest.raises(nixlBackendError, match=r"127\.0\.0\.1"):
                    agent.get_agent_metadata()
        metadata = agent.get_agent_metadata()
        assert _listener.request("127.0.0.1", port, _listener.FETCH, b"") == metadata
        agent.shutdown()


@pytest.mark.parametrize(
    ("listen", "host"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.0.1:0", "127.0.0.1"),
        ("localhost:0", None),
        ("0", "0.0.0.0"),
        (":0", "0.0.0.0"),
        ("::1", "::1"),
        ("[::1]:0", "::1"),
        ("[::]:0", "::"),
    ],
)
@pytest.mark.parametrize("backends", [[], ["POSIX"], ["UCX"]])
def test_the_listener_is_where_kvferry_listen_has_the_agent(
    monkeypatch: pytest.MonkeyPatch, listen: str, host: str | None, backends: list[str]
) -> None:
    if host is not None and ":" in host:
        try:
            socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        except OSError as error:
            pytest.skip(f"no IPv6 here: {error}")
    monkeypatch.setenv("KVFERRY_LISTEN", listen)
    agent = nixl_agent("named", nixl_agent_config(True, True, 0, backends=backends))
    assert agent._listener is not None
    assert agent._listener.host == agent._core().local_address[0]
    assert host in (None, agent._listener.host)
    to = {"0.0.0.0": "127.0.0.1", "::": "127.0.0.1"}.get(agent._listener.host, agent._listener.host)
    assert _listener.request(to, agent._listener.port, _listener.FETCH, b"") == agent.get_agent_metadata()
    agent.shutdown()


def test_partial_metadata_adds_memory_to_a_known_agent(here: Here, start: Callable[..., Child]) -> None:
    child = start()
    child.run(f"more = Memory({MIB}); extra = agent.register_memory([(more.addr, {MIB}, 0, '')], 'DRAM')")
    here.agent.add_remote_agent(child.run("agent.get_partial_agent_metadata(descs, True)"))
    addr = child.run("more.addr")
    rows = [(addr, MIB, 0)]
    with pytest.raises(bind.nixlNotFoundError):
        here.agent.prep_xfer_dlist("there", rows, "DRAM")
    assert here.agent.add_remote_agent(child.run("agent.get_partial_agent_metadata(extra)")) == b"there"
    here.agent.prep_xfer_dlist("there", rows, "DRAM")
    nowhere = nixl_agent("nowhere")
    nowhere.add_remote_agent(child.run("agent.get_partial_agent_metadata(extra)"))
    with pytest.raises(bind.nixlNotFoundError, match="no address"):
        nowhere.make_connection("there")
    nowhere.shutdown()


def test_threads_that_add_a_restarted_agent_at_once_have_one_and_the_same(
    here: Here, start: Callable[..., Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    child = start()
    metadata = child.run("agent.get_agent_metadata()")
    here.agent.add_remote_agent(Metadata("there", "before", "127.0.0.1:1").to_bytes())
    prepared: list[Any] = []

    def answers(_remote: Any) -> bool:
        if not prepared:
            prepared.append(None)
            # As another thread does while this one waits for the answer.
            here.agent.add_remote_agent(metadata)
            prepared[0] = here.agent.prep_xfer_dlist("there", [(child.run("memory.addr"), MIB, 0)], "DRAM")
        return False

    monkeypatch.setattr(_memory.Remote, "answers", answers)
    here.agent.add_remote_agent(metadata)
    mine = here.agent.prep_xfer_dlist("", [(here.memory.addr, MIB, 0)], "DRAM")
    handle = here.agent.make_prepped_xfer("READ", mine, [0], prepared[0], [0])
    here.agent.transfer(handle)
    assert here.end(handle) == "DONE"


def test_metadata_with_a_name_that_is_not_utf_8_is_refused_and_nothing_is_known_of_it(here: Here) -> None:
    with pytest.raises(bind.nixlMismatchError):
        here.agent.add_remote_agent(Metadata("there\ud800", "1", "127.0.0.1:1").to_bytes())
    assert not here.agent._remotes


def test_a_message_that_comes_byte_by_byte_holds_the_listener_for_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listener = _listener.Listener("127.0.0.1", 0, lambda _operation, body: body)
    began = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(_listener, "EXCHANGE_TIMEOUT_S", 0.5)
        with socket.create_connection(("127.0.0.1", listener.port), timeout=0.01) as connection:
            connection.sendall(_listener._HEAD.pack(_listener.SEND, 1 << 20))
            is_open = True
            while is_open and time.monotonic() - began < 20:
                try:
                    connection.sendall(b"x")
                    is_open = connection.recv(1) != b""
                except TimeoutError:
                    pass
                except ConnectionError:
                    is_open = False
    assert not is_open
    assert _listener.request("127.0.0.1", listener.port, _listener.FETCH, b"kv") == b"kv"
    listener.close()


@pytest.mark.parametrize("operation", ["WRITE", "READ"])
def test_a_killed_peer_ends_the_transfer_at_once_and_a_restarted_one_takes_its_name(
    patient: Here, start: Callable[..., Child], operation: str
) -> None:
    here = patient
    child = start()
    here.agent.add_remote_agent(child.run("agent.get_agent_metadata()"))
    here.agent.make_connection("there")
    handle = here.handle(child, operation)
    prepared = here.agent.prep_xfer_dlist("there", [(child.run("memory.addr"), MIB, 0)], "DRAM")
    child.send(signal.SIGSTOP)
    assert here.agent.transfer(handle) == "PROC"
    assert here.agent.check_xfer_state(handle) == "PROC"
    with pytest.raises(bind.nixlRepostActiveError):
        here.agent.transfer(handle)
    child.kill()
    assert here.end(handle) == "ERR"
    assert isinstance(handle.error, bind.nixlRemoteDisconnectError)
    assert not here.agent.check_remote_metadata("there")
    with pytest.raises(bind.nixlRemoteDisconnectError):
        here.agent.transfer(handle)
    with pytest.raises(bind.nixlRemoteDisconnectError):
        here.agent.send_notif("there", b"x")
    here.agent.release_xfer_handle(handle)
    again = start()
    here.agent.add_remote_agent(again.run("agent.get_agent_metadata()"))
    assert here.agent.check_remote_metadata("there")
    mine = here.agent.prep_xfer_dlist("", [(here.memory.addr, MIB, 0)], "DRAM")
    with pytest.raises(bind.nixlNotFoundError, match="replaced"):
        here.agent.make_prepped_xfer("READ", mine, [0], prepared, [0])
    handle = here.handle(again, "READ")
    here.agent.transfer(handle)
    assert here.end(handle) == "DONE"
    assert here.memory[0:MIB] == bytes([7]) * MIB


def test_a_peer_that_was_killed_while_idle_is_found_out_by_the_next_transfer(
    patient: Here, start: Callable[..., Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    # An agent that lives answers in this time, on a busy machine, too.
    monkeypatch.setattr(_memory, "_ANSWER_S", PATIENCE)
    here = patient
    child = start()
    here.agent.add_remote_agent(child.run("agent.get_agent_metadata()"))
    handle = here.handle(child, "READ", MIB)
    here.agent.transfer(handle)
    assert here.end(handle) == "DONE"
    child.kill()
    assert here.agent.transfer(handle) in ("PROC", "ERR")
    assert here.end(handle) == "ERR"
    # Without a transfer that fails, a restarted agent takes the name of the dead one as well.
    second = start()
    here.agent.add_remote_agent(second.run("agent.get_agent_metadata()"))
    second.kill()
    third = start()
    here.agent.add_remote_agent(third.run("agent.get_agent_metadata()"))
    # But no agent takes the name of one that lives.
    with pytest.raises(bind.nixlNotAllowedError):
        here.agent.add_remote_agent(start().run("agent.get_agent_metadata()"))


def test_a_stopped_peer_ends_the_transfer_by_its_silence(
    start: Callable[..., Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVFERRY_LISTEN", LISTEN["KVFERRY_LISTEN"])
    monkeypatch.setenv("KVFERRY_SILENCE_MS", "3000")
    monkeypatch.setenv("KVFERRY_TIMEOUT_MS", "600000")
    here = Here()
    child = start()
    here.agent.add_remote_agent(child.run("agent.get_agent_metadata()"))
    here.agent.make_connection("there")
    handle = here.handle(child, "READ")
    child.send(signal.SIGSTOP)
    here.agent.transfer(handle)
    sent = 0
    for _ in range(3):
        # Does not wait for the peer. A stall of the machine may have ended the session.
        with contextlib.suppress(bind.nixlRemoteDisconnectError):
            here.agent.send_notif("there", b"heartbeat")
            sent += 1
    assert sent > 0 or here.agent.check_xfer_state(handle) == "ERR"
    assert here.end(handle, 60) == "ERR"
    assert isinstance(handle.error, bind.nixlRemoteDisconnectError)
    child.send(signal.SIGCONT)
    here.agent.shutdown()


def test_after_the_release_of_a_running_read_nothing_is_written_to_its_memory(
    here: Here, start: Callable[..., Child]
) -> None:
    child = start()
    here.agent.add_remote_agent(child.run("agent.get_agent_metadata()"))
    here.agent.make_connection("there")
    handle, after = here.handle(child, "READ"), here.handle(child, "READ", MIB)
    child.send(signal.SIGSTOP)
    assert here.agent.transfer(handle) == "PROC"
    release(here.agent, handle)
    here.memory[0:NBYTES] = bytes([1]) * NBYTES
    child.send(signal.SIGCONT)
    # The peer has taken all requests that came before this one.
    here.agent.transfer(after)
    if here.end(after) == "DONE":
        assert here.memory[0:MIB] == bytes([7]) * MIB
    assert here.memory[MIB:NBYTES] == bytes([1]) * (NBYTES - MIB)


def test_memory_is_deregistered_only_after_its_running_transfers_have_ended(
    here: Here, start: Callable[..., Child]
) -> None:
    child = start()
    here.agent.add_remote_agent(child.run("agent.get_agent_metadata()"))
    here.agent.make_connection("there")
    handle = here.handle(child, "READ")
    child.send(signal.SIGSTOP)
    assert here.agent.transfer(handle) == "PROC"
    deregister(here.agent, here.agent.get_reg_descs([(here.memory.addr, NBYTES, 0, "")], "DRAM"))
    assert here.agent.check_xfer_state(handle) == "ERR"
    assert isinstance(handle.error, bind.nixlCancelledError)
    here.memory[0:NBYTES] = bytes(NBYTES)
    child.send(signal.SIGCONT)
    child.run("agent.get_new_notifs()")
    assert here.memory[0:NBYTES] == bytes(NBYTES)


def test_in_a_forked_child_every_call_raises_and_the_parent_goes_on(here: Here, start: Callable[..., Child]) -> None:
    child = start()
    here.agent.add_remote_agent(child.run("agent.get_agent_metadata()"))
    handle = here.handle(child, "READ", MIB)
    here.agent.transfer(handle)
    assert here.end(handle) == "DONE"
    calls: list[Callable[[], object]] = [
        lambda: here.agent.transfer(handle),
        lambda: here.agent.check_xfer_state(handle),
        lambda: here.agent.shutdown(),
        lambda: here.agent.send_notif("there", b"x"),
        lambda: here.agent.get_new_notifs(),
        lambda: here.agent.register_memory([(here.memory.addr, MIB, 0, "")], "DRAM"),
        lambda: here.agent.get_agent_metadata(),
    ]
    held, forked = threading.Event(), threading.Event()

    def hold() -> None:
        with handle._lock, here.agent._lock:
            held.set()
            forked.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    pid = os.fork()
    if pid == 0:
        # Ends the child if a call waits for a lock of the parent's.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        wrong = 0
        for call in calls:
            try:
                call()
                wrong += 1
            except bind.nixlBackendError as error:
                wrong += "forked" not in str(error)
            except BaseException:
                wrong += 1
        here.agent.release_xfer_handle(handle)
        os._exit(wrong)
    forked.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    here.agent.transfer(handle)
    assert here.end(handle) == "DONE"


def test_a_process_exits_cleanly_with_everything_still_open() -> None:
    ended = run_python(
        """
        import ctypes
        from kvferry.nixl import nixl_agent, nixl_agent_config
        a, b = nixl_agent("a", nixl_agent_config(True, True, 0)), nixl_agent("b")
        m = ctypes.create_string_buffer(1 << 20)
        for agent in (a, b):
            agent.register_memory([(ctypes.addressof(m), 1 << 20, 0, "")], "DRAM")
        a.add_remote_agent(b.get_agent_metadata())
        d = a.get_xfer_descs([(ctypes.addressof(m), 1 << 20, 0)], "DRAM")
        h = a.initialize_xfer("WRITE", d, d, "b")
        a.transfer(h)
        print("open")
        """,
        env=LISTEN,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "open\n", "")


def test_idle_agents_use_no_processor(here: Here, start: Callable[..., Child]) -> None:
    # The default, by which the agent sends heartbeats.
    child = start("True, True, 0", KVFERRY_SILENCE_MS="3000")
    here.agent.add_remote_agent(child.run("agent.get_agent_metadata()"))
    handle = here.handle(child, "READ", MIB)
    here.agent.transfer(handle)
    assert here.end(handle) == "DONE"

    def ticks() -> int:
        fields = Path(f"/proc/{child.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return int(fields[11]) + int(fields[12])

    # 0.5 % of a core is 2 of the kernel's ticks here; three times as many on busy cores, which also slow each of them.
    shares: list[float] = []
    while not shares or shares[-1] > 0.015:
        assert len(shares) < 5, f"shares of a core: {shares}"
        before, began = ticks(), time.monotonic()
        time.sleep(4)
        shares.append((ticks() - before) / os.sysconf("SC_CLK_TCK") / (time.monotonic() - began))
