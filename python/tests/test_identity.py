"""What names KV: each field alone gives another name, in the store and in a handoff."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import kvferry
import pytest
from kvferry._engine import identity
from kvferry._engine.identity import Identity, PromptIdentity
from kvferry._engine.identity import adapters as _adapters
from kvferry._engine.identity import sglang as sglang_identity
from kvferry._engine.identity import trtllm as trtllm_identity
from kvferry._engine.identity import vllm as vllm_identity
from kvferry._engine.identity import weights as _weights
from kvferry._engine.identity.adapters import Adapters
from kvferry._engine.identity.core import core_of_callers
from kvferry.connector import prompt_id
from vllm_stand_in import EngineCore


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder right in that of temporary files. pytest's own is in a folder of all its runs: one that begins or ends
    meanwhile changes it, which counts for the files below.
    """
    with tempfile.TemporaryDirectory(prefix="kvferry-") as made:
        yield Path(made)


IDENTITY = Identity(
    model="m",
    revision="r",
    weights="w",
    quantization="q",
    dtype="d",
    loading="l",
    rope="o",
    overrides="v",
    cache="c",
    platform="p",
    draft="s",
    adapters="a",
    media="i",
    settings="n",
)
PROMPT = PromptIdentity(adapter=("lora", "w"), media=(("image", 3),), embeddings="e", tenant="t", version="v")


@pytest.mark.parametrize("name", [it.name for it in dataclasses.fields(Identity)])
@pytest.mark.parametrize("other", ["x", None, ""])
def test_each_field_of_an_engine_alone_changes_the_stores_name_and_a_property_that_both_give(
    name: str, other: str | None
) -> None:
    changed = dataclasses.replace(IDENTITY, **{name: other})  # type: ignore[arg-type]
    assert changed.text() != IDENTITY.text()
    differ = {key for key, value in IDENTITY.properties().items() if changed.properties()[key] != value}
    assert differ == {name}


def test_properties_keep_the_bounds_of_a_handshake() -> None:
    long = dataclasses.replace(IDENTITY, overrides="x" * 5000)
    longer = dataclasses.replace(IDENTITY, overrides="x" * 5001)
    assert max(map(len, long.properties().values())) <= 1024
    assert long.text() != longer.text()
    assert len(dataclasses.fields(Identity)) <= 16


@pytest.mark.parametrize(
    "change",
    [
        {"adapter": None},
        {"adapter": ("other", "w")},
        {"adapter": ("lora", "x")},
        {"media": ()},
        {"media": (("other", 3),)},
        {"media": (("image", 4),)},
        {"media": (("image", 3), ("image", 9))},
        {"embeddings": "x"},
        {"embeddings": None},
        {"tenant": "x"},
        {"tenant": None},
        {"version": "x"},
        {"version": None},
    ],
)
def test_each_field_of_a_prompt_alone_changes_its_identity(change: dict[str, Any]) -> None:
    changed = dataclasses.replace(PROMPT, **change)
    assert prompt_id([1, 2], changed.extra()) != prompt_id([1, 2], PROMPT.extra())


def folder(at: Path, weights: bytes = b"one", configuration: str = "{}") -> Path:
    at.mkdir(parents=True, exist_ok=True)
    (at / "model.safetensors").write_bytes(weights * 1000)
    (at / "config.json").write_text(configuration)
    return at


def engine(path: Path | str) -> Any:
    """The parts of vLLM's configuration that are read."""
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 4096, "factor": 32.0}
    text = SimpleNamespace(rope_parameters=rope, max_position_embeddings=131072)
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(path),
            revision=None,
            quantization=None,
            dtype="torch.bfloat16",
            code_revision=None,
            model_impl="auto",
            hf_overrides={},
            hf_config_path=None,
            hf_text_config=text,
            max_model_len=4096,
            multimodal_config=None,
        ),
        load_config=SimpleNamespace(load_format="auto", model_loader_extra_config={}, download_dir=None),
        cache_config=SimpleNamespace(
            cache_dtype="auto", mamba_cache_dtype="auto", mamba_ssm_cache_dtype="auto", enable_prefix_caching=True
        ),
        speculative_config=None,
        kv_transfer_config=SimpleNamespace(engine_id="engine"),
    )


def _set(part: str, name: str, value: Any) -> Callable[[Any], None]:
    return lambda config: setattr(getattr(config, part), name, value)


def _theta(config: Any) -> None:
    config.model_config.hf_text_config.rope_parameters["rope_theta"] = 5.0


def _draft(config: Any) -> None:
    config.speculative_config = SimpleNamespace(draft_model_config=SimpleNamespace(model="drafter"))


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("model", _set("model_config", "model", "another")),
        ("quantization", _set("model_config", "quantization", "fp8")),
        ("dtype", _set("model_config", "dtype", "torch.float16")),
        ("loading", _set("load_config", "load_format", "dummy")),
        ("loading", _set("load_config", "model_loader_extra_config", {"qlora_adapter_name_or_path": "x"})),
        ("loading", _set("model_config", "code_revision", "abc")),
        ("loading", _set("model_config", "model_impl", "transformers")),
        ("rope", _theta),
        ("rope", _set("model_config", "max_model_len", 131072)),
        ("overrides", _set("model_config", "hf_overrides", {"rope_parameters": {"factor": 2}})),
        ("overrides", _set("model_config", "hf_overrides", lambda config: config)),
        ("cache", _set("cache_config", "cache_dtype", "fp8_e5m2")),
        ("cache", _set("cache_config", "mamba_cache_dtype", "float32")),
        ("cache", _set("cache_config", "calculate_kv_scales", True)),
        ("draft", _draft),
    ],
)
@pytest.mark.parametrize("named", [None, "named"])
def test_each_setting_of_vllm_that_changes_kv_is_in_its_field(
    tmp_path: Path, field: str, change: Callable[[Any], None], named: str | None
) -> None:
    before, after = engine(folder(tmp_path / "model")), engine(tmp_path / "model")
    change(after)
    old, new = (vllm_identity.of_vllm(config, named).properties() for config in (before, after))
    differ = {name for name in old if old[name] != new[name]}
    # The operator's name stands for the model's.
    expected = set() if named and field == "model" else {field, "weights"} if field == "model" else {field}
    assert differ == expected


