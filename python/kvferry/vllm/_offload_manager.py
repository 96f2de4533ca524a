"""The scheduler's side of `KVFerryOffloadingSpec`: which blocks are in the store, and what stays there.

It asks the store's index, which is in memory that the processes of the host share: a look-up reads no disk, and finds
what another engine has put. It runs on the scheduler's thread, so nothing here waits.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    PrepareStoreOutput,
    RequestOffloadingContext,
    get_offload_group_idx,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

import kvferry
from kvferry._engine.identity.core import Cached, core_of_callers
from kvferry._engine.identity.vllm import vllm_config_of_callers
from kvferry._engine.jobs import runs
from kvferry.vllm import _offload_stats as counters
from kvferry.vllm._guard import store_guarded
from kvferry.vllm._log import logger
from kvferry.vllm._offload_adapters import RequestNames, StoredAdapters, by_group
from kvferry.vllm._offload_blocks import Block, Columns, packed, unpacked
from kvferry.vllm._offload_events import StoreEvents
from kvferry.vllm._offload_keys import Keys
from kvferry.vllm._offload_layout import read_card, remove_cards
from kvferry.vllm._offload_retention import Limits, Plan, Plans

if TYPE_CHECKING:
    from kvferry._engine.identity.adapters import Files
    from kvferry._engine.settings import StoreSettings
    from kvferry._engine.store import OpenStore


# How often a request loads one block: where the store has a block but can't read it, the request is computed.
_LOADS_MAX = 2
# Prefetches of a request, per group of layers.
_PREFETCHES_MAX = 4
_CARDS_EVERY_S = 1.0
# Not looked up in the class for each block.
_HIT = LookupResult.HIT
_guarded = store_guarded("KVFerryOffloadingSpec")


@dataclass
class StoredBlocks(LoadStoreSpec):  # type: ignore[misc]
    """Blocks of a job, for the workers. `groups`: by vLLM's number of the group, in the order of the block table."""

    request: str = ""
    # Empty, or a salt since the cache was reset.
    tenant: bytes = b""
    groups: dict[int, list[Block]] = field(default_factory=dict)
    # Of a store: the files of the request's LoRA adapter that the names are of. None: it has no adapter.
    files: Files | None = None

    def __getstate__(self) -> tuple[str, bytes, dict[int, Columns], Files | None]:
        # vLLM pickles it for each rank.
        groups = {number: packed(blocks) for number, blocks in self.groups.items()}
        return self.request, self.tenant, groups, self.files

    def __setstate__(self, state: tuple[str, bytes, dict[int, Columns], Files | None]) -> None:
        self.request, self.tenant, groups, self.files = state
        self.groups = {number: unpacked(columns) for number, columns in groups.items()}


@dataclass
class _Request:
    """What is known of a request, in vLLM's context of it."""

    plan: Plan
    keys: Keys
    names: RequestNames
    # The step before which it came.
    began: int
    # What the index said in this step.
    step: int = -1
    known: dict[bytes, bool] = field(default_factory=dict)
    loads: Counter[bytes] = field(default_factory=Counter)
    # By group and the key of the first block.
    prefetches: dict[int, dict[bytes, list[Any]]] = field(default_factory=dict)
    # By group: so many blocks, from the first, were found and are reported.
    reported: dict[int, int] = field(default_factory=dict)


@dataclass
class _Group:
    """A group of layers: one space per shard of all ranks."""

    spaces: list[Any]
    # 0: a load needs all blocks.
    window: int


