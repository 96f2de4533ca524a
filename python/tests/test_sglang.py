"""What `kvferry.sglang` does without SGLang: `e2e/run --parts sglang` runs it with SGLang."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kvferry.sglang
import pytest
from kvferry._engine.settings import StoreSettings
from kvferry.sglang import _identity

ROOT = Path(__file__).parents[2]
DIGESTS = [hashlib.sha256(bytes([at])).hexdigest() for at in range(3)]


def test_without_sglang_the_error_says_what_is_needed() -> None:
    if importlib.util.find_spec("sglang") is not None:
        pytest.skip("SKIPPED: SGLang is installed here")
    with pytest.raises(RuntimeError, match=r"KVFerryStorage needs SGLang 0\.5\.23; this one is not installed"):
        _ = kvferry.sglang.KVFerryStorage
    with pytest.raises(AttributeError, match="no attribute 'Other'"):
        _ = kvferry.sglang.Other  # type: ignore[attr-defined]


def test_sglang_finds_the_plugin_which_installs_the_shims(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = importlib.metadata.entry_points(group="sglang.srt.plugins", name="kvferry")
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setenv("KVFERRY_SHIMS", "mooncake")
    found.load()()
    assert type(sys.meta_path[0]).__name__ == "MooncakeFinder"


def test_sglangs_keys_are_blocks_of_the_digest_they_spell() -> None:
    assert _identity.hashes_of(DIGESTS) == [bytes.fromhex(digest) for digest in DIGESTS]
    assert _identity.hashes_of([]) == []


def test_other_keys_are_blocks_of_their_own() -> None:
    digest = DIGESTS[0]
    keys = [digest, digest.upper(), f"{digest}.mamba", f" {digest[1:]}", digest[:-1], "", "key", "é", digest[:32]]
    named = [_identity.hashes_of([key])[0] for key in keys]
    assert len(set(named)) == len(keys)
    assert all(16 <= len(name) <= 64 for name in named)
    # The same in one call.
    assert _identity.hashes_of(keys) == named
    assert _identity.hashes_of([digest, digest.upper()]) == named[:2]


def model(folder: Path, named: str | None = None) -> str:
    return _identity.model_of(SimpleNamespace(model_name=str(folder)), named)


def test_other_weights_of_a_model_have_another_name(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(4 << 20))
    (tmp_path / "config.json").write_text("{}")
    first = model(tmp_path)
    assert first == model(tmp_path)
    (tmp_path / "README.md").write_text("no weights")
    assert first == model(tmp_path)
    weights.write_bytes(bytes(2 << 20) + b"\1" * (2 << 20))
    second = model(tmp_path)
    weights.write_bytes(bytes((4 << 20) + 1))
    third = model(tmp_path)
    (tmp_path / "config.json").write_text('{"rope_theta": 1}')
    assert len({first, second, third, model(tmp_path)}) == 4


@pytest.mark.parametrize(
    "given",
    [
        {"mm_process_config": {"image": {"max_pixels": 9}}},
        {"image_processor_backend": "torchvision"},
        {"disable_fast_image_processor": True},
    ],
)
def test_how_images_are_prepared_is_in_the_names_of_pages(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(100))
    defaults = {"mm_process_config": {}, "image_processor_backend": "auto", "disable_fast_image_processor": False}
    serve(monkeypatch, model_path=str(tmp_path))
    plain = model(tmp_path)
    assert "media" not in plain
    serve(monkeypatch, model_path=str(tmp_path), **defaults)
    assert model(tmp_path) == plain
    serve(monkeypatch, model_path=str(tmp_path), **{**defaults, **given})
    assert model(tmp_path) != plain
    (tmp_path / "preprocessor_config.json").write_text("{}")
    serve(monkeypatch, model_path=str(tmp_path), **defaults)
    assert model(tmp_path) != plain


def serve(monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> None:
    """As in a process of SGLang's server."""
    monkeypatch.setattr(_identity, "server_arguments", lambda: SimpleNamespace(**arguments))


