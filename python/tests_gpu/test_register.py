"""Memory of a GPU is registered as each library has it, and what can't be registered is refused with a reason."""

from __future__ import annotations

import kvferry
import numpy
import pytest
import torch
from gpu_kit import KIB, MIB, filled, pattern, whole

pytestmark = pytest.mark.parametrize("transports", ["tcp"])


def sent(near: kvferry.Agent, far: kvferry.Agent, region: kvferry.Region) -> bytes:
    """The bytes of a region, written to host memory of another agent."""
    host = bytearray(region.nbytes)
    near.peer(far.address).write(whole(region, far.register(host).remote(), region.nbytes), after="host")
    return bytes(host)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.int64])
def test_a_torch_tensor(near: kvferry.Agent, far: kvferry.Agent, dtype: torch.dtype) -> None:
    tensor = pattern(64 * KIB, 1).view(dtype)
    region = near.register(tensor)
    assert region.nbytes == 64 * KIB
    assert sent(near, far, region) == bytes(tensor.view(torch.uint8).cpu().numpy())


def test_a_part_of_a_torch_tensor(near: kvferry.Agent, far: kvferry.Agent) -> None:
    tensor = pattern(1 * MIB, 2).view(64, -1)
    part = tensor[3:7]
    region = near.register(part)
    assert region.nbytes == part.numel()
    assert sent(near, far, region) == bytes(part.cpu().numpy())


def test_tensors_that_are_not_contiguous_or_empty_are_refused(near: kvferry.Agent) -> None:
    tensor = torch.zeros(64, 64, device="cuda")
    for wrong in (tensor[:, :8], tensor.t()[1:, :5], tensor[::2]):
        with pytest.raises(ValueError, match="contiguous"):
            near.register(wrong)
    with pytest.raises(ValueError, match="empty"):
        near.register(tensor[:0])


def test_a_bare_address_says_its_device(near: kvferry.Agent) -> None:
    tensor = filled(64 * KIB, 1)
    pair = (tensor.data_ptr(), tensor.numel())
    for device in ("cuda", "cuda:0", 0, torch.device("cuda"), torch.device("cuda", 0)):
        region = near.register(pair, device=device)
        assert region.nbytes == tensor.numel()
        near.unregister(region)
    with pytest.raises((kvferry.Error, ValueError)):
        near.register(pair, device="cuda:99")
    with pytest.raises(kvferry.Error, match="not within the allocation"):
        near.register((tensor.data_ptr(), 1 << 50), device="cuda")


def test_host_memory_named_as_a_gpus_is_refused(near: kvferry.Agent) -> None:
    array = numpy.zeros(8192, numpy.uint8)
    with pytest.raises((kvferry.Error, ValueError)):
        near.register((array.ctypes.data, array.nbytes), device="cuda")
    with pytest.raises((kvferry.Error, ValueError)):
        near.register(torch.zeros(8192, dtype=torch.uint8, pin_memory=True), device="cuda")


def test_pinned_tensors_are_host_memory(near: kvferry.Agent, far: kvferry.Agent) -> None:
    tensor = torch.arange(8192, dtype=torch.int32).pin_memory()
    assert sent(near, far, near.register(tensor)) == tensor.numpy().tobytes()


def test_many_tensors_are_registered_all_or_none(near: kvferry.Agent) -> None:
    tensors = [filled(4096, i) for i in range(8)]
    regions = near.register_batch([*tensors, bytearray(64)])
    assert [region.nbytes for region in regions] == [4096] * 8 + [64]
    known = len(near.regions())
    with pytest.raises((kvferry.Error, ValueError)):
        near.register_batch([filled(4096, 1), tensors[0].view(2, -1)[:, :5]])
    assert len(near.regions()) == known
    near.unregister_batch(regions)


def test_cupy_arrays(near: kvferry.Agent, far: kvferry.Agent) -> None:
    cupy = pytest.importorskip("cupy")
    array = cupy.arange(16 * KIB, dtype=cupy.uint32)
    cupy.cuda.Device().synchronize()
    region = near.register(array)
    assert region.nbytes == array.nbytes
    assert sent(near, far, region) == cupy.asnumpy(array).tobytes()
    part = array[1024:2048]
    assert sent(near, far, near.register(part.copy())) == cupy.asnumpy(part).tobytes()
    with pytest.raises(ValueError, match="contiguous"):
        near.register(array.reshape(128, -1)[:, :7])


def test_memory_of_cupy_that_is_managed_or_freed_is_refused(near: kvferry.Agent) -> None:
    cupy = pytest.importorskip("cupy")
    managed = cupy.cuda.malloc_managed(1 * MIB)
    with pytest.raises(kvferry.Error, match="managed"):
        near.register((managed.ptr, 1 * MIB), device="cuda")
    freed = cupy.cuda.runtime.malloc(4 * MIB)
    cupy.cuda.runtime.free(freed)
    with pytest.raises(kvferry.Error, match="freed"):
        near.register((freed, 4 * MIB), device="cuda")


def test_jax_arrays_are_read_only_and_go_by_dlpack(near: kvferry.Agent, far: kvferry.Agent) -> None:
    jax = pytest.importorskip("jax")
    if not any(device.platform == "gpu" for device in jax.devices()):
        pytest.skip("JAX finds no GPU")
    array = jax.numpy.arange(16 * KIB, dtype=jax.numpy.float32).block_until_ready()
    with pytest.raises(TypeError, match=r"torch\.from_dlpack"):
        near.register(array)
    region = near.register(torch.from_dlpack(array))
    assert region.nbytes == array.nbytes
    assert sent(near, far, region) == numpy.asarray(array).tobytes()


def test_memory_of_a_region_is_held_until_it_is_unregistered(near: kvferry.Agent, far: kvferry.Agent) -> None:
    torch.cuda.empty_cache()
    region = near.register(pattern(32 * MIB, 5))
    expected = bytes(pattern(32 * MIB, 5).cpu().numpy())
    others = [filled(32 * MIB, 0xEE) for _ in range(4)]
    torch.cuda.synchronize()
    assert sent(near, far, region) == expected
    near.unregister(region)
    before = torch.cuda.memory_allocated()
    del region, others
    again = [filled(32 * MIB, 1) for _ in range(2)]
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before
    assert all(int(tensor.sum()) == 32 * MIB for tensor in again)
