"""`KVFerryTier` below vLLM's own tiering classes, over host memory: vLLM's tests of secondary tiers, stated anew.

vLLM's specification of tiers refuses a CPU, so its manager is driven here as its scheduler does it.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

from kvferry_e2e.report import Note, ensure

ROW = 64 << 10
TOKENS = 16
DISK = {"disk_gib": 0.125, "segment_mib": 1, "blocks_max": 100_000}


class Spec(base.OffloadingSpec):  # type: ignore[misc]
    """A tier reads the configuration only."""

    def get_manager(self) -> Any:
        raise NotImplementedError

    def get_worker(self, kv_caches: Any) -> Any:
        raise NotImplementedError


def _engine(name: str) -> Any:
    """What names KV of vLLM's configuration."""
    return SimpleNamespace(
        model_config=SimpleNamespace(model=name, dtype="bfloat16"),
        # There are no files of it.
        load_config=SimpleNamespace(load_format="dummy"),
        cache_config=SimpleNamespace(),
        kv_transfer_config=SimpleNamespace(engine_id="engine"),
    )


class Tiers:
    """vLLM's manager of tiers with a primary tier of `rows` chunks and `KVFerryTier` below it."""

    def __init__(
        self,
        directory: Path,
        rows: int = 64,
        *,
        name: str = "model",
        sizes: dict[str, Any] | None = None,
        layout: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        """`name`: vLLM's name of the model; `sizes`: of parallelism; `layout`: fields of vLLM's configuration."""
        self._number = 0
        spec = Spec(_config(name, sizes or {}, layout or {}))
        region = SharedOffloadRegion(f"kvferry-{os.getpid()}-{id(self):x}", rows, None, ROW, ROW)
        primary = CPUPrimaryTierOffloadingManager(rows, region, enable_events=True)
        view = primary.get_kv_memoryview()
        self.memory = np.asarray(view)
        config = {"type": "KVFerryTier", "module_path": "kvferry.vllm", "disk": str(directory), **DISK, **settings}
        try:
            self.tier = self._made(_engine(name), config, view, spec)
        except BaseException:
            del self.memory, view
            primary.shutdown()
            raise
        self.manager = TieringOffloadingManager(primary, [self.tier])
        # What the tier has published.
        self.events: list[Any] = []

    @staticmethod
    def _made(vllm_config: Any, config: dict[str, Any], view: memoryview, spec: Spec) -> Any:
        """As vLLM's connector makes it, which has the engine's configuration as `vllm_config`."""
        return SecondaryTierFactory.create_secondary_tier(config, view, spec)

    def request(self, keys: list[bytes], params: dict[str, Any] | None = None) -> Any:
        self._number += 1
        context = base.ReqContext(f"t{self._number}", kv_transfer_params=params)
        for at, key in enumerate(keys):
            context.set_offload_key_position(key, (at + 1) * TOKENS)
        self.manager.on_new_request(context)
        return context

    def step(self) -> None:
        self.manager.on_schedule_end(base.ScheduleEndContext(new_req_ids=(), preempted_req_ids=()))
        self.events += [it for it in self.manager.take_events() if it.medium is base.Medium.STORAGE]

    def settle(self) -> None:
        deadline = time.monotonic() + 20
        while self.manager.has_pending_work():
            ensure(time.monotonic() < deadline, "jobs have not ended within 20 s")
            self.step()

    def store(self, keys: list[bytes], params: dict[str, Any] | None = None) -> None:
        """What the engine computes goes to the primary tier, and from there to the store."""
        context = self.request(keys, params)
        prepared = self.manager.prepare_store(keys, context)
        ensure(prepared is not None, "the primary tier is full")
        for key, row in zip(prepared.keys_to_store, prepared.store_spec.block_ids.tolist(), strict=True):
            self.memory[row] = content(key)
        self.manager.complete_store(set(prepared.keys_to_store), context)
        self.manager.on_request_finished(context)
        self.settle()

    def load(self, keys: list[bytes]) -> int:
        """How many blocks of a prompt, from its beginning, come back; each of them is compared."""
        context = self.request(keys)
        deadline = time.monotonic() + 20
        while True:
            ensure(time.monotonic() < deadline, "look-ups have not ended within 20 s")
            results = []
            for key in keys:
                results.append(self.manager.lookup(key, context))
                if results[-1] is base.LookupResult.MISS:
                    break
            self.step()
            if not any(it in (base.LookupResult.RETRY, base.LookupResult.HIT_PENDING) for it in results):
                break
        found = keys[: results.count(base.LookupResult.HIT)]
        if found:
            spec = self.manager.prepare_load(found, context)
            for key, row in zip(found, spec.block_ids.tolist(), strict=True):
                ensure(bool((self.memory[row] == content(key)).all()), f"block {keys.index(key)} has other bytes")
            self.manager.complete_load(found, context)
        self.manager.on_request_finished(context)
        self.settle()
        return len(found)

    def forget(self) -> None:
        """Drops the primary tier's blocks."""
        self.settle()
        self.manager.primary_tier.reset_cache()

    def close(self) -> None:
        del self.memory
        self.manager.shutdown()


def _config(name: str, sizes: dict[str, Any], layout: dict[str, Any]) -> OffloadingConfig:
    parallel = OffloadingParallelConfig(
        rank=0,
        world_size=1,
        tp_size=1,
        pp_size=1,
        pcp_size=1,
        dcp_size=1,
        data_parallel_index=0,
        data_parallel_size=1,
        data_parallel_rank_local=None,
        is_parallelism_agnostic=False,
    )
    made = OffloadingConfig(
        groups=(OffloadingGroupConfig(tokens_per_block=TOKENS, layer_names=("layer",), group_id=0),),
        worker_kv_bytes_per_block=ROW,
        enable_kv_cache_events=True,
        extra_config={},
        engine_id="tiers",
        model=OffloadingModelConfig(name=name, dtype="bfloat16"),
        cache=OffloadingCacheConfig(tokens_per_hash=TOKENS, blocks_per_chunk=1),
        parallel=replace(parallel, **sizes),
    )
    return replace(made, **layout)


def prompt(name: str, blocks: int) -> list[bytes]:
    keys = [hashlib.sha256(f"{name} {block}".encode()).digest() for block in range(blocks)]
    return [base.make_offload_key(key, 0) for key in keys]


def content(key: bytes) -> Any:
    return np.resize(np.frombuffer(hashlib.sha512(key).digest(), dtype=np.int8), ROW)


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvferry-tier-", ignore_cleanup_errors=True) as name:
        yield Path(name) / "kv"


@contextmanager
def tiers(directory: Path, rows: int = 64, **more: Any) -> Iterator[Tiers]:
    made = Tiers(directory, rows, **more)
    try:
        yield made
    finally:
        made.close()


def round_trip(note: Note) -> None:
    """test_promotion, test_cascade: blocks come back after the primary tier lost them, and after a restart."""
    one, other = prompt("one", 40), prompt("other", 7)
    with folder() as directory:
        with tiers(directory) as first:
            ensure(first.load(one) == 0, "a prompt that was never stored was loaded")
            first.store(one)
            first.store(other)
            first.forget()
            ensure(first.load(one) == 40, "not all blocks came back")
            ensure(first.load([*other, *prompt("more", 3)]) == 7, "not the beginning of a prompt came back")
        with tiers(directory) as second:
            ensure([second.load(one), second.load(other)] == [40, 7], "not all blocks were there after a restart")
        with tiers(directory, name="another") as stranger:
            ensure(stranger.load(one) == 0, "another model found blocks")
        with tiers(directory, sizes=_tp(2)) as stranger:
            ensure(stranger.load(one) == 0, "engines of another tensor parallelism found blocks of other bytes")


def _tp(ranks: int, **more: Any) -> dict[str, Any]:
    return {"world_size": ranks, "tp_size": ranks, **more}


def parallelisms(note: Note) -> None:
    """Engines of another parallelism find rows only where these have the same bytes."""
    keys = prompt("one", 6)
    heads_first, layers_first = {"kv_cache_layout": "BHLNC"}, {"kv_cache_layout": "LBHNC"}
    canonical = {**layers_first, "canonical_layout": True}
    # vLLM says so of each of these.
    says = {"is_parallelism_agnostic": True}
    stages = {"world_size": 2, "pp_size": 2, **says}
    cases: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], int]] = [
        ("TP 2 to 1, heads before layers", heads_first, _tp(2, **says), _tp(1, **says), 6),
        ("TP 2 to 1, layers before heads", layers_first, _tp(2, **says), _tp(1, **says), 0),
        ("TP 2 to 1, canonical", canonical, _tp(2, **says), _tp(1, **says), 6),
        ("TP 2 to 1, not certified", heads_first, _tp(2), _tp(1), 0),
        ("PP 2 to 1", heads_first, stages, _tp(1, **says), 0),
        ("PP 2 to 2", heads_first, stages, stages, 6),
    ]
    for case, layout, before, after, count in cases:
        with folder() as directory:
            with tiers(directory, sizes=before, layout=layout) as first:
                first.store(keys)
            with tiers(directory, sizes=after, layout=layout) as second:
                found = second.load(keys)
            ensure(found == count, f"{case}: {found} blocks instead of {count}")
    dcp = _tp(4, dcp_size=2)
    with folder() as directory:
        try:
            with tiers(directory, sizes=dcp):
                pass
        except ValueError as error:
            ensure("cp_kv_cache_interleave_size" in str(error), f"{error}")
        else:
            ensure(False, "context parallelism was taken without a name for the model")
        with tiers(directory, sizes=dcp, model="model, interleave 1") as first:
            first.store(keys)
            first.forget()
            ensure(first.load(keys) == 6, "blocks of context parallelism did not come back")
        with tiers(directory, sizes=dcp, model="model, interleave 4") as second:
            ensure(second.load(keys) == 0, "found blocks of another interleaving")
    with folder() as directory:
        partition = mock.patch.dict(os.environ, {"VLLM_PP_LAYER_PARTITION": "3,1"})
        with partition, tiers(directory, sizes=stages) as first:
            first.store(keys)
        with tiers(directory, sizes=stages) as second:
            ensure(second.load(keys) == 0, "found blocks of stages with other layers")


