"""What names KV, for every adapter: the model as it is computed, and what of a request is not in its tokens.

If two engines could differ in a thing and compute other KV for the same tokens, it is in `Identity` or
`PromptIdentity`. An adapter fills in every field; there are no defaults, so that a new field is a question to each of
them. Engines' settings are read through the tables of `kvferry._known_settings`: one that no table has is in the field
`settings`. docs/storage.md has the table.
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

from kvferry import _known_settings as known
from kvferry._adapters import Adapters, folder_of
from kvferry._known_settings import Settings, UnnamedError, plain
from kvferry._weights import has_weights, processors_of, sample_of

logger = logging.getLogger("kvferry")
# vLLM shows lines of level info below its own name alone.
_vllm_logger = logging.getLogger("vllm.kvferry")

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
    # Where the kernels are not those of NVIDIA or of a CPU: what gives number formats and pages another meaning.
    platform: str | None
    # The model of speculative decoding, where it has KV and weights of its own.
    draft: str | None
    # Adapters that are loaded at start and that a request's identity does not tell apart.
    adapters: str | None
    # How images, audio and video are prepared and encoded, where a request's identity has only what they were before.
    media: str | None
    # Every other setting of the engine that is not known to leave KV as it is.
    settings: str | None

    def properties(self) -> dict[str, str]:
        """For the handshake of two engines, which compares what both give: every field is given."""
        return {it.name: bounded(_text(getattr(self, it.name))) for it in fields(self)}

    def text(self) -> str:
        """For the names of a store. Without these three they are those of earlier releases."""
        given = self.properties()
        for name in ("media", "platform", "settings"):
            if getattr(self, name) is None:
                del given[name]
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


def hash_of(value: Any, engine: str | None = None) -> str:
    """A hash of plain data, whatever the order of its mappings. `engine`: what no other engine has, which names values
    that have no name of their own, as functions. Without it they are a ValueError.
    """
    try:
        text = json.dumps(plain(value), sort_keys=True)
    except (UnnamedError, RecursionError) as error:
        if engine is None:
            raise
        logger.warning("kvferry: no other engine shares this one's KV, because a setting has no name: %s", error)
        text = engine
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _others(engine: str, *settings: Settings, log: logging.Logger = logger) -> str | None:
    """The field `settings`."""
    found = {name: value for it in settings for name, value in it.others().items()}
    if found:
        log.info("kvferry: engines share KV only if they agree on %s", ", ".join(sorted(found)))
    return _joined(**{name: hash_of(value, engine) for name, value in sorted(found.items())})


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
            "kvferry: files of %s, or folders on the way to them, have changed since this process began (%s), so that "
            "the weights it has loaded may be others: until it is started again, no other engine shares its KV. Put "
            "models where nothing else is made on the way to them, or set model",
            name,
            found.what,
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
        found = projections.get(name.rpartition(".")[0], set())
        heads = next(iter(found)) if len(found) == 1 else None
        kernel = getattr(context.get(name), "isa", None)
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
    def engine(self) -> str:
        """All ranks of an engine have the same, and no other engine."""
        return f"{self.id} {self.all.get('instance_id') or ''}"

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
        revision, weights = _vllm_weights(it, it.model, it.load)
    return Identity(
        model=named or it.source(it.model),
        revision=revision,
        weights=weights,
        quantization=_vllm_quantization(it.model, it.engine),
        dtype=str(it.model.get("dtype")).removeprefix("torch."),
        loading=_joined(
            format=_maybe(it.load.get("load_format")),
            extra=_hash_if(it.load.get("model_loader_extra_config"), it.engine),
            code=it.model.get("code_revision"),
            implementation=_maybe(it.model.get("model_impl")),
            classes=_hash_if(it.model.get("model_class_overrides"), it.engine),
        ),
        rope=_rope(it.model, it.engine),
        overrides=_vllm_overrides(it.model, it.engine),
        cache=_joined(
            dtype=_maybe(it.cache.get("cache_dtype")),
            state=_maybe(it.cache.get("mamba_cache_dtype")),
            ssm=_maybe(it.cache.get("mamba_ssm_cache_dtype")),
            skipped=_hash_if(it.cache.get("kv_cache_dtype_skip_layers"), it.engine),
            indexer=_unless(it.attention.get("indexer_kv_dtype"), "auto"),
            # Scales that an engine measures are its own: no other engine has them.
            scales=it.id if it.cache.get("calculate_kv_scales") else None,
        ),
        platform=_vllm_platform(),
        draft=_vllm_draft(it),
        adapters=_vllm_lora(it),
        media=_vllm_media(it, named),
        settings=_others(
            it.engine,
            *(it.all, it.model, it.load, it.cache, it.attention, it.mamba, it.lora, *_vllm_serves_media(it)),
            log=_vllm_logger,
        ),
    )


def _is_rocm() -> bool:
    """Kernels of ROCm take `fp8_e5m2` for e4m3, and have the pages of sparse attention's indexer in tiles."""
    return bool(getattr(getattr(sys.modules.get("torch"), "version", None), "hip", None))


