"""The fake CUDA driver, as a test drives it: memory of GPUs, streams and kernels."""

from __future__ import annotations

import ctypes
import os
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from pathlib import Path

LIBRARY = Path(__file__).parents[2] / "target" / "test-wheel" / "libkvferry_fakecuda.so"
# Engines for `Driver.hold`.
HOST_TO_DEVICE = 1
DEVICE_TO_HOST = 2
COMPUTE = 8


class _Range(ctypes.Structure):
    _fields_ = (("start", c_uint64), ("len", c_uint64))


class _Kernel(ctypes.Structure):
    _fields_ = (
        ("name", c_char_p),
        ("reads", ctypes.POINTER(_Range)),
        ("read_count", c_size_t),
        ("writes", ctypes.POINTER(_Range)),
        ("write_count", c_size_t),
        ("fill", c_int),
        ("expect", c_int),
        ("delay_ns", c_uint64),
    )


class Array:
    """Memory of a GPU, as CuPy shows its own."""

    def __init__(self, driver: Driver, nbytes: int, device: int = 0) -> None:
        self._driver, self.nbytes, self.device = driver, nbytes, device
        address = c_uint64()
        with driver.current(device):
            driver.call("cuMemAlloc_v2", byref(address), c_size_t(nbytes))
        self.address = address.value

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    @property
    def content(self) -> bytes:
        got = ctypes.create_string_buffer(self.nbytes)
        self._driver.call("fakecuda_read", c_uint64(self.address), got, c_size_t(self.nbytes))
        return got.raw

    @content.setter
    def content(self, data: bytes) -> None:
        self._driver.call("fakecuda_write", c_uint64(self.address), data, c_size_t(len(data)))

    def free(self) -> None:
        with self._driver.current(self.device):
            self._driver.call("cuMemFree_v2", c_uint64(self.address))


class Stream:
    """A stream, as torch shows its own."""

    def __init__(self, driver: Driver, device: int = 0) -> None:
        self._driver, self._device = driver, device
        handle = c_void_p()
        with driver.current(device):
            driver.call("cuStreamCreate", byref(handle), c_uint(1))
        self.cuda_stream = handle.value or 0

    def fill(self, array: Array, byte: int, *, delay: float = 0.001) -> None:
        """Runs a kernel that fills an array after a delay in seconds."""
        self.run("fill", writes=[(array.address, array.nbytes)], byte=byte, delay=delay)

    def run(
        self,
        name: str,
        *,
        reads: list[tuple[int, int]] | None = None,
        writes: list[tuple[int, int]] | None = None,
        byte: int = 0,
        expect: int = -1,
        delay: float = 0.001,
    ) -> None:
        """Runs a kernel that reads and fills ranges, each an address and its bytes, after a delay in seconds. All
        bytes that it reads must be `expect`, unless `expect` is negative.
        """
        ranges = [(_Range * len(it))(*it) for it in (reads or [], writes or [])]
        counted = [part for it in ranges for part in (it, len(it))]
        kernel = _Kernel(name.encode(), *counted, byte, expect, int(delay * 1e9))
        with self._driver.current(self._device):
            self._driver.call("fakecuda_launch", c_size_t(self.cuda_stream), byref(kernel))

    def copy(self, array: Array, data: bytes) -> None:
        """Copies bytes of the host to the beginning of an array."""
        with self._driver.current(self._device):
            self._driver.call(
                "cuMemcpyAsync", c_uint64(array.address), data, c_size_t(len(data)), c_void_p(self.cuda_stream)
            )

    def synchronize(self) -> None:
        with self._driver.current(self._device):
            self._driver.call("cuStreamSynchronize", c_void_p(self.cuda_stream))


class Event:
    """An event, as torch shows its own."""

    def __init__(self, driver: Driver, stream: Stream, device: int = 0) -> None:
        handle = c_void_p()
        with driver.current(device):
            driver.call("cuEventCreate", byref(handle), c_uint(2))
            driver.call("cuEventRecord", handle, c_void_p(stream.cuda_stream))
        self.cuda_event = handle.value or 0


class _Current:
    def __init__(self, driver: Driver, device: int) -> None:
        self._driver, self._device = driver, device

    def __enter__(self) -> None:
        context = c_void_p()
        self._driver.call("cuDevicePrimaryCtxRetain", byref(context), c_int(self._device))
        self._driver.call("cuCtxPushCurrent_v2", context)

    def __exit__(self, *_: object) -> None:
        self._driver.call("cuCtxPopCurrent_v2", byref(c_void_p()))


class Driver:
    """The fake driver, which kvferry loads as well."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(LIBRARY), mode=os.RTLD_NOW | os.RTLD_LOCAL)
        self.call("cuInit", c_uint(0))

    def call(self, name: str, *args: object) -> None:
        code = self._library[name](*args)
        assert code == 0, f"{name} returned {code}"

    def current(self, device: int) -> _Current:
        return _Current(self, device)

    def set(self, key: str, value: str) -> None:
        self.call("fakecuda_set", key.encode(), value.encode())

    def hold(self, engines: int) -> None:
        self.call("fakecuda_hold", c_uint(engines))

    def fault(self, name: str, at: int = 1, count: int = 1) -> None:
        """Lets the `at`-th occasion from now, 1 being the next, and those after it fail, `count` in all."""
        self.call("fakecuda_fault", name.encode(), c_uint64(at), c_uint64(count))

    def clear_faults(self) -> None:
        """Switches all faults off. What they stopped goes on, and errors that stick are gone."""
        self.call("fakecuda_clear_faults")

    def access(self, address: int, nbytes: int, *, write: bool) -> None:
        """Tells the checker of races that the host uses memory now: an operation that still runs is a finding."""
        self.call("fakecuda_host_access", c_void_p(address), c_size_t(nbytes), c_int(write))

    def counter(self, name: str) -> int:
        value = c_uint64()
        self.call("fakecuda_counter", name.encode(), byref(value))
        return value.value

    def findings(self) -> str:
        needed = c_size_t()
        text = ctypes.create_string_buffer(1 << 16)
        self.call("fakecuda_findings", text, c_size_t(len(text)), byref(needed))
        return text.value.decode()

    def clear_findings(self) -> None:
        self.call("fakecuda_clear_findings")