class Rocm:
    """Modules of PyTorch and of engines, as on a host with processors of AMD."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, is_fnuz: bool, hip: str | None = "6.3") -> None:
        platform = SimpleNamespace(is_fp8_fnuz=lambda: is_fnuz)
        kind = "torch.float8_e4m3fnuz" if is_fnuz else "torch.float8_e4m3fn"
        for name, found in (
            ("torch", {"version": SimpleNamespace(hip=hip)}),
            ("vllm.platforms", {"current_platform": platform}),
            ("sglang.srt.mem_cache.kv_cache_dtype", {"fp8_dtype": kind}),
        ):
            for end in [at for at, letter in enumerate(name) if letter == "."]:
                if name[:end] not in sys.modules:
                    monkeypatch.setitem(sys.modules, name[:end], ModuleType(name[:end]))
            made = ModuleType(name)
            vars(made).update(found)
            monkeypatch.setitem(sys.modules, name, made)


def test_what_fp8_means_on_a_platform_is_in_the_names_of_vllm_and_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    def names() -> list[identity.Identity]:
        config = SimpleNamespace(model_name="m")
        return [vllm_identity.of_vllm(engine(Path("no/where")), "m"), sglang_identity.of_sglang(config, None, "m")]

    plain = names()
    with monkeypatch.context() as patch:
        # PyTorch for NVIDIA's processors.
        Rocm(patch, is_fnuz=False, hip=None)
        assert names() == plain
    found = [plain]
    for is_fnuz in (False, True):
        with monkeypatch.context() as patch:
            Rocm(patch, is_fnuz=is_fnuz)
            found.append(names())
    for of_engine in zip(*found, strict=True):
        assert len({it.text() for it in of_engine}) == 3
        old, *others = (it.properties() for it in of_engine)
        assert all({name for name in old if old[name] != new[name]} == {"platform"} for new in others)


def multimodal(path: Path, **changes: Any) -> Any:
    """An engine of a multimodal model."""
    config = engine(path)
    media = {
        "language_model_only": False,
        "mm_processor_cache_gb": 4,
        "mm_processor_kwargs": None,
        "mm_device_do_normalize": True,
        "mm_encoder_attn_dtype": None,
        "mm_encoder_fp8_scale_path": None,
        "video_pruning_rate": None,
        "video_pruning_method": "evs",
    }
    config.model_config.multimodal_config = SimpleNamespace(**{**media, **changes})
    return config


@pytest.mark.parametrize(
    "changes",
    [
        {"mm_processor_kwargs": {"do_normalize": False}},
        {"mm_processor_kwargs": {"images_kwargs": {"resample": 2}}},
        {"mm_device_do_normalize": False},
        {"video_pruning_rate": 0.5},
        {"video_pruning_rate": 0.5, "video_pruning_method": "vidcom2"},
        {"video_pruning_rate": 0.4},
        {"mm_encoder_attn_dtype": "fp8"},
        {"mm_encoder_attn_dtype": "fp8", "mm_encoder_fp8_scale_path": "one"},
        {"mm_encoder_attn_dtype": "fp8", "mm_encoder_fp8_scale_path": "other"},
    ],
)
@pytest.mark.parametrize("named", [None, "named"])
def test_how_an_engine_prepares_images_is_in_its_names(
    tmp_path: Path, changes: dict[str, Any], named: str | None
) -> None:
    path = folder(tmp_path / "model")
    scales = changes.get("mm_encoder_fp8_scale_path")
    if scales:
        (tmp_path / scales).write_text(scales)
        changes = {**changes, "mm_encoder_fp8_scale_path": str(tmp_path / scales)}
    names = [vllm_identity.of_vllm(multimodal(path, **it), named) for it in ({}, changes)]
    old, new = (it.properties() for it in names)
    assert {name for name in old if old[name] != new[name]} == {"media"}
    others = [{"video_pruning_rate": 0.5}, {"mm_encoder_attn_dtype": "fp8"}, {"video_pruning_rate": 0.3}]
    found = {vllm_identity.of_vllm(multimodal(path, **it), named).media for it in others if it != changes}
    assert names[1].media not in found


def test_a_default_that_is_given_is_no_other_way_to_prepare_images() -> None:
    given = {"mm_processor_kwargs": {}, "video_pruning_rate": 0.0, "video_pruning_method": "vidcom2"}
    plain, with_defaults = multimodal(Path("no/where")), multimodal(Path("no/where"), **given)
    assert vllm_identity.of_vllm(plain, "named") == vllm_identity.of_vllm(with_defaults, "named")


@pytest.mark.parametrize(
    "file", ["preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"]
)
def test_another_configuration_of_an_image_processor_is_another_name_for_multimodal_models_alone(
    tmp_path: Path, file: str
) -> None:
    path = folder(tmp_path / "model")
    names, plain = set(), set()
    for content in (None, '{"do_normalize": true}', '{"do_normalize": false}'):
        if content is not None:
            (path / file).write_text(content)
        names.add(vllm_identity.of_vllm(multimodal(path), None).text())
        plain.add(vllm_identity.of_vllm(engine(path), None).text())
        plain.add(vllm_identity.of_vllm(multimodal(path, language_model_only=True), None).text())
    assert (len(names), len(plain)) == (3, 1)


def test_the_stores_names_without_images_and_unusual_settings_are_those_of_before() -> None:
    later = {"media", "platform", "settings"}
    plain = dataclasses.replace(IDENTITY, **dict.fromkeys(later))
    assert not later & set(json.loads(plain.text()))
    assert {plain.properties()[it] for it in later} == {"-"}


def test_drafts_without_weights_of_their_own_are_no_other_engine(tmp_path: Path) -> None:
    path = folder(tmp_path / "model")
    drafts = engine(path)
    drafts.speculative_config = SimpleNamespace(draft_model_config=drafts.model_config)
    assert vllm_identity.of_vllm(drafts, None) == vllm_identity.of_vllm(engine(path), None)


def test_a_prompts_length_within_one_branch_of_longrope_is_no_other_engine(tmp_path: Path) -> None:
    path = folder(tmp_path / "model")
    short, longer = engine(path), engine(path)
    longer.model_config.max_model_len = 2048
    assert vllm_identity.of_vllm(short, None) == vllm_identity.of_vllm(longer, None)


def test_new_weights_under_the_same_path_are_another_model(tmp_path: Path) -> None:
    path = folder(tmp_path / "prod")
    first = vllm_identity.of_vllm(engine(path), None)
    assert vllm_identity.of_vllm(engine(path), None) == first
    folder(path, b"two")
    assert vllm_identity.of_vllm(engine(path), None).text() != first.text()
    folder(path, b"one", '{"rope_theta": 2}')
    assert vllm_identity.of_vllm(engine(path), None).text() != first.text()


def tensors(at: Path, count: int = 200, each: int = 64 << 10, changed: int | None = None) -> Path:
    """A model of many tensors, of which one has other bytes."""
    names = [f"layers.{it}.weight" for it in range(count)]
    places = {it: [at * each, (at + 1) * each] for at, it in enumerate(names)}
    header = {it: {"dtype": "U8", "shape": [each], "data_offsets": place} for it, place in places.items()}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    chance = random.Random(1)
    data = [chance.randbytes(each) for _ in names]
    if changed is not None:
        data[changed] = chance.randbytes(each)
    at.mkdir(parents=True, exist_ok=True)
    (at / "config.json").write_text("{}")
    (at / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data))
    return at


def weights(path: Path) -> str | None:
    return vllm_identity.of_vllm(engine(path), None).weights


@pytest.mark.parametrize("changed", [0, 1, 77, 198, 199])
def test_a_model_of_which_one_tensor_has_changed_is_another(tmp_path: Path, changed: int) -> None:
    first = weights(tensors(tmp_path / "model"))
    assert weights(tensors(tmp_path / "model")) == first
    assert weights(tensors(tmp_path / "model", changed=changed)) != first


def test_a_part_of_a_large_tensor_is_seen(tmp_path: Path) -> None:
    each = 40 << 20
    path = tensors(tmp_path / "model", 1, each) / "model.safetensors"
    first = weights(path.parent)
    for begin in (0, 9 << 20, each - (21 << 20)):
        with open(path, "r+b") as file:
            file.seek(path.stat().st_size - each + begin)
            before = file.read(21 << 20)
            file.seek(path.stat().st_size - each + begin)
            file.write(bytes(len(before)))
            file.flush()
            assert weights(path.parent) != first, begin
            file.seek(path.stat().st_size - each + begin)
            file.write(before)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{",
        b"[]",
        b'{"a":1}',
        b'{"a":{"data_offsets":[0,99999999]}}',
        b'{"a":{"data_offsets":["0",5]}}',
        b'{"a":{"data_offsets":[0.0,5.0]}}',
        b'{"a":{"data_offsets":[0,1,2]}}',
        b"[" * 100_000,
        b"\xff\xff",
    ],
)
def test_a_file_whose_list_of_tensors_is_wrong_is_sampled_like_others(tmp_path: Path, header: bytes) -> None:
    def write(fill: bytes) -> str | None:
        data = len(header).to_bytes(8, "little") + header + fill * 100_000
        (tmp_path / "model.safetensors").write_bytes(data)
        return weights(tmp_path)

    assert write(b"a") == write(b"a") != write(b"b")
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 8)
    assert weights(tmp_path) is not None


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    first = weights(folder(tmp_path / "model"))
    os.mkfifo(tmp_path / "model" / "more.bin")
    os.mkfifo(tmp_path / "model" / "adapter_config.json")
    assert weights(tmp_path / "model") == first


def test_a_configuration_of_any_length_is_read_within_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_weights, "_CONFIGURATION_MAX", 100)
    monkeypatch.setattr(_weights, "_FILE_PIECES", 2)
    monkeypatch.setattr(_weights, "_FILE_PIECE_BYTES", 10)
    read: list[int] = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda *asked: read.append(asked[1]) or pread(*asked))
    weights(folder(tmp_path / "model", configuration="{}" * 1000))
    assert max(read) <= 100


def test_python_files_of_a_model_count_where_they_are_run(tmp_path: Path) -> None:
    path = folder(tmp_path / "model")

    def of(code: str, *, trusted: bool) -> str | None:
        (path / "modeling.py").write_text(code)
        config = engine(path)
        config.model_config.trust_remote_code = trusted
        return vllm_identity.of_vllm(config, None).weights

    assert of("1", trusted=True) != of("2", trusted=True)
    assert of("1", trusted=False) == of("2", trusted=False)


def test_weights_in_folders_of_a_models_folder_count_if_it_has_none_itself(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    tensors(path / "transformer")
    first = weights(path)
    tensors(path / "transformer", changed=3)
    assert weights(path) != first
    folder(path)
    first = weights(path)
    tensors(path / "transformer", changed=4)
    assert weights(path) == first


def streamed(path: Path) -> Any:
    """An engine whose weights vLLM streams from an object store: only configurations are in the folder."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text("{}")
    config = engine(path)
    config.model_config.model_weights = "s3://bucket/model"
    return config