def small_primary(note: Note) -> None:
    """test_eviction_with_pinned_chunks: the primary tier has room for a part of what is stored."""
    with folder() as directory, tiers(directory, 16) as made:
        prompts = [prompt(f"p{at}", 12) for at in range(20)]
        for keys in prompts:
            made.store(keys)
        found = [made.load(keys) for keys in prompts]
        ensure(found == [12] * 20, f"{found}")


def damage(note: Note) -> None:
    """test_partial_promotion_failure: of blocks that can't be read, those before and behind them are kept."""
    with folder() as directory, tiers(directory) as made:
        keys = prompt("one", 20)
        made.store(keys)
        made.forget()
        wanted = content(keys[8])[:4096].tobytes()
        for segment in directory.glob("segment-*"):
            data = segment.read_bytes()
            if wanted in data:
                with open(segment, "r+b") as file:
                    file.seek(data.index(wanted) + 5)
                    file.write(b"\0\xff\0")
        found = made.load(keys)
        ensure(found == 8, f"{found} blocks came back")
        stats = made.tier.get_stats().data["data"]
        ensure(stats["vllm:kv_offload_kvferry_loaded_blocks"][()] == 19, f"{stats}")
        ensure(made.load(keys) == 8, "a block that can't be read is asked for again")
        made.store(keys)
        made.forget()
        ensure(made.load(keys) == 20, "the block was not stored again")


