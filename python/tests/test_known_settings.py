"""Settings of engines: one that changes KV is in a field of its own or in `settings`, and an unknown one counts."""

from __future__ import annotations

import copy
import dataclasses
import enum
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from types import SimpleNamespace
from typing import Any

import pytest
from kvferry._engine.identity import Identity
from kvferry._engine.identity import known as _known_settings
from kvferry._engine.identity import sglang as sglang_identity
from kvferry._engine.identity import trtllm as trtllm_identity
from kvferry._engine.identity import vllm as vllm_identity
from kvferry._engine.identity.known import Settings, Table, UnnamedError, fields_of, plain

VLLM_TABLES = {
    "": _known_settings.VLLM,
    "model_config": _known_settings.VLLM_MODEL,
    "load_config": _known_settings.VLLM_LOAD,
    "cache_config": _known_settings.VLLM_CACHE,
    "attention_config": _known_settings.VLLM_ATTENTION,
    "mamba_config": _known_settings.VLLM_MAMBA,
    "lora_config": _known_settings.VLLM_LORA,
    "speculative_config": _known_settings.VLLM_DRAFT,
    "model_config.multimodal_config": _known_settings.VLLM_MEDIA,
}


class Configuration(SimpleNamespace):
    """A model's, as transformers has it."""

    def to_dict(self) -> dict[str, Any]:
        return copy.deepcopy(vars(self))


def vllm(engine_id: str = "engine") -> Any:
    """An engine of vLLM with images, adapters and a draft model."""
    model = SimpleNamespace(
        model="no/where",
        quantization=None,
        dtype="torch.bfloat16",
        hf_overrides={},
        hf_config=Configuration(layers=2, _name_or_path="/here"),
        hf_text_config=SimpleNamespace(rope_theta=1.0),
        max_model_len=4096,
        multimodal_config=SimpleNamespace(language_model_only=False),
    )
    return SimpleNamespace(
        model_config=model,
        load_config=SimpleNamespace(load_format="auto"),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        attention_config=SimpleNamespace(indexer_kv_dtype="auto"),
        mamba_config=SimpleNamespace(),
        lora_config=SimpleNamespace(lora_dtype="torch.bfloat16"),
        speculative_config=SimpleNamespace(draft_model_config=SimpleNamespace(model="no/draft", dtype="bfloat16")),
        kv_transfer_config=SimpleNamespace(engine_id=engine_id),
    )


def changed(config: Any, part: str, name: str, value: Any) -> Any:
    at = config
    for step in part.split(".") if part else ():
        at = getattr(at, step)
    setattr(at, name, value)
    return config


def differences(one: Identity, other: Identity) -> set[str]:
    old, new = one.properties(), other.properties()
    assert (one.text() == other.text()) == (old == new)
    return {name for name in old if old[name] != new[name]}


def of_vllm(config: Any) -> Identity:
    return vllm_identity.of_vllm(config, "named")


@dataclass
class Quantization:
    """As vLLM's `QuantizationConfigArgs`."""

    linear: str | None = None
    moe: str | None = None
    ignore: list[str] = field(default_factory=list)
    targets: dict[str, str] | None = None


