"""What names KV of TensorRT-LLM."""

from __future__ import annotations

import os
from typing import Any

from kvferry._engine import identity
from kvferry._engine.identity import Engine, Identity, began, joined, known, maybe
from kvferry._engine.identity.known import Settings
from kvferry._engine.identity.weights import folder_of


def of_trtllm(llm_args: Any, named: str | None = None, *, ranks: int = 1) -> Identity:
    """`ranks`: of the engine. Adapters, multimodal inputs and drafts are refused or not handed over there: see
    `kvferry.trtllm`.
    """
    given = Settings(llm_args, known.TRTLLM)
    quantisation = Settings(given.get("quant_config"), known.TRTLLM_QUANTIZATION)
    cache = Settings(given.get("kv_cache_config"), known.TRTLLM_CACHE)
    # Several ranks are started by one process, and a single one may be started by what starts other engines.
    engine = Engine(began(os.getppid() if ranks > 1 else None), "trtllm")
    name = given.get("model")
    revision = weights = None
    if named is None:
        revision, weights = engine.sampled(
            str(name) if name is not None else None,
            given.get("revision"),
            code=bool(given.get("trust_remote_code")),
            made=_is_dummy(given),
        )
    return Identity(
        model=named or str(name),
        revision=revision,
        weights=weights,
        quantization=joined(
            weights=maybe(quantisation.get("quant_algo")),
            cache=maybe(quantisation.get("kv_cache_quant_algo")),
            others=engine.others(quantisation),
        ),
        dtype=str(given.get("dtype")),
        loading=joined(format=maybe(given.get("load_format"))),
        # RoPE is in the model's folder and in its overrides. LongRoPE's factors follow from the length.
        rope=joined(length=given.get("max_seq_len")),
        overrides=engine.hash_if(given.get("model_kwargs")),
        cache=joined(dtype=maybe(cache.get("dtype"))),
        # TensorRT-LLM runs on NVIDIA's alone.
        platform=None,
        draft=None,
        adapters=None,
        media=None,
        settings=engine.others(given, cache),
    )


def check_trtllm_weights_are_named(llm_args: Any, named: str | None, who: str) -> None:
    """As `identity.check_weights_are_named`. `named`: the setting `model`."""
    given = Settings(llm_args, known.TRTLLM)
    if named is None and not _is_dummy(given):
        source = str(given.get("model"))
        identity.check_weights_are_named(who, source, folder_of(source, given.get("revision")))


def _is_dummy(given: Settings) -> bool:
    load_format = given.get("load_format")
    return str(getattr(load_format, "name", load_format)).lower() == "dummy"
