"""KV of prompts outlives the engine, and only the right KV is loaded."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kit import remove
from kvferry.trtllm._keys import chain
from trtllm_kit import BLOCK, Bench, prompt, reference
from trtllm_reference import Engine, HostTensor, Manager, Ranks, Request, Shape, here

LENGTHS = (5, 8, 9, 37, 64, 70)


def requests(**options: Any) -> list[Request]:
    return [Request(at + 1, prompt(length, at), **options) for at, length in enumerate(LENGTHS)]


def to_compute(length: int) -> int:
    """Of a prompt whose full blocks are stored: one token at least."""
    return length - (length - 1) // BLOCK * BLOCK


def computed(ended: list[Request]) -> list[int]:
    return [it.computed_tokens for it in ended]


def generated(ended: list[Request]) -> list[list[int]]:
    return [it.generated for it in ended]


@pytest.mark.parametrize("load", ["sync", "async"])
@pytest.mark.parametrize("save", ["sync", "async"])
def test_a_second_engine_loads_all_full_blocks_and_generates_the_same(bench: Bench, load: str, save: str) -> None:
    bench.settings(load=load, save=save)
    first = bench.serve(requests)
    second = bench.serve(requests)
    assert computed(first) == list(LENGTHS)
    assert computed(second) == [to_compute(it) for it in LENGTHS]
    assert generated(first) == generated(second) == reference(requests())


@pytest.mark.parametrize("load", ["sync", "async"])
@pytest.mark.parametrize("tp", [2, 4])
def test_each_rank_loads_its_own_shard(bench: Bench, tp: int, load: str) -> None:
    bench.settings(load=load)
    first = bench.serve(requests, tp=tp)
    second = bench.serve(requests, tp=tp)
    assert computed(second) == [to_compute(it) for it in LENGTHS]
    assert generated(first) == generated(second) == reference(requests(), tp=tp)


@pytest.mark.parametrize("chunk", [3, 8, 20])
def test_blocks_of_a_prompt_that_is_computed_in_chunks_are_saved_as_they_are_completed(
    bench: Bench, chunk: int
) -> None:
    bench.serve(lambda: requests(chunk=chunk))
    second = bench.serve(lambda: requests(chunk=chunk))
    assert computed(second) == [to_compute(it) for it in LENGTHS]
    assert generated(second) == reference(requests())


def test_the_blocks_of_a_request_that_generates_one_token_are_saved(bench: Bench) -> None:
    bench.serve(lambda: requests(max_new_tokens=1))
    assert computed(bench.serve(requests)) == [to_compute(it) for it in LENGTHS]


def test_a_longer_prompt_loads_the_blocks_that_it_shares(bench: Bench) -> None:
    bench.serve(lambda: [Request(1, prompt(32))])
    (ended,) = bench.serve(lambda: [Request(1, prompt(32) + prompt(32, 9))])
    assert ended.computed_tokens == 32
    # It has added its own.
    (ended,) = bench.serve(lambda: [Request(1, prompt(32) + prompt(32, 9))])
    assert ended.computed_tokens == BLOCK


def test_a_block_is_not_the_same_behind_another_beginning(bench: Bench) -> None:
    bench.serve(lambda: [Request(1, prompt(8, 1) + prompt(24, 2))])
    (ended,) = bench.serve(lambda: [Request(1, prompt(8, 3) + prompt(24, 2))])
    assert ended.computed_tokens == 32


@pytest.mark.parametrize("attribute", ["cache_salt", "cache_salt_id"])
def test_another_salt_does_not_find_the_blocks(bench: Bench, attribute: str) -> None:
    def salted(salt: Any) -> list[Request]:
        request = Request(1, prompt(33))
        if attribute == "cache_salt_id":
            del request.cache_salt
        setattr(request, attribute, salt)
        if bench.manager.__module__.startswith("tensorrt_llm"):
            request.cache_salt = getattr(request, "cache_salt", None)
        return [request]

    bench.serve(lambda: salted("7" if attribute == "cache_salt" else 7))
    for salt, tokens in (("8", 33), (None, 33), ("7", 1)):
        given = salt if attribute == "cache_salt" or salt is None else int(salt)
        assert computed(bench.serve(lambda given=given: salted(given))) == [tokens], salt  # type: ignore[misc]


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "another"},
        {"revision": "2"},
        {"quant_config": SimpleNamespace(quant_algo="FP8")},
        {"kv_cache_config": SimpleNamespace(tokens_per_block=BLOCK, dtype="fp8")},
        {"quant_config": SimpleNamespace(quant_algo=None, kv_cache_quant_algo="INT8")},
        {"dtype": "bfloat16"},
        {"model_kwargs": {"rope_theta": 1}},
    ],
)
def test_another_model_or_type_does_not_find_the_blocks(bench: Bench, changes: dict[str, Any]) -> None:
    bench.serve(requests)
    assert computed(bench.serve(requests, **changes)) == list(LENGTHS)


def test_other_weights_at_the_same_path_do_not_find_the_blocks(bench: Bench, tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(1 << 20))
    for model in (str(tmp_path), tmp_path):
        bench.serve(requests, model=model)
        assert computed(bench.serve(requests, model=model)) == [to_compute(it) for it in LENGTHS]
    weights.write_bytes(b"\1" * (1 << 20))
    assert computed(bench.serve(requests, model=str(tmp_path))) == list(LENGTHS)


def test_weights_that_were_loaded_otherwise_do_not_find_the_blocks(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(1 << 20))
    bench.serve(requests, model=str(tmp_path), load_format="auto")
    assert computed(bench.serve(requests, model=str(tmp_path), load_format="dummy")) == list(LENGTHS)


def test_weights_that_are_not_seen_need_a_name(bench: Bench) -> None:
    with pytest.raises(ValueError, match="the weights of tiny are not in a folder of this host"):
        bench.serve(requests, load_format="auto")
    bench.settings(model="named")
    bench.serve(requests, load_format="auto")


def test_another_layout_of_the_cache_does_not_find_the_blocks(bench: Bench) -> None:
    bench.serve(requests)
    assert computed(bench.serve(requests, shape=Shape(token_bytes=8))) == list(LENGTHS)
    assert computed(bench.serve(requests, shape=Shape(groups=(((0, 1, 2), 0),)))) == list(LENGTHS)


def test_another_tensor_parallelism_does_not_find_the_blocks(bench: Bench) -> None:
    bench.serve(requests)
    assert computed(bench.serve(requests, tp=2)) == list(LENGTHS)


def test_the_setting_model_names_the_weights(bench: Bench) -> None:
    bench.settings(model="shared")
    bench.serve(requests, model="/one/path")
    assert computed(bench.serve(requests, model="/another/path")) == [to_compute(it) for it in LENGTHS]


@pytest.mark.parametrize(
    "name",
    ["lora_task_id", "multimodal_hashes", "multimodal_positions", "prompt_embedding_table", "encoder_tokens"],
)
def test_a_request_whose_kv_has_no_name_is_neither_stored_nor_loaded(bench: Bench, name: str) -> None:
    def special() -> list[Request]:
        request = Request(1, prompt(33))
        setattr(request, name, 3 if name == "lora_task_id" else [1])
        return [request]

    bench.serve(special)
    assert computed(bench.serve(lambda: [Request(1, prompt(33))])) == [33]
    assert computed(bench.serve(special)) == [33]


def segments(directory: Path) -> list[Path]:
    return [it for it in directory.rglob("*") if it.is_file() and it.stat().st_size >= 1 << 20]


def damage(bench: Bench, pattern: bytes) -> None:
    """Flips a byte of a block in the store."""
    for path in segments(bench.directory):
        data = path.read_bytes()
        at = data.find(pattern)
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at)
                file.write(bytes([pattern[0] ^ 1]))
            return
    raise AssertionError("the block is not in the store")


@pytest.mark.parametrize("load", ["sync", "async"])
def test_a_block_with_a_flipped_byte_is_computed_and_stored_again(bench: Bench, load: str) -> None:
    bench.settings(load=load)
    served = bench.rank(Shape())
    pattern: list[bytes] = []

    def keep(part: str) -> None:
        (request,) = served.engine._running or [None]
        if part == "wait_for_save" and request is not None and not pattern:
            pattern.append(bytes(served.engine.cache.page(0, request.pages[0][2])[:32]))

    served.engine.trace = keep
    served.engine.run([Request(1, prompt(65))])
    served.worker.shutdown()
    damage(bench, pattern[0])
    (ended,) = bench.serve(lambda: [Request(1, prompt(65))])
    assert ended.computed_tokens == 65 - 2 * BLOCK
    assert [ended.generated] == reference([Request(1, prompt(65))])
    (ended,) = bench.serve(lambda: [Request(1, prompt(65))])
    assert ended.computed_tokens == 1


@pytest.mark.parametrize("load", ["sync", "async"])
def test_an_engine_whose_directory_is_removed_goes_on(bench: Bench, load: str) -> None:
    bench.settings(load=load)
    served = bench.rank(Shape())
    served.engine.run([Request(1, prompt(40))])
    remove(bench.directory)
    ended = served.engine.run([Request(2, prompt(40)), Request(3, prompt(50, 4))])
    assert generated(ended) == reference([Request(2, prompt(40)), Request(3, prompt(50, 4))])


def test_an_engine_whose_store_can_not_be_opened_serves(bench: Bench) -> None:
    bench.directory.parent.mkdir(parents=True, exist_ok=True)
    bench.directory.write_text("a file")
    for tp in (1, 2):
        ended = bench.serve(requests, tp=tp)
        assert computed(ended) == list(LENGTHS)
        assert generated(ended) == reference(requests(), tp=tp)


def test_load_off_loads_nothing_and_save_off_stores_nothing(bench: Bench) -> None:
    bench.settings(save="off")
    bench.serve(requests)
    assert computed(bench.serve(requests)) == list(LENGTHS)
    bench.settings(save="async")
    bench.serve(requests)
    bench.settings(load="off")
    assert computed(bench.serve(requests)) == list(LENGTHS)
    bench.settings(load="sync")
    assert computed(bench.serve(requests)) == [to_compute(it) for it in LENGTHS]


def test_staging_memory_that_is_too_small_for_a_prompt_loads_its_beginning(bench: Bench) -> None:
    shape = Shape(token_bytes=32, groups=((tuple(range(64)), 0),))
    # A block has 32 KiB: 1 MiB of staging has room for 32 of 40.
    bench.settings(staging_gib=1 / 1024)
    long = lambda: [Request(1, prompt(41 * BLOCK))]  # noqa: E731
    bench.serve(long, shape=shape)
    (ended,) = bench.serve(long, shape=shape)
    assert ended.computed_tokens == 21 * BLOCK
    assert [ended.generated] == reference(long(), shape=shape)


def test_blocks_come_from_an_object_store_to_another_host(bench: Bench, tmp_path: Path) -> None:
    bench.settings(object=f"file://{tmp_path}/objects")
    bench.serve(requests)
    bench.settings(disk=str(tmp_path / "another"))
    second = bench.serve(requests)
    assert computed(second) == [to_compute(it) for it in LENGTHS]
    assert generated(second) == reference(requests())


def test_an_engine_that_decodes_loads_what_an_engine_that_prefills_has_stored(bench: Bench) -> None:
    prefill, decode = bench.rank(Shape()), bench.rank(Shape())
    for at, length in enumerate(LENGTHS):
        prefill.engine.run([Request(at, prompt(length, at), max_new_tokens=1)])
        request = Request(at, prompt(length, at))
        decode.engine.run([request])
        assert request.computed_tokens == to_compute(length)
        assert [request.generated] == reference([Request(at, prompt(length, at))])


def test_a_process_that_ends_without_a_shutdown_loses_nothing_that_it_has_put(bench: Bench) -> None:
    """TensorRT-LLM does not tell a connector that it ends."""
    program = """
    from kvferry.trtllm import KVFerryConnectorScheduler, KVFerryConnectorWorker
    from trtllm_reference import Cache, Engine, Manager, Request, Shape
    from trtllm_kit import args, prompt
    made = args()
    worker, scheduler = KVFerryConnectorWorker(made), KVFerryConnectorScheduler(made)
    cache = Cache(Shape())
    worker.register_kv_caches(cache.tensors[0])
    Engine(cache, Manager(worker, scheduler)).run([Request(1, prompt(65))])
    """
    tests = str(Path(__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    subprocess.run(command, env=environment, check=True, timeout=120)
    bench.make_tensor = HostTensor
    (ended,) = bench.serve(lambda: [Request(1, prompt(65))])
    assert ended.computed_tokens == 1


WINDOWED = Shape(groups=(((0, 2), 0), ((1, 3), 20)))


@pytest.mark.parametrize("load", ["sync", "async"])
@pytest.mark.parametrize("chunk", [1 << 30, 24])
@pytest.mark.parametrize("tp", [1, 2])
def test_groups_of_layers_load_what_each_group_needs(bench: Bench, load: str, chunk: int, tp: int) -> None:
    bench.settings(load=load)
    first = bench.serve(lambda: requests(chunk=chunk), tp=tp, shape=WINDOWED)
    second = bench.serve(lambda: requests(chunk=chunk), tp=tp, shape=WINDOWED)
    assert computed(first) == list(LENGTHS)
    assert computed(second) == [to_compute(it) for it in LENGTHS]
    assert generated(first) == generated(second) == reference(requests(), tp=tp, shape=WINDOWED)


def test_a_window_that_has_left_the_store_moves_the_end_of_the_load_to_one_that_is_there(bench: Bench) -> None:
    bench.serve(lambda: [Request(1, prompt(65))], shape=WINDOWED)
    served = bench.rank(WINDOWED)
    served.scheduler.get_num_new_matched_tokens(Request(9, []), 0)
    loads = served.scheduler._loads
    (space,) = loads._spaces[1]
    names = chain(prompt(65), BLOCK, None)

    def lookup(hashes: list[bytes]) -> int:
        # Block 6 of the group with windows has left.
        found = space.lookup(hashes)
        return min(found, hashes.index(names[6])) if names[6] in hashes else found

    loads._spaces[1] = [SimpleNamespace(lookup=lookup, get_async=space.get_async)]
    (ended,) = served.engine.run([Request(1, prompt(65))])
    assert ended.computed_tokens == 65 - 6 * BLOCK
    assert [ended.generated] == reference([Request(1, prompt(65))], shape=WINDOWED)


@pytest.mark.parametrize("load", ["sync", "async"])
@pytest.mark.parametrize("is_told", [True, False])
@pytest.mark.parametrize("taken", [8, 20, 32, 56, 64])
def test_of_an_offer_that_is_taken_in_part_each_window_is_that_before_the_end(
    bench: Bench, load: str, taken: int, is_told: bool
) -> None:
    if bench.manager is not Manager:
        pytest.skip("SKIPPED: an offer that is taken in part: TensorRT-LLM's manager decides it")
    bench.settings(load=load)
    bench.serve(lambda: [Request(1, prompt(65))], shape=WINDOWED)
    served = bench.rank(WINDOWED)
    manager: Any = served.engine.manager
    ask = manager.get_num_new_matched_tokens

    def take(request: Request, computed: int) -> int:
        assert ask(request, computed) == 64
        manager._loads[request.request_id] = request.py_num_connector_matched_tokens = taken
        if is_told:
            served.scheduler.cancel_load(request, taken, 64)
        return taken

    manager.get_num_new_matched_tokens = take
    (ended,) = served.engine.run([Request(1, prompt(65))])
    assert ended.computed_tokens == 65 - taken
    assert [ended.generated] == reference([Request(1, prompt(65))], shape=WINDOWED)
    loads = served.scheduler._loads
    loads.collect()
    assert loads.free_bytes == loads.arena.nbytes - loads.arena.head


def test_a_window_that_can_not_be_read_is_an_error_and_no_wrong_answer(bench: Bench) -> None:
    bench.serve(lambda: [Request(1, prompt(65))], shape=WINDOWED)
    scheduler = bench.rank(WINDOWED).scheduler
    request = Request(1, prompt(65))
    assert scheduler.get_num_new_matched_tokens(request, 0) == (64, False)
    request.py_num_connector_matched_tokens = 32
    scheduler.update_state_after_alloc_by_layer_group(request, [list(range(9))] * 2)
    missing = SimpleNamespace(wait=lambda timeout=None: 0, done=lambda: True)
    scheduler._loads._spaces[1] = [SimpleNamespace(get_async=lambda hashes, blocks: missing)]
    with pytest.raises(RuntimeError, match="request 1 takes 32 of 64 tokens"):
        scheduler.build_connector_meta(SimpleNamespace())


def test_attention_data_parallel_ranks_share_the_store(bench: Bench) -> None:
    def body(rank: int) -> list[int]:
        ranks, here.ranks = here.ranks, None
        served = bench.rank(Shape(), rank, 2, enable_attention_dp=True)
        # Each rank has the whole model, and requests of its own.
        served.engine = Engine(served.engine.cache, served.engine.manager)
        ended = served.engine.run([Request(1, prompt(33, rank))])
        assert ranks is not None
        ranks.gather(None)
        ended += served.engine.run([Request(2, prompt(33, 1 - rank))])
        served.worker.shutdown()
        return computed(ended)

    assert Ranks(2).run(body) == [[33, 1], [33, 1]]
