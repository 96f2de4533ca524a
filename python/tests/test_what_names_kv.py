"""Each row of docs/storage.md "What names KV", changed alone: nothing is found in a store, and no handoff is loaded.

A row without a case here fails. The names come from the adapters' own code; the store and the two engines of a handoff
are real. Hashes of blocks are made here as vLLM's are; what vLLM's have is checked with vLLM:
e2e/kvferry_e2e/contract/identity.py.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kvferry
import pytest
import test_connector as handoff
import test_offload as offload
import test_vllm_layout as caches
from kvferry._engine import identity
from kvferry._engine.identity import adapters as _adapters
from kvferry._engine.identity import vllm as vllm_identity
from kvferry._engine.identity.adapters import Adapters
from kvferry._engine.identity.vllm import LayerFacts
from kvferry.connector import prompt_id
from kvferry.vllm import _layout, _offload_layout
from test_identity import Rocm, folder, lora, multimodal, request

PAGE = (Path(__file__).parents[2] / "docs/storage.md").read_text()
PROMPT = handoff.PROMPT


def rows(title: str) -> list[str]:
    """The names of the rows of a table."""
    table = re.search(rf"\| {title} \| \|\n\|---\|---\|\n((?:\|.*\n)+)", PAGE)
    assert table is not None, title
    return [re.sub("[| `]", "", line.split("|")[1]) for line in table[1].splitlines()]


OF_ENGINE, OF_PROMPT, OF_LAYER = (rows(it) for it in ("of the engine", "of the prompt", "of a layer"))


# Names, from the adapters.


def model(at: Path) -> Any:
    """vLLM's configuration of a multimodal model with a draft model and adapters."""
    folder(at / "model")
    folder(at / "draft")
    config = multimodal(at / "model")
    config.lora_config = SimpleNamespace(lora_dtype="bfloat16")
    draft = SimpleNamespace(model=str(at / "draft"), dtype="bfloat16", quantization=None)
    config.speculative_config = SimpleNamespace(draft_model_config=draft)
    return config


def _model(config: Any, at: Path) -> None:
    # Its files are the same.
    folder(at / "other")
    config.model_config.model = str(at / "other")


def _revision(config: Any, at: Path) -> None:
    config.model_config.revision = "v2"


def _weights(config: Any, at: Path) -> None:
    folder(at / "model", b"two")


def _set(part: str, name: str, value: Any) -> Callable[[Any, Path], None]:
    def change(config: Any, at: Path) -> None:
        it = config
        for step in part.split("."):
            it = getattr(it, step)
        setattr(it, name, value)

    return change


def _rope(config: Any, at: Path) -> None:
    """Resolved, as the model's files may have it, too."""
    text = config.model_config.hf_text_config
    config.model_config.hf_text_config = SimpleNamespace(
        rope_parameters={**text.rope_parameters, "rope_theta": 5.0}, max_position_embeddings=131072
    )


ENGINE_CHANGES: dict[str, Callable[[Any, Path], None]] = {
    "model": _model,
    "revision": _revision,
    "weights": _weights,
    "quantization": _set("model_config", "quantization_config", {"ignore": ["lm_head"]}),
    "dtype": _set("model_config", "dtype", "torch.float16"),
    "loading": _set("model_config", "model_class_overrides", {"Llama": "mine:Llama"}),
    "rope": _rope,
    "overrides": _set("model_config", "hf_overrides", {"num_experts_per_tok": 1}),
    "cache": _set("cache_config", "cache_dtype", "fp8_e5m2"),
    # Of the host, and not of the configuration.
    "platform": lambda *_: None,
    "draft": _set("speculative_config.draft_model_config", "quantization", "fp8"),
    "adapters": _set("lora_config", "lora_dtype", "float16"),
    "media": _set("model_config.multimodal_config", "mm_processor_kwargs", {"do_normalize": False}),
    "settings": _set("model_config", "a_setting_of_a_later_version", True),
}


@dataclass(frozen=True)
class Names:
    """What an engine and its request have of the three tables."""

    properties: dict[str, str]
    model: str
    # Of the request, and the store's names of its blocks.
    extra: tuple[str, ...] = ()
    tenant: bytes = b""
    blocks: tuple[bytes, ...] = (b"a" * 32, b"b" * 32)
    # Of the cache.
    layout: bytes = bytes(32)
    shape: tuple[tuple[str, Any], ...] = ()


def of_engine(identity: Any) -> Names:
    return Names(identity.properties(), identity.text())


BASE = of_engine(vllm_identity.of_vllm(multimodal(Path("no/where")), "m"))


# A store and a handoff.


@dataclass
class Store:
    store: kvferry.Store
    memory: kvferry.Blocks


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    agent = kvferry.Agent()
    memory = kvferry.Blocks(agent.register(bytearray(8192), "none"), [0, 4096], 4096)
    with kvferry.Store(agent, tmp_path / "kv", 32 << 20, segment_bytes=1 << 20) as made:
        yield Store(made, memory)
    agent.shutdown()


