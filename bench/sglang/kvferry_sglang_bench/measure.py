"""Runs in SGLang's environment. All take turns: in each round, each stores the same pages of SGLang's host pool in a
new directory and reads them back, in a new random order.

`sglang` is `batch_set_v1` and `batch_get_v1` of `KVFerryStorage`; `store` is `kvferry.Store` on the same memory, which
is described to it beforehand; `file` is SGLang's file back-end, called as SGLang calls it.
"""

from __future__ import annotations

import hashlib
import random
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kvferry
from kvferry_e2e.report import Report, ensure
from kvferry_e2e.sglang.hicache import pools
from kvferry_e2e.sglang.hicache.kit import Kit
from kvferry_e2e.table import aligned
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.hicache_storage import STORAGE_BATCH_SIZE, HiCacheFile

# As SGLang: so many pages at once.
PAGES = STORAGE_BATCH_SIZE
PUT_BYTES = 64 << 20
CAPACITY_GIB = 2
OF_STORE, OF_FILE = 0.85, 2.0
# The first round does not count: it takes memory from the system.
WARM_UP = 1

# Seconds for all calls of a round: to store, and to read.
Times = tuple[float, float]


class Turn:
    """Calls of `PAGES` pages each, with keys of their own and the pool's same pages."""

    def __init__(self, pool: Any, page_bytes: int) -> None:
        self.pool = pool
        self.calls = max(1, PUT_BYTES // (PAGES * page_bytes))
        self.keys = [
            [hashlib.sha256(f"{call} {at}".encode()).hexdigest() for at in range(PAGES)] for call in range(self.calls)
        ]
        self.indices = pools.indices(pool, list(range(PAGES)))
        pools.fill(pool, 1)
        self.expected = [pools.page(pool, at) for at in range(PAGES)]

    def timed(self, put: Callable[[list[str]], bool], get: Callable[[list[str]], bool]) -> Times:
        spent = []
        for what in (put, get):
            began = time.perf_counter()
            done = [what(keys) for keys in self.keys]
            spent.append(time.perf_counter() - began)
            ensure(all(done), f"{done.count(False)} of {len(done)} calls have failed")
            if what is put:
                pools.fill(self.pool, 2)
        for at, expected in enumerate(self.expected):
            ensure(pools.page(self.pool, at) == expected, f"page {at} has other bytes")
        return spent[0], spent[1]


def by_sglang(turn: Turn, folder: Path) -> Times:
    kit = Kit(Report(), folder)
    storage = kit.storage(folder, turn.pool, extra={"disk_gib": CAPACITY_GIB, "model": "m"})
    try:
        return turn.timed(
            lambda keys: all(storage.batch_set_v1(keys, turn.indices)),
            lambda keys: all(storage.batch_get_v1(keys, turn.indices)),
        )
    finally:
        storage.close()


def by_store(turn: Turn, folder: Path) -> Times:
    agent = kvferry.Agent(listen="127.0.0.1:0", transports="local")
    with kvferry.Store(agent, str(folder), CAPACITY_GIB << 30) as store:
        space = store.space("m")
        storage = turn.pool.kv_buffer.untyped_storage()
        region = agent.register((storage.data_ptr(), storage.nbytes()), "none")
        pointers, sizes = turn.pool.get_page_buffer_meta(turn.indices)
        each = len(pointers) // PAGES
        pieces = [[pointer - region.addr for pointer in pointers[piece::each]] for piece in range(each)]
        memory = kvferry.Blocks(region, pieces[0], sizes[0])
        for piece in range(1, each):
            memory.add_pieces(region, pieces[piece], sizes[piece])
        hashes = {keys[0]: [bytes.fromhex(key) for key in keys] for keys in turn.keys}
        spent = turn.timed(
            lambda keys: space.put(hashes[keys[0]], memory).stored == PAGES,
            lambda keys: space.get(hashes[keys[0]], memory) == PAGES,
        )
    agent.unregister(region)
    agent.shutdown()
    return spent


def by_file(turn: Turn, folder: Path) -> Times:
    config = Kit(Report(), folder).config(folder)
    config.extra_config = None
    folder.mkdir()
    controller = SimpleNamespace(
        storage_backend=HiCacheFile(config, str(folder)), storage_host_pool=turn.pool, page_size=turn.pool.page_size
    )
    operation = SimpleNamespace(request_id="r", is_terminated=lambda: False)
    store, load = HiCacheController._generic_page_set, HiCacheController._generic_page_get
    return turn.timed(
        lambda keys: bool(store(controller, keys, turn.indices)),
        lambda keys: load(controller, operation, keys, turn.indices) == PAGES,
    )


KINDS: dict[str, Callable[[Turn, Path], Times]] = {"sglang": by_sglang, "store": by_store, "file": by_file}


def measured(layout: str, kib: int, rounds: int, folder: Path, chance: random.Random) -> dict[str, list[Times]]:
    # 64 KiB of float16 for each head.
    pool = pools.mha(layout=layout, layers=4, heads=kib // 64, head_dim=64, page_size=64, pages=PAGES + 1)
    turn = Turn(pool, kib << 10)
    times: dict[str, list[Times]] = {kind: [] for kind in KINDS}
    for number in range(rounds + WARM_UP):
        for kind in chance.sample(list(KINDS), len(KINDS)):
            at = folder / kind
            try:
                pools.fill(pool, 1)
                spent = KINDS[kind](turn, at)
            finally:
                shutil.rmtree(at, ignore_errors=True)
            if number >= WARM_UP:
                times[kind].append(spent)
    moved_gib = turn.calls * PAGES * kib / (1 << 20)
    for kind in KINDS:
        times[kind] = [(moved_gib / put, moved_gib / get) for put, get in times[kind]]
    return times


def main(folder: Path, rounds: int, layout: str, sizes: list[int]) -> int:
    chance, rows, short = random.Random(1), [], []
    work = folder / "kvferry-bench-sglang"
    work.mkdir(parents=True)
    try:
        for kib in sizes:
            speeds = measured(layout, kib, rounds, work, chance)
            for at, what in enumerate(("batch_set_v1", "batch_get_v1")):
                of = {kind: [speed[at] for speed in speeds[kind]] for kind in KINDS}
                row = [f"{what} {kib} KiB", *(f"{statistics.median(of[kind]):.2f}" for kind in KINDS)]
                for other, least in (("store", OF_STORE), ("file", OF_FILE)):
                    # Of the same round: what slows the machine for a while slows all.
                    ratio = statistics.median(a / b for a, b in zip(of["sglang"], of[other], strict=True))
                    row.append(f"{ratio:.2f} (>= {least})")
                    if ratio < least:
                        short.append(f"{what} {kib} KiB: {ratio:.2f} of {other}, {least} is required")
                rows.append(row)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(aligned(["GiB/s, medians", *KINDS, "of store", "of file"], rows))
    print(f"{rounds} rounds, {PAGES} pages a call, {layout}")
    print("\n".join(f"SHORT: {line}" for line in short) or "all as required", flush=True)
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], [int(it) for it in sys.argv[4:]]))