def test_weights_that_are_streamed_are_named_by_their_url_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = vllm_identity.of_vllm(streamed(tmp_path / "one"), None)
    assert one.model == "s3://bucket/model"
    assert "the weights of s3://bucket/model are in no folder" in caplog.text
    # The folder is another on each host.
    assert vllm_identity.of_vllm(streamed(tmp_path / "two"), None) == one
    (tmp_path / "two/config.json").write_text('{"rope_theta": 2}')
    second = streamed(tmp_path / "three")
    (tmp_path / "three/config.json").write_text('{"rope_theta": 2}')
    assert vllm_identity.of_vllm(second, None).weights != one.weights


def test_a_folder_without_weights_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = folder(tmp_path / "model")
    vllm_identity.of_vllm(engine(path), None)
    assert caplog.text == ""
    (path / "model.safetensors").unlink()
    vllm_identity.of_vllm(engine(path), None)
    assert "set model to another name when they change" in caplog.text


def test_a_store_needs_a_name_for_weights_that_are_not_seen(tmp_path: Path) -> None:
    def check(config: Any, named: str | None = None) -> None:
        vllm_identity.check_weights_are_named(config, named, "KVFerryTier")

    check(engine(folder(tmp_path / "model")))
    no_commit = streamed(tmp_path / "snapshots" / "latest")
    for config in (streamed(tmp_path / "streamed"), no_commit, engine(tmp_path / "streamed"), engine("no/where")):
        with pytest.raises(ValueError, match=r"KVFerryTier: the weights of .* set model to a name"):
            check(config)
        check(config, "named")
        # Its weights come from a seed.
        config.load_config.load_format = "dummy"
        check(config)
    loaded = engine(folder(tmp_path / "model"))
    loaded.load_config.load_format = "tensorizer"
    loaded.load_config.model_loader_extra_config = {"tensorizer_config": {"tensorizer_uri": "s3://bucket/a.tensors"}}
    with pytest.raises(ValueError, match="set model"):
        check(loaded)
    (tmp_path / "a.tensors").write_bytes(b"a")
    loaded.load_config.model_loader_extra_config = {"tensorizer_uri": str(tmp_path / "a.tensors")}
    check(loaded)
    first = vllm_identity.of_vllm(loaded, None)
    (tmp_path / "a.tensors").write_bytes(b"b")
    assert vllm_identity.of_vllm(loaded, None).weights != first.weights


