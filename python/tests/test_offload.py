"""What of `KVFerryOffloadingSpec` needs no vLLM: settings, retention, names and the cutting of pages.

The rest is checked in vLLM's own engine core, in e2e/kvferry_e2e/contract/offload.py.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import logging
import os
import pickle
import random
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kvferry
import pytest
import vllm_stand_in
from kvferry._engine import store as _store
from kvferry._engine.identity.vllm import LayerFacts
from kvferry._engine.settings import GIB
from kvferry._engine.store import open_store
from kvferry.vllm import _offload_layout as layout
from kvferry.vllm._layout import UnsupportedCacheError
from kvferry.vllm._offload_blocks import Block, packed, unpacked
from kvferry.vllm._offload_keys import Keys
from kvferry.vllm._offload_retention import Limits, Plan, Plans, Retention
from kvferry.vllm._settings import store_settings

ROOT = Path(__file__).parents[2]
SETTINGS: dict[str, Any] = {"disk": "/kv", "disk_gib": 2}


def test_settings_are_taken_beside_those_that_vllm_reads() -> None:
    given = {**SETTINGS, "host_gib": 0.5, "spec_name": "x", "spec_module_path": "y", "blocks_per_chunk": 2}
    settings = store_settings(given)
    assert settings.directories == ("/kv",)
    assert (settings.disk_bytes, settings.host_bytes) == (2 * GIB, GIB // 2)
    assert store_settings({**SETTINGS, "disk": ["/a", "/b"]}).directories == ("/a", "/b")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"disk": None}, "disk must be a directory or a list of directories, not None"),
        ({"disk": ["/a", ""]}, "disk must be a directory"),
        ({"disk_gib": None}, "disk_gib is missing"),
        ({"disk_gib": 0}, "disk_gib must be a number from"),
        ({"disk_gib": True}, "disk_gib must be a number"),
        ({"host_gib": -1}, "host_gib must be a number from 0"),
        ({"priority": 101}, "priority must be a whole number from 0 to 100, not 101"),
        ({"priority": 1.5}, "priority must be a whole number"),
        ({"priority": 50, "priority_max": 40}, "priority_max must be a whole number from 50 to 100, not 40"),
        ({"duration_max": 0}, "duration_max must be a number from 1"),
        ({"share_tp": 0}, "share_tp must be a whole number from 1"),
        ({"lease": 0}, "lease must be a number from 1"),
        ({"direct": "yes"}, "direct must be one of auto, off, require"),
        ({"adopt_empty": "yes"}, "adopt_empty must be true or false"),
        ({"must_exist": 1}, "must_exist must be true or false"),
        ({"object": 3}, "object must be a string"),
        ({"object_options": {"concurrency": 3}}, "object_options needs object"),
        ({"dsik": "/kv"}, "no setting 'dsik' in kv_connector_extra_config"),
    ],
)
def test_a_wrong_setting_is_named_with_what_is_right(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        store_settings({**SETTINGS, **change})


@pytest.mark.parametrize("is_over", [False, True])
def test_a_store_whose_processes_do_not_answer_is_opened_once_they_do_or_after_a_time_not_at_all(
    is_over: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries: list[tuple[Any, ...]] = []
    real = kvferry.Store

    def store(*arguments: Any, **options: Any) -> kvferry.Store:
        tries.append(arguments)
        if is_over or len(tries) < 4:
            raise kvferry.BusyError("the keeper does not answer")
        return real(*arguments, **options)

    slept = []
    clock = iter(range(0, 10**6, 50))
    monkeypatch.setattr(kvferry, "Store", store)
    times = SimpleNamespace(sleep=slept.append, monotonic=lambda: float(next(clock)))
    monkeypatch.setattr(_store, "time", times)
    settings = store_settings({**SETTINGS, "disk": str(tmp_path), "segment_mib": 64})
    opened = open_store(settings, 0, logging.getLogger("kvferry.test"))
    messages = [record.getMessage() for record in caplog.records]
    assert "can't be opened yet, and is tried again: the keeper does not answer" in messages[0]
    if is_over:
        assert opened is None
        assert "until the engine is restarted" in messages[1]
        assert len(tries) == 5, "0, 50, 100 and 150 s are within the time"
    else:
        assert opened is not None
        opened.close()
        assert (len(tries), len(slept), len(messages)) == (4, 3, 1)


def test_of_ranges_that_overlap_the_higher_priority_holds() -> None:
    ranges = [{"start": 0, "end": 64, "priority": 80}, {"start": 32, "priority": 50, "duration": 9}]
    plan = Plan.of({"priority": 10, "retention": ranges}, Limits())
    assert plan.at(15) == Retention(80)
    assert plan.at(47) == Retention(80)
    assert plan.at(64) == Retention(50, 9.0)
    assert Plan.of({"retention": ranges[:1]}, Limits()).at(64) == Retention(35)
    assert Plan.of(None, Limits(40)).at(0) == Retention(40)


def test_the_retention_of_a_token_is_that_of_the_first_of_the_highest_ranges_that_have_it() -> None:
    chance = random.Random(2)
    for _ in range(200):
        ranges = []
        for number in range(chance.randrange(12)):
            start = chance.randrange(60)
            end = chance.choice([None, start + chance.randrange(1, 40)])
            ranges.append({"start": start, "end": end, "priority": chance.randrange(4), "duration": number + 1})
        plan = Plan.of({"retention": ranges, "priority": 7}, Limits())
        for token in range(100):
            here = [it for it in ranges if it["start"] <= token and (it["end"] is None or token < it["end"])]
            best = max(here, key=lambda it: it["priority"], default=None)
            assert plan.at(token) == (Retention(best["priority"], float(best["duration"])) if best else Retention(7))


class Looked(list[int]):
    """Counts how often it is looked at."""

    looks = 0

    def __getitem__(self, at: Any) -> Any:
        self.looks += 1
        return super().__getitem__(at)


def test_a_scheduler_looks_at_few_ranges_for_each_block_and_takes_no_more_than_64() -> None:
    ranges = [{"start": at, "end": 1000 + at} for at in range(64)]
    plan = Plan.of({"retention": ranges}, Limits())
    plan._starts = Looked(plan._starts)
    for block in range(1000):
        plan.at(16 * block + 15)
    assert plan._starts.looks <= 8 * 1000
    with pytest.raises(ValueError, match="retention must be at most 64 ranges, not 100000"):
        Plan.of({"retention": [{"start": 0}] * 100_000}, Limits())


def test_a_request_gets_no_higher_priority_and_no_longer_than_the_operator_allows() -> None:
    limits = Limits.of_store(store_settings({**SETTINGS, "priority_max": 60, "duration_max": 90}))
    ranges = [{"start": 0, "end": 16, "priority": 100}, {"start": 16, "end": 32, "priority": 5}]
    plan = Plan.of({"priority": 70, "duration": 3600, "retention": ranges}, limits)
    assert plan.otherwise == plan.at(0) == Retention(60, 90.0)
    # A lower priority may last.
    assert plan.at(16) == Retention(5, 3600.0)
    assert Plan.of({"priority": 70, "duration": 9}, limits).otherwise == Retention(60, 9.0)
    assert Plan.of(None, limits).otherwise == Retention(35)
    assert Plan.of({"priority": 100}, Limits(priority_max=35)).otherwise.priority == 35
    assert Plan.of({"priority": 100}, Limits.of_store(store_settings(SETTINGS))).otherwise == Retention(100)


def test_wrong_values_of_clients_are_one_short_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    plans = Plans(Limits(40), "KVFerryTier", logging.getLogger("of the test"))
    for at in range(50):
        for wrong in (
            f"{at}\n" + "x" * 100_000,
            [[[at] * 1000] * 100] * 60,
            {"start": [at] * 10_000},
            10 ** (4000 + at),
        ):
            for params in ({"retention": wrong}, {"priority": wrong}, {"duration": wrong}, {"retention": [wrong]}):
                assert plans.of(params).at(0) == Retention(40)
                with pytest.raises(ValueError, match="must be") as raised:
                    Plan.of(params, Limits())
                assert len(str(raised.value)) < 200
    (line,) = caplog.messages
    assert len(line) < 300 and "\n" not in line


@pytest.mark.parametrize(
    "params",
    [
        {"priority": -1},
        {"priority": "high"},
        {"priority": True},
        {"duration": 0},
        {"duration": float("nan")},
        {"retention": {"start": 0}},
        {"retention": ["all"]},
        {"retention": [{"start": 8, "end": 8}]},
        {"retention": [{"start": 9, "end": 4}]},
        {"retention": [{"start": -1}]},
        {"retention": [{"start": 0, "priority": 1000}]},
    ],
)
def test_wrong_retention_is_refused(params: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be|ends at"):
        Plan.of(params, Limits())


def key(number: int, group: int = 0) -> bytes:
    return number.to_bytes(32, "big") + group.to_bytes(4, "big")


def test_keys_are_known_in_the_order_of_the_prompt() -> None:
    positions = {key(at, group): 16 * (at + 1) for group in (0, 1) for at in range(3)}
    context = SimpleNamespace(_offload_key_positions=positions)
    keys = Keys({0: 16, 1: 16})
    keys.update(context)
    positions[key(3)] = 64
    keys.update(context)
    assert keys.of(0, key(1)) == [key(1), key(2), key(3)]
    assert keys.of(1, key(2, 1), before=1) == [key(1, 1), key(2, 1)]
    assert keys.parent(0, key(3)) == key(2)
    assert keys.parent(0, key(0)) is None
    assert keys.of(0, key(9)) == [key(9)]
    assert keys.parent(0, key(9)) is None


def test_the_tail_of_a_prompt_is_no_block_before_another_in_whatever_order_vllm_adds_it() -> None:
    # Blocks of 16 tokens, hashes of 4: vLLM looks for a tail from its end, before and after complete blocks.
    positions = {key(100): 44, key(101): 40, key(0): 16, key(1): 32, key(102): 36}
    context = SimpleNamespace(_offload_key_positions=positions)
    keys = Keys({0: 16})
    keys.update(context)
    positions[key(2)] = 48
    positions[key(103)] = 52
    keys.update(context)
    assert keys.of(0, key(0)) == [key(0), key(1), key(2)]
    assert keys.parent(0, key(2)) == key(1)
    for tail in (100, 101, 102):
        assert keys.parent(0, key(tail)) == key(1)
        assert keys.of(0, key(tail)) == [key(tail)]
    assert keys.parent(0, key(103)) == key(2)
    # Of a window vLLM may not say the first blocks.
    window = Keys({0: 16})
    window.update(SimpleNamespace(_offload_key_positions={key(3): 64, key(1): 32}))
    assert window.of(0, key(1)) == [key(1)]
    assert window.of(0, key(3), before=2) == [key(1), key(3)]
    assert window.parent(0, key(3)) is None


def test_a_name_of_vllms_context_that_is_gone_is_no_empty_order() -> None:
    with pytest.raises(AttributeError, match="_offload_key_positions"):
        Keys({0: 16}).update(SimpleNamespace())


@pytest.mark.parametrize("count", [0, 1, 2, 500])
def test_blocks_of_a_job_are_the_same_on_the_other_side_in_a_fraction_of_their_bytes(count: int) -> None:
    hashes = [hashlib.sha256(bytes([at % 256, at // 256])).digest() for at in range(count)]
    kept, system = Retention(3), Retention(90, 60.0)
    blocks = [Block(it, hashes[at - 1] if at else None, system if at < 7 else kept) for at, it in enumerate(hashes)]
    others = [Block(it, None, kept) for it in hashes[::2]] + [Block(it, b"other", kept) for it in hashes[:3]]
    uneven = [Block(b"x" * at, None if at % 3 else b"y", kept) for at in range(count)]
    for of in (blocks, others, uneven):
        sent = pickle.dumps(packed(of), pickle.HIGHEST_PROTOCOL)
        assert unpacked(pickle.loads(sent)) == of
    if count > 10:
        assert len(pickle.dumps(packed(blocks))) < 34 * count + 500 < len(pickle.dumps(blocks))


class Operation:
    """An operation of the store that ends once it is cancelled. `ends`: its outcome, or what it raises."""

    def __init__(self, ends: Any) -> None:
        self._ends = ends
        self.was_cancelled = False

    def done(self) -> bool:
        return self.was_cancelled

    def cancel(self) -> bool:
        self.was_cancelled = True
        return True

    def wait(self, timeout: float | None = None) -> Any:
        if not self.was_cancelled:
            assert timeout is not None
            return None
        if isinstance(self._ends, Exception):
            raise self._ends
        return self._ends


def put(**blocks: int) -> Any:
    """The outcome of a put, as `kvferry.Put`."""
    names = "stored present refused failed refused_no_space refused_contended refused_index_full refused_waiting"
    return SimpleNamespace(**(dict.fromkeys(names.split(), 0) | blocks))


def ended(monkeypatch: pytest.MonkeyPatch, *operations: Operation) -> tuple[Counter[Any], str | None]:
    """What a worker counts of a job whose pages the engine needs, and why the job has failed."""
    vllm_stand_in.install(monkeypatch)
    module = importlib.import_module("kvferry.vllm._offload_worker")
    worker = module.KVFerryOffloadingWorker.__new__(module.KVFerryOffloadingWorker)
    worker._stats, worker._say = vllm_stand_in.OffloadingStats(), lambda *_: None
    job = module._Job("r", False)
    job.pending += [(it, 3) for it in operations]
    worker._jobs = {7: job}
    worker.wait({7})
    ((job_id, has_ended, *_),) = worker.get_finished()
    assert (job_id, has_ended) == (7, True)
    return worker._stats.counted, job.failure


def test_an_engine_that_needs_pages_cancels_puts_and_counts_those_that_had_not_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    puts = [Operation(put(stored=2, present=1)), Operation(put(refused=3, refused_waiting=3))]
    counted, failure = ended(monkeypatch, *puts)
    assert [it.was_cancelled for it in puts] == [True, True]
    assert counted == Counter({("stored",): 2, ("present",): 1, ("refused",): 3, ("refused_waiting",): 3})
    assert failure is None


@pytest.mark.parametrize("raised", [MemoryError(), RuntimeError("can't start new thread")])
def test_a_job_ends_whatever_its_put_has_raised(monkeypatch: pytest.MonkeyPatch, raised: Exception) -> None:
    counted, failure = ended(monkeypatch, Operation(raised))
    assert (counted, failure) == (Counter(), str(raised) or repr(raised))


@dataclass(frozen=True)
class FullAttentionSpec:
    """A stand-in for vLLM's class of this name."""

    num_kv_heads: int
    block_size: int = 16
    head_size: int = 8
    dtype: str = "float32"


