"""What names KV, for every adapter: the model as it is computed, and what of a request is not in its tokens.

If two engines could differ in a thing and compute other KV for the same tokens, it is in `Identity` or
`PromptIdentity`. An adapter fills in every field; there are no defaults, so that a new field is a question to each of
them. docs/storage.md has the table.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import logging
import os
import platform
import re
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvferry._adapters import Adapters, folder_of
from kvferry._weights import has_weights, processors_of, sample_of

logger = logging.getLogger("kvferry")

# A property of a handshake has 1024 bytes at most. What is longer is named by its hash.
_VALUE_MAX = 512
# Content of one prompt that is hashed, which takes a scheduler 1 ms for each MB; more than that equals nothing.
_CONTENT_MAX = 64 << 20
# The names that vLLM 0.32 gives images for their content: digits of BLAKE3, SHA-256 or SHA-512. Before them, an
# adapter's name and a colon where the adapter changes what the encoder makes of an image. Other names are a counter of
# the process or a client's `uuid`. A `uuid` may have this form, too, and vLLM makes this form of it where settings of
# the processor or of media's input are given. Both count as hashes, as in vLLM's own cache: a hash of all content would
# cost the scheduler more than the rest of its step.
_HASHED = re.compile(r"(.*:)?([0-9a-f]{64}|[0-9a-f]{128})", re.DOTALL)

_COMMIT = re.compile("[0-9a-f]{40}")


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What all KV of an engine depends on. None: the engine has no such thing.

    Where the operator names the model, that name stands for `model`, `revision` and `weights`.
    """

    model: str
    # The commit of a hub's snapshot, where there is one.
    revision: str | None
    # A hash of samples.
    weights: str | None
    quantization: str | None
    dtype: str
    # How the weights are loaded, and by which implementation of the model.
    loading: str | None
    # Frequencies and scaling of rotary embeddings, with the branch that the engine's length chooses.
    rope: str | None
    # Changes of the model's configuration that are not in its folder.
    overrides: str | None
    # Number format and scales of the cache.
    cache: str | None
    # The model of speculative decoding, where it has KV and weights of its own.
    draft: str | None
    # Adapters that are loaded at start and that a request's identity does not tell apart.
    adapters: str | None
    # How images, audio and video are prepared and encoded, where a request's identity has only what they were before.
    media: str | None

    def properties(self) -> dict[str, str]:
        """For the handshake of two engines, which compares what both give: every field is given."""
        return {it.name: bounded(_text(getattr(self, it.name))) for it in fields(self)}

    def text(self) -> str:
        """For the names of a store. Where there is no such thing as `media`, they are those of earlier releases."""
        given = self.properties()
        if self.media is None:
            del given["media"]
        return json.dumps(given, sort_keys=True)


@dataclass(frozen=True, kw_only=True)
class PromptIdentity:
    """What the KV of a prompt depends on besides its tokens and the engine."""

    # Name and weights.
    adapter: tuple[str, str] | None
    # The content of each multimodal input, and where it is in the prompt.
    media: tuple[tuple[str, int], ...]
    # A hash of the bytes of prompt embeddings.
    embeddings: str | None
    tenant: str | None
    # The version of weights that were changed in the running engine.
    version: str | None

    def extra(self) -> list[str]:
        """For `kvferry.connector.prompt_id`. Empty for a prompt of tokens alone."""
        parts = [f"lora:{name}" for name in self.adapter or ()]
        parts += [f"mm:{offset}:{name}" for name, offset in self.media]
        if self.embeddings is not None:
            parts.append(f"embeds:{self.embeddings}")
        if self.tenant is not None:
            parts.append(f"salt:{self.tenant}")
        if self.version is not None:
            parts.append(f"version:{self.version}")
        return parts


def _text(value: str | None) -> str:
    # Not a text that a value could have.
    return "-" if value is None else f"={value}"