@pytest.mark.parametrize("of", ["SGLang", "TensorRT-LLM"])
def test_stores_of_other_engines_need_a_name_for_weights_that_are_not_seen(tmp_path: Path, of: str) -> None:
    def check(path: Path | str, named: str | None = None, load_format: str = "auto") -> None:
        arguments = SimpleNamespace(model=str(path), model_path=str(path), load_format=load_format)
        if of == "SGLang":
            sglang_identity.check_sglang_weights_are_named(SimpleNamespace(model_name="m"), arguments, named, "it")
        else:
            trtllm_identity.check_trtllm_weights_are_named(arguments, named, "it")

    check(folder(tmp_path / "model"))
    for path in (tmp_path / "empty", "s3://bucket/model", "a/b"):
        with pytest.raises(ValueError, match=r"it: the weights of .* set model to a name"):
            check(path)
        check(path, named="named")
        check(path, load_format="dummy")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/config.json").write_text("{}")
    with pytest.raises(ValueError, match="set model"):
        check(tmp_path / "empty")


COMMIT = "0123abcdef" * 4


def test_a_name_of_the_hub_is_named_by_its_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder(tmp_path / "models--a--b" / "snapshots" / COMMIT)
    hub = SimpleNamespace(try_to_load_from_cache=lambda *_, **__: str(path / "config.json"))
    monkeypatch.setitem(identity.sys.modules, "huggingface_hub", hub)
    found = vllm_identity.of_vllm(engine("a/b"), None)
    assert found.revision == COMMIT
    assert found.weights is not None


def test_weights_that_can_not_be_sampled_are_named_by_revision_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = vllm_identity.of_vllm(engine("no/where"), None)
    assert (found.weights, found.revision) == (None, None)
    assert "set model to another name when they change" in caplog.text


@pytest.fixture(autouse=True)
def _schedulers_wait_for_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is: an adapter that was not looked at in time has a name that equals nothing."""
    for name in ("_WAIT_S", "_WAIT_BURST_S", "_ANSWERS_S"):
        monkeypatch.setattr(_adapters, name, 60.0)


def request(**given: Any) -> Any:
    parts = {"lora_request": None, "mm_features": None, "prompt_embeds": None, "cache_salt": None}
    return SimpleNamespace(**{**parts, **given})


def extra(adapters: Adapters | None = None, **given: Any) -> list[str]:
    return vllm_identity.of_vllm_prompt(request(**given), adapters or Adapters(), None).extra()


def test_a_prompt_of_tokens_alone_has_nothing_else_in_its_name() -> None:
    assert extra() == []


def lora(path: Path | str, number: int = 1, *, load_inplace: bool = False) -> Any:
    """vLLM's request for an adapter."""
    return SimpleNamespace(lora_name="l", lora_int_id=number, lora_path=str(path), load_inplace=load_inplace)


def soon(adapters: Adapters) -> None:
    """As if a second had passed since the adapters' files were looked at."""
    for it in adapters._known.values():
        assert it.look is None or it.look.ended.wait(60)
        it.look, it.now_at = None, -100.0


def test_an_adapter_is_named_by_its_weights_whatever_its_path(tmp_path: Path) -> None:
    path = folder(tmp_path / "lora")
    first = extra(lora_request=lora(path))
    adapters = Adapters()
    assert extra(adapters, lora_request=lora(path)) == extra(adapters, lora_request=lora(path)) == first
    assert extra(adapters, lora_request=lora(folder(tmp_path / "there"), 2)) == first
    folder(path, b"two")
    assert extra(lora_request=lora(path)) != first


def test_an_adapter_is_named_by_what_the_engine_has_loaded_not_by_what_its_files_became(tmp_path: Path) -> None:
    path = folder(tmp_path / "lora", b"one")
    adapters = Adapters()
    old = extra(adapters, lora_request=lora(path))
    folder(path, b"two")
    new = extra(lora_request=lora(path))
    soon(adapters)
    # The engine has the old ones, or has read the new ones again: it does not say which.
    unknown = [extra(adapters, lora_request=lora(path)) for _ in range(2)]
    assert len({tuple(it) for it in (old, new, *unknown)}) == 4
    assert extra(adapters, lora_request=lora(path, load_inplace=True)) == new
    assert extra(adapters, lora_request=lora(path)) == new
    # By another number the engine loads it anew.
    assert extra(adapters, lora_request=lora(path, 2)) == new


def test_files_of_an_adapter_that_become_those_of_before_again_do_not_bring_its_name_back(tmp_path: Path) -> None:
    current, first, second = tmp_path / "current", folder(tmp_path / "1", b"one"), folder(tmp_path / "2", b"two")
    current.symlink_to(first)
    adapters, of = Adapters(), lora(current)
    old = adapters.weights(of)
    assert adapters.still(of, old)

    def switch(to: Path) -> str:
        current.unlink()
        current.symlink_to(to)
        soon(adapters)
        return adapters.weights(of)

    # The engine has room for one adapter, so it reads the files whenever another one was used.
    assert switch(second) != old
    again = switch(first)
    assert again != old and not adapters.still(of, old) and not adapters.still(of, again)
    assert adapters.may_be_mixed(of), "the engine's cache may have blocks of the second weights"
    assert adapters.files(of, old) == ()
    adapters.cache_was_emptied()
    anew = lora(current, 2)
    assert adapters.weights(anew) == old and adapters.still(anew, old) and not adapters.may_be_mixed(anew)