def drained(note: Note) -> None:
    """test_drain_jobs: after it no job touches the primary tier, and each has its result, once."""
    with folder() as directory, tiers(directory) as made:
        keys = prompt("one", 30)
        context = made.request(keys)
        prepared = made.manager.prepare_store(keys, context)
        for key, row in zip(prepared.keys_to_store, prepared.store_spec.block_ids.tolist(), strict=True):
            made.memory[row] = content(key)
        made.manager.complete_store(keys, context)
        made.tier.drain_jobs()
        ensure([it.success for it in made.tier.get_finished_jobs()] == [True], "not one result")
        ensure(not list(made.tier.get_finished_jobs()), "a job ended twice")
        events = list(made.tier.take_events())
        ensure(not events and not made.tier.has_pending_work(), f"{events}")
        # The manager learns of what has ended by itself.
        made.manager._jobs.clear()


def reset(note: Note) -> None:
    """test_reset_cache: after it, the tier finds nothing from before, and others find nothing that it puts."""
    one, other = prompt("one", 10), prompt("other", 6)
    with folder() as directory, tiers(directory, enable_kv_events=True) as first:
        first.store(one)
        first.manager.reset_cache()
        first.step()
        published = [(sorted(it.keys), it.removed) for it in first.events]
        ensure(published == [(sorted(one), False), (sorted(one), True)], f"{first.events}")
        ensure(first.load(one) == 0, "a block from before the reset was found")
        first.store(other)
        first.forget()
        ensure(first.load(other) == 6, "blocks from after the reset were not found")
        ensure(sorted(first.events[-1].keys) == sorted(other) and not first.events[-1].removed, f"{first.events}")
        with tiers(directory) as second:
            found = [second.load(one), second.load(other)]
            ensure(found == [10, 0], f"another engine found {found}")


