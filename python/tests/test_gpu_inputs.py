"""Bad inputs where memory of GPUs is named, on the fake driver: each is refused with what to do. Some odd ones work."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import kvferry
import pytest
from fake_gpu import COMPUTE, LIBRARY, Array, Driver, Event, Stream
from gpu_fixtures import driver, far, loaded, no_session_ends_by_silence
from kit import PATIENCE, run_python

__all__ = ["driver", "far", "loaded", "no_session_ends_by_silence"]

NBYTES = 1 << 16
NO_ALLOCATION = "name bytes of one allocation"


def refused(agent: kvferry.Agent, address: int, nbytes: int) -> str:
    """The text of the error of memory that is registered as a GPU's, alone and among others."""
    texts = set()
    calls: list[Callable[[], object]] = [
        lambda: agent.register((address, nbytes), device="cuda"),
        lambda: agent.register_batch([(address, nbytes)], device="cuda"),
    ]
    for call in calls:
        with pytest.raises(kvferry.InvalidArgumentError) as caught:
            call()
        texts.add(str(caught.value))
    (text,) = texts
    assert agent.regions() == []
    return text


def test_ranges_that_are_none_of_a_gpu_are_refused_with_what_to_do(driver: Driver, agent: kvferry.Agent) -> None:
    array, freed = Array(driver, NBYTES), Array(driver, NBYTES)
    freed.free()
    ranges = {
        "null": (0, 16, NO_ALLOCATION),
        "nothing": (array.address, 0, NO_ALLOCATION),
        "the length overflows": (array.address, (1 << 64) - 1, NO_ALLOCATION),
        "the end overflows": ((1 << 64) - 5, 16, NO_ALLOCATION),
        "past the end": (array.address, NBYTES + 1, NO_ALLOCATION),
        "from the middle past the end": (array.address + NBYTES - 1, 2, NO_ALLOCATION),
        "freed": (freed.address, NBYTES, "was it freed?"),
        "no memory at all": (16, 16, "was it freed?"),
    }
    for what, (address, nbytes, advice) in ranges.items():
        assert advice in refused(agent, address, nbytes), what
    for address, nbytes in ((-1, 16), (1 << 64, 16), (array.address, -1), (array.address, 1 << 64)):
        with pytest.raises(OverflowError):
            agent.register((address, nbytes), device="cuda")
    array.free()


def test_managed_memory_is_refused_as_a_gpus_and_as_the_hosts(driver: Driver, agent: kvferry.Agent) -> None:
    address = c_uint64()
    with driver.current(0):
        driver.call("cuMemAllocManaged", byref(address), c_size_t(NBYTES), c_uint(1))
    assert "allocate it with cudaMalloc" in refused(agent, address.value, NBYTES)
    with pytest.raises(kvferry.UnsupportedError, match="not host memory"):
        agent.register((address.value, NBYTES))
    with driver.current(0):
        driver.call("cuMemFree_v2", address)


def test_pinned_and_pageable_host_memory_is_refused_as_a_gpus(driver: Driver, agent: kvferry.Agent) -> None:
    host = bytearray(1 << 13)
    address = ctypes.addressof(ctypes.c_char.from_buffer(host))
    text = refused(agent, address, len(host))
    assert "is pageable host memory" in text
    assert "register it as host memory" in text
    with driver.current(0):
        driver.call("cuMemHostRegister_v2", c_uint64(address), c_size_t(len(host)), c_uint(0))
    text = refused(agent, address, len(host))
    assert "is pinned host memory" in text
    assert "register it as host memory" in text
    agent.unregister(agent.register((address, len(host))))
    with driver.current(0):
        driver.call("cuMemHostUnregister", c_uint64(address))


def test_an_address_of_a_gpu_is_refused_as_host_memory_with_what_to_register(
    driver: Driver, agent: kvferry.Agent
) -> None:
    array = Array(driver, NBYTES)
    for address, nbytes in ((array.address, NBYTES), (array.address + NBYTES - 1, 1)):
        with pytest.raises(kvferry.UnsupportedError, match="register it as memory of its GPU"):
            agent.register((address, nbytes))
    array.free()


class Handle:
    """An event of some library."""

    def __init__(self, handle: int) -> None:
        self.cuda_event = handle


class Transfer:
    """Memory of GPU 0 that is written to the host."""

    def __init__(self, driver: Driver, agent: kvferry.Agent, far: kvferry.Agent) -> None:
        self.array, self.host = Array(driver, NBYTES), bytearray(NBYTES)
        self.batch, self.peer = kvferry.Batch(), agent.peer(far.address)
        self.batch.push(agent.register(self.array), 0, far.register(self.host).remote(), 0, NBYTES)

    def refused(self, after: Any) -> str:
        """The text of the error of transfers with this order."""
        texts = set()
        for call in (self.peer.write, self.peer.read, self.peer.write_async, self.peer.read_async):
            with pytest.raises(kvferry.InvalidArgumentError) as caught:
                call(self.batch, after=after)
            texts.add(str(caught.value))
        (text,) = texts
        return text


