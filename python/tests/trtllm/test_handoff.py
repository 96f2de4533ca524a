"""Prompts go from an engine that prefills to one that decodes, each with a store of its own."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import socket
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import kvferry
import pytest
from kit import run_python
from kvferry.trtllm._handoff import Prompt
from kvferry.trtllm._keys import chain
from trtllm_kit import BLOCK, Bench, Served, data, output, prompt, reference
from trtllm_pair import Pair, hand_over, handoff, hears, settled, until
from trtllm_reference import Ranks, Request, Shape

LENGTHS = (5, 8, 9, 37, 64, 70)
WINDOWED = Shape(groups=(((0,), 0), ((1,), 20)))


def requests(lengths: Sequence[int] = LENGTHS, **options: Any) -> list[Request]:
    return [Request(at + 1, prompt(length, at), **options) for at, length in enumerate(lengths)]


def to_compute(length: int) -> int:
    return length - (length - 1) // BLOCK * BLOCK


@pytest.fixture
def silent() -> Iterator[list[str]]:
    """Addresses that accept connections, and at which nothing answers."""
    with contextlib.ExitStack() as sockets:
        found = [sockets.enter_context(socket.socket()) for _ in range(5)]
        for it in found:
            it.bind(("127.0.0.1", 0))
            it.listen(16)
        yield [f"127.0.0.1:{it.getsockname()[1]}" for it in found]


@pytest.fixture
def pair(bench: Bench) -> Pair:
    return Pair(bench)


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


def test_a_prompt_that_takes_longer_than_load_wait_is_computed_and_its_engine_not_asked_for_a_while(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    pair.bench.settings(load_wait=0)
    prefill, decode = pair.prefill(), pair.decode()

    def several(**options: Any) -> list[Request]:
        return [Request(at, prompt(41, at), **options) for at in range(3)]

    ended = hand_over(prefill, decode, several)
    assert [it.computed_tokens for it in ended] == [41] * 3
    assert [it.generated for it in ended] == reference(several())
    stats = decode.scheduler.stats()
    # One that comes later than the 2 s for which the engine is not asked finds it again.
    assert 1 <= stats["handoff_timeouts"] == stats["failed_handoffs"] <= 3
    assert f"{handoff(prefill).address} is not asked for 2 s" in caplog.text


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


def test_an_engine_does_not_follow_itself(pair: Pair, capfd: pytest.CaptureFixture[str]) -> None:
    told = ""

    def is_refused() -> bool:
        nonlocal told
        told += capfd.readouterr().err
        return "an engine does not follow itself" in told

    with socket.socket() as kept:
        # Agents may listen at the address of a socket that does not.
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        own = f"127.0.0.1:{kept.getsockname()[1]}"
        both = pair._make("both", None, 0, 1, handoff="both", listen=own, prefill=own)
        until(is_refused, lambda: told)
        assert handoff(both).followers == 0
        ended = both.engine.run(requests())
        assert [it.computed_tokens for it in ended] == list(LENGTHS)
        settled(both)


def test_an_engine_that_does_not_answer_delays_no_other(pair: Pair, silent: list[str]) -> None:
    prefill = pair.prefill()
    addresses = ",".join([*silent, "no-such-host.invalid:1", handoff(prefill).address])
    decode = pair._make("decode", None, 0, 1, handoff="decode", prefill=addresses)
    until(lambda: bool(handoff(prefill).followers == 1))
    (ended,) = hand_over(prefill, decode, lambda **options: [Request(1, prompt(41), **options)])
    assert ended.computed_tokens == 1
    settled(prefill, decode)


def test_an_idle_engine_wakes_no_thread_of_the_handoff(pair: Pair) -> None:
    prefill, decode = pair.prefill(), pair.decode()
    hand_over(prefill, decode, requests)
    settled(prefill, decode)

    own = {str(handoff(it)._thread.native_id) for it in (prefill, decode)}

    def switches() -> dict[str, int]:
        """How often threads have slept that take prompts on, which the directory's, at each third of a lease, are not."""
        found = {}
        for task in Path("/proc/self/task").iterdir():
            # One of another test may end meanwhile.
            with contextlib.suppress(OSError):
                if task.name in own or (task / "comm").read_text().startswith("kvferry-exchang"):
                    status = (task / "status").read_text()
                    found[task.name] = int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])
        return found

    # What has ended last is reported by now, or soon.
    quiet: tuple[float, dict[str, int]] = (0.0, {})

    def is_quiet() -> bool:
        nonlocal quiet
        seen = switches()
        if seen != quiet[1]:
            quiet = (time.monotonic(), seen)
        return time.monotonic() - quiet[0] > 1

    until(is_quiet)
    assert len(quiet[1]) >= 4


ENDING = """
    import sys
    import trtllm_kit
    from kvferry.trtllm import KVFerryConnectorWorker
    from trtllm_reference import Cache, Shape

    sys.modules["tensorrt_llm._utils"] = trtllm_kit._utilities()
    worker = KVFerryConnectorWorker(trtllm_kit.args())
    worker.register_kv_caches(Cache(Shape()).tensors[0])
    print("ends", flush=True)
"""


