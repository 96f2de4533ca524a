"""Stores of KV blocks on a local disk, driven through their own code as an engine calls them.

A *call* is what an engine asks for at once: blocks of one request. Of several calls, *at once* means that all are
submitted before the driver waits; *in turn* means that each ends before the next begins.

- `kvferry`: `kvferry.Store` over memory that the agent allocated. Puts are `put_async`, all at once. Gets are
  `get_async`, at once, or `get`, in turn.
- `kvferry-tier`, `vllm-fs`: see `tiers.py`.
- `lmcache-disk`: `LocalDiskBackend` with `LocalCPUBackend` as its memory; it has 4 writers and 4 readers. Puts are at
  once. A get blocks, so gets are in turn; the blocks of a call are read together.

What the driver does itself is outside the seconds: names of blocks and descriptions of their memory are made before,
bytes are compared after.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvferry_store_peers.content import Content

Order = Literal["at once", "in turn"]

# A store that has not completed a call by then has lost it.
PATIENCE_S = 300.0


class PeerError(Exception):
    """The store failed, or lost a block."""


class UnavailableError(Exception):
    """This can't be measured here."""


@dataclass(frozen=True)
class Call:
    """The blocks of a prompt from number `first` on. Blocks are named by numbers."""

    prompt: list[int]
    first: int = 0

    @property
    def blocks(self) -> list[int]:
        return self.prompt[self.first :]


@dataclass
class Spent:
    """By the store. The processor time is that of all threads of the process."""

    seconds: float = 0.0
    cpu_s: float = 0.0

    @contextmanager
    def timed(self) -> Iterator[None]:
        cpu_s, seconds = time.process_time(), time.perf_counter()
        yield
        self.seconds += time.perf_counter() - seconds
        self.cpu_s += time.process_time() - cpu_s


class Store(ABC):
    """A store in `folder`, with memory for `rows` blocks."""

    def __init__(self, folder: Path, block_bytes: int, rows: int, direct: bool, bound_bytes: int) -> None:
        self.folder, self.block_bytes, self.rows, self.direct = folder, block_bytes, rows, direct
        self.bound_bytes = bound_bytes
        self.content = Content(block_bytes)

    is_bounded: bool
    # In which orders gets are measured.
    orders: tuple[Order, ...]
    note: str

    @staticmethod
    @abstractmethod
    def version() -> str: ...

    @abstractmethod
    def look_up(self, prompt: Sequence[int], spent: Spent) -> int:
        """How many blocks the longest prefix has that can be got."""

    @abstractmethod
    def put(self, calls: list[Call], spent: Spent) -> int:
        """Returns how many blocks it refused."""

    @abstractmethod
    def get(self, calls: list[Call], order: Order, spent: Spent) -> None:
        """Fails unless each block is there, with its own bytes."""

    def end_request(self) -> None:  # noqa: B027 - not all stores hold something for a request
        """The request of the last look-up has its blocks."""

    @abstractmethod
    def close(self) -> None: ...


class Rows:
    """Memory as rows of one block."""

    def __init__(self, memory: Any, block_bytes: int) -> None:
        self._flat, self._block_bytes = memoryview(memory).cast("B"), block_bytes

    def __getitem__(self, row: int) -> memoryview:
        return self._flat[row * self._block_bytes : (row + 1) * self._block_bytes]


def digest(number: int) -> bytes:
    """What an engine's hash of a block is like."""
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


def blocks_of(calls: list[Call]) -> list[int]:
    return list(itertools.chain.from_iterable(call.blocks for call in calls))


