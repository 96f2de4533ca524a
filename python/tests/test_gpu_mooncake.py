"""Memory of GPUs through `mooncake.engine`'s calls, on the fake driver."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
from fake_gpu import COMPUTE, LIBRARY, Array, Driver, Stream
from gpu_fixtures import driver, loaded
from kit import Child
from kvferry.mooncake import TransferEngine, TransferOpcode

__all__ = ["driver", "loaded"]

NBYTES = 1 << 16
LAYERS = 4


def engine() -> TransferEngine:
    made = TransferEngine()
    assert made.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0, made.last_error()
    return made


@pytest.fixture
def near() -> TransferEngine:
    return engine()


@pytest.fixture
def far() -> TransferEngine:
    return engine()


def session(of: TransferEngine) -> str:
    return f"127.0.0.1:{of.get_rpc_port()}"


def test_layers_on_a_gpu_are_handed_over_as_sglang_does(
    driver: Driver, near: TransferEngine, far: TransferEngine
) -> None:
    ours = [Array(driver, NBYTES) for _ in range(LAYERS)]
    theirs = [Array(driver, NBYTES, device=1) for _ in range(LAYERS)]
    # Metadata of a request is in host memory, and is transferred with the layers.
    aux, their_aux = bytearray(b"first token" * 10), bytearray(110)
    places = [ctypes.addressof(ctypes.c_char.from_buffer(it)) for it in (aux, their_aux)]
    for number, array in enumerate(ours):
        array.content = bytes([number + 1]) * NBYTES
    for array in theirs:
        array.content = bytes(NBYTES)
    for it, arrays, place in ((near, ours, places[0]), (far, theirs, places[1])):
        addresses = [array.address for array in arrays] + [place]
        assert it.batch_register_memory(addresses, [NBYTES] * LAYERS + [110]) == 0, it.last_error()
    page = 4096
    pages = [(0, 3), (2, 1), (3, 9)]
    local = [array.address + page * here for array in ours for here, _ in pages]
    remote = [array.address + page * there for array in theirs for _, there in pages]
    lengths = [page] * len(local)
    assert near.batch_transfer_sync_write(session(far), local, remote, lengths) == 0, near.last_error()
    assert near.transfer_sync_write(session(far), places[0], places[1], 110) == 0
    assert their_aux == aux
    for number, array in enumerate(theirs):
        content = array.content
        got = [content[at] for at in range(0, NBYTES, page)]
        assert got == [number + 1 if at in (1, 3, 9) else 0 for at in range(NBYTES // page)]
    # Back, from several layers and to the host, in one call.
    host = bytearray(2 * page)
    place = ctypes.addressof(ctypes.c_char.from_buffer(host))
    got_at = [place, place + page, ours[0].address]
    source = [theirs[1].address + 3 * page, theirs[3].address + 9 * page, theirs[2].address + page]
    done = near.batch_transfer_sync(session(far), got_at, source, [page] * 3, TransferOpcode.Read)
    assert done == 0, near.last_error()
    assert host == bytes([2]) * page + bytes([4]) * page
    assert ours[0].content[:page] == bytes([3]) * page
    assert near.batch_unregister_memory([array.address for array in ours]) == 0
    for array in ours:
        array.free()


DECODE = """
import ctypes
from fake_gpu import Array, Driver, Stream
from kvferry.mooncake import TransferEngine

driver = Driver()
stream = Stream(driver, 1)
layers = [Array(driver, {nbytes}, device=1) for _ in range({layers})]
for layer in layers:
    layer.content = bytes({nbytes})
aux = Memory(4096)
engine = TransferEngine()
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0, engine.last_error()
addresses = [layer.address for layer in layers] + [aux.addr]
assert engine.batch_register_memory(addresses, [{nbytes}] * {layers} + [4096]) == 0, engine.last_error()

def decode(page, byte):
    for number, layer in enumerate(layers):
        stream.run("decode", reads=[(layer.address + 4096 * page, 4096)], expect=byte + number)
