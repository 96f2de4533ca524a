"""KV of the made-up model in memory of GPUs, on the fake driver (`crates/kvferry-fakecuda`).

A step computes by copies from pinned memory on its rank's stream. It reads by copies back, which are compared when a
later step was launched: a wait of the host at once would be an edge, and hide those that kvferry lacks.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from kvferry_e2e.contract.model import Caches, Sequence, number_of, value

# The environment variable that names the fake driver's file.
LIBRARY = "FAKECUDA_LIBRARY"
# Steps that may be launched before what one has read is compared.
LATE = 1
# Bytes of a piece of pinned memory.
CHUNK = 1 << 20
_LOCAL = threading.local()


class AnotherDriverError(Exception):
    """The process has a real driver."""


class _Location(ctypes.Structure):
    _fields_ = (("kind", c_int), ("id", c_int))


class _Attributes(ctypes.Structure):
    _fields_ = (("order", c_int), ("source", _Location), ("destination", _Location), ("flags", c_uint))


@dataclass(frozen=True)
class Stream:
    """A stream, as torch shows its own."""

    device: int
    cuda_stream: int


class Driver:
    """The fake driver, which kvferry finds in this process by its name."""

    def __init__(self, file: str) -> None:
        # torch looks for GPUs once. It must not find those of a driver that knows only what kvferry calls.
        if torch.cuda.device_count():
            raise AnotherDriverError
        self._library = ctypes.CDLL(file)
        if not hasattr(ctypes.CDLL("libcuda.so.1"), "fakecuda_set"):
            raise AnotherDriverError
        self.call("cuInit", c_uint(0))
        count = c_int()
        self.call("cuDeviceGetCount", byref(count))
        # Those of all engines so far, on which kvferry launches nothing.
        self.streams: set[int] = set()
        self.contexts: list[c_void_p] = []
        for device in range(count.value):
            self.contexts.append(c_void_p())
            self.call("cuDevicePrimaryCtxRetain", byref(self.contexts[-1]), c_int(device))

    def call(self, name: str, *args: object) -> None:
        code = getattr(self._library, name)(*args)
        if code:
            raise RuntimeError(f"{name} returned {code}")

    @contextmanager
    def on(self, device: int) -> Iterator[None]:
        self.call("cuCtxPushCurrent_v2", self.contexts[device])
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent_v2", byref(c_void_p()))

    def take_findings(self) -> list[str]:
        """What the checker of races has found since the last time."""
        text, needed = ctypes.create_string_buffer(1 << 20), c_size_t()
        self.call("fakecuda_findings", text, c_size_t(len(text)), byref(needed))
        self.call("fakecuda_clear_findings")
        return [finding for finding in text.value.decode().split("\n\n") if finding]


@functools.cache
def driver() -> Driver:
    return Driver(os.environ[LIBRARY])


def current_stream(device: int) -> Stream:
    """The stream on which the calling thread launches work, in the place of `torch.cuda.current_stream`."""
    stream: Stream = _LOCAL.stream
    assert stream.device == device, f"the rank of this thread is on GPU {stream.device}, not {device}"
    return stream


class DeviceTensor:
    """A view of memory of a GPU, with what a connector asks of torch's."""

    def __init__(self, like: torch.Tensor, device: int, address: int) -> None:
        """`like`: the same view of memory that does not exist."""
        self._strides, self._element = like.stride(), like.element_size()
        self._address, self._nbytes = address, like.untyped_storage().nbytes()
        self._offset = like.storage_offset() * self._element
        self.shape = tuple(like.shape)
        self.device = SimpleNamespace(type="cuda", index=device)

    def dim(self) -> int:
        return len(self.shape)

    def stride(self, axis: int | None = None) -> Any:
        return self._strides if axis is None else self._strides[axis]

    def element_size(self) -> int:
        return self._element

    def data_ptr(self) -> int:
        return self._address + self._offset

    def untyped_storage(self) -> Any:
        return SimpleNamespace(data_ptr=lambda: self._address, nbytes=lambda: self._nbytes)

    @property
    def row(self) -> int:
        """Bytes of a token's row, or of a state."""
        return int(self.shape[3]) * self._element

    def at(self, blocks: Any, heads: Any, rows: Any) -> Any:
        """The addresses of rows."""
        block, head, row = (stride * self._element for stride in self._strides[:3])
        return self.data_ptr() + blocks * block + heads * head + rows * row