# FP8 of MI300 and MI325: half of what the same bits mean elsewhere.
_FNUZ = "rocm fnuz"


def _vllm_platform() -> str | None:
    if not _is_rocm():
        return None
    return _FNUZ if importlib.import_module("vllm.platforms").current_platform.is_fp8_fnuz() else "rocm"


def _sglang_platform() -> str | None:
    if not _is_rocm():
        return None
    kind = importlib.import_module("sglang.srt.mem_cache.kv_cache_dtype").fp8_dtype
    return _FNUZ if str(kind).endswith("fnuz") else "rocm"


def _vllm_quantization(model: Settings, engine: str) -> str | None:
    method, parts = _maybe(model.get("quantization")), model.get("quantization_config")
    return method if not parts else f"{method} {hash_of(parts, engine)}"


def _vllm_overrides(model: Settings, engine: str) -> str | None:
    given, folder, format_ = (model.get(it) for it in ("hf_overrides", "hf_config_path", "config_format"))
    if callable(given):
        # A function is named by what it has made of the configuration.
        given = _configuration(model.get("hf_config")) or [engine]
    return _joined(
        given=_hash_if(given, engine),
        configuration=_hash_if([folder, _digest(folder)] if folder else None, engine),
        format=_unless(format_, "auto"),
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


def _vllm_lora(it: _Vllm) -> str | None:
    """What an engine makes of any adapter."""
    dtype = str(it.lora.get("lora_dtype") or "").removeprefix("torch.")
    return _joined(
        dtype=_unless(_unless(dtype, "auto"), str(it.model.get("dtype")).removeprefix("torch.")),
        tower=it.lora.get("enable_tower_connector_lora") or None,
    )


def _vllm_serves_media(it: _Vllm) -> list[Settings]:
    return [it.media] if it.media and not it.media.get("language_model_only") else []


def _vllm_media(it: _Vllm, named: str | None) -> str | None:
    """vLLM names an image by its content and by what its request says of processing, not by what the engine does."""
    if not _vllm_serves_media(it):
        return None
    media = it.media
    encoder, scales = media.get("mm_encoder_attn_dtype"), media.get("mm_encoder_fp8_scale_path")
    rate = media.get("video_pruning_rate")
    folder = folder_of(it.model.get("model"), it.model.get("revision"), it.load.get("download_dir"))
    return _joined(
        # The operator's name of the model stands for what is in its folder.
        files=processors_of(folder) if named is None else None,
        arguments=_hash_if(media.get("mm_processor_kwargs"), it.engine),
        normalize=media.get("mm_device_do_normalize"),
        pruning=f"{media.get('video_pruning_method')} {rate}" if rate else None,
        encoder=encoder,
        # Scales that an engine measures are its own.
        scales=(_digest(scales) if scales else it.id) if encoder else None,
    )


def _vllm_weights(it: _Vllm, model: Settings, load: Settings) -> tuple[str | None, str | None]:
    """Revision and weights."""
    source, name = it.source(model), model.get("model")
    revision, place = model.get("revision"), load.get("download_dir")
    code = bool(model.get("trust_remote_code"))
    commit, weights = _sampled(source, revision, place, engine=it.engine, code=code, made=_is_dummy(load))
    elsewhere = [_digest(place) for place in _vllm_places(load)]
    if source != name or elsewhere:
        weights = hash_of([weights, _digest(folder_of(name, revision, place), code=code), elsewhere])
    return commit, weights


def _digest(path: str | Path | None, *, code: bool = False) -> str | None:
    found = sample_of(path, code=code)
    return found.digest if found else None


def _is_dummy(load: Settings) -> bool:
    return _maybe(load.get("load_format")) == "dummy"


def _vllm_places(load: Settings) -> list[str]:
    """Where a loader reads weights that are not in the model's folder."""
    if _maybe(load.get("load_format")) != "tensorizer":
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
    """Raises ValueError where new weights would have the name of the old ones, and an adapter keeps blocks beyond the
    process. `named`: the setting `model`.
    """
    it = _Vllm.of(vllm_config)
    if named is not None or _is_dummy(it.load):
        return
    source = it.source(it.model)
    folder = folder_of(source, it.model.get("revision"), it.load.get("download_dir"))
    places = _vllm_places(it.load)
    _check_are_named(who, source, any(map(has_weights, places)) if places else _has_name(folder))


def check_sglang_weights_are_named(config: Any, arguments: Any | None, named: str | None, who: str) -> None:
    """As `check_weights_are_named`."""
    given = Settings(arguments, known.SGLANG)
    if named is None and given.get("load_format") != "dummy":
        source = str(given.get("model_path") or config.model_name)
        folder = folder_of(source, given.get("revision"), given.get("download_dir"))
        _check_are_named(who, source, _has_name(folder))


def check_trtllm_weights_are_named(llm_args: Any, named: str | None, who: str) -> None:
    """As `check_weights_are_named`."""
    given = Settings(llm_args, known.TRTLLM)
    if named is None and not _is_trtllm_dummy(given):
        source = str(given.get("model"))
        _check_are_named(who, source, _has_name(folder_of(source, given.get("revision"))))


def _is_trtllm_dummy(given: Settings) -> bool:
    load_format = given.get("load_format")
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


def _unless(value: Any, default: Any) -> str | None:
    given = _maybe(value)
    return None if given == default else given


def _hash_if(value: Any, engine: str) -> str | None:
    return hash_of(value, engine) if value else None


def _rope(model: Settings, engine: str) -> str | None:
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
    return " ".join([hash_of(found, engine), *branches])


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


def _vllm_draft(it: _Vllm) -> str | None:
    draft = Settings(it.draft.get("draft_model_config"), known.VLLM_MODEL)
    # Drafts by n-grams have no KV. Layers of the model itself have its weights, and decode may use them alone.
    is_own = draft and draft.value is not it.model.value and draft.get("model") != it.model.get("model")
    if not is_own:
        method, cache = it.draft.get("quantization"), it.draft.get("kv_cache_dtype")
        return _joined(
            quantization=_unless(method, _maybe(it.model.get("quantization"))) if draft else None,
            cache=_unless(cache, _maybe(it.cache.get("cache_dtype"))) if draft else None,
        )
    load = Settings(it.draft.get("draft_load_config"), known.VLLM_LOAD) or it.load
    revision, weights = _vllm_weights(it, draft, load)
    return _joined(
        model=it.source(draft),
        revision=revision,
        weights=weights,
        quantization=_vllm_quantization(draft, it.engine),
        rope=_rope(draft, it.engine),
        cache=_maybe(it.draft.get("kv_cache_dtype")),
        code=draft.get("code_revision"),
        classes=_hash_if(draft.get("model_class_overrides"), it.engine),
        settings=_others(
            it.engine, it.draft, draft, *([load] if load.value is not it.load.value else []), log=_vllm_logger
        ),
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


def caches_of_callers() -> Any | None:
    """The specs of the cache of the engine that makes an object, which vLLM does not give to a tier."""
    frame = sys._getframe(1)
    while frame is not None:
        caches = frame.f_locals.get("kv_cache_config")
        if hasattr(caches, "kv_cache_groups"):
            return caches
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


# SGLang.

# Arguments of the server by which weights are made, with values that say nothing.
_SGLANG_LOADING = {
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
    given = Settings(arguments, known.SGLANG)
    name = given.get("model_path") or config.model_name
    revision = weights = None
    if named is None:
        revision, weights = _sampled(
            name,
            given.get("revision"),
            given.get("download_dir"),
            engine=_sglang_engine(),
            code=bool(given.get("trust_remote_code")),
            made=given.get("load_format") == "dummy",
        )
    return Identity(
        model=named or str(config.model_name),
        revision=revision,
        weights=weights,
        quantization=_joined(
            method=given.get("quantization"),
            parameters=given.get("quantization_param_path"),
        ),
        dtype=str(given.get("dtype")),
        loading=_joined(**{it: _unless(given.get(it), default) for it, default in _SGLANG_LOADING.items()}),
        # It is in the model's folder and in the overrides; SGLang chooses LongRoPE's factors by the prompt.
        rope=None,
        overrides=_maybe(given.get("json_model_override_args")),
        cache=_joined(dtype=given.get("kv_cache_dtype")),
        platform=_sglang_platform(),
        # In the layout of the pools that have KV of it: the others are the same with another draft model.
        draft=None,
        # SGLang's keys have an adapter's name and path.
        adapters=_sglang_adapters(given),
        media=_sglang_media(given, str(name) if named is None else None),
        settings=_others(_sglang_engine(), given),
    )


def _sglang_media(given: Settings, name: str | None) -> str | None:
    """SGLang's keys have a hash of each image, of some models as it was before it was prepared. `name`: of the model,
    unless the operator's name stands for it.
    """
    settings = {it: given.get(it) for it in _SGLANG_MEDIA}
    folder = folder_of(name, given.get("revision"), given.get("download_dir"))
    return _joined(
        files=processors_of(folder),
        # Without the defaults, which models without images have, too.
        arguments=_hash_if(
            {it: value for it, value in settings.items() if value not in (None, False, {}, "auto")}, _sglang_engine()
        ),
    )


def sglang_draft(arguments: Any | None) -> str | None:
    given = Settings(arguments, known.SGLANG)
    name = given.get("speculative_draft_model_path")
    revision, weights = _sampled(name, given.get("speculative_draft_model_revision"), engine=_sglang_engine())
    return _joined(**{it: given.get(it) for it in _SGLANG_DRAFT}, commit=revision, weights=weights)


def _sglang_engine() -> str:
    """One process starts all ranks of an engine."""
    return began(os.getppid())


def _sglang_adapters(given: Settings) -> str | None:
    paths = [_sglang_path(it) for it in given.get("lora_paths") or ()]
    return _hash_if([[path, _digest(folder_of(path))] for path in paths], _sglang_engine())


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
    given = Settings(llm_args, known.TRTLLM)
    quantisation = Settings(given.get("quant_config"), known.TRTLLM_QUANTIZATION)
    cache = Settings(given.get("kv_cache_config"), known.TRTLLM_CACHE)
    # Several ranks are started by one process, and a single one may be started by what starts other engines.
    engine = began(os.getppid() if ranks > 1 else None)
    name = given.get("model")
    revision = weights = None
    if named is None:
        revision, weights = _sampled(
            str(name) if name is not None else None,
            given.get("revision"),
            engine=engine,
            code=bool(given.get("trust_remote_code")),
            made=_is_trtllm_dummy(given),
        )
    return Identity(
        model=named or str(name),
        revision=revision,
        weights=weights,
        quantization=_joined(
            weights=_maybe(quantisation.get("quant_algo")),
            cache=_maybe(quantisation.get("kv_cache_quant_algo")),
            others=_others(engine, quantisation),
        ),
        dtype=str(given.get("dtype")),
        loading=_joined(format=_maybe(given.get("load_format"))),
        # RoPE is in the model's folder and in its overrides. LongRoPE's factors follow from the length.
        rope=_joined(length=given.get("max_seq_len")),
        overrides=_hash_if(given.get("model_kwargs"), engine),
        cache=_joined(dtype=_maybe(cache.get("dtype"))),
        # TensorRT-LLM runs on NVIDIA's alone.
        platform=None,
        draft=None,
        adapters=None,
        media=None,
        settings=_others(engine, given, cache),
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
