"""The layout of vLLM's tensors, with objects of the shapes that vLLM 0.32 passes."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
from kvferry import Agent
from kvferry.connector import WorkerHalf
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


def made(tensors: dict[str, Tensor], caches: Caches, place: Place | None = None, heads: int = 4) -> Layout:
    regions = [(at + 1, storage.address, storage.nbytes) for at, storage in enumerate(storages(tensors))]
    return layout(tensors, caches, place or Place(), heads, regions)


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


def test_context_parallel_ranks_share_the_tokens_of_a_block() -> None:
    (group,) = groups(Caches((FullAttentionSpec(), ["a.0"])), Place(dcp_size=2, dcp_rank=1))
    assert group.rule == ("full", 0, 32)


def test_kvferry_takes_the_layout() -> None:
    agent = Agent(listen="127.0.0.1:0")
    region = agent.allocate(1 << 19)
    tensors = {"a.0": Tensor((BLOCKS, 4, 16, 32), base=region.addr)}
    result = layout(tensors, Caches((FullAttentionSpec(), ["a.0"])), Place(), 4, [(region.id, region.addr, 1 << 19)])
    WorkerHalf(agent, result.json, [region], rank=0, timeout=1).close()
    agent.shutdown()


def test_what_is_not_handed_over_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedCacheError, match="CircularBufferSpec"):
        groups(Caches((CircularBufferSpec(), ["a.0"])), Place())
    with pytest.raises(UnsupportedCacheError, match=r"a\.0.*host memory only"):
        storages({"a.0": Tensor((BLOCKS, 4, 16, 32), kind="cuda")})
    with pytest.raises(UnsupportedCacheError, match="not blocks × heads"):
        made({"a.0": Tensor((BLOCKS, 4, 16))}, Caches((FullAttentionSpec(), ["a.0"])))


def test_settings_that_do_not_exist_or_have_wrong_values_are_refused(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match=r"'secret'.*address, model, secret_file, timeout, transports"):
        Settings.of({"secret": "x"})
    with pytest.raises(ValueError, match="timeout must be 1 to 86400"):
        Settings.of({"timeout": 0})
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