def test_a_reload_in_place_without_new_weights_is_no_other_adapter(tmp_path: Path) -> None:
    path = folder(tmp_path / "lora")
    adapters = Adapters()
    first = extra(adapters, lora_request=lora(path))
    assert extra(adapters, lora_request=lora(path, load_inplace=True)) == first
    assert extra(adapters, lora_request=lora(folder(tmp_path / "moved"), load_inplace=True)) == first


def test_the_weights_of_an_adapter_are_those_at_its_first_request_even_without_a_handoff(tmp_path: Path) -> None:
    path = folder(tmp_path / "lora", b"one")
    adapters = Adapters()
    adapters.saw(lora(path))
    assert extra(adapters, lora_request=lora(path)) == extra(lora_request=lora(path))
    folder(path, b"two")
    adapters.saw(lora(path))
    soon(adapters)
    assert extra(adapters, lora_request=lora(path)) != extra(lora_request=lora(path))


def test_an_adapter_on_a_file_system_that_hangs_equals_nothing_and_is_waited_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, answers = folder(tmp_path / "lora"), threading.Event()
    state_of = _adapters._state_of

    def hangs(*asked: Any) -> Any:
        assert answers.wait(60)
        return state_of(*asked)

    monkeypatch.setattr(_adapters, "_state_of", hangs)
    monkeypatch.setattr(_adapters, "_WAIT_S", 0.01)
    adapters, before = Adapters(), looking()
    names = {tuple(extra(adapters, lora_request=lora(path))) for _ in range(3)}
    assert len(names) == 3
    assert len(looking() - before) == 1
    answers.set()
    assert adapters._known[1].look.ended.wait(60)
    monkeypatch.setattr(_adapters, "_state_of", state_of)
    monkeypatch.setattr(_adapters, "_WAIT_S", 60.0)
    assert extra(adapters, lora_request=lora(path)) == extra(lora_request=lora(path))


_LIMITS = {name: getattr(_adapters, name) for name in ("_WAIT_S", "_WAIT_BURST_S", "_ANSWERS_S")}


def _as_in_production(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, limit in _LIMITS.items():
        monkeypatch.setattr(_adapters, name, limit)


class Clock:
    """Virtual time, in which each look takes a while."""

    def __init__(self, looks_take: float) -> None:
        self.now, self._looks_take = 0.0, looks_take
        self._waiting: list[tuple[float, Callable[[], None]]] = []

    def monotonic(self) -> float:
        return self.now

    def until(self, end: float, is_over: Callable[[], bool] = lambda: False) -> None:
        while not is_over() and self._waiting and self._waiting[0][0] <= end:
            self.now, run = self._waiting.pop(0)
            run()
        self.now = self.now if is_over() else max(self.now, end)

    def thread(self, target: Callable[[], None], **_: Any) -> Any:
        return SimpleNamespace(start=lambda: self._waiting.append((self.now + self._looks_take, target)))

    def event(self) -> Any:
        class Event(threading.Event):
            def wait(_, most: float | None = None) -> bool:  # noqa: N805 - `self` is the clock
                assert most is not None
                self.until(self.now + most, _.is_set)
                return _.is_set()

        return Event()


@pytest.mark.parametrize("looks_take", [0.01, 0.9, 1.8])
def test_a_slow_file_system_holds_up_a_scheduler_for_an_adapters_first_look_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks_take: float
) -> None:
    path = folder(tmp_path / "lora")
    right = extra(lora_request=lora(path))
    _as_in_production(monkeypatch)
    clock, waited = Clock(looks_take), 0.0
    monkeypatch.setattr(_adapters, "time", clock)
    threads = SimpleNamespace(Thread=clock.thread, Event=clock.event, Lock=threading.Lock)
    monkeypatch.setattr(_adapters, "threading", threads)
    adapters = Adapters()
    while clock.now < 30:
        before = clock.now
        found = extra(adapters, lora_request=lora(path))
        waited += clock.now - before
        assert found == right or before < looks_take
        clock.until(clock.now + 0.01)
    assert waited <= min(looks_take, 1.0) + 0.001


def test_a_scheduler_waits_for_file_systems_a_tenth_of_its_time_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _as_in_production(monkeypatch)
    clock, waited = Clock(0.5), 0.0
    monkeypatch.setattr(_adapters, "time", clock)
    threads = SimpleNamespace(Thread=clock.thread, Event=clock.event, Lock=threading.Lock)
    monkeypatch.setattr(_adapters, "threading", threads)
    adapters, path = Adapters(), folder(tmp_path / "lora")
    for number in range(2000):
        before = clock.now
        # Each is new, or is read in each step.
        of = lora(path, 1 + number % 1500, load_inplace=bool(number % 2))
        extra(adapters, lora_request=of)
        waited += clock.now - before
        clock.until(clock.now + 0.05)
    assert waited <= 2 + clock.now / 10


def test_no_more_threads_wait_for_adapters_on_a_file_system_that_hangs_however_many_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(_adapters, "_state_of", lambda *_: answers.wait(60))
    monkeypatch.setattr(_adapters, "_WAIT_S", 0.0)
    before = threading.active_count()
    adapters = Adapters()
    for number in range(1, 2100):
        adapters.weights(lora(folder(tmp_path / "lora") if number == 1 else tmp_path / "lora", number))
    assert threading.active_count() <= before + 16
    answers.set()
    for look in adapters._looks:
        assert look.ended.wait(60)