def bounded(text: str) -> str:
    return text if len(text.encode()) <= _VALUE_MAX else "#" + hashlib.sha256(text.encode()).hexdigest()


def hash_of(value: Any) -> str:
    """A hash of plain data, whatever the order of its mappings."""
    return hashlib.sha256(json.dumps(_plain(value), sort_keys=True).encode()).hexdigest()[:32]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(it) for key, it in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(it) for it in value]
    if isinstance(value, str | int | float | bool | None):
        return value
    if callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    return str(value)


def _joined(**parts: Any) -> str | None:
    given = [f"{name}={value}" for name, value in parts.items() if value not in (None, "")]
    return " ".join(given) or None


# Weights.


def _sampled(
    name: str | None,
    revision: str | None = None,
    cache: str | None = None,
    *,
    engine: str,
    code: bool = False,
    made: bool = False,
) -> tuple[str | None, str | None]:
    """Revision and weights of a model. `engine`: what no other engine and no other start of this one has. `code`: its
    Python files are run. `made`: its weights are read from no file.

    Adapters call this after the engine has loaded the weights. Files that have changed since the process began may be
    others than those it has loaded, so they name nothing that another engine has. A commit's files do not change.
    """
    folder = folder_of(name, revision, cache)
    found = sample_of(folder, code=code)
    commit = _commit(folder)
    if found and found.has_weights and not made and commit is None and found.changed > process_began():
        logger.warning(
            "kvferry: files of %s have changed since this process began, so that the weights it has loaded may be "
            "others: until it is started again, no other engine shares its KV",
            name,
        )
        return revision, hash_of([found.digest, engine])
    if name and not made and commit is None and not (found and found.has_weights):
        logger.warning(
            "kvferry: the weights of %s are in no folder of this host, so that they are named by name and revision "
            "only; set model to another name when they change",
            name,
        )
    return commit or revision, found.digest if found else None


def process_began() -> float:
    """Seconds since the epoch."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age


def _commit(folder: Path | None) -> str | None:
    """None for a folder that has not its place in the cache of Hugging Face's hub: its files may change."""
    if folder is None or _COMMIT.fullmatch(folder.name) is None or folder.parent.name != "snapshots":
        return None
    return folder.name if folder.parent.parent.name.startswith("models--") else None


# The processor.


def processor(kernel: str | None = None) -> str:
    """The kernels of the CPU keep keys in an order that depends on the instructions that the processor has. `kernel`:
    the one in use; None if it is not known.
    """
    torch = importlib.import_module("torch")
    if kernel is None:
        kernel = f"amx {getattr(torch.cpu, '_is_amx_tile_supported', lambda: None)()}"
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {kernel}"


@dataclass(frozen=True)
class LayerFacts:
    """What a layer of vLLM says of its KV that its spec does not. None: not known."""

    # The attention kernel of a CPU.
    kernel: str | None = None
    # KV heads on all ranks together.
    kv_heads: int | None = None


def layer_facts(vllm_config: Any, layers: Sequence[str], *, tp_size: int = 1) -> dict[str, LayerFacts]:
    """Of the layers of this process."""
    context = getattr(getattr(vllm_config, "compilation_config", None), "static_forward_context", None) or {}
    projections = _kv_heads_of_projections() if tp_size > 1 else {}
    facts = {}
    for name in layers:
        layer = context.get(name)
        heads = getattr(layer, "total_num_kv_heads", None)
        if heads is None:
            found = projections.get(name.rpartition(".")[0], set())
            heads = next(iter(found)) if len(found) == 1 else None
        kernel = getattr(layer, "isa", None)
        facts[name] = LayerFacts(str(kernel) if kernel is not None else None, heads)
    return facts


