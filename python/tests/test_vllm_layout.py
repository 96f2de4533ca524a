"""The layout of vLLM's tensors, with objects of the shapes that vLLM 0.32 passes."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from kvferry import Agent
from kvferry._engine.identity.vllm import LayerFacts, layer_facts
from kvferry.connector import WorkerHalf
from kvferry.vllm import _layout
from kvferry.vllm._layout import Layout, Place, UnsupportedCacheError, groups, in_order, layout, storages
from kvferry.vllm._settings import Settings

BLOCKS = 8


@dataclass
class FullAttentionSpec:
    block_size: int = 16
    dtype: str = "torch.float32"
    dcp_sharded: bool = True


@dataclass
class SlidingWindowSpec(FullAttentionSpec):
    sliding_window: int = 64


@dataclass
class MambaSpec:
    block_size: int = 2048
    # Of a convolution, steps before channels, and of the recurrence.
    shapes: tuple[tuple[int, ...], ...] = ((3, 4), (2, 3, 4))
    dtypes: tuple[str, ...] = ("torch.float32", "torch.float16")
    state_content_size_bytes: int = 96


@dataclass
class CircularBufferSpec:
    block_size: int = 16


@dataclass
class Tensor:
    """A view of an allocation at `base`, `offset` bytes into it."""

    shape: tuple[int, ...]
    base: int = 1 << 20
    offset: int = 0
    size: int = 4
    kind: str = "cpu"
    strides: tuple[int, ...] = field(default=())

    def __post_init__(self) -> None:
        self.strides = self.strides or tuple(prod(self.shape[at + 1 :]) for at in range(len(self.shape)))
        self.device = SimpleNamespace(type=self.kind)

    def dim(self) -> int:
        return len(self.shape)

    def stride(self, axis: int | None = None) -> Any:
        return self.strides if axis is None else self.strides[axis]

    def element_size(self) -> int:
        return self.size

    def data_ptr(self) -> int:
        return self.base + self.offset

    def untyped_storage(self) -> Any:
        return SimpleNamespace(data_ptr=lambda: self.base, nbytes=lambda: 1 << 19)


class Caches:
    num_blocks = BLOCKS

    def __init__(self, *of: tuple[Any, list[str]]) -> None:
        self.transfer_groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=names) for spec, names in of]
        self.transfer_group_ids = tuple(range(len(of)))

    @cached_property
    def transfer_group_index_by_layer(self) -> dict[str, int]:
        return {name: at for at, group in enumerate(self.transfer_groups) for name in group.layer_names}


@pytest.fixture(autouse=True)
def _one_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    # The tests run without torch, which knows what the processor can do.
    monkeypatch.setattr(_layout, "processor", lambda kernel: f"here {kernel}")


def made(
    tensors: dict[str, Tensor],
    caches: Caches,
    place: Place | None = None,
    heads: int | None = 4,
    kernel: str | None = "vec",
) -> Layout:
    regions = [(at + 1, storage.address, storage.nbytes) for at, storage in enumerate(storages(tensors))]
    facts = {name: LayerFacts(kernel, heads) for name in tensors}
    return layout(tensors, caches, place or Place(), facts, regions)


def test_layers_are_in_the_order_of_computing_and_lie_where_their_tensors_do() -> None:
    names = [f"model.layers.{at}.attn" for at in (10, 9, 1)]
    tensors = {name: Tensor((BLOCKS, 4, 16, 32), offset=65536 * at) for at, name in enumerate(names)}
    result = made(tensors, Caches((FullAttentionSpec(), names)))
    assert result.layers == [names[2], names[1], names[0]] == in_order(names)
    parts = json.loads(result.json)
    assert [layer["planes"][0]["base"] for layer in parts["layers"]] == [131072, 65536, 0]
    assert len(parts["shapes"]) == len(parts["regions"]) == 1


def test_a_block_of_a_head_on_the_cpu_is_one_row_since_its_keys_precede_its_values() -> None:
    shape = json.loads(made({"a.0": Tensor((BLOCKS, 4, 16, 32))}, Caches((FullAttentionSpec(), ["a.0"]))).json)[
        "shapes"
    ][0]
    assert (shape["rows"], shape["content"], shape["block_stride"]) == (1, 16 * 32 * 4, 4 * 16 * 32 * 4)


@pytest.mark.parametrize(
    ("size", "local", "expected"),
    [(1, 4, [(4, 0, 4)]), (2, 2, [(4, 0, 2), (4, 2, 2)]), (8, 1, [(4, at // 2, 1) for at in range(8)])],
)
def test_each_tensor_parallel_rank_has_its_heads(size: int, local: int, expected: list[tuple[int, int, int]]) -> None:
    held = []
    for rank in range(size):
        tensors = {"a.0": Tensor((BLOCKS, local, 16, 32))}
        place = Place(tp_rank=rank, tp_size=size)
        (shape,) = json.loads(made(tensors, Caches((FullAttentionSpec(), ["a.0"])), place).json)["shapes"]
        held.append((shape["heads_total"], shape["head_start"], shape["heads"]))
    assert held == expected


class QKVParallelLinear:
    """As vLLM's, in its module."""

    def __init__(self, prefix: str, heads: int) -> None:
        self.prefix, self.total_num_kv_heads = prefix, heads


