"""Models with several pools: which prefixes can be restored, and the bytes of all pools."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

from kvferry_e2e.report import ensure
from kvferry_e2e.sglang.hicache import pools
from kvferry_e2e.sglang.hicache.kit import Kit, keys, store_pages

KV, MAMBA, SWA = PoolName.KV, PoolName.MAMBA, PoolName.SWA


def run(kit: Kit) -> None:
    with kit.check("hybrid pools: every byte of KV, Mamba states and windows comes back") as folder:
        _bytes(kit, folder)
    with kit.check("hybrid pools: a prefix is found where all pools can go on from it") as folder:
        _policies(kit, folder)
    with kit.check("hybrid pools: an anchor without memory counts pages only") as folder:
        _anchor(kit, folder)
    with kit.check("hybrid pools: ranks of MLA have Mamba states of their own") as folder:
        _mamba_of_mla(kit, folder)


def _transfer(name: Any, pool: Any, hashes: list[str], numbers: list[int], **more: Any) -> PoolTransfer:
    return PoolTransfer(name=name, host_indices=pools.indices(pool, numbers), keys=hashes, **more)


def _bytes(kit: Kit, folder: Path) -> None:
    kv, mamba, swa, hashes = pools.mha(), pools.mamba(), pools.mha(layers=2, heads=2), keys(6)
    storage = kit.storage(folder, kv, {KV: kv, MAMBA: mamba, SWA: swa})
    store_pages(storage, kv, hashes)
    pools.fill(mamba, 2)
    pools.fill(swa, 3)
    last, window = [pools.page(mamba, 4)], [pools.page(swa, at) for at in range(2)]
    written = [_transfer(MAMBA, mamba, hashes[5:], [4]), _transfer(SWA, swa, hashes[4:], [0, 1])]
    stored = storage.batch_set_v2(written)
    ensure(stored == {MAMBA: [True], SWA: [True, True]}, f"{stored}")
    pools.fill(mamba, 20)
    pools.fill(swa, 30)
    wanted = [_transfer(MAMBA, mamba, hashes[5:], [9]), _transfer(SWA, swa, hashes[3:], [40, 41, 42])]
    read = storage.batch_get_v2(wanted)
    ensure(read == {MAMBA: [True], SWA: [False, True, True]}, f"{read}")
    ensure(pools.page(mamba, 9) == last[0], "the state has other bytes")
    ensure([pools.page(swa, at) for at in (41, 42)] == window, "the window has other bytes")
    short = PoolTransfer(name=SWA, host_indices=pools.indices(swa, [1]), keys=hashes[4:])
    ensure(storage.batch_get_v2([short]) == {SWA: [False, False]}, "indices of one page are those of two")
    ensure(storage.batch_set_v2([PoolTransfer(name=SWA, keys=hashes[4:])]) == {SWA: [False, False]}, "no indices")


def _policies(kit: Kit, folder: Path) -> None:
    kv, mamba, swa, indexer, hashes = pools.mha(), pools.mamba(), pools.mha(layers=2), pools.mha(layers=1), keys(10)
    storage = kit.storage(folder, kv, {MAMBA: mamba, SWA: swa, PoolName.INDEXER: indexer})
    store_pages(storage, kv, hashes[:8])
    for name, pool, numbers in (
        (MAMBA, mamba, [1, 4, 6]),
        (SWA, swa, [2, 3, 4, 6]),
        (PoolName.INDEXER, indexer, [*range(7)]),
    ):
        storage.batch_set_v2([_transfer(name, pool, [hashes[at] for at in numbers], numbers)])
    trailing, whole = PoolHitPolicy.TRAILING_PAGES, PoolHitPolicy.ALL_PAGES

    def found(*transfers: PoolTransfer) -> tuple[int, dict[str, int], list[int]]:
        result = storage.batch_exists_v2(hashes, list(transfers))
        extra = {str(name): pages for name, pages in result.extra_pool_hit_pages.items()}
        return result.kv_hit_pages, extra, result.restorable_prefix_pages

    states = PoolTransfer(name=MAMBA, keys=hashes[:1], hit_policy=trailing)
    window = PoolTransfer(name=SWA, keys=hashes[:2], hit_policy=trailing)
    index = PoolTransfer(name=PoolName.INDEXER, hit_policy=whole)
    expected = {
        "KV alone": ((), (8, {"kv": 8}, [*range(1, 9)])),
        "states": ((states,), (7, {"kv": 8, "mamba": 7}, [2, 5, 7])),
        "a window": ((window,), (5, {"kv": 8, "swa": 5}, [4, 5])),
        "all pages": ((index,), (7, {"kv": 8, "indexer": 7}, [*range(1, 8)])),
        "all": ((states, window, index), (5, {"kv": 8, "mamba": 7, "swa": 5, "indexer": 7}, [5])),
    }
    for what, (transfers, result) in expected.items():
        seen = found(*transfers)
        ensure(seen == result, f"{what}: {seen} instead of {result}")
    groups = PoolTransfer(
        name=PoolName.INDEXER, keys=hashes, hit_policy=PoolHitPolicy.BLOCK_GROUPS, block_pages=2, group_pages=3
    )
    seen = found(groups)
    ensure(seen == (8, {"kv": 8, "indexer": 4}, [*range(1, 9)]), f"two whole groups of three: {seen}")
    ensure(storage.batch_exists_v2(keys(3, "other"), [index]).kv_hit_pages == 0, "an unknown prompt is found")
    missing = PoolTransfer(name=PoolName.DRAFT, hit_policy=whole)
    ensure(storage.batch_exists_v2(hashes, [missing]).kv_hit_pages == 0, "a pool that is not registered is found")


def _anchor(kit: Kit, folder: Path) -> None:
    """As DeepSeek V4's: the bytes are in other pools."""
    anchor = SimpleNamespace(kv_buffer=None, page_size=16, layout="page_first")
    side, hashes = pools.mla(layers=2), keys(5)
    name = PoolName.DEEPSEEK_V4_C4
    storage = kit.storage(folder, anchor, {name: side}, is_mla_model=True)
    ensure(storage.batch_exists(hashes) == 5, "an anchor has all pages")
    ensure(storage.batch_set_v1(hashes, None) == [True] * 5, "an anchor stores nothing and says so")
    ensure(storage.batch_get_v1(hashes, None) == [True] * 5, "an anchor reads nothing and says so")
    storage.batch_set_v2([_transfer(name, side, hashes[:3], [0, 1, 2])])
    result = storage.batch_exists_v2(hashes, [PoolTransfer(name=name)])
    ensure(result.kv_hit_pages == 3, f"{result}")


def _mamba_of_mla(kit: Kit, folder: Path) -> None:
    hashes, ranks = keys(2), []
    for rank in range(2):
        kv, mamba = pools.mla(), pools.mamba()
        storage = kit.storage(folder, kv, {MAMBA: mamba}, tp_rank=rank, tp_size=2, is_mla_model=True)
        pools.fill(mamba, rank)
        expected = pools.page(mamba, 1)
        ensure(storage.batch_set_v2([_transfer(MAMBA, mamba, hashes[:1], [1])]) == {MAMBA: [True]}, "not stored")
        ranks.append((storage, mamba, expected))
    for storage, mamba, expected in ranks:
        ensure(storage.batch_get_v2([_transfer(MAMBA, mamba, hashes[:1], [5])]) == {MAMBA: [True]}, "not read")
        ensure(pools.page(mamba, 5) == expected, "a rank has read the state of another one")
