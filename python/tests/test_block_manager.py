"""The block manager: which blocks sequences get, what is reused, and what comes back from host memory and directories."""

from __future__ import annotations

import hashlib
import os
import random
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kvferry
import pytest
from conftest import LOOPBACK
from kit import Child, clean_environment, eventually, run_python

ROOT = Path(__file__).parents[2]
TOKENS = 4  # in a block
TOKEN_BYTES = 16
PAGE = TOKENS * TOKEN_BYTES
MODES = ["dram", "gds", "posix_debug_fallback"]


def keys_of(tokens: list[int]) -> list[bytes]:
    """The key of each full block: the hash of all tokens up to its end."""
    ends = range(TOKENS, len(tokens) + 1, TOKENS)
    return [hashlib.blake2b(bytes(tokens[:end]), digest_size=16).digest() for end in ends]


def kv_of(tokens: list[int], at: int, group: int = 0) -> bytes:
    """The KV of a token: the hash of all tokens up to it, as attention makes it."""
    return hashlib.blake2b(bytes([group, *tokens[: at + 1]]), digest_size=TOKEN_BYTES).digest()


@dataclass(eq=False)
class Sequence:
    tokens: list[int]
    number: int
    is_begun: bool = False
    computed: int = 0
    # Tokens for which it has pages.
    room: int = 0