def segment_bytes(bound_bytes: int, block_bytes: int) -> int:
    """By default a 256th of the capacity, which is too little for the blocks of a store as small as a bench's."""
    return max(max(bound_bytes // 256, min(8 * block_bytes, bound_bytes // 16)) >> 20 << 20, 1 << 20)


class Kvferry(Store):
    is_bounded = True
    orders = ("at once", "in turn")
    note = "a checksum per block, compared when it is read; segments are synced when they are full"

    def __init__(self, folder: Path, block_bytes: int, rows: int, direct: bool, bound_bytes: int) -> None:
        super().__init__(folder, block_bytes, rows, direct, bound_bytes)
        import kvferry

        self._blocks = kvferry.Blocks
        self._agent = kvferry.Agent(name="bench")
        self._region = self._agent.allocate(rows * block_bytes, "none")
        self._rows = Rows(self._region.memory(), block_bytes)
        self._store = kvferry.Store(
            self._agent,
            folder,
            bound_bytes,
            segment_bytes=segment_bytes(bound_bytes, block_bytes),
            direct="require" if direct else "off",
        )
        self._space = self._store.space("bench")

    @staticmethod
    def version() -> str:
        import kvferry

        return str(kvferry.__version__)

    def look_up(self, prompt: Sequence[int], spent: Spent) -> int:
        hashes = [digest(number) for number in prompt]
        with spent.timed():
            found: int = self._space.lookup(hashes)
        return found

    def put(self, calls: list[Call], spent: Spent) -> int:
        for row, number in enumerate(blocks_of(calls)):
            self.content.fill(self._rows[row], number)
        asked = self._described(calls)
        with spent.timed():
            pending = [self._space.put_async(hashes, blocks, first) for hashes, blocks, first in asked]
            done = [each.wait(PATIENCE_S) for each in pending]
        if any(put is None or put.failed for put in done):
            raise PeerError(f"a put failed: {done}")
        return sum(put.refused for put in done)

    def get(self, calls: list[Call], order: Order, spent: Spent) -> None:
        numbers = blocks_of(calls)
        for row in range(len(numbers)):
            self.content.clear(self._rows[row])
        asked = self._described(calls)
        with spent.timed():
            if order == "at once":
                pending = [self._space.get_async(hashes, blocks, first) for hashes, blocks, first in asked]
                got = [each.wait(PATIENCE_S) for each in pending]
            else:
                got = [self._space.get(hashes, blocks, first) for hashes, blocks, first in asked]
        if sum(read or 0 for read in got) != len(numbers):
            raise PeerError(f"blocks are missing: {got}")
        for row, number in enumerate(numbers):
            self.content.check(self._rows[row], number)

    def close(self) -> None:
        self._store.close()
        self._agent.shutdown()

    def _described(self, calls: list[Call]) -> list[tuple[list[bytes], Any, int]]:
        asked, row = [], 0
        for call in calls:
            offsets = [(row + at) * self.block_bytes for at in range(len(call.blocks))]
            blocks = self._blocks(self._region, offsets, self.block_bytes)
            asked.append(([digest(number) for number in call.prompt], blocks, call.first))
            row += len(offsets)
        return asked


class LmcacheDisk(Store):
    is_bounded = True
    orders = ("in turn",)
    note = (
        "writes the file in place; no fsync, no checksum; its index is in memory, so a restart loses all; I/O in Python"
    )

    def __init__(self, folder: Path, block_bytes: int, rows: int, direct: bool, bound_bytes: int) -> None:
        super().__init__(folder, block_bytes, rows, direct, bound_bytes)
        import torch
        from lmcache.utils import CacheEngineKey
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.memory_allocators.mixed_memory_allocator import MixedMemoryAllocator
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
        from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

        if direct and block_bytes % os.statvfs(folder).f_bsize:
            raise UnavailableError("O_DIRECT is for multiples of the file system's block")
        config = LMCacheEngineConfig.from_defaults(
            local_cpu=False,
            local_disk=str(folder),
            max_local_disk_size=bound_bytes / (1 << 30),
            extra_config={"use_odirect": direct},
        )
        self._engine_key, self._dtype = CacheEngineKey, torch.bfloat16
        # Keys and values of one layer, 256 tokens.
        self._shape = torch.Size([2, 1, 256, block_bytes // (2 * 256 * self._dtype.itemsize)])
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._cpu = LocalCPUBackend(config, memory_allocator=MixedMemoryAllocator(rows * block_bytes))
        self._disk = LocalDiskBackend(config, self._loop, self._cpu, dst_device="cpu")
        self._pinned: list[Any] = []
        self.note += f"; evicts by {config.cache_policy}"

    @staticmethod
    def version() -> str:
        from importlib.metadata import version

        return version("lmcache")

    def look_up(self, prompt: Sequence[int], spent: Spent) -> int:
        """As LMCache's engine: the blocks found are pinned until the request has them."""
        keys = [self._key(number) for number in prompt]
        with spent.timed():
            found: int = self._disk.batched_contains(keys, pin=True)
            self._disk.touch_cache()
        self._pinned = keys[:found]
        return found

    def put(self, calls: list[Call], spent: Spent) -> int:
        made = [[self._filled(number) for number in call.blocks] for call in calls]
        keys = [[self._key(number) for number in call.blocks] for call in calls]
        waiting, all_written = self._disk.disk_worker.put_tasks, threading.Event()

        def on_complete(_: Any) -> None:
            if not waiting:
                all_written.set()

        with spent.timed():
            for of, objects in zip(keys, made, strict=True):
                self._disk.batched_submit_put_task(of, objects, on_complete_callback=on_complete)
            # It has skipped a block that it has, or has no room for; then no callback comes.
            give_up = time.monotonic() + PATIENCE_S
            while waiting:
                all_written.wait(0.1)
                all_written.clear()
                if time.monotonic() > give_up:
                    raise PeerError(f"{len(waiting)} puts never ended")
        for held in itertools.chain(*made):
            held.ref_count_down()
        # LMCache does not report the blocks that it has skipped: they count as stored.
        return 0

    def get(self, calls: list[Call], order: Order, spent: Spent) -> None:
        # Nothing is held: the blocks that it returns are allocated from all of this.
        self._cpu.memory_allocator.buffer.zero_()
        keys = [[self._key(number) for number in call.blocks] for call in calls]
        with spent.timed():
            got = [self._disk.batched_get_blocking(of) for of in keys]
        for number, held in zip(blocks_of(calls), itertools.chain(*got), strict=True):
            if held is None:
                raise PeerError(f"block {number} is missing")
            self.content.check(held.byte_array, number)
            held.ref_count_down()

    def end_request(self) -> None:
        for key in self._pinned:
            self._disk.unpin(key)
        self._pinned = []

    def close(self) -> None:
        self._disk.close()
        self._cpu.memory_allocator.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _filled(self, number: int) -> Any:
        made = self._cpu.allocate(self._shape, self._dtype)
        self.content.fill(made.byte_array, number)
        return made

    def _key(self, number: int) -> Any:
        return self._engine_key("bench", 1, 0, int.from_bytes(digest(number)[:8], "little"), self._dtype)
