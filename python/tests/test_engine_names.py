"""Names of an engine that an adapter needs: what is gone is an error, at start."""

from __future__ import annotations

import ast
import importlib
import inspect
import logging
import os
import re
import socket
import struct
import sys
import threading
from collections import Counter, OrderedDict
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any

import kvferry
import pytest
from kvferry._engine.hooks import (
    EngineError,
    attributes,
    check,
    missing_hooks,
    missing_in,
    missing_names,
    missing_parameters,
)

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


def test_the_file_of_a_class_is_read_once_however_many_of_its_names_are_looked_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Wide:
        def __init__(self) -> None:
            self.a = self.b = self.c = 0

    module, read = ModuleType("engine.wide"), Counter[type]()
    vars(module).update(Wide=Wide)
    monkeypatch.setitem(sys.modules, "engine.wide", module)
    source = inspect.getsource
    monkeypatch.setattr(inspect, "getsource", lambda it: (read.update([it]), source(it))[1])
    for _ in range(2):
        assert missing_names("engine.wide", "Wide.a", "Wide.b", "Wide.c", "Wide.d") == ["engine.wide.Wide.d"]
    assert read == {Wide: 1}


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


VLLM_TABLES = (
    "_READ_BY_IDENTITY",
    "_READ_OF_LAYERS",
    "_READ_OF_SPECS",
    "_READ_BY_CONNECTOR",
    "_READ_BY_STORES",
    "_READ_BY_SPEC",
    "_READ_BY_TIER",
)
PACKAGE = Path(kvferry.__file__).parent
NAMES = PACKAGE / "_engine/identity"
# What kvferry's files for vLLM read of other libraries: torch, numpy, Prometheus, weakref, Python's own objects.
LIBRARIES = {
    "astype",
    "client_address",
    "cuda",
    "current_stream",
    "dim",
    "element_size",
    "from_buffer",
    "hip",
    "hostname",
    "inc",
    "ipv4_mapped",
    "labels",
    "max_prefixlen",
    "ref",
    "reshape",
    "scheme",
    "set_gauge",
    "type",
    "untyped_storage",
    "wfile",
    "warning_once",
    "WeakKeyDictionary",
    "callback",
    "co_name",
    "f_back",
    "f_locals",
    "heappop",
    "heappush",
    "hexdigest",
    "put_nowait",
    "wraps",
    "__dataclass_fields__",
    "__func__",
    "_counter_cls",
    "_gauge_cls",
    "_histogram_cls",
    "per_engine_labelvalues",
    "cpu",
    "backends",
    "get_cpu_capability",
    "_is_amx_tile_supported",
    "detach",
    "numpy",
    "uint8",
    "try_to_load_from_cache",
    "to_dict",
    "get_default",
    "__struct_defaults__",
    "__struct_fields__",
    "model_fields",
    "default_factory",
    "install",
}
# Of the model's configuration, which is transformers': each model has other names.
MODELS = {
    "max_position_embeddings",
    "original_max_position_embeddings",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
}


def tables() -> list[Any]:
    from kvferry.vllm import _of_vllm

    return [getattr(_of_vllm, name) for name in VLLM_TABLES]