@dataclass
class Engine:
    """An engine that writes KV that names its tokens, and compares all that it reuses."""

    manager: kvferry.BlockManager
    memory: list[bytearray]
    sequences: list[Sequence] = field(default_factory=list)

    def begin(self, tokens: list[int], **options: Any) -> Sequence:
        made = self.manager.allocate(len(tokens), keys_of(tokens), tokens=tokens, **options)
        self.sequences.append(Sequence(list(tokens), made.sequence, room=len(tokens)))
        return self.sequences[-1]

    def place(self, sequence: Sequence, at: int, group: int) -> slice:
        page = self.manager.blocks(sequence.number, group)[at // TOKENS]
        begin = page * PAGE + at % TOKENS * TOKEN_BYTES
        return slice(begin, begin + TOKEN_BYTES)

    def check(self, sequence: Sequence) -> None:
        for group, memory in enumerate(self.memory):
            for at in range(sequence.computed):
                have = memory[self.place(sequence, at, group)]
                assert have == kv_of(sequence.tokens, at, group), f"token {at} of group {group} has other KV"

    def compute(self, sequence: Sequence) -> bool:
        """Computes all tokens of a sequence that are not computed, if it has blocks for them and these are ready."""
        manager, number = self.manager, sequence.number
        if not manager.is_ready(number):
            return False
        # A copy that failed before has taken blocks away.
        sequence.room = min(sequence.room, len(manager.blocks(number)) * TOKENS)
        if sequence.room < len(sequence.tokens):
            manager.append(number, len(sequence.tokens) - sequence.room)
            sequence.room = len(sequence.tokens)
            if not manager.is_ready(number):
                return False
        if not sequence.is_begun:
            sequence.is_begun, sequence.computed = True, manager.reused_tokens(number)
            assert sequence.computed < len(sequence.tokens)
            self.check(sequence)
        for group, memory in enumerate(self.memory):
            for at in range(sequence.computed, len(sequence.tokens)):
                memory[self.place(sequence, at, group)] = kv_of(sequence.tokens, at, group)
        sequence.computed = len(sequence.tokens)
        return True

    def free(self, sequence: Sequence) -> None:
        computed = sequence.tokens[: sequence.computed]
        self.manager.free(sequence.number, keys_of(computed), tokens=computed)
        self.sequences.remove(sequence)

    def settle(self) -> None:
        while self.manager.wait():
            pass

    def serve(self, tokens: list[int], **options: Any) -> int:
        """Runs a prompt to its end. Returns how many of its tokens were reused."""
        sequence = self.begin(tokens, **options)
        while not self.manager.is_ready(sequence.number):
            self.manager.wait()
        reused = self.manager.reused_tokens(sequence.number)
        while not self.compute(sequence):
            self.manager.wait()
        self.free(sequence)
        return reused


@pytest.fixture
def engines(agent: kvferry.Agent) -> Iterator[Callable[..., Engine]]:
    with ExitStack() as stack:

        def start(pages: int = 4, secondary: int = 8, groups: int = 1, **options: Any) -> Engine:
            memory = [bytearray(pages * PAGE) for _ in range(groups)]
            given = [([agent.register(each, "none")], pages, secondary) for each in memory]
            manager = kvferry.BlockManager(given, tokens_per_block=TOKENS, **options)
            return Engine(stack.enter_context(manager), memory)

        yield start


def prompt(name: int, blocks: int = 3) -> list[int]:
    """As many full blocks."""
    return [name] * TOKENS * blocks


def retention(mode: str, folder: Path, priority: int = 35) -> kvferry.RetentionConfig:
    directory = None if mode == "dram" else folder / mode
    return kvferry.RetentionConfig([(0, None, priority)], transfer_mode=mode, directory=directory)  # type: ignore[arg-type]


def test_the_longest_stored_prefix_of_a_prompt_is_reused(engines: Callable[..., Engine]) -> None:
    engine = engines(pages=8)
    first = engine.begin([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert engine.compute(first)
    assert engine.manager.store(first.number, keys_of(first.tokens)) == 2
    found = engine.begin([1, 2, 3, 4, 5, 6, 7, 8, 10])
    assert engine.manager.reused_tokens(found.number) == 8
    assert engine.manager.blocks(found.number)[:2] == engine.manager.blocks(first.number)[:2]
    assert engine.manager.find_prefix(keys_of(first.tokens)) == (2, 0)
    assert engine.manager.find_prefix(keys_of([1, 2, 3, 5])) == (0, 0)
    assert engine.compute(found)
    assert engine.manager.usage() == {"primary_free": 4, "primary_cached": 0, "secondary_free": 8}


def test_the_last_token_of_a_prompt_is_always_computed(engines: Callable[..., Engine]) -> None:
    engine = engines()
    tokens = prompt(1, 2)
    assert [engine.serve(tokens) for _ in range(2)] == [0, len(tokens) - 1]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("groups", [1, 3])
def test_blocks_that_do_not_fit_come_back_as_they_were(
    mode: str, groups: int, engines: Callable[..., Engine], tmp_path: Path
) -> None:
    engine = engines(pages=4, secondary=12, groups=groups)
    kept = retention(mode, tmp_path)
    # Each prompt needs all pages, and stores three blocks.
    assert [engine.serve([*prompt(name), 0], retention=kept) for name in (1, 2, 3, 4)] == [0, 0, 0, 0]
    engine.settle()
    stats = engine.manager.stats()
    assert stats == {
        **dict.fromkeys(("onboarded", "copied", "failed", "present", "under_way", "events_dropped"), 0),
        "offloaded": 9 * groups,
        "bytes": 9 * groups * PAGE,
    }
    assert any(path.is_file() for path in tmp_path.rglob("*")) == (mode != "dram")
    assert engine.manager.find_prefix(keys_of(prompt(1))) == (3, 3)
    assert engine.serve([*prompt(1), 0], retention=kept) == 3 * TOKENS
    assert engine.manager.stats()["onboarded"] == 3 * groups


def test_a_page_may_lie_in_several_regions(agent: kvferry.Agent) -> None:
    numpy = pytest.importorskip("numpy")
    # Keys and values apart, as many engines have them: two planes of four pages.
    kv = numpy.zeros((2, 4, 32), numpy.int64)
    computed = numpy.random.default_rng(1).integers(1 << 62, size=(3, 2, 3, 32))
    regions = [agent.register(plane, "none") for plane in kv]
    with kvferry.BlockManager([(regions, 4, 8)], tokens_per_block=TOKENS) as manager:
        for name in (0, 1, 2, 0):
            made = manager.allocate(13, keys_of(prompt(name)))
            while not manager.is_ready(made.sequence):
                manager.wait()
            pages = manager.blocks(made.sequence)[:3]
            if manager.reused_tokens(made.sequence) == 0:
                kv[:, pages] = computed[name]
            assert (kv[:, pages] == computed[name]).all()
            manager.free(made.sequence, keys_of(prompt(name)))
        assert made.reused_tokens == 12


def test_the_first_tokens_of_a_block_are_copied_where_it_is_in_use(engines: Callable[..., Engine]) -> None:
    for options, reused, copied in [
        ({}, 6, 1),
        ({"copy_on_partial_reuse": False}, 4, 0),
        ({"partial_reuse": False}, 4, 0),
    ]:
        engine = engines(pages=8, **options)
        used = engine.begin([1, 2, 3, 4, 5, 6, 7, 8])
        assert engine.compute(used)
        engine.manager.store(used.number, keys_of(used.tokens), tokens=used.tokens)
        assert engine.serve([1, 2, 3, 4, 5, 6, 9, 9, 9]) == reused
        engine.check(used)
        assert engine.manager.stats()["copied"] == copied


def test_parts_of_first_blocks_are_reused_under_the_same_salt_only(engines: Callable[..., Engine]) -> None:
    engine = engines(pages=8)
    engine.serve([1, 2, 3, 4], salt=2**64 - 1)
    assert engine.serve([1, 2, 3, 9], salt=1) == 0
    assert engine.serve([1, 2, 3, 8], salt=2**64 - 1) == 3


def test_a_sequence_whose_files_are_gone_computes_their_tokens(engines: Callable[..., Engine], tmp_path: Path) -> None:
    engine = engines(pages=4)
    kept = retention("posix_debug_fallback", tmp_path)
    for name in (1, 2):
        engine.serve([*prompt(name), 0], retention=kept)
    engine.settle()
    shutil.rmtree(tmp_path / "posix_debug_fallback")
    sequence = engine.begin([*prompt(1), 0], retention=kept)
    manager, number = engine.manager, sequence.number
    engine.settle()
    assert manager.is_ready(number)
    assert (manager.reused_tokens(number), manager.blocks(number)) == (0, [])
    assert manager.stats()["failed"] > 0
    while not engine.compute(sequence):
        manager.wait()
    assert len(manager.blocks(number)) == 4
    engine.check(sequence)


@pytest.mark.parametrize("mode", MODES[1:])
def test_a_directory_that_can_not_be_made_costs_hits_only(
    mode: str, engines: Callable[..., Engine], tmp_path: Path
) -> None:
    engine = engines(pages=4)
    (tmp_path / "file").touch()
    kept = retention(mode, tmp_path / "file")
    assert [engine.serve([*prompt(name), 0], retention=kept) for name in (1, 2, 1)] == [0, 0, 0]
    engine.settle()
    stats = engine.manager.stats()
    assert (stats["offloaded"], stats["failed"] > 0) == (0, True)


def test_a_file_mode_without_a_directory_is_host_memory_and_a_warning(engines: Callable[..., Engine]) -> None:
    engine = engines(pages=4)
    kept = kvferry.RetentionConfig(transfer_mode="gds")
    made = engine.manager.allocate(4, keys_of(prompt(1, 1)), retention=kept)
    assert made.warning == kept.warning is not None
    assert (made.reused_tokens, made.is_ready) == (0, True)
    assert repr(made) == f"<kvferry.Allocation {made.sequence}: 0 tokens reused, ready>"
    engine.manager.free(made.sequence)
    assert [engine.serve([*prompt(name), 0], retention=kept) for name in (1, 2, 1)] == [0, 0, 12]


def test_blocks_of_the_lowest_priority_leave_first(engines: Callable[..., Engine], tmp_path: Path) -> None:
    engine = engines(pages=4, secondary=0)
    for name, priority in [(1, 90), (2, 35), (3, 50), (4, 50)]:
        engine.serve([*prompt(name, 1), 0], retention=retention("dram", tmp_path, priority))
    found = [engine.manager.find_prefix(keys_of(prompt(name, 1)))[0] for name in (1, 2, 3, 4)]
    assert found == [1, 0, 1, 1]


def test_blocks_of_low_priority_are_not_offloaded(engines: Callable[..., Engine], tmp_path: Path) -> None:
    for least, offloaded in [(30, 0), (29, 3)]:
        engine = engines(pages=4, secondary_offload_min_priority=least)
        for name in (1, 2):
            engine.serve([*prompt(name), 0], retention=retention("dram", tmp_path, 29))
        engine.settle()
        assert engine.manager.stats()["offloaded"] == offloaded


def test_a_priority_ends_after_its_duration(engines: Callable[..., Engine]) -> None:
    engine = engines()
    engine.serve(prompt(1, 1), retention=kvferry.RetentionConfig([(0, None, 90, 1)]))

    def has_ended() -> bool:
        events = engine.manager.poll_events()
        return any(event["kind"] == "updated" and event["priority"] == (90, 35) for event in events)

    eventually(has_ended)


def test_events_say_what_comes_moves_and_leaves(engines: Callable[..., Engine]) -> None:
    engine = engines(pages=2, secondary=1)
    one, two, three = (keys_of(prompt(name, 1))[0] for name in (1, 2, 3))
    for name in (1, 2, 3):
        engine.serve([*prompt(name, 1), 0])
        engine.settle()
    events = engine.manager.poll_events()
    assert [event.pop("id") for event in events] == list(range(7))
    assert [event.pop("group") for event in events] == [0] * 7
    assert events[0] == {"kind": "created", "primary_blocks": 2, "secondary_blocks": 1}
    stored = {"kind": "stored", "parent": None, "tokens": TOKENS, "priority": 35}
    moved = {"kind": "updated", "tier": ("primary", "secondary"), "priority": None}
    removed = {"kind": "removed", "key": one}
    wanted = [
        *({**stored, "key": key} for key in (one, two, three)),
        *({**moved, "key": key} for key in (one, two)),
        removed,
    ]

    def name(event: Any) -> Any:
        return event["kind"], event["key"]

    assert sorted(events[1:], key=name) == sorted(wanted, key=name)
    assert engine.manager.poll_events() == []


def test_the_oldest_events_are_dropped_and_counted(engines: Callable[..., Engine]) -> None:
    engine = engines(pages=8, events=2)
    engine.serve(prompt(1))
    keys = keys_of(prompt(1))
    assert [event["key"] for event in engine.manager.poll_events()] == keys[1:]
    assert engine.manager.stats()["events_dropped"] == 2


def test_what_is_pinned_stays(engines: Callable[..., Engine]) -> None:
    engine = engines(pages=4)
    manager = engine.manager
    sequence = engine.begin([*prompt(1, 1), 0])
    engine.compute(sequence)
    manager.store(sequence.number, keys_of(sequence.tokens))
    pin = manager.pin(sequence.number)
    engine.free(sequence)
    with pytest.raises(kvferry.BusyError, match="group 0 is out of blocks: 4 needed, 3 free or evictable"):
        engine.begin(prompt(2, 4))
    assert manager.find_prefix(keys_of(prompt(1, 1))) == (1, 0)
    manager.unpin(pin)
    engine.serve(prompt(2, 4))
    with pytest.raises(kvferry.InvalidArgumentError, match="unknown pin"):
        manager.unpin(pin)


def test_a_reset_forgets_all_blocks(engines: Callable[..., Engine]) -> None:
    engine = engines(pages=4)
    for name in (1, 2):
        engine.serve([*prompt(name), 0])
    sequence = engine.begin([7])
    with pytest.raises(kvferry.BusyError, match="1 sequences and 0 pins are open"):
        engine.manager.reset()
    engine.free(sequence)
    engine.manager.reset()
    assert [engine.serve([*prompt(name), 0]) for name in (1, 2)] == [0, 0]


def test_a_call_that_blocks_are_out_for_changes_nothing(engines: Callable[..., Engine]) -> None:
    engine = engines(pages=4)
    sequence = engine.begin(prompt(1, 3))
    assert engine.compute(sequence)
    pages = engine.manager.blocks(sequence.number)
    with pytest.raises(kvferry.BusyError, match="group 0 is out of blocks: 2 needed, 1 free"):
        engine.manager.append(sequence.number, TOKENS + 1)
    with pytest.raises(kvferry.BusyError, match="2 needed"):
        engine.begin(prompt(2, 2))
    assert engine.manager.blocks(sequence.number) == pages
    assert engine.manager.append(sequence.number) == 1
    assert engine.manager.usage()["primary_free"] == 0
    engine.check(sequence)


def test_a_wait_ends_when_no_copy_is_under_way(engines: Callable[..., Engine]) -> None:
    engine = engines()
    assert not engine.manager.wait()
    for name in (1, 2):
        engine.serve([*prompt(name), 0])
    engine.settle()
    assert not engine.manager.wait(60)
    assert engine.manager.stats()["under_way"] == 0


def test_a_wait_misses_no_copy_that_ends_within_the_call_before(agent: kvferry.Agent) -> None:
    # Looking so many blocks up takes longer than the copies of the others.
    long, short = 20_000, 500

    def keys(name: int, count: int) -> list[bytes]:
        return [bytes([name]) + at.to_bytes(15, "big") for at in range(count)]

    region = agent.register(bytearray((long + short + 1) * PAGE), "none")
    with kvferry.BlockManager([([region], long + short + 1, short)], tokens_per_block=TOKENS) as manager:

        def run(tokens: int, keys: list[bytes], computed: list[bytes], priority: int) -> None:
            kept = kvferry.RetentionConfig([(0, None, priority)])
            number = manager.allocate(tokens, keys, retention=kept).sequence
            while not manager.is_ready(number):
                manager.wait()
            manager.free(number, computed)
            while manager.wait():
                pass

        kept, moved, other = keys(1, long), keys(2, short), keys(3, short + 1)
        too_long = (TOKENS * (long + short + 1), kept + other)
        run(TOKENS * long, kept, kept, 90)
        for _ in range(10):
            run(TOKENS * short + 1, moved, moved, 35)
            # Takes the pages of the blocks before, and leaves none.
            run(TOKENS * (short + 1), other, [], 35)
            aborted = manager.allocate(TOKENS * short + 1, moved)
            manager.free(aborted.sequence)
            while True:
                try:
                    manager.free(manager.allocate(*too_long).sequence)
                    break
                except kvferry.BusyError:
                    if not manager.wait():
                        pytest.fail("a wait said that no copy is under way, after copies had made room")
            while manager.wait():
                pass


KEYS = keys_of(prompt(1, 2))


@pytest.mark.parametrize(
    ("call", "kind", "what"),
    [
        (lambda it: it.allocate(0, []), ValueError, "a prompt has at least one token"),
        (lambda it: it.allocate(8, KEYS[:1]), ValueError, "1 keys for a prompt of 8 tokens: 2 are needed"),
        (
            lambda it: it.allocate(8, KEYS, tokens=[1]),
            ValueError,
            "1 tokens for a prompt of 8: give all of them, or none",
        ),
        (lambda it: it.allocate(8, [b"short", b""]), ValueError, "key 0 has 5 bytes, not 16"),
        (lambda it: it.allocate(8, ["0" * 16] * 2), TypeError, "expected a sequence of keys, each of them bytes"),
        (lambda it: it.allocate(8, 5), TypeError, "has no len()"),
        (lambda it: it.allocate(8, KEYS, tokens=[1, None]), TypeError, "item 1"),
        (lambda it: it.allocate(8, KEYS, tokens=[1, -1]), OverflowError, "item 1"),
        (lambda it: it.allocate(-1, []), OverflowError, "prompt_tokens"),
        (lambda it: it.allocate(4, KEYS[:1], retention="dram"), TypeError, "RetentionConfig"),
        (lambda it: it.append(77), ValueError, "unknown sequence: it was freed, or is of another manager"),
        (lambda it: it.store(2**64 - 1, []), ValueError, "unknown sequence"),
        (lambda it: it.free(77), ValueError, "unknown sequence"),
        (lambda it: it.pin(77), ValueError, "unknown sequence"),
        (lambda it: it.blocks(77), ValueError, "unknown sequence"),
        (lambda it: it.is_ready(77), ValueError, "unknown sequence"),
        (lambda it: it.reused_tokens(77), ValueError, "unknown sequence"),
        (lambda it: it.unpin(0), ValueError, "unknown pin"),
        (lambda it: it.usage(1), ValueError, "no group 1: the manager has 1"),
        (lambda it: it.blocks(it.allocate(1, []).sequence, 9), ValueError, "no group 9"),
        (lambda it: it.append(it.allocate(1, []).sequence, 2**32 - 1), ValueError, "a sequence has at most 4294967295"),
        (lambda it: it.store(it.allocate(4, KEYS[:1]).sequence, KEYS), ValueError, "2 keys for a sequence of 4 tokens"),
        (lambda it: it.wait(-1.0), ValueError, "a time in seconds can't be negative"),
    ],
)
def test_a_wrong_argument_is_an_error_that_names_it(
    call: Callable[[kvferry.BlockManager], object], kind: type[Exception], what: str, engines: Callable[..., Engine]
) -> None:
    manager = engines().manager
    with pytest.raises(kind, match=re.escape(what)) as raised:
        call(manager)
    assert kind is not ValueError or isinstance(raised.value, kvferry.InvalidArgumentError)


@pytest.mark.parametrize("length", [2**42, 2**60])
def test_no_memory_is_taken_for_what_an_argument_says_of_its_length(
    length: int, engines: Callable[..., Engine]
) -> None:
    keys: Any = range(length)
    with pytest.raises(TypeError, match="expected a sequence of keys"):
        engines().manager.find_prefix(keys)


def test_a_key_that_is_not_the_one_of_the_stored_block_is_refused(engines: Callable[..., Engine]) -> None:
    engine = engines()
    sequence = engine.begin(prompt(1, 2))
    engine.compute(sequence)
    engine.manager.store(sequence.number, KEYS)
    with pytest.raises(kvferry.InvalidArgumentError, match="the key of block 1 differs"):
        engine.manager.free(sequence.number, [KEYS[0], bytes(16)])
    engine.free(sequence)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"groups": []}, "0 groups: 1 to 65535 are supported"),
        ({"groups": [(0, 4, 0)]}, "group 0: its pages have no memory"),
        ({"groups": [(1, 0, 0)]}, "group 0 has no primary blocks"),
        ({"groups": [(1, 3, 0)]}, "group 0: a region of 4096 bytes is not 3 equal parts"),
        ({"groups": [(1, 4, 2**31)]}, "group 0 has 2147483652 blocks: at most 2147483647 are supported"),
        ({"groups": [(1, 4, 0), (-1, 4, 0)]}, "group 1: its regions are not of the agent of the others"),
        ({"groups": [(2, 4, 0)]}, "is given twice"),
        ({"tokens_per_block": 0}, "tokens_per_block is 0"),
        ({"tokens_per_block": 2**32 - 1, "groups": [(1, 4, 2**30)]}, "bytes of memory, which the system does not give"),
        ({"events": 2**63}, "bytes of memory, which the system does not give"),
        ({"secondary_offload_min_priority": 101}, "secondary_offload_min_priority is 101: at most 100"),
        ({"store_bytes": 1 << 20}, "a capacity of 1048576 bytes has only 0 segments"),
    ],
)
def test_a_manager_that_can_not_be_meant_is_an_error_that_names_it(
    change: dict[str, Any], what: str, agent: kvferry.Agent
) -> None:
    with kvferry.Agent("other", listen=LOOPBACK) as other:
        here = agent.allocate(4096)
        regions: dict[int, list[kvferry.Region]] = {0: [], 1: [here], 2: [here, here], -1: [other.allocate(4096)]}
        given: dict[str, Any] = {"groups": [(1, 4, 4)], "tokens_per_block": TOKENS, **change}
        groups = [(regions[which], primary, secondary) for which, primary, secondary in given.pop("groups")]
        with pytest.raises(kvferry.InvalidArgumentError, match=re.escape(what)):
            kvferry.BlockManager(groups, **given)


