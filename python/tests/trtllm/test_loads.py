"""The rules that TensorRT-LLM's documentation has for a connector, one by one: loads, ranks, and the end of the halves."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kvferry
import pytest
from kvferry.trtllm._breaker import Breaker
from trtllm_kit import (
    Bench,
    Gate,
    data,
    output,
    prompt,
    reference,
    saved,
    stored,
)
from trtllm_reference import Cache, Engine, Ranks, Request, Shape, State


@pytest.fixture
def tensor_kind() -> str:
    return "buffer"


# Look-ups.


def test_a_load_that_has_nothing_to_load_is_never_asynchronous(bench: Bench) -> None:
    bench.settings(load="async")
    stored(bench)
    scheduler = bench.rank(Shape()).scheduler
    assert scheduler.get_num_new_matched_tokens(Request(1, prompt(5)), 0) == (0, False)
    assert scheduler.get_num_new_matched_tokens(Request(2, prompt(41, 3)), 0) == (0, False)
    assert scheduler.get_num_new_matched_tokens(Request(3, prompt(41)), 40) == (0, False)
    assert scheduler.get_num_new_matched_tokens(Request(4, prompt(41)), 0) == (40, True)


@pytest.mark.parametrize(("computed", "matched"), [(0, 40), (8, 32), (12, 28), (39, 1), (40, 0)])
def test_only_tokens_beyond_those_that_the_engine_has_are_counted(bench: Bench, computed: int, matched: int) -> None:
    stored(bench)
    scheduler = bench.rank(Shape()).scheduler
    assert scheduler.get_num_new_matched_tokens(Request(1, prompt(41)), computed) == (matched, False)


def test_at_least_one_token_of_a_prompt_is_left_to_compute(bench: Bench) -> None:
    stored(bench)
    assert bench.rank(Shape()).scheduler.get_num_new_matched_tokens(Request(1, prompt(40)), 0) == (32, False)


def test_a_store_that_fails_in_a_look_up_is_a_miss(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    stored(bench)
    served = bench.rank(Shape())
    scheduler = served.scheduler
    assert scheduler.get_num_new_matched_tokens(Request(1, prompt(41)), 0) == (40, False)
    served.worker._local.opened.store.close()
    assert scheduler.get_num_new_matched_tokens(Request(2, prompt(41)), 0) == (0, False)
    assert scheduler.build_connector_meta(output()).number == 1


class Never:
    """A read that does not end."""

    is_done = False

    def done(self) -> bool:
        return self.is_done

    def wait(self, timeout: float | None = None) -> int | None:
        assert timeout is not None


def test_a_read_that_takes_longer_than_load_wait_is_a_miss_and_its_memory_is_kept_until_it_ends(bench: Bench) -> None:
    stored(bench)
    scheduler = bench.rank(Shape()).scheduler
    scheduler.get_num_new_matched_tokens(Request(1, prompt(4)), 0)
    loads = scheduler._loads
    free, never = loads.free_bytes, Never()
    real = loads._spaces[0]
    loads._spaces[0] = [SimpleNamespace(lookup=real[0].lookup, get_async=lambda *_: never)]
    assert scheduler.get_num_new_matched_tokens(Request(2, prompt(41)), 0) == (0, False)
    scheduler.build_connector_meta(output())
    assert loads.free_bytes < free
    never.is_done = True
    scheduler.build_connector_meta(output())
    assert loads.free_bytes == free


def test_after_a_look_up_that_took_too_long_there_is_none_until_a_pause_is_over_and_it_doubles() -> None:
    now = [100.0]
    breaker = Breaker(lambda: now[0])
    assert breaker.allows()
    pauses = []
    for _ in range(7):
        pauses.append(breaker.timed_out())
        now[0] += pauses[-1] - 0.01
        assert not breaker.allows()
        now[0] += 0.02
        assert breaker.allows()
    assert pauses == [2, 4, 8, 16, 32, 60, 60]
    breaker.worked()
    assert breaker.allows()
    assert breaker.timed_out() == 2


def test_a_store_that_does_not_answer_holds_the_executor_for_one_request_and_not_for_each(bench: Bench) -> None:
    stored(bench)
    scheduler = bench.rank(Shape()).scheduler
    now = [0.0]
    scheduler._store = Breaker(lambda: now[0])
    scheduler.get_num_new_matched_tokens(Request(1, prompt(4)), 0)
    loads = scheduler._loads
    never, real = Never(), loads._spaces[0]
    asked = []

    def get_async(*_arguments: object) -> Never:
        asked.append(1)
        return never

    loads._spaces[0] = [SimpleNamespace(lookup=real[0].lookup, get_async=get_async)]
    for number in range(2, 12):
        assert scheduler.get_num_new_matched_tokens(Request(number, prompt(41)), 0) == (0, False)
    assert len(asked) == 1
    assert scheduler.stats()["skipped_look_ups"] == 9
    # It answers again.
    never.is_done = True
    loads._spaces[0] = real
    now[0] = 2.5
    assert scheduler.get_num_new_matched_tokens(Request(12, prompt(41)), 0) == (40, False)
    assert scheduler.get_num_new_matched_tokens(Request(13, prompt(41)), 0) == (40, False)


def test_a_read_that_can_not_begin_is_a_miss_and_keeps_no_memory(bench: Bench) -> None:
    stored(bench)
    scheduler = bench.rank(Shape()).scheduler
    scheduler.get_num_new_matched_tokens(Request(1, prompt(4)), 0)
    loads = scheduler._loads
    free, real = loads.free_bytes, loads._spaces[0][0]

    def fail(*_arguments: object) -> None:
        raise kvferry.IoError("no")

    loads._spaces[0] = [SimpleNamespace(lookup=real.lookup, get_async=fail)]
    assert scheduler.get_num_new_matched_tokens(Request(2, prompt(41)), 0) == (0, False)
    scheduler.build_connector_meta(output())
    assert loads.free_bytes == free


# Asynchronous loads.


def test_the_position_of_a_request_that_has_loaded_has_what_it_loaded(bench: Bench) -> None:
    """Blocks that are not computed yet are never saved."""
    bench.settings(load="async")
    stored(bench)
    scheduler = bench.rank(Shape()).scheduler
    request = Request(1, prompt(41) + prompt(40, 5))
    assert scheduler.get_num_new_matched_tokens(request, 0) == (40, True)
    request.py_num_connector_matched_tokens = 40
    pages = list(range(11))
    scheduler.update_state_after_alloc(request, pages)
    assert len(scheduler.build_connector_meta(output()).async_loads) == 1
    step = scheduler.build_connector_meta(output([data(1, 40, 17, pages)]))
    assert saved(step) == [(5, 6)]


def test_other_requests_are_served_while_one_loads(bench: Bench) -> None:
    bench.settings(load="async")
    stored(bench)
    served = bench.rank(Shape())
    gate = Gate(served.worker)
    loading, other = Request(1, prompt(41)), Request(2, prompt(20, 8))
    engine = served.engine
    engine._waiting += [loading, other]
    while other.state is not State.GENERATION_COMPLETE:
        engine.step()
    assert loading.state is State.DISAGG_GENERATION_TRANS_IN_PROGRESS
    gate.open()
    engine.run([])
    assert (loading.computed_tokens, other.computed_tokens) == (1, 20)
    assert [loading.generated, other.generated] == reference([Request(1, prompt(41)), Request(2, prompt(20, 8))])


def test_a_request_goes_on_when_every_rank_has_loaded(bench: Bench) -> None:
    bench.settings(load="async")
    bench.serve(lambda: [Request(1, prompt(41))], tp=2)

    def body(rank: int) -> tuple[State, int]:
        served = bench.rank(Shape(), rank, 2)
        gate = Gate(served.worker) if rank == 1 else None
        engine = Engine(served.engine.cache, served.engine.manager, rank=rank)
        request = Request(1, prompt(41))
        engine._waiting.append(request)
        for _ in range(5):
            engine.step()
        seen = request.state
        if gate is not None:
            gate.open()
        engine.run([])
        served.worker.shutdown()
        return seen, request.computed_tokens

    assert Ranks(2).run(body) == [(State.DISAGG_GENERATION_TRANS_IN_PROGRESS, 1)] * 2


def test_the_memory_of_a_load_is_free_when_every_rank_has_copied_it(bench: Bench) -> None:
    bench.settings(load="async")
    bench.serve(lambda: [Request(1, prompt(41))], tp=2)

    def body(rank: int) -> list[bool]:
        served = bench.rank(Shape(), rank, 2)
        gate = Gate(served.worker) if rank == 1 else None
        engine = served.engine
        full = None
        seen = []
        if rank == 0:
            served.scheduler.get_num_new_matched_tokens(Request(9, []), 0)
            full = served.scheduler._loads.free_bytes
        engine._waiting.append(Request(1, prompt(41)))
        for _ in range(3):
            engine.step()
        if rank == 0:
            seen.append(served.scheduler._loads.free_bytes < full)
        if gate is not None:
            gate.open()
        engine.run([Request(2, prompt(8))])
        if rank == 0:
            seen.append(served.scheduler._loads.free_bytes == full)
        served.worker.shutdown()
        return seen

    assert Ranks(2).run(body) == [[True, True], []]


def test_an_asynchronous_load_whose_request_ends_before_it_has_pages_is_reported(bench: Bench) -> None:
    bench.settings(load="async")
    stored(bench)
    served = bench.rank(Shape())
    scheduler, worker = served.scheduler, served.worker
    request = Request(1, prompt(41))
    assert scheduler.get_num_new_matched_tokens(request, 0) == (40, True)
    free = scheduler._loads.free_bytes
    assert scheduler.request_finished(request, []) is False
    assert scheduler._loads.free_bytes > free
    assert worker.get_finished([], [1]) == ([], [])
    worker.bind_connector_meta(scheduler.build_connector_meta(output()))
    worker.start_load_kv(None)
    worker._copying[1].result(60)
    assert worker.get_finished([], []) == ([], [1])


# Ranks.


def test_ranks_whose_caches_differ_are_refused_on_all_of_them(bench: Bench) -> None:
    refused = []

    def body(rank: int) -> None:
        with pytest.raises(NotImplementedError, match="the ranks' KV caches differ"):
            bench.rank(Shape(token_bytes=16 - 8 * rank), rank, 2)
        refused.append(rank)

    Ranks(2).run(body)
    assert sorted(refused) == [0, 1]


def test_the_staging_memory_of_ranks_leaves_no_file(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from kvferry.trtllm import _staging

    folder = tmp_path / "shared"
    folder.mkdir()
    monkeypatch.setattr(_staging, "_FOLDER", folder)
    opened = []
    open_arena = _staging.Arena.open

    def watch(path: str, ranks: int) -> Any:
        opened.append(Path(path).parent)
        return open_arena(path, ranks)

    monkeypatch.setattr(_staging.Arena, "open", watch)
    bench.serve(lambda: [Request(1, prompt(41))], tp=2)
    assert opened == [folder]
    assert list(folder.iterdir()) == []


# The end of the halves.


def test_after_the_shutdown_nothing_is_loaded_and_no_call_fails(bench: Bench) -> None:
    stored(bench)
    served = bench.rank(Shape())
    scheduler, worker = served.scheduler, served.worker
    scheduler.get_num_new_matched_tokens(Request(1, prompt(41)), 0)
    scheduler.shutdown()
    scheduler.shutdown()
    worker.shutdown()
    worker.shutdown()
    assert scheduler.get_num_new_matched_tokens(Request(2, prompt(41)), 0) == (0, False)
    step = scheduler.build_connector_meta(output([data(2, 0, 41, [1, 2, 3, 4, 5, 6])]))
    worker.bind_connector_meta(step)
    worker.start_load_kv(None)
    worker.wait_for_save(None)
    assert worker.get_finished([2], []) == ([2], [])
    assert "store_blocks" not in scheduler.stats()


def test_halves_that_are_dropped_close_their_store(bench: Bench) -> None:
    made = bench.rank(Shape())
    store = made.worker._local.opened.store
    bench._open.clear()
    del made
    gc.collect()
    with pytest.raises(kvferry.ShutdownError):
        store.sync()


def test_a_forked_child_finds_nothing_and_ends_without_a_word_and_the_parent_goes_on(
    bench: Bench, capfd: pytest.CaptureFixture[str]
) -> None:
    stored(bench)
    made = bench.rank(Shape())
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = int(made.scheduler.get_num_new_matched_tokens(Request(1, prompt(41)), 0) != (0, False))
            made.scheduler.shutdown()
            made.worker.shutdown()
        except BaseException:
            status = 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert capfd.readouterr().err == ""
    assert made.scheduler.get_num_new_matched_tokens(Request(1, prompt(41)), 0) == (40, False)


def test_a_cache_can_be_registered_anew(bench: Bench) -> None:
    stored(bench)
    served = bench.rank(Shape())
    engine = served.engine
    engine.run([Request(1, prompt(41)), Request(2, prompt(30, 4))])
    cache = Cache(Shape())
    served.worker.register_kv_caches(cache.tensors[0])
    ended = Engine(cache, engine.manager).run([Request(3, prompt(41)), Request(4, prompt(30, 4))])
    assert [it.computed_tokens for it in ended] == [1, 6]
    assert [it.generated for it in ended] == reference([Request(3, prompt(41)), Request(4, prompt(30, 4))])


def test_caches_that_are_registered_one_after_another_load_each_time_and_leave_no_staging_memory(bench: Bench) -> None:
    stored(bench)
    served = bench.rank(Shape())
    agent = served.worker._local.opened.agent
    registered = set()
    # Memory of the first is free by the third, and has its addresses.
    for number in range(6):
        # The request before is still promised a load.
        assert served.scheduler.get_num_new_matched_tokens(Request(number, prompt(41)), 0) == (40, False)
        registered.add(len(agent.regions()))
        cache = Cache(Shape())
        served.worker.register_kv_caches(cache.tensors[0])
    assert len(registered) == 1
    ended = Engine(cache, served.engine.manager).run([Request(it, prompt(41)) for it in range(10, 14)])
    assert [it.generated for it in ended] == reference([Request(it, prompt(41)) for it in range(10, 14)])
    loads = served.scheduler._loads
    loads.collect()
    assert loads.free_bytes == loads.arena.nbytes - loads.arena.head


def test_staging_memory_is_kept_while_a_read_into_it_does_not_end_and_the_next_cache_loads(bench: Bench) -> None:
    stored(bench)
    served = bench.rank(Shape())
    scheduler, opened = served.scheduler, served.worker._local.opened
    hangs = [True]

    class Agent:
        def __getattr__(self, name: str) -> Any:
            return getattr(opened.agent, name)

        def unregister(self, region: Any) -> None:
            if hangs and region.addr == address:
                raise kvferry.QuarantinedError("a read of the test does not end")
            opened.agent.unregister(region)

    assert scheduler.get_num_new_matched_tokens(Request(1, prompt(41)), 0) == (40, False)
    memory, address = weakref.ref(scheduler._loads.arena.buffer), scheduler._loads.arena.addr
    scheduler._local.opened = SimpleNamespace(agent=Agent(), store=opened.store)
    served.worker.register_kv_caches(Cache(Shape()).tensors[0])
    assert scheduler.get_num_new_matched_tokens(Request(2, prompt(41)), 0) == (40, False)
    scheduler.build_connector_meta(output())
    gc.collect()
    assert memory() is not None
    hangs.clear()
    scheduler.build_connector_meta(output())
    gc.collect()
    assert memory() is None
    scheduler._local.opened = opened