def test_streams_and_events_that_do_not_exist_are_refused(
    driver: Driver, agent: kvferry.Agent, far: kvferry.Agent
) -> None:
    transfer = Transfer(driver, agent, far)
    stream = Stream(driver)
    event, living = Event(driver, stream), Stream(driver)
    with driver.current(0):
        driver.call("cuStreamDestroy_v2", c_void_p(stream.cuda_stream))
        driver.call("cuEventDestroy_v2", c_void_p(event.cuda_event))
    unknown: list[tuple[Any, str, int]] = [
        (stream, "stream", stream.cuda_stream),
        (0x1234, "stream", 0x1234),
        ([living, stream], "stream", stream.cuda_stream),
        (event, "event", event.cuda_event),
        (Handle(0x1234), "event", 0x1234),
    ]
    for after, what, handle in unknown:
        text = transfer.refused(after)
        assert f"no {what} {handle:#x}" in text
        assert "name one that exists" in text
    transfer.peer.write(transfer.batch, after=living)
    assert transfer.host == transfer.array.content


def test_what_is_in_a_graph_capture_is_refused(driver: Driver, agent: kvferry.Agent, far: kvferry.Agent) -> None:
    transfer, graph = Transfer(driver, agent, far), c_void_p()
    for is_event in (False, True):
        stream = Stream(driver)
        event = Event(driver, stream)
        handle = c_void_p(stream.cuda_stream)
        with driver.current(0):
            driver.call("cuStreamBeginCapture_v2", handle, c_int(0))
            driver.call("cuEventRecord", c_void_p(event.cuda_event), handle)
        if is_event:
            text = transfer.refused(event)
            assert "record one outside of it" in text
        else:
            text = transfer.refused(stream)
            assert "use a stream outside the capture" in text
        assert "graph capture" in text
        with driver.current(0):
            if is_event:
                # A driver ends the capture when it is asked about such an event.
                with pytest.raises(AssertionError, match="returned 901"):
                    driver.call("cuStreamEndCapture", handle, byref(graph))
            else:
                driver.call("cuStreamEndCapture", handle, byref(graph))
    transfer.peer.write(transfer.batch, after="host")
    assert transfer.host == transfer.array.content


@pytest.mark.parametrize("kind", ["event", "stream"])
def test_work_of_another_gpu_is_waited_for(driver: Driver, agent: kvferry.Agent, far: kvferry.Agent, kind: str) -> None:
    transfer, stream = Transfer(driver, agent, far), Stream(driver, device=1)
    driver.hold(COMPUTE)
    stream.fill(transfer.array, 7)
    after: Any = Event(driver, stream, device=1) if kind == "event" else stream
    running = transfer.peer.write_async(transfer.batch, after=after)
    assert running.wait(0.02) is None, "the kernel has not run"
    driver.hold(0)
    assert running.wait(PATIENCE) is not None
    assert transfer.host == bytes([7]) * NBYTES


def test_of_two_pairs_with_the_same_bytes_of_a_gpu_either_wins(
    driver: Driver, agent: kvferry.Agent, far: kvferry.Agent
) -> None:
    array, host = Array(driver, NBYTES), bytes([1]) * NBYTES + bytes([2]) * NBYTES
    batch, source = kvferry.Batch(), bytearray(host)
    region, remote = agent.register(array), far.register(source).remote()
    for at in (0, NBYTES):
        batch.push(region, 0, remote, at, NBYTES)
    agent.peer(far.address).read(batch, after="host")
    assert set(array.content) <= {1, 2}


