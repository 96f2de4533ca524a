"""What `KVFerryOffloadingSpec` and `KVFerryTier` tell vLLM's publisher of the blocks in the store. See docs/storage.md.

An engine reports the blocks that it has stored or loaded: as stored when they are on the disk, and as removed when they
have left it, whichever process put or removed them. A block counts as one that has left while its directory hangs for
this engine. One thread follows the store; the scheduler's thread takes what is
ready, a bounded part in each step. An idle engine is woken, so that what another engine evicts is published, too.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import Locality, Medium, OffloadingEvent

import kvferry
from kvferry.vllm._log import logger

if TYPE_CHECKING:
    from kvferry._engine.store import OpenStore


# How long the thread waits for a change until it looks whether it is to end.
_GATHER_S = 60.0
# Blocks that a step reports as removed; as stored an eighth of it. vLLM makes an event of its own for each of these,
# which takes some microseconds.
_BUDGET = 2048
# vLLM's tracker believes of each block that it is in its own host memory, too.
_PRESUMED = {(Medium.CPU, None)}


class StoreEvents:
    """The events of one store. Only `close` waits."""

    def __init__(
        self,
        opened: OpenStore,
        *,
        locality: Locality | None,
        ownership: str | None,
        hashes_of: Callable[[Sequence[bytes]], Sequence[bytes]],
    ) -> None:
        """`hashes_of`: vLLM's hashes of blocks, by their names in the store."""
        self._store, self._hashes_of = opened.store, hashes_of
        self._locality, self._ownership = locality, ownership
        self._watch: kvferry.Watch | None = None
        # vLLM's numbers of the groups, by those of the watch.
        self._numbers: list[int] = []
        # By group and name: vLLM's hash of a block that was published as stored, where that is another. Blocks of two
        # weights of an adapter have one hash.
        self._published: dict[tuple[int, bytes], bytes] = {}
        # How many names of a group such a hash has.
        self._names: Counter[tuple[int, bytes]] = Counter()
        self._wake = engine_waker()
        self._tracker = tracker_of_callers()
        self._thread: threading.Thread | None = None

    def watch(self, groups: Mapping[int, Sequence[Any]]) -> None:
        """Watches blocks in these spaces, by vLLM's number of the group. What was reported before is taken back."""
        numbers, spaces = list(groups), [list(of_group) for of_group in groups.values()]
        try:
            if self._watch is None:
                self._watch = self._store.watch(spaces)
                self._thread = threading.Thread(target=self._gather, name="kvferry-events", daemon=True)
                self._thread.start()
            elif numbers == self._numbers:
                self._watch.reset(spaces)
            else:
                # Reports that wait have other numbers.
                raise ValueError(f"the groups of layers were {self._numbers} and are {numbers}")
        except kvferry.Error as error:
            logger.warning("the store's events are not published: %s", error)
            return
        self._numbers = numbers

    def know(self, number: int, hashes: Sequence[bytes]) -> None:
        """Reports these blocks of a group from now on: those that are in the store, and the others when they come."""
        if self._watch is None or number not in self._numbers:
            return
        try:
            self._watch.add(self._numbers.index(number), hashes)
        except kvferry.Error as error:
            logger.debug("blocks are not reported: %s", error)

    @property
    def are_ready(self) -> bool:
        """Whether the next step has something to publish."""
        try:
            return self._watch is not None and self._watch.reports > 0
        except kvferry.Error:
            return False

    def take(self, storing: Container[bytes] = ()) -> Iterable[OffloadingEvent]:
        """The next events, in their order. `storing`: blocks that are being stored."""
        if self._watch is None:
            return
        try:
            reports = self._watch.take(_BUDGET)
        except kvferry.Error:
            return
        removed: list[bytes] = []
        for group, is_removed, hashes in reports:
            end = self._numbers[group].to_bytes(4, "big")
            known = self._known(group, hashes, is_removed=is_removed)
            # As vLLM's make_offload_key, without a call for each block.
            keys = [block + end for block in known]
            if not keys:
                continue
            yield OffloadingEvent(
                keys=keys,
                medium=Medium.STORAGE,
                removed=is_removed,
                locality=self._locality,
                ownership=self._ownership,
                removal_expected=not is_removed,
            )
            if is_removed:
                removed += [key for key in keys if key not in storing]
        self._forget(removed)

    def _known(self, group: int, names: Sequence[bytes], *, is_removed: bool) -> Sequence[bytes]:
        """vLLM's hashes of blocks that have come, or left. A hash has left with the last of its names."""
        hashes = self._hashes_of(names)
        if hashes is names and not self._published:
            return names
        found = []
        for name, of_vllm in zip(names, hashes, strict=True):
            if is_removed:
                published = self._published.pop((group, name), None)
                if published is None:
                    found.append(of_vllm)
                    continue
                self._names[group, published] -= 1
                if self._names[group, published] <= 0:
                    del self._names[group, published]
                    found.append(published)
                continue
            found.append(of_vllm)
            if name != of_vllm and (group, name) not in self._published:
                self._published[group, name] = of_vllm
                self._names[group, of_vllm] += 1
        return found

    def _forget(self, removed: list[bytes]) -> None:
        """Has vLLM's tracker forget blocks that are in no tier. It presumes that each is in vLLM's own host memory,
        too, which `KVFerryOffloadingSpec` does not have, and would keep what it knows of them for ever.
        """
        tracker = self._tracker() if self._tracker is not None and self._ownership is None else None
        if tracker is None:
            return
        known = getattr(tracker, "_pending_event_metadata", None)
        if known:
            for key in removed:
                of_key = known.get(key)
                if of_key is not None and of_key.active_residencies <= _PRESUMED:
                    del known[key]

    def _gather(self) -> None:
        watch = self._watch
        assert watch is not None
        while True:
            try:
                made = watch.gather(_GATHER_S)
            except kvferry.Error:
                # The store was closed.
                return
            if made:
                self._wake()

    def close(self) -> None:
        """To be called when the store was closed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._watch = None


def engine_waker() -> Callable[[], None]:
    """Makes vLLM's engine look whether there is work, if an object that its process makes calls this.

    An idle engine waits for requests and makes no step, in which alone events are published.
    """
    core = _caller("EngineCoreProc")
    try:
        from vllm.v1.engine import EngineCoreRequestType

        message = (EngineCoreRequestType.WAKEUP, None)
    except (ImportError, AttributeError):
        core = None
    if core is None:
        # The engine is in the process of its user, which makes its steps.
        return lambda: None
    queue = core.input_queue
    return lambda: queue.put_nowait(message)


def tracker_of_callers() -> Callable[[], Any] | None:
    """vLLM's tracker of offloaded blocks, which the connector's scheduler makes after the manager."""
    scheduler = _caller("OffloadingConnectorScheduler")
    if scheduler is None:
        return None
    of_scheduler = weakref.ref(scheduler)
    return lambda: getattr(of_scheduler(), "_events_tracker", None)


def _caller(name: str) -> Any | None:
    """The next caller that is a method of this class of vLLM, or of one that is derived from it."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        it = frame.f_locals.get("self")
        if any(kind.__name__ == name for kind in type(it).__mro__):
            return it
        frame = frame.f_back
    return None
