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
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
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


def _handed(producer: Engine, consumer: Engine, prompt: list[int], number: int = 0) -> int:
    """Tokens that decode loaded of a prompt."""
    offer = producer.submit(f"offer {number}", prompt, 1, {"do_remote_decode": True})
    run(producer, consumer, until=lambda: offer.reason)
    outcome = consumer.submit(f"asked {number}", prompt, 4, dict(offer.params or {}))
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
    yield "images named by a counter", partial(counted_images, suite)
    yield "the policy of MultiConnector", partial(outer_policy, suite)
    yield "weights that change in running engines", partial(running_update, suite)
