"""`kvferry.nixl`: descriptor lists, settings, and files."""

from __future__ import annotations

import os
import pickle
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from kit import Memory
from kvferry.nixl import _bindings as bind
from kvferry.nixl import nixl_agent, nixl_agent_config, nixl_thread_sync_t
from nixl_kit import BLOCK, Side, run


@pytest.fixture(autouse=True)
def _loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_LISTEN", "127.0.0.1:0")


@pytest.fixture
def one() -> Iterator[Side]:
    side = Side("alone")
    yield side
    side.agent.shutdown()


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


def test_an_empty_list_survives_serialization(one: Side) -> None:
    for empty in (bind.nixlRegDList(bind.DRAM_SEG), bind.nixlXferDList(bind.DRAM_SEG)):
        assert one.agent.deserialize_descs(one.agent.get_serialized_descs(empty)) == empty


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
    assert agent.get_backend_mem_types("POSIX") == ["DRAM", "VRAM", "FILE"]
    assert agent.get_plugin_mem_types("UCX") == ["DRAM", "VRAM"]
    assert (agent.get_backend_mem_types("UCX"), agent.get_backend_params("UCX"), agent.get_plugin_params("GDS")) == (
        *([], {}, {}),
    )
    assert list(nixl_agent("all", instantiate_all=True).backends) == ["UCX", "POSIX"]


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


def test_each_range_of_a_file_is_registered_and_deregistered_on_its_own(tmp_path: Any) -> None:
    agent = nixl_agent("storage", nixl_agent_config(backends=["POSIX"]))
    memory, path = Memory(BLOCK * 4), tmp_path / "kv"
    memory[0 : BLOCK * 4] = os.urandom(BLOCK * 4)
    agent.register_memory([(memory.addr, memory.nbytes, 0, "")], "DRAM")
    path.write_bytes(bytes(BLOCK * 4))
    with open(path, "r+b") as file:
        fd = file.fileno()
        parts = [agent.register_memory([(at * BLOCK, BLOCK, fd, "")], "FILE") for at in range(4)]
        # A range may lie in others.
        whole = agent.register_memory([(0, 0, fd, "")], "FILE")
        agent.deregister_memory(whole)
        mine = agent.get_xfer_descs([(memory.addr + at * BLOCK, BLOCK, 0) for at in range(4)], "DRAM")
        places = agent.get_xfer_descs([(at * BLOCK, BLOCK, fd) for at in (2, 0, 3, 1)], "FILE")
        write = agent.initialize_xfer("WRITE", mine, places, "storage")
        assert run(agent, write) == "DONE"
        assert path.read_bytes() == b"".join(memory[at * BLOCK : (at + 1) * BLOCK] for at in (1, 3, 0, 2))
        agent.deregister_memory(parts[1])
        with pytest.raises(bind.nixlNotFoundError):
            agent.transfer(write)
        for wrong in (places, agent.get_xfer_descs([(2 * BLOCK, 2 * BLOCK, fd)], "FILE")):
            with pytest.raises(bind.nixlNotFoundError, match="lies in no registered range"):
                agent.prep_xfer_dlist("storage", wrong)
        agent.prep_xfer_dlist("storage", [(0, BLOCK, fd), (3 * BLOCK, BLOCK, fd)], "FILE")
        with pytest.raises(bind.nixlNotFoundError):
            agent.deregister_memory(parts[1])
    agent.shutdown()


def test_a_file_that_has_the_descriptor_of_a_registered_one_is_not_taken_for_it(tmp_path: Any) -> None:
    agent = nixl_agent("storage", nixl_agent_config(backends=["POSIX"]))
    first, second = (os.open(tmp_path / name, os.O_RDWR | os.O_CREAT) for name in ("first", "second"))
    for fd in (first, second):
        os.ftruncate(fd, BLOCK)
    descs = agent.register_memory([(0, BLOCK, first, "")], "FILE")
    os.dup2(second, first)
    with pytest.raises(bind.nixlBackendError, match="deregister it before"):
        agent.register_memory([(0, BLOCK, first, "")], "FILE")
    agent.deregister_memory(descs)
    agent.register_memory([(0, BLOCK, first, "")], "FILE")
    agent.register_memory([(0, BLOCK, 1000, f"rw,create:{tmp_path / 'third'}")], "FILE")
    agent.register_memory([(0, BLOCK, 1000, f"rw:{tmp_path / 'third'}")], "FILE")
    with pytest.raises(bind.nixlBackendError, match="deregister it before"):
        agent.register_memory([(0, BLOCK, 1000, f"rw,create:{tmp_path / 'fourth'}")], "FILE")
    agent.shutdown()
    for fd in (first, second):
        os.close(fd)