def much(note: Note) -> None:
    """What the disk does not take at once waits, and is all stored."""
    with folder() as directory, tiers(directory) as made:
        for name in ("one", "two", "three"):
            keys = prompt(name, 20)
            made.store(
                keys, {"retention": [{"start": at * 16, "end": at * 16 + 16, "priority": at} for at in range(20)]}
            )
        made.forget()
        found = [made.load(prompt(name, 20)) for name in ("one", "two", "three")]
        ensure(found == [20, 20, 20], f"{found}")


def told(note: Note) -> None:
    """test_kv_events: blocks that were stored, loaded, and that have left are published if that is switched on."""
    with folder() as directory, tiers(directory, enable_kv_events=True, disk_gib=10 / 1024) as made:
        keys = prompt("one", 5)
        made.store(keys)
        published = [(sorted(it.keys), it.removed, it.locality, it.ownership) for it in made.events]
        ensure(published == [(sorted(keys), False, base.Locality.LOCAL, "kvferry")], f"{made.events}")
        ensure(all(it.removal_expected for it in made.events), "vLLM is to keep what it knows of the blocks")
        with tiers(directory, enable_kv_events=True, locality="REMOTE", disk_gib=10 / 1024) as other:
            ensure(other.load(keys) == 5, "not found")
            published = [(sorted(it.keys), it.removed, it.locality, it.ownership) for it in other.events]
            ensure(published == [(sorted(keys), False, base.Locality.REMOTE, "kvferry")], f"{other.events}")
            deadline = time.monotonic() + 60
            number = 0
            while sum(len(it.keys) for it in other.events if it.removed) < 5:
                # The first engine fills the store; the second one does nothing.
                ensure(time.monotonic() < deadline, f"not removed: {other.events}")
                made.store(prompt(f"other {number}", 20))
                made.forget()
                other.step()
                number += 1
        here: set[bytes] = set()
        while time.monotonic() < deadline:
            made.step()
            here.clear()
            for event in made.events:
                (here.difference_update if event.removed else here.update)(event.keys)
            space = made.tier._space(0)
            there = {key for number in range(number) for key in prompt(f"other {number}", 20)} | set(keys)
            there = {key for key in there if space.lookup([base.get_offload_block_hash(key)])}
            if here == there:
                break
            time.sleep(0.001)
        ensure(here == there, f"{len(here - there)} too many, {len(there - here)} too few")
        defined = made.tier.build_metric_definitions({})
        ensure(set(made.tier.get_stats().data["data"]) <= set(defined), "statistics without a definition")