class Fused(QKVParallelLinear):
    pass


class Proxy:
    """As weakref's and transformers': asking what it is runs its code."""

    @property
    def __class__(self) -> Any:
        raise AssertionError("its code is run")


@pytest.fixture
def linear(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("vllm.model_executor.layers.linear")
    vars(module)["QKVParallelLinear"] = QKVParallelLinear
    monkeypatch.setitem(sys.modules, module.__name__, module)


def config_of(**layers: Any) -> Any:
    return SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))


@pytest.mark.usefixtures("linear")
def test_heads_of_a_layer_are_those_of_the_projection_beside_it() -> None:
    """An attention layer of vLLM does not know its heads on all ranks, and no list has the projections."""
    layers = [f"model.layers.{at}.self_attn.attn" for at in range(4)]
    keep = [
        QKVParallelLinear("model.layers.0.self_attn.qkv_proj", 8),
        Fused("model.layers.1.self_attn.qkv_proj", 2),
        # Of two parts of a layer it is not known which one has the cache.
        QKVParallelLinear("model.layers.2.self_attn.qkv_proj", 8),
        QKVParallelLinear("model.layers.2.self_attn.other_proj", 4),
        Proxy(),
    ]
    facts = layer_facts(config_of(), layers, tp_size=4)
    assert [facts[name].kv_heads for name in layers] == [8, 2, None, None]
    # One rank has all heads.
    assert {it.kv_heads for it in layer_facts(config_of(), layers).values()} == {None}
    del keep


def test_the_kernel_of_a_layer_is_the_one_that_the_layer_has() -> None:
    facts = layer_facts(config_of(a=SimpleNamespace(isa="amx"), b=SimpleNamespace()), ["a", "b", "c"])
    assert [facts[name].kernel for name in "abc"] == ["amx", None, None]


@pytest.mark.usefixtures("linear")
def test_layers_of_unequal_heads_are_held_by_the_ranks_that_their_projections_say() -> None:
    """8 heads are on 4 ranks in pairs; of 2 heads, each is on 2 ranks, which vLLM's spec alone does not tell."""
    names = ["layers.0.attn", "layers.1.attn"]
    keep = [QKVParallelLinear("layers.0.qkv_proj", 8), QKVParallelLinear("layers.1.qkv_proj", 2)]
    found: dict[str, list[tuple[int, int, int]]] = {name: [] for name in names}
    for rank in range(4):
        tensors = {name: Tensor((BLOCKS, 2 - at, 16, 32), offset=65536 * at) for at, name in enumerate(names)}
        facts = layer_facts(config_of(), names, tp_size=4)
        regions = [(at + 1, it.address, it.nbytes) for at, it in enumerate(storages(tensors))]
        place = Place(tp_rank=rank, tp_size=4)
        parts = json.loads(layout(tensors, Caches((FullAttentionSpec(), names)), place, facts, regions).json)
        for it in parts["layers"]:
            shape = parts["shapes"][it["planes"][0]["shape"]]
            found[it["name"]].append((shape["heads_total"], shape["head_start"], shape["heads"]))
    assert found[names[0]] == [(8, 0, 2), (8, 2, 2), (8, 4, 2), (8, 6, 2)]
    assert found[names[1]] == [(2, 0, 1), (2, 0, 1), (2, 1, 1), (2, 1, 1)]
    del keep


