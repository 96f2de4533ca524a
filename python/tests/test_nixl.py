"""`kvferry.nixl`: NIXL's calls on agents of one process, their states, their exceptions."""

from __future__ import annotations

import mmap
import os
import pickle
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from kit import Memory, eventually
from kvferry.nixl import _bindings as bind
from kvferry.nixl import nixl_agent, nixl_agent_config, nixl_thread_sync_t

BLOCK = 4096
BLOCKS = 64


class Side:
    """An agent with registered memory of `BLOCKS` blocks."""

    def __init__(self, name: str, **settings: Any) -> None:
        self.agent = nixl_agent(name, nixl_agent_config(**settings))
        self.memory = Memory(BLOCK * BLOCKS)
        self.registered = self.agent.register_memory([(self.memory.addr, self.memory.nbytes, 0, "")], "DRAM")

    def rows(self, first: int = 0, count: int = BLOCKS) -> list[tuple[int, int, int]]:
        return [(self.memory.addr + at * BLOCK, BLOCK, 0) for at in range(first, first + count)]

    def block(self, at: int) -> bytes:
        return self.memory[at * BLOCK : (at + 1) * BLOCK]

    def fill(self) -> None:
        for at in range(BLOCKS):
            self.memory[at * BLOCK : (at + 1) * BLOCK] = bytes([at + 1]) * BLOCK


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


def run(agent: nixl_agent, handle: Any) -> str:
    state = agent.transfer(handle)
    if state == "PROC":
        eventually(lambda: agent.check_xfer_state(handle) != "PROC")
        state = agent.check_xfer_state(handle)
    return state


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


def test_lists_that_are_unusable_are_none_and_unknown_kinds_of_memory_key_errors(one: Side) -> None:
    agent, rows = one.agent, one.rows(0, 2)
    assert agent.get_xfer_descs(rows) is None
    assert agent.get_xfer_descs([(1, 2)], "DRAM") is None
    assert agent.get_xfer_descs(np.zeros((2, 4), dtype=np.uint64), "DRAM") is None
    assert agent.get_xfer_descs(one.registered) is None
    assert agent.get_xfer_descs(3, "DRAM") is None
    assert agent.get_reg_descs(rows, "DRAM") is None
    assert agent.get_reg_descs(agent.get_xfer_descs(rows, "DRAM")) is None
    assert agent.get_remote_descs([(1, 2, 3)], "DRAM") is None
    with pytest.raises(KeyError):
        agent.get_xfer_descs(rows, "TAPE")
    for bad in ([(-1, 2, 3)], [(1 << 64, 2, 3)], np.array([(-1, 2, 3)])):
        with pytest.raises((ValueError, TypeError)):
            agent.get_xfer_descs(bad, "DRAM")
    with pytest.raises(TypeError):
        agent.get_xfer_descs(np.zeros((2, 3)), "DRAM")
    assert agent.get_remote_descs([(1, 2, 3, "there")], "DRAM").descCount() == 1


def test_descriptor_lists_are_lists_that_survive_pickle_and_serialization(one: Side) -> None:
    descs = bind.nixlXferDList(bind.DRAM_SEG, [(1, 2, 3), (4, 5, 6)])
    descs.addDesc((7, 8, 9))
    assert (descs.descCount(), descs[2], descs.index((4, 5, 6)), next(iter(descs))) == (3, (7, 8, 9), 1, (1, 2, 3))
    descs[0] = (9, 9, 9)
    descs.remDesc(1)
    assert list(descs) == [(9, 9, 9), (7, 8, 9)] and descs.getType() == bind.DRAM_SEG
    with pytest.raises(bind.nixlNotFoundError):
        descs.index((1, 1, 1))
    regs = bind.nixlRegDList(bind.FILE_SEG, [(0, 2, 3, "rw:/a"), (4, 5, 6, b"")])
    assert list(regs.trim()) == [(0, 2, 3), (4, 5, 6)]
    for held in (descs, regs):
        assert pickle.loads(pickle.dumps(held)) == held
        assert one.agent.deserialize_descs(one.agent.get_serialized_descs(held)) == held
    descs.clear()
    assert descs.isEmpty() and len(descs) == 0
    for garbage in (b"", b"\1\0\5\0\0\0abc", pickle.dumps(held)):
        with pytest.raises(bind.nixlMismatchError):
            one.agent.deserialize_descs(garbage)


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


def test_tensors_are_their_memory(one: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    class Tensor:
        device, contiguous = "cpu", True

        def __init__(self, addr: int) -> None:
            self.addr = addr

        def get_device(self) -> int:
            return -1

        def is_contiguous(self) -> bool:
            return self.contiguous

        def data_ptr(self) -> int:
            return self.addr

        def numel(self) -> int:
            return 100

        def element_size(self) -> int:
            return 4

    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(Tensor=Tensor))  # type: ignore[arg-type]
    tensors = [Tensor(4096), Tensor(8192)]
    assert list(one.agent.get_xfer_descs(tensors)) == [(4096, 400, 0), (8192, 400, 0)]
    assert list(one.agent.get_reg_descs(tensors[0])) == [(4096, 400, 0, "")]
    tensors[1].contiguous = False
    assert one.agent.get_xfer_descs(tensors) is None


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