PAGE_OF_HEAD = 1024


def engine(ranks: int, rank: int, heads: int, *, certified: bool = True, device: str = "cpu") -> tuple[Any, Any, Any]:
    """The configuration of a rank, its caches, and the configuration of its cache: two layers of one group."""
    here = max(1, heads // ranks)
    shards = min(ranks, heads)
    page = here * PAGE_OF_HEAD
    shard = rank * shards // ranks
    run = SimpleNamespace(local_offset=0, fragment_size=page, num_fragments=1, canonical_offset=shard * page)
    mapping = SimpleNamespace(
        parallelism_agnostic=certified,
        runs=(run,),
        local_page_size_bytes=page,
        canonical_page_size_bytes=shards * page,
        num_writers=ranks // shards,
        writer_index=rank % (ranks // shards),
    )
    refs = [SimpleNamespace(tensor_idx=at, page_size_bytes=page, mapping=mapping) for at in range(2)]
    tensor = SimpleNamespace(tensor=SimpleNamespace(device=SimpleNamespace(type=device)))
    group = SimpleNamespace(group_id=0, layer_names=("a", "b"), tokens_per_block=16)
    config = SimpleNamespace(
        groups=(group,),
        kv_cache_layout="LBHNC",
        model=SimpleNamespace(dtype="float32"),
        cache=SimpleNamespace(blocks_per_chunk=1),
        parallel=SimpleNamespace(rank=rank, world_size=ranks, tp_size=ranks, pp_size=1, pcp_size=1, dcp_size=1),
    )
    caches = SimpleNamespace(tensors=[tensor, tensor], group_data_refs=[refs])
    held = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=FullAttentionSpec(here))])
    return config, caches, held


