"""What of `KVFerryOffloadingSpec` needs no vLLM: settings, retention, names and the cutting of pages.

The rest is checked in vLLM's own engine core, in e2e/kvferry_e2e/contract/offload.py.
"""

from __future__ import annotations

import ast
import os
import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvferry.vllm import _offload_layout as layout
from kvferry.vllm._layout import UnsupportedCacheError
from kvferry.vllm._offload_keys import Keys
from kvferry.vllm._offload_retention import Plan, Retention
from kvferry.vllm._offload_settings import GIB, OffloadSettings

ROOT = Path(__file__).parents[2]
SETTINGS: dict[str, Any] = {"disk": "/kv", "disk_gib": 2}


def test_settings_are_taken_beside_those_that_vllm_reads() -> None:
    given = {**SETTINGS, "host_gib": 0.5, "spec_name": "x", "spec_module_path": "y", "blocks_per_chunk": 2}
    settings = OffloadSettings.of(given)
    assert settings.directories == ("/kv",)
    assert (settings.disk_bytes, settings.host_bytes) == (2 * GIB, GIB // 2)
    assert OffloadSettings.of({**SETTINGS, "disk": ["/a", "/b"]}).directories == ("/a", "/b")


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
        ({"share_tp": 0}, "share_tp must be a whole number from 1"),
        ({"lease": 0}, "lease must be a number from 1"),
        ({"direct": "yes"}, "direct must be one of auto, off, require"),
        ({"object": 3}, "object must be a string"),
        ({"object_options": {"concurrency": 3}}, "object_options needs object"),
        ({"dsik": "/kv"}, "no setting 'dsik' in kv_connector_extra_config"),
    ],
)
def test_a_wrong_setting_is_named_with_what_is_right(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        OffloadSettings.of({**SETTINGS, **change})


def test_of_ranges_that_overlap_the_higher_priority_holds() -> None:
    ranges = [{"start": 0, "end": 64, "priority": 80}, {"start": 32, "priority": 50, "duration": 9}]
    plan = Plan.of({"priority": 10, "retention": ranges}, 35)
    assert plan.at(15) == Retention(80)
    assert plan.at(47) == Retention(80)
    assert plan.at(64) == Retention(50, 9.0)
    assert Plan.of({"retention": ranges[:1]}, 35).at(64) == Retention(35)
    assert Plan.of(None, 40).at(0) == Retention(40)


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
        Plan.of(params, 35)


def key(number: int, group: int = 0) -> bytes:
    return number.to_bytes(32, "big") + group.to_bytes(4, "big")


def test_keys_are_known_in_the_order_in_which_vllm_adds_them() -> None:
    context = SimpleNamespace(_offload_key_positions={key(at, group): at for group in (0, 1) for at in range(3)})
    keys = Keys()
    keys.update(context)
    context._offload_key_positions[key(3)] = 3
    keys.update(context)
    assert keys.of(0, key(1)) == [key(1), key(2), key(3)]
    assert keys.of(1, key(2, 1), before=1) == [key(1, 1), key(2, 1)]
    assert keys.parent(0, key(3)) == key(2)
    assert keys.parent(0, key(0)) is None
    assert keys.of(0, key(9)) == [key(9)]
    assert keys.parent(0, key(9)) is None


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
    monkeypatch.setattr(layout, "_processor", lambda: "cpu")


@pytest.mark.parametrize("heads", [2, 4, 8, 32])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_each_shard_of_the_heads_is_on_one_rank_or_its_replicas(heads: int, ranks: int) -> None:
    """Of each tensor parallelism, the ranks together have the same shards, each with the same bytes."""
    count = min(heads, 8)
    holders: dict[int, list[tuple[int, int]]] = {}
    prints = set()
    for rank in range(ranks):
        (made,) = layout.group_layouts(*engine(ranks, rank, heads), 8)
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
    _, caches, _ = engine(1, 0, 2, device="cuda")
    with pytest.raises(
        UnsupportedCacheError, match=r"KVFerryOffloadingSpec reads and writes host memory only.*KVFerryTier"
    ):
        layout.check_device(caches)


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
        OffloadSettings.of({"no": 1})
    for name in str(raised.value).split("it has ")[1].split(", "):
        assert f"`{name}`" in page, name
