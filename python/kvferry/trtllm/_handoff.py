"""Handing prompts over, from the engine that prefills to the one that decodes, through memory of rank 0 at both ends.

TensorRT-LLM gives a connector no parameters of a request, so a prompt is found by its content: decode engines follow
prefill engines, and these tell their followers which prompts they have computed. TensorRT-LLM has no way to hear that
a load has failed, so a prompt is in the decode engine's memory before it is promised. What is handed over is decided
in `kvferry.connector`: here are its two halves, one worker half for each rank, and slots, which are its blocks.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import re
import secrets
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import kvferry
from kvferry._engine.identity import bounded
from kvferry._engine.memory import Extents
from kvferry.connector import SchedulerHalf, WorkerHalf, prompt_id
from kvferry.trtllm._engine_facts import Facts
from kvferry.trtllm._followers import Claim, Followers
from kvferry.trtllm._meta import Part
from kvferry.trtllm._pages import Group, Pages
from kvferry.trtllm._settings import HandoffSettings
from kvferry.trtllm._staging import Arena
from kvferry.trtllm._threads import Threads

logger = logging.getLogger("kvferry.trtllm")

# Names of notifications.
_FOLLOW, _FOLLOWED = "kvferry.trtllm.follow", "kvferry.trtllm.followed"
_OFFER, _GONE = "kvferry.trtllm.offer", "kvferry.trtllm.gone"
# A decode engine says that it follows every so many seconds, and is forgotten after so many without.
_FOLLOW_S, _FORGET_S = 1.0, 10.0
# Between looks at what is under way: with copies or loads, with prompts on offer, with nothing.
_BUSY_S, _HELD_S, _IDLE_S = 0.001, 0.02, 0.1
_NOTIFY_S = 1.0
# An engine that could not be told something is not told anything for so many seconds. So many are remembered.
_RETRY_S = 5.0
_DEAF_MAX = 1 << 10
# Decode engines that are told of prompts, which hosts share.
_FOLLOWERS_MAX = 256
# Addresses of which it is not known whether a decode engine is there: so many wait for a thread that connects to them,
# which hosts share, and there are so many threads.
_MET_MAX, _MET_AT_ONCE = 64, 4
# Messages that wait for one engine. One that has more is too slow to be of use.
_LINE_MAX = 1 << 12
# Offers that a decode engine remembers, in all and of one prompt.
_HEARD_MAX, _HEARD_OF_PROMPT_MAX = 1 << 16, 256
# A longer message of a prefill engine is none.
_MESSAGE_MAX = 1 << 10
_KEY = re.compile("[0-9a-f]{64}")
_ENGINE = re.compile("[0-9a-f]{32}")
_TRANSFER = re.compile("[0-9a-f]{1,64}")
_ADDRESS = re.compile("[^\\s/]{1,255}:[0-9]{1,5}")


@dataclass(frozen=True)
class Prompt:
    """Full blocks of a prompt, but for one that ends with it: one token is computed."""

    # Names its content.
    key: str
    identity: bytes
    blocks: int
    tokens: int

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
        return Prompt(hashes[blocks - 1].hex(), identity, blocks, end)


@dataclass
class Offer:
    """A prompt that this engine prefills for another one."""

    # A cache that is registered anew has another handoff.
    owner: Handoff
    id: str
    prompt: Prompt
    transfer: str
    # A range of slots.
    slots: tuple[int, int]
    # Blocks that are copied, or will be.
    blocks: int = 0
    # The last copy.
    copy: int = 0
    has_ended: bool = False
    # A rank has not made a copy.
    is_lost: bool = False
    # Followers know it.
    is_told: bool = False


@dataclass(frozen=True)
class _Event:
    """What is done once all ranks have made a copy: a run of blocks is there, or the request has ended."""

    copy: int
    offer: Offer
    blocks: tuple[int, int] | None = None


@dataclass
class _Fetch:
    slots: tuple[int, int]
    ranks: set[int] = field(default_factory=set)
    has_failed: bool = False
    has_ended: bool = False
    is_abandoned: bool = False


@dataclass
class _Line:
    """To another engine's control agent."""

    messages: deque[tuple[str, bytes]] = field(default_factory=deque)


