"""Settings of the connector, and what it refuses, by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvferry.trtllm import KVFerryConnectorScheduler, KVFerryConnectorWorker
from kvferry.trtllm._engine_facts import Facts
from kvferry.trtllm._pages import Pages
from kvferry.trtllm._settings import Settings
from trtllm_kit import args
from trtllm_reference import Cache, Shape

PAGE = Path(__file__).parents[3] / "docs/trtllm.md"


@pytest.fixture(autouse=True)
def _a_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TLLM_KVFERRY_DISK", str(tmp_path / "kv"))
    monkeypatch.setenv("TLLM_KVFERRY_DISK_GIB", "2")


def test_settings_come_from_variables_that_spawned_ranks_inherit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TLLM_KVFERRY_LOAD", "async")
    monkeypatch.setenv("TLLM_KVFERRY_STAGING_GIB", "0.5")
    monkeypatch.setenv("TLLM_KVFERRY_MODEL", "8")
    settings = Settings.of(args(kv_connector_config=None))
    assert settings.store.directories == (str(tmp_path / "kv"),)
    assert (settings.load, settings.save, settings.staging_bytes) == ("async", "async", 1 << 29)


def test_later_sources_win(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({"disk": ["/a", "/b"], "disk_gib": 1, "host_gib": 1, "priority": 1, "load_wait": 1}))
    monkeypatch.setenv("TLLM_KVFERRY_CONFIG", str(file))
    monkeypatch.setenv("KVFERRY_PRIORITY", "2")
    monkeypatch.setenv("KVFERRY_LOAD_WAIT", "2")
    monkeypatch.setenv("TLLM_KVFERRY_LOAD_WAIT", "3")
    monkeypatch.delenv("TLLM_KVFERRY_DISK")
    config = SimpleNamespace(extra_config={"disk_gib": 4})
    settings = Settings.of(args(kv_connector_config=config))
    assert settings.store.directories == ("/a", "/b")
    assert (settings.store.host_bytes, settings.store.priority, settings.load_wait) == (1 << 30, 2, 3.0)
    assert settings.store.disk_bytes == 4 << 30
    monkeypatch.setenv("TLLM_KVFERRY_DISK", '["/c"]')
    assert Settings.of(args()).store.directories == ("/c",)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("DSIK", "/kv", "TLLM_KVFERRY_DSIK is no setting; there are TLLM_KVFERRY_ADOPT_EMPTY, TLLM_KVFERRY_BLOCKS_MAX"),
        ("DISK", "", "set disk, the directory of the store"),
        ("DISK_GIB", "much", "disk_gib must be a number from"),
        ("LOAD", "maybe", "load must be one of sync, async, off, not 'maybe'"),
        ("SAVE", "never", "save must be one of async, sync, off"),
        ("LOAD_WAIT", "-1", "load_wait must be a number from 0 to 600, not -1"),
        ("STAGING_GIB", "0", "staging_gib must be a number from"),
        ("CONFIG", "/no/file.json", "/no/file.json can't be read as a JSON object"),
    ],
)
@pytest.mark.parametrize("half", [KVFerryConnectorScheduler, KVFerryConnectorWorker])
def test_a_wrong_setting_ends_the_start_with_its_name(
    half: Any, name: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TLLM_KVFERRY_" + name, value)
    with pytest.raises(ValueError, match=re.escape(message)):
        half(args())


def test_a_setting_that_does_not_exist_in_a_file_or_the_configuration_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="no setting 'disc'; there are adopt_empty, blocks_max"):
        Settings.of(args(kv_connector_config=SimpleNamespace(extra_config={"disc": 1})))
    file = tmp_path / "settings.json"
    file.write_text("[]")
    monkeypatch.setenv("TLLM_KVFERRY_CONFIG", str(file))
    with pytest.raises(ValueError, match="must hold a JSON object, not list"):
        Settings.of(args())


def _sizes(**sizes: int) -> Any:
    mapping = SimpleNamespace(**({"rank": 0, "tp_size": 1, "pp_size": 1, "cp_size": 1} | sizes))
    return SimpleNamespace(to_mapping=lambda: mapping)


def _cache(**fields: Any) -> Any:
    return SimpleNamespace(**({"tokens_per_block": 8, "dtype": "auto"} | fields))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"scheduler_config": SimpleNamespace(capacity_scheduler_policy="MAX_UTILIZATION")},
            "capacity_scheduler_policy MAX_UTILIZATION: use GUARANTEED_NO_EVICT",
        ),
        ({"max_beam_width": 4}, "max_beam_width 4: use 1"),
        ({"parallel_config": _sizes(pp_size=2)}, "pipeline_parallel_size 2: use 1"),
        ({"parallel_config": _sizes(cp_size=2)}, "context_parallel_size 2: use 1"),
        ({"speculative_config": object()}, "speculative_config: remove it"),
        ({"kv_cache_config": _cache(host_cache_size=1 << 30)}, "kv_cache_config.host_cache_size 1073741824: use 0"),
    ],
)
@pytest.mark.parametrize("half", [KVFerryConnectorScheduler, KVFerryConnectorWorker])
def test_what_the_connector_does_not_support_is_refused_by_name(
    half: Any, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        half(args(**changes))


def test_all_reasons_for_a_refusal_are_said_at_once() -> None:
    with pytest.raises(NotImplementedError, match=r"max_beam_width 2.*; speculative_config"):
        Facts.of(args(max_beam_width=2, speculative_config=1))


def test_the_policy_of_the_second_cache_manager_is_its_own() -> None:
    policy = SimpleNamespace(capacity_scheduler_policy=SimpleNamespace(name="MAX_UTILIZATION"))
    Facts.of(args(scheduler_config=policy, kv_cache_config=_cache(use_kv_cache_manager_v2=True)))


def test_arguments_without_most_attributes_are_one_rank() -> None:
    facts = Facts.of(SimpleNamespace(model="m"))
    assert (facts.rank, facts.ranks, facts.tokens_per_block) == (0, 1, None)
    assert facts.model == Facts.of(SimpleNamespace(model="m")).model != Facts.of(SimpleNamespace(model="n")).model


def test_a_cache_that_can_not_be_cut_into_blocks_is_refused_with_the_reason() -> None:
    worker = KVFerryConnectorWorker(args(kv_cache_config=None))
    with pytest.raises(NotImplementedError, match=r"no kv_cache_config\.tokens_per_block"):
        worker.register_kv_caches(SimpleNamespace())
    worker.shutdown()
    worker = KVFerryConnectorWorker(args())
    with pytest.raises(NotImplementedError, match="needs a contiguous KV cache tensor"):
        worker.register_kv_caches(SimpleNamespace(is_contiguous=lambda: False))
    worker.shutdown()


def test_what_a_layout_says_of_its_data_and_buffers_names_the_blocks() -> None:
    def fingerprint(buffers: Any, **more: Any) -> bytes:
        layout = Cache(Shape()).layout()
        layout.groups[0].regions[0].buffers = buffers
        return Pages.of_layout(SimpleNamespace(**vars(layout), **more), "auto").fingerprint

    key = SimpleNamespace(layer_id=0, role="key")
    # Newer versions have tuples with a third part.
    told = [fingerprint((key,)), fingerprint(((0, "key", 1),)), fingerprint(((0, "key", 2),))]
    told += [fingerprint((key,), dtype=dtype) for dtype in ("float8_e4m3fn", "int8")]
    assert len(set(told)) == len(told)


def test_the_page_names_every_setting_and_every_refusal() -> None:
    page = PAGE.read_text()
    with pytest.raises(ValueError, match="there are") as raised:
        Settings.of(args(kv_connector_config=SimpleNamespace(extra_config={"no": 1})))
    for name in str(raised.value).split("there are ")[1].split(", "):
        assert f"`{name}`" in page, name
    for name in ("capacity_scheduler_policy", "max_beam_width", "speculative_config", "host_cache_size"):
        assert name in page
