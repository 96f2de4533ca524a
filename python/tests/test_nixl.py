"""`kvferry.nixl`: NIXL's calls on agents of one process, their states, their exceptions."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator
from typing import Any

import kvferry
import numpy as np
import pytest
from kit import Memory, eventually
from kvferry.nixl import _bindings as bind
from kvferry.nixl import _core
from nixl_kit import BLOCK, BLOCKS, Side, deregister, run


@pytest.fixture(autouse=True)
def _loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_LISTEN", "127.0.0.1:0")


@pytest.fixture(params=["tcp", "local"])
def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Side, Side]]:
    monkeypatch.setenv("KVFERRY_TRANSPORTS", request.param)
    here, there = Side("here", capture_telemetry=True), Side("there")
    here.agent.add_remote_agent(there.agent.get_agent_metadata())
    yield here, there
    here.agent.shutdown()
    there.agent.shutdown()


@pytest.fixture
def one() -> Iterator[Side]:
    side = Side("alone")
    yield side
    side.agent.shutdown()


def lists(here: Side, there: Side) -> tuple[Any, Any]:
    agent = here.agent
    return agent.prep_xfer_dlist("NIXL_INIT_AGENT", here.rows(), "DRAM"), agent.prep_xfer_dlist(
        "there", there.rows(), "DRAM"
    )


@pytest.mark.parametrize("operation", ["WRITE", "READ"])
def test_a_prepared_transfer_moves_the_blocks_it_names_and_no_others(pair: tuple[Side, Side], operation: str) -> None:
    here, there = pair
    source, sink = (here, there) if operation == "WRITE" else (there, here)
    source.fill()
    mine, theirs = lists(here, there)
    local, remote = np.array([3, 9, 10, 11, 40], dtype=np.int32), [60, 1, 2, 3, 0]
    handle = here.agent.make_prepped_xfer(operation, mine, local, theirs, remote, notif_msg=b"to\0you")
    assert run(here.agent, handle) == "DONE"
    assert here.agent.check_xfer_state(handle) == "DONE"
    to, of = (remote, local.tolist()) if operation == "WRITE" else (local.tolist(), remote)
    moved = dict(zip(to, of, strict=True))
    for at in range(BLOCKS):
        expected = bytes([moved[at] + 1]) * BLOCK if at in moved else bytes(BLOCK)
        assert sink.block(at) == expected, at
    eventually(lambda: there.agent.update_notifs())
    assert there.agent.notifs == {"here": [b"to\0you"]}
    facts = here.agent.get_xfer_telemetry(handle)
    # Three blocks are neighbours on both sides.
    assert (facts.totalBytes, facts.descCount) == (5 * BLOCK, 3)
    assert 0 <= facts.postDuration <= facts.xferDuration and facts.startTime > 0
    assert here.agent.query_xfer_backend(handle) == "UCX"


def test_a_transfer_may_be_posted_again_with_another_notification(pair: tuple[Side, Side]) -> None:
    here, there = pair
    handle = here.agent.initialize_xfer(
        "WRITE",
        here.agent.get_xfer_descs(here.rows(0, 4), "DRAM"),
        here.agent.get_xfer_descs(np.array(there.rows(8, 4)), "DRAM"),
        b"there",
    )
    with pytest.raises(bind.nixlNotPostedError):
        here.agent.check_xfer_state(handle)
    for again in range(3):
        here.memory[0:BLOCK] = bytes([again + 1]) * BLOCK
        assert run(here.agent, handle) == "DONE"
        assert there.block(8) == bytes([again + 1]) * BLOCK
    here.agent.transfer(handle, notif_msg="as text")
    assert eventually(lambda: there.agent.check_remote_xfer_done("here", b"as "))
    assert not there.agent.check_remote_xfer_done("here", b"as ")


def test_strided_rows_stand_for_their_ranges(pair: tuple[Side, Side]) -> None:
    here, there = pair
    here.fill()
    strided = np.array([(here.memory.addr, BLOCK, 0, 2 * BLOCK, 4), (here.memory.addr + BLOCK, BLOCK, 0, BLOCK, 2)])
    mine = here.agent.prep_xfer_dlist("", strided, "DRAM")
    theirs = here.agent.prep_xfer_dlist(b"there", there.rows(), "DRAM")
    order = list(range(6))
    handle = here.agent.make_prepped_xfer("WRITE", mine, order, theirs, order)
    assert run(here.agent, handle) == "DONE"
    assert [there.block(at)[0] for at in range(7)] == [1, 3, 5, 7, 2, 3, 0]
    with pytest.raises(ValueError, match="memory type"):
        here.agent.prep_xfer_dlist("", strided)
    with pytest.raises(bind.nixlInvalidParamError, match="strided"):
        here.agent.prep_xfer_dlist("", np.array([(here.memory.addr, 1, 0, 0, 1 << 40)]), "DRAM")


def test_an_agent_moves_within_its_own_memory(one: Side) -> None:
    one.fill()
    mine = one.agent.prep_xfer_dlist("NIXL_INIT_AGENT", one.rows(), "DRAM")
    also = one.agent.prep_xfer_dlist("alone", one.rows(), "DRAM")
    assert run(one.agent, one.agent.make_prepped_xfer("WRITE", mine, [0, 1], also, [62, 63])) == "DONE"
    assert one.block(63) == bytes([2]) * BLOCK


def test_host_memory_that_an_engine_calls_vram_is_moved_and_other_addresses_are_refused(
    pair: tuple[Side, Side],
) -> None:
    here, there = pair
    more = Memory(BLOCK * 2)
    here.agent.register_memory([(more.addr, BLOCK * 2, 3, "")], "VRAM")
    more[0:BLOCK] = bytes([5]) * BLOCK
    handle = here.agent.initialize_xfer(
        *("WRITE", here.agent.get_xfer_descs([(more.addr, BLOCK, 3)], "VRAM")),
        *(here.agent.get_xfer_descs(there.rows(0, 1), "VRAM"), "there"),
    )
    assert run(here.agent, handle) == "DONE"
    assert there.block(0) == bytes([5]) * BLOCK
    read_only = mmap.mmap(-1, BLOCK, prot=mmap.PROT_READ)
    address = np.frombuffer(read_only, dtype=np.uint8).ctypes.data
    for addr in (address, 4096, 1 << 50):
        with pytest.raises(bind.nixlBackendError, match="not host memory"):
            here.agent.register_memory([(addr, BLOCK, 0, "")], "VRAM")


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda a, mine, also: a.make_prepped_xfer("MOVE", mine, [0], also, [0]), KeyError),
        (lambda a, mine, also: a.make_prepped_xfer("READ", mine, [0, 1], also, [0]), bind.nixlInvalidParamError),
        (lambda a, mine, also: a.make_prepped_xfer("READ", mine, [BLOCKS], also, [0]), bind.nixlInvalidParamError),
        (lambda a, mine, also: a.make_prepped_xfer("READ", mine, [-1], also, [0]), bind.nixlInvalidParamError),
        (lambda a, mine, also: a.make_prepped_xfer("READ", mine, [0.5], also, [0]), bind.nixlInvalidParamError),
        (lambda a, mine, also: a.make_prepped_xfer("READ", mine, [], also, []), bind.nixlInvalidParamError),
        (lambda a, mine, also: a.make_prepped_xfer("READ", also, [0], mine, [0]), bind.nixlInvalidParamError),
        (lambda a, mine, also: a.make_prepped_xfer("READ", 7, [0], also, [0]), TypeError),
        (lambda a, mine, also: a.make_prepped_xfer("READ", mine, [0], also, [0], backends=["GDS"]), KeyError),
        (lambda a, mine, also: a.make_prepped_xfer("READ", mine, [0], also, [0], 3.0), TypeError),
        (lambda a, mine, also: a.prep_xfer_dlist("nobody", [(1, 2, 0)], "DRAM"), bind.nixlNotFoundError),
        (lambda a, mine, also: a.prep_xfer_dlist("", [(1, 2, 0)], "DRAM"), bind.nixlNotFoundError),
        (lambda a, mine, also: a.prep_xfer_dlist("", None, "DRAM"), TypeError),
        (lambda a, mine, also: a.initialize_xfer("READ", None, None, "alone"), TypeError),
        (lambda a, mine, also: a.transfer(7), TypeError),
        (lambda a, mine, also: a.check_xfer_state(None), TypeError),
        (lambda a, mine, also: a.release_dlist_handle(7), bind.nixlInvalidParamError),
        (lambda a, mine, also: a.register_memory([(0, 1, 0, "")], "DRAM"), bind.nixlInvalidParamError),
        (lambda a, mine, also: a.register_memory([(4096, 1, 0, "")], "VRAM"), bind.nixlBackendError),
        (lambda a, mine, also: a.register_memory([(0, 1, 0, "")], "FILE"), bind.nixlBackendError),
        (lambda a, mine, also: a.register_memory([(4096, 1, 0, "")]), TypeError),
        (lambda a, mine, also: a.send_notif("nobody", b"x"), bind.nixlNotFoundError),
        (lambda a, mine, also: a.remove_remote_agent("nobody"), bind.nixlNotFoundError),
        (lambda a, mine, also: a.add_remote_agent(b"garbage"), bind.nixlMismatchError),
        (lambda a, mine, also: a.add_remote_agent("text"), bind.nixlMismatchError),
        (lambda a, mine, also: a.add_remote_agent(a.get_agent_metadata()), bind.nixlInvalidParamError),
        (lambda a, mine, also: a.create_backend("UCX"), bind.nixlInvalidParamError),
        (lambda a, mine, also: a.create_backend("GDS"), bind.nixlNotFoundError),
        (lambda a, mine, also: a.send_local_metadata(), bind.nixlNotSupportedError),
        (lambda a, mine, also: a.prep_mem_view(None), bind.nixlNotSupportedError),
        (lambda a, mine, also: a.query_memory([(0, 0, 0, "/")], "POSIX", "FILE"), ValueError),
    ],
)
def test_each_wrong_argument_raises_nixls_exception(one: Side, call: Any, error: type[Exception]) -> None:
    mine = one.agent.prep_xfer_dlist("", one.rows(), "DRAM")
    also = one.agent.prep_xfer_dlist("alone", one.rows(), "DRAM")
    with pytest.raises(error):
        call(one.agent, mine, also)


def test_handles_are_released_once_and_are_then_of_no_use(pair: tuple[Side, Side]) -> None:
    here, there = pair
    mine, theirs = lists(here, there)
    handle = here.agent.make_prepped_xfer("WRITE", mine, [0], theirs, [0])
    assert len({handle, mine, theirs}) == 3
    with pytest.raises(bind.nixlInvalidParamError, match="another agent"):
        there.agent.transfer(handle)
    for _ in range(2):
        here.agent.release_dlist_handle(mine)
        theirs.release()
    # What was made of a list stays.
    assert run(here.agent, handle) == "DONE"
    with pytest.raises(bind.nixlInvalidParamError, match="released"):
        here.agent.make_prepped_xfer("WRITE", mine, [0], theirs, [0])
    for _ in range(2):
        here.agent.release_xfer_handle(handle)
    for call in (here.agent.transfer, here.agent.check_xfer_state, here.agent.get_xfer_telemetry):
        with pytest.raises(bind.nixlInvalidParamError, match="released"):
            call(handle)


def test_telemetry_has_to_be_asked_for(pair: tuple[Side, Side]) -> None:
    here, there = pair
    there.agent.add_remote_agent(here.agent.get_agent_metadata())
    handle = there.agent.make_prepped_xfer("WRITE", there.agent.prep_xfer_dlist("", there.rows(), "DRAM"), [0],
                                           there.agent.prep_xfer_dlist("here", here.rows(), "DRAM"), [0])  # fmt: skip
    assert run(there.agent, handle) == "DONE"
    with pytest.raises(bind.nixlNoTelemetryError):
        there.agent.get_xfer_telemetry(handle)


def test_memory_that_was_deregistered_is_not_moved(pair: tuple[Side, Side]) -> None:
    here, there = pair
    mine, theirs = lists(here, there)
    handle = here.agent.make_prepped_xfer("WRITE", mine, [0], theirs, [0])
    there.agent.deregister_memory(there.registered)
    assert run(here.agent, handle) == "ERR"
    assert isinstance(handle.error, bind.nixlNotFoundError)
    # The peer is well.
    assert here.agent.check_remote_metadata("there")
    here.agent.deregister_memory(here.registered)
    with pytest.raises(bind.nixlNotFoundError, match="deregistered"):
        here.agent.transfer(handle)
    with pytest.raises(bind.nixlNotFoundError):
        here.agent.deregister_memory(here.registered)
    with pytest.raises(bind.nixlNotFoundError):
        here.agent.make_prepped_xfer("WRITE", mine, [0], theirs, [0])


def test_equal_registrations_count_and_overlapping_ones_are_refused_all_or_none(one: Side) -> None:
    again = one.agent.register_memory(one.agent.get_reg_descs([(one.memory.addr, one.memory.nbytes, 0, "")], "DRAM"))
    other = Memory(BLOCK)
    with pytest.raises(bind.nixlBackendError, match="overlap"):
        one.agent.register_memory([(other.addr, BLOCK, 0, ""), (one.memory.addr + BLOCK, BLOCK, 0, "")], "DRAM")
    one.agent.register_memory([(other.addr, BLOCK, 0, "")], "DRAM")
    one.agent.deregister_memory(one.registered)
    one.agent.prep_xfer_dlist("", one.rows(), "DRAM")
    one.agent.deregister_memory(again)
    with pytest.raises(bind.nixlNotFoundError):
        one.agent.prep_xfer_dlist("", one.rows(), "DRAM")


def test_memory_that_can_not_be_unregistered_now_can_be_later_and_the_rest_is(
    one: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = [Memory(BLOCK) for _ in range(3)]
    descs = one.agent.register_memory([(it.addr, BLOCK, 0, "") for it in memory], "DRAM")
    close = _core.close

    def fail(agent: Any, area: Any) -> None:
        if area.addr == memory[0].addr:
            raise kvferry.QuarantinedError("a process does not answer")
        close(agent, area)

    monkeypatch.setattr(_core, "close", fail)
    with pytest.raises(bind.nixlBackendError, match="does not answer"):
        one.agent.deregister_memory(descs)
    monkeypatch.undo()
    for it in memory[1:]:
        one.agent.deregister_memory(one.agent.register_memory([(it.addr, BLOCK, 0, "")], "DRAM"))
    one.agent.deregister_memory(one.agent.get_reg_descs([(memory[0].addr, BLOCK, 0, "")], "DRAM"))
    one.agent.register_memory([(memory[0].addr, BLOCK, 0, "")], "DRAM")


def test_every_call_of_an_agent_that_was_shut_down_or_removed_raises(pair: tuple[Side, Side]) -> None:
    here, there = pair
    mine, theirs = lists(here, there)
    handle = here.agent.make_prepped_xfer("WRITE", mine, [0], theirs, [0])
    here.agent.remove_remote_agent(b"there")
    assert not here.agent.check_remote_metadata("there")
    with pytest.raises(bind.nixlNotFoundError):
        here.agent.transfer(handle)
    with pytest.raises(bind.nixlNotFoundError):
        here.agent.make_prepped_xfer("WRITE", mine, [0], theirs, [0])
    assert here.agent.add_remote_agent(there.agent.get_agent_metadata()) == b"there"
    mine, theirs = lists(here, there)
    handle = here.agent.make_prepped_xfer("WRITE", mine, [0], theirs, [0])
    assert run(here.agent, handle) == "DONE"
    here.agent.shutdown()
    here.agent.shutdown()
    for call in (
        lambda: here.agent.transfer(handle),
        lambda: here.agent.get_agent_metadata(),
        lambda: here.agent.get_new_notifs(),
        lambda: here.agent.send_notif("there", b"x"),
        lambda: here.agent.register_memory([(here.memory.addr, BLOCK, 0, "")], "DRAM"),
        lambda: here.agent.deregister_memory(here.registered),
    ):
        with pytest.raises(bind.nixlBackendError, match="shut down"):
            call()
    here.agent.release_xfer_handle(handle)
    assert not [error for error in (handle.error,) if error]


def test_an_agent_that_was_removed_still_reaches_the_one_that_removed_it(pair: tuple[Side, Side]) -> None:
    here, there = pair
    there.agent.add_remote_agent(here.agent.get_agent_metadata())
    back = there.agent.initialize_xfer(
        *("WRITE", there.agent.get_xfer_descs(there.rows(), "DRAM")),
        *(there.agent.get_xfer_descs(here.rows(), "DRAM"), "here"),
    )
    assert run(there.agent, back) == "DONE"
    here.agent.make_connection("there")
    here.agent.remove_remote_agent("there")
    assert run(there.agent, back) == "DONE"
    there.agent.send_notif("here", "still here")
    assert eventually(here.agent.get_new_notifs) == {"there": [b"still here"]}


def test_a_handle_that_is_dropped_while_its_transfer_runs_holds_nothing(pair: tuple[Side, Side]) -> None:
    here, there = pair
    mine, theirs = lists(here, there)
    for _ in range(50):
        here.agent.transfer(here.agent.make_prepped_xfer("READ", mine, range(BLOCKS), theirs, range(BLOCKS)))
    assert not list(here.agent._running)
    deregister(here.agent, here.registered)


def test_transfers_and_agents_that_come_and_go_leave_no_descriptor_and_no_handle(pair: tuple[Side, Side]) -> None:
    here, there = pair

    def cycle() -> None:
        here.agent.add_remote_agent(there.agent.get_agent_metadata())
        mine, theirs = lists(here, there)
        for _ in range(10):
            handle = here.agent.make_prepped_xfer("WRITE", mine, [0, 5], theirs, [7, 9], b"x")
            assert run(here.agent, handle) == "DONE"
            here.agent.release_xfer_handle(handle)
        here.agent.send_notif("there", b"y")
        there.agent.get_new_notifs()
        here.agent.remove_remote_agent("there")

    cycle()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(30):
        cycle()
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= before)
    assert not list(here.agent._running) and not here.agent._left


def test_a_notification_longer_than_64_kib_is_refused(pair: tuple[Side, Side]) -> None:
    here, there = pair
    mine, theirs = lists(here, there)
    with pytest.raises(bind.nixlInvalidParamError, match="too long"):
        here.agent.send_notif("there", bytes(1 << 17))
    handle = here.agent.make_prepped_xfer("READ", mine, [0], theirs, [0], bytes(1 << 17))
    assert run(here.agent, handle) == "ERR"
    assert here.agent.check_remote_metadata("there")
    here.agent.send_notif("there", bytes(60 << 10))
    assert len(eventually(there.agent.get_new_notifs)["here"][0]) == 60 << 10


def test_threads_may_share_an_agent(pair: tuple[Side, Side]) -> None:
    here, there = pair
    here.fill()
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for _ in range(20):
                mine, theirs = lists(here, there)
                handle = here.agent.make_prepped_xfer("WRITE", mine, [number], theirs, [number], f"{number}".encode())
                assert run(here.agent, handle) == "DONE"
                here.agent.release_xfer_handle(handle)
                here.agent.send_notif("there", b"plain")
                here.agent.add_remote_agent(there.agent.get_agent_metadata())
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed
    eventually(lambda: len(there.agent.update_notifs().get("here", [])) == 320)
    assert all(there.block(at) == here.block(at) for at in range(8))


def test_a_post_of_many_descriptors_takes_little_time_of_the_caller(pair: tuple[Side, Side]) -> None:
    here, there = pair
    mine, theirs = lists(here, there)
    order = np.arange(0, BLOCKS, 2, dtype=np.int32).repeat(32)
    handle = here.agent.make_prepped_xfer("WRITE", mine, order, theirs, order)
    assert run(here.agent, handle) == "DONE"
    assert here.agent.get_xfer_telemetry(handle).descCount == len(order) == 1024
