"""Agents in two processes over loopback."""

from __future__ import annotations

import array
import os
import random
import signal
from collections.abc import Callable
from typing import Any

import kvferry
import pytest
from conftest import LOOPBACK, Target
from kit import PATIENCE, Memory, eventually, kept_port

Targets = Callable[..., Target]


def test_bytes_written_are_at_the_peer_when_write_returns(agent: kvferry.Agent, target: Target) -> None:
    source = bytearray(os.urandom(100_000))
    local = agent.register(source)
    batch = kvferry.Batch()
    batch.push(local, 0, target.region, 17, 100_000)
    moved = agent.peer(target.address).write(batch)
    assert (moved.nbytes, moved.descriptors, moved.transport) == (100_000, 1, "tcp")
    assert target.bytes(17, 100_000) == source


def test_bytes_read_are_here_when_read_returns(agent: kvferry.Agent, target: Target) -> None:
    target.child.run("import os; memory[5000:9096] = os.urandom(4096)")
    destination = bytearray(4096)
    local = agent.register(destination)
    batch = kvferry.Batch()
    batch.push_to_address(local, 0, target.base + 5000, 4096)
    assert agent.peer(target.address).read(batch).nbytes == 4096
    assert destination == target.bytes(5000, 4096)


def test_a_scattered_batch_lands_at_its_addresses(agent: kvferry.Agent, target: Target) -> None:
    block, blocks = 512, 1024
    source = Memory(block * blocks)
    source[0 : source.nbytes] = os.urandom(source.nbytes)
    places = random.sample(range(target.nbytes // block), blocks)
    local = [source.addr + i * block for i in range(blocks)]
    remote = [target.base + p * block for p in places]
    moved = agent.peer(target.address).write(local, remote, [block] * blocks)
    assert (moved.nbytes, moved.descriptors) == (block * blocks, blocks)
    there = target.bytes(0, target.nbytes)
    for i, place in enumerate(places):
        assert there[place * block : (place + 1) * block] == source[i * block : (i + 1) * block]


def test_a_batch_may_be_used_again_and_cleared(agent: kvferry.Agent, target: Target) -> None:
    source = bytearray(64)
    local, peer = agent.register(source), agent.peer(target.address)
    batch = kvferry.Batch()
    batch.extend_regions(local, range(0, 64, 16), target.region, [300, 200, 100, 0], 16)
    assert (len(batch), batch.nbytes) == (4, 64)
    for round_ in range(3):
        source[:] = bytes([round_ + 1]) * 64
        peer.write(batch)
        assert target.bytes(200, 16) == bytes([round_ + 1]) * 16
    batch.clear()
    assert (len(batch), batch.nbytes) == (0, 0)
    assert peer.write(batch).transport is None


def numpy_column(values: list[int]) -> Any:
    numpy = pytest.importorskip("numpy")
    return numpy.array(values, dtype=numpy.uint64)


def strided_column(values: list[int]) -> Any:
    numpy = pytest.importorskip("numpy")
    return numpy.repeat(numpy.array(values, dtype=numpy.int64), 2)[::2]


@pytest.mark.parametrize(
    "column",
    [
        list,
        tuple,
        lambda values: array.array("Q", values),
        lambda values: array.array("q", values),
        numpy_column,
        strided_column,
        lambda values: range(values[0], values[-1] + 1, values[1] - values[0]),
    ],
    ids=["list", "tuple", "array-Q", "array-q", "numpy", "numpy-strided", "range"],
)
def test_addresses_may_be_any_sequence_of_integers(
    agent: kvferry.Agent, target: Target, column: Callable[[list[int]], Any]
) -> None:
    source = Memory(4096)
    source[0:4096] = os.urandom(4096)
    local = column([source.addr + i * 256 for i in range(16)])
    remote = column([target.base + i * 512 for i in range(16)])
    assert agent.peer(target.address).write(local, remote, 256).nbytes == 4096
    assert all(target.bytes(i * 512, 256) == source[i * 256 : (i + 1) * 256] for i in range(16))


def test_a_single_range_needs_no_list(agent: kvferry.Agent, target: Target) -> None:
    source = Memory(4096)
    source[0:5] = b"block"
    agent.peer(target.address).write(source.addr, target.base + 11, 5)
    assert target.bytes(11, 5) == b"block"


@pytest.mark.parametrize(
    ("lists", "error"),
    [
        (([1, 2], [1], [1, 1]), kvferry.InvalidArgumentError),
        (([1], [1], [1, 1]), kvferry.InvalidArgumentError),
        (([-1], [1], [1]), OverflowError),
        (([1], [2**64], [1]), OverflowError),
        (([1.5], [1], [1]), TypeError),
        (("ab", [1, 2], [1, 1]), TypeError),
        (([1], [1], [0]), kvferry.InvalidArgumentError),
        ((array.array("q", [-5]), [1], [1]), ValueError),
        (([4096, 4096], [1, 2], [2**63, 2**63]), kvferry.TooLargeError),
        ((4096, [1], 1), TypeError),
        (([4096], 1, [1]), TypeError),
    ],
)
def test_invalid_lists_are_refused_before_anything_moves(
    agent: kvferry.Agent, target: Target, lists: tuple[Any, Any, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        agent.peer(target.address).write(*lists)
    assert agent.stats()["transfers_started"] == 0


def test_a_transfer_takes_a_batch_or_three_lists(agent: kvferry.Agent) -> None:
    peer = agent.peer("127.0.0.1:9")
    with pytest.raises(TypeError, match="three lists"):
        peer.write([1], [2])
    with pytest.raises(TypeError, match="three lists"):
        peer.write(kvferry.Batch(), [2], [3])


@pytest.mark.parametrize(
    ("settings", "error", "named"),
    [
        ({"timeout": "soon"}, TypeError, "timeout"),
        ({"notify": 5}, TypeError, "notify"),
        ({"streams": 1.5}, TypeError, "streams"),
        ({"streams": 0}, kvferry.InvalidArgumentError, "stream"),
        ({"timeout": -1}, kvferry.InvalidArgumentError, "-1"),
        ({"deadline": 1}, TypeError, "deadline"),
    ],
)
@pytest.mark.parametrize("call", ["write", "read", "write_async", "read_async"])
def test_an_invalid_setting_of_a_transfer_is_named(
    agent: kvferry.Agent, call: str, settings: dict[str, Any], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        getattr(agent.peer("127.0.0.1:9"), call)(kvferry.Batch(), **settings)
    getattr(agent.peer("127.0.0.1:9"), call)(kvferry.Batch(), timeout=None, notify=None, streams=None)


def test_a_notification_arrives_after_the_data_it_follows(agent: kvferry.Agent, target: Target) -> None:
    source = bytearray(b"x" * 1000)
    batch = kvferry.Batch()
    batch.push(agent.register(source), 0, target.region, 0, 1000)
    agent.peer(target.address).write(batch, notify=("layer 3", b"\x00\xff"))
    sender, name, message, data = target.child.run(
        "n = agent.wait_notification(5); (n.sender, n.host), n.name, n.message, memory[0:1000]"
    )
    assert (sender, name, message, data) == (("here", "127.0.0.1"), "layer 3", b"\x00\xff", source)
    assert kvferry.Notification("layer 3").host == ""
    assert target.child.run("agent.notifications(), agent.wait_notification(0.05)") == ([], None)


def test_waiting_for_a_notification_of_an_agent_that_is_shut_down_raises() -> None:
    agent = kvferry.Agent(listen="127.0.0.1:0")
    agent.shutdown()
    for timeout in (None, 0, 1):
        with pytest.raises(kvferry.ShutdownError):
            agent.wait_notification(timeout)


def test_a_notification_without_data_makes_the_descriptor_readable(agent: kvferry.Agent, target: Target) -> None:
    agent.peer(target.address).notify(kvferry.Notification("hello", "wörld"))
    assert target.child.run(
        """
        import select
        fd = agent.notification_fd()
        ready = select.select([fd], [], [], 5)[0] == [fd]
        ready, [(n.name, n.message.decode()) for n in agent.notifications()], select.select([fd], [], [], 0)[0]
        """
    ) == (True, [("hello", "wörld")], [])


def test_a_peer_reports_its_identity_and_its_regions(agent: kvferry.Agent, target: Target) -> None:
    peer = agent.peer(target.address)
    assert peer.transport is None
    summary = peer.connect()
    assert (summary.name, summary.transport, summary.authenticated) == ("there", "tcp", False)
    assert summary.incarnation == target.region.incarnation == target.child.run("agent.incarnation")
    assert peer.transport == "tcp"
    assert 0 < peer.probe(timeout=PATIENCE) < PATIENCE
    (region,) = peer.regions()
    assert region == target.region
    assert hash(region) == hash(target.region)
    assert (region.addr, region.nbytes, region.access) == (target.base, target.nbytes, "rw")


def test_a_peer_finds_a_region_by_its_name(agent: kvferry.Agent, target: Target) -> None:
    target.child.run(
        "named = agent.register(bytearray(b'x' * 64), 'r', name='kv'); other = agent.allocate(8, name='other')"
    )
    peer = agent.peer(target.address)
    kv = peer.region("kv")
    assert (kv.nbytes, kv.access) == (64, "r")
    mine = agent.allocate(64)
    batch = kvferry.Batch()
    batch.push(mine, 0, kv, 0, 64)
    peer.read(batch)
    assert mine.read_at(0, 64) == b"x" * 64
    with pytest.raises(kvferry.NotRegisteredError):
        peer.region("nothing")
    assert target.child.run("agent.region('kv') == named, named.name, agent.region('nothing')") == (True, "kv", None)


def test_a_name_belongs_to_one_region(agent: kvferry.Agent) -> None:
    first, second = bytearray(8), bytearray(8)
    region = agent.register(first, name="kv")
    for refused, error in (("kv", kvferry.OverlapError), ("", kvferry.InvalidArgumentError)):
        with pytest.raises(error):
            agent.register(second, name=refused)
    second.append(0)  # not held by a region
    assert [other.name for other in agent.regions()] == ["kv"]
    agent.unregister(region)
    assert agent.allocate(8, name="kv").name == "kv"


def test_a_remote_region_survives_pickling() -> None:
    import pickle

    with kvferry.Agent(listen=LOOPBACK) as agent:
        region = agent.register(bytearray(10), "r").remote()
    again = pickle.loads(pickle.dumps(region))
    assert again == region
    assert (again.access, again.nbytes, again.incarnation) == ("r", 10, agent.incarnation)


@pytest.mark.parametrize(
    ("access", "write", "read"), [("rw", True, True), ("r", False, True), ("w", True, False), ("none", False, False)]
)
def test_a_peer_does_only_what_the_region_allows(
    agent: kvferry.Agent, target: Target, access: str, write: bool, read: bool
) -> None:
    place = target.child.run(f"other = Memory(4096); agent.register((other.addr, 4096), {access!r}); other.addr")
    mine, peer = Memory(4096), agent.peer(target.address)
    for allowed, call in ((write, peer.write), (read, peer.read)):
        if allowed:
            call(mine.addr, place, 100)
        else:
            with pytest.raises(kvferry.AccessDeniedError):
                call(mine.addr, place, 100)
    peer.write(mine.addr, target.base, 100)


@pytest.mark.parametrize(
    ("offset", "nbytes"), [((1 << 20) - 5, 10), (-10, 20), (1 << 30, 8)], ids=["beyond", "before", "elsewhere"]
)
def test_out_of_bounds_is_an_error_of_that_call_only(
    agent: kvferry.Agent, target: Target, offset: int, nbytes: int
) -> None:
    mine, peer = Memory(4096), agent.peer(target.address)
    mine[0:4096] = b"\xaa" * 4096
    with pytest.raises((kvferry.OutOfBoundsError, kvferry.NotRegisteredError)) as caught:
        peer.write([mine.addr, mine.addr], [target.base + 64, target.base + offset], [64, nbytes])
    assert caught.value.quiesced is not False
    assert caught.value.context["peer"] == target.address
    assert peer.write(mine.addr, target.base, 64).nbytes == 64
    assert target.bytes(target.nbytes - 64, 64) == bytes(64)


def test_a_secret_is_proved_by_both_or_the_session_is_refused(targets: Targets) -> None:
    closed, open_ = targets(secret="s3cret"), targets()
    with kvferry.Agent("here", listen=LOOPBACK, secret=b"s3cret") as knows:
        assert knows.peer(closed.address).connect().authenticated
        with pytest.raises(kvferry.AuthUnsupportedError):
            knows.peer(open_.address).connect()
        assert "s3cret" not in repr(knows) + repr(knows.config)
    with kvferry.Agent("here", listen=LOOPBACK, secret="wrong") as guesses, pytest.raises(kvferry.AuthFailedError):
        guesses.peer(closed.address).connect()
    with kvferry.Agent("here", listen=LOOPBACK) as innocent, pytest.raises(kvferry.AuthRequiredError):
        innocent.peer(closed.address).connect()


def test_a_restarted_peer_gets_a_new_session_and_its_old_regions_are_stale(
    agent: kvferry.Agent, targets: Targets
) -> None:
    with kept_port() as address:
        target = targets(listen=address)
        mine = agent.register(bytearray(100))
        batch = kvferry.Batch()
        batch.push(mine, 0, target.region, 0, 100)
        peer = agent.peer(target.address)
        peer.write(batch)
        target.child.run(
            f"agent.shutdown(); agent = kvferry.Agent('again', listen={address!r}); agent.register((memory.addr, 4096))"
        )
        eventually(lambda: peer.transport is None, what="the end of the session")
        for _ in range(2):
            with pytest.raises(kvferry.StaleIncarnationError):
                peer.write(batch)
        assert peer.connect().name == "again"
        peer.write(mine.addr, target.base, 100)


def test_a_killed_peer_is_an_error_at_once(agent: kvferry.Agent, target: Target) -> None:
    mine, peer = Memory(4096), agent.peer(target.address)
    peer.write(mine.addr, target.base, 4096)
    target.child.kill()
    with pytest.raises((kvferry.PeerResetError, kvferry.PeerClosedError, kvferry.UnreachableError)):
        peer.write(mine.addr, target.base, 4096, timeout=10)


def test_a_stopped_peer_is_an_error_within_the_silence_limit(targets: Targets) -> None:
    target = targets(64 << 20)
    mine = Memory(64 << 20)
    with kvferry.Agent(listen=LOOPBACK, silence=1.0) as agent:
        peer = agent.peer(target.address)

        def writes() -> bool:
            try:
                return peer.write(mine.addr, target.base, 4096).nbytes == 4096
            except kvferry.PeerSilentError:
                return False

        while True:
            eventually(writes)
            target.child.send(signal.SIGSTOP)
            # A stall of the machine may have ended the session meanwhile.
            if peer.transport is not None:
                break
            target.child.send(signal.SIGCONT)
        with pytest.raises(kvferry.PeerSilentError) as caught:
            peer.write(mine.addr, target.base, 64 << 20)
        assert caught.value.quiesced is False
        assert isinstance(caught.value, ConnectionError)


def test_a_deadline_is_a_timeout_error(targets: Targets) -> None:
    target = targets(64 << 20)
    mine = Memory(64 << 20)
    with kvferry.Agent(listen=LOOPBACK, silence=6.0) as agent:
        peer = agent.peer(target.address)
        peer.connect()
        target.child.send(signal.SIGSTOP)
        with pytest.raises(TimeoutError) as caught:
            peer.write(mine.addr, target.base, 64 << 20, timeout=0.2)
        assert isinstance(caught.value, kvferry.DeadlineError)
        assert caught.value.kind == "deadline"


@pytest.mark.parametrize("timeout", [-1, float("nan")])
def test_an_invalid_time_is_refused(agent: kvferry.Agent, timeout: float) -> None:
    with pytest.raises(kvferry.InvalidArgumentError):
        agent.peer("127.0.0.1:9").probe(timeout)


def test_a_port_without_a_listener_is_unreachable(agent: kvferry.Agent) -> None:
    mine = Memory(4096)
    for call in (
        lambda peer: peer.write(mine.addr, 4096, 10),
        lambda peer: peer.connect(),
        lambda peer: peer.regions(),
        lambda peer: peer.probe(),
    ):
        with pytest.raises(kvferry.UnreachableError):
            call(agent.peer("127.0.0.1:1"))


def test_a_malformed_address_is_refused(agent: kvferry.Agent) -> None:
    for address in ("", "nonsense", "127.0.0.1:99999"):
        with pytest.raises(kvferry.Error) as caught:
            agent.peer(address)
        assert caught.value.kind in ("invalid_argument", "unreachable")


def test_arguments_override_the_environment_which_overrides_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_SILENCE_MS", "1234")
    monkeypatch.setenv("KVFERRY_CHECKSUM", "on")
    with kvferry.Agent("named", listen=LOOPBACK, checksum=False, transports=["tcp"], timeout=1.5) as agent:
        settings = agent.config
        assert agent.name == settings["name"] == "named"
        assert settings["silence_ms"] == 1234
        assert settings["checksum"] == "off"
        assert settings["transports"] == "tcp"
        assert settings["timeout_ms"] == 1500
        assert agent.local_address[0] == "127.0.0.1"
        assert agent.address == f"127.0.0.1:{agent.local_address[1]}"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"transports": "pigeon"}, kvferry.InvalidArgumentError),
        ({"io_threads": 0}, kvferry.InvalidArgumentError),
        ({"listen": "nonsense"}, kvferry.InvalidArgumentError),
        ({"checksum": "maybe"}, kvferry.InvalidArgumentError),
        ({"secret": 7}, TypeError),
        ({"secret": b""}, kvferry.InvalidArgumentError),
        ({"secret": ""}, kvferry.InvalidArgumentError),
        ({"silence": -1.0}, kvferry.InvalidArgumentError),
        ({"nmae": "x"}, TypeError),
    ],
)
def test_invalid_settings_are_refused(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        kvferry.Agent(**({"listen": LOOPBACK} | options))


def test_after_shutdown_every_call_raises_shutdown_error(target: Target) -> None:
    agent = kvferry.Agent(listen=LOOPBACK)
    region, peer = agent.register(bytearray(10)), agent.peer(target.address)
    peer.connect()
    agent.shutdown()
    agent.shutdown()
    batch = kvferry.Batch()
    for call in (
        lambda: agent.register(bytearray(10)),
        lambda: agent.allocate(10),
        lambda: agent.peer(target.address),
        lambda: peer.write(batch, notify=("a", b"b")),
        lambda: peer.probe(),
        lambda: peer.connect(),
    ):
        with pytest.raises(kvferry.ShutdownError):
            call()
    assert not region.is_registered


def test_counters_follow_transfers(agent: kvferry.Agent, target: Target) -> None:
    mine = agent.register(bytearray(1000))
    batch = kvferry.Batch()
    batch.push(mine, 0, target.region, 0, 1000)
    agent.peer(target.address).write(batch)
    agent.peer(target.address).read(batch)
    stats = agent.stats()
    assert (stats["bytes_written"], stats["bytes_read"], stats["transfers_done"]) == (1000, 1000, 2)
    assert (stats["transfers_in_flight"], stats["regions"]) == (0, 1)
    theirs = target.child.run("agent.stats()")
    assert (theirs["bytes_received"], theirs["bytes_served"]) == (1000, 1000)


def test_everything_has_a_readable_repr(agent: kvferry.Agent, target: Target) -> None:
    region, peer, batch = agent.register(bytearray(10)), agent.peer(target.address), kvferry.Batch()
    batch.push(region, 0, target.region, 0, 10)
    things = [agent, region, region.remote(), peer, batch, peer.write(batch), peer.write_async(batch), peer.connect()]
    for thing in [*things, kvferry.Notification("n", b"m")]:
        assert repr(thing).startswith("<kvferry.")
