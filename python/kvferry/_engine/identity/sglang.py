"""What names KV of SGLang."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any

from kvferry._engine import identity
from kvferry._engine.identity import Engine, Identity, began, digest_of, joined, known, maybe, rocm, unless
from kvferry._engine.identity.known import Settings
from kvferry._engine.identity.weights import folder_of, processors_of

_DTYPES = "sglang.srt.mem_cache.kv_cache_dtype"
# Arguments of the server by which weights are made, with values that say nothing.
_LOADING = {
    "weight_version": None,
    "load_format": None,
    "model_loader_extra_config": None,
    "modelopt_quant": None,
    "quantize_and_serve": "False",
    "rl_quant_profile": None,
    "kt_weight_path": None,
    "model_impl": "auto",
}
# Those by which images are prepared.
_MEDIA = ("mm_process_config", "image_processor_backend", "disable_fast_image_processor")
# Those that change the KV of the draft model of speculative decoding.
_DRAFT = (
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_draft_model_revision",
    "speculative_draft_model_quantization",
    "speculative_draft_load_format",
    "speculative_draft_kv_cache_dtype",
)


def of_sglang(config: Any, arguments: Any | None, named: str | None) -> Identity:
    """`config`: HiCache's. `arguments`: the server's, if this process is one."""
    given, engine = Settings(arguments, known.SGLANG), _engine()
    name = given.get("model_path") or config.model_name
    revision = weights = None
    if named is None:
        revision, weights = engine.sampled(
            name,
            given.get("revision"),
            given.get("download_dir"),
            code=bool(given.get("trust_remote_code")),
            made=given.get("load_format") == "dummy",
        )
    return Identity(
        model=named or str(config.model_name),
        revision=revision,
        weights=weights,
        quantization=joined(
            method=given.get("quantization"),
            parameters=given.get("quantization_param_path"),
        ),
        dtype=str(given.get("dtype")),
        loading=joined(**{it: unless(given.get(it), default) for it, default in _LOADING.items()}),
        # It is in the model's folder and in the overrides; SGLang chooses LongRoPE's factors by the prompt.
        rope=None,
        overrides=maybe(given.get("json_model_override_args")),
        cache=joined(dtype=given.get("kv_cache_dtype")),
        platform=rocm(lambda: str(importlib.import_module(_DTYPES).fp8_dtype).endswith("fnuz")),
        # In the layout of the pools that have KV of it: the others are the same with another draft model.
        draft=None,
        # SGLang's keys have an adapter's name and path.
        adapters=_adapters(given),
        media=_media(given, str(name) if named is None else None),
        settings=engine.others(given),
    )


def _media(given: Settings, name: str | None) -> str | None:
    """SGLang's keys have a hash of each image, of some models as it was before it was prepared. `name`: of the model,
    unless the operator's name stands for it.
    """
    settings = {it: given.get(it) for it in _MEDIA}
    folder = folder_of(name, given.get("revision"), given.get("download_dir"))
    return joined(
        files=processors_of(folder),
        # Without the defaults, which models without images have, too.
        arguments=_engine().hash_if(
            {it: value for it, value in settings.items() if value not in (None, False, {}, "auto")}
        ),
    )


def sglang_draft(arguments: Any | None) -> str | None:
    """What names the draft model of speculative decoding."""
    given = Settings(arguments, known.SGLANG)
    name = given.get("speculative_draft_model_path")
    revision, weights = _engine().sampled(name, given.get("speculative_draft_model_revision"))
    return joined(**{it: given.get(it) for it in _DRAFT}, commit=revision, weights=weights)


def _engine() -> Engine:
    """One process starts all ranks of an engine."""
    return Engine(began(os.getppid()), "sglang")


def _adapters(given: Settings) -> str | None:
    paths = [_path(it) for it in given.get("lora_paths") or ()]
    return _engine().hash_if([[path, digest_of(folder_of(path))] for path in paths])


def _path(adapter: Any) -> str:
    """Of ``NAME=PATH``, ``PATH``, or what SGLang has made of them."""
    if isinstance(adapter, str):
        return adapter.partition("=")[2] or adapter
    path = adapter.get("lora_path") if isinstance(adapter, Mapping) else getattr(adapter, "lora_path", None)
    return str(path)


def check_sglang_weights_are_named(config: Any, arguments: Any | None, named: str | None, who: str) -> None:
    """As `identity.check_weights_are_named`. `named`: the setting `model`."""
    given = Settings(arguments, known.SGLANG)
    if named is None and given.get("load_format") != "dummy":
        source = str(given.get("model_path") or config.model_name)
        folder = folder_of(source, given.get("revision"), given.get("download_dir"))
        identity.check_weights_are_named(who, source, folder)
