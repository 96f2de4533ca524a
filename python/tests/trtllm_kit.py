"""Helpers of the tests of `kvferry.trtllm`: engines of TensorRT-LLM's manner, and its own manager where its source is at hand."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from kit import PATIENCE
from kvferry.trtllm._meta import Step
from trtllm_reference import Cache, Engine, HostTensor, Ranks, Request, Shape, State, here
from trtllm_reference.cache import torch_tensor

# Before the fixture of all tests removes it.
SOURCE = os.environ.get("KVFERRY_TRTLLM_SRC")
HAS_TORCH = importlib.util.find_spec("torch") is not None
BLOCK = 8
_CONNECTOR = "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector"


def args(rank: int = 0, tp: int = 1, **changes: Any) -> Any:
    """As `TorchLlmArgs`."""
    mapping = SimpleNamespace(rank=rank, tp_rank=rank, tp_size=tp, pp_size=1, cp_size=1, world_size=tp)
    made = SimpleNamespace(
        model="tiny",
        revision="1",
        # There are no weights.
        load_format="dummy",
        dtype="float16",
        max_beam_width=1,
        speculative_config=None,
        enable_attention_dp=False,
        kv_cache_config=SimpleNamespace(tokens_per_block=BLOCK, dtype="auto", host_cache_size=0),
        scheduler_config=SimpleNamespace(capacity_scheduler_policy=SimpleNamespace(name="GUARANTEED_NO_EVICT")),
        kv_connector_config=SimpleNamespace(connector_module="kvferry.trtllm"),
        parallel_config=SimpleNamespace(to_mapping=lambda: mapping),
    )
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(seed * 7919 + at * 31) % 50_000 for at in range(length)]


class GroupedCache(Cache):
    """A cache that TensorRT-LLM's manager takes for one of its second generation."""


def _utilities() -> ModuleType:
    module = ModuleType("tensorrt_llm._utils")
    made: Any = module
    made.mpi_rank = lambda: here.rank
    made.mpi_allgather = here.gather
    made.mpi_broadcast = lambda value, root=0: pickle.loads(pickle.dumps(here.broadcast(value, root)))
    return module


def fake_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """What of TensorRT-LLM its connector manager imports."""

    def module(name: str, **names: Any) -> None:
        made = ModuleType(name)
        made.__path__ = []  # type: ignore[attr-defined]
        for key, value in names.items():
            setattr(made, key, value)
        monkeypatch.setitem(sys.modules, name, made)

    for name in ("tensorrt_llm", "tensorrt_llm._torch", "tensorrt_llm._torch.pyexecutor", "tensorrt_llm.llmapi"):
        module(name)
    internal = "tensorrt_llm.bindings.internal"
    pyexecutor = "tensorrt_llm._torch.pyexecutor"
    monkeypatch.setitem(sys.modules, "tensorrt_llm._utils", _utilities())
    if SOURCE is None:
        return
    module("tensorrt_llm.bindings", LlmRequestState=State)
    module(internal)
    module(f"{internal}.batch_manager", KvCacheConnectorManager=type("Base", (), {}), LlmRequest=Request)
    module("tensorrt_llm.llmapi.llm_args", TorchLlmArgs=object)
    quiet = SimpleNamespace(warning=lambda *_, **__: None, warning_once=lambda *_, **__: None)
    module("tensorrt_llm.logger", logger=quiet)
    module(f"{pyexecutor}.llm_request", get_draft_token_length=lambda request: len(request.py_draft_tokens))
    module(f"{pyexecutor}.scheduler", ScheduledRequests=object)
    module(f"{pyexecutor}.kv_cache")
    module(f"{pyexecutor}.kv_cache.kv_cache_manager_v2", KVCacheManagerV2=GroupedCache)
    module(f"{pyexecutor}.connectors")
    if "torch" not in sys.modules:
        try:
            importlib.import_module("torch")
        except ImportError:
            stream = SimpleNamespace(Stream=object, current_stream=lambda: None)
            module("torch", cuda=stream, Tensor=object)


def _made_anew() -> list[str]:
    """Modules of the connector, but for those whose classes the tests have imported."""
    names = [it for it in sys.modules if it == "kvferry.trtllm" or it.startswith("kvferry.trtllm.")]
    return [it for it in names if not it.endswith("._meta")]