def test_a_manager_that_was_closed_says_so_and_gives_its_memory_back(agent: kvferry.Agent) -> None:
    memory = bytearray(4 * PAGE)
    region = agent.register(memory, "none")
    with kvferry.BlockManager([([region], 4, 4)], tokens_per_block=TOKENS) as manager:
        assert repr(manager) == "<kvferry.BlockManager 1 groups, 4 tokens per block>"
        manager.allocate(1, [])
    manager.close()
    for call in (manager.wait, manager.reset, manager.stats, manager.poll_events, lambda: manager.allocate(1, [])):
        with pytest.raises(kvferry.ShutdownError, match="the block manager is closed"):
            call()
    agent.unregister(region)
    memory.clear()


def test_copies_fail_once_the_pages_are_unregistered(agent: kvferry.Agent) -> None:
    memory = bytearray(4 * PAGE)
    region = agent.register(memory, "none")
    with kvferry.BlockManager([([region], 4, 4)], tokens_per_block=TOKENS) as manager:
        engine = Engine(manager, [memory])
        engine.serve([*prompt(1), 0])
        agent.unregister(region)
        assert engine.serve([*prompt(2), 0]) == 0
        stats = manager.stats()
        assert (stats["offloaded"], stats["failed"]) == (0, 3)


START = f"""
import kvferry, os
agent = kvferry.Agent(listen="127.0.0.1:0")
manager = kvferry.BlockManager([([agent.allocate(4 << 20, "none")], 4, 64)], tokens_per_block={TOKENS})
def serve(name):
    keys = [bytes([name, block]) * 8 for block in range(3)]
    made = manager.allocate(13, keys)
    while not manager.is_ready(made.sequence): manager.wait()
    manager.free(made.sequence, keys)
    return made.reused_tokens
"""


