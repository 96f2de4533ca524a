"""Prompts go from an engine that prefills to one that decodes, each with a store of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import json
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import kvferry
import pytest
from kit import PATIENCE, run_python
from kvferry.trtllm import _handoff
from kvferry.trtllm._followers import Claim, Followers
from kvferry.trtllm._handoff import Prompt
from kvferry.trtllm._keys import chain
from kvferry.trtllm._threads import Threads
from trtllm_kit import BLOCK, Bench, Served, data, output, prompt, reference
from trtllm_reference import Ranks, Request, Shape

LENGTHS = (5, 8, 9, 37, 64, 70)
WINDOWED = Shape(groups=(((0,), 0), ((1,), 20)))


def requests(lengths: Sequence[int] = LENGTHS, **options: Any) -> list[Request]:
    return [Request(at + 1, prompt(length, at), **options) for at, length in enumerate(lengths)]


def to_compute(length: int) -> int:
    return length - (length - 1) // BLOCK * BLOCK


def until(is_so: Callable[[], bool], why: Callable[[], Any] = lambda: None) -> None:
    deadline = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < deadline, why()
        time.sleep(0.005)


class Pair:
    """An engine that prefills and one that decodes, of one rank each unless `tp` says more."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.prefills: list[Served] = []
        bench.settings(load_wait=20, handoff_gib=1 / 64)

    def prefill(self, shape: Shape | None = None, rank: int = 0, tp: int = 1, **changes: Any) -> Served:
        made = self._make("prefill", shape, rank, tp, handoff="prefill", listen="127.0.0.1:0", **changes)
        if rank == 0:
            self.prefills.append(made)
        return made

    def decode(self, shape: Shape | None = None, rank: int = 0, tp: int = 1, **changes: Any) -> Served:
        """Known to the engines that prefill."""
        addresses = ",".join(it.worker._local.handoff.address for it in self.prefills)
        made = self._make("decode", shape, rank, tp, handoff="decode", prefill=addresses, **changes)
        if rank == 0:
            for it in self.prefills:
                until(lambda it=it: it.worker._local.handoff.followers == 1)  # type: ignore[misc]
        return made

    def _make(self, name: str, shape: Shape | None, rank: int, tp: int, **changes: Any) -> Served:
        settings = {key: changes.pop(key) for key in ("handoff", "listen", "prefill", "handoff_gib") if key in changes}
        folder = self.bench.directory.with_name("kv-" + name)
        if rank == 0:
            self.bench.settings(disk=folder, **settings)
        return self.bench.rank(shape or Shape(), rank, tp, **changes)


@pytest.fixture
def closed() -> Iterator[list[str]]:
    """Addresses that refuse connections, of ports that nobody else gets."""
    with contextlib.ExitStack() as sockets:
        found = [sockets.enter_context(socket.socket()) for _ in range(5)]
        for it in found:
            it.bind(("127.0.0.1", 0))
        yield [f"127.0.0.1:{it.getsockname()[1]}" for it in found]


@pytest.fixture
def pair(bench: Bench) -> Pair:
    made = Pair(bench)
    # An engine that takes long to answer, on a machine that is busy, is told all the same.
    module = importlib.import_module("kvferry.trtllm._handoff")
    bench.monkeypatch.setattr(module, "_NOTIFY_S", PATIENCE)
    bench.monkeypatch.setattr(module, "_FORGET_S", 10 * PATIENCE)
    return made


def handoff(served: Served) -> Any:
    return served.worker._local.handoff


def settled(*served: Served) -> None:
    """Nothing is under way, and no slot is taken."""

    def left() -> list[dict[str, int]]:
        for it in served:
            it.scheduler.build_connector_meta(type("Output", (), {}))
        return [{name: value for name, value in handoff(it).gauges().items() if value} for it in served]

    until(lambda: not any(left()), left)


def hears(decode: Served, prefilled: list[Request]) -> None:
    """A router's second request is later than what the engines tell each other; these are in one thread."""
    offers = sum(it.prompt_len > BLOCK for it in prefilled)
    until(lambda: bool(handoff(decode).gauges()["heard"] == offers), lambda: handoff(decode).gauges())


def hand_over(prefill: Served, decode: Served, made: Callable[..., list[Request]]) -> list[Request]:
    """Each prompt is prefilled, then decoded, as a router does it."""
    prefilled = prefill.engine.run(made(max_new_tokens=1))
    if decode.scheduler is not None and handoff(prefill).followers:
        hears(decode, prefilled)
    return decode.engine.run(made())