def test_names_and_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="name"):
        nixl_agent("")
    with pytest.raises(TypeError):
        nixl_agent_config(sync_mode=1)  # type: ignore[arg-type]
    config = nixl_agent_config(True, True, 5555, False, 2, ["POSIX", "GDS"], nixl_thread_sync_t.NIXL_THREAD_SYNC_RW)
    assert (config.port, config.backends, config.num_threads) == (5555, ["POSIX", "GDS"], 2)
    agent = nixl_agent("files", nixl_agent_config(backends=["POSIX", "GDS"]))
    assert agent.get_plugin_list() == ["UCX", "POSIX"]
    assert list(agent.backends) == ["POSIX"]
    assert agent.get_backend_mem_types("POSIX") == ["DRAM", "FILE"]
    assert agent.get_plugin_mem_types("UCX") == ["DRAM"]
    assert (agent.get_backend_mem_types("UCX"), agent.get_backend_params("UCX"), agent.get_plugin_params("GDS")) == (
        *([], {}, {}),
    )
    assert list(nixl_agent("all", instantiate_all=True).backends) == ["UCX", "POSIX"]


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
    here.agent.deregister_memory(here.registered)


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


def test_files_are_written_and_read_by_descriptor_and_by_path(tmp_path: Any) -> None:
    agent = nixl_agent("storage", nixl_agent_config(backends=[]))
    with pytest.raises(bind.nixlBackendError):
        agent.register_memory([(4096, 1, 0, "")], "DRAM")
    agent.create_backend("POSIX", {"use_uring": "true"})
    memory, path = Memory(BLOCK * 8), tmp_path / "kv"
    memory[0 : BLOCK * 8] = os.urandom(BLOCK * 8)
    before = memory[0 : BLOCK * 8]
    agent.register_memory([(memory.addr, memory.nbytes, 0, "")], "DRAM")
    path.write_bytes(bytes(BLOCK * 8))
    with open(path, "r+b") as file:
        fd = file.fileno()
        descs = agent.register_memory([(0, BLOCK * 8, fd, "")], "FILE")
        mine = agent.get_xfer_descs([(memory.addr + at * BLOCK, BLOCK, 0) for at in range(8)], "DRAM")
        places = agent.get_xfer_descs([(at * BLOCK, BLOCK, fd) for at in (7, 5, 3, 1, 0, 2, 4, 6)], "FILE")
        write = agent.initialize_xfer("WRITE", mine, places, "storage")
        assert (run(agent, write), agent.query_xfer_backend(write)) == ("DONE", "POSIX")
        assert path.read_bytes()[7 * BLOCK :] == before[:BLOCK]
        memory[0 : BLOCK * 8] = bytes(BLOCK * 8)
        read = agent.make_prepped_xfer(
            *("READ", agent.prep_xfer_dlist("", mine), list(range(8))),
            *(agent.prep_xfer_dlist("storage", places), list(range(8))),
        )
        assert run(agent, read) == "DONE"
        assert memory[0 : BLOCK * 8] == before
        with pytest.raises(bind.nixlNotSupportedError):
            agent.initialize_xfer("WRITE", places, places, "storage")
        for wrong in ([(BLOCK * 8, BLOCK, fd)], [(0, BLOCK, fd + 1000)]):
            with pytest.raises(bind.nixlNotFoundError):
                agent.prep_xfer_dlist("storage", wrong, "FILE")
        with pytest.raises(bind.nixlNotSupportedError):
            agent.initialize_xfer("WRITE", mine, places, "storage", b"done")
        agent.deregister_memory(descs)
        with pytest.raises(bind.nixlNotFoundError):
            agent.transfer(read)
    second = tmp_path / "second"
    agent.register_memory([(0, BLOCK * 8, 77, f"rw,create:{second}")], "FILE")
    again = agent.initialize_xfer(
        "WRITE", mine, agent.get_xfer_descs([(at * BLOCK, BLOCK, 77) for at in range(8)], "FILE"), "storage"
    )
    assert run(agent, again) == "DONE"
    assert second.read_bytes() == before
    facts = agent.query_memory([(0, 0, 0, str(second)), (0, 0, 0, str(tmp_path / "none"))], "POSIX", "FILE")
    assert facts[0]["size"] == str(BLOCK * 8) and facts[1] is None
    with pytest.raises(bind.nixlBackendError):
        agent.register_memory([(0, BLOCK, 78, f"rw:{tmp_path / 'none'}")], "FILE")
    with pytest.raises(bind.nixlBackendError):
        agent.register_memory([(0, BLOCK, 1 << 20, "")], "FILE")
    agent.shutdown()


def test_a_post_of_many_descriptors_takes_little_time_of_the_caller(pair: tuple[Side, Side]) -> None:
    here, there = pair
    mine, theirs = lists(here, there)
    order = np.arange(0, BLOCKS, 2, dtype=np.int32).repeat(32)
    handle = here.agent.make_prepped_xfer("WRITE", mine, order, theirs, order)
    assert run(here.agent, handle) == "DONE"
    assert here.agent.get_xfer_telemetry(handle).descCount == len(order) == 1024