def test_what_kvferry_looks_up_of_vllm_is_looked_up_name_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine without a name that is read lacks exactly this name."""
    for table in tables():
        wanted = [(module, name) for module, names in table.items() for name in names]
        assert len(wanted) == len(set(wanted))
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
            missing = missing_in(table)
            assert missing == ([] if gone is None else [".".join(gone)]) or _is_class(gone, wanted)


def _is_class(gone: tuple[str, str] | None, wanted: list[tuple[str, str]]) -> bool:
    """Whether other names of the table have this class, which then exists."""
    return gone is not None and any(it[0] == gone[0] and it[1].startswith(f"{gone[1]}.") for it in wanted)


class Read:
    """What a file reads by name: attributes, and names in `getattr`."""

    def __init__(self, path: Path) -> None:
        self.tree = ast.parse(path.read_text())

    def names(self) -> set[str]:
        found = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                found.add(node.attr)
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
                found |= {it.value for it in node.args[1:2] if isinstance(it, ast.Constant)}
        return found

    def classes(self) -> set[str]:
        """Classes of the engine that are told by their names."""
        texts = {node.value for node in ast.walk(self.tree) if isinstance(node, ast.Constant)}
        return {it for it in texts if isinstance(it, str) and re.fullmatch("[A-Z][A-Za-z]+(Spec|Proc|Scheduler)", it)}

    def defined(self) -> set[str]:
        found: set[str] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.AnnAssign | ast.Assign):
                targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
                names = [it for target in targets for it in ast.walk(target)]
                found |= {it.id for it in names if isinstance(it, ast.Name)}
                found |= {it.attr for it in names if isinstance(it, ast.Attribute) and _is_self(it.value)}
            elif isinstance(node, ast.Import | ast.ImportFrom):
                found |= {(it.asname or it.name).split(".")[0] for it in node.names}
        return found


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _of_python() -> set[str]:
    kinds = (str, bytes, bytearray, memoryview, dict, list, set, tuple, int, float, type, Counter, OrderedDict, Path)
    more = (threading.Event, threading.Thread, logging.Logger, Exception, OSError, re.Match, os.stat_result, FrameType)
    servers = (BaseHTTPRequestHandler, ThreadingHTTPServer, HTTPConnection, HTTPResponse, socket.socket, struct.Struct)
    found = {name for kind in (*kinds, *more, *servers) for name in dir(kind)}
    modules = """os sys time json hashlib logging math threading importlib platform gc secrets re tempfile stat ctypes
    importlib.metadata importlib.util socket hmac http http.client io ipaddress struct contextlib inspect functools weakref"""
    return found.union(*(dir(importlib.import_module(it)) for it in modules.split()))


def test_every_name_that_the_adapters_of_vllm_read_is_looked_up() -> None:
    """By names: one that neither kvferry, Python nor a library has is vLLM's, and is in a table."""
    read_by = [*sorted((PACKAGE / "vllm").glob("*.py")), NAMES / "vllm.py", NAMES / "adapters.py"]
    own = set().union(*(Read(it).defined() for it in PACKAGE.rglob("*.py*") if it.suffix in (".py", ".pyi")))
    looked_up = {part for table in tables() for names in table.values() for name in names for part in name.split(".")}
    others = own | _of_python() | LIBRARIES | MODELS
    for path in read_by:
        gap = Read(path).names() - others - looked_up
        assert not gap, f"{path.name} reads {sorted(gap)} of vLLM: kvferry/vllm/_of_vllm.py does not look it up"
        gap = Read(path).classes() - looked_up - own
        assert not gap, f"{path.name} knows {sorted(gap)} of vLLM: kvferry/vllm/_of_vllm.py does not look it up"


def test_what_the_walk_over_the_adapters_finds() -> None:
    class Given(Read):
        def __init__(self, text: str) -> None:
            self.tree = ast.parse(text)

    it = Given(
        "def f(request):\n    self.own = request.new_name + getattr(request, 'other', 0)\n    'NewSpec' in names"
    )
    assert it.names() - it.defined() == {"new_name", "other"}
    assert it.classes() == {"NewSpec"}
    assert {"f", "own"} <= it.defined()


