"""Memory of other allocators than the default one, each in a process of its own."""

from __future__ import annotations

import pytest
from gpu_kit import run_python

MOVE = """
import torch, kvferry
from gpu_kit import MIB, pattern, scattered, moved, filled
def move(mine, theirs, transports):
    near = kvferry.Agent("near", listen="127.0.0.1:0", transports=transports)
    far = kvferry.Agent("far", listen="127.0.0.1:0", transports=transports)
    count, nbytes = mine.numel() // 8192, 4096
    expected = moved(mine, theirs, count, nbytes)
    a, b = near.register(mine), far.register(theirs)
    near.peer(far.address).write(scattered(a, b.remote(), count, nbytes), after=torch.cuda.current_stream())
    assert torch.equal(theirs, expected), transports
    near.unregister(a), far.unregister(b)
    near.shutdown(), far.shutdown()
"""


def test_expandable_segments(transports: str) -> None:
    program = f"""{MOVE}
# Expandable segments grow by pieces that are mapped one after the other.
parts = [filled(30 * MIB, i) for i in range(8)]
mine, theirs = pattern(200 * MIB, 1), pattern(200 * MIB, 2)
move(mine, theirs, {transports!r})
del parts
torch.cuda.empty_cache()
move(pattern(64 * MIB, 3), pattern(64 * MIB, 4), {transports!r})
segments = torch.cuda.memory_snapshot()
assert any(segment.get("is_expandable") for segment in segments), segments
print("moved")
"""
    environment = {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }
    assert "moved" in run_python(program, environment)


def test_the_asynchronous_allocator(transports: str) -> None:
    program = f"""{MOVE}
move(pattern(64 * MIB, 3), pattern(64 * MIB, 4), {transports!r})
print("moved")
"""
    environment = {
        "PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync",
        "PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync",
    }
    assert "moved" in run_python(program, environment)


def test_a_pool_of_cupy(transports: str) -> None:
    pytest.importorskip("cupy")
    program = f"""{MOVE}
import cupy
cupy.cuda.set_allocator(cupy.cuda.MemoryAsyncPool().malloc)
arrays = [cupy.zeros(8 * MIB, dtype=cupy.uint8) for _ in range(2)]
arrays[0][:] = 7
cupy.cuda.Device().synchronize()
move(*(torch.as_tensor(array, device="cuda") for array in arrays), {transports!r})
print("moved")
"""
    assert "moved" in run_python(program)


def test_a_forked_child_is_refused_the_gpu(transports: str) -> None:
    program = f"""{MOVE}
import os
mine = pattern(MIB, 1)
move(mine, pattern(MIB, 2), {transports!r})
child = os.fork()
if child == 0:
    try:
        agent = kvferry.Agent("child", listen="127.0.0.1:0")
        agent.register((mine.data_ptr(), MIB), device="cuda")
        status = 1
    except kvferry.Error as error:
        status = 0 if "fork" in str(error) else 2
    os._exit(status)
assert os.waitpid(child, 0)[1] == 0
move(mine, pattern(MIB, 3), {transports!r})
print("moved")
"""
    assert "moved" in run_python(program)


def test_a_kernel_that_fails_loses_the_gpu_and_host_transfers_go_on(transports: str) -> None:
    program = f"""
import torch, kvferry
from gpu_kit import MIB, filled, whole
near = kvferry.Agent("near", listen="127.0.0.1:0", transports={transports!r})
far = kvferry.Agent("far", listen="127.0.0.1:0", transports={transports!r})
mine, host, to = filled(MIB, 1), bytearray(b"h") * MIB, bytearray(MIB)
torch.cuda.synchronize()
remote, peer = far.register(to).remote(), near.peer(far.address)
gpu, cpu = whole(near.register(mine), remote, MIB), whole(near.register(host), remote, MIB)
peer.write(gpu, after="host")
assert to == b"\\x01" * MIB
# An index outside of the tensor: an assertion in the kernel.
torch.zeros(4, device="cuda")[torch.tensor([1 << 40], device="cuda")]
try:
    torch.cuda.synchronize()
    print("torch has seen nothing")
except RuntimeError:
    pass
for call in (peer.write, peer.read):
    try:
        call(gpu, after="host", timeout=20)
        print("the GPU still works")
    except kvferry.Error as error:
        print("refused:", error, error.quiesced)
peer.write(cpu)
assert to == host
print("host memory goes on", flush=True)
near.shutdown(), far.shutdown()
import os
os._exit(0)
"""
    said = run_python(program)
    assert "host memory goes on" in said
    assert said.count("refused:") == 2, said