def stored(store: Store, by: Names, asked: Names) -> int:
    """Blocks that an engine finds of those that another one has put."""

    def space(of: Names) -> Any:
        return store.store.space(of.model, layout=of.layout, tenant=of.tenant)

    space(by).put(list(by.blocks), store.memory)
    return int(space(asked).lookup(list(asked.blocks)))


class Engine(handoff.Engine):
    """With the names of a real one."""

    def __init__(self, names: Names) -> None:
        self._names = names
        super().__init__(dict(names.properties))

    def layout(self) -> str:
        made = json.loads(super().layout())
        made["shapes"][0].update(self._names.shape)
        return json.dumps(made)


def handed(by: Names, to: Names) -> int:
    """Tokens that decode has loaded."""
    prefill, decode = Engine(by), Engine(to)
    try:
        identity = prompt_id(PROMPT, list(by.extra))
        params = {"do_remote_decode": True}
        prefill.scheduler.arrived("p", len(PROMPT), 1, params, identity)
        prefill.step(("p", 0, len(PROMPT), True, [[3, 1, 2]]))
        ended = prefill.scheduler.finished("p", "length", [[3, 1, 2]])
        assert ended is not None
        _, answer = ended
        decode.scheduler.arrived("d", len(PROMPT), 8, answer, prompt_id(PROMPT, list(to.extra)))
        matched = decode.scheduler.matched("d", 0)
        decode.scheduler.allocated("d", matched or 0, [[7, 9, 8]])
        if matched:
            decode.until(lambda: bool(decode.received))
        return matched if matched and not decode.failed else 0
    finally:
        for engine in (prefill, decode):
            engine.worker.close()
            engine.agent.shutdown()


def check(store: Store, one: Names, other: Names, *, in_store: bool = True, in_handoff: bool = True) -> None:
    """Nothing of `one` is for `other`; all of it is for another engine like `one`."""
    if in_store:
        assert (stored(store, one, one), stored(store, one, other)) == (2, 0)
    if in_handoff:
        assert (handed(one, one), handed(one, other)) == (len(PROMPT), 0)