@pytest.fixture(autouse=True)
def _one_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    # The tests run without torch, which knows what the processor can do.
    monkeypatch.setattr(layout, "processor", lambda: "cpu")


@pytest.mark.parametrize("heads", [2, 4, 8, 32])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_each_shard_of_the_heads_is_on_one_rank_or_its_replicas(heads: int, ranks: int) -> None:
    """Of each tensor parallelism, the ranks together have the same shards, each with the same bytes."""
    count = min(heads, 8)
    holders: dict[int, list[tuple[int, int]]] = {}
    prints = set()
    for rank in range(ranks):
        facts = {name: LayerFacts(kv_heads=heads) for name in ("a", "b")}
        (made,) = layout.group_layouts(*engine(ranks, rank, heads), 8, facts=facts)
        assert made.is_shared
        prints.add(made.fingerprint)
        for shard in made.shards:
            assert shard.count == count
            assert sum(piece.nbytes for piece in shard.pieces) == 2 * heads // count * PAGE_OF_HEAD
            # The first head of the model in this shard.
            first = rank * min(ranks, heads) // ranks * max(1, heads // ranks)
            assert first + shard.pieces[0].offset // PAGE_OF_HEAD == shard.index * heads // count
            holders.setdefault(shard.index, []).append((made.writers, made.writer))
    assert sorted(holders) == list(range(count))
    for ranked in holders.values():
        # Replicas take turns.
        assert sorted(writer for _, writer in ranked) == list(range(ranked[0][0]))
    (alone,) = layout.group_layouts(*engine(1, 0, heads), 8)
    assert prints == {alone.fingerprint}


