"""`kvferry.nixl`: the order of calls of NIXL's own examples and of engines, on two agents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fake_gpu import LIBRARY, Array, Driver, Stream
from kit import Memory, eventually
from kvferry.nixl import nixl_agent, nixl_agent_config, nixl_thread_sync_t
from kvferry.nixl._bindings import nixlNotFoundError

ROW = 4096
ROWS = 32


class OnHost(Memory):
    """A layer in memory of the host, of an engine without a GPU."""

    device = 0

    def compute(self, row: int, byte: int) -> None:
        self[row * ROW : (row + 1) * ROW] = bytes([byte]) * ROW

    def use(self, row: int, byte: int) -> None:
        assert self[row * ROW : (row + 1) * ROW] == bytes([byte]) * ROW

    def wait(self) -> None:
        """Until what was launched is done."""


class OnGpu:
    """A layer in memory of a GPU, which kernels write and read."""

    def __init__(self, driver: Driver, nbytes: int, device: int) -> None:
        self._array, self._stream = Array(driver, nbytes, device), Stream(driver, device)
        self._array.content = bytes(nbytes)
        self.addr, self.nbytes, self.device = self._array.address, nbytes, device

    def __getitem__(self, at: slice) -> bytes:
        return self._array.content[at]

    def compute(self, row: int, byte: int) -> None:
        self._stream.run("prefill", writes=[(self.addr + row * ROW, ROW)], byte=byte)

    def use(self, row: int, byte: int) -> None:
        self._stream.run("decode", reads=[(self.addr + row * ROW, ROW)], expect=byte)

    def wait(self) -> None:
        self._stream.synchronize()


@pytest.fixture(autouse=True)
def _loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_LISTEN", "127.0.0.1:0")


@pytest.fixture
def agents() -> Iterator[tuple[nixl_agent, nixl_agent]]:
    made = nixl_agent("initiator", nixl_agent_config(backends=["UCX"])), nixl_agent("target")
    yield made
    for agent in made:
        agent.shutdown()


def rows(memory: Memory) -> list[tuple[int, int, int]]:
    return [(memory.addr + at * ROW, ROW, 0) for at in range(ROWS)]


def done(agent: nixl_agent, handle: Any) -> None:
    assert eventually(lambda: agent.check_xfer_state(handle) != "PROC")
    assert agent.check_xfer_state(handle) == "DONE", handle.error


def test_nixls_example_of_two_peers_whose_descriptors_travel_as_a_notification(
    agents: tuple[nixl_agent, nixl_agent],
) -> None:
    initiator, target = agents
    source, sink = Memory(ROW * ROWS), Memory(ROW * ROWS)
    source[0 : ROW * ROWS] = b"\1" * (ROW * ROWS)
    target.register_memory([(source.addr, source.nbytes, 0, "")], "DRAM")
    registered = initiator.register_memory([(sink.addr, sink.nbytes, 0, "")], "DRAM")
    assert registered
    assert initiator.add_remote_agent(target.get_agent_metadata()) == b"target"
    assert target.add_remote_agent(initiator.get_agent_metadata()) == b"initiator"
    target.send_notif("initiator", target.get_serialized_descs(target.get_xfer_descs(rows(source), "DRAM")))
    notifs = eventually(initiator.get_new_notifs)
    theirs = initiator.deserialize_descs(notifs["target"][0])
    mine = initiator.get_xfer_descs(rows(sink), "DRAM")
    handle = initiator.initialize_xfer("READ", mine, theirs, "target", "Done_reading")
    assert initiator.transfer(handle) != "ERR"
    done(initiator, handle)
    assert sink[0 : ROW * ROWS] == source[0 : ROW * ROWS]
    assert eventually(target.get_new_notifs) == {"initiator": [b"Done_reading"]}
    initiator.remove_remote_agent("target")
    initiator.release_xfer_handle(handle)
    initiator.deregister_memory(registered)


def test_nixls_example_of_several_transfers_at_once_whose_lists_are_made_in_each_way(
    agents: tuple[nixl_agent, nixl_agent],
) -> None:
    initiator, target = agents
    here, there = Memory(ROW * ROWS), Memory(ROW * ROWS)
    for at in range(ROWS):
        here[at * ROW : (at + 1) * ROW] = bytes([at + 1]) * ROW
    initiator.register_memory([(here.addr, here.nbytes, 0, "")], "DRAM")
    target.register_memory(np.array([(there.addr, there.nbytes, 0)]), "DRAM")
    initiator.add_remote_agent(target.get_agent_metadata())
    array = np.array(rows(there), dtype=np.int64)
    handles = []
    for part in range(4):
        some = list(range(part * 8, part * 8 + 8))
        if part % 2:
            mine = initiator.prep_xfer_dlist("NIXL_INIT_AGENT", rows(here), "DRAM")
            theirs = initiator.prep_xfer_dlist("target", array, "DRAM")
            handle = initiator.make_prepped_xfer("WRITE", mine, some, theirs, np.array(some), f"part{part}".encode())
            initiator.release_dlist_handle(mine)
            initiator.release_dlist_handle(theirs)
        else:
            mine = initiator.get_xfer_descs(rows(here)[some[0] : some[-1] + 1], "DRAM")
            theirs = initiator.get_xfer_descs(array[some], "DRAM")
            handle = initiator.initialize_xfer("WRITE", mine, theirs, "target", f"part{part}")
        handles.append(handle)
    for handle in handles:
        initiator.transfer(handle)
    for handle in handles:
        done(initiator, handle)
    assert there[0 : ROW * ROWS] == here[0 : ROW * ROWS]
    for part in (3, 0, 2, 1):
        assert eventually(lambda part=part: target.check_remote_xfer_done("initiator", f"part{part}"))  # type: ignore[misc]


def test_rays_order_of_calls(agents: tuple[nixl_agent, nixl_agent]) -> None:
    """A tensor at a time, registered as "cpu"; metadata is added again for each, and after a deregistration anew."""
    reader, owner = agents
    for version in range(3):
        tensor, copy = Memory(ROW), Memory(ROW)
        tensor[0:ROW] = bytes([version + 1]) * ROW
        registered = owner.register_memory([(tensor.addr, ROW, 0, "")], mem_type="cpu")
        wanted = owner.get_serialized_descs(owner.get_xfer_descs([(tensor.addr, ROW, 0)], "cpu"))
        reader.register_memory([(copy.addr, ROW, 0, "")], mem_type="cpu")
        if version == 2:
            reader.remove_remote_agent(owner.name)
        reader.add_remote_agent(owner.get_agent_metadata())
        mine, theirs = reader.get_xfer_descs([(copy.addr, ROW, 0)], "cpu"), reader.deserialize_descs(wanted)
        handle = reader.initialize_xfer("READ", mine, theirs, owner.name, b"UUID")
        assert reader.transfer(handle) in ("PROC", "DONE")
        done(reader, handle)
        assert copy[0:ROW] == tensor[0:ROW]
        reader.release_xfer_handle(handle)
        owner.deregister_memory(registered)
        # The owner's memory may be another tensor's from now on: it is not read.
        handle = reader.initialize_xfer("READ", mine, theirs, owner.name)
        reader.transfer(handle)
        assert eventually(lambda handle=handle: reader.check_xfer_state(handle) == "ERR")  # type: ignore[misc]
        assert isinstance(handle.error, nixlNotFoundError)


def test_tensorrt_llms_order_of_calls() -> None:
    """The configuration by keywords, a transfer by positions, the name as `add_remote_agent` gets it."""
    config = nixl_agent_config(enable_prog_thread=True, backends=["UCX"], num_threads=2)
    sender, receiver = nixl_agent("ctx", config), nixl_agent("gen", config)
    source, sink = Memory(ROW * ROWS), Memory(ROW * ROWS)
    source[0 : ROW * ROWS] = b"\5" * (ROW * ROWS)
    for agent, memory in ((sender, source), (receiver, sink)):
        agent.register_memory(agent.get_reg_descs([(memory.addr, memory.nbytes, 0, "kv")], "DRAM"))
    name = sender.add_remote_agent(bytes(receiver.get_agent_metadata()))
    mine, theirs = sender.get_xfer_descs(rows(source), "DRAM"), sender.get_xfer_descs(rows(sink), "DRAM")
    handle = sender.initialize_xfer("WRITE", mine, theirs, name, "sync")
    sender.transfer(handle)
    done(sender, handle)
    assert sink[0 : ROW * ROWS] == source[0 : ROW * ROWS]
    assert eventually(receiver.get_new_notifs) == {"ctx": [b"sync"]}
    sender.remove_remote_agent(name)
    for agent in (sender, receiver):
        agent.shutdown()


@pytest.mark.parametrize("where", ["host", "gpu"])
def test_sglangs_order_of_calls(where: str) -> None:
    """A back-end made after the agent, layers registered as VRAM where there is no GPU, too, and metadata as DRAM; strided
    lists, one notification a chunk and one for the metadata.
    """
    driver = None
    if where == "gpu":
        assert LIBRARY.exists(), f"{LIBRARY} is missing: make test-wheel"
        driver = Driver()
        driver.clear_findings()
    sync = nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    agents = []
    for name in ("prefill", "decode"):
        agent = nixl_agent(name, nixl_agent_config(backends=[], num_threads=8, sync_mode=sync))
        assert agent.create_backend("UCX", {"num_threads": "8"}) is None
        assert "UCX" in agent.get_plugin_list()
        agents.append(agent)
    prefill, decode = agents
    # Two layers, each with memory of its own: prefill's on one GPU, decode's on another.
    layers: list[list[OnHost | OnGpu]] = [
        [OnHost(ROW * ROWS) if driver is None else OnGpu(driver, ROW * ROWS, gpu) for _ in range(2)] for gpu in range(2)
    ]
    aux = [Memory(ROW) for _ in agents]
    for agent, own, metadata in zip(agents, layers, aux, strict=True):
        agent.register_memory([(layer.addr, layer.nbytes, layer.device, "") for layer in own], "VRAM")
        agent.register_memory([(metadata.addr, ROW, 0, "")], "DRAM")
    for number, layer in enumerate(layers[0]):
        for at in range(ROWS):
            layer.compute(at, number * ROWS + at + 1)
        layer.wait()
    peer = prefill.add_remote_agent(decode.get_agent_metadata()).decode()
    strided = [
        np.array([(layer.addr, ROW, layer.device, ROW, ROWS) for layer in own], dtype=np.uint64) for own in layers
    ]
    here, there = prefill.prep_xfer_dlist("", strided[0], "VRAM"), prefill.prep_xfer_dlist(peer, strided[1], "VRAM")
    pages, places = np.array([4, 5, 6, 20]), np.array([0, 1, 2, 31])
    local, remote = np.concatenate((pages, pages + ROWS)), np.concatenate((places, places + ROWS))
    handle = prefill.make_prepped_xfer("WRITE", here, local.astype(np.int32), there, remote.astype(np.int32), b"7_kv_0")
    assert prefill.transfer(handle) != "ERR"
    done(prefill, handle)
    for number, layer in enumerate(layers[1]):
        assert [layer[at * ROW : at * ROW + 1][0] for at in (0, 1, 2, 3, 31)] == [
            number * ROWS + n for n in (5, 6, 7, -number * ROWS, 21)
        ]
    assert eventually(decode.get_new_notifs) == {"prefill": [b"7_kv_0"]}
    # The first token.
    aux[0][0:ROW] = b"\7" * ROW
    mine, theirs = (prefill.get_xfer_descs([(metadata.addr, ROW, 0)], "DRAM") for metadata in aux)
    handle = prefill.initialize_xfer("WRITE", mine, theirs, peer, b"7_aux")
    assert prefill.transfer(handle) != "ERR"
    done(prefill, handle)
    assert eventually(decode.get_new_notifs) == {"prefill": [b"7_aux"]}
    assert aux[1][0:ROW] == aux[0][0:ROW]
    for number, layer in enumerate(layers[1]):
        for page, place in zip(pages, places, strict=True):
            layer.use(int(place), int(number * ROWS + page + 1))
        layer.wait()
    assert prefill.check_remote_metadata(peer)
    for agent in agents:
        agent.shutdown()
    if driver is not None:
        assert driver.findings() == ""