@pytest.mark.parametrize(
    ("expected", "part", "name", "value"),
    [
        ("quantization", "model_config", "quantization_config", {"ignore": ["lm_head"]}),
        ("quantization", "model_config", "quantization_config", Quantization(linear="fp8")),
        ("quantization", "model_config", "quantization_config", Quantization(moe="fp8")),
        ("quantization", "model_config", "quantization_config", Quantization(ignore=["a"])),
        ("quantization", "model_config", "quantization_config", Quantization(targets={"a": "fp8"})),
        ("loading", "model_config", "model_class_overrides", {"LlamaForCausalLM": "mine:Llama"}),
        ("overrides", "model_config", "config_format", "mistral"),
        ("cache", "cache_config", "kv_cache_dtype_skip_layers", ["0"]),
        ("cache", "attention_config", "indexer_kv_dtype", "mxfp4"),
        ("adapters", "lora_config", "lora_dtype", "torch.float16"),
        ("adapters", "lora_config", "enable_tower_connector_lora", True),
        ("settings", "lora_config", "target_modules", ["o_proj"]),
        ("settings", "mamba_config", "enable_stochastic_rounding", True),
        ("settings", "model_config", "disable_sliding_window", True),
        ("settings", "", "additional_config", {"a": 1}),
        ("settings", "model_config.multimodal_config", "new_setting", True),
        ("draft", "speculative_config", "kv_cache_dtype", "fp8"),
        ("draft", "speculative_config", "parallel_drafting", True),
        ("draft", "speculative_config.draft_model_config", "quantization", "fp8"),
        ("draft", "speculative_config.draft_model_config", "quantization_config", Quantization(ignore=["a"])),
        ("draft", "speculative_config.draft_model_config", "model_class_overrides", {"A": "m:B"}),
        ("draft", "speculative_config.draft_model_config", "new_setting", 1),
        ("draft", "speculative_config.draft_model_config", "hf_text_config", SimpleNamespace(rope_theta=2.0)),
    ],
)
def test_a_setting_of_vllm_that_changes_kv_is_in_its_field_alone(
    expected: str, part: str, name: str, value: Any
) -> None:
    before = of_vllm(vllm())
    one = of_vllm(changed(vllm(), part, name, value))
    assert differences(before, one) == {expected}
    assert one == of_vllm(changed(vllm("another"), part, name, copy.deepcopy(value)))


def test_kernels_that_vllm_puts_among_additional_settings_leave_kv_as_it_is() -> None:
    def of(**given: Any) -> Identity:
        return of_vllm(changed(vllm(), "", "additional_config", given))

    kernels = {"gdn_prefill_backend": "triton", "kda_prefill_backend": "flashkda", "kda_decode_backend": "native"}
    assert of(**kernels) == of_vllm(vllm())
    assert of(**kernels, a=1) == of(a=1) != of_vllm(vllm())


def test_a_setting_that_holds_itself_is_named_by_the_engine() -> None:
    knot: dict[str, Any] = {}
    knot["itself"] = knot
    one, other = (of_vllm(changed(vllm(it), "", "additional_config", knot)) for it in ("one", "other"))
    assert differences(one, other) == {"settings"}


@pytest.mark.parametrize("part", VLLM_TABLES)
def test_a_setting_that_no_table_has_counts(part: str) -> None:
    ones = [of_vllm(changed(vllm(), part, "new_setting", value)) for value in (None, 1, 2)]
    expected = "draft" if part == "speculative_config" else "settings"
    assert ones[0] == of_vllm(vllm())
    assert differences(ones[0], ones[1]) == differences(ones[1], ones[2]) == {expected}


@pytest.mark.parametrize("part", VLLM_TABLES)
def test_no_setting_that_leaves_kv_as_it_is_is_in_a_name(part: str) -> None:
    before = of_vllm(vllm())
    for names in VLLM_TABLES[part].harmless.values():
        for name in names:
            assert of_vllm(changed(vllm(), part, name, "another")) == before, name


def test_engines_of_different_deployments_share_their_kv() -> None:
    prefill, decode = vllm("prefill"), vllm("decode")
    decode.parallel_config = SimpleNamespace(tensor_parallel_size=8, data_parallel_rpc_port=1)
    decode.scheduler_config = SimpleNamespace(max_num_seqs=4)
    decode.cache_config.num_gpu_blocks_override = 77
    decode.cache_config.gpu_memory_utilization = 0.5
    decode.model_config.served_model_name = "other"
    decode.model_config.enforce_eager = True
    decode.observability_config = SimpleNamespace(kv_cache_metrics=True)
    decode.compilation_config = SimpleNamespace(static_forward_context={})
    decode.kernel_config = SimpleNamespace(moe_backend="other")
    decode.attention_config.backend = "other"
    # vLLM sets it for consumers of KV.
    decode.model_config.multimodal_config.allow_missing_mm_embeddings = True
    assert of_vllm(prefill) == of_vllm(decode)