@pytest.mark.parametrize("row", OF_ENGINE)
def test_nothing_of_an_engine_that_differs_in_one_row_is_found_or_loaded(
    row: str, tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = vllm_identity.of_vllm(model(tmp_path), None)
    config = model(tmp_path)
    ENGINE_CHANGES[row](config, tmp_path)
    with monkeypatch.context() as patch:
        if row == "platform":
            Rocm(patch, is_fnuz=True)
        after = vllm_identity.of_vllm(config, None)
    differ = {it.name for it in dataclasses.fields(before) if getattr(before, it.name) != getattr(after, it.name)}
    # The row alone, in the names as they are made and in those that are compared.
    assert row in differ
    alone = dataclasses.replace(before, **{row: getattr(after, row)})
    check(store, of_engine(before), of_engine(alone))


# Requests.


@pytest.fixture(autouse=True)
def _files_are_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for servers that are started after each change; and adapters are looked at in time."""
    monkeypatch.setattr(identity, "process_began", lambda: math.inf)
    for name in ("_WAIT_S", "_WAIT_BURST_S", "_ANSWERS_S"):
        monkeypatch.setattr(_adapters, name, 60.0)


class Tensor:
    """As numpy's or torch's."""

    dtype, shape = "float32", (2,)

    def __init__(self, content: bytes) -> None:
        self._content = content

    def tobytes(self) -> bytes:
        return self._content


def _extra(**given: Any) -> Names:
    version = given.pop("version", None)
    found = vllm_identity.of_vllm_prompt(request(**given), Adapters(), version).extra()
    return dataclasses.replace(BASE, extra=tuple(found))


def _adapter(at: Path) -> tuple[Names, Names]:
    """Other files under one name and path, which have the same keys of vLLM."""
    names = importlib.import_module("kvferry.vllm._offload_adapters")
    keys, made = [b"k" * 32 + bytes(4), b"l" * 32 + bytes(4)], []
    for content in (b"one", b"two"):
        it = lora(folder(at / "lora", content))
        adapters = Adapters()
        adapters.saw(it)
        blocks = names.RequestNames(adapters, it).of(keys)
        made.append(dataclasses.replace(_extra(lora_request=it), blocks=tuple(blocks)))
    return made[0], made[1]


def _hashed(**given: Any) -> Names:
    """With the store's names of blocks by the adapters' own code, from hashes that are made as vLLM's are."""
    names = importlib.import_module("kvferry.vllm._offload_adapters")
    it = request(**given)
    media = [(each.identifier, each.mm_position.offset) for each in it.mm_features or ()]
    embeddings = it.prompt_embeds and hashlib.sha256(it.prompt_embeds.tobytes()).digest()
    hashes, parent = [], b""
    for tokens in (PROMPT[:4], PROMPT[4:8]):
        # The tenant is in the first block, and those after it depend on that one.
        extra = (media, it.cache_salt if not hashes else None, embeddings)
        parent = hashlib.sha256(repr((parent, tokens, extra)).encode()).digest()
        hashes.append(parent)
    blocks = names.RequestNames(None, None).of([block + bytes(4) for block in hashes])
    return dataclasses.replace(_extra(**given), blocks=tuple(blocks))


def _feature(content: str) -> Any:
    return [SimpleNamespace(identifier=content * 64, mm_position=SimpleNamespace(offset=3), data=None)]


PROMPT_CHANGES: dict[str, Callable[[Path], tuple[Names, Names]]] = {
    "adapter": _adapter,
    "media": lambda at: (_hashed(mm_features=_feature("a")), _hashed(mm_features=_feature("b"))),
    "embeddings": lambda at: (_hashed(prompt_embeds=Tensor(b"a")), _hashed(prompt_embeds=Tensor(b"b"))),
    "tenant": lambda at: (_hashed(cache_salt="a"), _hashed(cache_salt="b")),
    "version": lambda at: (_extra(version="1"), _extra(version="2")),
}
# In the store this is in the tenant of the engine's spaces, as the named test shows.
ELSEWHERE = {"version": "test_a_manager_gives_blocks_of_another_version_other_names"}


@pytest.mark.parametrize("row", OF_PROMPT)
def test_nothing_of_a_request_that_differs_in_one_row_is_found_or_loaded(
    row: str, tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    importlib.import_module("vllm_stand_in").install(monkeypatch)
    one, other = PROMPT_CHANGES[row](tmp_path)
    check(store, one, other, in_store=row not in ELSEWHERE)
    if row in ELSEWHERE:
        assert hasattr(importlib.import_module("test_vllm_stores"), ELSEWHERE[row])


# Layers.


def of_layer(*, heads: int = 8, kernel: str = "vec", tokens: int = 16) -> Names:
    """A layer's names by the two adapters' own code."""
    spec = caches.FullAttentionSpec(block_size=tokens)
    tensor = caches.Tensor((caches.BLOCKS, 4, tokens, 32))
    place = _layout.Place(tp_size=1)
    made = json.loads(caches.made({"a.0": tensor}, caches.Caches((spec, ["a.0"])), place, 4, kernel).json)
    facts = {name: LayerFacts(kernel, heads) for name in ("a", "b")}
    config, pages, held = offload.engine(1, 0, heads)
    config.groups[0].tokens_per_block = tokens
    (group,) = _offload_layout.group_layouts(config, pages, held, 8, facts=facts)
    here = heads // 8
    shape = {"encoding": made["shapes"][0]["encoding"], "heads_total": here, "heads": here}
    shape |= {"content": handoff.CONTENT // here, "head_stride": handoff.CONTENT // here}
    return dataclasses.replace(BASE, layout=group.fingerprint, shape=tuple(shape.items()))


def of_state(*shape: int) -> Names:
    """A recurrent layer's. `shape`: of its convolution's state."""
    spec = caches.MambaSpec(shapes=(shape, (2, 3, 4)))
    tensor = caches.Tensor((caches.BLOCKS, 1, 1, 96), size=1)
    made = json.loads(caches.made({"a.0": tensor}, caches.Caches((spec, ["a.0"]))).json)
    config, pages, held = offload.engine(1, 0, 8, certified=False)
    held.kv_cache_groups[0].kv_cache_spec = spec
    (group,) = _offload_layout.group_layouts(config, pages, held, 8)
    encoded = (("encoding", made["shapes"][0]["encoding"]),)
    return dataclasses.replace(BASE, layout=group.fingerprint, shape=encoded)


LAYER_CHANGES: dict[str, Callable[[], tuple[Names, Names]]] = {
    "layout": lambda: (of_layer(), of_layer(tokens=32)),
    "kernel": lambda: (of_layer(), of_layer(kernel="amx")),
    "heads": lambda: (of_layer(), of_layer(heads=16)),
    "states": lambda: (of_state(3, 4), of_state(4, 3)),
}


@pytest.mark.parametrize("row", OF_LAYER)
def test_nothing_of_a_layer_that_differs_in_one_row_is_found_or_loaded(
    row: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_layout, "processor", lambda kernel: f"here {kernel}")
    monkeypatch.setattr(_offload_layout, "processor", lambda: "here")
    check(store, *LAYER_CHANGES[row]())


def test_the_tables_have_a_case_for_each_row() -> None:
    assert set(OF_ENGINE) == set(ENGINE_CHANGES) == {it.name for it in dataclasses.fields(identity.Identity)}
    assert set(OF_PROMPT) == set(PROMPT_CHANGES) == {it.name for it in dataclasses.fields(identity.PromptIdentity)}
    assert set(OF_LAYER) == set(LAYER_CHANGES)