@pytest.mark.parametrize("end", ["", "manager.close()", "del manager", "agent.shutdown()", "del manager, agent"])
def test_the_interpreter_exits_cleanly_with_copies_under_way(end: str) -> None:
    work = "for name in range(9): serve(name)\nmanager.allocate(13, [bytes(range(1, 17))] * 3)\n"
    ended = run_python(START + work + end)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_after_a_fork_every_call_raises_forked_error_and_the_parent_goes_on(children: Callable[..., Child]) -> None:
    child = children(START)
    child.run("serve(1), serve(2); made = manager.allocate(1, []); number = made.sequence")
    calls = [
        "manager.allocate(1, [])",
        "manager.append(number)",
        "manager.store(number, [])",
        "manager.free(number)",
        "manager.pin(number)",
        "manager.unpin(0)",
        "manager.reset()",
        "manager.blocks(number)",
        "manager.is_ready(number)",
        "manager.reused_tokens(number)",
        "manager.find_prefix([])",
        "manager.usage()",
        "manager.wait()",
        "manager.poll_events()",
        "manager.stats()",
        "manager.close()",
    ]
    code = f"""
    def raised(call):
        try: eval(call)
        except kvferry.ForkedError: return True
        except Exception as e: return repr(e)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        wrong = [call for call in {calls!r} if raised(call) is not True]
        del manager
        os.write(write, repr(wrong).encode())
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    status, os.read(read, 65536).decode()
    """
    assert child.run(code) == (0, "[]")
    child.run("manager.free(number)")
    assert child.run("serve(1)") == 12
    assert child.finish() == (0, "")