@dataclass
class _Read:
    """Rows that a step reads, and the value that each has to have in all its elements."""

    what: str
    positions: np.ndarray
    expected: np.ndarray
    staged: np.ndarray

    def wrong(self) -> str | None:
        bad = (self.staged.view(np.int32).reshape(len(self.expected), -1) != self.expected[:, None]).any(axis=1)
        return f"{self.what}: wrong at {sorted(set(self.positions[bad].tolist()))[:4]}" if bad.any() else None


@dataclass
class _Step:
    reads: list[_Read] = field(default_factory=list)
    # Pinned memory that it copies from and to, and the bytes that the last piece has given.
    chunks: list[np.ndarray] = field(default_factory=list)
    used: int = 0
    has_launched: bool = False
    end: c_void_p = field(default_factory=c_void_p)


class DeviceCaches(Caches):
    """The KV of one rank in memory of a GPU, laid out by vLLM's own code."""

    def __init__(self, gpu: int, *parts: Any) -> None:
        self._driver = driver()
        self._gpu = gpu % len(self._driver.contexts)
        self._step, self._before = _Step(), deque[_Step]()
        self._spare: list[np.ndarray] = []
        self._pinned: list[int] = []
        # Rows that were read.
        self.compared = 0
        self._is_open = True
        handle = c_void_p()
        with self._driver.on(self._gpu):
            self._driver.call("cuStreamCreate", byref(handle), c_uint(1))
        self._stream = Stream(self._gpu, handle.value or 0)
        self._driver.streams.add(self._stream.cuda_stream)
        super().__init__(*parts)

    def _allocate(self, kv_cache_config: Any, layout: KVCacheLayout) -> dict[str, Any]:
        views = allocate_kv_cache(kv_cache_config, torch.device("meta"), layout)
        self.nbytes = next(iter(views.values())).untyped_storage().nbytes()
        address = c_uint64()
        with self._driver.on(self._gpu):
            self._driver.call("cuMemAlloc_v2", byref(address), c_size_t(self.nbytes))
            stream = c_void_p(self._stream.cuda_stream)
            self._driver.call("cuMemsetD8Async", address, c_ubyte(0), c_size_t(self.nbytes), stream)
            self._driver.call("cuStreamSynchronize", stream)
        self.address = address.value
        return {layer: DeviceTensor(view, self._gpu, self.address) for layer, view in views.items()}

    def begins_step(self) -> None:
        _LOCAL.stream = self._stream

    def ends_step(self) -> list[str]:
        if self._step.has_launched:
            with self._driver.on(self._gpu):
                self._driver.call("cuEventCreate", byref(self._step.end), c_uint(2))
                self._driver.call("cuEventRecord", self._step.end, c_void_p(self._stream.cuda_stream))
            self._before.append(self._step)
            self._step = _Step()
        return self._compared(LATE)

    def settle(self) -> list[str]:
        return [*self.ends_step(), *self._compared(0)]

    def _compared(self, left: int) -> list[str]:
        """What steps have read and was wrong, without the last ones."""
        wrong: list[str] = []
        while len(self._before) > left:
            step = self._before.popleft()
            with self._driver.on(self._gpu):
                self._driver.call("cuEventSynchronize", step.end)
                self._driver.call("cuEventDestroy_v2", step.end)
            wrong += [found for read in step.reads if (found := read.wrong()) is not None]
            self.compared += sum(len(read.expected) for read in step.reads)
            self._spare += step.chunks
        return wrong

    def close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        self.settle()
        with self._driver.on(self._gpu):
            self._driver.call("cuStreamDestroy_v2", c_void_p(self._stream.cuda_stream))
            self._driver.call("cuMemFree_v2", c_uint64(self.address))
            for address in self._pinned:
                self._driver.call("cuMemFreeHost", c_void_p(address))

    def zero(self, blocks: list[int]) -> None:
        self._step.has_launched |= bool(blocks)
        stream = c_void_p(self._stream.cuda_stream)
        with self._driver.on(self._gpu):
            for tensor in self.tensors.values():
                for block, head in ((block, head) for block in blocks for head in range(tensor.shape[1])):
                    # The rows of a head lie side by side in the one layout that the executor offers.
                    assert tensor.shape[2] == 1 or tensor.stride(2) == tensor.shape[3]
                    at, nbytes = tensor.at(block, head, 0), tensor.shape[2] * tensor.row
                    self._driver.call("cuMemsetD8Async", c_uint64(at), c_ubyte(0), c_size_t(nbytes), stream)

    def compute(self, sequence: Sequence, table: list[list[int]], begin: int, end: int, layer: str) -> None:
        if isinstance(self._spec(layer), MambaSpec):
            # A step leaves the state after its last token only.
            begin = end - 1
        addresses, values, _ = self._rows(sequence, table, begin, end, layer)
        if len(addresses):
            row = self.tensors[layer].row
            staged = self._take(len(addresses) * row)
            staged.view(np.int32).reshape(len(addresses), -1)[:] = values[:, None]
            self._copy(addresses, row, staged, to_device=True)

    def wrong(self, sequence: Sequence, table: list[list[int]], computed: int, layer: str) -> str | None:
        """Reads what the host's caches compare at once. `ends_step` and `settle` say what was wrong."""
        spec = self._spec(layer)
        begin = max(0, computed - spec.sliding_window + 1) if isinstance(spec, SlidingWindowSpec) else 0
        if isinstance(spec, MambaSpec):
            begin = max(0, computed - 1)
        addresses, values, positions = self._rows(sequence, table, begin, computed, layer)
        if len(addresses):
            row = self.tensors[layer].row
            staged = self._take(len(addresses) * row)
            what = f"{layer} on GPU {self._gpu}, {computed} tokens of a prompt of {sequence.prompt}"
            self._step.reads.append(_Read(what, positions, values, staged))
            self._copy(addresses, row, staged, to_device=False)
        return None

    def _rows(
        self, sequence: Sequence, table: list[list[int]], begin: int, end: int, layer: str
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of the rows of some tokens, or of the state after one: addresses, rising, their values and positions."""
        number, spec, tensor = self.group(layer), self._spec(layer), self.tensors[layer]
        hashes = sequence.hashes(begin, end)
        if isinstance(spec, MambaSpec):
            positions = np.arange(begin, end)
            blocks = np.array([table[number][at // spec.block_size] for at in positions], dtype=np.int64)
            return tensor.at(blocks, 0, 0), np.asarray(hashes), positions
        at, held, offsets = self._slots(table[number], spec.block_size, begin, end)
        positions, blocks = np.asarray(at), np.asarray(held)
        assert not len(blocks) or blocks.min() > 0, "a token is in the null block"
        heads = self._heads_of(layer, spec)
        parts = [tensor.at(blocks, local, np.asarray(offsets)) for local in range(len(heads))]
        values = [np.asarray(value(hashes[at - begin], number_of(layer), head)) for head in heads]
        addresses = np.concatenate(parts)
        order = np.argsort(addresses)
        return addresses[order], np.concatenate(values)[order], np.tile(positions, len(heads))[order]

    def _take(self, nbytes: int) -> np.ndarray:
        """Pinned memory, until the step's reads are compared."""
        step = self._step
        if not step.chunks or step.used + nbytes > len(step.chunks[-1]):
            step.chunks.append(self._chunk(max(CHUNK, nbytes)))
            step.used = 0
        step.used += nbytes
        return step.chunks[-1][step.used - nbytes : step.used]

    def _chunk(self, nbytes: int) -> np.ndarray:
        for number, chunk in enumerate(self._spare):
            if len(chunk) >= nbytes:
                return self._spare.pop(number)
        address = c_uint64()
        with self._driver.on(self._gpu):
            self._driver.call("cuMemAllocHost_v2", byref(address), c_size_t(nbytes))
        self._pinned.append(address.value)
        return np.frombuffer((c_ubyte * nbytes).from_address(address.value), dtype=np.uint8)

    def _copy(self, addresses: np.ndarray, row: int, staged: np.ndarray, *, to_device: bool) -> None:
        """Launches the copies of rows, which are side by side in pinned memory, as one batch. Rows that are neighbours
        on the GPU, too, are one copy of it.
        """
        self._step.has_launched = True
        starts = np.concatenate(([0], np.flatnonzero(np.diff(addresses) != row) + 1))
        lens = (np.diff(np.append(starts, len(addresses))) * row).astype(np.uint64)
        there = addresses[starts].astype(np.uint64)
        here = (staged.ctypes.data + starts * row).astype(np.uint64)
        target, source = (there, here) if to_device else (here, there)
        in_order, first, failed = _Attributes(order=1), c_size_t(0), c_size_t()
        with self._driver.on(self._gpu):
            self._driver.call(
                "cuMemcpyBatchAsync",
                *(c_void_p(it.ctypes.data) for it in (target, source, lens)),
                c_size_t(len(starts)),
                byref(in_order),
                byref(first),
                c_size_t(1),
                byref(failed),
                c_void_p(self._stream.cuda_stream),
            )