def test_ranks_that_only_the_models_number_of_heads_calls_replicas_do_not_take_turns() -> None:
    """vLLM concludes from 4 heads of the model that two of 8 ranks have the same one; this layer has 8."""
    for rank in range(8):
        config, caches, held = engine(8, rank, 4)
        for facts in ({}, {name: LayerFacts(kv_heads=8) for name in ("a", "b")}):
            (made,) = layout.group_layouts(config, caches, held, 8, facts=facts)
            assert (made.is_shared, made.writers, made.shards[0].index) == (False, 1, rank)


def test_another_kernel_of_a_layer_is_another_name() -> None:
    prints = set()
    for kernel in ("amx", "vec", "vec"):
        facts = {"a": LayerFacts("vec", 8), "b": LayerFacts(kernel, 8)}
        prints.add(layout.group_layouts(*engine(1, 0, 8), 8, facts=facts)[0].fingerprint)
    assert len(prints) == 2


@pytest.mark.parametrize(("device", "count"), [("cuda", 2), ("cpu", 1)])
def test_another_attention_backend_is_another_name_on_a_gpu(device: str, count: int) -> None:
    prints = set()
    for backend in ("FLASH_ATTN", "FLASHINFER", "FLASHINFER"):
        facts = {name: LayerFacts(kv_heads=8, backend=backend) for name in ("a", "b")}
        prints.add(layout.group_layouts(*engine(1, 0, 8, device=device), 8, facts=facts)[0].fingerprint)
    assert len(prints) == count


