"""Handing prompts over, from the engine that prefills to the one that decodes, through memory of rank 0 at both ends.

TensorRT-LLM gives a connector no parameters of a request, so a prompt is found by its content: decode engines follow
prefill engines, and these tell their followers which prompts they have computed. TensorRT-LLM has no way to hear that
a load has failed, so a prompt is in the decode engine's memory before it is promised. What is handed over is decided
in `kvferry.connector`: a prompt goes through slots of memory, which its exchange gives out.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import kvferry
from kvferry._engine.address import join, split
from kvferry._engine.identity import bounded
from kvferry._engine.log import logger_of
from kvferry.connector import Exchange, log_to_stderr, prompt_id
from kvferry.trtllm._engine_facts import Facts
from kvferry.trtllm._meta import Part
from kvferry.trtllm._pages import Group, Pages
from kvferry.trtllm._settings import HandoffSettings
from kvferry.trtllm._staging import Arena

logger = logger_of("trtllm")


@dataclass(frozen=True)
class Prompt:
    """Full blocks of a prompt, but for one that ends with it: one token is computed."""

    # Names its content, in 32 bytes.
    key: bytes
    identity: bytes
    blocks: int

    @staticmethod
    def of(tokens: Sequence[int], hashes: Sequence[bytes], salt: str | None, tokens_per_block: int) -> Prompt | None:
        """None if it has no such block, or tokens that are no token ids."""
        blocks = min(len(hashes), (len(tokens) - 1) // tokens_per_block)
        if blocks <= 0:
            return None
        end = blocks * tokens_per_block
        try:
            identity = prompt_id(tokens[:end], [] if salt is None else ["salt:" + salt])
        except (OverflowError, TypeError):
            return None
        return Prompt(hashes[blocks - 1], identity, blocks)


@dataclass
class Offer:
    """A prompt that this engine prefills for another one."""

    # A cache that is registered anew has another handoff.
    owner: Handoff
    number: int
    # The first of its slots, which are one after another.
    slot: int
    prompt: Prompt
    # Blocks that are copied, or will be.
    blocks: int = 0
    # The last copy.
    copy: int = 0
    has_ended: bool = False


class Handoff:
    """On rank 0. `slots` begin at `begin` in the arena: of each rank, of each group of layers, one after another."""

    def __init__(
        self,
        settings: HandoffSettings,
        facts: Facts,
        model: str,
        pages: Pages,
        arena: Arena,
        begin: int,
        counts: Counter[str],
        say: Any,
    ) -> None:
        self._settings, self._ranks, self._pages, self.arena = settings, facts.ranks, pages, arena
        self._counts, self._say = counts, say
        of_rank = sum(group.nbytes for group in pages.groups)
        self.slots = (arena.nbytes - begin) // (of_rank * self._ranks)
        if self.slots == 0:
            raise ValueError(
                f"kvferry.trtllm: handoff_gib has no room for one block, which has {of_rank * self._ranks} bytes"
            )
        self._bases: dict[int, list[int]] = {group.number: [] for group in pages.groups}
        at = begin
        for _ in range(self._ranks):
            for group in pages.groups:
                self._bases[group.number].append(at)
                at += self.slots * group.nbytes
        # The number of the last copy that ranks were told to make.
        self._copies = 0
        self._is_closed = False
        self._pid = os.getpid()
        self._open(facts, model)
        # Before kvferry closes the exchange at exit.
        atexit.register(self.close)
        self._thread = threading.Thread(target=self._run, name="kvferry-handoff", daemon=True)
        self._thread.start()

    def _open(self, facts: Facts, model: str) -> None:
        # What the exchange has to say, such as that an engine of `prefill` can't be reached, is said by no logger of
        # Python.
        if "KVFERRY_LOG" not in os.environ:
            log_to_stderr("warn")
        settings, secret = self._settings, self._settings.secret()
        host = None if settings.listen is None else join(split(settings.listen)[0], 0)
        self._agents: list[Any] = []
        try:
            # Each rank has an agent of its own. Followers know the address of this one.
            self._control = kvferry.Agent("trtllm-control", listen=settings.listen, secret=secret)
            self._agents.append(self._control)
            ranks = []
            for rank in range(self._ranks):
                agent = kvferry.Agent(f"trtllm-rank-{rank}", listen=host, secret=secret)
                self._agents.append(agent)
                region = agent.register(self.arena.buffer, "r")
                ranks.append((agent, self._layout(rank, region), region))
            self._exchange = Exchange(
                self._control,
                ranks,
                len(self._pages.groups),
                block_tokens=self._pages.tokens_per_block,
                slots=self.slots,
                timeout=settings.timeout,
                model={"model": bounded(model), "dtype": facts.dtype},
                producers=settings.producers,
                publishes=settings.prefills,
                follows=settings.prefill if settings.decodes else (),
            )
        except BaseException:
            for agent in self._agents:
                agent.shutdown()
            raise
        if settings.is_open_to_hosts(self._control):
            logger.warning(
                "kvferry.trtllm: every host that reaches %s can read the KV that is handed over; set secret_file on "
                "all engines",
                self._control.address,
            )

    def _layout(self, rank: int, region: Any) -> str:
        """The layout of a rank: slots are blocks, a group of layers is a layer, and a rank is a head."""
        encoding = "trtllm-" + self._pages.fingerprint.hex()[:48]
        groups, shapes, layers = [], [], []
        for at, group in enumerate(self._pages.groups):
            name, tokens = f"group-{group.number}", self._pages.tokens_per_block
            groups.append({"name": name, "kind": "full", "block_tokens": tokens, "blocks": self.slots})
            shape = {"role": "kv", "encoding": encoding, "bits": 8, "heads_total": self._ranks, "head_start": rank}
            shape |= {"heads": 1, "rows": 1, "content": group.nbytes, "block_stride": group.nbytes}
            shape |= {"kernel_blocks": 1, "kernel_stride": 0, "head_stride": 0, "row_stride": 0}
            shapes.append(shape)
            plane = {"shape": at, "region": 0, "base": self._bases[group.number][rank]}
            layers.append({"name": name, "group": at, "planes": [plane]})
        regions = [{"id": region.id, "len": region.nbytes}]
        return json.dumps({"v": 1, "regions": regions, "groups": groups, "shapes": shapes, "layers": layers})

    @property
    def address(self) -> str:
        """What decode engines follow."""
        return str(self._control.address)

    @property
    def followers(self) -> int:
        """How many engines that decode are told of prompts."""
        return self._exchange.followers

    @property
    def refused_followers(self) -> int:
        """Engines that were refused and that the counts don't have yet."""
        return 0 if self._is_closed else self._exchange.refused

    def offsets(self, group: Group, slot: int) -> tuple[int, ...]:
        """Where a slot begins in the arena, for each rank."""
        return tuple(base + slot * group.nbytes for base in self._bases[group.number])

    # The engine that prefills.

    def offer(self, prompt: Prompt) -> Offer | None:
        """This engine computes a prompt, and will tell its followers. None if there are none, or there is no room."""
        if not self._settings.prefills or self._is_closed:
            return None
        try:
            offered = self._exchange.offer((prompt.key, prompt.identity, prompt.blocks))
        except MemoryError:
            self._counts["handoffs_without_room"] += 1
            self._say(
                "a prompt of %d blocks is not handed over: other prompts wait to be fetched; raise handoff_gib",
                prompt.blocks,
            )
            return None
        return None if offered is None else Offer(self, *offered, prompt)

    def next_copy(self) -> int:
        """The number of the copy that ranks are told to make next."""
        return self._copies + 1

    def must_copy(self) -> bool:
        """Whether ranks must get the next copy even if it is empty: one before it was not made, or not yet."""
        return self.arena.handed_by_all() < self._copies

    def sent(self) -> None:
        """The next copy is on its way to the ranks."""
        self._copies += 1

    def copied(self, offer: Offer, before: int, end: int, pages: dict[int, list[int]]) -> list[Part]:
        """What all ranks copy to slots in the next copy: blocks before `end`. Empty if there is nothing.

        `before`: tokens before the step that has completed them. A group with a sliding window has no others than those
        of its window before that, where they were loaded or reused; such a prompt is not handed over.
        """
        begin, end = offer.blocks, min(end, offer.prompt.blocks)
        if offer.owner is not self or offer.has_ended or begin >= end:
            return []
        parts = []
        for group in self._pages.groups:
            of_group = pages.get(group.number, [])[begin:end]
            has_passed = group.window and (begin + 1) * self._pages.tokens_per_block <= before - group.window
            if len(of_group) < end - begin or min(of_group) < 0 or has_passed:
                self.ended(offer)
                return []
            parts.append(Part(group.number, self.offsets(group, offer.slot + begin), tuple(of_group)))
        offer.blocks, offer.copy = end, self.next_copy()
        self._exchange.copies(offer.number, begin, end, offer.copy)
        self._counts["offered_blocks"] += end - begin
        return parts

    def ended(self, offer: Offer) -> None:
        """Its request has ended. What was not computed by then is not handed over."""
        if offer.owner is not self or offer.has_ended:
            return
        offer.has_ended = True
        self._exchange.ended(offer.number, offer.copy)

    # The engine that decodes.

    def fetch(self, prompt: Prompt, first: int, deadline: float) -> tuple[int, int] | None:
        """Fetches blocks from `first` on, if a prefill engine has said that it has the prompt. Returns their slots.

        Waits until they are here, or `deadline`.
        """
        if not self._settings.decodes or self._is_closed:
            return None
        wait = max(0.0, deadline - time.monotonic())
        slots, missed = self._exchange.fetch((prompt.key, prompt.identity, prompt.blocks), first, wait)
        for what, why, pause in missed:
            self._counts["handoffs_without_room" if what == "room" else "failed_handoffs"] += 1
            if what == "room":
                self._say("a prompt of %s blocks is not fetched: raise handoff_gib", why)
            elif what == "failed":
                self._say("a prompt was not handed over; it is loaded from the store or computed: %s", why)
            else:
                self._counts["handoff_timeouts"] += 1
                self._say(
                    "a prompt was not handed over in load_wait; it is loaded from the store or computed, and %s is not "
                    "asked for %.0f s",
                    why,
                    pause,
                )
        if slots is not None:
            self._counts["received_blocks"] += slots[1] - slots[0]
        return slots

    def give(self, slots: tuple[int, int]) -> None:
        """Slots that `fetch` has returned, once their blocks are in the cache."""
        self._exchange.give(slots)

    # Both.

    def _run(self) -> None:
        """Waits until a rank has made a copy, or not made it."""
        arena = self.arena
        while not self._is_closed:
            arena.bell.wait()
            self._exchange.made(arena.handed_by_all(), arena.lost_by_any())

    def gauges(self) -> dict[str, int]:
        """Counts of what is under way, by name: all zero when nothing is."""
        connected = ("followers", "following")
        return {name: value for name, value in self._exchange.gauges().items() if name not in connected}

    def close(self) -> None:
        """Peers hear that nothing is offered any more. A second call does nothing."""
        if self._pid != os.getpid():
            # In a forked child, all of it is the parent's.
            return
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        self.arena.bell.ring()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._counts["refused_followers"] += self._exchange.refused
        self._exchange.close()
        for agent in self._agents:
            agent.shutdown()