def _kv_heads_of_projections() -> dict[str, set[int]]:
    """KV heads by the module that a projection belongs to. An attention layer does not know its projection, and shares
    its parent's name with it; vLLM keeps no list of projections, so the process' objects are looked through, once.
    """
    linear = sys.modules.get("vllm.model_executor.layers.linear")
    found: dict[str, set[int]] = {}
    if linear is not None:
        for it in gc.get_objects():
            # Not `isinstance`, which runs code of proxies.
            if issubclass(type(it), linear.QKVParallelLinear):
                parent = str(getattr(it, "prefix", "")).rpartition(".")[0]
                found.setdefault(parent, set()).add(int(it.total_num_kv_heads))
    return found


# vLLM.


def of_vllm(vllm_config: Any, named: str | None) -> Identity:
    """`named`: the setting `model`."""
    config = vllm_config.model_config
    load = getattr(vllm_config, "load_config", None)
    cache = getattr(vllm_config, "cache_config", None)
    # Where weights are streamed from an object store, `model` is a folder with the configuration alone.
    source = str(getattr(config, "model_weights", None) or config.model)
    revision = weights = None
    if named is None:
        revision, weights = _vllm_weights(config, load, source, _vllm_engine(vllm_config))
    overrides = getattr(config, "hf_overrides", None)
    folder = getattr(config, "hf_config_path", None)
    return Identity(
        model=named or source,
        revision=revision,
        weights=weights,
        quantization=_maybe(getattr(config, "quantization", None)),
        dtype=str(config.dtype).removeprefix("torch."),
        loading=_joined(
            format=_maybe(getattr(load, "load_format", None)),
            extra=_hash_if(getattr(load, "model_loader_extra_config", None)),
            code=getattr(config, "code_revision", None),
            implementation=_maybe(getattr(config, "model_impl", None)),
        ),
        rope=_rope(config),
        overrides=_joined(
            given=_hash_if(overrides),
            configuration=_hash_if([folder, _digest(folder)] if folder else None),
        ),
        cache=_joined(
            dtype=_maybe(getattr(cache, "cache_dtype", None)),
            state=_maybe(getattr(cache, "mamba_cache_dtype", None)),
            ssm=_maybe(getattr(cache, "mamba_ssm_cache_dtype", None)),
            # Scales that an engine measures are its own: no other engine has them.
            scales=vllm_config.kv_transfer_config.engine_id if getattr(cache, "calculate_kv_scales", False) else None,
        ),
        draft=_vllm_draft(vllm_config),
        adapters=None,
        media=_vllm_media(vllm_config, named),
    )


def _vllm_media(vllm_config: Any, named: str | None) -> str | None:
    """vLLM names an image by its content and by what its request says of processing, not by what the engine does."""
    config, load = vllm_config.model_config, getattr(vllm_config, "load_config", None)
    media = getattr(config, "multimodal_config", None)
    if media is None or getattr(media, "language_model_only", False):
        return None
    encoder, scales = (getattr(media, it, None) for it in ("mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path"))
    rate = getattr(media, "video_pruning_rate", None)
    folder = folder_of(config.model, getattr(config, "revision", None), getattr(load, "download_dir", None))
    return _joined(
        # The operator's name of the model stands for what is in its folder.
        files=processors_of(folder) if named is None else None,
        arguments=_hash_if(getattr(media, "mm_processor_kwargs", None)),
        normalize=getattr(media, "mm_device_do_normalize", None),
        pruning=f"{getattr(media, 'video_pruning_method', None)} {rate}" if rate else None,
        encoder=encoder,
        # Scales that an engine measures are its own.
        scales=(_digest(scales) if scales else vllm_config.kv_transfer_config.engine_id) if encoder else None,
    )


def _vllm_engine(vllm_config: Any) -> str:
    """All ranks of an engine have the same."""
    return f"{vllm_config.kv_transfer_config.engine_id} {getattr(vllm_config, 'instance_id', '')}"