@contextmanager
def upstream(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """TensorRT-LLM's own connector module, and kvferry's classes made anew, as subclasses of its classes."""
    path = Path(SOURCE or "", *_CONNECTOR.split(".")).with_suffix(".py")
    if not path.is_file():
        pytest.fail(f"KVFERRY_TRTLLM_SRC must be a folder that has tensorrt_llm/: {path} is not there")
    spec = importlib.util.spec_from_file_location(_CONNECTOR, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, _CONNECTOR, module)
    spec.loader.exec_module(module)
    torch: Any = module.__dict__["torch"]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    mine = {name: sys.modules.pop(name) for name in _made_anew()}
    try:
        yield module
    finally:
        for name in _made_anew():
            del sys.modules[name]
        sys.modules.update(mine)
        sys.modules["kvferry"].trtllm = sys.modules["kvferry.trtllm"]  # type: ignore[attr-defined]


class Bench:
    """Makes engines with the connector, over one store."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path, manager: type[Any], tensor: str) -> None:
        self.monkeypatch = monkeypatch
        self.directory = directory
        self.manager = manager
        self.make_tensor: Callable[..., Any] = HostTensor if tensor == "buffer" else torch_tensor
        # The default of 1 GiB of staging memory is allocated for each engine of several ranks.
        self.settings(disk=str(directory), disk_gib=0.0625, staging_gib=1 / 64, load_wait=PATIENCE)
        self._open: list[Any] = []

    def settings(self, **settings: Any) -> None:
        for name, value in settings.items():
            self.monkeypatch.setenv("TLLM_KVFERRY_" + name.upper(), str(value))

    def rank(self, shape: Shape, rank: int = 0, tp: int = 1, **changes: Any) -> Served:
        """One rank, in this thread; with several ranks, each in its own."""
        module = importlib.import_module("kvferry.trtllm")
        arguments = args(rank, tp, **changes)
        is_own = rank == 0 or getattr(arguments, "enable_attention_dp", False)
        worker = module.KVFerryConnectorWorker(arguments)
        self._open.append(worker)
        scheduler = module.KVFerryConnectorScheduler(arguments) if is_own else None
        grouped = len(shape.groups) > 1
        self._skip_what_it_lacks(grouped=grouped, arguments=arguments)
        cache = (GroupedCache if grouped else Cache)(shape, self.make_tensor)
        if grouped:
            worker.register_kv_cache_layout(cache.layout())
        else:
            worker.register_kv_caches(cache.tensors[0])
        options = {"enable_attention_dp": True} if getattr(arguments, "enable_attention_dp", False) else {}
        manager = self.manager(worker, scheduler, **options)
        return Served(worker, scheduler, Engine(cache, manager, rank=rank))

    def _skip_what_it_lacks(self, *, grouped: bool, arguments: Any) -> None:
        """TensorRT-LLM's earlier versions."""
        if not self.manager.__module__.startswith("tensorrt_llm"):
            return
        if grouped and not hasattr(
            sys.modules[_CONNECTOR].KvCacheConnectorScheduler, "request_finished_by_layer_group"
        ):
            pytest.skip("SKIPPED: this version of TensorRT-LLM has no groups of layers")
        parameters = inspect.signature(self.manager).parameters
        if getattr(arguments, "enable_attention_dp", False) and "enable_attention_dp" not in parameters:
            pytest.skip("SKIPPED: this version of TensorRT-LLM's connectors has no attention data parallelism")

    def serve(
        self, requests: Callable[[], Sequence[Request]], *, tp: int = 1, shape: Shape | None = None, **changes: Any
    ) -> list[Request]:
        """An engine from its start to its end. Returns rank 0's requests."""
        shape = shape or Shape()

        def body(rank: int) -> list[Request]:
            served = self.rank(shape, rank, tp, **changes)
            ended = served.engine.run(requests())
            served.worker.shutdown()
            return ended

        return Ranks(tp).run(body)[0]

    def close(self) -> None:
        for worker in self._open:
            worker.shutdown()


class Served:
    def __init__(self, worker: Any, scheduler: Any, engine: Engine) -> None:
        self.worker, self.scheduler, self.engine = worker, scheduler, engine


def reference(requests: Sequence[Request], *, tp: int = 1, shape: Shape | None = None) -> list[list[int]]:
    """What an engine without a connector generates."""

    def body(rank: int) -> list[list[int]]:
        copies = [Request(it.request_id, list(it.tokens), it.max_new_tokens, chunk=it.chunk) for it in requests]
        return [it.generated for it in Engine(Cache(shape or Shape()), None, rank=rank).run(copies)]

    return Ranks(tp).run(body)[0]


def stored(bench: Bench, length: int = 41) -> None:
    bench.serve(lambda: [Request(1, prompt(length))])


class Gate:
    """Holds what runs in the background until it is opened."""

    def __init__(self, worker: Any) -> None:
        self._open = threading.Event()
        copy = worker._copy_behind

        def behind(*arguments: Any) -> None:
            assert self._open.wait(60)
            copy(*arguments)

        worker._copy_behind = behind

    def open(self) -> None:
        self._open.set()


class Put:
    """A put that ends when the test says so."""

    def __init__(self) -> None:
        self.is_done = False

    def done(self) -> bool:
        return self.is_done

    def wait(self, timeout: float | None = None) -> Any:
        return SimpleNamespace(stored=1, present=0, refused=0, refused_waiting=0, failed=0)


class Puts:
    """Takes the puts of a worker, as its spaces do, and ends none."""

    def __init__(self, worker: Any) -> None:
        worker._spaces = dict.fromkeys(worker._spaces, self)
        self.made: list[Put] = []
        self.calls: list[tuple[list[bytes], int, int]] = []

    def put_async(self, hashes: list[bytes], memory: Any, first: int, *, priority: int, wait: float) -> Put:
        assert wait > 0
        self.calls.append((hashes, first, priority))
        self.made.append(Put())
        return self.made[-1]

    def end(self) -> None:
        for it in self.made:
            it.is_done = True


def data(request_id: int, position: int, count: int, pages: list[int], **fields: Any) -> Any:
    """`RequestData` of the first version."""
    return SimpleNamespace(
        request_id=request_id,
        new_tokens=[],
        new_block_ids=pages,
        computed_position=position,
        num_scheduled_tokens=count,
        **fields,
    )


def output(new: list[Any] | None = None, cached: list[Any] | None = None) -> Any:
    return SimpleNamespace(new_requests=new or [], cached_requests=cached or [])


def saved(step: Step) -> list[tuple[int, ...]]:
    return [it.pages for it in step.saves]
