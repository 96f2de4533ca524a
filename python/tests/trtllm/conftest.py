"""Engines with the connector: by the restated manager and by TensorRT-LLM's own, with plain memory and with torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit import PATIENCE
from trtllm_kit import HAS_TORCH, SOURCE, Bench, Puts, Served, fake_modules, upstream
from trtllm_reference import Manager, Shape


@pytest.fixture(autouse=True)
def _settings_of_trtllm_come_from_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("TLLM_KVFERRY_"):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _a_stall_of_the_machine_ends_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_SILENCE_MS", str(int(PATIENCE * 1000)))


@pytest.fixture(params=["restated", "upstream"] if SOURCE else ["restated"])
def manager_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["buffer", "torch"] if HAS_TORCH else ["buffer"])
def tensor_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def bench(manager_kind: str, tensor_kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Bench]:
    fake_modules(monkeypatch)
    if manager_kind == "restated":
        made = Bench(monkeypatch, tmp_path / "kv", Manager, tensor_kind)
        yield made
        made.close()
        return
    with upstream(monkeypatch) as module:
        made = Bench(monkeypatch, tmp_path / "kv", module.KvCacheConnectorManager, tensor_kind)
        yield made
        made.close()


@pytest.fixture
def served(bench: Bench) -> Served:
    return bench.rank(Shape())


@pytest.fixture
def puts(served: Served) -> Iterator[Puts]:
    made = Puts(served.worker)
    yield made
    made.end()