def test_what_vllm_does_not_certify_is_stored_per_rank() -> None:
    made = [layout.group_layouts(*engine(2, rank, 8, certified=False), 8)[0] for rank in range(2)]
    assert [(it.is_shared, it.shards[0].index, it.shards[0].count) for it in made] == [(False, 0, 2), (False, 1, 2)]
    (other,) = layout.group_layouts(*engine(4, 0, 8, certified=False), 8)
    assert other.fingerprint != made[0].fingerprint


def test_a_stage_without_layers_of_a_group_has_no_shards_of_it() -> None:
    config, caches, held = engine(1, 0, 8)
    caches.group_data_refs = [[]]
    (made,) = layout.group_layouts(config, caches, held, 8)
    assert (made.group, made.shards) == (0, ())


def test_engines_with_another_interleaving_of_context_parallelism_have_other_names() -> None:
    config, caches, held = engine(2, 0, 8, certified=False)
    config.parallel.dcp_size = 2
    prints = [layout.group_layouts(config, caches, held, 8, interleave)[0].fingerprint for interleave in (1, 4, 1)]
    assert prints[0] == prints[2] != prints[1]
    with pytest.raises(UnsupportedCacheError, match=r"dcp 2.*needs vLLM's OffloadingConnector"):
        layout.group_layouts(config, caches, held, 8)