def told_of_unreadable(how: str, note: Note) -> None:
    """Blocks are damaged, or one of two directories has lost its files, and the second engine reads them: both engines
    publish that the blocks have left.
    """
    keys = [prompt(f"p{at}", 12) for at in range(10)]
    with folder() as directory:
        directory.mkdir(parents=True)
        places = [directory / name for name in ("a", "b")]
        options: dict[str, Any] = {"enable_kv_events": True, "disk": [str(place) for place in places]}
        with tiers(directory, **options) as made, tiers(directory, **options) as other:
            space = made.tier._space(0)

            def agree(why: str) -> int:
                """Waits until each engine has said what is in the store. Returns how many blocks that are."""
                deadline = time.monotonic() + 60
                while True:
                    there = {key for it in keys for key in it if space.lookup([base.get_offload_block_hash(key)])}
                    engines = (made, other)
                    for engine in engines:
                        engine.step()
                    said = [_said(engine.events) for engine in engines]
                    if said == [there, there]:
                        return len(there)
                    wrong = [(len(here - there), len(there - here)) for here in said]
                    ensure(time.monotonic() < deadline, f"{why}: blocks too many and too few of each engine: {wrong}")
                    time.sleep(0.001)

            for it in keys:
                made.store(it)
                made.forget()
                ensure(other.load(it) == 12, "not found")
                other.forget()
            ensure(agree("stored") == 120, "not all blocks are there")
            segments = [sorted(place.glob("segment-*")) for place in places]
            ensure(all(segments), "a directory has no segment")
            for segment in segments[1] if how == "lost" else segments[0] + segments[1]:
                if how == "lost":
                    os.truncate(segment, 0)
                    continue
                data = np.frombuffer(segment.read_bytes(), dtype=np.uint8).copy()
                # Each block, and not what says where blocks are.
                data[4096::64] ^= 1
                with open(segment, "r+b") as file:
                    file.write(data)
            found = [other.load(it) for it in keys]
            ensure(min(found) < 12, "all blocks came back")
            there = agree(how)
            ensure(there < 120, "no block has left")
    note.text = f"{120 - there} of 120 blocks were removed"


def _said(events: list[Any]) -> set[bytes]:
    """The blocks that are in the store by the events."""
    here: set[bytes] = set()
    for event in events:
        (here.difference_update if event.removed else here.update)(event.keys)
    return here


def from_objects(note: Note) -> None:
    """test_lookup_retry: blocks that another host has put come from the object store."""
    with folder() as directory:
        objects = directory.with_name("objects")
        objects.mkdir(parents=True)
        keys = prompt("one", 24)
        with tiers(directory, object=f"file://{objects}") as first:
            first.store(keys)
            ensure(first.tier._opened.store.flush_objects(20), "not uploaded within 20 s")
        with tiers(directory.with_name("other"), object=f"file://{objects}") as second:
            ensure(second.load(keys) == 24, "not all blocks came from the object store")
            ensure(second.load(prompt("two", 3)) == 0, "a prompt that was never stored was loaded")


def unusable(note: Note) -> None:
    """A store that can't be opened costs hits; a wrong setting is said at the start."""
    with folder() as directory:
        directory.write_text("")
        with tiers(directory) as made:
            keys = prompt("one", 5)
            made.store(keys)
            made.forget()
            ensure(made.load(keys) == 0, "found a block without a store")
        try:
            with tiers(directory, disk_gb=1):
                pass
        except ValueError as error:
            ensure("disk_gb" in str(error), f"{error}")
        else:
            ensure(False, "a setting that does not exist was taken")


def checks() -> Iterator[tuple[str, Callable[[Note], None]]]:
    yield "tier: blocks come back", round_trip
    yield "tier: engines of another parallelism", parallelisms
    yield "tier: a small primary tier", small_primary
    yield "tier: blocks that can't be read", damage
    yield "tier: jobs are drained", drained
    yield "tier: the cache is reset", reset
    yield "tier: more than the disk takes", much
    yield "tier: events and statistics", told
    yield "tier: events of damaged blocks", partial(told_of_unreadable, "damaged")
    yield "tier: events of a lost directory", partial(told_of_unreadable, "lost")
    yield "tier: an object store", from_objects
    yield "tier: a store that can't be opened", unusable
