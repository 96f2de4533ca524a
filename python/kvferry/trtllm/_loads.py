"""Loads: blocks are read and checked before they are promised, and kept until every rank has copied them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import kvferry
from kvferry._engine.jobs import settled
from kvferry._engine.memory import Extents
from kvferry.trtllm._handoff import Handoff
from kvferry.trtllm._local import Local
from kvferry.trtllm._pages import Group
from kvferry.trtllm._staging import Arena


@dataclass(frozen=True)
class Run:
    """Blocks `first` to before `end` of a group, one after another; `offsets`: of each rank's first."""

    group: Group
    first: int
    end: int
    offsets: tuple[int, ...]

    def without(self, begin: int, end: int) -> Run:
        """The blocks before `begin` or, if there are none, those from `end` on."""
        if begin > self.first:
            return replace(self, end=min(self.end, begin))
        first = min(self.end, max(self.first, end))
        skipped = (first - self.first) * self.group.nbytes
        return replace(self, first=first, offsets=tuple(offset + skipped for offset in self.offsets))


@dataclass
class Staged:
    """Blocks of a prompt in the staging memory."""

    runs: list[Run]
    end: int
    extent: tuple[int, int]
    is_async: bool = False
    # Once it was sent.
    number: int = 0
    pending: list[Any] = field(default_factory=list)
    # Takes `extent` back.
    give: Any = None


