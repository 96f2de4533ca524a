"""The names of KV are those of earlier releases, byte for byte: another name finds nothing of what a store has.

A name that is to change is changed here, with a line in the changelog.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import test_identity as of
import test_offload as offload
import test_sglang as pools
import test_vllm_layout as caches
import test_vllm_stores as stores
import vllm_stand_in
from kvferry._engine.identity import adapters as _adapters
from kvferry._engine.identity import sglang as sglang_identity
from kvferry._engine.identity import trtllm as trtllm_identity
from kvferry._engine.identity import vllm as vllm_identity
from kvferry.sglang import _identity as of_sglang
from kvferry.trtllm._keys import chain
from kvferry.trtllm._pages import Pages
from kvferry.vllm import _layout, _offload_layout
from trtllm_kit import args
from trtllm_reference import Cache, Shape

GOLDEN = Path(__file__).with_name("golden_names.json")


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    # Models are named by their paths.
    monkeypatch.chdir(tmp_path)
    for module in (_layout, _offload_layout):
        monkeypatch.setattr(module, "processor", lambda kernel=None: f"here {kernel}")
    for name in ("_WAIT_S", "_WAIT_BURST_S", "_ANSWERS_S"):
        monkeypatch.setattr(_adapters, name, 60.0)
    vllm_stand_in.install(monkeypatch)
    of.folder(Path("model"))
    of.folder(Path("draft"), b"two")
    of.folder(Path("lora"), b"three")
    return {**of_vllm(), **of_the_stores_of_vllm(), **of_the_storage_of_sglang(monkeypatch), **of_tensorrt_llm()}


def of_vllm() -> dict[str, Any]:
    config = of.multimodal(Path("model"), mm_processor_kwargs={"do_normalize": False}, video_pruning_rate=0.5)
    draft = SimpleNamespace(model="draft", dtype="bfloat16", quantization="fp8", hf_text_config=None)
    config.speculative_config = SimpleNamespace(draft_model_config=draft, kv_cache_dtype=None)
    config.lora_config = SimpleNamespace(lora_dtype="float16", enable_tower_connector_lora=False)
    config.model_config.quantization_config = {"ignore": ["lm_head"]}
    config.model_config.a_new_setting = [1, {"b": 2}]
    found = vllm_identity.of_vllm(config, None)
    named = vllm_identity.of_vllm(of.engine("model"), "llama@3")
    feature = SimpleNamespace(identifier="a" * 64, mm_position=SimpleNamespace(offset=3), data=None)
    request = of.request(
        lora_request=of.lora("lora"), mm_features=[feature], prompt_embeds=of.Array(b"12345678"), cache_salt="salt"
    )
    spec = caches.FullAttentionSpec()
    tensor = caches.Tensor((caches.BLOCKS, 4, 16, 32))
    layout = caches.made({"a.0": tensor}, caches.Caches((spec, ["a.0"])), _layout.Place(tp_size=1), 4, "vec")
    return {
        "vllm": json.loads(found.text()),
        "vllm, for a handoff": found.properties(),
        "vllm, named by the operator": json.loads(named.text()),
        "vllm, a prompt": vllm_identity.of_vllm_prompt(request, _adapters.Adapters(), "7").extra(),
        "vllm, a layout for a handoff": [it["encoding"] for it in json.loads(layout.json)["shapes"]],
    }


def of_the_stores_of_vllm() -> dict[str, Any]:
    tier = importlib.import_module("kvferry.vllm._offload_tier")
    adapters = importlib.import_module("kvferry.vllm._offload_adapters")
    facts = {name: vllm_identity.LayerFacts("vec", 8) for name in ("a", "b")}
    groups = {
        "shared": _offload_layout.group_layouts(*offload.engine(1, 0, 8, device="cuda"), 8, facts=facts),
        "on a cpu": _offload_layout.group_layouts(*offload.engine(1, 0, 8), 8, facts=facts),
        "of a rank": _offload_layout.group_layouts(*offload.engine(2, 1, 8, certified=False), 8),
    }
    attention = SimpleNamespace(attention_config=SimpleNamespace(backend="B12X", backend_per_kind={}))
    known, lora = _adapters.Adapters(), of.lora("lora")
    known.saw(lora)
    blocks = adapters.RequestNames(known, lora).of([stores.key(0), stores.key(1)])
    return {
        "KVFerryOffloadingSpec": {name: it.fingerprint.hex() for name, (it,) in groups.items()},
        "KVFerryTier": {
            "plain": tier._fingerprint(stores.config(), 4096, None).hex(),
            "of the usual order": tier._fingerprint(stores.config(), 4096, attention, stores.cache(None)).hex(),
            "of another order": tier._fingerprint(stores.config(), 4096, attention, stores.cache(2)).hex(),
            "with states": tier._fingerprint(stores.config(), 4096, None, stores.states(64, 3)).hex(),
        },
        "vllm, blocks of an adapter": [it.hex() for it in blocks],
    }


def of_the_storage_of_sglang(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    arguments = {
        "model_path": "model",
        "dtype": "auto",
        "quantization": "fp8",
        "load_format": "auto",
        "kv_cache_dtype": "fp8_e4m3",
        "json_model_override_args": '{"a": 1}',
        "lora_paths": ["tuned=lora"],
        "mm_process_config": {"image": {"max_pixels": 9}},
        "speculative_draft_model_path": "draft",
        "mamba_ssm_dtype": "float32",
    }
    pools.serve(monkeypatch, **arguments)
    given = SimpleNamespace(**arguments)
    config = SimpleNamespace(model_name="model")
    keys = [hashlib.sha256(b"0").hexdigest(), "a key of another kind"]
    return {
        "sglang": json.loads(of_sglang.model_of(config, None)),
        "sglang, named by the operator": json.loads(of_sglang.model_of(config, "llama@3")),
        "sglang, a draft model": sglang_identity.sglang_draft(given),
        "sglang, a pool": pools.layout(dtype="torch.uint8", layer_num=4, head_num=8, head_dim=64).hex(),
        "sglang, a pool with a draft model": pools.layout("draft").hex(),
        "sglang, blocks": [it.hex() for it in of_sglang.hashes_of(keys)],
    }


def of_tensorrt_llm() -> dict[str, Any]:
    changes = {
        "model": "model",
        "revision": None,
        "load_format": "auto",
        "quant_config": SimpleNamespace(quant_algo="FP8", kv_cache_quant_algo="FP8", group_size=64),
        "model_kwargs": {"num_hidden_layers": 2},
        "max_seq_len": 4096,
        "attn_backend": "TRTLLM",
    }
    cache = Cache(Shape())
    return {
        "trtllm": json.loads(trtllm_identity.of_trtllm(args(**changes)).text()),
        "trtllm, named by the operator": json.loads(trtllm_identity.of_trtllm(args(**changes), "llama@3").text()),
        "trtllm, a tensor": Pages.of_tensor(cache.tensors[0], 8, "auto").fingerprint.hex(),
        "trtllm, a layout": Pages.of_layout(cache.layout(), "auto").fingerprint.hex(),
        "trtllm, blocks": [it.hex() for it in chain(range(17), 8, "cache_salt=a")],
    }


def test_the_names_of_kv_are_those_of_earlier_releases(names: dict[str, Any]) -> None:
    # A name that is missing there is told with its value.
    assert names == json.loads(GOLDEN.read_text())
