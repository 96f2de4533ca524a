"""What names KV, between two engines of vLLM that differ in one thing: a store and a handoff give nothing."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import itertools
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from kvferry._engine.hooks import attributes
from kvferry._engine.identity.vllm import of_vllm
from kvferry.vllm import _of_vllm
from safetensors.torch import save_file
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.hasher import MultiModalHasher
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from kvferry_e2e.contract.engine import Engine, run
from kvferry_e2e.contract.offload import Node, _with_both, folder, loaded, node, right
from kvferry_e2e.report import Note, ensure

_LAYOUTS = ("kvferry.vllm._layout.processor", "kvferry.vllm._offload_layout.processor")


def _new_weights(model: Path) -> None:
    file = model / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-4096:] = bytes(4096)
    file.write_bytes(content)


@dataclass
class _Change:
    """How the second engine differs."""

    options: dict[str, Any] = field(default_factory=dict)
    to_model: Callable[[Path], None] = lambda model: None
    processor: str | None = None

    def patches(self) -> ExitStack:
        stack = ExitStack()
        for name in _LAYOUTS if self.processor is not None else ():
            stack.enter_context(mock.patch(name, return_value=self.processor))
        return stack


_CHANGES = {
    "nothing": _Change(),
    "weights under the same path": _Change(to_model=_new_weights),
    "an override of RoPE": _Change({"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}}),
    "the loader's settings": _Change({"load_format": "dummy"}),
    "the kernel of the processor": _Change(processor="another one"),
}


def _handed(
    producer: Engine,
    consumer: Engine,
    prompt: list[int],
    number: int = 0,
    *,
    offers: dict[str, Any] | None = None,
    asks: dict[str, Any] | None = None,
) -> int:
    """Tokens that decode loaded of a prompt. `offers`, `asks`: what the request has besides on either side."""
    offer = producer.submit(f"offer {number}", prompt, 1, {"do_remote_decode": True}, **(offers or {}))
    run(producer, consumer, until=lambda: offer.reason)
    outcome = consumer.submit(f"asked {number}", prompt, 4, dict(offer.params or {}), **(asks or {}))
    run(producer, consumer, until=lambda: outcome.reason)
    right(prompt, outcome)
    ensure(not consumer.wrong(), f"{consumer.wrong()[:3]}")
    return loaded(outcome)


def differ(suite: Any, name: str, note: Note) -> None:
    """A second engine, later started, that differs in one thing."""
    change, prompt = _CHANGES[name], suite.prompts.fresh(160)
    expected = 160 if name == "nothing" else 0
    # The files change while this process runs, which stands for servers that are started after each change.
    began = mock.patch("kvferry._engine.identity.process_began", return_value=math.inf)
    with folder() as directory, tempfile.TemporaryDirectory() as parent, began:
        model = Path(parent) / "prod"
        shutil.copytree(suite.model, model)
        producer = Engine(str(model), policy="recompute")
        try:
            with node(str(model), directory) as first:
                first.answer(prompt)
            change.to_model(model)
            with change.patches():
                consumer = Engine(str(model), policy="recompute", **change.options)
                second = Node(str(model), directory, **change.options)
            try:
                stored, handed = loaded(second.answer(prompt)), _handed(producer, consumer, prompt)
            finally:
                consumer.close()
                second.engine.close()
        finally:
            producer.close()
    ensure((stored, handed) == (expected, expected), f"{stored} tokens of the store, {handed} of the handoff")
    note.text = f"{stored} tokens of the store, {handed} of the handoff"


def counted_images(suite: Any, note: Note) -> None:
    """KVFerryOffloadingSpec refuses to start where vLLM names images by a counter."""
    with folder() as directory, mock.patch("kvferry._engine.identity.vllm._counts_media", return_value=True):
        try:
            with node(suite.model, directory):
                pass
        except ValueError as error:
            ensure("--mm-processor-cache-gb 0" in str(error), f"{error}")
        else:
            ensure(False, "it started")


def outer_policy(suite: Any, note: Note) -> None:
    """Within MultiConnector the policy in force is the outer one's: nothing is warned about."""
    with folder() as directory, mock.patch("kvferry.vllm._offload.logger") as log:
        _with_both(suite.model, directory).close()
        said = [str(call) for call in log.warning.mock_calls]
    ensure(not any("kv_load_failure_policy" in line for line in said), f"{said}")


