"""What the two halves have in common where they are in one process: the store, and the staging memory.

TensorRT-LLM gives both the same arguments, and makes them in two threads at once.
"""

from __future__ import annotations

import importlib
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import kvferry
from kvferry._engine.identity.trtllm import check_trtllm_weights_are_named
from kvferry._engine.log import Seldom, logger_of
from kvferry._engine.store import OpenStore, open_store
from kvferry.trtllm._engine_facts import Facts
from kvferry.trtllm._handoff import Handoff
from kvferry.trtllm._pages import Pages
from kvferry.trtllm._settings import Settings
from kvferry.trtllm._staging import Arena

logger = logger_of("trtllm")

_live: weakref.WeakValueDictionary[int, Local] = weakref.WeakValueDictionary()
_lock = threading.Lock()


class Local:
    """Of one rank. Ends with the last half that has it, or with the process."""

    def __init__(self, llm_args: Any) -> None:
        # Raises before anything is open.
        self.settings = Settings.of(llm_args)
        check_trtllm_weights_are_named(llm_args, self.settings.store.model, "kvferry.trtllm")
        self.facts = Facts.of(llm_args, self.settings.store.model)
        if self.settings.handoff.role != "off" and not self.facts.shares_requests:
            raise NotImplementedError(
                "kvferry.trtllm does not hand over with enable_attention_dp: ranks would need an address each; "
                "set handoff to off and let the engines share a store"
            )
        # While this lives, no other arguments have this address.
        self._llm_args = llm_args
        self.model = self.facts.model
        self.opened = open_store(self.settings.store, self.settings.store.host_bytes // self.facts.ranks, logger)
        self.pages: Pages | None = None
        self.arena: Arena | None = None
        # On rank 0, if prompts are handed over.
        self.handoff: Handoff | None = None
        self._end_handoff: Callable[[], Any] = lambda: None
        self.counts: Counter[str] = Counter()
        self.say = Seldom(logger, "kvferry.trtllm: ").say
        self._end = weakref.finalize(self, _close, self.opened)

    @staticmethod
    def of(llm_args: Any) -> Local:
        with _lock:
            found = _live.get(id(llm_args))
            if found is None:
                found = _live[id(llm_args)] = Local(llm_args)
            return found

    def space(self, group: int, shard: int) -> Any:
        assert self.opened is not None
        assert self.pages is not None
        return self.opened.store.space(
            self.model, layout=self.pages.fingerprint, group=group, shard=(shard, self.facts.ranks)
        )

    def register(self, pages: Pages) -> None:
        """All ranks call it at once. Raises NotImplementedError on all of them if they don't fit together."""
        rank, ranks = self.facts.rank, self.facts.ranks
        handoff = self.settings.handoff
        nbytes = self.settings.staging_bytes + (handoff.nbytes if handoff.role != "off" else 0)
        trouble = self._open_copies(pages)
        arena = Arena.make(nbytes, ranks) if rank == 0 else None
        if ranks > 1:
            arena = self._share(pages, arena, trouble)
        elif trouble is not None:
            raise NotImplementedError(f"kvferry.trtllm: {trouble}")
        self._hand_over(pages, arena)
        self.arena = arena
        self.pages = pages

    def _open_copies(self, pages: Pages) -> str | None:
        """Why the cache can't be copied, if so."""
        try:
            pages.copies.open(self.opened.agent if self.opened is not None else None)
        except kvferry.Error as error:
            return f"rank {self.facts.rank}: the KV cache can't be registered: {error}"
        return None

    def _hand_over(self, pages: Pages, arena: Arena | None) -> None:
        settings, trouble = self.settings.handoff, None
        self._end_handoff()
        self.handoff = None
        if settings.role == "off":
            return
        # Without the store, nothing is loaded, and so nothing is fetched.
        if self.facts.rank == 0 and arena is not None and self.opened is not None:
            begin = arena.head + self.settings.staging_bytes
            try:
                made = Handoff(settings, self.facts, self.model, pages, arena, begin, self.counts, self.say)
            except (kvferry.Error, ValueError) as error:
                trouble = error
            else:
                self._end_handoff = weakref.finalize(self, made.close)
                self.handoff = made
        troubles = [trouble] if self.facts.ranks == 1 else _allgather(trouble and str(trouble))
        if trouble is not None:
            raise trouble
        if any(troubles):
            raise ValueError(f"kvferry.trtllm: rank 0 can't hand over: {next(filter(None, troubles))}")

    def _share(self, pages: Pages, arena: Arena | None, trouble: str | None) -> Arena | None:
        rank, ranks = self.facts.rank, self.facts.ranks
        path = str(arena.path) if arena is not None else None
        cards = _allgather((rank, pages.fingerprint, path))
        if len({fingerprint for _, fingerprint, _ in cards}) > 1:
            trouble = f"rank {rank}: the ranks' KV caches differ"
        elif sorted(it for it, _, _ in cards) != list(range(ranks)):
            trouble = f"rank {rank}: {len(cards)} ranks registered their caches, and tensor parallelism has {ranks}"
        shared = next((path for it, _, path in cards if it == 0), None)
        if rank != 0 and shared is not None and trouble is None:
            try:
                arena = Arena.open(shared, ranks)
            except OSError as error:
                trouble = f"rank {rank} can't open rank 0's staging memory; all ranks must run on one host: {error}"
        troubles = [it for it in _allgather(trouble) if it is not None]
        if rank == 0 and arena is not None:
            arena.unlink()
        if troubles:
            raise NotImplementedError("kvferry.trtllm: " + "; ".join(troubles))
        return arena

    def close(self) -> None:
        self._end_handoff()
        self.handoff = None
        self._end()
        self.opened = None


def _allgather(value: Any) -> list[Any]:
    gathered: list[Any] = importlib.import_module("tensorrt_llm._utils").mpi_allgather(value)
    return gathered


def _close(opened: OpenStore | None) -> None:
    if opened is not None:
        # In a forked child, the store is the parent's.
        with suppress(kvferry.ForkedError):
            opened.close()
