"""What names KV of vLLM: an engine, and a request."""

from __future__ import annotations

import gc
import hashlib
import importlib
import platform
import re
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry._engine import identity
from kvferry._engine.identity import Engine, Identity, PromptIdentity, digest_of, joined, known, maybe, rocm, unless
from kvferry._engine.identity.adapters import Adapters
from kvferry._engine.identity.core import callers
from kvferry._engine.identity.known import Settings
from kvferry._engine.identity.weights import folder_of, processors_of

# Content of one prompt that is hashed, which takes a scheduler 1 ms for each MB; more than that equals nothing.
_CONTENT_MAX = 64 << 20
# The names that vLLM 0.32 gives images for their content: digits of BLAKE3, SHA-256 or SHA-512. Before them, an
# adapter's name and a colon where the adapter changes what the encoder makes of an image. Other names are a counter of
# the process or a client's `uuid`. A `uuid` may have this form, too, and vLLM makes this form of it where settings of
# the processor or of media's input are given. Both count as hashes, as in vLLM's own cache: a hash of all content would
# cost the scheduler more than the rest of its step.
_HASHED = re.compile(r"(.*:)?([0-9a-f]{64}|[0-9a-f]{128})", re.DOTALL)


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
    # The name of vLLM's attention backend.
    backend: str | None = None


def layer_facts(vllm_config: Any, layers: Sequence[str], *, tp_size: int = 1) -> dict[str, LayerFacts]:
    """Of the layers of this process."""
    context = getattr(getattr(vllm_config, "compilation_config", None), "static_forward_context", None) or {}
    projections = _kv_heads_of_projections() if tp_size > 1 else {}
    facts = {}
    for name in layers:
        found = projections.get(name.rpartition(".")[0], set())
        heads = next(iter(found)) if len(found) == 1 else None
        kernel = getattr(context.get(name), "isa", None)
        backend = getattr(getattr(context.get(name), "backend", None), "name", None)
        facts[name] = LayerFacts(str(kernel) if kernel is not None else None, heads, backend)
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


@dataclass(frozen=True)
class _Vllm:
    """The objects of settings of an engine of vLLM."""

    all: Settings
    model: Settings
    load: Settings
    cache: Settings
    attention: Settings
    mamba: Settings
    lora: Settings
    draft: Settings
    media: Settings

    @staticmethod
    def of(vllm_config: Any) -> _Vllm:
        whole = Settings(vllm_config, known.VLLM)
        model = Settings(whole.get("model_config"), known.VLLM_MODEL)
        return _Vllm(
            all=whole,
            model=model,
            load=Settings(whole.get("load_config"), known.VLLM_LOAD),
            cache=Settings(whole.get("cache_config"), known.VLLM_CACHE),
            attention=Settings(whole.get("attention_config"), known.VLLM_ATTENTION),
            mamba=Settings(whole.get("mamba_config"), known.VLLM_MAMBA),
            lora=Settings(whole.get("lora_config"), known.VLLM_LORA),
            draft=Settings(whole.get("speculative_config"), known.VLLM_DRAFT),
            media=Settings(model.get("multimodal_config"), known.VLLM_MEDIA),
        )

    @property
    def engine(self) -> Engine:
        """All ranks of an engine have the same token."""
        return Engine(f"{self.id} {self.all.get('instance_id') or ''}", "vllm")

    @property
    def id(self) -> str:
        return str(self.all.get("kv_transfer_config").engine_id)

    def source(self, model: Settings) -> str:
        # Where weights are streamed from an object store, `model` is a folder with the configuration alone.
        return str(model.get("model_weights") or model.get("model"))