def test_a_process_ends_whatever_engines_do_not_answer(tmp_path: Path, silent: list[str]) -> None:
    settings = {"DISK": tmp_path / "kv", "DISK_GIB": "0.0625", "HANDOFF_GIB": 1 / 64}
    settings |= {"HANDOFF": "both", "LISTEN": "127.0.0.1:0", "PREFILL": ",".join(silent)}
    env = {f"TLLM_KVFERRY_{name}": str(value) for name, value in settings.items()}
    ended = run_python(ENDING, env=env | {"PYTHONPATH": str(Path(__file__).parents[1])})
    assert (ended.returncode, ended.stdout) == (0, "ends\n"), ended.stderr


WARNING = """
    import os
    import sys
    import trtllm_kit
    from kvferry.trtllm import KVFerryConnectorWorker
    from trtllm_reference import Cache, Shape

    sys.modules["tensorrt_llm._utils"] = trtllm_kit._utilities()
    lines, stderr = os.pipe()
    os.dup2(stderr, 2)
    worker = KVFerryConnectorWorker(trtllm_kit.args())
    worker.register_kv_caches(Cache(Shape()).tensors[0])
    # Stays open: what is written to stderr at the end needs a reader.
    reader = os.fdopen(lines)
    for line in reader:
        if "can't be reached" in line:
            print(line, flush=True)
            break
"""


def test_a_wrong_address_of_an_engine_that_prefills_leaves_a_line(tmp_path: Path) -> None:
    with socket.socket() as kept:
        # Nothing listens there.
        kept.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{kept.getsockname()[1]}"
        settings = {"DISK": tmp_path / "kv", "DISK_GIB": "0.0625", "HANDOFF_GIB": 1 / 64}
        settings |= {"HANDOFF": "decode", "PREFILL": address}
        env = {f"TLLM_KVFERRY_{name}": str(value) for name, value in settings.items()}
        ended = run_python(WARNING, env=env | {"PYTHONPATH": str(Path(__file__).parents[1])})
    assert ended.returncode == 0
    assert f'an engine that prefills can\'t be reached; it is tried again publisher="{address}"' in ended.stdout


UNREAD = """
    import os, socket
    import kvferry
    from kvferry.connector import Exchange, log_to_stderr

    log_to_stderr("warn")
    unread, stderr = os.pipe()
    os.dup2(stderr, 2)
    os.set_blocking(2, False)
    try:
        while True:
            os.write(2, bytes(4096))
    except BlockingIOError:
        os.set_blocking(2, True)
    listener = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    agent = kvferry.Agent(listen="127.0.0.1:0", silence=60)
    exchange = Exchange(agent, [], 1, block_tokens=4, slots=8, timeout=60.0, publishes=True, follows=[address])
    # The engine tries again after it has logged that its session has ended.
    for _ in range(3):
        listener.accept()[0].close()
        assert exchange.offer((bytes(32), bytes(16), 1)) is None
        exchange.followers, exchange.refused, exchange.gauges()
    with kvferry.Agent(listen="127.0.0.1:0", silence=60) as other:
        other.peer(agent.address).connect()
    exchange.close()
    print("goes on", flush=True)
    os._exit(0)
"""


def test_a_stderr_that_is_full_stops_no_thread() -> None:
    # A plain write to it would not return, and hold the locks of the rendezvous.
    assert run_python(UNREAD).stdout == "goes on\n"


def test_a_time_to_fetch_may_be_beyond_the_clock_and_not_negative(pair: Pair) -> None:
    pair.prefill()
    exchange = handoff(pair.decode())._exchange
    for refused in (-1.0, math.nan, -math.inf):
        with pytest.raises(ValueError, match="can't be negative or not a number"):
            exchange.fetch((bytes(32), bytes(16), 1), 0, refused)
    for long in (1e9, 1e19, math.inf):
        # Nothing is on offer, so this shows only that the time is taken.
        assert exchange.fetch((bytes(32), bytes(16), 1), 0, long) == (None, [])


def test_an_offer_that_no_request_comes_for_ends_with_its_time(pair: Pair) -> None:
    pair.bench.settings(handoff_timeout=1)
    prefill, decode = pair.prefill(), pair.decode()
    prefill.engine.run([Request(1, prompt(41), 1)])
    settled(prefill, decode)


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
    for it in requests():
        made = Prompt.of(it.tokens, chain(it.tokens, BLOCK, None), None, BLOCK)
        # It has all of them already.
        assert made is None or handoff(decode).fetch(made, made.blocks, 0.0) is None
    assert handoff(decode).gauges()["heard"] == 0
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


def test_tokens_that_are_no_token_ids_are_not_handed_over(pair: Pair) -> None:
    prefill, decode = pair.prefill(), pair.decode()
    prefill.engine.run([Request(1, [-1, *prompt(40)], 1)])
    (ended,) = decode.engine.run([Request(1, [-1, *prompt(40)])])
    assert ended.computed_tokens == 41
    settled(prefill, decode)


def test_a_forked_child_ends(pair: Pair) -> None:
    prefill = pair.prefill()
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