def running_update(suite: Any, note: Note) -> None:
    """Weights that change in running engines: prompts are handed over between engines that were given one version."""
    producer, consumer = (Engine(str(suite.model), policy="recompute") for _ in range(2))
    numbers = itertools.count()

    def handed() -> int:
        return _handed(producer, consumer, suite.prompts.fresh(160), next(numbers))

    try:
        ensure(handed() == 160, "engines whose weights never changed hand nothing over")
        producer.core.reset_prefix_cache()
        ensure(handed() == 160, "after a reset without the connector nothing is handed over")
        producer.core.reset_prefix_cache(reset_connector=True)
        ensure(handed() == 0, "weights without a name were handed over")
        producer.core.set_weight_version("2")
        ensure(handed() == 0, "weights of version 2 were handed over to those of the start")
        consumer.core.set_weight_version("2")
        ensure(handed() == 160, "engines of one version hand nothing over")
        producer.core.reset_prefix_cache(reset_connector=True)
        ensure(handed() == 0, "weights were handed over under a version that was given before a reset")
        producer.core.set_weight_version("2")
        ensure(handed() == 160, "after a reset, the same version does not count")
        # By its signature vLLM makes a request of what another process has sent.
        taken = inspect.signature(producer.core.add_lora).parameters["lora_request"]
        ensure(taken.annotation is LoRARequest, f"add_lora takes {taken}")
    finally:
        producer.close()
        consumer.close()


def _image(content: float, *, at: int = 3, name: str | None = None, adapter: str | None = None) -> Any:
    """An image of 8 tokens in the first block, as vLLM's renderer makes it, with a hash of its content. `name`: where
    vLLM hashes nothing. `adapter`: where adapters change what the encoder makes of it.
    """
    pixels = torch.full((3, 4, 4), content)
    hashed = MultiModalHasher.hash_kwargs("sha256", image=pixels) if name is None else name
    return MultiModalFeatureSpec(
        data=MultiModalKwargsItem({"pixel_values": MultiModalFieldElem(data=pixels, field=MultiModalBatchedField())}),
        modality="image",
        identifier=hashed if adapter is None else f"{adapter}:{hashed}",
        mm_position=PlaceholderRange(offset=at, length=8),
        mm_hash=hashed,
    )