def test_managers_leak_no_descriptor_and_no_thread(tmp_path: Path, children: Callable[..., Child]) -> None:
    child = children("import kvferry, os")
    code = f"""
    for mode in ("gds", "posix_debug_fallback"):
        with kvferry.Agent(listen="127.0.0.1:0") as agent:
            kept = kvferry.RetentionConfig(transfer_mode=mode, directory={str(tmp_path)!r} + "/" + mode)
            with kvferry.BlockManager([([agent.allocate(16384)], 4, 8)], tokens_per_block=4) as manager:
                for name in range(2):
                    made = manager.allocate(16, [bytes([name, block]) * 8 for block in range(4)], retention=kept)
                    while not manager.is_ready(made.sequence): manager.wait()
                    manager.free(made.sequence, [bytes([name, block]) * 8 for block in range(4)])
                assert manager.stats()["offloaded"] == 4
        del agent, manager
    # A thread that unmaps large mappings ends after the last of them.
    left()
    """
    first = child.run(code)
    assert child.run(code) == first
    assert first[1] == 1
    assert child.finish() == (0, "")


def test_threads_may_share_a_manager(engines: Callable[..., Engine]) -> None:
    shared = engines(pages=8, secondary=16)
    wrong: list[BaseException] = []

    def serve(seed: int) -> None:
        rng = random.Random(seed)
        engine = Engine(shared.manager, shared.memory)
        try:
            for _ in range(40):
                tokens = [*prompt(rng.randrange(6), 3), seed]
                served: list[int] = []
                while not served:
                    try:
                        served.append(engine.serve(tokens))
                    except kvferry.BusyError:
                        shared.manager.wait(0.001)
                        os.sched_yield()
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=serve, args=[seed]) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    shared.settle()
    usage = shared.manager.usage()
    assert usage["primary_free"] + usage["primary_cached"] == 8