@pytest.mark.parametrize("given", ["name={}", "{}", {"lora_name": "name", "lora_path": "{}"}])
def test_another_adapter_at_the_same_path_is_another_model(
    given: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    base.mkdir()
    adapter.mkdir()
    weights = adapter / "adapter_model.safetensors"
    weights.write_bytes(bytes(1 << 20))
    given = given.format(adapter) if isinstance(given, str) else {**given, "lora_path": str(adapter)}
    serve(monkeypatch, model_path=str(base))
    without = model(base)
    serve(monkeypatch, model_path=str(base), lora_paths=[given])
    first = model(base)
    assert first == model(base)
    weights.write_bytes(b"\1" * (1 << 20))
    assert len({without, first, model(base)}) == 3


CONFIG = SimpleNamespace(tp_size=1, tp_lcm_size=None, is_mla_model=False, logical_page_size=None)


def layout(name: str = "kv", **pool: Any) -> bytes:
    return _identity.layout_of(CONFIG, name, SimpleNamespace(**{"layer_num": 2, **pool}), [64], 1, copied=False)


def test_the_two_kinds_of_fp8_are_apart_though_host_pools_have_both_as_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    found = set()
    for kind in ("fp8_e4m3", "fp8_e5m2"):
        serve(monkeypatch, kv_cache_dtype=kind)
        found.add(layout(dtype="torch.uint8"))
    assert len(found) == 2


def test_pages_with_their_elements_in_another_order_are_apart() -> None:
    def described(order: str) -> bytes:
        buffers = SimpleNamespace(layout=SimpleNamespace(value=order))
        return layout(_buffer_infos=(SimpleNamespace(buffers=buffers),))

    apart = [described("hnd"), described("vectorized_5d"), described("nhd")]
    assert len(set(apart)) == 3
    assert apart[2] == described("paged_nhd") == layout() == layout(device_pool=None)
    assert apart[0] == layout(device_pool=SimpleNamespace(kv_cache_layout="hnd"))


@pytest.mark.parametrize(
    ("name", "pool", "apart"),
    [
        ("kv", {}, False),
        ("draft", {}, True),
        ("draft_swa", {}, True),
        # Layers of the draft model lie behind those of the model in one pool.
        ("kv", {"target_layer_num": 1}, True),
        ("kv", {"target_layer_num": 2}, False),
    ],
)
def test_pages_with_kv_of_a_draft_model_depend_on_its_weights(
    name: str, pool: dict[str, Any], apart: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(monkeypatch, speculative_draft_model_path=str(tmp_path))
    found = set()
    for value in (b"\0", b"\1"):
        (tmp_path / "model.safetensors").write_bytes(value * 4096)
        found.add(layout(name, **pool))
    assert len(found) == 1 + apart


def test_parts_of_a_page_are_those_of_another_tensor_parallelism_and_whole_pages_are_not() -> None:
    def layouts(tp: int, split: int, *, copied: bool) -> bytes:
        config = SimpleNamespace(**{**vars(CONFIG), "tp_size": tp, "tp_lcm_size": 2})
        pool = SimpleNamespace(layer_num=2, head_num=2 * split)
        return _identity.layout_of(config, "kv", pool, [64, 64] * split, split, copied=copied)

    assert layouts(1, 2, copied=False) == layouts(2, 1, copied=False)
    assert layouts(1, 2, copied=True) != layouts(2, 1, copied=True)


def test_a_later_incarnation_of_an_engine_has_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    # With the arguments that a restart has, too.
    for nodes in (1, 2):
        serve(monkeypatch, random_seed=None, port=30000, nccl_port=None, dist_init_addr="node0:5000", nnodes=nodes)
        first = _identity.incarnation()
        assert first == _identity.incarnation()
        with monkeypatch.context() as later:
            later.setattr(_identity.os, "getppid", os.getpid)
            assert _identity.incarnation() != first
    # Ray starts the ranks of all engines.
    serve(monkeypatch, port=30000, use_ray=True)
    ours = _identity.incarnation()
    monkeypatch.setattr(_identity.os, "getpid", os.getppid)
    assert _identity.incarnation() != ours


def test_an_engine_whose_parent_can_not_be_seen_has_a_name_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, port=30000)
    monkeypatch.setattr(_identity.os, "getppid", lambda: 0)
    assert _identity.incarnation() != _identity.incarnation()


def test_a_model_that_is_a_file_is_named_by_samples_of_it(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    found = set()
    for value in (b"\0", b"\1"):
        file.write_bytes(value * 4096)
        found.add(model(file))
    assert len(found) == 2
    assert str(tmp_path / "none") in model(tmp_path / "none")


def test_the_setting_model_names_the_weights_alone(tmp_path: Path) -> None:
    assert model(tmp_path, "llama@3") == model(tmp_path / "other", "llama@3") != model(tmp_path, "llama@4")


def test_what_only_vllm_reads_is_no_setting_here() -> None:
    with pytest.raises(ValueError, match="kvferry's store has no setting 'spec_name' in it; it has adopt_empty"):
        StoreSettings.of({"disk": "/kv", "disk_gib": 1, "spec_name": "x"}, "it", ["interface_v1"])


def test_the_page_names_every_setting() -> None:
    page = (ROOT / "docs/sglang.md").read_text()
    with pytest.raises(ValueError, match="it has ") as error:
        StoreSettings.of({"unknown": 1}, "it")
    settings = re.sub(".* it has ", "", str(error.value)).split(", ")
    assert len(settings) == 16
    assert not [setting for setting in settings if f"`{setting}`" not in page]
