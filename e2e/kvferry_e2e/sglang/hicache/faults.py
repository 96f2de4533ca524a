"""What goes wrong costs hits: no exception reaches SGLang's threads, and no wrong byte its pools."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageFailureInjector, PoolName, PoolTransfer

from kvferry_e2e.report import ensure
from kvferry_e2e.sglang.hicache import pools
from kvferry_e2e.sglang.hicache.kit import Kit, expect_nothing, expect_pages, keys, store_pages


def run(kit: Kit) -> None:
    with kit.check("a damaged page is missed, and the others are read") as folder:
        _damage(kit, folder)
    with kit.check("a store without space stores what fits, and says which pages") as folder:
        _full(kit, folder)
    with kit.check("SGLang's fault injector: pages are right or missed") as folder:
        _injected(kit, folder)
    with kit.check("wrong arguments are misses, each cause is logged once") as folder:
        _wrong_arguments(kit, folder)
    with kit.check("wrong settings end the start and say which; a store that can't be opened does not") as folder:
        _settings(kit, folder)
    with kit.check("after close, calls are misses") as folder:
        _closed(kit, folder)


def _flip(folder: Path, wanted: bytes) -> int:
    """Changes one bit in each place of the store where these bytes are."""
    flipped = 0
    for file in folder.rglob("*"):
        data = file.read_bytes() if file.is_file() else b""
        at = data.find(wanted)
        while at >= 0:
            with open(file, "r+b") as damaged:
                damaged.seek(at + len(wanted) // 2)
                byte = damaged.read(1)[0]
                damaged.seek(at + len(wanted) // 2)
                damaged.write(bytes([byte ^ 1]))
            flipped += 1
            at = data.find(wanted, at + 1)
    return flipped


def _damage(kit: Kit, folder: Path) -> None:
    pool, hashes = pools.mha(), keys(6)
    storage = kit.storage(folder, pool)
    expected = store_pages(storage, pool, hashes)
    # The first piece of page 2.
    ensure(_flip(folder, expected[2][:4096]) > 0, "the page is not in the files of the store")
    pools.fill(pool, 6)
    read = storage.batch_get_v1(hashes, pools.indices(pool, list(range(40, 46))))
    ensure(read == [at != 2 for at in range(6)], f"{read}")
    for at in (0, 1, 3, 4, 5):
        ensure(pools.page(pool, 40 + at) == expected[at], f"page {at} has other bytes")
    # Computed again, it is stored again.
    pools.fill(pool, 1)
    ensure(storage.batch_set_v1(hashes[2:3], pools.indices(pool, [2])) == [True], "not stored again")
    expect_pages(storage, pool, hashes, expected)


def _full(kit: Kit, folder: Path) -> None:
    pool = pools.mha(pages=512)
    storage = kit.storage(folder, pool, extra={"disk_gib": 16 / 1024, "segment_mib": 1, "blocks_max": 4096})
    pools.fill(pool, 4)
    expected = [pools.page(pool, at) for at in range(512)]
    hashes = keys(512)
    for at in range(0, 512, 128):
        said = storage.batch_set_v1(hashes[at : at + 128], pools.indices(pool, list(range(at, at + 128))))
        ensure(len(said) == 128, f"{len(said)} answers")
    capacity = 16 << 20
    here = sum(storage.batch_exists([key]) for key in hashes)
    ensure(0 < here * len(expected[0]) <= capacity, f"{here} pages of {len(expected[0])} bytes in {capacity}")
    pools.fill(pool, 5)
    read = storage.batch_get_v1(hashes, pools.indices(pool, list(range(512))))
    ensure(any(read) and not all(read), f"{sum(read)} of 512 pages are read")
    for at in range(512):
        ensure(not read[at] or pools.page(pool, at) == expected[at], f"page {at} has other bytes")


def _injected(kit: Kit, folder: Path) -> None:
    os.environ["SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE"] = "0.5"
    os.environ["SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY"] = "0.001"
    try:
        pool = pools.mha()
        storage = kit.storage(folder, pool)
    finally:
        del os.environ["SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE"]
        del os.environ["SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY"]
    ensure(isinstance(storage, HiCacheStorageFailureInjector), f"the factory made a {type(storage).__name__}")
    hashes, hits, misses = keys(40), 0, 0
    pools.fill(pool, 3)
    expected = [pools.page(pool, at) for at in range(40)]
    for at in range(40):
        storage.batch_set_v1([hashes[at]], pools.indices(pool, [at]))
    for at in range(40):
        (read,) = storage.batch_get_v1([hashes[at]], pools.indices(pool, [50]))
        hits, misses = hits + read, misses + (not read)
        ensure(not read or pools.page(pool, 50) == expected[at], f"page {at} has other bytes")
    ensure(hits and misses, f"{hits} hits and {misses} misses")


def _wrong_arguments(kit: Kit, folder: Path) -> None:
    pool, hashes = pools.mha(), keys(3)
    storage = kit.storage(folder, pool)
    kit.logged.clear()
    beyond = torch.arange(pool.size, pool.size + 48)
    for _ in range(3):
        ensure(storage.batch_set_v1(hashes, beyond) == [False] * 3, "memory outside of the pool was stored")
        ensure(storage.batch_get_v1(hashes, beyond) == [False] * 3, "memory outside of the pool was written")
        ensure(storage.batch_get_v1(hashes, torch.arange(16)) == [False] * 3, "indices of one page for three")
        ensure(storage.batch_set_v1(hashes, None) == [False] * 3, "no indices")
        ensure(storage.set("key", None) is False, "no value")
        ensure(storage.get("key") is None, "no tensor")
        ensure(storage.batch_set(hashes, None) is False, "no values")
        unknown = PoolTransfer(name=PoolName.DRAFT, keys=hashes, host_indices=torch.arange(48))
        ensure(storage.batch_get_v2([unknown]) == {PoolName.DRAFT: [False] * 3}, "a pool that is not registered")
    ensure(storage.batch_set_v1([], torch.arange(0)) == [], "no pages")
    twice = {line for line in kit.logged if kit.logged.count(line) > 1}
    ensure(len(kit.logged) == 8 and not twice, f"{len(kit.logged)} warnings: {kit.logged}")


def _settings(kit: Kit, folder: Path) -> None:
    for extra, expected in (({"disk": None}, "disk"), ({"disc": "x"}, "'disc'"), ({"disk_gib": "much"}, "disk_gib")):
        try:
            kit.storage(folder, pools.mha(), extra=extra)
        except ValueError as error:
            ensure(expected in str(error), f"{extra}: {error}")
        else:
            ensure(False, f"{extra} is taken")
    for name in ("s3://bucket/model", "no/where"):
        try:
            kit.storage(folder, pools.mha(), model_name=name)
        except ValueError as error:
            ensure("set model" in str(error), f"{name}: {error}")
        else:
            ensure(False, f"weights without a name are taken: {name}")
        kit.storage(folder, pools.mha(), model_name=name, extra={"model": "named"}).close()
    folder.parent.joinpath("file").write_text("")
    kit.logged.clear()
    pool, hashes = pools.mha(), keys(2)
    storage = kit.storage(folder.parent / "file" / "store", pool)
    expect_nothing(storage, pool, hashes, "a store that can't be opened")
    ensure(storage.batch_set_v1(hashes, pools.indices(pool, [0, 1])) == [False] * 2, "stored nowhere")
    ensure(storage.get("key", torch.zeros(4)) is None and not storage.set("key", torch.zeros(4)), "stored nowhere")
    ensure(len(kit.logged) == 1 and "can't be opened" in kit.logged[0], f"{kit.logged}")


def _closed(kit: Kit, folder: Path) -> None:
    pool, hashes = pools.mha(), keys(3)
    storage = kit.storage(folder, pool)
    store_pages(storage, pool, hashes)
    storage.close()
    storage.close()
    expect_nothing(storage, pool, hashes, "a closed store")
    ensure(storage.batch_set_v1(hashes, pools.indices(pool, [0, 1, 2])) == [False] * 3, "stored nowhere")
    ensure(not storage.exists(hashes[0]) and storage.get(hashes[0], torch.zeros(4)) is None, "found nowhere")
    ensure(storage.store_stats() == {} and storage.clear() is True, "counts of a closed store")
    again = kit.storage(folder, pool)
    ensure(again.batch_exists(hashes) == 3, "the pages are gone")