@dataclass(frozen=True)
class _Heard:
    transfer: str
    address: str
    engine: str
    until: float


class _HeardOffers:
    """Offers of prefill engines, by the prompt's key: bounded, whatever peers say."""

    def __init__(self) -> None:
        # Keys in the order of their last offers. No list is empty.
        self._of: OrderedDict[str, deque[_Heard]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, key: str, offer: _Heard) -> None:
        offers = self._of.setdefault(key, deque())
        offers.append(offer)
        self._count += 1
        self._of.move_to_end(key)
        if len(offers) > _HEARD_OF_PROMPT_MAX:
            offers.popleft()
            self._count -= 1
        while self._count > _HEARD_MAX:
            self._pop_oldest()

    def remove(self, key: str, transfer: str) -> None:
        self._keep(key, [it for it in self._of.get(key, ()) if it.transfer != transfer])

    def take(self, key: str, now: float) -> _Heard | None:
        """The newest: earlier ones may be other engines'."""
        offers = [it for it in self._of.get(key, ()) if it.until > now]
        found = offers.pop() if offers else None
        self._keep(key, offers)
        return found

    def _keep(self, key: str, offers: list[_Heard]) -> None:
        self._count += len(offers) - len(self._of.get(key, ()))
        if offers:
            self._of[key] = deque(offers)
        else:
            self._of.pop(key, None)

    def expire(self, now: float) -> None:
        """Forgets offers whose time is over, and later ones of the same prompts when it is over for these, too."""
        while self._of and next(iter(self._of.values()))[-1].until <= now:
            self._pop_oldest()

    def clear(self) -> None:
        self._of.clear()
        self._count = 0

    def _pop_oldest(self) -> None:
        self._count -= len(self._of.popitem(last=False)[1])


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
        self._free = Extents(0, self.slots, align=1)
        self._lock = threading.RLock()
        self._events: deque[_Event] = deque()
        # The number of the last copy that ranks were told to make.
        self._copies = 0
        # Offers whose requests have ended, each with the ranks on which no peer reads it any more.
        self._held: dict[str, tuple[Offer, set[int]]] = {}
        # Loads that run, and why loads have failed.
        self._fetches: dict[str, _Fetch] = {}
        self._failures: dict[str, str] = {}
        self._ids = 0
        # Decode engines by their agents' addresses. This side connects to an address before it sends prompts there.
        self._followers = Followers(_FOLLOWERS_MAX, _MET_MAX)
        self._meeters = Threads(_MET_AT_ONCE, "kvferry-handoff-meet")
        # Engines that messages are on their way to: one that takes its time holds no other's thread.
        self._lines: dict[str, _Line] = {}
        talkers = _FOLLOWERS_MAX + len(settings.prefill)
        self._talkers = Threads(talkers, "kvferry-handoff-talk")
        # Addresses that did not answer, with the time at which they are tried again, the first one first.
        self._deaf: OrderedDict[str, float] = OrderedDict()
        self._heard = _HeardOffers()
        self._followed_at = -_FOLLOW_S
        self._is_closed = False
        self._pid = os.getpid()
        self._wake = threading.Event()
        self._open(facts, model)
        # Before kvferry closes its halves at exit.
        atexit.register(self.close)
        self._thread = threading.Thread(target=self._run, name="kvferry-handoff", daemon=True)
        self._thread.start()

    def _open(self, facts: Facts, model: str) -> None:
        listen, secret, producers = self._settings.listen, self._settings.secret(), self._settings.producers
        agents: list[Any] = []
        halves: list[Any] = []
        try:
            # Followers know this one's address. Each rank's half has an agent of its own.
            self._control = kvferry.Agent("trtllm-control", listen=listen, secret=secret)
            agents.append(self._control)
            host = None if listen is None else listen.rpartition(":")[0] + ":0"
            groups = [("full", 0, self._pages.tokens_per_block) for _ in self._pages.groups]
            timeout = self._settings.timeout
            self._scheduler = SchedulerHalf(groups, ranks=self._ranks, timeout=timeout, null_block=self.slots)
            for rank in range(self._ranks):
                agent = kvferry.Agent(f"trtllm-rank-{rank}", listen=host, secret=secret)
                agents.append(agent)
                region = agent.register(self.arena.buffer, "r")
                layout = self._layout(rank, region)
                halves.append(
                    WorkerHalf(
                        agent,
                        layout,
                        [region],
                        rank=rank,
                        timeout=timeout,
                        wait=timeout,
                        model={"model": bounded(model), "dtype": facts.dtype},
                        announce="chunks",
                        producers=None if producers is None else list(producers),
                    )
                )
            self._scheduler.set_ranks([half.card for half in halves])
            self._scheduler.set_producers(halves[0].producers)
        except BaseException:
            _close(halves, agents)
            raise
        self._halves, self._agents = halves, agents
        self._address = agents[1].address
        self._carry()
        exposed = not self._control.local_address[0].startswith("127.") and self._control.local_address[0] != "::1"
        if exposed and not self._settings.has_secret():
            logger.warning(
                "kvferry.trtllm: every host that reaches %s can read the KV that is handed over; set secret_file on "
                "all engines",
                self._control.address,
            )

    def _layout(self, rank: int, region: Any) -> str:
        """Of a rank: slots are blocks, a group of layers is a layer, and a rank is a head."""
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
        with self._lock:
            return len(self._followers)

    def offsets(self, group: Group, slot: int) -> tuple[int, ...]:
        """Of each rank."""
        return tuple(base + slot * group.nbytes for base in self._bases[group.number])

    # The engine that prefills.

    def offer(self, prompt: Prompt) -> Offer | None:
        """This engine computes a prompt, and will tell its followers. None if there are none, or there is no room."""
        if not self._settings.prefills:
            return None
        with self._lock:
            if len(self._followers) == 0 or self._is_closed:
                return None
            slots = self._free.take(prompt.blocks)
            if slots is None:
                self._counts["handoffs_without_room"] += 1
                self._say(
                    "a prompt of %d blocks is not handed over: other prompts wait to be fetched; raise handoff_gib",
                    prompt.blocks,
                )
                return None
            offer = Offer(self, self._id("p"), prompt, secrets.token_hex(16), slots)
            params = {"do_remote_decode": True, "transfer_id": offer.transfer}
            self._scheduler.arrived(offer.id, prompt.tokens, 1, params, prompt.identity)
            self._carry()
            return offer

    def _message(self, offer: Offer) -> bytes:
        told = {"key": offer.prompt.key, "transfer": offer.transfer, "address": self._address}
        return json.dumps(told | {"engine": self._scheduler.engine_id}).encode()

    def _tell(self, name: str, offer: Offer) -> None:
        self._forget(time.monotonic())
        for address in self._followers.addresses():
            self._say_to(address, name, self._message(offer))

    def _gone(self, offer: Offer) -> None:
        """The offer has ended: no peer can fetch it."""
        self._free.give(offer.slots)
        if offer.is_told:
            self._tell(_GONE, offer)

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
            parts.append(Part(group.number, self.offsets(group, offer.slots[0] + begin), tuple(of_group)))
        with self._lock:
            offer.blocks, offer.copy = end, self.next_copy()
            self._events.append(_Event(offer.copy, offer, (begin, end)))
        self._counts["offered_blocks"] += end - begin
        return parts

    def ended(self, offer: Offer) -> None:
        """Its request has ended. What was not computed by then is not handed over."""
        if offer.owner is not self or offer.has_ended:
            return
        with self._lock:
            offer.has_ended = True
            self._events.append(_Event(offer.copy, offer))
        self.pump()

    # The engine that decodes.

    def fetch(self, prompt: Prompt, first: int, deadline: float) -> tuple[int, int] | None:
        """Fetches blocks from `first` on, if a prefill engine has said that it has the prompt. Returns their slots.

        Waits until they are here, or `deadline`.
        """
        if not self._settings.decodes:
            return None
        while True:
            with self._lock:
                if self._is_closed:
                    return None
                self._hear()
                heard = self._heard.take(prompt.key, time.monotonic())
                begun = self._begin_fetch(prompt, first, heard) if heard is not None else None
            if heard is None:
                return None
            if begun is None:
                if first >= prompt.blocks or time.monotonic() >= deadline:
                    return None
                continue
            request, fetch = begun
            while not fetch.has_ended and not self._is_closed and time.monotonic() < deadline:
                time.sleep(_BUSY_S / 4)
                self.pump()
            found = self._fetched(request, fetch, prompt)
            if found is not None or time.monotonic() >= deadline:
                return found

    def _begin_fetch(self, prompt: Prompt, first: int, heard: _Heard) -> tuple[str, _Fetch] | None:
        request, wanted = self._id("d"), max(0, prompt.blocks - first)
        slots = self._free.take(wanted) if wanted else None
        params = {"do_remote_prefill": True, "transfer_id": heard.transfer, "remote_address": heard.address}
        params["remote_engine_id"] = heard.engine
        self._scheduler.arrived(request, prompt.tokens, 1, params, prompt.identity)
        computed = min(first, prompt.blocks) * self._pages.tokens_per_block
        # The number `self.slots` stands for no block.
        numbers = [self.slots] * min(first, prompt.blocks) + list(range(*slots or (0, 0)))
        tokens = self._scheduler.matched(request, prompt.tokens, computed) if slots is not None else 0
        if slots is None or not tokens:
            if slots is not None:
                self._free.give(slots)
            elif wanted:
                self._counts["handoffs_without_room"] += 1
                self._say("a prompt of %d blocks is not fetched: raise handoff_gib", wanted)
            # Tells the prefill engine that this handoff is not needed.
            self._scheduler.allocated(request, prompt.tokens, prompt.tokens, 0, [numbers] * len(self._bases))
            self._end_fetch(request, prompt)
            return None
        fetch = self._fetches[request] = _Fetch(slots)
        self._scheduler.allocated(request, prompt.tokens, computed, tokens, [numbers] * len(self._bases))
        self._carry()
        return request, fetch

    def _fetched(self, request: str, fetch: _Fetch, prompt: Prompt) -> tuple[int, int] | None:
        with self._lock:
            if not fetch.has_ended:
                fetch.is_abandoned = True
                self._counts["failed_handoffs"] += 1
                self._end_fetch(request, prompt, "abort")
                self._say("a prompt was not handed over in load_wait; it is loaded from the store or computed")
                return None
            self._end_fetch(request, prompt)
            why = self._failures.pop(request, "")
            if fetch.has_failed:
                self._free.give(fetch.slots)
                self._counts["failed_handoffs"] += 1
                self._say("a prompt was not handed over; it is loaded from the store or computed: %s", why)
                return None
            self._counts["received_blocks"] += fetch.slots[1] - fetch.slots[0]
            return fetch.slots

    def _end_fetch(self, request: str, prompt: Prompt, reason: Literal["length", "abort"] = "length") -> None:
        self._scheduler.finished(request, prompt.tokens, None, None, reason, None)
        self._carry()

    def give(self, slots: tuple[int, int]) -> None:
        """Slots that `fetch` has returned, once their blocks are in the cache."""
        with self._lock:
            self._free.give(slots)

    # Both.

    def _id(self, kind: str) -> str:
        self._ids += 1
        return f"{kind}{self._ids}"

    def pump(self) -> None:
        """Takes the halves on: tells them what is copied, and hears from them what has ended."""
        with self._lock:
            if not self._is_closed and self._pid == os.getpid():
                self._pump()

    def _pump(self) -> None:
        copied = self.arena.handed_by_all()
        while self._events and self._events[0].copy <= copied:
            self._take(self._events.popleft())
        for rank, half in enumerate(self._halves):
            sent, received, failed, notes = half.reports()
            for request, _, _, failure in half.take_loads():
                if failure is not None:
                    self._failures[request] = ": ".join(it for it in failure if it)
            if notes is not None:
                self._scheduler.reported(rank, notes)
            for request in received:
                self._received(rank, request, has_failed=request in failed)
            for request in sent:
                self._sent(rank, request)
        self._carry()

    def _take(self, event: _Event) -> None:
        offer = event.offer
        # A forward pass that fails ends before its copies are made.
        offer.is_lost |= 0 < event.copy <= self.arena.lost_by_any()
        if event.blocks is not None and offer.is_lost:
            return
        if event.blocks is not None:
            begin, end = event.blocks
            tokens = self._pages.tokens_per_block
            numbers = list(range(offer.slots[0] + begin, offer.slots[0] + end))
            blocks = [numbers] * len(self._bases)
            entry = (offer.id, begin * tokens, (end - begin) * tokens, begin == 0, blocks)
            self._carry(entry)
            if end == offer.prompt.blocks:
                offer.is_told = True
                self._tell(_OFFER, offer)
            return
        reason: Any = "length" if offer.is_told else "abort"
        held, _ = self._scheduler.finished(offer.id, offer.prompt.tokens, None, None, reason, None)
        self._carry()
        if held:
            self._held[offer.id] = (offer, set())
        else:
            self._gone(offer)

    def _carry(self, *computed: Any) -> None:
        """Takes a step of the scheduler half to the worker halves; `computed`: what ranks have copied."""
        metadata = self._scheduler.step(computed, [])
        if not metadata or self._is_closed:
            return
        for half in self._halves:
            half.apply(metadata)
            half.fetch()
            if computed:
                half.step_computed()

    def _received(self, rank: int, request: str, *, has_failed: bool) -> None:
        fetch = self._fetches.get(request)
        if fetch is None:
            return
        fetch.ranks.add(rank)
        fetch.has_failed |= has_failed
        if len(fetch.ranks) == self._ranks:
            del self._fetches[request]
            self._scheduler.received([request])
            fetch.has_ended = True
            if fetch.is_abandoned:
                self._failures.pop(request, None)
                self._free.give(fetch.slots)

    def _sent(self, rank: int, request: str) -> None:
        offer, ranks = self._held.get(request, (None, set()))
        if offer is None:
            return
        ranks.add(rank)
        if len(ranks) == self._ranks:
            del self._held[request]
            self._scheduler.sent([request])
            self._gone(offer)

    # What engines tell each other.

    def _run(self) -> None:
        while not self._is_closed:
            with self._lock:
                busy = self._events or self._fetches
                wait = _BUSY_S if busy else _HELD_S if self._held else _IDLE_S
            self._wake.wait(wait)
            self._wake.clear()
            try:
                with self._lock:
                    if self._is_closed:
                        return
                    self._follow()
                    self._hear()
                    self._pump()
            except Exception as error:
                # Without this thread, nothing is handed over any more.
                if self._is_closed:
                    return
                self._say("handoff: %s: %s", type(error).__name__, error)

    def _hear(self) -> None:
        now = time.monotonic()
        self._forget(now)
        for notification in self._control.notifications():
            if notification.name == _FOLLOW and self._settings.prefills:
                self._hear_follower(notification.message.decode(errors="replace"), notification.host, now)
            elif notification.name in (_OFFER, _GONE) and self._settings.decodes:
                until = now + self._settings.timeout
                self._hear_offer(notification.message, until, is_gone=notification.name == _GONE)

    def _forget(self, now: float) -> None:
        """What is over by now."""
        self._followers.expire(now)
        while self._deaf and next(iter(self._deaf.values())) <= now:
            self._deaf.popitem(last=False)
        self._heard.expire(now)

    def _hear_follower(self, address: str, host: str, now: float) -> None:
        """A peer may say any address, so it is one of a decode engine only if there is an agent that can be told."""
        claim = Claim(host, address)
        if not _ADDRESS.fullmatch(address) or address == self.address:
            return
        if self._followers.heard(claim, now + _FORGET_S) or address in self._deaf:
            return
        gone = self._followers.add(claim)
        for it in gone:
            self._counts["refused_followers"] += 1
            self._say(
                "the decode engine at %s is not told of prompts: there are more than %d, or than %d that "
                "have not answered yet, and %s says most; where that is not so, a peer makes addresses up, which "
                "secret_file on all engines prevents",
                it.address,
                _FOLLOWERS_MAX,
                _MET_MAX,
                it.host,
            )
        if claim not in gone and not self._meeters.submit(self._meet, claim):
            # It says again that it follows.
            self._followers.remove(claim)
            self._say("no thread can be started to connect to the decode engine at %s", address)

    def _meet(self, claim: Claim) -> None:
        with self._lock:
            if not self._followers.is_unmet(claim):
                # Another host has needed its place.
                return
        why: Exception | None = None
        try:
            self._control.peer(claim.address).notify((_FOLLOWED, b""), timeout=_NOTIFY_S)
        except Exception as error:
            why = error
        with self._lock:
            if why is None:
                self._followers.answered(claim, time.monotonic() + _FORGET_S)
            else:
                self._followers.remove(claim)
                self._is_out_of_reach(claim.address, why)

    def _is_out_of_reach(self, address: str, why: object) -> None:
        self._followers.remove_address(address)
        self._deaf[address] = time.monotonic() + _RETRY_S
        self._deaf.move_to_end(address)
        if len(self._deaf) > _DEAF_MAX:
            self._deaf.popitem(last=False)
        if not self._is_closed:
            self._say("%s can't be reached: %s", address, why)

    def _hear_offer(self, message: bytes, until: float, *, is_gone: bool) -> None:
        if len(message) > _MESSAGE_MAX:
            self._say("a prefill engine's message has %d bytes, and %d at most are read", len(message), _MESSAGE_MAX)
            return
        try:
            told = json.loads(message)
            key, transfer, address, engine = (str(told[name]) for name in ("key", "transfer", "address", "engine"))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            self._say("a prefill engine's message can't be read: %s: %s", type(error).__name__, error)
            return
        forms = ((_KEY, key), (_TRANSFER, transfer), (_ADDRESS, address), (_ENGINE, engine))
        if not all(form.fullmatch(it) for form, it in forms):
            self._say("a prefill engine's message has no handoff: %.200r", message)
            return
        if engine == self._scheduler.engine_id:
            return
        if is_gone:
            self._heard.remove(key, transfer)
        else:
            self._heard.add(key, _Heard(transfer, address, engine, until))

    def _follow(self) -> None:
        now = time.monotonic()
        if not self._settings.decodes or now < self._followed_at + _FOLLOW_S:
            return
        self._followed_at = now
        for address in self._settings.prefill:
            if address not in self._deaf:
                self._say_to(address, _FOLLOW, self.address.encode())

    def _say_to(self, address: str, name: str, message: bytes) -> None:
        """On a thread of its own for each engine, in order: one that does not answer does not delay the others."""
        line = self._lines.get(address)
        if line is not None and len(line.messages) >= _LINE_MAX:
            line.messages.clear()
            self._is_out_of_reach(address, f"{_LINE_MAX} messages wait for it")
            return
        if line is not None:
            line.messages.append((name, message))
            return
        line = self._lines[address] = _Line(deque([(name, message)]))
        if not self._talkers.submit(self._talk, address, line):
            del self._lines[address]
            if not self._is_closed:
                self._say("no thread can be started to tell %s of a prompt, or that it is followed", address)

    def _talk(self, address: str, line: _Line) -> None:
        while True:
            with self._lock:
                if not line.messages or self._is_closed:
                    del self._lines[address]
                    return
                name, message = line.messages.popleft()
            try:
                self._control.peer(address).notify((name, message), timeout=_NOTIFY_S)
            except Exception as error:
                with self._lock:
                    line.messages.clear()
                    self._is_out_of_reach(address, error)

    def gauges(self) -> dict[str, int]:
        """Counts of what is under way, by name: all zero when nothing is."""
        with self._lock:
            own = {"events": len(self._events), "held": len(self._held), "fetches": len(self._fetches)}
            own |= {"slots": self.slots - self._free.free_bytes, "heard": len(self._heard)}
            return own | {"scheduler_" + name: value for name, value in self._scheduler.gauges().items()}

    def close(self) -> None:
        """Peers hear that nothing is offered any more. A second call does nothing."""
        if self._pid != os.getpid():
            # In a forked child, all of it is the parent's.
            return
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        atexit.unregister(self.close)
        self._wake.set()
        for threads in (self._talkers, self._meeters):
            threads.close()
        if self._thread is not threading.current_thread():
            self._thread.join(10 * _NOTIFY_S)
        _close(self._halves, self._agents)


def _close(halves: Sequence[Any], agents: Sequence[Any]) -> None:
    for half in halves:
        half.close()
    for agent in agents:
        agent.shutdown()