"""


def test_layers_on_gpus_of_two_processes_are_handed_over_as_sglang_does(
    driver: Driver, near: TransferEngine, children: Callable[..., Child]
) -> None:
    """Prefill writes each chunk when it is computed, then the metadata. Decode reads the pages, which the next request
    gets then.
    """
    far = children(DECODE.format(nbytes=NBYTES, layers=LAYERS), env={"KVFERRY_LIBCUDA": str(LIBRARY)})
    port, theirs = far.run("engine.get_rpc_port()"), far.run("addresses")
    stream = Stream(driver)
    layers = [Array(driver, NBYTES) for _ in range(LAYERS)]
    aux, page = bytearray(4096), 4096
    place = ctypes.addressof(ctypes.c_char.from_buffer(aux))
    addresses = [layer.address for layer in layers] + [place]
    assert near.batch_register_memory(addresses, [NBYTES] * LAYERS + [4096]) == 0, near.last_error()
    remote = f"127.0.0.1:{port}"
    for request in range(4):
        byte = 20 * request + 1
        for chunk in ([(0, 3), (2, 1)], [(3, 9), (4, 10), (5, 11)]):
            for number, layer in enumerate(layers):
                writes = [(layer.address + page * here, page) for here, _ in chunk]
                stream.run("prefill", writes=writes, byte=byte + number)
            # The scheduler waits for the batch's result before it sends the chunk.
            stream.synchronize()
            local = [layer.address + page * here for layer in layers for here, _ in chunk]
            there = [address + page * to for address in theirs[:LAYERS] for _, to in chunk]
            assert near.batch_transfer_sync_write(remote, local, there, [page] * len(local)) == 0, near.last_error()
        aux[:] = bytes([byte]) * 4096
        assert near.transfer_sync_write(remote, place, theirs[LAYERS], 4096) == 0, near.last_error()
        assert far.run("aux[0:4096]") == aux
        for at in (3, 1, 9, 10, 11):
            far.run(f"decode({at}, {byte})")
        far.run("stream.synchronize()")
    assert far.run("driver.findings()") == ""
    assert far.run("driver.counter('kernel_mismatches')") == 0
    got = [far.run(f"bytes(layers[{number}].content[::4096])") for number in range(LAYERS)]
    for number, pages in enumerate(got):
        assert list(pages) == [byte + number if at in (1, 3, 9, 10, 11) else 0 for at in range(NBYTES // page)]
    assert near.batch_unregister_memory(addresses) == 0
    for layer in layers:
        layer.free()


def test_prefill_that_does_not_wait_for_its_gpu_is_found_by_the_driver(
    loaded: Driver, near: TransferEngine, far: TransferEngine
) -> None:
    """The layers' test has a wait without which the driver finds the race."""
    array, stream, host = Array(loaded, NBYTES), Stream(loaded), bytearray(NBYTES)
    place = ctypes.addressof(ctypes.c_char.from_buffer(host))
    assert near.register_memory(array.address, NBYTES) == 0
    assert far.register_memory(place, NBYTES) == 0
    stream.run("prefill", writes=[(array.address, NBYTES)], byte=7)
    assert near.transfer_sync_write(session(far), array.address, place, NBYTES) == 0, near.last_error()
    assert "kernel `prefill`" in loaded.findings()
    loaded.clear_findings()
    assert near.unregister_memory(array.address) == 0
    array.free()


def test_a_location_that_names_a_gpu_and_one_that_does_not_register_alike(driver: Driver, near: TransferEngine) -> None:
    for location in ("cuda:0", "cuda:1", "*", "cpu:0"):
        array = Array(driver, NBYTES)
        assert near.register_memory(array.address, NBYTES, location) == 0, near.last_error()
        assert near.register_memory(array.address, 16, location) == -7
        assert near.get_first_buffer_address(session(near)) == array.address
        assert near.unregister_memory(array.address) == 0
        assert near.unregister_memory(array.address) == -3
        array.free()
    host = bytearray(64)
    assert near.register_memory(ctypes.addressof(ctypes.c_char.from_buffer(host)), 64, "cuda:0") == 0


def test_memory_of_a_gpu_that_is_not_registered_is_refused(
    driver: Driver, near: TransferEngine, far: TransferEngine
) -> None:
    array, host = Array(driver, NBYTES), bytearray(NBYTES)
    place = ctypes.addressof(ctypes.c_char.from_buffer(host))
    assert far.register_memory(place, NBYTES) == 0
    assert near.transfer_sync_write(session(far), array.address, place, 64) == -1
    assert "memory of a GPU that is not registered" in near.last_error()
    assert near.register_memory(array.address, 4096) == 0
    assert near.transfer_sync_write(session(far), array.address + 4000, place, 200) == -1
    assert "reaches beyond its region" in near.last_error()


def test_bytes_of_a_gpu_are_not_touched_by_the_processor(driver: Driver, near: TransferEngine) -> None:
    array = Array(driver, NBYTES)
    assert near.register_memory(array.address, NBYTES) == 0
    assert near.write_bytes_to_buffer(array.address + 8, b"x", 1) == -1
    with pytest.raises(ValueError, match="memory of a GPU"):
        near.read_bytes_from_buffer(array.address, 8)


def test_transfers_come_after_the_stream_that_was_named(
    driver: Driver, near: TransferEngine, far: TransferEngine
) -> None:
    array, stream, host = Array(driver, NBYTES), Stream(driver), bytearray(NBYTES)
    place = ctypes.addressof(ctypes.c_char.from_buffer(host))
    assert near.register_memory(array.address, NBYTES) == 0
    assert far.register_memory(place, NBYTES) == 0
    assert near.set_after(stream) == 0
    driver.hold(COMPUTE)
    stream.fill(array, 7)
    number = near.batch_transfer_async_write(session(far), [array.address], [place], [NBYTES])
    assert near.transfer_check_status(number) == 0
    driver.hold(0)
    assert near.get_batch_transfer_status([number]) == 0
    assert host == bytes([7]) * NBYTES
    assert near.set_after("host") == 0
    with pytest.raises(TypeError, match="after must be a stream"):
        near.set_after("now")
    assert TransferEngine().set_after("host") == -1


def test_the_environment_names_an_order(driver: Driver, far: TransferEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_MOONCAKE_AFTER", "default-stream")
    near = engine()
    array, host = Array(driver, NBYTES), bytearray(NBYTES)
    array.content = bytes([5]) * NBYTES
    place = ctypes.addressof(ctypes.c_char.from_buffer(host))
    assert near.register_memory(array.address, NBYTES) == 0
    assert far.register_memory(place, NBYTES) == 0
    before = driver.counter("call:cuEventRecord")
    assert near.transfer_sync_write(session(far), array.address, place, NBYTES) == 0, near.last_error()
    assert driver.counter("call:cuEventRecord") > before
    assert host == array.content
    monkeypatch.setenv("KVFERRY_MOONCAKE_AFTER", "never")
    assert TransferEngine().initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == -1
