"""Pages go straight between SGLang's host pools and the store, or through tensors, and keep their bytes."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo

from kvferry_e2e.report import ensure
from kvferry_e2e.sglang.hicache import pools
from kvferry_e2e.sglang.hicache.kit import Kit, expect_nothing, expect_pages, keys, store_pages

_MHA = ("page_first", "page_first_direct", "page_head", "layer_first")
_MLA = ("page_first", "page_first_direct", "layer_first")


def run(kit: Kit) -> None:
    for layout in _MHA:
        with kit.check(f"every byte of every page comes back: MHA, {layout}") as folder:
            _round_trip(kit, folder, pools.mha(layout=layout))
    for layout in _MLA:
        with kit.check(f"every byte of every page comes back: MLA, {layout}") as folder:
            _round_trip(kit, folder, pools.mla(layout=layout), is_mla_model=True)
    with kit.check("every byte of every page comes back where SGLang may move a pool's pages") as folder:
        pool = pools.mha()
        # As pools that share one allocation: their places are asked for in each call.
        pool.shared_allocation_domain = object()
        _round_trip(kit, folder, pool)
    with kit.check("pages with a tier in host memory come back") as folder:
        _round_trip(kit, folder, pools.mha(), extra={"host_gib": 0.0625})
    with kit.check("a page that is missing is False, and those behind it are read") as folder:
        _gaps(kit, folder)
    with kit.check("SGLang's controller stores and reads pages, in both interfaces") as folder:
        _controller(kit, folder)
    with kit.check("the interface that copies returns tensors, and is apart from the other one") as folder:
        _copies(kit, folder)
    with kit.check("two threads store and read at once") as folder:
        _threads(kit, folder)
    with kit.check("another process finds the pages, and so does one after it") as folder:
        _processes(kit, folder)


def _round_trip(kit: Kit, folder: Path, pool: Any, **config: Any) -> None:
    storage, hashes = kit.storage(folder, pool, **config), keys(24)
    expect_nothing(storage, pool, hashes, "an empty store")
    expected = store_pages(storage, pool, hashes[:20])
    expect_pages(storage, pool, hashes[:20], expected)
    ensure(storage.batch_exists(hashes) == 20, "pages are found that were not stored")
    # Stored once: the same pages again are known.
    before = storage.store_stats()
    store_pages(storage, pool, hashes[:20])
    ensure(storage.store_stats()["blocks"] == before["blocks"], "the same pages were stored twice")
    stats = storage.get_stats()
    ensure(sum(stats.backup_pgs) == 40 and sum(stats.prefetch_pgs) >= 20, f"{stats}")
    ensure(not storage.get_stats().backup_pgs, "the counts are taken twice")


def _gaps(kit: Kit, folder: Path) -> None:
    pool, hashes = pools.mha(), keys(9)
    storage = kit.storage(folder, pool)
    pools.fill(pool, 3)
    here = [0, 1, 4, 5, 8]
    for at in here:
        extra = HiCacheStorageExtraInfo(prefix_keys=hashes[:at])
        ensure(storage.batch_set_v1([hashes[at]], pools.indices(pool, [at]), extra) == [True], "not stored")
    expected = [pools.page(pool, at) for at in range(9)]
    ensure(storage.batch_exists(hashes) == 2, "a page behind a gap counts as found")
    pools.fill(pool, 4)
    read = storage.batch_get_v1(hashes, pools.indices(pool, list(range(20, 29))))
    ensure(read == [at in here for at in range(9)], f"{read}")
    for at in here:
        ensure(pools.page(pool, 20 + at) == expected[at], f"page {at} has other bytes")


def _controller(kit: Kit, folder: Path) -> None:
    hashes = keys(6)
    for zero_copy in (1, 0):
        pool = pools.mha()
        storage = kit.storage(folder, pool, extra={"interface_v1": zero_copy})
        controller = SimpleNamespace(storage_backend=storage, storage_host_pool=pool, page_size=pool.page_size)
        operation = SimpleNamespace(request_id="r", is_terminated=lambda: False)
        store = HiCacheController._page_set_zero_copy if zero_copy else HiCacheController._generic_page_set
        load = HiCacheController._page_get_zero_copy if zero_copy else HiCacheController._generic_page_get
        pools.fill(pool, 5)
        expected = [pools.page(pool, at) for at in range(6)]
        ensure(storage.batch_exists(hashes) == 0, "pages of the other interface are found")
        ensure(store(controller, hashes, pools.indices(pool, list(range(6)))), "the pages are not stored")
        ensure(storage.batch_exists(hashes) == 6, "the pages are not found")
        pools.fill(pool, 6)
        ensure(load(controller, operation, hashes, pools.indices(pool, list(range(30, 36)))) == 6, "not all are read")
        for at in range(6):
            ensure(pools.page(pool, 30 + at) == expected[at], f"page {at} has other bytes")


def _copies(kit: Kit, folder: Path) -> None:
    pool = pools.mha()
    storage = kit.storage(folder, pool)
    value = torch.randn(2, 3, 5)
    ensure(storage.set("a key that is no digest", value), "not stored")
    ensure(storage.exists("a key that is no digest"), "not found")
    ensure(not storage.exists("another key"), "found what was not stored")
    target = torch.zeros(2, 3, 5)
    ensure(storage.get("a key that is no digest", target) is target and torch.equal(target, value), "other values")
    turned = torch.zeros(5, 3, 2).permute(2, 1, 0)
    ensure(storage.get("a key that is no digest", turned) is turned and torch.equal(turned, value), "other values")
    ensure(storage.get("a key that is no digest", torch.zeros(7)) is None, "a page of another size was read")
    ensure(storage.get("another key", target) is None, "read what was not stored")
    ensure(storage.batch_exists(keys(1)) == 0, "a page of the other interface")
    many = {key: torch.randn(64) for key in keys(5)}
    ensure(storage.batch_set(list(many), list(many.values())), "not stored")
    found = storage.batch_get([*many, "another key"], [torch.zeros(64) for _ in range(6)])
    ensure(found[5] is None, "read what was not stored")
    for one, value in zip(found[:5], many.values(), strict=True):
        ensure(torch.equal(one, value), "other values")


def _threads(kit: Kit, folder: Path) -> None:
    pool = pools.mha(pages=256)
    storage, hashes = kit.storage(folder, pool), keys(64)
    pools.fill(pool, 8)
    expected = [pools.page(pool, at) for at in range(64)]
    wrong: list[str] = []

    def back_up() -> None:
        for at in range(0, 64, 4):
            if not all(storage.batch_set_v1(hashes[at : at + 4], pools.indices(pool, list(range(at, at + 4))))):
                wrong.append(f"pages from {at} on are not stored")

    def prefetch() -> None:
        order, seen = random.Random(1), 0
        while seen < 64:
            seen = storage.batch_exists(hashes)
            at = order.randrange(61)
            read = storage.batch_get_v1(hashes[at : at + 4], pools.indices(pool, list(range(100, 104))))
            for one, here in enumerate(read):
                if here and pools.page(pool, 100 + one) != expected[at + one]:
                    wrong.append(f"page {at + one} has other bytes")
            if wrong:
                return

    threads = [threading.Thread(target=it) for it in (back_up, prefetch)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    ensure(not any(thread.is_alive() for thread in threads), "a thread waits")
    ensure(not wrong, "; ".join(wrong[:3]))


_CHILD = """
import sys
from pathlib import Path
from kvferry_e2e.report import Report
from kvferry_e2e.sglang.hicache import kit, pools
one = kit.Kit(Report(), Path(sys.argv[1]))
pool = pools.mha()
storage = one.storage(sys.argv[2], pool)
if sys.argv[3] == "store":
    kit.store_pages(storage, pool, kit.keys(12), seed=9)
    print("stored", flush=True)
    sys.stdin.read()
else:
    pools.fill(pool, 9)
    kit.expect_pages(storage, pool, kit.keys(12), [pools.page(pool, at) for at in range(12)])
    print("read", flush=True)
storage.close()
"""


def _processes(kit: Kit, folder: Path) -> None:
    def child(what: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", _CHILD, str(kit.models), str(folder), what]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    pool = pools.mha()
    with child("store") as one:
        assert one.stdout is not None
        assert one.stdin is not None
        ensure(one.stdout.readline().strip() == "stored", "the other process has not stored its pages")
        storage = kit.storage(folder, pool)
        pools.fill(pool, 9)
        expected = [pools.page(pool, at) for at in range(12)]
        expect_pages(storage, pool, keys(12), expected)
        # Not asked to close: it is killed.
        one.kill()
    storage.close()
    out, _ = child("read").communicate(timeout=120)
    ensure(out.strip() == "read", f"a later process has not read the pages: {out}")