def test_an_adapter_is_looked_at_again_when_there_were_no_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder(tmp_path / "lora")

    def fail(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    adapters = Adapters()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        assert extra(adapters, lora_request=lora(path)) != extra(adapters, lora_request=lora(path))
    assert extra(adapters, lora_request=lora(path)) == extra(lora_request=lora(path))


def test_a_look_at_an_adapters_old_files_does_not_name_the_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = folder(tmp_path / "old", b"one"), folder(tmp_path / "new", b"two")
    asked, sample_of = threading.Event(), _adapters.sample_of
    answers = {path: threading.Event() for path in (old, new)}

    def hangs(path: Any) -> Any:
        asked.set()
        assert answers[path].wait(60)
        return sample_of(path)

    monkeypatch.setattr(_adapters, "_WAIT_S", 0.01)
    monkeypatch.setattr(_adapters, "sample_of", hangs)
    adapters = Adapters()
    adapters.saw(lora(old))
    assert asked.wait(60)
    first = adapters._known[1].look
    names = {adapters.weights(lora(new, load_inplace=True)) for _ in range(2)}
    assert len(names) == 2
    second = adapters._known[1].look
    for path, look in ((new, second), (old, first)):
        answers[path].set()
        assert look is not None and look.ended.wait(60)
    monkeypatch.setattr(_adapters, "sample_of", sample_of)
    monkeypatch.setattr(_adapters, "_WAIT_S", 60.0)
    assert extra(adapters, lora_request=lora(new)) == extra(lora_request=lora(new)) != extra(lora_request=lora(old))


def test_an_adapter_on_a_file_system_that_hangs_keeps_no_process_from_ending(tmp_path: Path) -> None:
    """The system calls of its files are never done."""
    (tmp_path / "adapter_model.bin").write_bytes(bytes(100))
    code = f"""
import os, threading
from types import SimpleNamespace
from kvferry._engine.identity.adapters import Adapters
reads = threading.Event()
def pread(*_):
    reads.set()
    threading.Event().wait()
os.pread = pread
lora = SimpleNamespace(lora_name="l", lora_int_id=1, lora_path={str(tmp_path)!r}, load_inplace=False)
adapters = Adapters()
adapters.saw(lora)
assert reads.wait(60)
print("ends")
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert ran.stdout == "ends\n"


class Array:
    """Content as an array has it."""

    dtype, shape = "float32", (4,)

    def __init__(self, content: bytes) -> None:
        self._content = content

    def tobytes(self) -> bytes:
        return self._content


def feature(name: str, content: bytes | None) -> Any:
    data = None if content is None else {"pixel_values": SimpleNamespace(data=Array(content))}
    return SimpleNamespace(identifier=name, data=data, mm_position=SimpleNamespace(offset=2))


def test_images_that_vllm_names_by_a_counter_are_named_by_their_content() -> None:
    first = extra(mm_features=[feature("renderer0-mm-7-image-0", b"cat")])
    # Another engine has counted otherwise.
    assert extra(mm_features=[feature("renderer1-mm-90-image-0", b"cat")]) == first
    # The same number of another incarnation.
    assert extra(mm_features=[feature("renderer0-mm-7-image-0", b"dog")]) != first


def test_an_image_without_a_name_or_content_equals_nothing() -> None:
    counted = feature("renderer0-mm-7-image-0", None)
    assert extra(mm_features=[counted]) != extra(mm_features=[counted])
    tower = feature("adapter:renderer0-mm-7-image-0", b"cat")
    assert extra(mm_features=[tower]) != extra(mm_features=[feature("adapter:renderer0-mm-7-image-0", b"dog")])
    assert extra(mm_features=[tower]) == extra(mm_features=[feature("adapter:renderer1-mm-90-image-0", b"cat")])
    for digits in (64, 128):
        hashed = feature("a" * digits, None)
        assert extra(mm_features=[hashed]) == extra(mm_features=[hashed])
        assert extra(mm_features=[hashed]) != extra(mm_features=[feature("l:" + "a" * digits, None)])


@pytest.mark.parametrize("uuid", ["img1", "l:img1", "A" * 64, "a" * 63, "a" * 64 + "\n"])
def test_an_image_that_a_client_names_is_named_by_its_content(uuid: str) -> None:
    cat = extra(mm_features=[feature(uuid, b"cat")])
    assert cat == extra(mm_features=[feature(uuid, b"cat")]) == extra(mm_features=[feature("img2", b"cat")])
    assert cat != extra(mm_features=[feature(uuid, b"dog")])
    assert extra(mm_features=[feature(uuid, None)]) != extra(mm_features=[feature(uuid, None)])


def test_prompt_embeddings_are_named_by_their_bytes() -> None:
    first = extra(prompt_embeds=Array(b"one"))
    assert first == extra(prompt_embeds=Array(b"one"))
    assert first != extra(prompt_embeds=Array(b"two"))


def test_more_content_than_a_scheduler_has_time_to_hash_equals_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_identity, "_CONTENT_MAX", 100)
    long = Array(bytes(100))
    assert extra(prompt_embeds=long) != extra(prompt_embeds=long)
    assert extra(prompt_embeds=Array(bytes(10))) == extra(prompt_embeds=Array(bytes(10)))


def test_the_version_of_the_weights_is_that_of_the_engine_that_makes_the_connector() -> None:
    engine = EngineCore(lambda: [core_of_callers() for _ in range(2)])
    found, same = engine.made
    assert found is same
    assert found.version() is None
    named: list[str | None] = []
    found.on_named(lambda: named.append(found.version()))
    engine.set_weight_version("7")
    engine.set_weight_version("7")
    assert (named, found.times_named) == (["7", "7"], 2)
    del engine
    gc.collect()
    assert found.version() is None
    assert core_of_callers().version() is None


def test_images_named_by_a_counter_are_refused_where_blocks_outlive_the_process(tmp_path: Path) -> None:
    config = engine(tmp_path)
    config.model_config.multimodal_config = SimpleNamespace(mm_processor_cache_gb=0)
    vllm_identity.check_media_are_named(config, "KVFerryTier")
    config.cache_config.enable_prefix_caching = False
    with pytest.raises(ValueError, match=r"KVFerryTier.*no-enable-prefix-caching.*mm-processor-cache-gb 0"):
        vllm_identity.check_media_are_named(config, "KVFerryTier")
    config.model_config.multimodal_config.mm_processor_cache_gb = 4
    vllm_identity.check_media_are_named(config, "KVFerryTier")


def test_the_configuration_of_the_engine_is_found_where_a_part_of_it_is_given(tmp_path: Path) -> None:
    def tier() -> Any:
        return vllm_identity.vllm_config_of_callers()

    def connector(vllm_config: Any) -> Any:
        return tier()

    config = engine(tmp_path)
    assert connector(config) is config
    assert connector("something else") is None
    assert tier() is None


class Server:
    """A model server, as far as names of KV go: its KV is a function of the weights that it has loaded and of the tokens."""

    PROMPTS, BLOCKS, BLOCK = 3, 4, 4096

    def __init__(self, model: Path, directory: Path) -> None:
        self.loaded = hashlib.sha256((model / "model.safetensors").read_bytes()).digest()
        self.agent = kvferry.Agent("server", listen="127.0.0.1:0")
        self.store = kvferry.Store(self.agent, directory, 64 << 20)
        self.name = vllm_identity.of_vllm(engine(model), None).text()
        self.memory = bytearray(self.BLOCKS * self.BLOCK)
        self.region = self.agent.register(self.memory, "none")

    def kv(self, prompt: int) -> bytes:
        each = (hashlib.shake_256(self.loaded + bytes([prompt, block])) for block in range(self.BLOCKS))
        return b"".join(it.digest(self.BLOCK) for it in each)

    def serve(self, name: str | None = None) -> tuple[int, int]:
        """Blocks that were found in the store, and how many of them are not those of the server's own weights."""
        space = self.store.space(name or self.name)
        hits = wrong = 0
        for prompt in range(self.PROMPTS):
            hashes = [hashlib.sha256(bytes([prompt, block])).digest() for block in range(self.BLOCKS)]
            blocks = kvferry.Blocks(self.region, range(0, len(self.memory), self.BLOCK), self.BLOCK)
            found, own = space.get(hashes, blocks), self.kv(prompt)
            read = bytes(self.memory[: found * self.BLOCK])
            hits += found
            wrong += sum(
                read[at : at + self.BLOCK] != own[at : at + self.BLOCK] for at in range(0, len(read), self.BLOCK)
            )
            self.memory[:] = own
            space.put(hashes, blocks)
        return hits, wrong

    def stop(self) -> None:
        self.store.close()
        self.agent.shutdown()


def _replaced_by_rename(model: Path, weights: Path) -> None:
    shutil.copyfile(weights, model / "partial")
    (model / "partial").rename(model / "model.safetensors")


def _overwritten(model: Path, weights: Path) -> None:
    with open(model / "model.safetensors", "r+b") as file:
        file.write(weights.read_bytes())


def _overwritten_with_the_old_times(model: Path, weights: Path) -> None:
    status = (model / "model.safetensors").stat()
    _overwritten(model, weights)
    os.utime(model / "model.safetensors", ns=(status.st_atime_ns, status.st_mtime_ns))


def _linked(model: Path, weights: Path) -> None:
    (model / "link").symlink_to(weights)
    (model / "link").rename(model / "model.safetensors")


def test_two_servers_of_different_weights_under_one_path_restarted_in_turns_find_only_their_own_blocks(
    tmp_path: Path,
) -> None:
    """Fifty rounds. The weights have one shape, and one tensor of many differs."""
    sources = [tensors(tmp_path / name, 20, changed=changed) for name, changed in (("a", None), ("b", 13))]
    model, directory = tensors(tmp_path / "prod", 20), tmp_path / "kv"
    ways = [_replaced_by_rename, _overwritten, _overwritten_with_the_old_times, _linked]
    chance = random.Random(50)
    live: list[Server | None] = [None, None]
    hits = 0
    for number in range(50):
        at = number % 2
        before = live[at]
        if before is not None:
            before.stop()
        if (model / "model.safetensors").is_symlink():
            _replaced_by_rename(model, sources[at] / "model.safetensors")
        else:
            chance.choice(ways)(model, sources[at] / "model.safetensors")
        server = live[at] = Server(model, directory)
        for it in live:
            if it is not None:
                found, wrong = it.serve()
                assert wrong == 0, number
                hits += found
    everything = Server.PROMPTS * Server.BLOCKS
    # All but the first time of each of the two.
    assert hits == (2 * 50 - 1 - 2) * everything
    # A name that does not tell the weights apart would have been seen.
    assert server.serve("prod") == (0, 0)
    other = live[0]
    assert other is not None
    assert other.serve("prod") == (everything, everything)
    for it in (server, other):
        it.stop()


def looking() -> set[threading.Thread]:
    return {it for it in threading.enumerate() if it.name == "kvferry-adapter"}


def _rename_of_a_file(model: Path, other: Path) -> None:
    (other / "model.safetensors").rename(model / "model.safetensors")


def _rename_of_the_folder(model: Path, other: Path) -> None:
    model.rename(model.with_name("before"))
    other.rename(model)


def _old_times(model: Path, other: Path) -> None:
    _overwritten_with_the_old_times(model, other / "model.safetensors")


def _rename_of_a_folder_above(model: Path, other: Path) -> None:
    model.parent.rename(model.parent.with_name("before"))
    other.parent.rename(model.parent)
    # It hides the rename from those who compare the times of one folder.
    (model.parent / "log").touch()


# Trainers name folders so, too.
PLACES = ["prod/model", "snapshots/latest", f"snapshots/{COMMIT}", "models--a--b/snapshots/latest"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("change", [_rename_of_a_file, _rename_of_the_folder, _rename_of_a_folder_above, _old_times])
def test_weights_that_changed_since_the_process_began_name_nothing_that_another_engine_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path, Path], None], place: str
) -> None:
    """The engine has loaded what was there before: it may not be named by what is there now."""
    model = tensors(tmp_path / place, 20)
    other = tensors(tmp_path / "new" / model.name, 20, changed=13)
    began = _began_now(tmp_path)
    monkeypatch.setattr(identity, "process_began", lambda: began)
    before = weights(model)
    assert before == weights(model)
    change(model, other)
    restarted = engine(model)
    restarted.kv_transfer_config.engine_id = "another"
    late = [vllm_identity.of_vllm(it, None).weights for it in (engine(model), engine(model), restarted)]
    # The ranks of one engine have one name.
    assert late[0] == late[1] != late[2]
    began = _began_now(tmp_path)
    after = weights(model)
    assert after == vllm_identity.of_vllm(restarted, None).weights
    assert len({before, after, *late}) == 4