def _vllm_weights(config: Any, load: Any, source: str, engine: str) -> tuple[str | None, str | None]:
    """Revision and weights."""
    revision, place = getattr(config, "revision", None), getattr(load, "download_dir", None)
    code = bool(getattr(config, "trust_remote_code", False))
    commit, weights = _sampled(source, revision, place, engine=engine, code=code, made=_is_dummy(load))
    elsewhere = [_digest(it) for it in _vllm_places(load)]
    if source != config.model or elsewhere:
        weights = hash_of([weights, _digest(folder_of(config.model, revision, place), code=code), elsewhere])
    return commit, weights


def _digest(path: str | Path | None, *, code: bool = False) -> str | None:
    found = sample_of(path, code=code)
    return found.digest if found else None


def _is_dummy(load: Any) -> bool:
    return _maybe(getattr(load, "load_format", None)) == "dummy"


def _vllm_places(load: Any) -> list[str]:
    """Where a loader reads weights that are not in the model's folder."""
    if _maybe(getattr(load, "load_format", None)) != "tensorizer":
        return []
    extra = getattr(load, "model_loader_extra_config", None)
    settings: list[Any] = [extra, extra.get("tensorizer_config")] if isinstance(extra, Mapping) else [extra]
    found = []
    for it in settings:
        for name in ("tensorizer_uri", "tensorizer_dir"):
            value = it.get(name) if isinstance(it, Mapping) else getattr(it, name, None)
            if value:
                found.append(str(value))
    return found


def check_weights_are_named(vllm_config: Any, named: str | None, who: str) -> None:
    """Raises ValueError where new weights would have the name of the old ones, and an adapter keeps blocks beyond the
    process. `named`: the setting `model`.
    """
    config, load = vllm_config.model_config, getattr(vllm_config, "load_config", None)
    if named is not None or _is_dummy(load):
        return
    source = str(getattr(config, "model_weights", None) or config.model)
    folder = folder_of(source, getattr(config, "revision", None), getattr(load, "download_dir", None))
    places = _vllm_places(load)
    _check_are_named(who, source, any(map(has_weights, places)) if places else _has_name(folder))


def check_sglang_weights_are_named(config: Any, arguments: Any | None, named: str | None, who: str) -> None:
    """As `check_weights_are_named`."""
    if named is None and getattr(arguments, "load_format", None) != "dummy":
        source = str(getattr(arguments, "model_path", None) or config.model_name)
        place = getattr(arguments, "download_dir", None)
        _check_are_named(who, source, _has_name(folder_of(source, getattr(arguments, "revision", None), place)))


def check_trtllm_weights_are_named(llm_args: Any, named: str | None, who: str) -> None:
    """As `check_weights_are_named`."""
    if named is None and not _is_trtllm_dummy(llm_args):
        source = str(getattr(llm_args, "model", None))
        _check_are_named(who, source, _has_name(folder_of(source, getattr(llm_args, "revision", None))))


def _is_trtllm_dummy(llm_args: Any) -> bool:
    load_format = getattr(llm_args, "load_format", None)
    return str(getattr(load_format, "name", load_format)).lower() == "dummy"


def _has_name(folder: Path | None) -> bool:
    return _commit(folder) is not None or has_weights(folder)


def _check_are_named(who: str, source: str, are_named: bool) -> None:
    if not are_named:
        raise ValueError(
            f"{who}: the weights of {source} are not in a folder of this host, so that new weights there would find "
            "the blocks of the old ones; set model to a name that says the weights, and to another when they change"
        )


def _maybe(value: Any) -> str | None:
    return None if value is None else str(getattr(value, "value", value))


def _hash_if(value: Any) -> str | None:
    return hash_of(value) if value else None


def _rope(config: Any) -> str | None:
    text = getattr(config, "hf_text_config", None)
    parameters = getattr(text, "rope_parameters", None)
    if not isinstance(parameters, Mapping):
        parameters = None
    found = {
        "parameters": parameters,
        "scaling": getattr(text, "rope_scaling", None),
        "theta": getattr(text, "rope_theta", None),
        "original": getattr(text, "original_max_position_embeddings", None),
        "positions": getattr(text, "max_position_embeddings", None),
    }
    if not any(found.values()):
        return None
    branches = sorted(_long_branches(found, getattr(config, "max_model_len", None)))
    return " ".join([hash_of(found), *branches])