def of_vllm(vllm_config: Any, named: str | None) -> Identity:
    """`named`: the setting `model`."""
    it = _Vllm.of(vllm_config)
    revision = weights = None
    if named is None:
        revision, weights = _weights(it, it.model, it.load)
    return Identity(
        model=named or it.source(it.model),
        revision=revision,
        weights=weights,
        quantization=_quantization(it.model, it.engine),
        dtype=str(it.model.get("dtype")).removeprefix("torch."),
        loading=joined(
            format=maybe(it.load.get("load_format")),
            extra=it.engine.hash_if(it.load.get("model_loader_extra_config")),
            code=it.model.get("code_revision"),
            implementation=maybe(it.model.get("model_impl")),
            classes=it.engine.hash_if(it.model.get("model_class_overrides")),
        ),
        rope=_rope(it.model, it.engine),
        overrides=_overrides(it.model, it.engine),
        cache=joined(
            dtype=maybe(it.cache.get("cache_dtype")),
            state=maybe(it.cache.get("mamba_cache_dtype")),
            ssm=maybe(it.cache.get("mamba_ssm_cache_dtype")),
            skipped=it.engine.hash_if(it.cache.get("kv_cache_dtype_skip_layers")),
            indexer=unless(it.attention.get("indexer_kv_dtype"), "auto"),
            # Scales that an engine measures are its own: no other engine has them.
            scales=it.id if it.cache.get("calculate_kv_scales") else None,
        ),
        platform=rocm(lambda: bool(importlib.import_module("vllm.platforms").current_platform.is_fp8_fnuz())),
        draft=_draft(it),
        adapters=_lora(it),
        media=_media(it, named),
        settings=it.engine.others(
            *(it.all, it.model, it.load, it.cache, it.attention, it.mamba, it.lora, *_serves_media(it))
        ),
    )


def _quantization(model: Settings, engine: Engine) -> str | None:
    method, parts = maybe(model.get("quantization")), model.get("quantization_config")
    return method if not parts else f"{method} {engine.hash_of(parts)}"


def _overrides(model: Settings, engine: Engine) -> str | None:
    given, folder, format_ = (model.get(it) for it in ("hf_overrides", "hf_config_path", "config_format"))
    if callable(given):
        # A function is named by what it has made of the configuration.
        given = _configuration(model.get("hf_config")) or [engine.token]
    return joined(
        given=engine.hash_if(given),
        configuration=engine.hash_if([folder, digest_of(folder)] if folder else None),
        format=unless(format_, "auto"),
    )


def _configuration(config: Any) -> Any | None:
    """What is in a model's configuration, without the place that it was read from."""
    to_dict = getattr(config, "to_dict", None)
    return [type(config).__qualname__, _without_places(to_dict())] if to_dict is not None else None


def _without_places(value: Any) -> Any:
    if isinstance(value, Mapping):
        places = ("_name_or_path", "name_or_path", "_commit_hash", "transformers_version")
        return {key: _without_places(it) for key, it in value.items() if key not in places}
    return [_without_places(it) for it in value] if isinstance(value, list | tuple) else value


def _lora(it: _Vllm) -> str | None:
    """What an engine makes of any adapter."""
    dtype = str(it.lora.get("lora_dtype") or "").removeprefix("torch.")
    return joined(
        dtype=unless(unless(dtype, "auto"), str(it.model.get("dtype")).removeprefix("torch.")),
        tower=it.lora.get("enable_tower_connector_lora") or None,
    )


def _serves_media(it: _Vllm) -> list[Settings]:
    return [it.media] if it.media and not it.media.get("language_model_only") else []


def _media(it: _Vllm, named: str | None) -> str | None:
    """vLLM names an image by its content and by what its request says of processing, not by what the engine does."""
    if not _serves_media(it):
        return None
    media = it.media
    encoder, scales = media.get("mm_encoder_attn_dtype"), media.get("mm_encoder_fp8_scale_path")
    rate = media.get("video_pruning_rate")
    folder = folder_of(it.model.get("model"), it.model.get("revision"), it.load.get("download_dir"))
    return joined(
        # The operator's name of the model stands for what is in its folder.
        files=processors_of(folder) if named is None else None,
        arguments=it.engine.hash_if(media.get("mm_processor_kwargs")),
        normalize=media.get("mm_device_do_normalize"),
        pruning=f"{media.get('video_pruning_method')} {rate}" if rate else None,
        encoder=encoder,
        # Scales that an engine measures are its own.
        scales=(digest_of(scales) if scales else it.id) if encoder else None,
    )


def _weights(it: _Vllm, model: Settings, load: Settings) -> tuple[str | None, str | None]:
    """Revision and weights."""
    source, name = it.source(model), model.get("model")
    revision, place = model.get("revision"), load.get("download_dir")
    code = bool(model.get("trust_remote_code"))
    commit, weights = it.engine.sampled(source, revision, place, code=code, made=_is_dummy(load))
    elsewhere = [digest_of(place) for place in _places(load)]
    if source != name or elsewhere:
        weights = identity.hash_of([weights, digest_of(folder_of(name, revision, place), code=code), elsewhere])
    return commit, weights


