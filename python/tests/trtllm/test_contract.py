"""The rules that TensorRT-LLM's documentation has for a connector, one by one: steps, pages and ends."""

from __future__ import annotations

import dataclasses
import importlib
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from kit import eventually
from kvferry.trtllm._meta import Load, Part, Save, Step
from trtllm_kit import (
    SOURCE,
    Bench,
    Puts,
    Served,
    args,
    data,
    fake_modules,
    output,
    prompt,
    saved,
    stored,
    upstream,
)
from trtllm_reference import Cache, Engine, Manager, Ranks, Request, Shape, State


@pytest.fixture
def tensor_kind() -> str:
    return "buffer"


# What the two classes are.


def test_both_classes_are_found_by_the_names_in_the_configuration_and_opt_in_to_attention_data_parallelism(
    served: Served, bench: Bench
) -> None:
    worker, scheduler = type(served.worker), type(served.scheduler)
    assert (worker.__name__, scheduler.__name__) == ("KVFerryConnectorWorker", "KVFerryConnectorScheduler")
    assert worker.supports_attention_dp and scheduler.supports_attention_dp
    if bench.manager is not Manager:
        assert worker.__mro__[1].__module__ == scheduler.__mro__[1].__module__ == bench.manager.__module__


def test_worker_and_scheduler_can_be_made_in_two_threads_at_once(bench: Bench) -> None:
    import kvferry.trtllm

    arguments, made = args(), []
    barrier = threading.Barrier(2)

    def make(rank: int) -> None:
        barrier.wait(60)
        half: Any = (kvferry.trtllm.KVFerryConnectorWorker, kvferry.trtllm.KVFerryConnectorScheduler)[rank]
        made.append(half(arguments))

    Ranks(2).run(make)
    assert made[0]._local is made[1]._local
    made[0]._local.close()


def test_what_was_made_for_the_profiling_of_memory_and_never_registered_does_nothing(bench: Bench) -> None:
    import kvferry.trtllm

    arguments = args()
    worker = kvferry.trtllm.KVFerryConnectorWorker(arguments)
    scheduler = kvferry.trtllm.KVFerryConnectorScheduler(arguments)
    scheduler.wait_for_initialization()
    assert scheduler.get_num_new_matched_tokens(Request(1, prompt(33)), 0) == (0, False)
    assert worker.get_finished([], []) == ([], [])
    worker.shutdown()


# The worker half.


def test_before_the_first_metadata_a_step_does_nothing(served: Served) -> None:
    served.worker.start_load_kv(None)
    served.worker.wait_for_layer_load(0, None)
    served.worker.save_kv_layer(0, None)
    served.worker.wait_for_save(None)
    assert served.worker.get_finished([], []) == ([], [])
    served.worker.bind_connector_meta(None)
    served.worker.start_load_kv(None)
    assert callable(served.worker.register_forward_pass_callable())
    served.worker.register_forward_pass_callable()()


def test_metadata_that_stays_bound_is_carried_out_once(served: Served, puts: Puts) -> None:
    step = Step(1, loads=(Load(1, 1, ()),), saves=(Save(1, 0, (b"x" * 32,), (0,), 35),))
    served.worker.bind_connector_meta(step)
    for _ in range(3):
        served.worker.start_load_kv(None)
        served.worker.wait_for_save(None)
    assert len(puts.calls) == 1


def test_an_id_that_was_not_handed_in_is_never_reported_and_each_is_reported_once(
    bench: Bench, served: Served, puts: Puts
) -> None:
    worker = served.worker
    worker.bind_connector_meta(
        Step(1, async_loads=(Load(1, 7, ()), Load(2, 8, ())), saves=(Save(5, 0, (b"x" * 32,), (0,), 35),))
    )
    worker.start_load_kv(None)
    worker.wait_for_save(None)
    for future in worker._copying.values():
        future.result(60)
    assert worker.get_finished([], []) == ([], [])
    assert worker.get_finished([], [7]) == ([], [7])
    assert worker.get_finished([5], [8]) == ([], [8])
    puts.end()
    assert worker.get_finished([], []) == ([5], [])
    assert worker.get_finished([], []) == ([], [])
    # Nothing of it is saved here: it is reported at once.
    assert worker.get_finished([6], []) == ([6], [])