def _long_branches(found: Any, length: int | None, original: int | None = None) -> set[str]:
    """Which factors rotary embeddings of the kind LongRoPE use: the long ones if the engine's length is beyond the
    original one, whatever the length of a prompt.
    """
    if not isinstance(found, Mapping):
        return set()
    here = found.get("original_max_position_embeddings") or found.get("original") or original
    branches = set()
    if "longrope" in (found.get("rope_type"), found.get("type")):
        branches.add("long" if here and length and length > here else "short" if here and length else f"of {length}")
    for value in found.values():
        branches |= _long_branches(value, length, here)
    return branches


def _vllm_draft(vllm_config: Any) -> str | None:
    draft = getattr(getattr(vllm_config, "speculative_config", None), "draft_model_config", None)
    # Drafts by n-grams, and layers of the model itself, have no weights of their own: decode may use them alone.
    if draft is None or draft is vllm_config.model_config or draft.model == vllm_config.model_config.model:
        return None
    source = str(getattr(draft, "model_weights", None) or draft.model)
    load = getattr(vllm_config, "load_config", None)
    load = getattr(vllm_config.speculative_config, "draft_load_config", None) or load
    revision, weights = _vllm_weights(draft, load, source, _vllm_engine(vllm_config))
    return _joined(
        model=source,
        revision=revision,
        weights=weights,
        quantization=_maybe(getattr(draft, "quantization", None)),
        rope=_rope(draft),
    )


def vllm_config_of_callers() -> Any | None:
    """The configuration of the engine that makes an object which is given only a part of it: vLLM hands no more to a
    tier, and its connector, which makes the tier, has it.
    """
    frame = sys._getframe(1)
    while frame is not None:
        config = frame.f_locals.get("vllm_config")
        if hasattr(config, "model_config") and hasattr(config, "kv_transfer_config"):
            return config
        frame = frame.f_back  # type: ignore[assignment]
    return None


def check_media_are_named(vllm_config: Any, who: str) -> None:
    """Raises ValueError where vLLM names images by a counter, and an adapter keeps blocks beyond the process."""
    if _counts_media(vllm_config):
        raise ValueError(
            f"{who}: with --no-enable-prefix-caching and --mm-processor-cache-gb 0 vLLM names images by a counter, so "
            "that another image of a later start would have the same blocks; leave out one of the two flags"
        )


def _counts_media(vllm_config: Any) -> bool:
    media = getattr(vllm_config.model_config, "multimodal_config", None)
    caching = getattr(vllm_config.cache_config, "enable_prefix_caching", True)
    return media is not None and getattr(media, "mm_processor_cache_gb", None) == 0 and not caching


def of_vllm_prompt(request: Any, adapters: Adapters, version: str | None) -> PromptIdentity:
    """What a request of vLLM has besides tokens. `version`: that of the weights."""
    lora, embeddings = request.lora_request, getattr(request, "prompt_embeds", None)
    return PromptIdentity(
        adapter=(lora.lora_name, adapters.weights(lora)) if lora is not None else None,
        media=tuple((_medium(it), _offset(it)) for it in request.mm_features or ()),
        embeddings=_content(embeddings) if embeddings is not None else None,
        tenant=request.cache_salt or None,
        version=version,
    )


def _offset(feature: Any) -> int:
    return int(getattr(getattr(feature, "mm_position", None), "offset", 0))


def _medium(feature: Any) -> str:
    name = str(feature.identifier)
    if _HASHED.fullmatch(name) is not None:
        return name
    # It names no content. The engine that sends no content with it has nothing that a peer could compare.
    data = getattr(feature, "data", None)
    return "content:" + (_content(data) if data is not None else secrets.token_hex(16))


