"""`KVFerryStorage`: kvferry's store behind SGLang's HiCache. See docs/sglang.md."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolName, PoolTransferResult

import kvferry
from kvferry._engine.log import logger_of
from kvferry._engine.memory import Scratch
from kvferry._engine.settings import StoreSettings
from kvferry._engine.store import open_store
from kvferry.sglang._identity import check_weights_are_named, hashes_of, incarnation, layout_of, model_of
from kvferry.sglang._of_sglang import check_storage
from kvferry.sglang._pools import Buffers, Pages, Pool, pieces_of

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logger_of("sglang")

_T = TypeVar("_T")
# SGLang reads these from the same mapping.
_OF_SGLANG = {
    "allocator",
    "backend_name",
    "class_name",
    "hicache_storage_pass_prefix_keys",
    "interface_v1",
    "module_path",
    "prefetch_threshold",
    "prefetch_timeout_base",
    "prefetch_timeout_per_ki_token",
    "tp_lcm_size",
}
_WHERE = "hicache_storage_backend_extra_config"
# Where prompts share beginnings, old causes come again and again.
_CAUSES_MAX = 256


class KVFerryStorage(HiCacheStorage):  # type: ignore[misc]
    """SGLang calls it from its threads of prefetches and of backups, and expects no exceptions of them: what goes wrong
    costs hits, and is logged once for each cause. Wrong settings are errors of the start.
    """

    def __init__(self, storage_config: Any, _more: Any = None) -> None:
        check_storage()
        self._config = storage_config
        extra = dict(storage_config.extra_config or {})
        self._zero_copy = bool(extra.get("interface_v1", 0))
        self._settings = StoreSettings.of(extra, _WHERE, _OF_SGLANG)
        check_weights_are_named(storage_config, self._settings.model)
        self._model = model_of(storage_config, self._settings.model)
        ranks = storage_config.tp_size * storage_config.pp_size * storage_config.attn_cp_size
        self._opened = open_store(self._settings, self._settings.host_bytes // ranks, logger)
        self._buffers = Buffers(self._opened.agent) if self._opened else None
        self._pools: dict[str, Pool] = {}
        self.registered_pools: dict[Any, Any] = {}
        # Changes with `clear`.
        self._tenant = b""
        self._said: set[str] = set()
        self._staging = Scratch(self._opened.agent) if self._opened else None
        self._lock = threading.Lock()
        self._stats: list[tuple[str, int, float]] = []

    # Pools.

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._register(PoolName.KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(host_pool_name, host_pool)

    def _register(self, name: Any, pool: Any) -> None:
        config = self._config
        shared = self._is_replicated(name, pool)
        is_kv = str(name) == PoolName.KV.value
        split = config.tp_lcm_size // config.tp_size if config.should_split_heads and is_kv else 1
        is_logical = is_kv and getattr(pool, "kv_buffer", None) is None
        pieces = None
        if not is_logical:
            try:
                pieces = pieces_of(pool, split)
            except (ValueError, NotImplementedError, AssertionError, AttributeError) as error:
                if self._zero_copy or not is_kv:
                    what = f"pages of the pool {name} ({type(pool).__name__}) can't be stored without a copy: {error}"
                    raise ValueError(f"KVFerryStorage: {what}; choose another --hicache-mem-layout") from error
        writes = not shared or config.is_storage_writer
        made = Pool(pool, is_logical, writes, split, pieces)
        if self._buffers is not None and pieces is not None:
            self._buffers.add(pool)
            made.find_steps(self._buffers)
        self._pools[str(name)] = made
        self._name(str(name), made, shared)

    def _is_replicated(self, name: Any, pool: Any) -> bool:
        """Whether all ranks of the tensor parallelism have the same pages."""
        if not self._config.is_mla_model or str(name) == PoolName.MAMBA.value:
            return False
        return not (str(name).startswith(PoolName.DRAFT.value) and hasattr(pool, "v_buffer"))

    def _name(self, name: str, pool: Pool, shared: bool) -> None:
        """Makes the spaces of a pool."""
        if self._opened is None or pool.is_logical:
            return
        config, store = self._config, self._opened.store
        # Of the tensor parallelism, which of how many parts of a page's bytes is this rank's first.
        if shared:
            part, parts = config.dcp_rank, config.dcp_size
        else:
            part, parts = config.tp_rank * pool.split, config.tp_size * pool.split
        outer = config.pp_rank * config.attn_cp_size + config.attn_cp_rank
        count = config.pp_size * config.attn_cp_size * parts

        def space(index: int, copied: bool) -> kvferry.Space:
            layout = layout_of(config, name, pool.pool, pool.pieces, pool.split, copied=copied)
            return store.space(self._model, layout=layout, tenant=self._tenant, shard=(outer * parts + index, count))

        pool.spaces = [space(part + it, False) for it in range(pool.split)]
        pool.copied = space(part, True)

    # Without a copy.

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return self._quietly("batch_exists", lambda: self._count(self._pool(PoolName.KV), keys), 0)

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        return self._get_pages(PoolName.KV, keys, host_indices)

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        return self._set_pages(PoolName.KV, keys, host_indices, extra_info)

    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        none = PoolTransferResult(0, {}, [])
        return self._quietly("batch_exists_v2", lambda: self._hits(keys, pool_transfers or []), none)

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, list[bool]]:
        return {it.name: self._get_pages(it.name, it.keys or [], it.host_indices) for it in transfers}

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, list[bool]]:
        return {it.name: self._set_pages(it.name, it.keys or [], it.host_indices, extra_info) for it in transfers}

    def _get_pages(self, name: Any, keys: Sequence[str], host_indices: Any) -> list[bool]:
        def get() -> list[bool]:
            pool = self._pool(name)
            if pool.is_logical or not keys:
                return [True] * len(keys)
            pages = self._pages(pool, keys, host_indices)
            hashes = hashes_of(keys)
            with self._timed("prefetch", pages):
                parts = [_read(space, hashes, pages, part) for part, space in enumerate(pool.spaces)]
            if len(parts) == 1:
                return parts[0]
            return [all(found) for found in zip(*parts, strict=True)] if parts else [False] * len(keys)

        return self._quietly(f"reading pages of the pool {name}", get, [False] * len(keys))

    def _set_pages(self, name: Any, keys: Sequence[str], host_indices: Any, extra_info: Any) -> list[bool]:
        def put() -> list[bool]:
            pool = self._pool(name)
            if pool.is_logical or not pool.writes or not keys:
                return [True] * len(keys)
            pages = self._pages(pool, keys, host_indices)
            hashes = hashes_of(keys)
            # A block leaves the store after those that follow it.
            before = getattr(extra_info, "prefix_keys", None) or []
            first = 1 if before else 0
            chain = [*hashes_of(before[-1:]), *hashes] if before else hashes
            here = [True] * len(keys)
            with self._timed("backup", pages):
                for part, space in enumerate(pool.spaces):
                    done = space.put(chain, pages.memory(part), first, priority=self._settings.priority)
                    if done.refused or done.failed:
                        here = [was and space.lookup([it]) == 1 for was, it in zip(here, hashes, strict=True)]
                        self._say(f"storing pages of the pool {name}", _why(done))
            return here if pool.spaces else [False] * len(keys)

        return self._quietly(f"storing pages of the pool {name}", put, [False] * len(keys))

    def _pages(self, pool: Pool, keys: Sequence[str], host_indices: Any) -> Pages:
        if self._buffers is None:
            raise _NotOpenError
        if host_indices is None:
            raise ValueError("no indices of the host pool are given")
        return pool.pages(self._buffers, len(keys), host_indices)

    def _count(self, pool: Pool, keys: Sequence[str]) -> int:
        """How many pages are there, from the first on."""
        if pool.is_logical:
            return len(keys)
        if self._opened is None:
            raise _NotOpenError
        hashes = hashes_of(keys)
        spaces = pool.spaces if self._zero_copy or pool is not self._pools.get(PoolName.KV.value) else [pool.copied]
        found = len(keys)
        for space in spaces:
            assert space is not None
            here = space.lookup(hashes[:found])
            if here < found and self._settings.object is not None:
                here = space.prefetch(hashes[:found])
            found = min(found, here)
        return found

    def _hits(self, keys: list[str], transfers: Any) -> Any:
        kv = self._count(self._pool(PoolName.KV), keys)
        hits: dict[Any, int] = {PoolName.KV: kv} if kv else {}
        # The numbers of pages after which all pools can go on.
        restorable = set(range(1, kv + 1))
        for it in transfers:
            if not restorable:
                break
            pool = self._pool(it.name)
            if it.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
                # A verdict of its own, which does not shorten the hit.
                groups = self._count(pool, it.keys or []) // max(1, it.group_pages)
                hits[it.name] = min(kv, groups * it.block_pages)
                continue
            if it.hit_policy == PoolHitPolicy.ALL_PAGES:
                fits = set(range(1, self._count(pool, keys[:kv]) + 1))
            else:
                fits = _ends(self._present(pool, keys[:kv]), max(1, len(it.keys or ())))
            if fits:
                hits[it.name] = max(fits)
            restorable &= fits
        return PoolTransferResult(max(restorable, default=0), hits, sorted(restorable))

    def _present(self, pool: Pool, keys: Sequence[str]) -> list[bool]:
        """Of each page, whether it is there."""
        present = [False] * len(keys)
        at = 0
        while at < len(keys):
            found = self._count(pool, keys[at:])
            present[at : at + found] = [True] * found
            at += found + 1
        return present

    # With a copy.

    def exists(self, key: str) -> bool:
        return self._quietly("exists", lambda: self._exists(hashes_of([key])[0]), False)

    def _exists(self, block: bytes) -> bool:
        pool = self._pool(PoolName.KV)
        in_parts = bool(pool.spaces) and all(space.lookup([block]) for space in pool.spaces)
        return in_parts or (pool.copied is not None and pool.copied.lookup([block]) == 1)

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any | None:
        return self._quietly("get", lambda: self._get(key, target_location), None)

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any | None]:
        return [self.get(key, it) for key, it in zip(keys, target_locations or [None] * len(keys), strict=False)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self._quietly("set", lambda: self._set(key, value), False)

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        if values is None or len(values) != len(keys):
            self._say("batch_set", f"{len(keys)} keys with {0 if values is None else len(values)} values")
            return False
        return all(self.set(key, value) for key, value in zip(keys, values, strict=True))

    def _get(self, key: str, target: Any) -> Any | None:
        pool = self._pool(PoolName.KV)
        if target is None:
            raise ValueError("no tensor is given for the page")
        if pool.copied is None:
            raise _NotOpenError
        nbytes = target.numel() * target.element_size()
        with self._staged(nbytes) as region:
            if not pool.copied.get(hashes_of([key]), [(region, 0, nbytes)]):
                return None
            page = target if target.is_contiguous() else target.contiguous()
            ctypes.memmove(page.data_ptr(), region.addr, nbytes)
            if page is not target:
                target.copy_(page)
        return target

    def _set(self, key: str, value: Any) -> bool:
        pool = self._pool(PoolName.KV)
        if value is None:
            raise ValueError("no value is given for the page")
        if pool.copied is None:
            raise _NotOpenError
        if not pool.writes:
            return True
        page = value.detach().cpu().contiguous()
        nbytes = page.numel() * page.element_size()
        with self._staged(nbytes) as region:
            ctypes.memmove(region.addr, page.data_ptr(), nbytes)
            done = pool.copied.put(hashes_of([key]), [(region, 0, nbytes)], priority=self._settings.priority)
        if done.refused or done.failed:
            self._say("set", _why(done))
        return bool(done.stored + done.present)

    @contextmanager
    def _staged(self, nbytes: int) -> Iterator[kvferry.Region]:
        """Memory of the store's agent, which is used again."""
        if self._staging is None:
            raise _NotOpenError
        region = self._staging.take(nbytes)
        try:
            yield region
        finally:
            self._staging.give(region)

    # The rest of SGLang's contract.

    def clear(self) -> bool:
        """This engine finds nothing from before, and others find nothing that it stores from now on, until it is
        restarted. All ranks of the engine must be cleared as often.
        """
        with self._lock:
            self._tenant = hashlib.sha256(self._tenant + incarnation().encode()).digest()
            for name, pool in self._pools.items():
                self._name(name, pool, self._is_replicated(name, pool.pool))
        return True

    def get_stats(self) -> Any | None:
        """What was moved since the last call, as SGLang's metrics take it."""
        if not self._config.enable_storage_metrics:
            return None
        from sglang.srt.observability.metrics_collector import StorageMetrics

        with self._lock:
            taken, self._stats = self._stats, []
        metrics = StorageMetrics()
        for what, pages, gib_per_s in taken:
            getattr(metrics, f"{what}_pgs").append(pages)
            getattr(metrics, f"{what}_bandwidth").append(gib_per_s)
        return metrics

    def store_stats(self) -> dict[str, int]:
        """`kvferry.Store.stats`; empty if the store is not open."""
        opened = self._opened
        return opened.store.stats() if opened is not None else {}

    def close(self) -> None:
        """Waits for blocks that are being written. A second close does nothing; later calls find and store nothing."""
        with self._lock:
            opened, self._opened = self._opened, None
            buffers, self._buffers = self._buffers, None
            for pool in self._pools.values():
                pool.spaces, pool.copied = [], None
        if opened is None or buffers is None:
            return
        with suppress(kvferry.Error, OSError):
            opened.store.close()
        with suppress(kvferry.Error):
            buffers.close()
        opened.agent.shutdown()

    # Within.

    def _pool(self, name: Any) -> Pool:
        pool = self._pools.get(str(name))
        if pool is None:
            raise ValueError(f"the host pool {name} is not registered")
        return pool

    @contextmanager
    def _timed(self, what: str, pages: Pages) -> Iterator[None]:
        began = time.perf_counter()
        yield
        if self._config.enable_storage_metrics:
            gib_per_s = pages.nbytes / (1 << 30) / max(time.perf_counter() - began, 1e-9)
            with self._lock:
                self._stats.append((what, pages.count, gib_per_s))

    def _quietly(self, what: str, call: Callable[[], _T], otherwise: _T) -> _T:
        """SGLang's threads do not expect exceptions: some of them would end."""
        try:
            return call()
        except _NotOpenError:
            # Said when it was opened, or it was closed.
            return otherwise
        except Exception as error:
            self._say(what, f"{type(error).__name__}: {error}")
            return otherwise

    def _say(self, what: str, why: str) -> None:
        cause = f"{what}: {why}"
        with self._lock:
            is_new = cause not in self._said and len(self._said) < _CAUSES_MAX
            self._said.add(cause)
        logger.log(logging.WARNING if is_new else logging.DEBUG, "KVFerryStorage: %s", cause)


class _NotOpenError(Exception):
    """The store could not be opened, or is closed."""


def _read(space: kvferry.Space, hashes: list[bytes], pages: Pages, part: int) -> list[bool]:
    """Reads a part of all pages that are there. Of each, whether it was read."""
    read = [False] * len(hashes)
    at = 0
    while at < len(hashes):
        found = space.get(hashes[at:] if at else hashes, pages.memory(part, at))
        read[at : at + found] = [True] * found
        at += found + 1
    return read


def _ends(present: list[bool], trailing: int) -> set[int]:
    """The numbers of pages of which the last `trailing` ones are there."""
    return {end for end in range(1, len(present) + 1) if all(present[max(0, end - trailing) : end])}


def _why(done: kvferry.Put) -> str:
    if done.failed:
        return "a device's error"
    return "the store has no space for blocks of this priority, or its disks are slower than SGLang"
