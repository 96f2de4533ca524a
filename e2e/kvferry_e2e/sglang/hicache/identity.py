"""Which engines share pages."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from kvferry._engine.identity.known import SGLANG, Settings, fields_of
from sglang.srt.server_args import ServerArgs

from kvferry_e2e.report import ensure
from kvferry_e2e.sglang.hicache import pools
from kvferry_e2e.sglang.hicache.kit import Kit, expect_nothing, expect_pages, keys, store_pages


@dataclass
class _Other:
    """An engine that must not find the pages of the first one."""

    what: str
    pool: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


def run(kit: Kit) -> None:
    with kit.check("each argument of the server is known, and as it comes none counts besides"):
        _arguments()
    with kit.check("other dtypes, layouts, models, weights, pages and parallelisms find nothing") as folder:
        _others(kit, folder)
    with kit.check("each rank of TP, PP and CP has pages of its own") as folder:
        _ranks(kit, folder)
    with kit.check("ranks share pages of MLA, and only the writer stores them") as folder:
        _mla(kit, folder)
    with kit.check("TP 1 and TP 2 share pages of page_head with tp_lcm_size") as folder:
        _heads(kit, folder)
    with kit.check("after clear, this engine finds nothing from before; others do") as folder:
        _clear(kit, folder)


def _arguments() -> None:
    arguments = ServerArgs(model_path="none")
    has = set(fields_of(arguments))
    new = sorted(it for it in has if not SGLANG.is_known(it))
    listed = {*SGLANG.named, *SGLANG.counted, *(it for names in SGLANG.harmless.values() for it in names)}
    gone = sorted(listed - has)
    ensure(not new and not gone, f"kvferry/_engine/identity/known.py does not know {new}, and SGLang has no {gone}")
    others = Settings(arguments, SGLANG).others()
    ensure(not others, f"arguments as they come count: {others}")


def _others(kit: Kit, folder: Path) -> None:
    pool, hashes = pools.mha(), keys(4)
    first = kit.storage(folder, pool)
    expected = store_pages(first, pool, hashes)
    renamed = folder.parent / "renamed"
    shutil.copytree(kit.models / "llama", renamed)
    changed = folder.parent / "changed"
    shutil.copytree(kit.models / "llama", changed)
    weights = changed / "model.safetensors"
    middle = weights.stat().st_size // 2
    # As a training step does: every value of a layer.
    data = bytearray(weights.read_bytes())
    for at in range(middle, middle + (1 << 20)):
        data[at] ^= 1
    weights.write_bytes(data)
    others = [
        _Other("another dtype of the same size", {"dtype": torch.bfloat16}),
        _Other("another dtype", {"dtype": torch.float32, "head_dim": 32}),
        _Other("another layout", {"layout": "page_first_direct"}),
        _Other("another layout of layers", {"layout": "layer_first"}),
        _Other("another page size", {"page_size": 32, "heads": 2}),
        _Other("other heads", {"heads": 8, "head_dim": 32}),
        _Other("another model", config={"model_name": str(kit.models / "other")}),
        _Other("another name of a model", config={"model_name": str(renamed)}),
        _Other("weights changed under a name", config={"model_name": str(changed)}),
        _Other("a setting model", config={"extra": {"model": "llama@2"}}),
        _Other("TP 2", config={"tp_size": 2}),
        _Other("PP 2", config={"pp_size": 2}),
        _Other("CP 2", config={"attn_cp_size": 2}),
        _Other("MLA", config={"is_mla_model": True}),
    ]
    for other in others:
        theirs = pools.mha(**other.pool)
        storage = kit.storage(folder, theirs, **other.config)
        expect_nothing(storage, theirs, hashes, other.what)
    # The control: what is equal is found.
    again = pools.mha()
    expect_pages(kit.storage(folder, again), again, hashes, expected)


def _ranks(kit: Kit, folder: Path) -> None:
    hashes, stored = keys(4), []
    for number, ranks in enumerate(
        {"tp_rank": tp, "pp_rank": pp, "attn_cp_rank": cp} for tp in range(2) for pp in range(2) for cp in range(2)
    ):
        pool = pools.mha()
        storage = kit.storage(folder, pool, tp_size=2, pp_size=2, attn_cp_size=2, **ranks)
        expect_nothing(storage, pool, hashes, f"{ranks}")
        stored.append((storage, pool, store_pages(storage, pool, hashes, seed=number)))
    for storage, pool, expected in stored:
        expect_pages(storage, pool, hashes, expected)


def _mla(kit: Kit, folder: Path) -> None:
    hashes = keys(4)
    both = []
    for rank in range(2):
        pool = pools.mla()
        both.append((kit.storage(folder, pool, tp_rank=rank, tp_size=2, is_mla_model=True), pool))
    (writer, pool), (replica, other) = both
    store_pages(replica, other, hashes, seed=2)
    expect_nothing(writer, pool, hashes, "a replica has stored")
    expected = store_pages(writer, pool, hashes, seed=3)
    expect_pages(replica, other, hashes, expected)
    # Keys of MLA name no tensor parallelism upstream; here another one is another name, which costs hits only.
    alone = pools.mla()
    expect_nothing(kit.storage(folder, alone, is_mla_model=True), alone, hashes, "TP 1")


def _heads(kit: Kit, folder: Path) -> None:
    hashes = keys(3)
    split = {"tp_lcm_size": 2}
    whole = pools.mha(layout="page_head", heads=4)
    one = kit.storage(folder, whole, tp_size=1, should_split_heads=True, **split)
    expected = store_pages(one, whole, hashes)
    for rank in range(2):
        half = pools.mha(layout="page_head", heads=2)
        # SGLang does not split where the rank has the smallest part already.
        storage = kit.storage(folder, half, tp_rank=rank, tp_size=2, **split)
        pools.fill(half, 50)
        read = storage.batch_get_v1(hashes, pools.indices(half, [7, 5, 3]))
        ensure(read == [True] * 3, f"rank {rank} has read {read}")
        for at, number in enumerate([7, 5, 3]):
            k, v = expected[at][: len(expected[at]) // 2], expected[at][len(expected[at]) // 2 :]
            mine = slice(rank * len(k) // 2, (rank + 1) * len(k) // 2)
            ensure(pools.page(half, number) == k[mine] + v[mine], f"rank {rank}: page {at} has other bytes")


def _clear(kit: Kit, folder: Path) -> None:
    pool, theirs, hashes = pools.mha(), pools.mha(), keys(4)
    storage, other = kit.storage(folder, pool), kit.storage(folder, theirs)
    expected = store_pages(storage, pool, hashes)
    ensure(storage.clear() is True, "clear has failed")
    expect_nothing(storage, pool, hashes, "after clear")
    expect_pages(other, theirs, hashes, expected)
    again = store_pages(storage, pool, hashes, seed=12)
    expect_pages(storage, pool, hashes, again)
    expect_pages(other, theirs, hashes, expected)
    storage.clear()
    expect_nothing(storage, pool, hashes, "after the second clear")
