"""The scheduler half: what of a prompt is loaded from the store, and which blocks of a step are saved."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import kvferry
from kvferry._engine.jobs import runs
from kvferry._engine.log import logger_of
from kvferry.trtllm._bases import bases
from kvferry.trtllm._breaker import Breaker
from kvferry.trtllm._handoff import Offer, Prompt
from kvferry.trtllm._keys import chain, is_named, salt_of
from kvferry.trtllm._loads import Loads, Staged
from kvferry.trtllm._local import Local
from kvferry.trtllm._meta import Copies, Load, Part, Save, Step
from kvferry.trtllm._of_trtllm import check_connector

logger = logger_of("trtllm")

_Base: Any = bases()[0]


@dataclass
class _Request:
    number: int
    # TensorRT-LLM writes into it how much of the offer it takes.
    given: Any
    salt: str | None
    prompt_tokens: int
    hashes: list[bytes]
    # Tokens that the engine had when it asked, and those that were promised beyond.
    computed: int = 0
    matched: int = 0
    load: Staged | None = None
    # Its prompt, prefilled for another engine.
    offer: Offer | None = None
    # All pages by group: as allocated, and as the steps have reported them.
    allocated: dict[int, list[int]] = field(default_factory=dict)
    pages: dict[int, list[int]] = field(default_factory=dict)
    priorities: list[int | None] = field(default_factory=list)
    # Blocks in the store, or on their way.
    stored: int = 0
    # Tokens before the current step.
    before: int = 0
    holds_pages: bool = False


class KVFerryConnectorScheduler(_Base):  # type: ignore[misc]
    """On rank 0; with attention data parallelism on every rank. Nothing of the store's troubles is raised here."""

    supports_attention_dp = True

    def __init__(self, llm_args: Any) -> None:
        check_connector(llm_args)
        super().__init__(llm_args)
        self._local = Local.of(llm_args)
        self._settings = self._local.settings
        self._requests: dict[int, _Request] = {}
        self._loads: Loads | None = None
        # Those of caches that were registered before, whose reads have not ended.
        self._closing: list[Loads] = []
        self._step = 0
        # Whether the engine's blocks are not those that the arguments describe.
        self._is_stopped = False
        # The number of the last load that was sent, synchronous and asynchronous.
        self._numbers = {False: 0, True: 0}
        # Of the step that is built: what ranks copy to hand it over.
        self._copies: list[Part] = []
        # Of look-ups in the store.
        self._store = Breaker()
        # Asynchronous loads that were promised, and whose requests ended before they were sent.
        self._abandoned: list[int] = []

    def wait_for_initialization(self) -> None:
        """The worker half makes what is needed."""

    # Look-ups.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        number = int(request.request_id)
        self._forget(number)
        pages = self._local.pages
        if pages is None or self._is_stopped or not is_named(request):
            return 0, False
        tokens = request.get_tokens(0)
        salt = salt_of(request)
        hashes = chain(tokens, pages.tokens_per_block, salt)
        state = _Request(number, request, salt, len(tokens), hashes, computed=num_computed_tokens)
        self._requests[number] = state
        prompt = Prompt.of(tokens, hashes, salt, pages.tokens_per_block) if self._local.handoff is not None else None
        try:
            self._look_up(state, prompt, pages.tokens_per_block)
        except kvferry.Error as error:
            what = "the store was not asked" if state.load is not None else "nothing is loaded"
            self._local.say("request %d: %s: %s", number, what, error)
        if prompt is not None and self._local.handoff is not None:
            state.offer = self._local.handoff.offer(prompt)
        return state.matched, state.matched > 0 and self._settings.load == "async"

    def _look_up(self, state: _Request, prompt: Prompt | None, tokens_per_block: int) -> None:
        loads = self._ready_loads()
        if loads is None:
            return
        loads.collect()
        first = state.computed // tokens_per_block
        self._local.counts["wanted_blocks"] += max(0, (state.prompt_tokens - 1) // tokens_per_block - first)
        handoff = self._local.handoff
        if handoff is not None and prompt is not None:
            slots = handoff.fetch(prompt, first, time.monotonic() + self._settings.load_wait)
            if slots is not None:
                self._promise(state, loads.handed_over(handoff, slots, first), tokens_per_block)
                state.stored = loads.in_store(state.hashes)
                return
        if not self._store.allows():
            self._local.counts["skipped_look_ups"] += 1
            state.stored = loads.in_store(state.hashes)
            return
        deadline = time.monotonic() + self._settings.load_wait
        state.stored = loads.found(state.hashes, deadline)
        if self._settings.load == "off":
            self._ended(found=False, late=loads.took_too_long)
            return
        # At least one token is computed, for its logits.
        usable = min(state.stored, (state.prompt_tokens - 1) // tokens_per_block)
        staged = loads.read(state.hashes, first, usable, deadline) if usable > first else None
        self._ended(found=staged is not None, late=loads.took_too_long)
        if staged is None:
            # A block that was found but can't be read is put again.
            state.stored = min(state.stored, first) if usable > first else state.stored
            return
        state.stored = state.stored if staged.end == usable else staged.end
        self._promise(state, staged, tokens_per_block)

    def _ended(self, *, found: bool, late: bool) -> None:
        # A miss in time says nothing of what a hit would cost.
        if found:
            self._store.worked()
        elif late and self._settings.load_wait > 0:
            self._local.say(
                "no look-ups in the store for %.0f s, since it took longer than load_wait", self._store.timed_out()
            )

    def _promise(self, state: _Request, staged: Staged, tokens_per_block: int) -> None:
        staged.is_async = self._settings.load == "async"
        state.load = staged
        state.matched = staged.end * tokens_per_block - state.computed
        self._local.counts["promised_blocks"] += staged.end - state.computed // tokens_per_block

    def _ready_loads(self) -> Loads | None:
        local = self._local
        if local.opened is None or local.pages is None or local.arena is None:
            return None
        before = self._loads
        if before is not None and before.arena is not local.arena:
            # The cache was registered anew: no request has outlived the one before.
            for number in [it.number for it in self._requests.values() if it.load is not None]:
                self._forget(number)
            self._loads = None
            if not before.close():
                self._closing.append(before)
        if self._loads is None:
            self._loads = Loads(local, local.arena)
        return self._loads

    # Pages.

    def update_state_after_alloc(self, request: Any, block_ids: Sequence[int]) -> None:
        self._allocated(request, {0: list(block_ids)})

    def update_state_after_alloc_by_layer_group(
        self, request: Any, block_ids_by_layer_group: Sequence[Sequence[int]]
    ) -> None:
        self._allocated(request, {group: list(pages) for group, pages in enumerate(block_ids_by_layer_group)})

    def _allocated(self, request: Any, pages: dict[int, list[int]]) -> None:
        state = self._requests.get(int(request.request_id))
        if state is not None:
            state.given = request
            state.allocated = pages

    # Steps.

    def build_connector_meta(self, scheduler_output: Any) -> Step:
        self._step += 1
        if self._loads is not None:
            self._loads.collect()
        if self._closing:
            self._closing = [it for it in self._closing if not it.is_ended()]
        handoff = self._local.handoff
        self._copies = []
        saves: list[Save] = []
        scheduled = set()
        for is_new, name in ((True, "new_requests"), (False, "cached_requests")):
            for data in getattr(scheduler_output, name, None) or ():
                state = self._requests.get(int(data.request_id))
                if state is not None:
                    scheduled.add(state.number)
                    saves += self._advance(state, data, is_new=is_new)
        loads: list[Load] = []
        async_loads: list[Load] = []
        for state in self._requests.values():
            if state.load is not None and (state.allocated or state.number in scheduled):
                (async_loads if state.load.is_async else loads).append(self._send(state, state.load))
        for number in self._abandoned:
            self._numbers[True] += 1
            async_loads.append(Load(self._numbers[True], number, ()))
        self._abandoned.clear()
        copies = None
        if handoff is not None and (self._copies or handoff.must_copy()):
            copies = Copies(handoff.next_copy(), tuple(self._copies))
            handoff.sent()
        return Step(self._step, tuple(loads), tuple(async_loads), tuple(saves), copies)

    def _send(self, state: _Request, staged: Staged) -> Load:
        assert self._loads is not None
        sent = [staged, *self._windows_before(state, staged)]
        pages = state.allocated or state.pages
        parts = []
        for run in (run for it in sent for run in it.runs):
            of_group = pages.get(run.group.number, [])[run.first : run.end]
            parts.append(Part(run.group.number, run.offsets, tuple(of_group)))
        self._numbers[staged.is_async] += 1
        state.load = None
        for it in sent:
            it.number, it.is_async = self._numbers[staged.is_async], staged.is_async
            self._loads.sent(it)
        return Load(staged.number, state.number, tuple(parts))

    def _windows_before(self, state: _Request, staged: Staged) -> list[Staged]:
        """More to load where the engine takes a part of the offer: windows are read for the end of all of it."""
        assert self._loads is not None
        assert self._local.pages is not None
        tokens_per_block, taken = self._local.pages.tokens_per_block, self._taken(state)
        first, end = state.computed // tokens_per_block, -(-(state.computed + taken) // tokens_per_block)
        deadline = time.monotonic() + self._settings.load_wait
        try:
            more = self._loads.windows_before(staged, state.hashes, first, end, deadline) if taken else None
        except LookupError as error:
            raise RuntimeError(
                f"kvferry.trtllm: request {state.number} takes {taken} of {state.matched} tokens of an offer, and the "
                f"windows before the end of these can't be read, without which its answer would be wrong: {error}"
            ) from error
        return [more] if more is not None else []

    def _advance(self, state: _Request, data: Any, *, is_new: bool) -> Iterator[Save]:
        """Takes a step of a request. Returns what it completes."""
        pages = self._local.pages
        assert pages is not None
        if is_new:
            state.pages, state.priorities = {}, []
        by_group = getattr(data, "new_block_ids_by_layer_group", None)
        new = list(enumerate(by_group)) if by_group else [(0, getattr(data, "new_block_ids", None) or [])]
        for group, numbers in new:
            state.pages.setdefault(group, []).extend(numbers)
        state.priorities += getattr(data, "priorities", None) or [None] * max(len(numbers) for _, numbers in new)
        if salt_of(data) is not None and state.salt is None:
            # This version shows the salt only now: the names are wrong.
            state.hashes = []
        position = int(getattr(data, "computed_position", 0))
        if is_new:
            position += self._left_out(state, position)
        state.before = position
        done = min(position + int(getattr(data, "num_scheduled_tokens", 0) or 0), state.prompt_tokens)
        if done > pages.tokens_per_block * min(len(state.pages.get(group.number, ())) for group in pages.groups):
            self._stop(state, done)
        end = min(done // pages.tokens_per_block, len(state.hashes))
        if state.offer is not None:
            self._hand_over(state, state.offer, end)
        begin, state.stored = state.stored, max(state.stored, end)
        if self._settings.save == "off" or begin >= end:
            return iter(())
        return self._saves(state, begin, end)

    def _hand_over(self, state: _Request, offer: Offer, end: int) -> None:
        handoff = self._local.handoff
        if handoff is None or not state.hashes:
            self._withdraw(state)
            return
        self._copies += handoff.copied(offer, state.before, end, state.pages)

    def _withdraw(self, state: _Request) -> None:
        if state.offer is not None and self._local.handoff is not None:
            self._local.handoff.ended(state.offer)
        state.offer = None

    def _stop(self, state: _Request, done: int) -> None:
        """Blocks have more tokens than the arguments say, which TensorRT-LLM decides for some models."""
        pages = self._local.pages
        assert pages is not None
        logger.error(
            "kvferry.trtllm: request %d has %d pages for %d tokens, which are too few for blocks of %d tokens; "
            "nothing is stored or loaded from now on: set kv_cache_config.tokens_per_block to what the model uses",
            state.number,
            min(len(it) for it in state.pages.values()),
            done,
            pages.tokens_per_block,
        )
        self._is_stopped = True
        for it in self._requests.values():
            it.hashes = []

    def _left_out(self, state: _Request, position: int) -> int:
        """The position of a new request leaves out what the step loads, but not what was loaded before."""
        taken = self._taken(state)
        return taken if position < state.computed + taken else 0

    def _taken(self, state: _Request) -> int:
        """How many tokens of the offer the engine takes."""
        taken = getattr(state.given, "py_num_connector_matched_tokens", None)
        return min(taken, state.matched) if isinstance(taken, int) else state.matched

    def _saves(self, state: _Request, begin: int, end: int) -> Iterator[Save]:
        """Runs of blocks with one priority, and with pages."""
        priority = functools.partial(self._priority, state)
        pages = self._local.pages
        assert pages is not None
        for group in pages.groups:
            numbers = state.pages.get(group.number, [])
            least = max(0, state.before - group.window) if group.window else 0
            kept = [
                at
                for at in range(begin, min(end, len(numbers)))
                if numbers[at] >= 0 and at * pages.tokens_per_block >= least
            ]
            for run in runs(kept, lambda last, at: last + 1 == at and priority(last) == priority(at)):
                yield self._save(state, group.number, numbers, run)

    def _save(self, state: _Request, group: int, numbers: list[int], run: list[int]) -> Save:
        state.holds_pages = True
        hashes = state.hashes[max(0, run[0] - 1) : run[-1] + 1]
        return Save(
            state.number,
            group,
            tuple(hashes),
            tuple(numbers[run[0] : run[-1] + 1]),
            self._priority(state, run[0]),
        )

    def _priority(self, state: _Request, block: int) -> int:
        priority = state.priorities[block] if block < len(state.priorities) else None
        store = self._settings.store
        return store.priority if priority is None else min(store.priority_max, max(0, int(priority)))

    # Ends.

    def request_finished(self, request: Any, cache_block_ids: Sequence[int]) -> bool:
        return self._finished(request)

    def request_finished_by_layer_group(
        self, request: Any, cache_block_ids_by_layer_group: Sequence[Sequence[int]]
    ) -> bool:
        return self._finished(request)

    def _finished(self, request: Any) -> bool:
        state = self._requests.get(int(request.request_id))
        self._forget(int(request.request_id))
        pages = self._local.pages
        return state is not None and state.holds_pages and pages is not None and pages.is_direct

    def request_reset(self, request: Any) -> None:
        """Its pages are gone, and it will be asked for again. Not in every version."""
        self._forget(int(request.request_id))

    def cancel_load(self, request: Any, start: int, end: int) -> None:
        """The engine does not take tokens `start` to before `end` of an offer, and takes the rest. They are its
        beginning, which the engine has by now, its end, or all of it. Not in every version.
        """
        state = self._requests.get(int(request.request_id))
        pages = self._local.pages
        if state is None or state.load is None or pages is None:
            return
        offered = state.computed + state.matched
        start, end = max(start, state.computed), min(end, offered)
        if start >= end or (start > state.computed and end < offered):
            return
        # A block that is taken in part is loaded.
        begin = 0 if start == state.computed else -(-start // pages.tokens_per_block)
        behind = state.load.end if end == offered else end // pages.tokens_per_block
        state.load.runs = [it.without(begin, behind) for it in state.load.runs]
        if start == state.computed:
            state.computed = end
        state.matched -= end - start
        if state.matched == 0 and not state.load.is_async:
            assert self._loads is not None
            self._loads.release(state.load)
            state.load = None

    def _forget(self, number: int) -> None:
        state = self._requests.pop(number, None)
        if state is not None:
            self._withdraw(state)
        if state is None or state.load is None:
            return
        assert self._loads is not None
        self._loads.release(state.load)
        if state.load.is_async:
            # TensorRT-LLM waits for the end of the load.
            self._abandoned.append(number)

    def stats(self) -> dict[str, int]:
        """Counts since the start, and of the store."""
        stats = dict(self._local.counts)
        if self._local.handoff is not None:
            stats["refused_followers"] = stats.get("refused_followers", 0) + self._local.handoff.refused_followers
        if self._local.opened is not None:
            stats |= {"store_" + name: value for name, value in self._local.opened.store.stats().items()}
        return stats

    def shutdown(self) -> None:
        for number in list(self._requests):
            self._forget(number)