class Loads:
    """On the scheduler's thread. Errors of the store are misses."""

    def __init__(self, local: Local, arena: Arena) -> None:
        assert local.pages is not None
        assert local.opened is not None
        self._local, self.arena, self._pages = local, arena, local.pages
        self._ranks = local.facts.ranks
        # As a buffer, which the agent keeps for as long as anything writes to it.
        self._region = local.opened.agent.register(arena.buffer, "none")
        self._extents = Extents(arena.head, arena.head + local.settings.staging_bytes)
        self._spaces = {
            group.number: [local.space(group.number, rank) for rank in range(self._ranks)]
            for group in self._pages.groups
        }
        self._full = [group for group in self._pages.groups if not group.window] or [self._pages.groups[0]]
        self._windows = [group for group in self._pages.groups if group not in self._full]
        # Sent, or given up while the store still writes there.
        self._kept: list[Staged] = []
        self._given_up: list[Staged] = []
        # Whether the last look-up waited in vain.
        self.took_too_long = False

    @property
    def free_bytes(self) -> int:
        return self._extents.free_bytes

    def found(self, hashes: list[bytes], deadline: float) -> int:
        """How many blocks of a prompt, from its beginning, are in the store for all ranks and groups."""
        self.took_too_long = False
        end = self.in_store(hashes)
        if self._local.settings.store.object is not None and end < len(hashes):
            begun = [space.prefetch_async(hashes) for group in self._full for space in self._spaces[group.number]]
            # A window needs its last blocks only, which are not the beginning of anything.
            for group in self._windows:
                last = hashes[self._first(group, 0, len(hashes)) :]
                begun += [space.prefetch_async([it]) for space in self._spaces[group.number] for it in last]
            self.took_too_long = not settled(begun, deadline)
            if not self.took_too_long:
                end = self.in_store(hashes)
        return end

    def in_store(self, hashes: list[bytes]) -> int:
        """As `found`, of the store's own disks and memory."""
        end = len(hashes)
        for group in self._full:
            for space in self._spaces[group.number]:
                end = min(end, space.lookup(hashes[:end]))
        return end

    def _first(self, group: Group, first: int, end: int) -> int:
        """Of the blocks that a load up to `end` needs."""
        if group not in self._windows:
            return first
        return max(first, (end * self._pages.tokens_per_block - group.window) // self._pages.tokens_per_block, 0)

    def _window_end(self, hashes: list[bytes], first: int, end: int) -> int:
        """The last end, of a load that begins at `first`, before which all windows are in the store."""
        while end > first:
            gaps = []
            for group in self._windows:
                begin = self._first(group, first, end)
                for space in self._spaces[group.number]:
                    found = space.lookup(hashes[begin:end])
                    if begin + found < end:
                        gaps.append(begin + found)
            if not gaps:
                return end
            # Each end behind a gap, up to this one, needs the missing block.
            end = min(gaps)
        return end

    def read(self, hashes: list[bytes], first: int, found: int, deadline: float) -> Staged | None:
        """Reads blocks `first` to before `found`, or fewer. None if there is nothing to load."""
        end, staged = found, None
        while staged is None:
            end = self._window_end(hashes, first, end)
            if end <= first:
                return None
            staged = self._reserve([(group, self._first(group, first, end), end) for group in self._pages.groups], end)
            if staged is None:
                end = first + (end - first) // 2
        try:
            self._begin(staged, hashes)
        except kvferry.Error:
            self._given_up.append(staged)
            raise
        if not settled(staged.pending, deadline):
            self._local.say("the store has not read %d blocks in load_wait; they are computed", end - first)
            self._local.counts["load_timeouts"] += 1
            self.took_too_long = True
            self._given_up.append(staged)
            return None
        return self._checked(staged, first)

    def _begin(self, staged: Staged, hashes: list[bytes]) -> None:
        for run in staged.runs:
            for space, offset in zip(self._spaces[run.group.number], run.offsets, strict=True):
                places = range(offset, offset + (run.end - run.first) * run.group.nbytes, run.group.nbytes)
                blocks = kvferry.Blocks(self._region, places, run.group.nbytes)
                staged.pending.append(space.get_async(hashes[run.first : run.end], blocks))

    def _reserve(self, wanted: list[tuple[Group, int, int]], end: int) -> Staged | None:
        """`wanted`: of each group, from which block to which one. None if there is no room."""
        extent = self._extents.take(self._ranks * sum((end - begin) * group.nbytes for group, begin, end in wanted))
        if extent is None:
            return None
        at, runs = extent[0], []
        for group, begin, behind in wanted:
            size = (behind - begin) * group.nbytes
            runs.append(Run(group, begin, behind, tuple(at + rank * size for rank in range(self._ranks))))
            at += self._ranks * size
        return Staged(runs, end, extent, give=self._extents.give)

    def handed_over(self, handoff: Handoff, slots: tuple[int, int], first: int) -> Staged:
        """Blocks from `first` on that another engine has handed over. All groups have all of them."""
        end = first + slots[1] - slots[0]
        runs = [Run(group, first, end, handoff.offsets(group, slots[0])) for group in self._pages.groups]
        return Staged(runs, end, slots, give=handoff.give)

    def windows_before(
        self, staged: Staged, hashes: list[bytes], first: int, end: int, deadline: float
    ) -> Staged | None:
        """What windows need where the engine takes an offer only up to `end`, and a load does not have, if any.

        Raises LookupError if it can't be read.
        """
        wanted = [
            (run.group, self._first(run.group, first, end), min(end, run.first))
            for run in staged.runs
            if run.group in self._windows
        ]
        wanted = [(group, begin, behind) for group, begin, behind in wanted if begin < behind]
        if not wanted:
            return None
        more = self._reserve(wanted, end)
        if more is None:
            raise LookupError("the staging memory has no room for them; raise staging_gib")
        try:
            self._begin(more, hashes)
            if not settled(more.pending, deadline):
                raise LookupError("they were not read in load_wait")
            results = iter(more.pending)
            if not all(next(results).wait() == run.end - run.first for run in more.runs for _ in run.offsets):
                raise LookupError("they have left the store")
        except (kvferry.Error, LookupError) as error:
            self._given_up.append(more)
            raise LookupError(str(error)) from error
        more.pending.clear()
        return more

    def _checked(self, staged: Staged, first: int) -> Staged | None:
        """What was read in fact: a block may be damaged, or have left."""
        end = staged.end
        results = iter(staged.pending)
        for run in staged.runs:
            for _ in run.offsets:
                try:
                    read = next(results).wait()
                except kvferry.Error as error:
                    self._local.say("blocks can't be read and are computed: %s", error)
                    read = 0
                end = min(end, run.first + read if run.group in self._full or read == run.end - run.first else first)
        staged.pending.clear()
        if end < staged.end:
            self._local.counts["missed_blocks"] += staged.end - end
            # The blocks of a window are those before another end.
            if self._windows:
                end = first
        if end <= first:
            staged.give(staged.extent)
            return None
        staged.end = end
        staged.runs = [Run(it.group, it.first, end, it.offsets) for it in staged.runs]
        return staged

    def sent(self, staged: Staged) -> None:
        self._kept.append(staged)

    def release(self, staged: Staged) -> None:
        """A load that was not sent."""
        staged.give(staged.extent)

    def close(self) -> bool:
        """Waits for reads that were given up, not longer than kvferry's silence limit. False if some are not done: the
        agent keeps the arena's memory until a later call returns True, or for ever.
        """
        assert self._local.opened is not None
        try:
            self._local.opened.agent.unregister(self._region)
        except kvferry.QuarantinedError as error:
            self._local.say("a read from the store does not end, and keeps its staging memory: %s", str(error))
            return False
        return True

    def is_ended(self) -> bool:
        """Of loads whose `close` returned False. Does not wait."""
        return not self._region.is_quarantined and self.close()

    def collect(self) -> None:
        """Frees what all ranks have copied."""
        if not self._kept and not self._given_up:
            return
        done = {is_async: self.arena.copied_by_all(is_async=is_async) for is_async in (False, True)}
        for staged in [it for it in self._kept if it.number <= done[it.is_async]]:
            self._kept.remove(staged)
            staged.give(staged.extent)
        for staged in [it for it in self._given_up if all(pending.done() for pending in it.pending)]:
            self._given_up.remove(staged)
            staged.give(staged.extent)