@pytest.mark.parametrize("load", ["sync", "async", "off"])
def test_what_one_engine_prefills_another_decodes(pair: Pair, load: str) -> None:
    pair.bench.settings(load=load)
    prefill, decode = pair.prefill(), pair.decode()
    ended = hand_over(prefill, decode, requests)
    assert [it.computed_tokens for it in ended] == [to_compute(it) for it in LENGTHS]
    assert [it.generated for it in ended] == reference(requests())
    blocks = sum((it - 1) // BLOCK for it in LENGTHS)
    assert prefill.scheduler.stats()["offered_blocks"] == blocks
    assert decode.scheduler.stats()["received_blocks"] == blocks
    settled(prefill, decode)


@pytest.mark.parametrize("load", ["sync", "async"])
@pytest.mark.parametrize("tp", [2, 4])
def test_each_rank_gets_its_own_shard(pair: Pair, tp: int, load: str) -> None:
    pair.bench.settings(load=load)

    def body(rank: int) -> list[Request]:
        # The settings are variables of this process, which all ranks share.
        prefill = pair.prefill(rank=rank, tp=tp)
        meet()
        decode = pair.decode(rank=rank, tp=tp)
        meet()
        ended = hand_over(prefill, decode, requests)
        if rank == 0:
            settled(prefill, decode)
        meet()
        return ended

    ranks = Ranks(tp)

    def meet() -> None:
        ranks.gather(None)

    ended = ranks.run(body)[0]
    assert [it.computed_tokens for it in ended] == [to_compute(it) for it in LENGTHS]
    assert [it.generated for it in ended] == reference(requests(), tp=tp)


@pytest.mark.parametrize("chunk", [3, 8, 20])
def test_a_prompt_that_is_computed_in_chunks_is_handed_over_whole(pair: Pair, chunk: int) -> None:
    prefill, decode = pair.prefill(), pair.decode()
    ended = hand_over(prefill, decode, lambda **options: requests(chunk=chunk, **options))
    assert [it.computed_tokens for it in ended] == [to_compute(it) for it in LENGTHS]
    assert [it.generated for it in ended] == reference(requests(chunk=chunk))
    settled(prefill, decode)


@pytest.mark.parametrize("chunk", [8, 1000])
def test_groups_with_sliding_windows_are_handed_over(pair: Pair, chunk: int) -> None:
    prefill, decode = pair.prefill(WINDOWED), pair.decode(WINDOWED)
    ended = hand_over(prefill, decode, lambda **options: requests(chunk=chunk, **options))
    assert [it.computed_tokens for it in ended] == [to_compute(it) for it in LENGTHS]
    assert [it.generated for it in ended] == reference(requests(), shape=WINDOWED)
    settled(prefill, decode)


def test_the_same_prompt_is_handed_over_as_often_as_it_is_prefilled(pair: Pair) -> None:
    prefill, decode = pair.prefill(), pair.decode()

    def same(**options: Any) -> list[Request]:
        return [Request(at, prompt(41), **options) for at in range(3)]

    ended = hand_over(prefill, decode, same)
    assert [it.computed_tokens for it in ended] == [1, 1, 1]
    assert [it.generated for it in ended] == reference(same())
    settled(prefill, decode)


def test_several_engines_prefill_for_one(pair: Pair) -> None:
    first, second = pair.prefill(), pair.prefill()
    decode = pair.decode()
    made = requests(max_new_tokens=1)
    first.engine.run(made[::2])
    second.engine.run(made[1::2])
    hears(decode, made)
    ended = decode.engine.run(requests())
    assert [it.computed_tokens for it in ended] == [to_compute(it) for it in LENGTHS]
    assert [it.generated for it in ended] == reference(requests())
    settled(first, second, decode)


@pytest.mark.parametrize("load", ["sync", "async"])
def test_an_engine_may_do_both(pair: Pair, load: str) -> None:
    pair.bench.settings(load=load)
    first = pair.prefill()
    both = pair._make("both", None, 0, 1, handoff="both", listen="127.0.0.1:0", prefill=handoff(first).address)
    until(lambda: bool(handoff(first).followers == 1))
    third = pair._make("third", None, 0, 1, handoff="decode", prefill=handoff(both).address)
    until(lambda: bool(handoff(both).followers == 1))
    # It passes on what it was handed.
    for engine, loaded in ((first, False), (both, True), (third, True)):
        ended = engine.engine.run(requests())
        assert [it.computed_tokens for it in ended] == [to_compute(it) if loaded else it for it in LENGTHS]
        assert [it.generated for it in ended] == reference(requests())
        if engine is not third:
            hears(both if engine is first else third, ended)
    settled(first, both, third)


def test_a_prompt_that_nobody_prefilled_is_computed_without_waiting(pair: Pair) -> None:
    pair.bench.settings(load_wait=600)
    prefill, decode = pair.prefill(), pair.decode()
    (ended,) = decode.engine.run([Request(1, prompt(41))])
    assert ended.computed_tokens == 41
    settled(prefill, decode)


def test_another_salt_is_another_prompt(pair: Pair) -> None:
    prefill, decode = pair.prefill(), pair.decode()
    hears(decode, prefill.engine.run([Request(1, prompt(41), 1, cache_salt="a")]))
    for at, (salt, tokens) in enumerate((("b", 41), (None, 41), ("a", 1))):
        (ended,) = decode.engine.run([Request(at, prompt(41), cache_salt=salt)])
        assert ended.computed_tokens == tokens, salt
    settled(prefill, decode)


def test_an_engine_without_followers_copies_nothing(pair: Pair) -> None:
    prefill = pair.prefill()
    prefill.engine.run(requests(max_new_tokens=1))
    assert prefill.scheduler.stats().get("offered_blocks", 0) == 0
    settled(prefill)


@pytest.mark.parametrize("changes", [{"model": "another"}, {"revision": "2"}])
def test_another_model_is_refused_and_the_prompt_computed(pair: Pair, changes: dict[str, Any]) -> None:
    prefill, decode = pair.prefill(), pair.decode(**changes)
    (ended,) = hand_over(prefill, decode, lambda **options: [Request(1, prompt(41), **options)])
    assert ended.computed_tokens == 41
    assert [ended.generated] == reference([Request(1, prompt(41))])
    assert decode.scheduler.stats()["failed_handoffs"] == 1


def test_another_cache_is_refused_and_the_prompt_computed(pair: Pair) -> None:
    shape = Shape(token_bytes=8)
    prefill, decode = pair.prefill(), pair.decode(shape)
    (ended,) = hand_over(prefill, decode, lambda **options: [Request(1, prompt(41), **options)])
    assert ended.computed_tokens == 41
    assert [ended.generated] == reference([Request(1, prompt(41))], shape=shape)
    assert decode.scheduler.stats()["failed_handoffs"] == 1


def test_a_prefill_engine_that_has_gone_costs_a_computation(pair: Pair) -> None:
    prefill, decode = pair.prefill(), pair.decode()
    hears(decode, prefill.engine.run(requests(max_new_tokens=1)))
    prefill.worker.shutdown()
    ended = decode.engine.run(requests())
    assert [it.computed_tokens for it in ended] == list(LENGTHS)
    assert [it.generated for it in ended] == reference(requests())
    until(lambda: bool(handoff(decode).gauges()["slots"] == 0), lambda: handoff(decode).gauges())


def test_a_decode_engine_that_has_gone_is_forgotten_and_its_prompts_are_freed(pair: Pair) -> None:
    pair.bench.settings(handoff_timeout=1)
    prefill, decode = pair.prefill(), pair.decode()
    prefill.engine.run(requests(max_new_tokens=1))
    decode.worker.shutdown()
    settled(prefill)
    prefill.engine.run([Request(10, prompt(41, 10), 1)])
    until(lambda: bool(handoff(prefill).followers == 0))
    settled(prefill)


def test_what_the_decode_engine_has_already_is_freed(pair: Pair) -> None:
    prefill, decode = pair.prefill(), pair.decode()
    hears(decode, prefill.engine.run([Request(1, prompt(41), 1)]))
    matched = decode.scheduler.get_num_new_matched_tokens(Request(1, prompt(41)), 40)
    assert matched == (0, False)
    settled(prefill)


def test_a_prompt_without_room_for_it_is_computed(pair: Pair) -> None:
    large = Shape(groups=((tuple(range(64)), 0),), token_bytes=32)
    prefill, decode = pair.prefill(large, handoff_gib=1 / 1024), pair.decode(large, handoff_gib=1 / 64)
    slots = handoff(prefill).slots
    assert slots < handoff(decode).slots
    made = [Request(1, prompt((slots + 1) * BLOCK + 1), 1), Request(2, prompt(41, 2), 1)]
    prefill.engine.run(made)
    assert prefill.scheduler.stats()["handoffs_without_room"] == 1
    hears(decode, made[1:])
    ended = decode.engine.run([Request(it.request_id, it.tokens[:-1]) for it in made])
    assert [it.computed_tokens for it in ended] == [(slots + 1) * BLOCK + 1, 1]
    settled(prefill, decode)


def test_a_prompt_that_is_not_computed_to_its_end_is_not_offered(pair: Pair) -> None:
    prefill, decode = pair.prefill(), pair.decode()
    request = Request(1, prompt(41), chunk=8)
    prefill.engine._waiting.append(request)
    prefill.engine.step()
    prefill.engine.step()
    prefill.scheduler.request_finished(request, request.pages[0])
    settled(prefill)
    (ended,) = decode.engine.run([Request(1, prompt(41))])
    assert ended.computed_tokens == 41
    assert [ended.generated] == reference([Request(1, prompt(41))])
    settled(prefill, decode)


def test_a_request_that_is_reset_is_offered_when_it_is_computed_again(pair: Pair) -> None:
    prefill, decode = pair.prefill(), pair.decode()
    request = Request(1, prompt(41), 1, chunk=8)
    prefill.engine._waiting.append(request)
    prefill.engine.step()
    prefill.scheduler.request_reset(request)
    settled(prefill)
    (ended,) = hand_over(prefill, decode, lambda **options: [Request(2, prompt(41), **options)])
    assert ended.computed_tokens == 1
    settled(prefill, decode)


@pytest.mark.parametrize("fails", ["forward", "copy"])
def test_what_a_failed_pass_would_have_copied_is_not_handed_over(pair: Pair, fails: str) -> None:
    prefill, decode = pair.prefill(), pair.decode()
    part = prefill.worker.wait_for_save if fails == "forward" else prefill.worker._local.pages.from_pages

    def broken(*_: Any) -> None:
        raise RuntimeError("a kernel failed")

    request = Request(1, prompt(41), 1)
    prefill.engine._waiting.append(request)
    if fails == "forward":
        prefill.worker.wait_for_save = broken
    else:
        object.__setattr__(prefill.worker._local.pages, "from_pages", broken)
    with pytest.raises(RuntimeError, match="a kernel failed"):
        prefill.engine.step()
    if fails == "forward":
        prefill.worker.wait_for_save = part
    else:
        object.__setattr__(prefill.worker._local.pages, "from_pages", part)
    # TensorRT-LLM ends the request and goes on.
    prefill.engine._running.remove(request)
    prefill.scheduler.request_finished(request, request.pages[0])
    prefill.engine._end(request)
    ended = hand_over(prefill, decode, lambda **options: [Request(2, prompt(33, 2), **options)])
    ended += decode.engine.run([Request(1, prompt(41))])
    assert [it.computed_tokens for it in ended] == [1, 41]
    assert [it.generated for it in ended] == reference([Request(2, prompt(33, 2)), Request(1, prompt(41))])
    settled(prefill, decode)


def test_a_prompt_is_told_of_when_all_ranks_have_copied_it(pair: Pair) -> None:
    ranks = Ranks(2)
    late: list[Callable[[], None]] = []

    def body(rank: int) -> None:
        prefill = pair.prefill(rank=rank, tp=2)
        ranks.gather(None)
        decode = pair.decode(rank=rank, tp=2)
        ranks.gather(None)
        arena = prefill.worker._local.arena
        if rank == 1:
            handed = arena.handed
            arena.handed = lambda *given, **options: late.append(lambda: handed(*given, **options))
        made = prefill.engine.run([Request(1, prompt(41), 1)])
        if rank == 0:
            time.sleep(0.2)
            assert handoff(decode).gauges()["heard"] == 0
        ranks.gather(None)
        for it in late if rank == 1 else ():
            it()
        ranks.gather(None)
        if rank == 0:
            hears(decode, made)
        ranks.gather(None)
        (ended,) = decode.engine.run([Request(1, prompt(41))])
        assert ended.computed_tokens == 1
        if rank == 0:
            settled(prefill, decode)
        ranks.gather(None)

    ranks.run(body)


def forge(prefill: Served, decode: Served, tokens: list[int], **changes: Any) -> None:
    """A message as of the engine that prefills."""
    made = Prompt.of(tokens, chain(tokens, BLOCK, None), None, BLOCK)
    assert made is not None
    own = handoff(prefill)
    told = {"key": made.key, "transfer": "0" * 32, "address": own._address, "engine": own._scheduler.engine_id}
    own._control.peer(handoff(decode).address).notify(("kvferry.trtllm.offer", json.dumps(told | changes)))


def test_a_fetch_that_takes_longer_than_load_wait_is_given_up(pair: Pair) -> None:
    pair.bench.settings(load_wait=0.2)
    prefill, decode = pair.prefill(), pair.decode()
    # The prefill engine does not know this handoff.
    forge(prefill, decode, prompt(41))
    (ended,) = decode.engine.run([Request(1, prompt(41))])
    assert ended.computed_tokens == 41
    assert decode.scheduler.stats()["failed_handoffs"] == 1
    assert [ended.generated] == reference([Request(1, prompt(41))])
    settled(prefill, decode)


@pytest.mark.parametrize(
    "changes",
    [
        {"engine": "zz"},
        {"transfer": None},
        {"transfer": "a" * 300},
        {"address": 5},
        {"address": "host:port"},
        {"key": []},
        {"key": "a" * 65},
        {"key": "G" * 64},
        {"key": "a" * 64, "more": "a" * 2000},
    ],
)
def test_a_message_of_another_form_costs_nothing(pair: Pair, changes: dict[str, Any]) -> None:
    prefill, decode = pair.prefill(), pair.decode()
    forge(prefill, decode, prompt(41), **changes)
    # A later message is heard later.
    hears(decode, prefill.engine.run([Request(2, prompt(41, 2), 1)]))
    (ended,) = decode.engine.run([Request(1, prompt(41))])
    assert ended.computed_tokens == 41
    until(lambda: bool(handoff(decode).gauges()["slots"] == 0))
    assert decode.scheduler.stats().get("failed_handoffs", 0) == 0
    assert decode.scheduler.stats().get("load_timeouts", 0) == 0


@pytest.mark.parametrize("message", [b"[" * 5000, b"\xff", b"3", b"{}"])
@pytest.mark.parametrize("name", ["offer", "gone", "follow"])
def test_no_message_ends_the_handoff(pair: Pair, message: bytes, name: str) -> None:
    first = pair.prefill()
    both = pair._make("both", None, 0, 1, handoff="both", listen="127.0.0.1:0", prefill=handoff(first).address)
    until(lambda: bool(handoff(first).followers == 1))
    handoff(first)._control.peer(handoff(both).address).notify(("kvferry.trtllm." + name, message))
    (ended,) = hand_over(first, both, lambda **options: [Request(1, prompt(41), **options)])
    assert ended.computed_tokens == 1
    settled(first, both)


def test_a_second_engine_is_asked_where_the_first_has_gone(pair: Pair) -> None:
    first, second = pair.prefill(), pair.prefill()
    decode = pair.decode()
    for at, engine in enumerate((first, second), 1):
        engine.engine.run([Request(1, prompt(41), 1)])
        until(lambda at=at: bool(handoff(decode).gauges()["heard"] == at))  # type: ignore[misc]
    second.worker.shutdown()
    (ended,) = decode.engine.run([Request(1, prompt(41))])
    assert ended.computed_tokens == 1
    assert decode.scheduler.stats()["failed_handoffs"] == 1
    settled(first)


def test_an_engine_does_not_follow_itself(pair: Pair, closed: list[str]) -> None:
    both = pair._make("both", None, 0, 1, handoff="both", listen="127.0.0.1:0", prefill=closed[0])
    own = handoff(both)
    heard: list[str] = []
    with own._lock:
        hear = own._hear_follower
        own._hear_follower = lambda address, host, now: (hear(address, host, now), heard.append(address))
        # As if its settings had named it.
        own._settings = dataclasses.replace(own._settings, prefill=(own.address,))
    until(lambda: own.address in heard)
    assert own.followers == 0 and own._followers.unmet == 0
    ended = both.engine.run(requests())
    assert [it.computed_tokens for it in ended] == list(LENGTHS)
    settled(both)


def test_an_engine_that_does_not_answer_delays_no_other(pair: Pair) -> None:
    prefill, decode = pair.prefill(), pair.decode()
    # The engine that does not answer is waited for until its socket is closed.
    pair.bench.monkeypatch.setattr(module_of(prefill), "_NOTIFY_S", 600.0)
    with contextlib.ExitStack() as sockets:
        silent = [sockets.enter_context(socket.socket()) for _ in range(12)]
        for it in silent:
            it.bind(("127.0.0.1", 0))
            it.listen(1)
        with handoff(prefill)._lock:
            own, later = handoff(prefill), time.monotonic() + 600
            # They are told first.
            known = own._followers.addresses()
            own._followers = Followers(256, 64)
            for address in [*(f"127.0.0.1:{it.getsockname()[1]}" for it in silent), *known]:
                follow(own, address, later)
        hears(decode, prefill.engine.run([Request(1, prompt(41), 1)]))
    until(lambda: bool(handoff(prefill).followers == 1))


def follow(own: Any, address: str, until: float) -> None:
    """As if a decode engine had answered there."""
    claim = Claim("127.0.0.1", address)
    assert own._followers.add(claim) == []
    own._followers.answered(claim, until)


def module_of(served: Served) -> Any:
    return sys.modules[type(handoff(served)).__module__]


def test_an_address_at_which_there_is_no_engine_is_no_follower(pair: Pair, closed: list[str]) -> None:
    prefill, decode = pair.prefill(), pair.decode()
    pair.bench.monkeypatch.setattr(module_of(prefill), "_RETRY_S", 600.0)
    with kvferry.Agent("peer", listen="127.0.0.1:0") as peer:
        for address in closed:
            peer.peer(handoff(prefill).address).notify(("kvferry.trtllm.follow", address))
    until(lambda: set(handoff(prefill)._deaf) == set(closed))
    assert handoff(prefill).followers == 1
    hears(decode, prefill.engine.run([Request(1, prompt(41), 1)]))
    # They are not tried again before their time, and leave nothing else behind.
    assert handoff(prefill)._followers.unmet == 0
    until(lambda: not handoff(prefill)._lines)


def test_a_host_that_makes_followers_up_leaves_others_their_places(pair: Pair) -> None:
    prefill = pair.prefill()
    own, module = handoff(prefill), module_of(prefill)
    asked: list[Claim] = []

    def submit(_: Any, claim: Claim) -> bool:
        asked.append(claim)
        return True

    pair.bench.monkeypatch.setattr(own._meeters, "submit", submit)

    def hear(host: str, count: int) -> list[str]:
        """The addresses that are connected to."""
        asked.clear()
        with own._lock:
            for at in range(count):
                own._hear_follower(f"10.9.9.9:{7600 + at}", host, time.monotonic())
        return [claim.address for claim in asked]

    # A host alone may use all places.
    assert hear("10.0.0.1", 1000) == [f"10.9.9.9:{7600 + at}" for at in range(module._MET_MAX)]
    assert prefill.scheduler.stats()["refused_followers"] == 1000 - module._MET_MAX
    # An address that another host has made up is known from its own host, too, and takes its place.
    assert hear("10.0.1.1", 1) == ["10.9.9.9:7600"]
    assert own._followers.unmet == module._MET_MAX
    with own._lock:
        now = time.monotonic()
        for claim in (Claim("10.0.0.1", "10.9.9.9:7600"), Claim("10.0.1.1", "10.9.9.9:7600")):
            own._followers.answered(claim, now + 600)
        # One that has waited, and has lost its place, is not connected to.
        own._meet(Claim("10.0.0.1", f"10.9.9.9:{7600 + module._MET_MAX - 1}"))
        assert own._followers.addresses() == ["10.9.9.9:7600"] and not own._deaf


def test_hosts_share_the_places_of_followers() -> None:
    followers = Followers(8, 4)

    def claim(host: str, at: int) -> Claim:
        return Claim(host, f"10.9.9.9:{at}")

    def take(host: str, at: int) -> list[Claim]:
        gone = followers.add(claim(host, at))
        followers.answered(claim(host, at), 10.0)
        return gone

    assert [take("10.0.0.1", at) for at in range(8)] == [[]] * 8
    assert take("10.0.0.1", 8) == [claim("10.0.0.1", 8)]
    # The newest of the host that has most go, until both have as many.
    assert [take("fd00::1", at) for at in range(5)] == [[claim("10.0.0.1", 7 - at)] for at in range(4)] + [
        [claim("fd00::1", 4)]
    ]
    # They are told once, are heard again, and forgotten when they are not.
    assert followers.addresses() == [f"10.9.9.9:{at}" for at in range(4)]
    assert followers.heard(claim("fd00::1", 0), 20.0) and not followers.heard(claim("fd00::1", 4), 20.0)
    followers.expire(10.0)
    assert followers.addresses() == ["10.9.9.9:0"]
    followers.remove_address("10.9.9.9:0")
    assert len(followers) == 0 and len(followers._room) == 0
    # Those that wait for an answer have a bound of their own.
    assert [followers.add(claim("10.0.0.1", at)) for at in range(5)][-2:] == [[], [claim("10.0.0.1", 4)]]
    assert followers.add(claim("10.0.1.1", 0)) == [claim("10.0.0.1", 3)]
    assert followers.unmet == 4 and len(followers) == 0
    followers.expire(float("inf"))
    assert (followers.unmet, len(followers._room), len(followers._unmet_room)) == (0, 0, 0)


def test_threads_carry_out_calls_in_order_and_end_with_them() -> None:
    threads = Threads(2, "kvferry-test")
    gates = [threading.Event() for _ in range(4)]
    begun: list[int] = []

    def call(at: int) -> None:
        begun.append(at)
        assert gates[at].wait(PATIENCE)
        if at == 1:
            raise ValueError("a failure of the test")

    for at in range(4):
        assert threads.submit(call, at)
    # Taken in order, and written down by two threads.
    until(lambda: sorted(begun) == [0, 1])
    # One that has failed is followed by the next.
    gates[1].set()
    until(lambda: sorted(begun) == [0, 1, 2])
    threads.close()
    assert not threads.submit(call, 0)
    for gate in gates:
        gate.set()
    until(lambda: not any(it.name == "kvferry-test" for it in threading.enumerate()))
    assert sorted(begun) == [0, 1, 2] and begun[2] == 2


def test_an_engine_that_is_slower_than_what_it_is_told_is_forgotten(pair: Pair) -> None:
    prefill = pair.prefill()
    own, module = handoff(prefill), module_of(prefill)
    pair.bench.monkeypatch.setattr(module, "_LINE_MAX", 3)
    pair.bench.monkeypatch.setattr(own._talkers, "submit", lambda *_: True)
    with own._lock:
        follow(own, "10.1.1.1:1", time.monotonic() + 600)
        for _ in range(10):
            own._say_to("10.1.1.1:1", "name", b"message")
            assert len(own._lines["10.1.1.1:1"].messages) <= 3
        assert len(own._followers) == 0 and "10.1.1.1:1" in own._deaf
        own._lines.clear()


def test_an_engine_for_which_no_thread_can_be_started_is_met_and_told_later(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    prefill = pair.prefill()
    own = handoff(prefill)
    with own._lock, pair.bench.monkeypatch.context() as broken:

        def start(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        broken.setattr(threading.Thread, "start", start)
        own._hear_follower("127.0.0.1:1", "127.0.0.1", time.monotonic())
        own._say_to("127.0.0.1:1", "name", b"message")
        assert own._followers.unmet == 0 and not own._lines
    assert "no thread can be started" in caplog.text
    decode = pair.decode()
    (ended,) = hand_over(prefill, decode, lambda **options: [Request(1, prompt(41), **options)])
    assert ended.computed_tokens == 1
    settled(prefill, decode)


ENDING = """
    import sys, threading, time
    import trtllm_kit
    from kvferry.trtllm import KVFerryConnectorWorker
    from trtllm_reference import Cache, Shape

    sys.modules["tensorrt_llm._utils"] = trtllm_kit._utilities()
    worker = KVFerryConnectorWorker(trtllm_kit.args())
    worker.register_kv_caches(Cache(Shape()).tensors[0])
    own = worker._local.handoff
    begun = threading.Semaphore(0)

    class Silent:
        # Its peers never answer.
        address = own.address

        def peer(self, address):
            begun.release()
            threading.Event().wait()

        def notifications(self):
            return []

    with own._lock:
        own._control = Silent()
        for at in range(16):
            own._hear_follower(f"10.0.0.{at}:1", "127.0.0.1", time.monotonic())
        for _ in range(100):
            own._say_to("10.0.1.1:1", "name", b"message")
    # Four connect, and one is told.
    for _ in range(5):
        begun.acquire()
    print("ends", flush=True)
"""


def test_a_process_ends_whatever_engines_do_not_answer(tmp_path: Path) -> None:
    settings = {"DISK": tmp_path / "kv", "DISK_GIB": "0.0625", "HANDOFF_GIB": 1 / 64}
    settings |= {"HANDOFF": "prefill", "LISTEN": "127.0.0.1:0"}
    env = {f"TLLM_KVFERRY_{name}": str(value) for name, value in settings.items()}
    ended = run_python(ENDING, env=env | {"PYTHONPATH": str(Path(__file__).parents[1])})
    assert (ended.returncode, ended.stdout) == (0, "ends\n"), ended.stderr


def test_addresses_that_did_not_answer_are_remembered_for_a_time_and_within_a_bound(pair: Pair) -> None:
    prefill = pair.prefill()
    own, module = handoff(prefill), module_of(prefill)
    with own._lock:
        for at in range(2 * module._DEAF_MAX):
            own._is_out_of_reach(f"10.1.1.1:{at}", "a test")
        assert len(own._deaf) == module._DEAF_MAX
        own._forget(time.monotonic() + module._RETRY_S)
        assert not own._deaf


def test_offers_are_bounded_in_all_and_of_one_prompt_and_end_with_their_time() -> None:
    offers = _handoff._HeardOffers()

    def offer(number: int, until: float = 100) -> _handoff._Heard:
        return _handoff._Heard(f"{number:x}", "10.1.1.1:1", "0" * 32, until)

    for at in range(1000):
        offers.add("one", offer(at))
    assert len(offers) == _handoff._HEARD_OF_PROMPT_MAX
    # The newest are kept.
    assert offers.take("one", 0) == offer(999)
    offers.remove("one", offer(998).transfer)
    assert offers.take("one", 0) == offer(997)
    for at in range(_handoff._HEARD_MAX + 1000):
        offers.add(f"key {at}", offer(at))
    assert len(offers) == _handoff._HEARD_MAX
    assert offers.take("one", 0) is None
    offers.clear()
    offers.add("one", offer(1, until=1))
    offers.add("two", offer(2, until=2))
    offers.add("one", offer(3, until=3))
    offers.expire(2)
    assert len(offers) == 2
    assert offers.take("two", 2) is None
    assert offers.take("one", 2) == offer(3, until=3)
    assert offers.take("one", 2) is None
    assert len(offers) == 0
    offers.add("one", offer(4, until=4))
    offers.expire(4)
    assert len(offers) == 0


def test_an_offer_that_no_request_comes_for_ends_with_its_time(pair: Pair) -> None:
    decode = (pair.prefill(), pair.decode())[1]
    with handoff(decode)._lock:
        heard = _handoff._Heard("0" * 32, "127.0.0.1:1", "0" * 32, time.monotonic())
        handoff(decode)._heard.add("0" * 64, heard)
    until(lambda: bool(handoff(decode).gauges()["heard"] == 0))


def test_an_error_of_the_store_takes_no_slots(pair: Pair) -> None:
    prefill, decode = pair.prefill(), pair.decode()

    def broken(_hashes: list[bytes]) -> int:
        raise kvferry.Error("the store is closed")

    decode.scheduler._ready_loads().in_store = broken
    ended = hand_over(prefill, decode, requests)
    assert [it.computed_tokens for it in ended] == [to_compute(it) for it in LENGTHS]
    settled(prefill, decode)


def test_a_window_that_has_passed_where_the_prompt_was_loaded_is_not_handed_over(pair: Pair) -> None:
    prefill, decode = pair.prefill(WINDOWED), pair.decode(WINDOWED)
    prefill.engine.run(requests())
    settled_puts(prefill)
    offered = prefill.scheduler.stats()["offered_blocks"]
    until(lambda: bool(handoff(decode).gauges()["heard"] == 4))
    handoff(decode)._heard.clear()
    # Its own store has them now.
    again = prefill.engine.run([Request(100 + it.request_id, it.tokens) for it in requests()])
    assert [it.computed_tokens for it in again] == [to_compute(it) for it in LENGTHS]
    # Prompts within the window have all of their pages.
    assert prefill.scheduler.stats()["offered_blocks"] == offered + 1
    until(lambda: bool(handoff(decode).gauges()["heard"] == 1))
    ended = decode.engine.run(requests())
    assert [it.generated for it in ended] == reference(requests(), shape=WINDOWED)


def settled_puts(served: Served) -> None:
    blocks = sum(it // BLOCK for it in LENGTHS)
    until(lambda: bool(served.worker.stats().get("stored_blocks", 0) >= blocks), served.worker.stats)


@pytest.mark.parametrize("taken", [0, 8, 13, 40])
def test_an_offer_may_be_taken_in_part(pair: Pair, taken: int) -> None:
    prefill, decode = pair.prefill(), pair.decode()
    made = prefill.engine.run([Request(1, prompt(41), 1)])
    hears(decode, made)
    request = Request(1, prompt(41))
    matched, _ = decode.scheduler.get_num_new_matched_tokens(request, 0)
    assert matched == 40
    decode.scheduler.cancel_load(request, taken, 40)
    request.py_num_connector_matched_tokens = taken
    decode.engine.cache.allocate(request, taken)
    decode.scheduler.update_state_after_alloc(request, request.pages[0])
    step = decode.scheduler.build_connector_meta(output([data(1, 0, 41 - taken, request.pages[0])]))
    decode.worker.bind_connector_meta(step)
    decode.worker.start_load_kv(None)
    assert decode.worker._local.counts["loaded_blocks"] == -(-taken // BLOCK)
    decode.scheduler.request_finished(request, request.pages[0])
    settled(prefill, decode)


def test_an_offer_does_not_outlive_the_cache(pair: Pair) -> None:
    prefill, decode = pair.prefill(), pair.decode()
    request = Request(1, prompt(41), 1, chunk=8)
    prefill.engine._waiting.append(request)
    prefill.engine.step()
    prefill.worker.register_kv_caches(prefill.engine.cache.tensors[0])
    prefill.engine.run([])
    assert handoff(prefill).gauges()["slots"] == 0
    decode = pair.decode()
    ended = hand_over(prefill, decode, lambda **options: [Request(2, prompt(41, 2), **options)])
    assert [it.computed_tokens for it in ended] == [1]
    settled(prefill, decode)


def test_the_memory_of_a_handoff_goes_with_it(pair: Pair) -> None:
    prefill = pair.prefill()
    before = weakref.ref(handoff(prefill).arena)
    prefill.worker.register_kv_caches(prefill.engine.cache.tensors[0])
    until(lambda: gc.collect() >= 0 and before() is None)


def test_a_closed_handoff_gives_up_at_once(pair: Pair) -> None:
    pair.bench.settings(load_wait=600)
    prefill, decode = pair.prefill(), pair.decode()
    forge(prefill, decode, prompt(41))
    thread = threading.Thread(target=lambda: (time.sleep(0.2), handoff(decode).close()))
    thread.start()
    assert decode.scheduler.get_num_new_matched_tokens(Request(1, prompt(41)), 0) == (0, False)
    thread.join()


def test_tokens_that_are_no_token_ids_are_not_handed_over(pair: Pair) -> None:
    prefill, decode = pair.prefill(), pair.decode()
    prefill.engine.run([Request(1, [-1, *prompt(40)], 1)])
    (ended,) = decode.engine.run([Request(1, [-1, *prompt(40)])])
    assert ended.computed_tokens == 41
    settled(prefill, decode)


def test_a_forked_child_ends(pair: Pair) -> None:
    prefill = pair.prefill()
    with handoff(prefill)._lock:
        child = os.fork()
        if child == 0:
            handoff(prefill).close()
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_handed_over_prompt_is_stored_where_it_is_decoded(pair: Pair) -> None:
    prefill, decode = pair.prefill(), pair.decode()
    hand_over(prefill, decode, requests)
    blocks = sum(it // BLOCK for it in LENGTHS)
    until(lambda: bool(decode.worker.stats().get("stored_blocks", 0) == blocks), decode.worker.stats)


def test_a_cache_that_is_registered_anew_closes_the_handoff_before(pair: Pair) -> None:
    prefill = pair.prefill()
    before = handoff(prefill)
    prefill.worker.register_kv_caches(prefill.engine.cache.tensors[0])
    assert handoff(prefill) is not before
    assert before._is_closed
    decode = pair.decode()
    (ended,) = hand_over(prefill, decode, lambda **options: [Request(1, prompt(41), **options)])
    assert ended.computed_tokens == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"handoff": "send"}, "handoff must be one of off, prefill, decode, both, not 'send'"),
        ({"handoff": "prefill"}, "handoff prefill needs listen"),
        ({"handoff": "decode"}, "handoff decode needs prefill"),
        ({"handoff": "decode", "prefill": '["host"]'}, "prefill must be a list of host:port, and has 'host'"),
        ({"handoff": "prefill", "listen": "7600x"}, "listen must be host:port"),
        ({"handoff_timeout": 0}, "handoff_timeout must be a number from 1 to 86400"),
        ({"handoff": "prefill", "listen": "127.0.0.1:0", "secret_file": "/no/such"}, "secret_file can't be read"),
    ],
)
def test_wrong_settings_are_named(bench: Bench, settings: dict[str, Any], message: str) -> None:
    bench.settings(**settings)
    with pytest.raises(ValueError, match=message):
        bench.rank(Shape())


def test_no_room_for_one_block_is_refused(bench: Bench) -> None:
    bench.settings(handoff="prefill", listen="127.0.0.1:0", handoff_gib=1 / 1024)
    with pytest.raises(ValueError, match="handoff_gib has no room for one block, which has 4194304 bytes"):
        bench.rank(Shape(blocks=1, token_bytes=1 << 17))


def test_attention_data_parallelism_is_refused(bench: Bench) -> None:
    bench.settings(handoff="prefill", listen="127.0.0.1:0")
    with pytest.raises(NotImplementedError, match="enable_attention_dp"):
        bench.rank(Shape(), enable_attention_dp=True)


def test_engines_with_different_secrets_do_not_hand_over(pair: Pair, tmp_path: Any) -> None:
    (tmp_path / "one").write_text("one")
    (tmp_path / "two").write_text("two")
    pair.bench.settings(secret_file=tmp_path / "one")
    prefill = pair.prefill()
    pair.bench.settings(secret_file=tmp_path / "two")
    decode = pair._make("decode", None, 0, 1, handoff="decode", prefill=handoff(prefill).address)
    time.sleep(0.5)
    assert handoff(prefill).followers == 0
    (ended,) = hand_over(prefill, decode, lambda **options: [Request(1, prompt(41), **options)])
    assert ended.computed_tokens == 41