@dataclass
class Mirror:
    """What the events of a manager say: where each block of each group is."""

    manager: kvferry.BlockManager
    groups: list[dict[bytes, str]]

    def follow(self) -> None:
        # Some of what follows from a reset is left to later calls.
        for _ in range(64):
            for event in self.manager.poll_events():
                blocks = self.groups[event["group"]]
                if event["kind"] == "stored":
                    assert event["key"] not in blocks
                    assert event["parent"] is None or event["parent"] in blocks
                    blocks[event["key"]] = "primary"
                elif event["kind"] == "removed":
                    del blocks[event["key"]]
                elif event["kind"] == "updated" and event["tier"] is not None:
                    assert blocks[event["key"]] == event["tier"][0]
                    blocks[event["key"]] = event["tier"][1]

    def find_prefix(self, keys: list[bytes]) -> tuple[int, int]:
        blocks = secondary = 0
        for key in keys:
            tiers = {group.get(key) for group in self.groups}
            if None in tiers:
                break
            blocks += 1
            secondary += "secondary" in tiers
        return blocks, secondary


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(4))
def test_random_calls_reuse_the_right_kv_and_events_say_what_is_where(
    seed: int, mode: str, engines: Callable[..., Engine], tmp_path: Path
) -> None:
    rng = random.Random(seed)
    pages, secondary, groups = rng.randint(3, 10), rng.randint(1, 12), rng.randint(1, 2)
    engine = engines(pages, secondary, groups, events=1 << 16, copy_on_partial_reuse=rng.random() < 0.7)
    manager, pins = engine.manager, list[int]()
    mirror = Mirror(manager, [{} for _ in range(groups)])

    def tokens(least: int) -> list[int]:
        """Of few kinds, so that prompts have prefixes in common."""
        return [rng.randrange(2) if at % 3 == 0 else 0 for at in range(rng.randint(least, 14))]

    def settle() -> None:
        engine.settle()
        mirror.follow()

    def begin(_: Sequence | None) -> None:
        engine.begin(tokens(1), retention=retention(mode, tmp_path, rng.choice([20, 35, 80])), salt=0)

    def extend(sequence: Sequence | None) -> None:
        if sequence is not None and sequence.computed == len(sequence.tokens):
            sequence.tokens += tokens(1)[:5]

    def compute(sequence: Sequence | None) -> None:
        if sequence is not None:
            engine.compute(sequence)

    def store(sequence: Sequence | None) -> None:
        if sequence is not None:
            keys = keys_of(sequence.tokens[: sequence.computed])
            assert manager.store(sequence.number, keys, tokens=sequence.tokens) <= len(manager.blocks(sequence.number))

    def free(sequence: Sequence | None) -> None:
        if sequence is not None:
            engine.free(sequence)

    def pin(sequence: Sequence | None) -> None:
        if sequence is not None and len(pins) < 2:
            pins.append(manager.pin(sequence.number))

    def unpin(_: Sequence | None) -> None:
        if pins:
            manager.unpin(pins.pop())

    def wait(_: Sequence | None) -> None:
        manager.wait(rng.choice([0, None]))

    def reset(_: Sequence | None) -> None:
        if not engine.sequences and not pins:
            manager.reset()

    def lose_files(_: Sequence | None) -> None:
        shutil.rmtree(tmp_path / "posix_debug_fallback", ignore_errors=True)

    def compare(_: Sequence | None) -> None:
        settle()
        keys = keys_of(tokens(4))
        assert manager.find_prefix(keys) == mirror.find_prefix(keys)

    calls = {
        begin: 6,
        extend: 3,
        compute: 9,
        store: 3,
        free: 4,
        pin: 1,
        unpin: 1,
        wait: 3,
        reset: 1,
        lose_files: 1,
        compare: 3,
    }
    for _ in range(300):
        (call,) = rng.choices(list(calls), calls.values())
        with suppress(kvferry.BusyError):
            call(rng.choice(engine.sequences) if engine.sequences else None)
        for sequence in engine.sequences:
            if sequence.is_begun and manager.is_ready(sequence.number):
                engine.check(sequence)
    for sequence in list(engine.sequences):
        engine.free(sequence)
    for one in pins:
        manager.unpin(one)
    settle()
    for number, blocks in enumerate(mirror.groups):
        usage = manager.usage(number)
        assert usage["primary_free"] + usage["primary_cached"] == pages
        tiers = list(blocks.values())
        assert (tiers.count("primary"), tiers.count("secondary")) == (
            usage["primary_cached"],
            secondary - usage["secondary_free"],
        )
    stats = manager.stats()
    assert stats["under_way"] == stats["events_dropped"] == 0
    assert mode == "posix_debug_fallback" or stats["failed"] == 0


def test_the_paged_engine_verifies_all_tokens_and_has_hits_of_all_kinds() -> None:
    command = [sys.executable, ROOT / "python/examples/paged_engine.py", "--turns", "3"]
    ran = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert re.match(r"27 requests, \d+ preempted; 324 tokens as without a cache\n", ran.stdout)
    assert sorted(re.findall(r"(\w+) +\d+ prompt tokens +[1-9]\d* reused", ran.stdout)) == MODES
    assert re.search(
        r"[1-9]\d* blocks offloaded, [1-9]\d* blocks onboarded, \d+ blocks copied, 0 blocks failed", ran.stdout
    )


def test_importing_kvferry_does_not_import_numpy() -> None:
    ended = run_python("import kvferry, sys; print('numpy' in sys.modules)")
    assert (ended.stdout, ended.stderr) == ("False\n", "")
