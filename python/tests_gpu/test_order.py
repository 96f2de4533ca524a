"""Each transfer comes after the work that `after` names, for streams and events of each library, and disturbs no
stream and no capture.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import kvferry
import pytest
import torch
from gpu_kit import KIB, filled, spin, whole

NBYTES = 256 * KIB
#: Longer than a transfer of NBYTES, so that a transfer that does not wait has wrong bytes.
BUSY_MS = 30.0


def cupy_stream(stream: torch.cuda.Stream) -> Any:
    cupy = pytest.importorskip("cupy")
    return cupy.cuda.ExternalStream(stream.cuda_stream)


def cupy_event(stream: torch.cuda.Stream) -> Any:
    cupy = pytest.importorskip("cupy")
    event = cupy.cuda.Event(disable_timing=True)
    event.record(cupy.cuda.ExternalStream(stream.cuda_stream))
    return event


def cuda_core_stream(stream: torch.cuda.Stream) -> Any:
    core = pytest.importorskip("cuda.core")
    made = getattr(core, "Stream", None)
    if made is None:
        made = pytest.importorskip("cuda.core.experimental").Stream
    return made.from_handle(stream.cuda_stream)


KINDS: dict[str, Callable[[torch.cuda.Stream], Any]] = {
    "torch stream": lambda stream: stream,
    "torch event": lambda stream: stream.record_event(),
    "handle": lambda stream: stream.cuda_stream,
    "list": lambda stream: ["host", stream.record_event(), torch.cuda.Stream()],
    "cupy stream": cupy_stream,
    "cupy event": cupy_event,
    "cuda.core stream": cuda_core_stream,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_write_comes_after_the_kernels_before_it(near: kvferry.Agent, far: kvferry.Agent, kind: str) -> None:
    mine, to = filled(NBYTES, 1), bytearray(NBYTES)
    batch = whole(near.register(mine), far.register(to).remote(), NBYTES)
    peer, stream = near.peer(far.address), torch.cuda.Stream()
    torch.cuda.synchronize()
    peer.write(batch, after="host")
    took = []
    for value in range(2, 12):
        with torch.cuda.stream(stream):
            spin(BUSY_MS)
            mine.fill_(value)
        after = KINDS[kind](stream)
        began = time.monotonic()
        transfer = peer.write_async(batch, after=after)
        took.append(time.monotonic() - began)
        assert transfer.wait(60) is not None
        assert to == bytes([value]) * NBYTES, kind
    assert min(took) < BUSY_MS / 4e3, f"the calls have waited for kernels: {took}"


@pytest.mark.parametrize("which", ["default", "side", "per-thread"])
def test_streams_of_each_kind(near: kvferry.Agent, far: kvferry.Agent, which: str) -> None:
    mine, to = filled(NBYTES, 1), bytearray(NBYTES)
    batch = whole(near.register(mine), far.register(to).remote(), NBYTES)
    peer = near.peer(far.address)
    torch.cuda.synchronize()
    peer.write(batch, after="host")
    handle = {"default": 0, "side": torch.cuda.Stream().cuda_stream, "per-thread": 2}[which]
    stream = torch.cuda.default_stream() if which == "default" else torch.cuda.ExternalStream(handle)
    for value in range(2, 12):
        with torch.cuda.stream(stream):
            spin(BUSY_MS)
            mine.fill_(value)
        peer.write(batch, after=handle)
        assert to == bytes([value]) * NBYTES, which


def test_two_streams_that_compute_a_half_each(near: kvferry.Agent, far: kvferry.Agent) -> None:
    mine, to = filled(NBYTES, 1), bytearray(NBYTES)
    batch = whole(near.register(mine), far.register(to).remote(), NBYTES)
    peer, streams = near.peer(far.address), [torch.cuda.Stream(), torch.cuda.Stream()]
    halves = mine.view(2, -1)
    torch.cuda.synchronize()
    peer.write(batch, after="host")
    for value in range(2, 22, 2):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                spin(BUSY_MS * (i + 1 if value % 4 else 2 - i))
                halves[i].fill_(value + i)
        peer.write(batch, after=streams)
        assert to == bytes([value]) * (NBYTES // 2) + bytes([value + 1]) * (NBYTES // 2)


def test_a_read_comes_after_the_last_reader(near: kvferry.Agent, far: kvferry.Agent) -> None:
    mine, source = filled(NBYTES, 1), bytearray(NBYTES)
    batch = whole(near.register(mine), far.register(source).remote(), NBYTES)
    peer, stream, last = near.peer(far.address), torch.cuda.Stream(), 1
    seen = torch.zeros(NBYTES, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    for value in range(2, 22):
        with torch.cuda.stream(stream):
            spin(BUSY_MS)
            seen.copy_(mine)
        source[:] = bytes([value]) * NBYTES
        peer.read(batch, after=stream)
        stream.synchronize()
        assert bool((seen == last).all()), "the reader has seen later bytes"
        assert bool((mine == value).all())
        last = value


def test_work_that_a_stream_gets_later_is_not_waited_for(near: kvferry.Agent, far: kvferry.Agent) -> None:
    mine, to = filled(NBYTES, 1), bytearray(NBYTES)
    batch = whole(near.register(mine), far.register(to).remote(), NBYTES)
    peer, stream = near.peer(far.address), torch.cuda.Stream()
    torch.cuda.synchronize()
    peer.write(batch, after="host")
    event = stream.record_event()
    with torch.cuda.stream(stream):
        spin(1500)
    began = time.monotonic()
    peer.write(batch, after=event)
    assert time.monotonic() - began < 0.5
    assert not stream.query()
    stream.synchronize()


def test_no_stream_waits_for_a_transfer(near: kvferry.Agent, far: kvferry.Agent) -> None:
    """A transfer that waits for one stream keeps no other, the default one included, from going on."""
    mine, to = filled(NBYTES, 1), bytearray(NBYTES)
    batch = whole(near.register(mine), far.register(to).remote(), NBYTES)
    peer, busy, other = near.peer(far.address), torch.cuda.Stream(), torch.cuda.Stream()
    cell = torch.zeros(16, device="cuda").add_(1)
    torch.cuda.synchronize()
    peer.write(batch, after="host")
    with torch.cuda.stream(busy):
        spin(1500)
    transfer = peer.write_async(batch, after=busy)
    began = time.monotonic()
    for stream in (other, torch.cuda.default_stream()):
        with torch.cuda.stream(stream):
            cell.add_(1)
        stream.synchronize()
    assert time.monotonic() - began < 0.5
    assert transfer.poll() is None
    assert transfer.wait(60) is not None


def test_without_an_order_transfers_are_refused(near: kvferry.Agent, far: kvferry.Agent) -> None:
    mine, to = filled(NBYTES, 1), bytearray(NBYTES)
    batch = whole(near.register(mine), far.register(to).remote(), NBYTES)
    peer = near.peer(far.address)
    for call in (peer.write, peer.read, peer.write_async, peer.read_async):
        with pytest.raises(kvferry.InvalidArgumentError, match="say what the transfer comes after"):
            call(batch)


def test_a_stream_in_a_capture_is_refused_and_its_capture_works(near: kvferry.Agent, far: kvferry.Agent) -> None:
    mine, to = filled(NBYTES, 1), bytearray(NBYTES)
    batch = whole(near.register(mine), far.register(to).remote(), NBYTES)
    peer, graph = near.peer(far.address), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    peer.write(batch, after="host")
    with torch.cuda.graph(graph):
        mine.add_(1)
        with pytest.raises(kvferry.Error, match="graph capture"):
            peer.write(batch, after=torch.cuda.current_stream())
        # Another stream is not in the capture, and transfers after it go on.
        peer.write(batch, after="host")
        mine.add_(1)
    assert to == bytes([1]) * NBYTES
    for round_ in range(5):
        graph.replay()
        peer.write(batch, after=torch.cuda.current_stream())
        assert to == bytes([3 + 2 * round_]) * NBYTES


def test_an_event_of_a_capture_is_refused_and_ends_the_capture(near: kvferry.Agent, far: kvferry.Agent) -> None:
    mine, to = filled(NBYTES, 1), bytearray(NBYTES)
    batch = whole(near.register(mine), far.register(to).remote(), NBYTES)
    peer, event = near.peer(far.address), torch.cuda.Event()
    torch.cuda.synchronize()
    # The driver has no query of such an event that leaves the capture valid.
    with pytest.raises(RuntimeError, match="capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        mine.add_(1)
        event.record()
        with pytest.raises(kvferry.Error, match="graph capture"):
            peer.write(batch, after=event)
    torch.cuda.synchronize()
    peer.write(batch, after=torch.cuda.current_stream())
    assert to == bytes([1]) * NBYTES


def test_a_deadline_ends_a_transfer_whose_kernel_runs_on(near: kvferry.Agent, far: kvferry.Agent) -> None:
    mine, to = filled(NBYTES, 1), bytearray(NBYTES)
    region = near.register(mine)
    batch = whole(region, far.register(to).remote(), NBYTES)
    peer, stream = near.peer(far.address), torch.cuda.Stream()
    torch.cuda.synchronize()
    peer.write(batch, after="host")
    with torch.cuda.stream(stream):
        spin(2000)
    began = time.monotonic()
    with pytest.raises(kvferry.DeadlineError) as ended:
        peer.write(batch, after=stream, timeout=0.2)
    assert 0.1 < time.monotonic() - began < 1.5
    assert ended.value.quiesced
    near.unregister(region)
    assert not stream.query(), "the stream has run on meanwhile"
    stream.synchronize()


def test_a_destroyed_event_or_stream_does_not_matter_after_the_call(near: kvferry.Agent, far: kvferry.Agent) -> None:
    mine, to = filled(NBYTES, 1), bytearray(NBYTES)
    batch = whole(near.register(mine), far.register(to).remote(), NBYTES)
    peer = near.peer(far.address)
    torch.cuda.synchronize()
    for value in range(2, 12):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            spin(BUSY_MS)
            mine.fill_(value)
        event = stream.record_event()
        transfer = peer.write_async(batch, after=event)
        del event, stream
        assert transfer.wait(60) is not None
        assert to == bytes([value]) * NBYTES
