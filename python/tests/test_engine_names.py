"""Names of an engine that an adapter needs: what is gone is an error, at start."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from kvferry._engine_names import EngineError, attributes, check, missing_hooks, missing_names

LOGGER = logging.getLogger("engine")


class Base:
    def __init__(self) -> None:
        self._private = 1

    def on_request(self, request: Any, computed: int) -> None: ...

    def on_step(self, **more: Any) -> None: ...

    @classmethod
    def needs(cls, config: Any) -> None: ...


class Adapter(Base):
    def on_request(self, request: Any, computed: int) -> None: ...

    def on_step(self, forward: Any = None, **more: Any) -> None: ...

    @classmethod
    def needs(cls, config: Any) -> None: ...

    def own(self) -> None: ...

    def _helper(self) -> None: ...


@dataclass
class Step:
    tokens: dict[str, int]
    ends: int = 0


def test_all_hooks_of_an_engine_that_has_them_fit() -> None:
    assert missing_hooks(Adapter, [Base], ["own"]) == []


@pytest.mark.parametrize("name", ["on_request", "on_step", "needs"])
def test_a_hook_that_the_engine_has_renamed_is_named(name: str) -> None:
    kept = {key: value for key, value in vars(Base).items() if key != name and not key.startswith("__")}
    renamed = type("Base", (), kept)
    assert missing_hooks(Adapter, [renamed], ["own"]) == [f"Base.{name}"]


def test_a_hook_that_older_engines_lack_may_be_gone_and_must_fit_where_it_is() -> None:
    class Older:
        def needs(self, config: Any, more: Any) -> None: ...

    assert missing_hooks(Adapter, [Older], ["own"], ["on_request", "on_step", "needs"]) == ["Older.needs(more)"]


def test_a_hook_that_the_engine_calls_with_other_parameters_is_named() -> None:
    class More(Base):
        def on_request(self, request: Any, computed: int, kind: str) -> None: ...

    class Fewer(Base):
        def on_request(self, request: Any) -> None: ...  # type: ignore[override]

    assert missing_hooks(Adapter, [More], ["own"]) == ["More.on_request(kind)"]
    assert missing_hooks(Adapter, [Fewer], ["own"]) == ["Fewer.on_request(computed)"]


def test_what_instances_have_is_known_from_the_class() -> None:
    assert {"_private", "on_step"} <= attributes(Base)
    assert {"tokens", "ends"} <= attributes(Step)


def test_a_name_that_is_read_and_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("engine.core")
    vars(module).update(Base=Base, Step=Step)
    monkeypatch.setitem(sys.modules, "engine.core", module)
    names = ("Base._private", "Base.on_step", "Step.tokens", "Base._other", "Gone", "Step.gone")
    assert missing_names("engine.core", *names) == [
        "engine.core.Base._other",
        "engine.core.Gone",
        "engine.core.Step.gone",
    ]
    assert missing_names("engine.none", "Base") == ["engine.none.Base"]


def test_what_is_gone_is_an_error_that_names_it_and_the_tried_versions(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(
        EngineError, match=r"does not fit Engine 0\.33\.1, which lacks a\.b, c\.d; it was tried with 0\.32"
    ):
        check("Engine", "0.33.1", ["0.32"], ["c.d", "a.b"], LOGGER)
    for version, warns in (
        ("0.32.0", False),
        ("0.32", False),
        ("0.32.1+cpu", False),
        ("0.320.0", True),
        ("0.33", True),
    ):
        caplog.clear()
        check("Engine", version, ["0.32"], [], LOGGER)
        told = f"kvferry was not tried with Engine {version}: all names that it needs exist; it was tried with 0.32"
        assert [it.getMessage() for it in caplog.records] == ([told] if warns else [])


def test_what_kvferry_reads_of_vllm_is_looked_up_name_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine without a name that is read lacks exactly this name."""
    from kvferry.vllm import _of_vllm

    tables = (_of_vllm._READ, _of_vllm._READ_BY_SPEC, _of_vllm._READ_OF_CONTEXT)
    for table in tables:
        wanted = [(module, name) for module, names in table.items() for name in names]
        for gone in [None, *wanted]:
            for module, names in table.items():
                classes: dict[str, Any] = {}
                for name in names:
                    if (module, name) != gone:
                        first, _, attribute = name.partition(".")
                        vars(classes.setdefault(first, SimpleNamespace()))[attribute or "it"] = 1
                made = ModuleType(module)
                vars(made).update(classes)
                monkeypatch.setitem(sys.modules, module, made)
            assert _of_vllm._missing(table) == ([] if gone is None else [".".join(gone)])


def test_a_hook_that_tensorrt_llm_has_renamed_is_named() -> None:
    from kvferry.trtllm import KVFerryConnectorScheduler, KVFerryConnectorWorker, _of_trtllm

    def base(cls: type, *gone: str) -> type:
        return type("Base", (), {name: it for name, it in vars(cls).items() if name[0] != "_" and name not in gone})

    scheduler, worker = base(KVFerryConnectorScheduler), base(KVFerryConnectorWorker)
    assert _of_trtllm.missing(scheduler, worker) == []
    for name in sorted(_of_trtllm.NEEDED):
        lacking = base(KVFerryConnectorScheduler, name), base(KVFerryConnectorWorker, name)
        assert _of_trtllm.missing(*lacking) == [f"Base.{name}"]
    # Of older versions.
    lacking = base(KVFerryConnectorScheduler, "cancel_load"), base(KVFerryConnectorWorker, "register_kv_cache_layout")
    assert _of_trtllm.missing(*lacking) == []