def held(layer_heads: int, size: int, *, known: bool) -> list[tuple[int, int, int]]:
    """Heads in total, the first one and how many, of each rank, for a layer with so many on all ranks."""
    found = []
    for rank in range(size):
        tensors = {"a.0": Tensor((BLOCKS, max(1, layer_heads // size), 16, 32))}
        of = made(tensors, Caches((FullAttentionSpec(), ["a.0"])), Place(rank, size), layer_heads if known else None)
        (shape,) = json.loads(of.json)["shapes"]
        found.append((shape["heads_total"], shape["head_start"], shape["heads"]))
    return found


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("heads", [1, 2, 4, 8])
@pytest.mark.parametrize("known", [True, False])
def test_a_rank_never_names_a_head_that_it_does_not_have_whatever_other_layers_have(
    size: int, heads: int, known: bool
) -> None:
    """Heads that are not known are named so that only engines of one parallelism fit."""
    for rank, (total, first, count) in enumerate(held(heads, size, known=known)):
        assert count == max(1, heads // size)
        if total == heads:
            assert first == rank * heads // size // count * count
        else:
            assert (known, total, first) == (False, size, rank)


def test_another_kernel_of_the_processor_is_another_encoding() -> None:
    def encodings(kernel: str) -> Any:
        of = made({"a.0": Tensor((BLOCKS, 4, 16, 32))}, Caches((FullAttentionSpec(), ["a.0"])), kernel=kernel)
        return [shape["encoding"] for shape in json.loads(of.json)["shapes"]]

    assert encodings("amx") != encodings("vec") == encodings("vec")


def test_windows_and_states_are_groups_of_their_own_kind() -> None:
    caches = Caches((FullAttentionSpec(), ["a.0"]), (SlidingWindowSpec(), ["a.1"]), (MambaSpec(), ["a.2"]))
    assert [group.rule for group in groups(caches, Place())] == [
        ("full", 0, 16),
        ("window", 64, 16),
        ("state", 0, 2048),
    ]
    state = Tensor((BLOCKS, 1, 1, 96), base=1 << 22, size=1)
    result = made({"a.2": state}, Caches((MambaSpec(), ["a.2"])), Place(tp_rank=1, tp_size=2))
    (shape,) = json.loads(result.json)["shapes"]
    assert (shape["heads_total"], shape["head_start"], shape["heads"], shape["content"]) == (2, 1, 1, 96)


def test_a_convolutions_state_with_its_axes_swapped_is_another_encoding() -> None:
    def encoding(*shapes: tuple[int, ...]) -> str:
        spec = MambaSpec(shapes=shapes)
        state = Tensor((BLOCKS, 1, 1, 96), base=1 << 22, size=1)
        (shape,) = json.loads(made({"a.2": state}, Caches((spec, ["a.2"]))).json)["shapes"]
        return str(shape["encoding"])

    # As releases before name it.
    assert encoding((3, 4), (2, 3, 4)) == "state:float32,float16"
    assert encoding((4, 3), (2, 3, 4)) == "state:float32,float16:DS"
    # Mamba's first version has a recurrence of two axes; linear attention has no convolution.
    assert encoding((3, 4), (4, 2)) == encoding((4, 3, 3)) == "state:float32,float16"


def test_context_parallel_ranks_share_the_tokens_of_a_block() -> None:
    (group,) = groups(Caches((FullAttentionSpec(), ["a.0"])), Place(dcp_size=2, dcp_rank=1))
    assert group.rule == ("full", 0, 32)


def test_kvferry_takes_the_layout() -> None:
    agent = Agent(listen="127.0.0.1:0")
    region = agent.allocate(1 << 19)
    tensors = {"a.0": Tensor((BLOCKS, 4, 16, 32), base=region.addr)}
    result = layout(tensors, Caches((FullAttentionSpec(), ["a.0"])), Place(), {}, [(region.id, region.addr, 1 << 19)])
    WorkerHalf(agent, result.json, [region], rank=0, timeout=1).close()
    agent.shutdown()


def test_what_is_not_handed_over_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedCacheError, match="CircularBufferSpec"):
        groups(Caches((CircularBufferSpec(), ["a.0"])), Place())
    with pytest.raises(UnsupportedCacheError, match=r"a\.0.*memory of the host and of CUDA devices only"):
        storages({"a.0": Tensor((BLOCKS, 4, 16, 32), kind="xpu")})
    with pytest.raises(UnsupportedCacheError, match="not blocks × heads"):
        made({"a.0": Tensor((BLOCKS, 4, 16))}, Caches((FullAttentionSpec(), ["a.0"])))


def test_settings_that_do_not_exist_or_have_wrong_values_are_refused(tmp_path: Any) -> None:
    with pytest.raises(
        ValueError, match=r"'secret'.*address, idle_share, model, producers, secret_file, timeout, transports"
    ):
        Settings.of({"secret": "x"})
    with pytest.raises(ValueError, match="timeout must be 1 to 86400"):
        Settings.of({"timeout": 0})
    for share in (0, 1.5, True, "half"):
        with pytest.raises(ValueError, match="idle_share must be more than 0 and at most 1"):
            Settings.of({"idle_share": share})
    assert (Settings.of({}).idle_blocks(1000), Settings.of({"idle_share": 0.001}).idle_blocks(100)) == (500, 1)
    empty = tmp_path / "secret"
    empty.write_bytes(b"\n")
    with pytest.raises(ValueError, match="is empty"):
        Settings.of({"secret_file": str(empty)}).secret()


@pytest.mark.parametrize(
    ("config", "environ", "expected"),
    [
        ({}, {}, None),
        ({}, {"VLLM_HOST_IP": "10.0.0.1"}, "10.0.0.1:0"),
        ({}, {"VLLM_HOST_IP": "fe80::1"}, "[fe80::1]:0"),
        ({}, {"VLLM_HOST_IP": "10.0.0.1", "KVFERRY_LISTEN": "10.0.0.2:0"}, None),
        ({"address": "host:7"}, {"VLLM_HOST_IP": "10.0.0.1"}, "host:7"),
        ({"address": "[::1]:7"}, {}, "[::1]:7"),
    ],
)
def test_the_address_comes_from_the_setting_then_from_vllms_own(
    config: dict[str, Any], environ: dict[str, str], expected: str | None
) -> None:
    assert Settings.of(config).listen(environ) == expected


@pytest.mark.parametrize("name", ["KVFERRY_SECRET", "KVFERRY_SECRET_FILE"])
def test_a_secret_is_known_from_the_setting_and_from_the_environment(name: str) -> None:
    assert not Settings.of({}).has_secret({})
    assert Settings.of({}).has_secret({name: "x"})
    assert Settings.of({"secret_file": "/secret"}).has_secret({})