def test_a_new_setting_with_its_default_is_as_none() -> None:
    """Engines of versions with and without it hand over to each other."""

    @dataclass
    class Model:
        new_switch: bool = True
        new_list: list[int] = field(default_factory=lambda: [1])

    table = Table("it", frozenset(), {})
    assert Settings(Model(), table).others() == {}
    assert Settings(Model(new_switch=False, new_list=[2]), table).others() == {
        "it.new_switch": False,
        "it.new_list": [2],
    }


def test_functions_that_override_a_configuration_are_named_by_what_they_make_of_it() -> None:
    def overridden(engine_id: str, **to: Any) -> Identity:
        config = vllm(engine_id)
        config.model_config.hf_overrides = lambda it: it
        config.model_config.hf_config = Configuration(**to)
        return of_vllm(config)

    one, other = overridden("a", layers=2, _name_or_path="/x"), overridden("b", layers=2, _name_or_path="/y")
    assert one == other
    assert differences(one, overridden("a", layers=3)) == {"overrides"}
    assert differences(one, of_vllm(vllm())) == {"overrides"}


@pytest.mark.parametrize("overrides", [lambda it: it, {"rope_parameters": lambda it: it}])
def test_an_engine_whose_overrides_have_no_name_shares_with_no_other(overrides: Any) -> None:
    names = []
    for engine_id in ("a", "a", "b"):
        config = vllm(engine_id)
        config.model_config.hf_overrides, config.model_config.hf_config = overrides, None
        names.append(of_vllm(config))
    assert names[0] == names[1]
    assert differences(names[0], names[2]) == {"overrides"}


def test_layers_of_the_model_itself_as_drafts_count_only_with_another_number_format() -> None:
    def own(**settings: Any) -> Identity:
        config = vllm()
        config.speculative_config = SimpleNamespace(draft_model_config=config.model_config, **settings)
        return of_vllm(config)

    without = vllm()
    without.speculative_config = None
    assert own() == of_vllm(without)
    assert differences(own(), own(quantization="fp8")) == differences(own(), own(kv_cache_dtype="fp8")) == {"draft"}


def test_a_setting_that_a_table_does_not_name_cannot_be_read() -> None:
    with pytest.raises(KeyError, match="the table of model_config does not name new_setting"):
        Settings(vllm().model_config, _known_settings.VLLM_MODEL).get("new_setting")


def test_no_table_has_a_setting_twice() -> None:
    tables = [it for it in vars(_known_settings).values() if isinstance(it, Table)]
    assert len(tables) > len(VLLM_TABLES)
    for table in tables:
        found = [*table.named, *table.counted, *(name for names in table.harmless.values() for name in names)]
        assert len(found) == len(set(found)), [name for name in found if found.count(name) > 1]
        assert set(table.optional) <= table.named


# Other engines.


def sglang(**changes: Any) -> Identity:
    config = SimpleNamespace(model_name="no/where")
    arguments = SimpleNamespace(**{"model_path": "no/where", "dtype": "auto", "load_format": "auto", **changes})
    return sglang_identity.of_sglang(config, arguments, "named")


@pytest.mark.parametrize(
    ("expected", "name", "value"),
    [
        ("loading", "model_impl", "transformers"),
        ("loading", "quantize_and_serve", True),
        ("settings", "custom_weight_loader", ["mine.load"]),
        ("settings", "mamba_ssm_dtype", "float16"),
        ("settings", "qsa_indexer_dtype", "fp8"),
        ("settings", "new_setting", 1),
    ],
)
def test_a_setting_of_sglang_that_changes_kv_is_in_its_field_alone(expected: str, name: str, value: Any) -> None:
    assert differences(sglang(), sglang(**{name: value})) == {expected}