def test_settings_are_read_through_their_tables_alone() -> None:
    """`of_vllm` has no other way to a setting than `Settings.get`, which knows the names that are looked up."""
    from kvferry.vllm import _of_vllm

    read = {
        node.args[0].value
        for node in ast.walk(Read(NAMES / "vllm.py").tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "get"
        and node.args
        and isinstance(node.args[0], ast.Constant)
    }
    looked_up = {it.partition(".")[2] for names in _of_vllm._READ_BY_IDENTITY.values() for it in names}
    named = {name for classes in _of_vllm._SETTINGS.values() for table in classes.values() for name in table.named}
    assert named <= looked_up | set(_of_vllm.OPTIONAL)
    assert len(read & named) > 30


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


def test_arguments_of_tensorrt_llm_that_are_gone_are_named() -> None:
    from kvferry.trtllm import _of_trtllm

    def arguments(gone: str = "") -> Any:
        made = {}
        for part, names in _of_trtllm._READ_OF_ARGUMENTS.items():
            kept = [name for name in names if ".".join(filter(None, ("llm_args", part, name))) != gone]
            made[part] = SimpleNamespace(**dict.fromkeys(kept))
        for part in ("kv_cache_config", "quant_config"):
            if gone != f"llm_args.{part}":
                setattr(made[""], part, made[part])
        return made[""]

    assert _of_trtllm.missing_settings(arguments()) == []
    for part, names in _of_trtllm._READ_OF_ARGUMENTS.items():
        for name in names:
            gone = ".".join(filter(None, ("llm_args", part, name)))
            assert _of_trtllm.missing_settings(arguments(gone)) == [gone]


def test_every_name_that_the_adapter_of_tensorrt_llm_reads_is_looked_up() -> None:
    from kvferry.trtllm import _of_trtllm

    own = set().union(*(Read(it).defined() for it in PACKAGE.rglob("*.py*") if it.suffix in (".py", ".pyi")))
    tables = (_of_trtllm._READ, _of_trtllm._READ_OF_REQUESTS, *_of_trtllm._READ_OF_RANKS.values())
    layouts = (_of_trtllm._READ_OF_LAYOUT, _of_trtllm._READ_OF_GROUP, _of_trtllm._READ_OF_REGION)
    looked_up = {part for names in (*tables, *layouts) for name in names for part in name.split(".")}
    looked_up |= {name for names in _of_trtllm._READ_OF_ARGUMENTS.values() for name in names}
    looked_up |= {*_of_trtllm._READ_OF_ARGUMENTS, *_of_trtllm.NEEDED, *_of_trtllm.OPTIONAL}
    # The classes of the hooks: without them kvferry has stand-ins, and nothing of TensorRT-LLM is loaded.
    looked_up |= {"KvCacheConnectorScheduler", "KvCacheConnectorWorker"}
    contextlib_names = {"pop_all"}
    for path in sorted((PACKAGE / "trtllm").glob("*.py")):
        gap = Read(path).names() - own - _of_python() - LIBRARIES - looked_up - contextlib_names
        assert not gap, f"{path.name} reads {sorted(gap)} of TensorRT-LLM: _of_trtllm.py does not look it up"


def test_a_layout_of_a_cache_that_lacks_a_name_is_refused_and_the_name_is_told() -> None:
    from kvferry.trtllm import _of_trtllm

    def layout(gone: str = "") -> Any:
        def made(part: str, names: tuple[str, ...], **values: Any) -> SimpleNamespace:
            kept = [name for name in names if ".".join(filter(None, ("layout", part, name))) != gone]
            return SimpleNamespace(**{name: values.get(name) for name in kept})

        region = made("regions", _of_trtllm._READ_OF_REGION)
        group = made("groups", _of_trtllm._READ_OF_GROUP, regions=[region])
        return made("", _of_trtllm._READ_OF_LAYOUT, groups=[group])

    assert _of_trtllm.missing_of_layout(layout()) == []
    regions = [f"layout.regions.{name}" for name in _of_trtllm._READ_OF_REGION]
    groups = [f"layout.groups.{name}" for name in _of_trtllm._READ_OF_GROUP]
    for gone in (*(f"layout.{name}" for name in _of_trtllm._READ_OF_LAYOUT), *groups, *regions):
        assert _of_trtllm.missing_of_layout(layout(gone)) == [gone]
        with pytest.raises(EngineError, match=f"which lacks {gone};"):
            _of_trtllm.check_layout(layout(gone))
    whole = layout()
    whole.groups[0].replicated_regions = [SimpleNamespace()]
    assert _of_trtllm.missing_of_layout(whole) == regions
    whole.groups = []
    assert _of_trtllm.missing_of_layout(whole) == ["layout.groups[0]"]


def test_a_parameter_that_is_read_in_a_callers_frame_and_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("engine.core")
    vars(module).update(Base=Base)
    monkeypatch.setitem(sys.modules, "engine.core", module)
    assert missing_parameters({"engine.core": {"Base.on_request": "request"}}) == []
    assert missing_parameters({"engine.core": {"Base.on_request": "req"}}) == ["engine.core.Base.on_request(req)"]
    assert missing_parameters({"engine.core": {"Base.gone": "request"}}) == ["engine.core.Base.gone"]


# SGLang.


def test_every_name_that_the_storage_of_sglang_reads_is_looked_up() -> None:
    from kvferry.sglang import _of_sglang
    from kvferry.sglang._identity import _GEOMETRY

    own = set().union(*(Read(it).defined() for it in PACKAGE.rglob("*.py*") if it.suffix in (".py", ".pyi")))
    read = (_of_sglang._READ, _of_sglang._READ_OF_POOLS)
    looked_up = {part for table in read for names in table.values() for name in names for part in name.split(".")}
    looked_up |= set(_of_sglang.OPTIONAL)
    torch = {"arange", "cat", "copy_", "tolist"}
    for path in sorted((PACKAGE / "sglang").glob("*.py")):
        gap = Read(path).names() - own - _of_python() - LIBRARIES - looked_up - torch
        assert not gap, f"{path.name} reads {sorted(gap)} of SGLang: kvferry/sglang/_of_sglang.py does not look it up"
    assert not set(_GEOMETRY) - looked_up


def test_sglangs_function_for_the_servers_arguments_must_be_where_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvferry.sglang import _identity, _of_sglang

    context = ModuleType("sglang.srt.runtime_context")
    for name, made in (("sglang", ModuleType("sglang")), ("sglang.srt", ModuleType("sglang.srt"))):
        monkeypatch.setitem(sys.modules, name, made)
    monkeypatch.setitem(sys.modules, context.__name__, context)
    with pytest.raises(AttributeError, match="get_server_args"):
        _identity.server_arguments()
    assert f"{context.__name__}.get_server_args" in _of_sglang.missing()

    def none_yet() -> Any:
        raise ValueError("Global server args is not set yet!")

    vars(context)["get_server_args"] = none_yet
    assert _identity.server_arguments() is None
    vars(context)["get_server_args"] = lambda: "given"
    assert _identity.server_arguments() == "given"
    assert f"{context.__name__}.get_server_args" not in _of_sglang.missing()
    monkeypatch.setitem(sys.modules, context.__name__, None)
    with pytest.raises(ImportError):
        _identity.server_arguments()