def _is_dummy(load: Settings) -> bool:
    return maybe(load.get("load_format")) == "dummy"


def _places(load: Settings) -> list[str]:
    """Where a loader reads weights that are not in the model's folder."""
    if maybe(load.get("load_format")) != "tensorizer":
        return []
    extra = load.get("model_loader_extra_config")
    settings: list[Any] = [extra, extra.get("tensorizer_config")] if isinstance(extra, Mapping) else [extra]
    found = []
    for it in settings:
        for name in ("tensorizer_uri", "tensorizer_dir"):
            value = it.get(name) if isinstance(it, Mapping) else getattr(it, name, None)
            if value:
                found.append(str(value))
    return found


def check_weights_are_named(vllm_config: Any, named: str | None, who: str) -> None:
    """As `identity.check_weights_are_named`. `named`: the setting `model`."""
    it = _Vllm.of(vllm_config)
    if named is not None or _is_dummy(it.load):
        return
    source = it.source(it.model)
    folder = folder_of(source, it.model.get("revision"), it.load.get("download_dir"))
    identity.check_weights_are_named(who, source, folder, _places(it.load))


def _rope(model: Settings, engine: Engine) -> str | None:
    text = model.get("hf_text_config")
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
    branches = sorted(_long_branches(found, model.get("max_model_len")))
    return " ".join([engine.hash_of(found), *branches])


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


def _draft(it: _Vllm) -> str | None:
    draft = Settings(it.draft.get("draft_model_config"), known.VLLM_MODEL)
    # Drafts by n-grams have no KV. Layers of the model itself have its weights, and decode may use them alone.
    is_own = draft and draft.value is not it.model.value and draft.get("model") != it.model.get("model")
    if not is_own:
        method, cache = it.draft.get("quantization"), it.draft.get("kv_cache_dtype")
        return joined(
            quantization=unless(method, maybe(it.model.get("quantization"))) if draft else None,
            cache=unless(cache, maybe(it.cache.get("cache_dtype"))) if draft else None,
        )
    load = Settings(it.draft.get("draft_load_config"), known.VLLM_LOAD) or it.load
    revision, weights = _weights(it, draft, load)
    return joined(
        model=it.source(draft),
        revision=revision,
        weights=weights,
        quantization=_quantization(draft, it.engine),
        rope=_rope(draft, it.engine),
        cache=maybe(it.draft.get("kv_cache_dtype")),
        code=draft.get("code_revision"),
        classes=it.engine.hash_if(draft.get("model_class_overrides")),
        settings=it.engine.others(it.draft, draft, *([load] if load.value is not it.load.value else [])),
    )


def _of_callers(name: str, *attributes: str) -> Any | None:
    """The local variable of this name that a caller has, with these attributes. vLLM hands a tier only a part of the
    configuration of its engine, and its connector, which makes the tier, has it.
    """
    for frame in callers():
        found = frame.f_locals.get(name)
        if all(hasattr(found, it) for it in attributes):
            return found
    return None


def vllm_config_of_callers() -> Any | None:
    """The configuration of the engine that makes the caller."""
    return _of_callers("vllm_config", "model_config", "kv_transfer_config")


def caches_of_callers() -> Any | None:
    """The specs of the cache of the engine that makes the caller."""
    return _of_callers("kv_cache_config", "kv_cache_groups")


def check_media_are_named(vllm_config: Any, who: str) -> None:
    """Raises ValueError where vLLM names images by a counter, and an adapter keeps blocks beyond the process."""
    if _counts_media(vllm_config):
        raise ValueError(
            f"{who}: with --no-enable-prefix-caching and --mm-processor-cache-gb 0 vLLM names images by a counter, so "
            "that another image of a later start would have the same blocks; leave out one of the two flags"
        )


def _counts_media(vllm_config: Any) -> bool:
    it = _Vllm.of(vllm_config)
    caching = it.cache.get("enable_prefix_caching")
    return bool(it.media) and it.media.get("mm_processor_cache_gb") == 0 and caching in (False, 0)


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