class KVFerryOffloadingManager(OffloadingManager):  # type: ignore[misc]
    """See `KVFerryOffloadingSpec`."""

    def __init__(self, config: Any, settings: StoreSettings, opened: OpenStore | None) -> None:
        self._config, self._settings, self._opened = config, settings, opened
        self._tokens = {it.group_id: it.tokens_per_block * config.cache.blocks_per_chunk for it in config.groups}
        self._cards: list[dict[str, Any]] | None = None
        self._cards_read_at = -_CARDS_EVERY_S
        self._tenant = b""
        self._groups: dict[int, _Group] = {}
        self._step = 0
        # The step at which blocks got other names.
        self._renamed_at = -2
        # Keys of stores that run.
        self._storing: Counter[bytes] = Counter()
        # By request: vLLM loads for a request once at a time.
        self._pins: dict[str, list[Any]] = {}
        self._core = core_of_callers()
        self._adapters = StoredAdapters(self._core, vllm_config_of_callers())
        self._events: StoreEvents | None = None
        if opened is not None and config.enable_kv_cache_events:
            self._events = StoreEvents(opened, locality=Locality.LOCAL, ownership=None, hashes_of=self._adapters.hashes)
        # Begun since the start.
        self.prefetches = 0
        self._stats = counters.SchedulerStats()
        self._plans = Plans(Limits.of_store(settings), "KVFerryOffloadingSpec", logger)
        self._version = self._core.version()
        self._core.on_named(self._follow_weights)
        self._cached = Cached(self._core)
        self._ready()

    # The store's names.

    def _ready(self) -> bool:
        """Whether the spaces are known: the workers write their cards before the scheduler is made."""
        if self._groups or self._opened is None:
            return bool(self._groups)
        now = time.monotonic()
        if now < self._cards_read_at + _CARDS_EVERY_S:
            return False
        first, self._cards_read_at = self._cards_read_at < 0, now
        ranks = range(self._config.parallel.world_size)
        cards = [read_card(self._config.engine_id, rank) for rank in ranks]
        if any(card is None for card in cards):
            if first:
                missing = [rank for rank, card in zip(ranks, cards, strict=True) if card is None]
                logger.warning(
                    "KVFerryOffloadingSpec: ranks %s have not said how they name their blocks, so no block is found; "
                    "all ranks must run on the scheduler's host, as one user, with one folder for temporary files",
                    missing,
                )
            return False
        self._cards = [card for card in cards if card is not None]
        remove_cards(self._config.engine_id, len(ranks))
        self._make_spaces()
        return bool(self._groups)

    def _make_spaces(self) -> None:
        """Without spaces no block is found or stored."""
        try:
            self._groups = self._spaces_of_cards()
            if self._events is not None:
                self._events.watch({number: group.spaces for number, group in self._groups.items()})
        except (KeyError, TypeError, ValueError, kvferry.Error) as error:
            # Of a card, or of a store that has closed. An exception here would end the engine.
            logger.error("KVFerryOffloadingSpec: no block is found or stored from now on: %r", error)
            self._groups, self._cards = {}, None

    def _spaces_of_cards(self) -> dict[int, _Group]:
        assert self._opened is not None
        names: dict[int, dict[tuple[str, str, int, int], int]] = {}
        for card in self._cards or ():
            for group in card["groups"]:
                for index, count in group["shards"]:
                    name = (card["model"], group["fingerprint"], index, count)
                    names.setdefault(group["group"], {})[name] = group["window"]
        groups = {}
        for number, shards in names.items():
            spaces = [
                self._opened.store.space(
                    model, layout=bytes.fromhex(layout), tenant=self._tenant, group=number, shard=(index, count)
                )
                for model, layout, index, count in sorted(shards)
            ]
            groups[number] = _Group(spaces, max(shards.values()))
        return groups

    # Requests.

    @_guarded(lambda self, _: RequestOffloadingContext())
    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        self._request(req_context)
        return RequestOffloadingContext()

    def _request(self, req_context: Any) -> _Request:
        request: _Request | None = req_context.get_state(_Request)
        if request is None:
            plan = self._plans.of(req_context.kv_transfer_params)
            request = _Request(plan, Keys(self._tokens), self._adapters.of_request(), self._step)
            req_context.set_state(request)
        return request

    def on_request_finished(self, req_context: Any) -> None:
        request: _Request | None = req_context.get_state(_Request)
        if request is not None:
            request.known.clear()
            request.prefetches.clear()

    def on_schedule_end(self, context: Any) -> None:
        self._step += 1
        self._cached.step_of_callers()

    # Look-ups.

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        # vLLM asks for each block of a prompt, on the scheduler's thread: what a call before has found in this step is
        # answered first.
        request: _Request | None = req_context.get_state(_Request)
        if (
            request is not None
            and request.step == self._step
            and request.known.get(key)
            and (not request.loads or request.loads.get(key, 0) < _LOADS_MAX)
        ):
            self._stats.hits += 1
            return _HIT
        result = self._lookup(key, req_context)
        self._stats.looked[result] += 1
        return result

    @_guarded(lambda self, *_: LookupResult.MISS)
    def _lookup(self, key: bytes, req_context: Any) -> LookupResult:
        if not self._ready() or not req_context.load_tier_filter.allows(Medium.STORAGE, Locality.LOCAL):
            return LookupResult.MISS
        number = get_offload_group_idx(key)
        group = self._groups.get(number)
        if group is None:
            return LookupResult.MISS
        request = self._request(req_context)
        if request.loads[key] >= _LOADS_MAX:
            return LookupResult.MISS
        if request.step != self._step:
            request.step = self._step
            request.known.clear()
        request.keys.update(req_context)
        # Asked before the index: a prefetch that ends between the two has its blocks looked up once more.
        runs = self._is_prefetching(number, request)
        if self._is_known(key, number, group, request):
            return LookupResult.HIT
        if key in self._storing:
            return LookupResult.HIT_PENDING
        if runs or (self._settings.object is not None and self._prefetch(key, number, group, request)):
            # It may arrive within the step.
            del request.known[key]
            return LookupResult.RETRY
        return LookupResult.MISS

    def _is_known(self, key: bytes, number: int, group: _Group, request: _Request) -> bool:
        found = request.known.get(key)
        if found is not None:
            return found
        request.known[key] = found = self._prefix(group, request.names.of([key])) == 1
        keys = [key]
        if found and group.window == 0:
            # vLLM asks for one block after another: the whole rest of a prompt is asked for at once.
            keys = request.keys.of(number, key)
            keys = keys[: self._prefix(group, request.names.of(keys))]
            request.known.update(dict.fromkeys(keys, True))
        if found and keys and self._events is not None:
            self._report(number, keys, request)
        return found

    def _report(self, number: int, keys: Sequence[bytes], request: _Request) -> None:
        """Reports blocks of a request that follow each other, once each."""
        assert self._events is not None
        place = request.keys.place(keys[0])
        if place >= 0:
            before = request.reported.get(number, 0)
            request.reported[number] = max(before, place + len(keys))
            if self._groups[number].window == 0:
                keys = keys[max(0, before - place) :]
        if keys:
            self._events.know(number, self._adapters.report(request.names, keys))

    def _prefix(self, group: _Group, hashes: list[bytes]) -> int:
        """How many blocks from the first on are in the store, in all shards. Takes the list."""
        try:
            for space in group.spaces:
                if not hashes:
                    break
                del hashes[space.lookup(hashes) :]
        except kvferry.Error:
            return 0
        return len(hashes)

    @staticmethod
    def _is_prefetching(number: int, request: _Request) -> bool:
        begun = request.prefetches.get(number, {})
        return any(not pending.done() for pendings in begun.values() for pending in pendings)

    def _prefetch(self, key: bytes, number: int, group: _Group, request: _Request) -> bool:
        """Begins a prefetch from the object store, while none of the group runs, and says whether it has."""
        begun = request.prefetches.setdefault(number, {})
        if key in begun or len(begun) >= _PREFETCHES_MAX:
            return False
        # vLLM looks for a window from its end.
        before = -(-group.window // self._tokens[number]) if group.window else None
        keys = request.keys.of(number, key, before=before)
        hashes = request.names.of(keys)
        # A prefetch ends at the first block that is missing, which the one before a window may be.
        runs = [hashes] if group.window == 0 else [[it] for it in hashes]
        try:
            begun[key] = [space.prefetch_async(run) for space in group.spaces for run in runs]
        except kvferry.Error:
            begun[key] = []
            return False
        self.prefetches += 1
        self._stats.counted.increase_counter(counters.PREFETCHES)
        return True

    def get_load_source(self, key: bytes, req_context: Any) -> CacheHitSource:
        return CacheHitSource.DISK

    # Loads.

    # Without a block each rank reports the load as failed.
    @_guarded(lambda self, _, req_context: StoredBlocks(req_context.req_id, self._tenant))
    def prepare_load(self, keys: Collection[bytes], req_context: Any) -> StoredBlocks:
        request = self._request(req_context)
        # Also in a step without tokens, where a request waits for what it loads.
        self._cached.add()
        spec = StoredBlocks(req_context.req_id, self._tenant)
        for key in keys:
            request.loads[key] += 1
            blocks = spec.groups.setdefault(get_offload_group_idx(key), [])
            blocks.append(Block(request.names.one(key)))
        self._release(req_context.req_id)
        pins = self._pins[req_context.req_id] = []
        for number, blocks in spec.groups.items():
            hashes = [block.hash for block in blocks]
            group = self._groups.get(number)
            for space in group.spaces if group else ():
                try:
                    pins.append(space.pin(hashes, self._settings.lease))
                except kvferry.Error as error:
                    # The load does without: a block that leaves meanwhile is missed, never wrong.
                    logger.debug("blocks of request %s are not pinned: %s", req_context.req_id, error)
        return spec

    @_guarded(lambda self, *_: None)
    def complete_load(self, keys: Collection[bytes], req_context: Any) -> None:
        self._release(req_context.req_id)

    def _release(self, request: str) -> None:
        for pin in self._pins.pop(request, ()):
            with suppress(kvferry.Error):
                pin.release()

    @_guarded(lambda self, *_: None)
    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        names = self._request(req_context).names
        for number, of_group in by_group(keys):
            group = self._groups.get(number)
            hashes = names.of(of_group)
            for space in group.spaces if group else ():
                try:
                    space.touch(hashes)
                except kvferry.Error:
                    return

    # Stores.

    @_guarded(
        lambda self, _, req_context: PrepareStoreOutput(
            keys_to_store=[], store_spec=StoredBlocks(req_context.req_id, self._tenant), evicted_keys=[]
        )
    )
    def prepare_store(self, keys: Collection[bytes], req_context: Any) -> PrepareStoreOutput | None:
        spec = StoredBlocks(req_context.req_id, self._tenant)
        to_store: list[bytes] = []
        request = self._request(req_context)
        self._cached.add()
        if self._ready() and self._may_store(request):
            spec.files = request.names.files
            for number, of_group in by_group(keys):
                group = self._groups.get(number)
                if group is not None:
                    to_store += self._prepare(of_group, number, group, request, req_context, spec)
        # Last: vLLM does not end what a call that has failed would count.
        self._storing.update(to_store)
        return PrepareStoreOutput(keys_to_store=to_store, store_spec=spec, evicted_keys=[])

    def _may_store(self, request: _Request) -> bool:
        """Whether the request's KV is computed with the weights of its names. vLLM offers blocks that it has found in
        its cache, too.
        """
        if request.began < self._renamed_at and self._step <= self._renamed_at + 1:
            # vLLM offers the last blocks of requests in the step after their end, which may have been before that.
            return False
        if self._cached.are_mixed:
            logger.warning_once(
                "KVFerryOffloadingSpec: the weights are others, or may be, and vLLM's cache has blocks of the weights "
                "before: nothing is stored until the cache is reset (pause with clear_cache, or POST "
                "/reset_prefix_cache, beside other connectors with ?reset_external=true; connectors with a store of "
                "their own keep such blocks even then: see New weights in docs/vllm.md)"
            )
            return False
        return request.names.may_store(is_computed=False)

    def _prepare(
        self, keys: list[bytes], number: int, group: _Group, request: _Request, req_context: Any, spec: StoredBlocks
    ) -> list[bytes]:
        request.keys.update(req_context)
        new, present = [], []
        for key in keys:
            if self._prefix(group, request.names.of([key])):
                present.append(key)
            elif key not in self._storing:
                new.append(key)
        self._touch_runs(group, present, request)
        if present and self._events is not None:
            self._events.know(number, self._adapters.report(request.names, present))
        for key in new:
            end = req_context.get_offload_key_position(key)
            retention = request.plan.at(end - 1) if end else request.plan.otherwise
            parent = request.keys.parent(number, key)
            parent_hash = request.names.one(parent) if parent is not None else None
            blocks = spec.groups.setdefault(number, [])
            blocks.append(Block(request.names.one(key), parent_hash, retention))
        return new

    @staticmethod
    def _touch_runs(group: _Group, keys: list[bytes], request: _Request) -> None:
        """Counts blocks as used that the engine has computed again."""
        place = request.keys.place
        try:
            for run in runs(keys, lambda last, key: place(last) + 1 == place(key)):
                names = request.names.of(run)
                for space in group.spaces:
                    space.touch(names)
        except kvferry.Error:
            return

    @_guarded(lambda self, *_, **__: None)
    def complete_store(self, keys: Collection[bytes], req_context: Any, success: bool = True) -> None:
        for key in keys:
            self._storing.pop(key, None)
        if self._events is not None and success:
            # Not all of them were stored: those that are on the disk are reported.
            names = self._request(req_context).names
            for number, of_group in by_group(keys):
                self._events.know(number, self._adapters.report(names, of_group))

    # The rest of vLLM's contract.

    def take_events(self) -> Iterable[OffloadingEvent]:
        return self._events.take(self._storing) if self._events is not None else ()

    def has_pending_work(self) -> bool:
        # vLLM publishes events in a step only.
        return self._events is not None and self._events.are_ready

    def reset_cache(self) -> None:
        """The weights may have changed: from now on this engine neither finds nor adds blocks under the names that
        engines share. What it put before stays for the others. Nothing is stored before vLLM's cache was emptied, too.
        """
        self._cached.got_other_weights()
        self._tenant, self._groups = os.urandom(16), {}
        self._storing.clear()
        for request in list(self._pins):
            self._release(request)
        self._step += 1
        self._renamed_at = self._step
        if self._cards is not None:
            self._make_spaces()

    def _follow_weights(self) -> None:
        """The engine was given the version of its weights. A store outlives it, and another training may give other
        weights the same version, so blocks of another one have names that nobody else has.
        """
        version = self._core.version()
        if version != self._version and self._opened is not None:
            self._version = version
            self.reset_cache()

    def get_stats(self) -> OffloadingConnectorStats | None:
        return self._stats.take(self._opened.store if self._opened else None)

    def shutdown(self) -> None:
        for request in list(self._pins):
            self._release(request)
        if self._opened is not None:
            opened, self._opened = self._opened, None
            self._groups.clear()
            opened.close()
        if self._events is not None:
            self._events.close()