def test_more_ranks_than_shards_are_refused_with_the_setting_to_change() -> None:
    with pytest.raises(ValueError, match="set share_tp to a multiple of 8"):
        layout.group_layouts(*engine(8, 0, 32), 4)


def test_memory_of_a_device_is_refused_by_name_with_what_to_do() -> None:
    _, caches, _ = engine(1, 0, 2, device="xpu")
    with pytest.raises(
        UnsupportedCacheError,
        match=r"KVFerryOffloadingSpec reads and writes memory of the host and of CUDA devices only.*KVFerryTier",
    ):
        layout.check_device(caches)
    for device in ("cpu", "cuda"):
        layout.check_device(engine(1, 0, 2, device=device)[1])


def test_the_scheduler_reads_what_a_rank_wrote_and_nobody_elses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout.tempfile, "gettempdir", lambda: str(tmp_path))
    layouts = layout.group_layouts(*engine(2, 1, 8), 8)
    path = layout.write_card("engine", 1, "model@1", layouts)
    assert path.stat().st_mode & 0o077 == 0
    card = layout.read_card("engine", 1)
    assert card is not None
    assert (card["model"], card["groups"][0]["shards"]) == ("model@1", [[at, 8] for at in range(4, 8)])
    assert layout.read_card("engine", 0) is None
    assert layout.read_card("another", 1) is None
    path.write_text("{")
    assert layout.read_card("engine", 1) is None
    layout.write_card("engine", 1, "model@2", layouts)
    path.unlink()
    # Its open would wait for a writer.
    os.mkfifo(path)
    assert layout.read_card("engine", 1) is None
    layout.write_card("engine", 1, "model@3", layouts)
    # Another user made a file of this name.
    owner = path.stat().st_uid
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    path.rename(layout._card_path("engine", 1))
    assert layout.read_card("engine", 1) is None
    layout.remove_cards("engine", 2)
    assert not list(tmp_path.iterdir())


def test_the_page_and_the_dashboard_name_every_metric_and_no_other() -> None:
    tree = ast.parse((ROOT / "python/kvferry/vllm/_offload_stats.py").read_text())
    names = {
        node.right.value
        for node in ast.walk(tree)
        if isinstance(node, ast.BinOp) and isinstance(node.right, ast.Constant) and isinstance(node.op, ast.Add)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id="_STORE_GAUGES")], value=ast.Dict(keys=keys)):
                names |= {key.value for key in keys if isinstance(key, ast.Constant)}
    page = set(re.findall(r"vllm:kv_offload_kvferry_(\w+)", (ROOT / "docs/storage.md").read_text()))
    assert page == names
    board = (ROOT / "deploy/grafana/kvferry-vllm.json").read_text()
    assert {name.removesuffix("_total") for name in re.findall(r"vllm:kv_offload_kvferry_(\w+)", board)} == names


def test_the_page_names_every_setting() -> None:
    page = (ROOT / "docs/storage.md").read_text()
    with pytest.raises(ValueError, match="it has") as raised:
        store_settings({"no": 1})
    for name in str(raised.value).split("it has ")[1].split(", "):
        assert f"`{name}`" in page, name