def test_a_page_without_kv_is_skipped_when_blocks_are_loaded(served: Served) -> None:
    worker, tensor = served.worker, served.engine.cache.tensors[0]
    arena = worker._local.arena
    nbytes = tensor.stride(0)
    content = bytes(range(256)) * (3 * nbytes // 256 + 1)
    memoryview(arena.buffer)[arena.head : arena.head + 3 * nbytes] = content[: 3 * nbytes]
    before = bytes(tensor.memory)
    worker.bind_connector_meta(Step(1, loads=(Load(1, 1, (Part(0, (arena.head,), (4, -1, 6)),)),)))
    worker.start_load_kv(None)
    expected = bytearray(before)
    expected[4 * nbytes : 5 * nbytes] = content[:nbytes]
    expected[6 * nbytes : 7 * nbytes] = content[2 * nbytes : 3 * nbytes]
    assert bytes(tensor.memory) == expected


def test_a_page_without_kv_is_not_saved(served: Served) -> None:
    scheduler = served.scheduler
    assert scheduler.get_num_new_matched_tokens(Request(1, prompt(33)), 0) == (0, False)
    step = scheduler.build_connector_meta(output([data(1, 0, 33, [9, -1, 7, 6, 5])]))
    assert saved(step) == [(9,), (7, 6)]


def test_a_page_that_the_cache_does_not_have_is_an_error(served: Served) -> None:
    arena = served.worker._local.arena
    served.worker.bind_connector_meta(Step(1, loads=(Load(1, 1, (Part(0, (arena.head,), (64,)),)),)))
    with pytest.raises(IndexError, match="page 64 is not in the KV cache, which has 64"):
        served.worker.start_load_kv(None)


# Steps.


def test_fields_that_older_versions_lack_are_not_needed(bench: Bench) -> None:
    stored(bench)
    scheduler = bench.rank(Shape()).scheduler
    request = SimpleNamespace(request_id=1, get_tokens=lambda beam: prompt(57))
    assert scheduler.get_num_new_matched_tokens(request, 0) == (40, False)
    scheduler.update_state_after_alloc(request, [1, 2, 3, 4, 5, 6, 7, 8])
    step = scheduler.build_connector_meta(output([data(1, 0, 17, [1, 2, 3, 4, 5, 6, 7, 8])]))
    assert [part.pages for load in step.loads for part in load.parts] == [(1, 2, 3, 4, 5)]
    assert saved(step) == [(6, 7)]
    assert scheduler.request_finished(request, []) is True


def test_pages_are_those_of_the_step_where_the_allocation_was_not_told(bench: Bench) -> None:
    stored(bench)
    scheduler = bench.rank(Shape()).scheduler
    scheduler.get_num_new_matched_tokens(Request(1, prompt(41)), 0)
    assert scheduler.build_connector_meta(output()).loads == ()
    step = scheduler.build_connector_meta(output([data(1, 0, 1, [9, 8, 7, 6, 5, 4])]))
    assert [part.pages for load in step.loads for part in load.parts] == [(9, 8, 7, 6, 5)]


def test_the_position_of_a_new_request_leaves_out_what_its_step_loads(bench: Bench) -> None:
    """Blocks that are not computed yet are never saved."""
    stored(bench)
    scheduler = bench.rank(Shape()).scheduler
    request = Request(1, prompt(41) + prompt(40, 5))
    assert scheduler.get_num_new_matched_tokens(request, 0) == (40, False)
    request.py_num_connector_matched_tokens = 40
    pages = list(range(11))
    step = scheduler.build_connector_meta(output([data(1, 0, 20, pages)]))
    assert saved(step) == [(5, 6)]
    step = scheduler.build_connector_meta(output(cached=[data(1, 60, 21, [])]))
    assert saved(step) == [(7, 8, 9)]


def test_of_an_offer_that_is_taken_in_part_the_rest_is_computed(bench: Bench) -> None:
    stored(bench)
    scheduler = bench.rank(Shape()).scheduler
    request = Request(1, prompt(41) + prompt(40, 5))
    assert scheduler.get_num_new_matched_tokens(request, 0) == (40, False)
    request.py_num_connector_matched_tokens = 16
    step = scheduler.build_connector_meta(output([data(1, 0, 30, list(range(11)))]))
    # 16 + 30 tokens: 5 full blocks, which are in the store.
    assert saved(step) == []
    step = scheduler.build_connector_meta(output(cached=[data(1, 46, 10, [])]))
    assert saved(step) == [(5, 6)]


def test_blocks_of_more_tokens_than_the_arguments_say_end_the_use_of_the_store(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """TensorRT-LLM takes another size for some models. Under a wrong name, a block would be wrong KV."""
    scheduler = served.scheduler
    for number in (1, 2):
        scheduler.get_num_new_matched_tokens(Request(number, prompt(32)), 0)
    # Blocks of 16 tokens.
    step = scheduler.build_connector_meta(output([data(1, 0, 32, [1, 2]), data(2, 0, 32, [3, 4])]))
    assert saved(step) == []
    assert "request 1 has 2 pages for 32 tokens, which are too few for blocks of 8" in caplog.text
    assert scheduler.get_num_new_matched_tokens(Request(3, prompt(32)), 0) == (0, False)


def test_blocks_with_priorities_are_saved_with_them(served: Served) -> None:
    scheduler = served.scheduler
    scheduler.get_num_new_matched_tokens(Request(1, prompt(49)), 0)
    priorities = [90, 90, 10, None, 35, 1000, 35]
    step = scheduler.build_connector_meta(output([data(1, 0, 49, [6, 5, 4, 3, 2, 1, 0], priorities=priorities)]))
    assert [(it.pages, it.priority) for it in step.saves] == [((6, 5), 90), ((4,), 10), ((3, 2), 35), ((1,), 100)]
    # Each run begins with the name of the block before.
    assert [len(it.hashes) - len(it.pages) for it in step.saves] == [0, 1, 1, 1]


def test_no_block_gets_a_higher_priority_than_the_operator_allows(served: Served) -> None:
    scheduler = served.scheduler
    store = dataclasses.replace(scheduler._settings.store, priority_max=60)
    scheduler._settings = dataclasses.replace(scheduler._settings, store=store)
    scheduler.get_num_new_matched_tokens(Request(1, prompt(17)), 0)
    step = scheduler.build_connector_meta(output([data(1, 0, 17, [2, 1, 0], priorities=[90, 10, 35])]))
    assert [it.priority for it in step.saves] == [60, 10]


def test_priorities_of_an_engine_reach_the_store(served: Served, puts: Puts) -> None:
    request = Request(1, prompt(24), priorities=[80, 80, 20])
    served.engine.trace = lambda part: puts.end() if part == "get_finished" else None
    served.engine.run([request])
    assert [(len(hashes) - first, priority) for hashes, first, priority in puts.calls] == [(2, 80), (1, 20)]


def test_blocks_that_were_found_are_not_put_again(bench: Bench) -> None:
    stored(bench)
    served = bench.rank(Shape())
    made = Puts(served.worker)
    served.engine.trace = lambda part: made.end()
    served.engine.run([Request(1, prompt(41))])
    assert made.calls == []


# Ends.


def test_pages_stay_until_all_puts_that_read_them_have_ended(served: Served, puts: Puts) -> None:
    engine = served.engine
    request = Request(1, prompt(20), max_new_tokens=1)
    engine._waiting.append(request)
    for _ in range(5):
        engine.step()
        assert request.state is State.DISAGG_CONTEXT_TRANS_IN_PROGRESS
        assert request.pages[0][0] >= 0
    puts.end()
    engine.step()
    assert request.state is State.GENERATION_COMPLETE


def test_a_request_that_saves_nothing_is_not_kept(served: Served) -> None:
    scheduler = served.scheduler
    request = Request(1, prompt(5))
    scheduler.get_num_new_matched_tokens(request, 0)
    scheduler.build_connector_meta(output([data(1, 0, 5, [1])]))
    assert scheduler.request_finished(request, [1]) is False
    assert scheduler.request_finished(request, [1]) is False
    assert scheduler.request_finished(Request(99, []), []) is False


def test_copies_of_pages_do_not_keep_their_request(bench: Bench) -> None:
    scheduler = bench.rank(Shape(groups=(((0,), 0), ((1,), 16)))).scheduler
    request = Request(1, prompt(20))
    scheduler.get_num_new_matched_tokens(request, 0)
    groups = [[1, 2, 3], [1, 2, 3]]
    scheduler.update_state_after_alloc_by_layer_group(request, groups)
    step = scheduler.build_connector_meta(output([data(1, 0, 20, [], new_block_ids_by_layer_group=groups)]))
    assert saved(step) == [(1, 2), (1, 2)]
    assert scheduler.request_finished_by_layer_group(request, groups) is False


# Calls that only some versions have.


def test_a_request_that_was_reset_is_asked_for_again(bench: Bench) -> None:
    stored(bench)
    served = bench.rank(Shape())
    scheduler = served.scheduler
    request = Request(1, prompt(41))
    assert scheduler.get_num_new_matched_tokens(request, 0) == (40, False)
    free = scheduler._loads.free_bytes
    scheduler.request_reset(request)
    assert scheduler._loads.free_bytes > free
    assert scheduler.build_connector_meta(output()).loads == ()
    assert scheduler.get_num_new_matched_tokens(request, 0) == (40, False)
    scheduler.request_reset(Request(2, []))


@pytest.mark.parametrize("load", ["sync", "async"])
@pytest.mark.parametrize(
    ("cancelled", "loaded"),
    [
        # The offer is tokens 8 to before 40, in blocks 1 to 4.
        ([(24, 40)], {1, 2}),
        # The engine computes from token 20 on, in a block of which it takes the beginning.
        ([(20, 40)], {1, 2}),
        # The engine has this beginning by now.
        ([(8, 16)], {2, 3, 4}),
        ([(8, 20)], {2, 3, 4}),
        ([(0, 16), (32, 50)], {2, 3}),
        ([(32, 40), (8, 16)], {2, 3}),
        ([(8, 40)], set()),
        ([(8, 24), (24, 40)], set()),
        # Nothing of the offer.
        ([(16, 16), (0, 8), (40, 41)], {1, 2, 3, 4}),
    ],
)
def test_of_a_load_that_is_cancelled_in_part_the_rest_is_loaded(
    bench: Bench, load: str, cancelled: list[tuple[int, int]], loaded: set[int]
) -> None:
    bench.settings(load=load)
    stored(bench)
    served = bench.rank(Shape())
    scheduler, pages = served.scheduler, [10, 11, 12, 13, 14, 15]
    request = Request(1, prompt(41))
    scheduler.get_num_new_matched_tokens(request, 8)
    scheduler.update_state_after_alloc(request, pages)
    expected = [bytes(it) for it in _computed(bench, pages)]
    for start, end in cancelled:
        scheduler.cancel_load(request, start, end)
    served.worker.bind_connector_meta(scheduler.build_connector_meta(output()))
    served.worker.start_load_kv(None)
    eventually(lambda: all(it.done() for it in served.worker._copying.values()))
    for block, page in enumerate(pages):
        seen = served.engine.cache.page(0, page)
        assert bytes(seen) == (expected[block] if block in loaded else bytes(len(seen))), block
    scheduler.cancel_load(Request(2, []), 0, 8)
    scheduler._loads.collect()
    assert scheduler._loads.free_bytes == scheduler._loads.arena.nbytes - scheduler._loads.arena.head


def _computed(bench: Bench, pages: list[int]) -> list[memoryview]:
    """The blocks of the prompt, as an engine computes them."""
    cache = Cache(Shape())
    request = Request(1, prompt(41), max_new_tokens=2)
    engine = Engine(cache, None)
    engine._waiting.append(request)
    engine.step()
    return [cache.page(0, page) for page in request.pages[0]]


def test_blocks_behind_a_cancelled_end_are_saved_when_they_are_computed_and_not_before(bench: Bench) -> None:
    stored(bench)
    scheduler = bench.rank(Shape()).scheduler
    # A version whose requests do not say how much was taken.
    request = SimpleNamespace(request_id=1, get_tokens=lambda beam: prompt(41) + prompt(40, 5))
    assert scheduler.get_num_new_matched_tokens(request, 0) == (40, False)
    scheduler.cancel_load(request, 16, 40)
    step = scheduler.build_connector_meta(output([data(1, 0, 30, list(range(11)))]))
    assert saved(step) == []
    step = scheduler.build_connector_meta(output(cached=[data(1, 46, 10, [])]))
    assert saved(step) == [(5, 6)]


def test_the_restated_manager_refuses_what_the_contract_forbids() -> None:
    """Else none of these tests could fail by it."""

    class Scheduler:
        answer = (0, True)

        def get_num_new_matched_tokens(self, request: Any, computed: int) -> Any:
            return self.answer

    class Worker:
        def get_finished(self, saving: list[int], loading: list[int]) -> Any:
            return [77], []

    scheduler, worker = Scheduler(), Worker()
    manager = Manager(worker, scheduler)
    with pytest.raises(AssertionError, match="must load something"):
        manager.get_num_new_matched_tokens(Request(1, prompt(9)), 0)
    with pytest.raises(AssertionError, match="asked for once"):
        manager.get_num_new_matched_tokens(Request(1, prompt(9)), 0)
    scheduler.answer = (9, False)
    with pytest.raises(AssertionError, match="9 tokens of a prompt of 9"):
        manager.get_num_new_matched_tokens(Request(2, prompt(9)), 0)
    with pytest.raises(AssertionError, match="77 was reported as saving, which was not handed in"):
        manager.get_finished()


def test_both_classes_are_subclasses_of_tensorrt_llms_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its source, all tests of this folder drive its own manager, too."""
    if SOURCE is None:
        pytest.skip("SKIPPED: TensorRT-LLM's own manager: set KVFERRY_TRTLLM_SRC to a folder with its source")
    fake_modules(monkeypatch)
    with upstream(monkeypatch) as module:
        halves = importlib.import_module("kvferry.trtllm")
        assert issubclass(halves.KVFerryConnectorWorker, module.KvCacheConnectorWorker)
        assert issubclass(halves.KVFerryConnectorScheduler, module.KvCacheConnectorScheduler)
        assert halves.KVFerryConnectorWorker.__abstractmethods__ == frozenset()
        assert halves.KVFerryConnectorScheduler.__abstractmethods__ == frozenset()