def test_settings_of_sglang_that_leave_kv_as_it_is_are_in_no_name() -> None:
    for names in _known_settings.SGLANG.harmless.values():
        for name in names:
            assert sglang(**{name: "another"}) == sglang(), name
    assert sglang(model_impl="auto", quantize_and_serve=False) == sglang()


def trtllm(quantization: dict[str, Any] | None = None, cache: dict[str, Any] | None = None, **args: Any) -> Identity:
    given = SimpleNamespace(
        model="no/where",
        dtype="auto",
        quant_config=SimpleNamespace(quant_algo="FP8", kv_cache_quant_algo=None, **(quantization or {})),
        kv_cache_config=SimpleNamespace(dtype="auto", **(cache or {})),
        **args,
    )
    return trtllm_identity.of_trtllm(given, "named")


@pytest.mark.parametrize(
    ("expected", "changes"),
    [
        *(
            ("quantization", {"quantization": {name: value}})
            for name, value in (("exclude_modules", ["lm_head"]), ("group_size", 64), ("new", 1))
        ),
        ("settings", {"cache": {"new": 1}}),
        ("settings", {"sparse_attention_config": {"algorithm": "rocket"}}),
        ("settings", {"attn_backend": "FLASHINFER"}),
        ("settings", {"new": 1}),
    ],
)
def test_a_setting_of_tensorrt_llm_that_changes_kv_is_in_its_field_alone(
    expected: str, changes: dict[str, Any]
) -> None:
    assert differences(trtllm(), trtllm(**changes)) == {expected}


def test_settings_of_tensorrt_llm_that_leave_kv_as_it_is_are_in_no_name() -> None:
    for names in _known_settings.TRTLLM.harmless.values():
        for name in names:
            assert trtllm(**{name: "another"}) == trtllm(), name
    for names in _known_settings.TRTLLM_CACHE.harmless.values():
        for name in names:
            assert trtllm(cache={name: "another"}) == trtllm(), name


# Values.


class Kind(enum.Enum):
    ONE = "one"


def test_values_have_the_same_name_in_all_processes() -> None:
    @dataclass
    class Of:
        a: Any
        b: int = 2

    assert plain({"a": {3, 1, 2}, "b": (1, Kind.ONE), "c": PurePath("x"), "d": Of({"e": None})}) == {
        "a": [1, 2, 3],
        "b": [1, "one"],
        "c": "x",
        "d": {"a": {"e": None}, "b": 2},
    }
    assert plain(Path) == "pathlib.Path"
    for unnamed in (lambda: 1, print, object(), {"a": [object()]}, type("Local", (), {"__qualname__": "<locals>.X"})):
        with pytest.raises(UnnamedError):
            plain(unnamed)


def test_fields_and_defaults_of_classes_of_settings_are_known() -> None:
    class Described:
        """As pydantic's description of a field."""

        def get_default(self, *, call_default_factory: bool) -> list[int]:
            assert call_default_factory
            return [7]

    class Model:
        model_fields = {"a": Described()}  # noqa: RUF012

    @dataclass
    class Data:
        a: int = 1
        b: list[int] = field(default_factory=list)
        c: Any = dataclasses.field(default=Described())

    class Factory:
        """As msgspec's."""

        factory = dict

    class Struct:
        __struct_fields__ = ("a", "b", "c")
        __struct_defaults__ = (5, Factory())

    def made(value: Any) -> dict[str, Any]:
        return {name: make() for name, make in fields_of(value).items()}

    assert made(Data()) == {"a": 1, "b": [], "c": [7]}
    assert made(Model()) == {"a": [7]}
    found = made(Struct())
    assert (list(found), found["b"], found["c"]) == (["a", "b", "c"], 5, {})
    assert fields_of(None) == {}
