"""Memory of GPUs, on the fake driver: registered, ordered, and copied."""

from __future__ import annotations

import ctypes
import gc
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import kvferry
import pytest
from fake_gpu import COMPUTE, LIBRARY, Array, Driver, Event, Stream
from gpu_fixtures import driver, far, loaded, no_session_ends_by_silence
from kit import NEVER, PATIENCE, eventually, run_python

__all__ = ["driver", "far", "loaded", "no_session_ends_by_silence"]

NBYTES = 1 << 18
BLOCK = 4096


def test_a_write_and_a_read_of_gpu_memory_move_its_bytes(
    driver: Driver, agent: kvferry.Agent, far: kvferry.Agent
) -> None:
    array, host = Array(driver, NBYTES), bytearray(NBYTES)
    array.content = bytes(range(256)) * (NBYTES // 256)
    region, remote = agent.register(array), far.register(host)
    batch = kvferry.Batch()
    batch.push(region, 0, remote.remote(), 0, NBYTES)
    peer = agent.peer(far.address)
    peer.write(batch, after="host")
    assert host == array.content
    host[:] = bytes(NBYTES)
    peer.read(batch, after="host")
    assert array.content == bytes(NBYTES)
    agent.unregister(region)
    array.free()


def test_transfers_with_memory_of_the_peers_gpu_say_why_they_are_not_local(driver: Driver) -> None:
    agent, far = [kvferry.Agent(listen="127.0.0.1:0", transports=["local", "tcp"]) for _ in range(2)]
    arrays, hosts = [Array(driver, NBYTES), Array(driver, NBYTES)], [bytearray(NBYTES), bytearray(NBYTES)]
    near_regions = [agent.register(hosts[0]), agent.register(arrays[0])]
    far_regions = [far.register(hosts[1]), far.register(arrays[1])]
    peer, counted = agent.peer(far.address), 0
    for transport, remote in zip(("local", "tcp"), far_regions, strict=True):
        assert (peer.connect().transport, peer.connect().fallback) == ("local", None)
        for region in near_regions:
            batch = kvferry.Batch()
            batch.push(region, 0, remote.remote(), 0, NBYTES)
            for call in (peer.write, peer.read):
                assert call(batch, after="host").transport == transport
                counted += transport == "tcp"
            assert agent.stats()["fallbacks_peer_device"] == counted
    fallback = peer.connect().fallback
    assert fallback == "local has no path to device memory of the peer; such transfers go over tcp"
    assert far.stats()["fallbacks_peer_device"] == 0
    agent.shutdown()
    far.shutdown()
    for array in arrays:
        array.free()


def test_a_gpu_array_goes_to_a_file_and_back_after_what_computes_it(
    driver: Driver, agent: kvferry.Agent, tmp_path: Path
) -> None:
    array, stream, path = Array(driver, NBYTES), Stream(driver), tmp_path / "cache"
    region = agent.register(array)
    file = agent.open_file(path, "rw", create=True, nbytes=NBYTES)
    batch = kvferry.Batch()
    # Blocks in reverse order in memory, one after the other in the file.
    for at in range(0, NBYTES, BLOCK):
        batch.push(region, NBYTES - BLOCK - at, file.remote(), at, BLOCK)
    files = agent.files
    for call in (files.write, files.read, files.write_async, files.read_async):
        with pytest.raises(kvferry.InvalidArgumentError, match="say what the transfer comes after"):
            call(batch)
    driver.hold(COMPUTE)
    stream.fill(array, 7)
    transfer = files.write_async(batch, after=stream)
    assert transfer.wait(0.02) is None, "the kernel has not run"
    driver.hold(0)
    assert transfer.wait(PATIENCE) is not None
    assert path.read_bytes() == bytes([7]) * NBYTES
    content = b"".join(bytes([number]) * BLOCK for number in range(NBYTES // BLOCK))
    array.content = content
    assert files.write(batch, after="host").nbytes == NBYTES
    assert path.read_bytes() == b"".join(content[at : at + BLOCK] for at in range(NBYTES - BLOCK, -1, -BLOCK))
    stream.fill(array, 9)
    files.read(batch, after=[Event(driver, stream)])
    assert array.content == content, "the file was read after the kernel"
    agent.unregister(region)
    array.free()


class CupyStream:
    def __init__(self, stream: Stream) -> None:
        self.ptr = stream.cuda_stream

    def wait_event(self, event: object) -> None: ...

    def record(self, event: object = None) -> None: ...


class CupyEvent:
    def __init__(self, event: Event) -> None:
        self.ptr = event.cuda_event

    def record(self, stream: object = None) -> None: ...


class CupyMemory:
    ptr = 1 << 40


@pytest.mark.parametrize("kind", ["stream", "event", "handle", "list", "cupy stream", "cupy event"])
def test_a_write_comes_after_what_it_names(driver: Driver, agent: kvferry.Agent, far: kvferry.Agent, kind: str) -> None:
    array, host, stream = Array(driver, NBYTES), bytearray(NBYTES), Stream(driver)
    region, remote = agent.register(array), far.register(host)
    batch = kvferry.Batch()
    batch.push(region, 0, remote.remote(), 0, NBYTES)
    driver.hold(COMPUTE)
    stream.fill(array, 7)
    after: Any = {
        "stream": stream,
        "event": Event(driver, stream),
        "handle": stream.cuda_stream,
        "list": [stream, "host", Event(driver, stream)],
        "cupy stream": CupyStream(stream),
        "cupy event": CupyEvent(Event(driver, stream)),
    }[kind]
    transfer = agent.peer(far.address).write_async(batch, after=after)
    assert transfer.wait(0.02) is None, "the kernel has not run"
    driver.hold(0)
    assert transfer.wait(PATIENCE) is not None
    assert host == bytes([7]) * NBYTES


def test_without_an_order_a_transfer_of_gpu_memory_is_refused(
    driver: Driver, agent: kvferry.Agent, far: kvferry.Agent
) -> None:
    region, remote = agent.register(Array(driver, NBYTES)), far.register(bytearray(NBYTES))
    batch = kvferry.Batch()
    batch.push(region, 0, remote.remote(), 0, NBYTES)
    peer = agent.peer(far.address)
    for call in (peer.write, peer.read, peer.write_async, peer.read_async):
        with pytest.raises(kvferry.InvalidArgumentError, match="say what the transfer comes after"):
            call(batch)
    for wrong in ("now", 1.5, [object()], -1, 1 << 64, True, False, CupyMemory()):
        with pytest.raises(TypeError, match="after must be a stream"):
            peer.write(batch, after=wrong)  # type: ignore[arg-type]
    # Memory of the host needs none, and takes one.
    batch = kvferry.Batch()
    batch.push(agent.register(bytearray(8)), 0, remote.remote(), 0, 8)
    peer.write(batch)
    peer.write(batch, after="host")


def test_an_agents_order_counts_for_what_names_none(
    driver: Driver, agent: kvferry.Agent, far: kvferry.Agent, tmp_path: Path
) -> None:
    array, host, stream = Array(driver, NBYTES), bytearray(NBYTES), Stream(driver)
    region, remote = agent.register(array), far.register(host)
    # Memory that no kernel uses.
    other, there = agent.register(Array(driver, NBYTES)), far.register(bytearray(NBYTES))
    named = kvferry.Batch()
    named.push(other, 0, there.remote(), 0, NBYTES)
    file = agent.open_file(tmp_path / "cache", "rw", create=True, nbytes=NBYTES)
    to_peer, to_file = kvferry.Batch(), kvferry.Batch()
    to_peer.push(region, 0, remote.remote(), 0, NBYTES)
    to_file.push(region, 0, file.remote(), 0, NBYTES)
    peer = agent.peer(far.address)
    agent.set_after(stream)
    driver.hold(COMPUTE)
    stream.fill(array, 7)
    transfers = [peer.write_async(to_peer), agent.files.write_async(to_file)]
    for transfer in transfers:
        assert transfer.wait(0.02) is None, "the kernel has not run"
    # What a transfer names itself counts alone.
    assert peer.write_async(named, after=Stream(driver)).wait(PATIENCE) is not None
    driver.hold(0)
    for transfer in transfers:
        assert transfer.wait(PATIENCE) is not None
    assert host == (tmp_path / "cache").read_bytes() == bytes([7]) * NBYTES
    with pytest.raises(TypeError, match="after must be a stream"):
        agent.set_after("now")  # type: ignore[arg-type]
    agent.set_after(None)
    for refused in (lambda: peer.write(to_peer), lambda: agent.files.write(to_file)):
        with pytest.raises(kvferry.InvalidArgumentError, match="say what the transfer comes after"):
            refused()
    agent.set_after("host")
    peer.write(to_peer)


def test_gpu_memory_that_is_named_by_its_address_is_refused(
    driver: Driver, agent: kvferry.Agent, far: kvferry.Agent
) -> None:
    array, remote = Array(driver, NBYTES), far.register(bytearray(NBYTES)).remote()
    region, peer = agent.register(array), agent.peer(far.address)
    batch = kvferry.Batch()
    batch.extend([array.address], [remote.addr], [NBYTES])
    for what in ((batch,), ([array.address], [remote.addr], [NBYTES])):
        for call in (peer.write, peer.read, peer.write_async, peer.read_async):
            with pytest.raises(kvferry.NotRegisteredError, match="names memory of a GPU by its region"):
                call(*what, after="host")
    agent.unregister(region)
    array.free()


def test_what_is_no_gpu_memory_is_refused(driver: Driver, agent: kvferry.Agent) -> None:
    host = bytearray(8192)
    address = ctypes.addressof(ctypes.c_char.from_buffer(host))
    with pytest.raises(kvferry.InvalidArgumentError, match="register it as host memory"):
        agent.register((address, 8192), device="cuda")
    array = Array(driver, NBYTES, device=1)
    assert agent.register((array.address, NBYTES), device="cuda:1").nbytes == NBYTES
    with pytest.raises(kvferry.InvalidArgumentError, match="not of GPU 0"):
        agent.register((array.address, 16), device=0)
    with pytest.raises(kvferry.InvalidArgumentError, match="not within the allocation"):
        agent.register((array.address, NBYTES + 1), device="cuda")
    # It does not say its number: the driver does.
    assert agent.register(array, device="cuda:1").nbytes == NBYTES
    with pytest.raises(kvferry.InvalidArgumentError, match="not of GPU 0"):
        agent.register(array, device="cuda:0")
    with pytest.raises(ValueError, match="device must be"):
        agent.register((array.address, 16), device="tpu")
    with pytest.raises(ValueError, match="not on that device"):
        agent.register(host, device="cuda")


def names(driver: Driver, device: int) -> tuple[str, str]:
    """The UUID and the PCI address of a GPU, as the driver has them."""
    uuid, address = (ctypes.c_ubyte * 16)(), ctypes.create_string_buffer(32)
    driver.call("cuDeviceGetUuid_v2", ctypes.byref(uuid), ctypes.c_int(device))
    driver.call("cuDeviceGetPCIBusId", address, ctypes.c_int(len(address)), ctypes.c_int(device))
    return f"GPU-{UUID(bytes=bytes(uuid))}", address.value.decode()


def test_a_gpu_is_named_by_its_uuid_or_its_pci_address(driver: Driver, agent: kvferry.Agent) -> None:
    arrays = [Array(driver, NBYTES, device=device) for device in (0, 1)]
    for array, other in zip(arrays, reversed(arrays), strict=True):
        for name in names(driver, array.device):
            for device in (name, name.upper(), f"cuda:{name}"):
                for buffer in (array, (array.address, NBYTES), Exported(array, (NBYTES // 4,), (1,))):
                    agent.unregister(agent.register(buffer, device=device))
                (region,) = agent.register_batch([(array.address, NBYTES)], device=device)
                agent.unregister(region)
            with pytest.raises(kvferry.InvalidArgumentError, match=f"not of GPU {array.device}"):
                agent.register(other, device=name)
    seen = ", ".join(f"{device} ({', '.join(names(driver, device))})" for device in (0, 1))
    for unknown in ("GPU-07070707-0707-0707-0707-070707070707", "0000:77:00.0", "cuda:77"):
        with pytest.raises(kvferry.InvalidArgumentError) as caught:
            agent.register(arrays[0], device=unknown)
        text = str(caught.value)
        assert f"no CUDA device {unknown.removeprefix('cuda:')} in this process" in text
        assert f"check CUDA_VISIBLE_DEVICES; it sees {seen}" in text
    for malformed in ("GPU-0707", "0000:77", "cuda:", "cuda:GPU-", "cuda:-1"):
        with pytest.raises(ValueError, match="device must be"):
            agent.register(arrays[0], device=malformed)
    assert agent.regions() == []


VISIBLE = """
    import kvferry
    from fake_gpu import Array, Driver

    array = Array(Driver(), 4096, device={ordinal})
    with kvferry.Agent("named") as agent:
        agent.register(array, device="{uuid}")
        print("done")
"""


@pytest.mark.parametrize(("visible", "ordinal"), [("0,1", 1), ("1,0", 0), ("1", 0)])
def test_a_uuid_means_the_same_gpu_whichever_gpus_a_process_sees(driver: Driver, visible: str, ordinal: int) -> None:
    uuid, _ = names(driver, 1)
    env = {"PYTHONPATH": str(Path(__file__).parent), "KVFERRY_LIBCUDA": str(LIBRARY), "CUDA_VISIBLE_DEVICES": visible}
    ended = run_python(VISIBLE.format(uuid=uuid, ordinal=ordinal), env=env)
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr


def test_gpu_memory_without_its_device_is_no_host_memory(driver: Driver, agent: kvferry.Agent) -> None:
    array, host = Array(driver, NBYTES), bytearray(4096)
    match = r"not host memory: .* is memory of a device \(the CUDA driver\)"
    for access in ("rw", "r", "w", "none"):
        for address, nbytes in ((array.address, NBYTES), (array.address + NBYTES - 1, 1)):
            with pytest.raises(kvferry.UnsupportedError, match=match):
                agent.register((address, nbytes), access)  # type: ignore[arg-type]
            with pytest.raises(kvferry.UnsupportedError, match=match) as caught:
                agent.register_batch([host, (address, nbytes)], access)  # type: ignore[arg-type]
            assert caught.value.context["range"] == "1"
    assert agent.regions() == []
    assert agent.register((array.address, NBYTES), device="cuda").nbytes == NBYTES
    array.free()


class Strided(Array):
    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {**super().__cuda_array_interface__, "shape": (16, 8), "strides": (16, 1)}


class Exported:
    """What JAX shows of memory of a GPU."""

    def __init__(self, array: Array, shape: tuple[int, ...], strides: tuple[int, ...] | None, kind: int = 2) -> None:
        self._kind, self._array = kind, array
        integers = ctypes.c_int64 * len(shape)
        self._shape, self._strides = integers(*shape), integers(*strides) if strides else None
        places = [ctypes.addressof(part) if part is not None else 0 for part in (self._shape, self._strides)]
        self._tensor = struct.pack("=QiiiBBHQQQ", array.address, kind, array.device, len(shape), 2, 16, 1, *places, 512)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._kind, self._array.device

    def __dlpack__(self, *, stream: object = None) -> object:
        assert stream == -1, "the order is a matter of transfers"
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = ctypes.py_object, [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p]
        return make(self._tensor, b"dltensor", None)


def test_memory_is_found_by_dlpack(driver: Driver, agent: kvferry.Agent, far: kvferry.Agent) -> None:
    array, host = Array(driver, NBYTES, device=1), bytearray(2 * 100 * 64)
    array.content = bytes(range(256)) * (NBYTES // 256)
    region = agent.register(Exported(array, (100, 64), (64, 1)), device="cuda:1")
    assert region.nbytes == len(host)
    batch = kvferry.Batch()
    batch.push(region, 0, far.register(host).remote(), 0, len(host))
    agent.peer(far.address).write(batch, after="host")
    assert host == array.content[512 : 512 + len(host)]
    assert agent.register(Exported(array, (7,), None)).nbytes == 14
    with pytest.raises(ValueError, match="contiguous"):
        agent.register(Exported(array, (100, 64), (128, 1)))
    with pytest.raises(TypeError, match="expected an object with a buffer"):
        agent.register(Exported(array, (7,), None, kind=10))


class Counted(Exported):
    """Counts the capsules that were made and not freed."""

    alive = 0

    def __dlpack__(self, *, stream: object = None) -> object:
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = ctypes.py_object, [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p]
        Counted.alive += 1
        return make(self._tensor, b"dltensor", ctypes.cast(_freed, ctypes.c_void_p))


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _freed(_capsule: int) -> None:
    Counted.alive -= 1


def test_a_capsule_is_kept_until_its_region_is_unregistered_and_freed_once(driver: Driver) -> None:
    array = Array(driver, NBYTES, device=1)
    with kvferry.Agent("short") as agent:
        region = agent.register(Counted(array, (7,), None))
        assert Counted.alive == 1
        agent.unregister(region)
        assert Counted.alive == 0
        for refused, device in [(Counted(array, (4, 4), (8, 1)), None), (Counted(array, (7,), None), "cuda:0")]:
            with pytest.raises(ValueError, match=r"contiguous|not on that device"):
                agent.register(refused, device=device)
            assert Counted.alive == 0
        with pytest.raises(kvferry.InvalidArgumentError):
            agent.register_batch([Counted(array, (7,), None), Counted(array, (1 << 20,), None)])
        assert Counted.alive == 0
        left = agent.register(Counted(array, (7,), None))
        assert Counted.alive == 1
    assert Counted.alive == 0
    dropped = kvferry.Agent("dropped")
    dropped.register(Counted(array, (7,), None))
    del dropped
    gc.collect()
    assert Counted.alive == 0 and not left.is_registered
    array.free()


class Hostile:
    """An order whose attributes run Python code."""

    def __init__(self, name: str, run: Callable[[], object]) -> None:
        self._name, self._run = name, run

    def __getattr__(self, name: str) -> object:
        if name == self._name:
            return self._run()
        raise AttributeError(name)


def test_errors_of_what_a_transfer_comes_after_reach_the_caller(
    driver: Driver, agent: kvferry.Agent, far: kvferry.Agent
) -> None:
    array = Array(driver, NBYTES)
    region, remote = agent.register(array), far.register(bytearray(NBYTES))
    batch = kvferry.Batch()
    batch.push(region, 0, remote.remote(), 0, NBYTES)
    peer = agent.peer(far.address)

    def fail() -> object:
        raise KeyError("mine")

    for name in ("cuda_event", "cuda_stream", "__cuda_stream__", "ptr"):
        for after in (Hostile(name, fail), ["host", Hostile(name, fail)]):
            with pytest.raises(KeyError, match="mine"):
                peer.write(batch, after=after)  # type: ignore[arg-type]
    with pytest.raises(KeyError, match="mine"):
        peer.write(batch, after=Hostile("__cuda_stream__", lambda: fail))  # type: ignore[arg-type]
    # The code changes the batch, or the list.
    stream, orders = Stream(driver), ["host"]
    for run in (batch.clear, orders.clear):
        batch.push(region, 0, remote.remote(), 0, 64)

        def handle(run: Callable[[], object] = run) -> int:
            run()
            return stream.cuda_stream

        orders[:] = [Hostile("cuda_stream", handle), "host"]  # type: ignore[list-item]
        peer.write(batch, after=orders)
    # An event that was never recorded has no handle.
    with pytest.raises(kvferry.InvalidArgumentError, match="handle is zero"):
        peer.write(batch, after=Hostile("cuda_event", lambda: 0))  # type: ignore[arg-type]
    agent.unregister(region)
    array.free()


class Shaped(Array):
    """An array whose interface reports another shape or type."""

    def __init__(self, driver: Driver, says: dict[str, object]) -> None:
        super().__init__(driver, NBYTES)
        self.says = says

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {**super().__cuda_array_interface__, **self.says}


@pytest.mark.parametrize(
    ("says", "nbytes"),
    [
        ({"shape": (0, 8)}, "not empty"),
        ({"shape": (8,), "strides": (-1,)}, "contiguous"),
        ({"shape": (8, 2), "strides": (1, 8)}, "contiguous"),
        ({"shape": (8, 2), "strides": (2, 1), "stream": 1}, 16),
        ({"shape": (1, 8), "strides": (999, 1)}, 8),
        ({"shape": (), "typestr": "<f8"}, 8),
        ({"shape": (8, 2), "strides": (1,)}, "a stride for each"),
        ({"shape": (-2, -4)}, "not empty"),
    ],
)
def test_shapes_and_strides_of_arrays_are_checked(
    driver: Driver, agent: kvferry.Agent, says: dict[str, object], nbytes: int | str
) -> None:
    array = Shaped(driver, says)
    if isinstance(nbytes, int):
        assert agent.register(array).nbytes == nbytes
    else:
        with pytest.raises(ValueError, match=nbytes):
            agent.register(array)


class ReadOnly(Array):
    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {**super().__cuda_array_interface__, "data": (self.address, True)}


def test_arrays_that_are_not_contiguous_or_read_only_are_refused(driver: Driver, agent: kvferry.Agent) -> None:
    with pytest.raises(ValueError, match="contiguous"):
        agent.register(Strided(driver, NBYTES))
    with pytest.raises(TypeError, match="read-only"):
        agent.register(ReadOnly(driver, NBYTES))


def test_many_arrays_are_registered_all_or_none(driver: Driver, agent: kvferry.Agent) -> None:
    arrays = [Array(driver, 4096) for _ in range(4)]
    assert [region.nbytes for region in agent.register_batch([*arrays, bytearray(64)])] == [4096] * 4 + [64]
    known = len(agent.regions())
    with pytest.raises(kvferry.InvalidArgumentError):
        agent.register_batch([arrays[0], (arrays[1].address, 1 << 20)], device="cuda")
    assert len(agent.regions()) == known


def test_nixl_moves_vram_between_agents(driver: Driver) -> None:
    from kvferry.nixl import nixl_agent, nixl_agent_config
    from nixl_kit import run

    block, blocks = 4096, 16
    here, there = (nixl_agent(name, nixl_agent_config()) for name in ("here", "there"))
    mine, theirs = Array(driver, block * blocks), Array(driver, block * blocks, device=1)
    mine.content = b"".join(bytes([at + 1]) * block for at in range(blocks))
    theirs.content = bytes(block * blocks)
    for agent, array in ((here, mine), (there, theirs)):
        agent.register_memory([(array.address, array.nbytes, array.device, "")], "VRAM")
    name = here.add_remote_agent(there.get_agent_metadata())
    rows = [[(array.address + at * block, block, array.device) for at in range(blocks)] for array in (mine, theirs)]
    local, remote = here.prep_xfer_dlist("", rows[0], "VRAM"), here.prep_xfer_dlist(name, rows[1], "VRAM")
    handle = here.make_prepped_xfer("WRITE", local, [0, 1, 5], remote, [3, 4, 0], b"done")
    assert run(here, handle) == "DONE"
    got = [theirs.content[at * block] for at in range(blocks)]
    assert got == [6, 0, 0, 1, 2] + [0] * 11
    assert there.get_new_notifs() == {"here": [b"done"]}
    handle = here.make_prepped_xfer("READ", local, [15], remote, [1])
    assert run(here, handle) == "DONE"
    assert mine.content[15 * block :] == bytes(block)
    # Memory of the host on one side.
    host = bytearray(block)
    address = ctypes.addressof(ctypes.c_char.from_buffer(host))
    here.register_memory([(address, block, 0, "")], "DRAM")
    local = here.prep_xfer_dlist("", [(address, block, 0)], "DRAM")
    assert run(here, here.make_prepped_xfer("READ", local, [0], remote, [4])) == "DONE"
    assert host == bytes([2]) * block
    here.shutdown()
    there.shutdown()


def test_nixl_writes_vram_to_a_file_and_reads_it_back(driver: Driver, tmp_path: Path) -> None:
    from kvferry.nixl import nixl_agent, nixl_agent_config
    from nixl_kit import run

    agent = nixl_agent("here", nixl_agent_config(backends=["POSIX"]))
    block, blocks, path = 4096, 16, tmp_path / "cache"
    array = Array(driver, block * blocks)
    array.content = content = b"".join(bytes([at + 1]) * block for at in range(blocks))
    # A tail that is no multiple of a page.
    nbytes = block * blocks - 100
    path.write_bytes(bytes(nbytes))
    with path.open("rb+") as file:
        agent.register_memory([(array.address, array.nbytes, array.device, "")], "VRAM")
        agent.register_memory([(0, nbytes, file.fileno(), "")], "FILE")
        rows = [(at * block, block) for at in range(blocks - 1)] + [((blocks - 1) * block, block - 100)]
        memory = [(array.address + at, length, array.device) for at, length in rows]
        places = [(nbytes - at - length, length, file.fileno()) for at, length in rows]
        local, remote = agent.get_xfer_descs(memory, "VRAM"), agent.get_xfer_descs(places, "FILE")
        write = agent.initialize_xfer("WRITE", local, remote, "here")
        assert (run(agent, write), agent.query_xfer_backend(write)) == ("DONE", "POSIX")
        reversed_rows = [content[at : at + length] for at, length in reversed(rows)]
        assert path.read_bytes() == b"".join(reversed_rows)
        array.content = bytes(block * blocks)
        read = agent.initialize_xfer("READ", local, remote, "here")
        assert run(agent, read) == "DONE"
        assert array.content == content[:nbytes] + bytes(100)
        path.write_bytes(b"short")
        read = agent.initialize_xfer("READ", local, remote, "here")
        assert run(agent, read) == "ERR"
        assert "short" in str(read.error) or "end" in str(read.error)
    agent.shutdown()


def test_nixl_releases_a_read_to_vram_only_when_the_gpu_has_ended_its_copy(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvferry.nixl import nixl_agent, nixl_agent_config
    from kvferry.nixl._errors import nixlRepostActiveError

    monkeypatch.setenv("KVFERRY_SILENCE_MS", "200")
    agent = nixl_agent("here", nixl_agent_config(backends=["POSIX"]))
    array, path = Array(driver, NBYTES), tmp_path / "cache"
    path.write_bytes(bytes([7]) * NBYTES)
    with path.open("rb+") as file:
        agent.register_memory([(array.address, NBYTES, array.device, "")], "VRAM")
        agent.register_memory([(0, NBYTES, file.fileno(), "")], "FILE")
        local = agent.get_xfer_descs([(array.address, NBYTES, array.device)], "VRAM")
        remote = agent.get_xfer_descs([(0, NBYTES, file.fileno())], "FILE")
        read = agent.initialize_xfer("READ", local, remote, "here")
        driver.hold(15)
        agent.transfer(read)
        eventually(lambda: driver.counter("pending") > 0, what="a copy to the GPU")
        # The first one cancels it. It is given up 0.2 s later, and has its outcome then.
        for _ in range(2):
            with pytest.raises(nixlRepostActiveError):
                agent.release_xfer_handle(read)
        eventually(lambda: agent.check_xfer_state(read) == "ERR", what="its end")
        for use in (agent.release_xfer_handle, agent.transfer):
            with pytest.raises(nixlRepostActiveError):
                use(read)
        driver.hold(0)

        def is_released() -> bool:
            try:
                agent.release_xfer_handle(read)
            except nixlRepostActiveError:
                return False
            return True

        eventually(is_released, what="the release")
    agent.shutdown()


def test_nixl_comes_after_what_the_environment_names(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvferry.nixl import nixl_agent, nixl_agent_config

    monkeypatch.setenv("KVFERRY_NIXL_AFTER", "default-stream")
    here, there = (nixl_agent(name, nixl_agent_config()) for name in ("here", "there"))
    array, host = Array(driver, NBYTES), bytearray(NBYTES)
    address = ctypes.addressof(ctypes.c_char.from_buffer(host))
    here.register_memory([(array.address, NBYTES, array.device, "")], "VRAM")
    there.register_memory([(address, NBYTES, 0, "")], "DRAM")
    name = here.add_remote_agent(there.get_agent_metadata())
    local = here.get_xfer_descs([(array.address, NBYTES, array.device)], "VRAM")
    write = here.initialize_xfer("WRITE", local, here.get_xfer_descs([(address, NBYTES, 0)], "DRAM"), name)
    stream = Stream(driver)
    stream.cuda_stream = 0
    driver.hold(COMPUTE)
    stream.fill(array, 7)
    assert here.transfer(write) == "PROC"
    for _ in range(20):
        assert here.check_xfer_state(write) == "PROC", "the kernel has not run"
    driver.hold(0)
    while (state := here.check_xfer_state(write)) == "PROC":
        pass
    assert (state, host) == ("DONE", bytes([7]) * NBYTES)
    here.shutdown()
    there.shutdown()


def test_nixl_refuses_another_order_than_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvferry.nixl import nixl_agent, nixl_agent_config
    from kvferry.nixl._errors import nixlInvalidParamError

    monkeypatch.setenv("KVFERRY_NIXL_AFTER", "never")
    with pytest.raises(nixlInvalidParamError, match="KVFERRY_NIXL_AFTER is host or default-stream"):
        nixl_agent("here", nixl_agent_config())


def test_nixl_refuses_ranges_of_vram_that_overlap(driver: Driver) -> None:
    from kvferry.nixl import nixl_agent, nixl_agent_config
    from kvferry.nixl._errors import nixlBackendError

    agent, array = nixl_agent("here", nixl_agent_config()), Array(driver, 8192)
    whole = [(array.address, 8192, 0, "")]
    agent.register_memory(whole, "VRAM")
    for start, length in ((0, 4096), (4096, 4096), (1024, 16)):
        with pytest.raises(nixlBackendError, match="overlap"):
            agent.register_memory([(array.address + start, length, 0, "")], "VRAM")
    agent.register_memory(whole, "VRAM")
    # All of it is found in the one range.
    agent.prep_xfer_dlist("", [(array.address + 2048, 6144, 0)], "VRAM")
    agent.shutdown()


def test_nixl_moves_the_layers_of_a_model_as_vllms_connector_does(driver: Driver) -> None:
    """A region for each layer, descriptors by address, length and GPU, lists prepared once, blocks chosen per request."""
    from kvferry.nixl import nixl_agent, nixl_agent_config
    from nixl_kit import run

    block, blocks, layers = 512, 32, 6
    decode, prefill = (nixl_agent(name, nixl_agent_config()) for name in ("decode", "prefill"))
    caches = {
        it: [Array(driver, block * blocks, device) for _ in range(layers)] for it, device in ((decode, 0), (prefill, 1))
    }
    for layer, array in enumerate(caches[prefill]):
        array.content = b"".join(bytes([layer * blocks + at]) * block for at in range(blocks))
    for array in caches[decode]:
        array.content = b"\xff" * (block * blocks)
    for agent, arrays in caches.items():
        descs = agent.get_reg_descs([(it.address, it.nbytes, it.device, "") for it in arrays], "VRAM")
        agent.register_memory(descs)
    name = decode.add_remote_agent(prefill.get_agent_metadata())
    rows = {
        agent: [(it.address + at * block, block, it.device) for it in arrays for at in range(blocks)]
        for agent, arrays in caches.items()
    }
    local = decode.prep_xfer_dlist("NIXL_INIT_AGENT", decode.get_xfer_descs(rows[decode], "VRAM"))
    remote = decode.prep_xfer_dlist(name, decode.get_xfer_descs(rows[prefill], "VRAM"))
    theirs, mine = [7, 8, 3, 31], [0, 1, 30, 2]
    chosen = [[layer * blocks + at for layer in range(layers) for at in numbers] for numbers in (mine, theirs)]
    handle = decode.make_prepped_xfer("READ", local, chosen[0], remote, chosen[1], b"request 1")
    assert run(decode, handle) == "DONE"
    for layer, array in enumerate(caches[decode]):
        content = array.content
        got = [content[at * block] for at in range(blocks)]
        expected = [0xFF] * blocks
        for here, there in zip(mine, theirs, strict=True):
            expected[here] = layer * blocks + there
        assert got == expected, layer
    assert prefill.get_new_notifs() == {"decode": [b"request 1"]}
    decode.shutdown()
    prefill.shutdown()


ENDING = """
    import os
    import kvferry
    from fake_gpu import Array, Driver

    driver = Driver()
    agent = kvferry.Agent("hangs", listen="127.0.0.1:0")
    array = Array(driver, 1 << 16)
    region = agent.register(array)
    file = agent.open_file(os.environ["FILE"], "rw", create=True, nbytes=1 << 16)
    batch = kvferry.Batch()
    batch.push(region, 0, file.remote(), 0, 1 << 16)
    driver.fault("stream_stalls", count=1 << 60)
    transfer = {call}(batch, after="host")
    while driver.counter("hit:stream_stalls") == 0:
        assert transfer.wait(0.001) is None
    print("ends", flush=True)
"""


@pytest.mark.parametrize("call", ["agent.files.write_async", "agent.files.read_async"])
def test_a_process_ends_while_a_copy_of_its_gpu_hangs(tmp_path: Path, call: str) -> None:
    env = {"KVFERRY_LIBCUDA": str(LIBRARY), "KVFERRY_SILENCE_MS": "500", "PYTHONPATH": str(Path(__file__).parent)}
    ended = run_python(ENDING.format(call=call), env=env | {"FILE": str(tmp_path / "file")})
    assert (ended.returncode, ended.stdout) == (0, "ends\n"), ended.stderr


FORKING = """
    import ctypes, os, traceback
    import kvferry
    from fake_gpu import Array, Driver, Stream

    NBYTES = 1 << 16
    driver = Driver()
    array = Array(driver, NBYTES)
    host, mine = bytearray(NBYTES), bytearray([9]) * NBYTES

    def address(buffer):
        return ctypes.addressof(ctypes.c_char.from_buffer(buffer))

    def raises(kind, call):
        try:
            call()
        except kind:
            return True
        return False

    def run_in_child(body):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                body()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0
        assert driver.counter("fork_violations") == 0, "the child has called the driver"
        assert host == mine, "the child has written"
"""

FORKED_AGENT = """
    agent, far = (kvferry.Agent(name, listen="127.0.0.1:0") for name in ("here", "there"))
    region, place = agent.register(array), far.register(host)
    peer, there, remote = agent.peer(far.address), far.address, place.remote()
    batch, stream = kvferry.Batch(), Stream(driver)
    batch.push(region, 0, remote, 0, NBYTES)
    peer.write(batch, after=stream)

    def child():
        global agent, region, peer, batch
        for call in (
            lambda: peer.write(batch, after=stream),
            lambda: peer.read_async(batch, after="host"),
            lambda: agent.unregister(region),
            lambda: agent.register(array),
            lambda: agent.stats(),
        ):
            assert raises(kvferry.ForkedError, call)
        del agent, region, peer, batch
        fresh = kvferry.Agent("fresh", listen="127.0.0.1:0")
        assert raises(kvferry.Error, lambda: fresh.register(array))
        own, other, again = fresh.register(mine), fresh.peer(there), kvferry.Batch()
        again.push(own, 0, remote, 0, NBYTES // 2)
        other.write(again)
        half = NBYTES // 2
        assert other.write([own.addr + half], [place.addr + half], [half]).nbytes == half
        fresh.unregister(own)
        fresh.shutdown()

    run_in_child(child)
    peer.read(batch, after="host")
    assert array.content == host
    agent.unregister(region)
"""

FORKED_NIXL = """
    from kvferry.nixl import nixl_agent, nixl_agent_config
    from nixl_kit import run

    here, there = (nixl_agent(name, nixl_agent_config()) for name in ("here", "there"))
    registered = here.register_memory([(array.address, NBYTES, 0, "")], "VRAM")
    there.register_memory([(address(host), NBYTES, 0, "")], "DRAM")
    metadata = there.get_agent_metadata()
    name = here.add_remote_agent(metadata)
    local = here.get_xfer_descs([(array.address, NBYTES, 0)], "VRAM")
    remote = here.get_xfer_descs([(address(host), NBYTES, 0)], "DRAM")
    handle = here.initialize_xfer("WRITE", local, remote, name)
    assert run(here, handle) == "DONE"

    def child():
        global here, handle, registered
        for call in (
            lambda: here.transfer(handle),
            lambda: here.register_memory([(address(mine), NBYTES, 0, "")], "DRAM"),
            lambda: here.deregister_memory(registered),
        ):
            assert raises(Exception, call)
        del here, handle, registered
        fresh = nixl_agent("fresh", nixl_agent_config())
        assert raises(Exception, lambda: fresh.register_memory([(array.address, NBYTES, 0, "")], "VRAM"))
        fresh.register_memory([(address(mine), NBYTES, 0, "")], "DRAM")
        own = fresh.get_xfer_descs([(address(mine), NBYTES, 0)], "DRAM")
        write = fresh.initialize_xfer("WRITE", own, remote, fresh.add_remote_agent(metadata))
        assert run(fresh, write) == "DONE"

    run_in_child(child)
    handle = here.initialize_xfer("READ", local, remote, name)
    assert run(here, handle) == "DONE"
    assert array.content == host
"""

FORKED_MOONCAKE = """
    from kvferry.mooncake import TransferEngine

    def engine():
        made = TransferEngine()
        assert made.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0, made.last_error()
        return made

    here, there = engine(), engine()
    session = f"127.0.0.1:{there.get_rpc_port()}"
    assert here.register_memory(array.address, NBYTES) == 0, here.last_error()
    assert there.register_memory(address(host), NBYTES) == 0
    assert here.transfer_sync_write(session, array.address, address(host), NBYTES) == 0, here.last_error()

    def child():
        global here
        assert here.transfer_sync_write(session, array.address, address(host), NBYTES) != 0
        assert here.register_memory(address(mine), NBYTES) != 0
        assert here.unregister_memory(array.address) != 0
        del here
        fresh = engine()
        assert fresh.register_memory(array.address, NBYTES, "cuda:0") != 0
        # Callers of Mooncake name a GPU for memory of the host, too.
        for location in ("cuda:0", "*"):
            assert fresh.register_memory(address(mine), NBYTES, location) == 0, fresh.last_error()
            assert fresh.transfer_sync_write(session, address(mine), address(host), NBYTES) == 0, fresh.last_error()
            assert fresh.unregister_memory(address(mine)) == 0

    run_in_child(child)
    assert here.transfer_sync_read(session, array.address, address(host), NBYTES) == 0, here.last_error()
    assert array.content == host
"""


@pytest.mark.parametrize("door", [FORKED_AGENT, FORKED_NIXL, FORKED_MOONCAKE], ids=["agent", "nixl", "mooncake"])
def test_a_forked_child_of_a_process_with_a_gpu_moves_host_memory_and_calls_no_driver(door: str) -> None:
    assert LIBRARY.exists(), f"{LIBRARY} is missing: make test-wheel"
    env = {"KVFERRY_LIBCUDA": str(LIBRARY), "PYTHONPATH": str(Path(__file__).parent)}
    ended = run_python(FORKING + door + '    print("done")\n', env=env)
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr


COUNTING = """
import json
import kvferry
from fake_gpu import Array, Driver
from kit import eventually
nbytes, fault = 1 << 18, {fault!r}
driver = Driver()
if fault:
    driver.fault(fault, 1, 1 << 62)
near, far = [kvferry.Agent(listen="127.0.0.1:0", transports=["tcp"]) for _ in range(2)]
array = Array(driver, nbytes)
region, remote = near.register(array), far.register(bytearray(nbytes))
batch = kvferry.Batch()
for at in range(0, nbytes, 2048):
    batch.push(region, at, remote.remote(), at, 1024)
peer = near.peer(far.address)
peer.write(batch, after="host")
peer.read(batch, after="host")

def of_gpu():
    counted = {{name[5:]: value for name, value in near.stats().items() if name.startswith("gpu0_")}}
    unpinned = [value for name, value in counted.items() if name.startswith("unpinned_")]
    return counted if sum(unpinned) == 2 * counted["unpinned_stages"] else None

counted = eventually(of_gpu)
calls = {{name: driver.counter("call:cu" + name) for name in ("MemcpyAsync", "MemcpyBatchAsync", "LaunchKernel")}}
print(json.dumps([counted, calls, driver.findings()]))
near.shutdown()
far.shutdown()
"""


def counted_in_a_process(method: str, fault: str = "") -> dict[str, int]:
    """The counters of a GPU after a write and a read of 128 blocks of 1 KiB, which are those of the driver's calls."""
    env = {
        "KVFERRY_LIBCUDA": str(LIBRARY),
        "KVFERRY_SILENCE_MS": str(int(NEVER * 1000)),
        "KVFERRY_GPU_METHOD": method,
        "PYTHONPATH": str(Path(__file__).parent),
    }
    ended = run_python(COUNTING.format(fault=fault), env=env)
    assert ended.returncode == 0, ended.stderr
    counted, calls, findings = json.loads(ended.stdout)
    assert findings == ""
    assert counted["single_calls"] == calls["MemcpyAsync"]
    assert counted["batch_calls"] == calls["MemcpyBatchAsync"]
    assert counted["kernel_calls"] + counted["gather_calls"] == calls["LaunchKernel"]
    assert (counted["bytes_out"], counted["bytes_in"], counted["pieces"]) == (1 << 17, 1 << 17, 256)
    assert (counted["failed"], counted["leaked"], counted["lost"]) == (0, 0, 0)
    of_gpu: dict[str, int] = counted
    return of_gpu


@pytest.mark.parametrize("method", ["copy", "batch", "kernel", "gather"])
def test_the_counters_of_a_gpu_are_the_calls_of_the_driver_by_method(method: str) -> None:
    counted = counted_in_a_process(method)
    assert counted["single_calls" if method == "copy" else f"{method}_calls"] > 0
    assert counted["pinned_stages"] > 0
    assert (counted["kernel_refused"], counted["unpinned_stages"]) == (0, 0)


def test_memory_that_can_not_be_pinned_is_counted_by_the_reason() -> None:
    counted = counted_in_a_process("batch", "pin_oom")
    assert counted["unpinned_memory"] == counted["unpinned_stages"] > 0
    assert (counted["unpinned_registered"], counted["unpinned_other"]) == (0, 0)
    assert (counted["pinned_stages"], counted["batch_calls"], counted["single_calls"]) == (0, 0, 256)


def test_a_kernel_that_is_not_compiled_is_counted_by_the_reason() -> None:
    counted = counted_in_a_process("kernel", "jit_refused")
    assert (counted["kernel_refused_jit"], counted["kernel_refused"]) == (1, 1)
    assert counted["kernel_calls"] == 0
    others = [value for name, value in counted.items() if name.startswith("kernel_refused_") and name[15:] != "jit"]
    assert others == [0] * 4