def test_memory_that_is_source_and_destination_keeps_its_bytes(
    driver: Driver, agent: kvferry.Agent, far: kvferry.Agent
) -> None:
    array = Array(driver, NBYTES)
    array.content = content = bytes(range(256)) * (NBYTES // 256)
    batch = kvferry.Batch()
    batch.push(agent.register(array), 0, far.register(array).remote(), 0, NBYTES)
    peer = agent.peer(far.address)
    peer.write(batch, after="host")
    peer.read(batch, after="host")
    assert array.content == content


ALONE = {"KVFERRY_LIBCUDA": str(LIBRARY), "PYTHONPATH": str(Path(__file__).parent)}

REMOVED = """
    import os
    import kvferry
    from fake_gpu import Array, Driver, Stream

    driver = Driver()
    agent = kvferry.Agent("alone", listen="127.0.0.1:0")
    array, stream, other = Array(driver, 1 << 16), Stream(driver), Array(driver, 1 << 16, device=1)
    file = agent.open_file(os.environ["FILE"], "rw", create=True, nbytes=1 << 16)
    batches = [kvferry.Batch(), kvferry.Batch()]
    regions = [agent.register(memory) for memory in (array, other)]
    for batch, region in zip(batches, regions):
        batch.push(region, 0, file.remote(), 0, 1 << 16)
    driver.fault("device_removed")
    calls = {
        "the first": lambda: agent.files.write(batches[0], after="host"),
        "the next": lambda: agent.files.read(batches[0], after="host"),
        "ordered": lambda: agent.files.write(batches[0], after=stream),
        "registered": lambda: agent.register(array),
    }
    quiesced = []
    for what, call in calls.items():
        try:
            call()
        except kvferry.Error as error:
            quiesced.append(error.quiesced)
            print(what, type(error).__name__, "restart the process" in str(error))
    agent.files.write(batches[1], after="host")
    print("the other GPU goes on")
    # By this error, the GPU is gone, and a copy that it has begun may still run.
    try:
        agent.unregister(regions[0])
    except kvferry.QuarantinedError:
        print("in quarantine", quiesced[:2], regions[0].is_quarantined)
"""


def test_a_gpu_that_is_removed_is_lost_and_what_comes_later_says_so(tmp_path: Path) -> None:
    # A transfer whose copy may still run fails once the limit of silence has passed.
    ended = run_python(REMOVED, env=ALONE | {"FILE": str(tmp_path / "file"), "KVFERRY_SILENCE_MS": "2000"})
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert [line.rsplit(maxsplit=1)[0] for line in lines[:2]] == ["the first InternalError", "the next InternalError"]
    assert lines[2:] == [
        "ordered InvalidArgumentError True",
        "registered InvalidArgumentError True",
        "the other GPU goes on",
        "in quarantine [False, True] True",
    ], ended.stderr


CONTEXTS = """
    import ctypes
    import os
    import kvferry
    from fake_gpu import Array, Driver, Event, Stream

    driver, nbytes = Driver(), 1 << 16
    array, stream = Array(driver, nbytes, device=1), Stream(driver, device=1)
    event, host = Event(driver, stream, device=1), bytearray(nbytes)
    assert driver.counter("contexts_created") == 1

    def exchange(mode):
        former = ctypes.c_int(mode)
        driver.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(former))
        return former.value

    def state():
        context = ctypes.c_void_p()
        driver.call("cuCtxGetCurrent", ctypes.byref(context))
        mode = exchange(2)
        exchange(mode)
        return context.value, mode

    def kept(call, *args, **kwargs):
        before = state()
        result = call(*args, **kwargs)
        assert state() == before, (call, kwargs)
        return result

    def moves(agent, far):
        region, remote = kept(agent.register, array), far.register(host).remote()
        file = agent.open_file(os.environ["FILE"], "rw", create=True, nbytes=nbytes)
        to_peer, to_file = kvferry.Batch(), kvferry.Batch()
        to_peer.push(region, 0, remote, 0, nbytes)
        to_file.push(region, 0, file.remote(), 0, nbytes)
        peer = agent.peer(far.address)
        for after in ("host", stream, event, stream.cuda_stream, 0, 1, 2, [event, stream, "host"]):
            for calls, batch in ((peer, to_peer), (agent.files, to_file)):
                kept(calls.write, batch, after=after)
                kept(calls.read, batch, after=after)
                for call in (calls.write_async, calls.read_async):
                    kept(kept(call, batch, after=after).wait, 60)
        kept(agent.set_after, stream)
        kept(peer.write, to_peer)
        try:
            kept(agent.register, (16, 16), device="cuda")
        except kvferry.InvalidArgumentError:
            pass
        kept(agent.unregister, region)
        kept(agent.shutdown)

    for is_current in (False, True):
        if is_current:
            driver.current(1).__enter__()
        exchange(1)
        with kvferry.Agent("far", listen="127.0.0.1:0") as far:
            moves(kvferry.Agent("near", listen="127.0.0.1:0"), far)
        assert (driver.counter("contexts_created"), driver.counter("contexts")) == (1, 1)
    assert driver.findings() == ""
    print("ok")
"""


def test_memory_of_one_gpu_makes_no_context_and_leaves_the_thread_as_it_was(tmp_path: Path) -> None:
    ended = run_python(CONTEXTS, env=ALONE | {"FILE": str(tmp_path / "file")})
    assert (ended.returncode, ended.stdout) == (0, "ok\n"), ended.stderr