def _content(value: Any) -> str:
    """A hash of the bytes of tensors in mappings, lists and vLLM's wrappers of them."""
    found = _Bounded()
    try:
        _add_content(found, value)
    except _TooLongError:
        return secrets.token_hex(16)
    return found.hash.hexdigest()[:32]


class _TooLongError(Exception):
    pass


class _Bounded:
    def __init__(self) -> None:
        self.hash = hashlib.sha256()
        self._left = _CONTENT_MAX

    def update(self, data: Any) -> None:
        self._left -= memoryview(data).nbytes
        if self._left < 0:
            raise _TooLongError
        self.hash.update(data)


def _add_content(found: _Bounded, value: Any) -> None:
    if hasattr(value, "untyped_storage"):
        torch = importlib.import_module("torch")
        plain = value.detach().cpu().contiguous()
        found.update(f"tensor {plain.dtype} {tuple(plain.shape)} ".encode())
        found.update(memoryview(plain.reshape(-1).view(torch.uint8).numpy()))
    elif hasattr(value, "tobytes"):
        found.update(f"array {getattr(value, 'dtype', '')} {getattr(value, 'shape', '')} ".encode())
        found.update(value.tobytes())
    elif isinstance(value, Mapping):
        found.update(f"mapping {len(value)} ".encode())
        for key in sorted(value, key=str):
            found.update(f"{key} ".encode())
            _add_content(found, value[key])
    elif isinstance(value, list | tuple):
        found.update(f"list {len(value)} ".encode())
        for it in value:
            _add_content(found, it)
    elif hasattr(value, "data") and not isinstance(value, bytes | str):
        _add_content(found, value.data)
    else:
        plain = value if isinstance(value, bytes) else repr(value).encode()
        found.update(f"plain {len(plain)} ".encode())
        found.update(plain)


# SGLang.

# Arguments of the server that change the KV of the same tokens, and that the pool does not show.
_SGLANG_LOADING = (
    "weight_version",
    "load_format",
    "model_loader_extra_config",
    "modelopt_quant",
    "rl_quant_profile",
    "kt_weight_path",
)
# Those by which images are prepared.
_SGLANG_MEDIA = ("mm_process_config", "image_processor_backend", "disable_fast_image_processor")
# Those that change the KV of the draft model of speculative decoding.
_SGLANG_DRAFT = (
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_draft_model_revision",
    "speculative_draft_model_quantization",
    "speculative_draft_load_format",
    "speculative_draft_kv_cache_dtype",
)


def of_sglang(config: Any, arguments: Any | None, named: str | None) -> Identity:
    """`config`: HiCache's. `arguments`: the server's, if this process is one."""
    name = getattr(arguments, "model_path", None) or config.model_name
    revision = weights = None
    if named is None:
        revision, weights = _sampled(
            name,
            getattr(arguments, "revision", None),
            getattr(arguments, "download_dir", None),
            engine=_sglang_engine(),
            code=bool(getattr(arguments, "trust_remote_code", False)),
            made=getattr(arguments, "load_format", None) == "dummy",
        )
    return Identity(
        model=named or str(config.model_name),
        revision=revision,
        weights=weights,
        quantization=_joined(
            method=getattr(arguments, "quantization", None),
            parameters=getattr(arguments, "quantization_param_path", None),
        ),
        dtype=str(getattr(arguments, "dtype", None)),
        loading=_joined(**{it: _maybe(getattr(arguments, it, None)) for it in _SGLANG_LOADING}),
        # It is in the model's folder and in the overrides; SGLang chooses LongRoPE's factors by the prompt.
        rope=None,
        overrides=_maybe(getattr(arguments, "json_model_override_args", None)),
        cache=_joined(dtype=getattr(arguments, "kv_cache_dtype", None)),
        # In the layout of the pools that have KV of it: the others are the same with another draft model.
        draft=None,
        # SGLang's keys have an adapter's name and path.
        adapters=_sglang_adapters(arguments),
        media=_sglang_media(arguments, str(name) if named is None else None),
    )