def test_a_link_that_leads_to_other_weights_since_the_process_began_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, changed in (("v1", None), ("v2", 13)):
        tensors(tmp_path / name / "model", 20, changed=changed)
    current = tmp_path / "current"
    current.symlink_to(tmp_path / "v1")
    began = _began_now(tmp_path)
    monkeypatch.setattr(identity, "process_began", lambda: began)
    before = weights(current / "model")
    (tmp_path / "link").symlink_to(tmp_path / "v2")
    (tmp_path / "link").rename(current)
    assert weights(current / "model") not in (before, weights(tmp_path / "v2" / "model"))


def _link_to_the_folder(tmp_path: Path) -> Path:
    (tmp_path / "link").symlink_to("v/model")
    return tmp_path / "link"


def _links_to_the_files(tmp_path: Path) -> Path:
    (tmp_path / "links").mkdir()
    for it in ("config.json", "model.safetensors"):
        (tmp_path / "links" / it).symlink_to(f"../v/../v/model/{it}")
    return tmp_path / "links"


@pytest.mark.parametrize("link", [_link_to_the_folder, _links_to_the_files])
def test_a_rename_of_a_folder_that_a_link_leads_through_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: Callable[[Path], Path]
) -> None:
    tensors(tmp_path / "v" / "model", 20)
    new = weights(tensors(tmp_path / "new" / "model", 20, changed=13))
    path = link(tmp_path)
    began = _began_now(tmp_path)
    monkeypatch.setattr(identity, "process_began", lambda: began)
    before = weights(path)
    (tmp_path / "v").rename(tmp_path / "old")
    (tmp_path / "new").rename(tmp_path / "v")
    assert weights(path) not in (before, new)