def _adapter(parent: Path, name: str, weights: float, *, number: int) -> LoRARequest:
    """A request's LoRA adapter, with the files that it was trained to."""
    path = parent / f"{name}-{number}"
    path.mkdir()
    path.joinpath("adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}')
    lora = {f"model.layers.{at}.self_attn.q_proj.lora_A.weight": torch.full((8, 256), weights) for at in range(4)}
    save_file(lora, str(path / "adapter_model.safetensors"))
    return LoRARequest(name, number, str(path))


_Besides = dict[str, Any]


def _besides(parent: Path) -> Iterator[tuple[str, _Besides, _Besides, bool, bool]]:
    """What two requests of one prompt have besides: whether these have equal KV, and whether a store is asked, too.

    Without its caches vLLM names images by a counter, and then there is no store.
    """
    one, other = _adapter(parent, "a", 1.0, number=1), _adapter(parent, "a", 2.0, number=2)
    renamed = _adapter(parent, "b", 1.0, number=3)
    two = [_image(1.0), _image(2.0, at=20)]
    turned = [_image(2.0), _image(1.0, at=20)]
    counted = [_image(1.0, name="renderer0-mm-1-image-0")]
    recounted = [_image(1.0, name="renderer0-mm-7-image-0")]
    miscounted = [_image(2.0, name="renderer0-mm-1-image-0")]
    yield "an image and the same", {"images": [_image(1.0)]}, {"images": [_image(1.0)]}, True, True
    yield "an image and another one", {"images": [_image(1.0)]}, {"images": [_image(2.0)]}, False, True
    yield "an image in two places", {"images": [_image(1.0)]}, {"images": [_image(1.0, at=4)]}, False, True
    yield "an image and none", {"images": [_image(1.0)]}, {}, False, True
    yield "none and an image", {}, {"images": [_image(1.0)]}, False, True
    yield "two images and the same", {"images": two}, {"images": two}, True, True
    yield "two images and these in another order", {"images": two}, {"images": turned}, False, True
    yield "an image that is counted and the same", {"images": counted}, {"images": recounted}, True, False
    yield "images that are counted alike", {"images": counted}, {"images": miscounted}, False, False
    yield "an adapter and the same", {"adapter": one}, {"adapter": one}, True, True
    yield "an adapter and one of other weights", {"adapter": one}, {"adapter": other}, False, True
    yield "an adapter and one of another name", {"adapter": one}, {"adapter": renamed}, False, True
    yield "an adapter and none", {"adapter": one}, {}, False, True
    yield "none and an adapter", {}, {"adapter": one}, False, True
    both: _Besides = {"adapter": one, "images": [_image(1.0, adapter="a")]}
    yield "an adapter with an image and the same", both, both, True, True
    wrong: _Besides = {"adapter": one, "images": [_image(2.0, adapter="a")]}
    yield "an adapter with an image and with another one", both, wrong, False, True


def images_and_adapters(suite: Any, note: Note) -> None:
    """A prompt with equal images and an equal LoRA adapter is loaded by a handoff and from a store, no other one is."""
    options: dict[str, Any] = {"enable_lora": True, "max_loras": 4, "blocks": 256}
    numbers, found, wrong = itertools.count(), 0, []

    def tries(is_equal: bool, call: Callable[[list[int]], int]) -> int:
        """Tokens that were loaded of a prompt. Where an adapter's files were not looked at in time, none are."""
        for _ in range(20 if is_equal else 1):
            tokens = call(suite.prompts.fresh(160))
            if tokens:
                break
        return tokens

    with folder() as directory, tempfile.TemporaryDirectory() as parent, ExitStack() as opened:
        producer, consumer = (Engine(str(suite.model), policy="recompute", **options) for _ in range(2))
        opened.callback(producer.close)
        opened.callback(consumer.close)
        first, second = (opened.enter_context(node(str(suite.model), directory, **options)) for _ in range(2))
        for name, here, there, is_equal, is_stored in _besides(Path(parent)):
            handed = partial(_handed, producer, consumer, offers=here, asks=there)
            tokens = [tries(is_equal, lambda prompt, handed=handed: handed(prompt, next(numbers)))]
            if is_stored:

                def stored(prompt: list[int], here: _Besides = here, there: _Besides = there) -> int:
                    ensure(loaded(first.answer(prompt, **here)) == 0, "a prompt that was never stored was loaded")
                    return loaded(second.answer(prompt, **there))

                tokens.append(tries(is_equal, stored))
            if any(it != (160 if is_equal else 0) for it in tokens):
                wrong.append(f"{name}: {tokens}")
            found += is_equal
        ensure(not wrong, f"tokens that were handed over, and that came from the store: {wrong}")
        for engine in (first, second):
            engine.settled()
    note.text = f"{found} kinds of requests were loaded"


def known_settings(suite: Any, note: Note) -> None:
    """The tables have each setting of this vLLM, and no other; an engine as it comes has none that counts besides."""
    gone, new = [], []
    for module, classes in _of_vllm._SETTINGS.items():
        for name, table in classes.items():
            cls = getattr(importlib.import_module(module), name)
            has = {it.name for it in dataclasses.fields(cls)}
            new += [f"{name}.{it}" for it in sorted(has) if not table.is_known(it)]
            listed = {*table.named, *table.counted, *(it for names in table.harmless.values() for it in names)}
            listed -= set(table.optional)
            gone += [f"{name}.{it}" for it in sorted(listed - has - attributes(cls))]
    ensure(not new and not gone, f"kvferry/_engine/identity/known.py does not know {new}, and vLLM has no {gone}")
    engine = Engine(str(suite.model), policy="recompute")
    try:
        identity = of_vllm(engine.core.vllm_config, None)
    finally:
        engine.close()
    ensure(identity.settings is None, f"an engine as it comes has the settings {identity.settings}")
    note.text = f"{sum(len(it) for it in _of_vllm._READ_BY_IDENTITY.values())} names"


def hashes_of_prompts(suite: Any, note: Note) -> None:
    """vLLM's hash of a block, which names it in a store, has what docs/storage.md says."""
    init_none_hash(sha256)
    hasher = get_request_block_hasher(16, sha256)

    def first(**more: Any) -> bytes:
        tokens = None if "prompt_embeds" in more else list(range(32))
        request = Request("r", tokens, SamplingParams(max_tokens=1), None, block_hasher=hasher, **more)
        return bytes(request.block_hashes[0])

    def image(name: str, offset: int) -> list[Any]:
        place = PlaceholderRange(offset=offset, length=4)
        return [MultiModalFeatureSpec(data=None, modality="image", identifier=name * 64, mm_position=place)]

    found = {
        "nothing": first(),
        "an image": first(mm_features=image("a", 3)),
        "another image": first(mm_features=image("b", 3)),
        "another place": first(mm_features=image("a", 4)),
        "a tenant": first(cache_salt="a"),
        "another tenant": first(cache_salt="b"),
        "an adapter": first(lora_request=LoRARequest("a", 1, "/a")),
        "another adapter": first(lora_request=LoRARequest("b", 2, "/b")),
        "embeddings": first(prompt_embeds=torch.zeros(32, 4)),
        "other embeddings": first(prompt_embeds=torch.ones(32, 4)),
    }
    equal = [(one, other) for one, other in itertools.combinations(found, 2) if found[one] == found[other]]
    ensure(not equal, f"equal hashes of blocks: {equal}")
    ensure(first() == found["nothing"], "a hash is another each time")


def checks(suite: Any) -> Iterator[tuple[str, Callable[[Note], None]]]:
    for name in _CHANGES:
        yield f"engines that differ in {name}", partial(differ, suite, name)
    yield "the settings of vLLM", partial(known_settings, suite)
    yield "vLLM's hash of a block", partial(hashes_of_prompts, suite)
    yield "images and LoRA adapters", partial(images_and_adapters, suite)
    yield "images named by a counter", partial(counted_images, suite)
    yield "the policy of MultiConnector", partial(outer_policy, suite)
    yield "weights that change in running engines", partial(running_update, suite)