def _sglang_media(arguments: Any | None, name: str | None) -> str | None:
    """SGLang's keys have a hash of each image, of some models as it was before it was prepared. `name`: of the model,
    unless the operator's name stands for it.
    """
    given = {it: getattr(arguments, it, None) for it in _SGLANG_MEDIA}
    folder = folder_of(name, getattr(arguments, "revision", None), getattr(arguments, "download_dir", None))
    return _joined(
        files=processors_of(folder),
        # Without the defaults, which models without images have, too.
        arguments=_hash_if({it: value for it, value in given.items() if value not in (None, False, {}, "auto")}),
    )


def sglang_draft(arguments: Any | None) -> str | None:
    name = getattr(arguments, "speculative_draft_model_path", None)
    revision, weights = _sampled(
        name, getattr(arguments, "speculative_draft_model_revision", None), engine=_sglang_engine()
    )
    given = {it: getattr(arguments, it, None) for it in _SGLANG_DRAFT}
    return _joined(**given, commit=revision, weights=weights)


def _sglang_engine() -> str:
    """One process starts all ranks of an engine."""
    return began(os.getppid())


def _sglang_adapters(arguments: Any | None) -> str | None:
    paths = [_sglang_path(it) for it in getattr(arguments, "lora_paths", None) or ()]
    return _hash_if([[path, _digest(folder_of(path))] for path in paths])


def _sglang_path(adapter: Any) -> str:
    """Of ``NAME=PATH``, ``PATH``, or what SGLang has made of them."""
    if isinstance(adapter, str):
        return adapter.partition("=")[2] or adapter
    path = adapter.get("lora_path") if isinstance(adapter, Mapping) else getattr(adapter, "lora_path", None)
    return str(path)


# TensorRT-LLM.


def of_trtllm(llm_args: Any, named: str | None = None, *, ranks: int = 1) -> Identity:
    """`ranks`: of the engine. Adapters, multimodal inputs and drafts are refused or not handed over there: see
    `kvferry.trtllm`.
    """
    quantisation = getattr(llm_args, "quant_config", None)
    cache = getattr(llm_args, "kv_cache_config", None)
    name, load_format = getattr(llm_args, "model", None), getattr(llm_args, "load_format", None)
    revision = weights = None
    if named is None:
        revision, weights = _sampled(
            str(name) if name is not None else None,
            getattr(llm_args, "revision", None),
            # Several ranks are started by one process, and a single one may be started by what starts other engines.
            engine=began(os.getppid() if ranks > 1 else None),
            code=bool(getattr(llm_args, "trust_remote_code", False)),
            made=_is_trtllm_dummy(llm_args),
        )
    return Identity(
        model=named or str(name),
        revision=revision,
        weights=weights,
        quantization=_joined(
            weights=_maybe(getattr(quantisation, "quant_algo", None)),
            cache=_maybe(getattr(quantisation, "kv_cache_quant_algo", None)),
        ),
        dtype=str(getattr(llm_args, "dtype", None)),
        loading=_joined(format=_maybe(load_format)),
        # RoPE is in the model's folder and in its overrides. LongRoPE's factors follow from the length.
        rope=_joined(length=getattr(llm_args, "max_seq_len", None)),
        overrides=_hash_if(getattr(llm_args, "model_kwargs", None)),
        cache=_joined(dtype=_maybe(getattr(cache, "dtype", None))),
        draft=None,
        adapters=None,
        media=None,
    )


def began(pid: int | None = None) -> str:
    """A process, and when it began, since numbers of processes come again."""
    pid = os.getpid() if pid is None else pid
    try:
        fields_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return f"{pid}@{fields_[19]}@{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
    except OSError:
        # The process is in another container: then each rank is alone.
        return secrets.token_hex(16)