def test_the_warning_names_what_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = tensors(tmp_path / "data" / "models" / "a", 20)
    began = _began_now(tmp_path)
    monkeypatch.setattr(identity, "process_began", lambda: began)
    weights(model)
    assert not caplog.text
    # A log beside the models' folder, and another model in it: the times are those of a rename of that folder.
    (tmp_path / "data" / "log").mkdir()
    tensors(tmp_path / "data" / "models" / "b", 20)
    weights(model)
    assert f"({tmp_path / 'data' / 'models'}, or something beside it and something in it)" in caplog.text
    assert "set model" in caplog.text
    caplog.clear()
    (model / "config.json").touch()
    weights(model)
    assert f"({model / 'config.json'})" in caplog.text


def test_another_model_beside_one_is_no_change_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tensors(tmp_path / "models" / "a", 20)
    began = _began_now(tmp_path)
    monkeypatch.setattr(identity, "process_began", lambda: began)
    before = weights(model)
    tensors(tmp_path / "models" / "b", 20)
    (tmp_path / "models" / "b").rename(tmp_path / "models" / "c")
    assert weights(model) == before


def test_weights_keep_their_name_when_a_folder_on_the_way_to_them_is_renamed_between_two_starts(tmp_path: Path) -> None:
    model = tensors(tmp_path / "data" / "models" / "a", 20)
    other = tensors(tmp_path / "new" / "a", 20, changed=13)
    before, of_other = weights(model), weights(other)
    (tmp_path / "data").rename(tmp_path / "old")
    (tmp_path / "new").rename(tmp_path / "data")
    assert weights(tmp_path / "old" / "models" / "a") == before != of_other == weights(tmp_path / "data" / "a")


def test_a_mount_point_can_not_be_renamed_so_that_entries_in_it_and_beside_it_are_no_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert {"/", "/proc"} <= _weights._mount_points()
    data = tmp_path / "my data"
    model = tensors(data / "models" / "a", 20)
    began = _began_now(tmp_path)
    monkeypatch.setattr(identity, "process_began", lambda: began)
    mounts = tmp_path / "mounts"
    monkeypatch.setattr(_weights, "_MOUNTS", mounts)
    # The test's own folder, too: other processes make entries beside it.
    for mounted in (tmp_path, data):
        escaped = str(mounted).replace(" ", "\\040")
        with mounts.open("a") as file:
            file.write(f"36 35 98:0 / {escaped} rw,noatime shared:1 - ext4 /dev/sda rw\n")
    before = weights(model)
    # A folder beside the mount point, and one in it.
    (tmp_path / "log").mkdir()
    (data / "log").mkdir()
    assert weights(model) == before and not caplog.text
    # Below it, folders can be renamed as before.
    (data / "models").rename(data / "old")
    tensors(data / "models" / "a", 20, changed=13)
    assert weights(model) != before and "since this process began" in caplog.text
    mounts.unlink()
    assert _weights._mount_points() == set()


def _began_now(folder: Path) -> float:
    """A moment after all changes in a folder and before those that follow. A file's times lag behind the clock."""
    tick = folder / "tick"
    tick.touch()
    now = tick.stat().st_ctime
    while tick.stat().st_ctime <= now:
        tick.touch()
    began = tick.stat().st_ctime
    while tick.stat().st_ctime <= began:
        tick.touch()
    return began


def test_a_process_began_before_now_and_after_the_process_that_started_it() -> None:
    asked = time.time()
    code = "import time; from kvferry._engine import identity; print(identity.process_began(), time.time())"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    began, now = map(float, ran.stdout.split())
    # The kernel counts the ages of processes in hundredths of a second.
    assert asked - 0.02 <= began <= now


def test_the_page_has_a_row_for_each_field() -> None:
    page = (Path(__file__).parents[2] / "docs/storage.md").read_text()
    for of in (Identity, PromptIdentity):
        for it in dataclasses.fields(of):
            assert f"| `{it.name}` |" in page, it.name


def test_a_hash_of_plain_data_does_not_depend_on_the_order_of_its_mappings() -> None:
    assert identity.hash_of({"a": 1, "b": [2]}) == identity.hash_of({"b": [2], "a": 1})
    assert identity.hash_of({"a": 1}) != identity.hash_of({"a": 2})
    assert len(identity.hash_of(None)) == len(hashlib.sha256().hexdigest()) // 2
