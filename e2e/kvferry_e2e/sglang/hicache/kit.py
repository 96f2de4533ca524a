"""Storages as SGLang makes them, and what all checks ask of them."""

from __future__ import annotations

import hashlib
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

from kvferry_e2e.report import Report, ensure
from kvferry_e2e.sglang.hicache import pools


@dataclass
class Kit:
    report: Report
    # The folders of `make_model.py`.
    models: Path
    logged: list[str] = field(default_factory=list)
    opened: list[Any] = field(default_factory=list)

    @contextmanager
    def check(self, name: str) -> Iterator[Path]:
        """A check with a directory for stores. Closes the storages that it made."""
        with self.report.check(f"hicache: {name}"), tempfile.TemporaryDirectory(prefix="kvferry-hicache-") as folder:
            try:
                yield Path(folder) / "store"
            finally:
                while self.opened:
                    self.opened.pop().close()

    def config(self, folder: Path | str, *, extra: dict[str, Any] | None = None, **other: Any) -> HiCacheStorageConfig:
        settings = {
            "backend_name": "kvferry",
            "module_path": "kvferry.sglang",
            "class_name": "KVFerryStorage",
            "interface_v1": 1,
            "disk": str(folder),
            "disk_gib": 0.25,
            **(extra or {}),
        }
        values: dict[str, Any] = {
            "tp_rank": 0,
            "tp_size": 1,
            "pp_rank": 0,
            "pp_size": 1,
            "attn_cp_rank": 0,
            "attn_cp_size": 1,
            "is_mla_model": False,
            "enable_storage_metrics": True,
            "is_page_first_layout": True,
            "model_name": str(self.models / "llama"),
            **other,
        }
        return HiCacheStorageConfig(extra_config=settings, **values)

    def storage(self, folder: Path | str, pool: Any, extra_pools: dict[Any, Any] | None = None, **config: Any) -> Any:
        """As `HiCacheController.attach_storage_backend` makes one."""
        storage = StorageBackendFactory.create_backend("dynamic", self.config(folder, **config), pool)
        self.opened.append(storage)
        storage.register_mem_pool_host(pool)
        for name, one in (extra_pools or {}).items():
            storage.register_mem_host_pool_v2(one, name)
        storage.on_host_pools_registered()
        return storage


class Log(logging.Handler):
    """What `KVFerryStorage` logs as a warning."""

    def __init__(self, kit: Kit) -> None:
        super().__init__(logging.WARNING)
        self._kit = kit

    def emit(self, record: logging.LogRecord) -> None:
        self._kit.logged.append(record.getMessage())


def keys(count: int, name: str = "prompt") -> list[str]:
    """A chain of page hashes, as SGLang's."""
    made = [hashlib.sha256(name.encode()).hexdigest()]
    while len(made) < count:
        made.append(hashlib.sha256(made[-1].encode()).hexdigest())
    return made[:count]


def store_pages(storage: Any, pool: Any, hashes: list[str], seed: int = 1) -> list[bytes]:
    """Fills a pool, stores its first pages, and returns their bytes."""
    pools.fill(pool, seed)
    numbers = list(range(len(hashes)))
    stored = storage.batch_set_v1(hashes, pools.indices(pool, numbers))
    ensure(stored == [True] * len(hashes), f"stored: {stored}")
    return [pools.page(pool, number) for number in numbers]


def expect_pages(storage: Any, pool: Any, hashes: list[str], expected: list[bytes]) -> None:
    """Reads pages into other places of the pool, and compares all memory of the pool."""
    pools.fill(pool, 77)
    # Backwards, so that the places do not follow each other in memory.
    numbers = [pool.page_num - 1 - at for at in range(len(hashes))]
    untouched = [pools.page(pool, at) for at in range(pool.page_num - len(hashes))]
    ensure(
        storage.batch_exists(hashes) == len(hashes), f"{storage.batch_exists(hashes)} of {len(hashes)} pages are found"
    )
    read = storage.batch_get_v1(hashes, pools.indices(pool, numbers))
    ensure(read == [True] * len(hashes), f"read: {read}")
    for at, number in enumerate(numbers):
        ensure(pools.page(pool, number) == expected[at], f"page {at} has other bytes")
    for at, was in enumerate(untouched):
        ensure(pools.page(pool, at) == was, f"page {at} of the pool was written, which nobody has named")


def expect_nothing(storage: Any, pool: Any, hashes: list[str], why: str) -> None:
    found = storage.batch_exists(hashes)
    read = storage.batch_get_v1(hashes, pools.indices(pool, list(range(len(hashes)))))
    ensure(found == 0 and not any(read), f"{why}: {found} pages found, {sum(read)} read")
